"""Scripts that attach to their run in ways that the authors did not have in mind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc import attach
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.processes import STOP_SIGNALS
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.train.attached import run as attached_run
from tests.distributed.test_scripts import ENVIRON, Place

SPAWNS_ITS_RANKS = """
import os, signal
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_hpc import attach

def work(rank):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
    run = attach()
    assert run.latest() is None
    for step in range(1, 1_000_000):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if run.should_stop(step):
            break
    folder = run.checkpoint_dir / "step-5.tmp"
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}").write_text(str(step))
    run.commit(folder)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""

HAS_A_MANIFEST_OF_ITS_OWN = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_hpc import attach
from ddp_hpc.base.errors import DdpHpcError

def work(rank):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
    run = attach()
    try:
        run.commit("mine", step=1, keeps_folder=True)
    except DdpHpcError as error:
        with open(f"error-{rank}", "w") as file:
            file.write(f"{type(error).__name__}: {error}")
    assert run.latest() is None
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


LEAVES_ITS_GROUP = """
import os, subprocess
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_hpc import attach

def work(rank):
    run = attach()
    for name in ("first", "second"):
        dist.init_process_group("gloo", init_method="file://" + os.path.abspath(name), rank=rank, world_size=2)
        assert run.latest() is None
        dist.destroy_process_group()
        left = subprocess.run(f"cat /proc/{os.getpid()}/task/*/comm", shell=True, capture_output=True, text=True).stdout
        assert "python" in left and "gloo" not in left, left

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attached_run, "_pid_and_run", None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").write_text(folder.name)
    return folder


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as a plain Python does."""
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=ENVIRON,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.long
def test_ranks_that_the_script_spawns_itself_without_any_variable_agree(tmp_path: Path) -> None:
    done = run_script(SPAWNS_ITS_RANKS, tmp_path)

    assert done.returncode == 0, done.stderr
    steps = {path.read_text() for path in (tmp_path / "checkpoints" / "step-00000005").glob("rank-*")}
    assert len(steps) == 1


@pytest.mark.long
def test_all_ranks_hear_that_a_manifest_of_the_scripts_own_is_refused(tmp_path: Path) -> None:
    (write(tmp_path / "mine") / "manifest.json").write_text('["shard-0"]')

    done = run_script(HAS_A_MANIFEST_OF_ITS_OWN, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "ConfigError: `commit` was asked to commit" in (tmp_path / "error-0").read_text()
    assert "CheckpointError: The checkpoint of step 1 was not committed" in (tmp_path / "error-1").read_text()
    assert (tmp_path / "mine" / "manifest.json").read_text() == '["shard-0"]'


@pytest.mark.long
def test_a_script_that_leaves_its_process_group_has_none_of_the_groups_threads_left(tmp_path: Path) -> None:
    """Threads of gloo that live on to the process's end may end it with SIGABRT there."""
    done = run_script(LEAVES_ITS_GROUP, tmp_path)

    assert done.returncode == 0, done.stderr


def test_a_training_that_starts_over_among_later_checkpoints_loses_none_and_is_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = attach()
    run.commit(write(run.checkpoint_dir / "step-900.tmp"))

    run.commit(write(run.checkpoint_dir / "step-10.tmp"), keep_last=1)

    assert sorted(path.name for path in run.checkpoint_dir.iterdir()) == ["step-00000010", "step-00000900"]
    assert "has a checkpoint of step 900, which `latest` returns" in capsys.readouterr().err


def test_a_committed_directory_may_be_committed_again() -> None:
    run = attach()
    committed = run.commit(write(run.checkpoint_dir / "step-7.tmp"))

    assert run.commit(committed) == committed == run.latest()


def test_files_behind_a_link_are_committed_themselves_and_not_the_link(tmp_path: Path) -> None:
    run = attach()
    (tmp_path / "link-3").symlink_to(write(tmp_path / "elsewhere"))

    committed = run.commit("link-3", step=3)

    assert not committed.is_symlink()
    assert (committed / "weights").read_text() == "elsewhere"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a second file system")
def test_files_on_another_file_system_are_refused_and_stay(tmp_path: Path) -> None:
    run = attach()
    folder = write(Path("/dev/shm") / f"ddp-hpc-test-{os.getpid()}" / "step-4")
    try:
        with pytest.raises(ConfigError, match="on one file system"):
            run.commit(folder)
        assert (folder / "weights").exists()
        assert run.commit(folder, keeps_folder=True) == run.latest()  # a copy
    finally:
        (folder / "weights").unlink()
        folder.rmdir()
        folder.parent.rmdir()


def test_a_script_that_changes_its_directory_finds_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = attach("saved")
    committed = run.commit(write(run.checkpoint_dir / "step-1.tmp"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")

    assert run.latest() == committed == tmp_path / "saved" / "step-00000001"
    assert committed_steps(RunDir(tmp_path)) == []


def test_the_last_numbers_of_a_script_that_ends_at_once_and_prints_nothing_are_shown(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(
        "from ddp_hpc import attach\nrun = attach()\nrun.report(1, accuracy=0.5)\nrun.report(2, accuracy=0.75)\n"
    )

    done = Place(tmp_path).submit((), "python", "short.py")

    assert done.returncode == 0, done.stdout + done.stderr
    progress = read_progress(RunDir(tmp_path / "runs" / "short"))
    assert progress is not None
    assert (progress.step, progress.metrics) == (2, {"accuracy": 0.75})
