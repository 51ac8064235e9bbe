"""Two nodes that share a file system whose mounts remember names and attributes for some seconds, as those of clusters do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Ledger
from tests.distributed.kill_trials import CONFIG
from tests.distributed.whole_runs import make_workplace

REMEMBERED_S = 5
WORDS = ("resources.workers_per_node=2", "train.record_samples=true")
SLOW = "recipe.args.load_s=0.1"
"""Some 50 s: the first node trains on while the second one starts."""
NODE = """
set -e
hostname "$1"
"$0" -m tests.distributed.remembering_fs "$2" "$3" "$4" &
until mountpoint -q "$3"; do sleep 0.1; kill -0 $!; done
cd "$3"
shift 4
exec "$0" -m ddp_hpc submit trial.yaml name=shared --wait "$@"
"""
"""What a node does, in namespaces of its own: it mounts the file system, and trains there."""
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def _can_mount() -> None:
    try:
        import fuse  # noqa: F401  it needs libfuse2
    except (ImportError, OSError) as error:
        pytest.skip(f"no file system can be made here: {error}")
    enters = subprocess.run(["unshare", "--mount", "--uts", "--pid", "--fork", "true"], check=False)
    if enters.returncode or not Path("/dev/fuse").exists() or shutil.which("mountpoint") is None:
        pytest.skip("no file system can be mounted here, in namespaces of its own")


@contextmanager
def node(name: str, source: Path, mount_point: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a node; all of it ends with it."""
    namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [
        *namespaces,
        "bash",
        "-c",
        NODE,
        sys.executable,
        name,
        source,
        mount_point,
        str(REMEMBERED_S),
        *WORDS,
        *words,
    ]
    process = subprocess.Popen([*map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_an_attempt_on_another_node_fences_the_first_though_both_remember_what_they_saw(tmp_path: Path) -> None:
    place, mount_point = make_workplace(tmp_path / "source", CONFIG), tmp_path / "mounted"
    mount_point.mkdir()
    run = place.run("shared")
    with node("first", place.path, mount_point, SLOW) as first:
        until(lambda: run.path.exists() and len(committed_steps(run)) >= 2)
        with node("second", place.path, mount_point) as second:
            said = [one.communicate(timeout=PATIENCE_S)[0] for one in (second, first)]

    fenced, last = Ledger.read(run).attempts
    assert (second.returncode, last.ending, last.host) == (0, "finished", "second"), said
    assert (fenced.host, fenced.ending, last.first_step > 0) == ("first", "fenced", True), said
    assert place.digest("shared") == place.finish("undisturbed", *WORDS)
    assert place.samples("shared") == place.samples("undisturbed")
