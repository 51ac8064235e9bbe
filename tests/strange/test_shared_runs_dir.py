"""Two users keep their runs in one directory: neither is stopped by what is the other's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.launch.submission.snapshot import _runs_beside
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.watch.find import find_run, list_runs, newest_run
from tests.made_run import make_run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes two users")

ALICE, BOB = 64101, 64102


def as_user(uid: int, do: Callable[[], object]) -> str:
    """Call a function in a process of another user; return what it printed or raised, and `None` or what it returned."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.dup2(write, 1)
            os.dup2(write, 2)
            os.setgroups([])
            os.setegid(uid)
            os.seteuid(uid)
            with os.fdopen(1, "w", closefd=False) as out:
                returned = do()
                out.write(f"-> {returned}")
        except BaseException as error:  # noqa: BLE001  a forked child must never return into pytest
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that all may write, with a closed run of each, and one of Alice's of which only the name is open."""
    for folder in (tmp_path, *(parent for parent in tmp_path.parents if parent.name.startswith(("pytest-", "popen-")))):
        folder.chmod(0o755)
    runs_dir = tmp_path / "runs"
    runs_dir.mkdir()
    runs_dir.chmod(0o1777)
    for name, uid, mode in (("alices", ALICE, 0o700), ("bobs", BOB, 0o700), ("half", ALICE, 0o755)):
        run = make_run(runs_dir, name)
        record_start(run, attempt=0, job_id="17")
        for path in (run.config, run.attempts):
            path.chmod(0o600)
            os.chown(path, uid, uid)
        run.path.chmod(mode)
        os.chown(run.path, uid, uid)
    monkeypatch.setenv("HOME", str(tmp_path))
    main(["list", "--runs-dir", str(runs_dir)])  # imports all that it needs, which the others perhaps cannot read
    return runs_dir


def listed(runs_dir: Path) -> None:
    import sys

    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    main(["list", "--runs-dir", str(runs_dir)])


@pytest.mark.parametrize(("uid", "own", "others"), [(ALICE, ["alices", "half"], ["bobs"]), (BOB, ["bobs"], ["alices"])])
def test_each_sees_the_own_runs_and_is_told_how_many_are_left_out(
    uid: int, own: list[str], others: list[str], runs_dir: Path
) -> None:
    said = as_user(uid, lambda: listed(runs_dir))

    assert all(f"\n{name} " in said for name in own), said
    assert not any(f"\n{name} " in said for name in others), said
    assert (
        f"note: the list leaves out {3 - len(own)} of the directories in {str(runs_dir)!r}, which cannot be read. "
        "Check their permissions; if the file system does not answer, try again later." in said
    )


def test_each_finds_the_own_newest_run_and_that_of_a_job(runs_dir: Path) -> None:
    assert as_user(BOB, lambda: [run.name for run in list_runs(runs_dir)]) == "-> ['bobs']"
    assert as_user(BOB, lambda: newest_run(runs_dir).name) == "-> bobs"
    assert "RunNotFoundError" in as_user(BOB, lambda: find_run("18", runs_dir))


def test_a_copy_of_the_code_leaves_out_what_is_another_users(runs_dir: Path) -> None:
    from ddp_hpc.run.run_dir.paths import RunDir

    said = as_user(BOB, lambda: sorted(path.name for path in _runs_beside(Path("/nowhere"), RunDir(runs_dir / "bobs"))))

    assert "alices" in said
    assert "Error" not in said
