"""What a killed submission leaves beside the runs: the next command removes it, but nothing that may still be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.leftovers import remove_leftovers, scratch_dir_path
from ddp_hpc.cli import main

BEGINS = """
import sys, time
from pathlib import Path
from ddp_hpc.base.leftovers import scratch_dir_path
made = scratch_dir_path(Path(sys.argv[1]))
made.mkdir()
(made / "config.yaml").touch()
print(made, flush=True)
time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BEGINS, str(tmp_path / "digits")], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("then", [remove_leftovers, lambda folder: main(["list", "--runs-dir", str(folder)])])
def test_the_directory_of_a_killed_process_is_removed_and_that_of_a_live_one_is_not(
    then: Callable[[Path], object], writer: subprocess.Popen[str], tmp_path: Path
) -> None:
    with writer:
        assert writer.stdout is not None
        made = Path(writer.stdout.readline().strip())
        try:
            then(tmp_path)
            is_kept = made.exists()
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    then(tmp_path)

    assert is_kept
    assert not made.exists()


def test_a_later_process_with_the_same_pid_keeps_nothing_alive(tmp_path: Path) -> None:
    own = scratch_dir_path(tmp_path / "digits")
    before, _, started = own.name.removesuffix(".tmp").rpartition("-")
    earlier = tmp_path / f"{before}-{int(started) - 1}.tmp"
    for path in (own, earlier):
        path.mkdir()

    remove_leftovers(tmp_path)

    assert (own.exists(), earlier.exists()) == (True, False)


def test_what_another_host_or_an_unknown_process_has_made_is_left_alone(tmp_path: Path) -> None:
    own = scratch_dir_path(tmp_path / "digits").name
    _, name, who, _ = own.split(".")
    boot, namespace, _, started = who.split("-")
    gone = "4194305"  # above the kernel's largest pid
    others = [
        f".{name}.{'0' * len(boot)}-{namespace}-{gone}-{started}.tmp",
        f".{name}.{boot}-1-{gone}-{started}.tmp",
        f".{name}.{gone}.tmp",
        f"{name}.tmp",
        f".{name}.{boot}-{namespace}-{os.getpid()}-{started}.tmp",
    ]
    for other in others:
        (tmp_path / other).mkdir()
    (tmp_path / f".{name}.{boot}-{namespace}-{gone}-{started}.tmp").mkdir()

    remove_leftovers(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_submission_that_is_killed_while_it_makes_the_run_leaves_nothing_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    program = (
        "import os, sys\n"
        "sys.addaudithook(lambda event, args: os.kill(os.getpid(), 9) if event == 'os.rename' and str(args[1]).endswith('/digits') else None)\n"
        "from ddp_hpc.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    words = ["submit", "name=digits", "--cluster", "local", "resources.workers_per_node=1", "script.start=exec"]

    subprocess.run([sys.executable, "-c", program, *words, "--", "python", "train.py"], check=False)
    left = list((tmp_path / "runs").iterdir())
    code = main([*words, "--wait", "--", "python", "train.py"])

    assert len(left) == 1
    assert left[0].name.startswith(".digits.")
    assert code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits"]
