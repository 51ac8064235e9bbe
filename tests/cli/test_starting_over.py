"""`submit --fresh` and `delete`: what there was is put aside or deleted, and only where nobody works on it."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.errors import RunBusyError
from ddp_hpc.cli import main
from ddp_hpc.launch.submission import removal
from ddp_hpc.launch.submission.removal import delete_run, rename_aside
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, write_queued_job

NO_SLURM = {"PATH": "/nowhere"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run that has finished, with a link in it to something precious outside."""
    made = RunDir(tmp_path / "runs/demo")
    made.path.mkdir(parents=True)
    made.config.write_text("name: demo\n")
    record_start(made, attempt=0, job_id="1")
    record_end(made, 0, End(ending=Ending.FINISHED, exit_code=0, cause=Cause.FINISHED))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (made.path / "data").symlink_to(precious)
    return made


def test_deleting_takes_the_run_and_nothing_that_its_links_lead_to(run: RunDir, tmp_path: Path) -> None:
    assert main(["delete", str(run.path), "--yes"]) == 0

    assert list((tmp_path / "runs").iterdir()) == []
    assert (tmp_path / "precious/file").exists()


def test_nothing_is_deleted_unasked(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """The tests have no terminal, so nobody can say yes."""
    assert main(["delete", str(run.path)]) == 2

    assert "`--yes`" in capsys.readouterr().err
    assert run.config.exists()


@pytest.mark.parametrize(("answer", "is_deleted"), [("y", True), ("", False), ("no", False)])
def test_on_a_terminal_it_asks(answer: str, is_deleted: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    primary, terminal = os.openpty()
    os.write(primary, f"{answer}\n".encode())
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        main(["delete", str(run.path)])
    os.close(primary)

    assert run.path.exists() is not is_deleted


def _held(run: RunDir) -> Any:
    return processes.take_lock(run.lock)


def _elsewhere(run: RunDir) -> None:
    record_start(run, attempt=1, job_id="2")
    text = run.attempts.read_text()
    run.attempts.write_text(text.replace(json.dumps(socket.gethostname()), '"another"'))


def _queued(run: RunDir) -> None:
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=time.time()))


@pytest.mark.parametrize(
    ("occupy", "told"),
    [
        (
            _held,
            "is running on this machine, so it cannot be deleted or renamed. Stop it first: `ddp-hpc cancel ",
        ),
        (_elsewhere, "was started on another"),
        (_queued, "this host has no Slurm"),
    ],
)
def test_a_run_that_somebody_may_work_on_is_left_alone(
    occupy: Any, told: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "PROCESS_EXIT_PATIENCE_S", 0.2)
    held = occupy(run)

    with pytest.raises(RunBusyError) as refused:
        delete_run(run, NO_SLURM)
    with pytest.raises(RunBusyError), rename_aside(run, NO_SLURM):
        pass

    assert told in str(refused.value)
    assert run.config.exists()
    if isinstance(held, int):
        os.close(held)


def test_what_is_put_aside_comes_back_where_no_new_run_is_made(run: RunDir) -> None:
    with suppress(ValueError), rename_aside(run, NO_SLURM):
        assert not run.path.exists()
        raise ValueError

    assert run.config.exists()


def test_each_time_it_is_put_aside_under_a_name_of_its_own(run: RunDir) -> None:
    for count in (1, 2):
        with rename_aside(run, NO_SLURM) as aside:
            run.path.mkdir()
            run.config.touch()
        assert aside == run.path.with_name(f"demo.old-{count}")
