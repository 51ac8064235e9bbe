"""A back end of the tests: a queue in this process's memory, whose jobs take as many steps as a test waits for.

It shows what a back end needs: the functions of `ddp_hpc.launch.submission.backend.Backend` and a line in the table. It keeps
a run's records as the others do, so the command line and the Python interface work on its runs without a training.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ddp_hpc.base import processes
from ddp_hpc.base.durable import append_json_line
from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.launch.submission.backend import Submission, SubmissionPlan
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.run_dir_setup import is_finished, make_run_dir
from ddp_hpc.run.config.resolve import render_resolved
from ddp_hpc.run.run_dir.ledger import Attempt, End, Ending, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import (
    Progress,
    QueuedJob,
    newest_committed_step,
    read_progress,
    write_done,
    write_progress,
    write_queued_job,
)
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of

NAME = "memory"
HAS_QUEUE = True
_STEPS_A_LOOK = 5
_specs: dict[Path, RunSpec] = {}
"""Run directory -> what runs in it."""
_held: dict[Path, int] = {}
"""Run directory -> the descriptor of its lock, which the supervisor of a real back end would hold."""
_lock = threading.Lock()


def is_here(environ: Mapping[str, str]) -> bool:
    del environ
    return True


def describe(request: SubmitRequest) -> SubmissionPlan:
    spec = request.spec
    if spec.resources.nodes > 1:
        raise ConfigError(f"`resources.nodes` is {spec.resources.nodes}, but memory has one. Set `resources.nodes=1`.")
    return SubmissionPlan(notes=["note: in memory"], command=["train", spec.name], import_paths=request.import_paths)


def prepare(request: SubmitRequest) -> list[str]:
    notes = describe(request).notes
    make_run_dir(request.run, render_resolved(request.resolved), is_new=not request.run.config.exists())
    return list(notes)


def submit(request: SubmitRequest) -> Submission:
    run, spec = request.run, request.spec
    with _lock:
        is_new = not run.config.exists()
        there = find_job(run, request.environ)
        if there is not None:
            return there
        if is_finished(run, spec):
            return Submission(run, NAME, "finished", Ledger.read(run).newest_number)
        notes = prepare(request)
        attempt, first_step = Ledger.read(run).newest_number + 1, newest_committed_step(run)
        record_start(run, attempt=attempt, job_id=str(attempt), first_step=first_step)
        append_json_line(run.attempts, {"attempt": attempt, "cluster": NAME})
        write_queued_job(run, QueuedJob(job_id=str(attempt), attempt=attempt, at=0.0, since=attempt, backend=NAME))
        lock_fd = processes.take_lock(run.lock)
        assert lock_fd is not None
        _specs[run.path], _held[run.path] = spec, lock_fd
        _take_steps(run, first_step + _STEPS_A_LOOK)
    return Submission(run, NAME, "queued", attempt, is_new=is_new, job_id=str(attempt), notes=tuple(notes))


def wait(run: RunDir, attempt: int, environ: Mapping[str, str]) -> Attempt:
    del environ
    spec = _specs.get(run.path)
    if spec is not None:
        _take_steps(run, spec.train.max_steps or 0)
        _end(run, Ending.FINISHED, last_step=spec.train.max_steps)
        write_done(run, workload_of(spec).goal)
    newest = Ledger.read(run).attempts[-1]
    if newest.attempt < attempt or not newest.is_last:
        raise WorkerError(f"{run.name} is gone.")
    return newest


def stop(run: RunDir, environ: Mapping[str, str], *, then: Literal["end", "requeue"] = "end") -> str:
    del environ, then
    if run.path not in _specs:
        raise ConfigError(f"{run.name} is not running. Start it with `ddp-hpc submit`.")
    progress = read_progress(run)
    _end(run, Ending.STOPPED, last_step=progress.step if progress else 0)
    return f"{run.name} was stopped."


def cancel(run: RunDir, environ: Mapping[str, str]) -> str:
    del environ
    if run.path not in _specs:
        raise ConfigError(f"{run.name} is not running. Start it with `ddp-hpc submit`.")
    _end(run, Ending.CANCELLED, last_step=None)
    return f"{run.name} was cancelled."


def hasten(run: RunDir, environ: Mapping[str, str]) -> bool:
    del run, environ
    return False


def find_job(run: RunDir, environ: Mapping[str, str]) -> Submission | None:
    del environ
    if run.path not in _specs:
        return None
    attempt = Ledger.read(run).newest_number
    return Submission(run, NAME, "running", attempt, job_id=str(attempt))


def why_in_use(run: RunDir, environ: Mapping[str, str]) -> str | None:
    del environ
    return f"{run.name} runs." if run.path in _specs else None


def _end(run: RunDir, ending: Ending, *, last_step: int | None) -> None:
    del _specs[run.path]
    record_end(run, Ledger.read(run).newest_number, End(ending=ending, exit_code=0, last_step=last_step))
    os.close(_held.pop(run.path))


def _take_steps(run: RunDir, step: int) -> None:
    progress = Progress(
        attempt=Ledger.read(run).newest_number, step=step, total_steps=step, epoch=1, epochs=1, metrics={"loss": 0.5}
    )
    write_progress(run, progress)
