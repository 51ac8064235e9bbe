"""Sending a run to Slurm: the one door of submitit.

submitit allocates: it writes the submission file, runs sbatch, reads the job's number and keeps a handle of it. What the
job does is our script's: its text replaces submitit's own, so that none of submitit's processes and signal handlers run
in the job, and what submitit pickles (the script's path) is never read again.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ddp_hpc import ownership, processes, rereading
from ddp_hpc.containers import PACKAGE_DIR
from ddp_hpc.durable import make_directories, private_mode, replace_text
from ddp_hpc.errors import ConfigError, SlurmUnavailableError, WorkerError
from ddp_hpc.patience import patiently
from ddp_hpc.records import (
    Attempt,
    Ending,
    QueuedJob,
    ask_to_stop,
    newest_attempt,
    read_attempts,
    read_queued_job,
    record_end,
    write_queued_job,
)
from ddp_hpc.render import JobScript, render
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client, states
from ddp_hpc.spec import RunSpec
from ddp_hpc.submission import preflight
from ddp_hpc.submission.image_preflight import look_at_image
from ddp_hpc.submission.release_hold import call_back, hasten_job, spared_nodes
from ddp_hpc.submission.run_dir_setup import (
    Submission,
    is_finished,
    make_run_dir,
    note_on_parents,
    refuse_file_in_the_way,
)
from ddp_hpc.submission.snapshot import path_in_snapshot, take_snapshot
from ddp_hpc.submission.user_code import code_dir_of, module_in

_ASK_S = (2.0, 30.0)
"""How long to wait between questions to Slurm, at first and at most."""


def job_script(spec: RunSpec, import_paths: Sequence[Path], environ: Mapping[str, str]) -> str:
    """Return the text that sbatch gets for a run.

    Raises:
        ConfigError: where the script cannot be made of this spec.
    """
    run = RunDir(spec.path)
    spec = _avoiding(spec, spared_nodes(run, spec, environ).left_out)
    return render(
        JobScript(spec=spec, run=run, chdir=Path.cwd(), import_paths=_job_import_paths(spec, run, import_paths))
    )


def _avoiding(spec: RunSpec, nodes: Sequence[str]) -> RunSpec:
    """Return the spec with more nodes excluded."""
    if not nodes:
        return spec
    asked = [spec.slurm.exclude] if spec.slurm.exclude else []
    return replace(spec, slurm=replace(spec.slurm, exclude=",".join([*asked, *nodes])))


def look(spec: RunSpec, import_paths: Sequence[Path], environ: Mapping[str, str]) -> list[str]:
    """Return what the user should know of a run before it is made; also for a dry run.

    Raises:
        ConfigError: where its image, or a path that it is to see, cannot be used.
    """
    run = RunDir(spec.path)
    paths = _job_import_paths(spec, run, import_paths)
    return [*look_at_image(spec, run, paths, environ, is_for_slurm=True), *note_on_parents(run.path)]


def prepare(
    resolved_text: str,
    spec: RunSpec,
    *,
    import_paths: Sequence[Path],
    environ: Mapping[str, str],
    is_new: bool | None = None,
) -> tuple[RunDir, list[str]]:
    """Make the run directory with everything the job needs; return it, and what the user should know.

    `is_new` is what the caller has found, where it has looked: whoever looks twice may find both.

    Raises:
        ConfigError: where it cannot be made; a run that was new leaves nothing behind.
    """
    run = RunDir(spec.path)
    refuse_file_in_the_way(run)
    is_new = not run.config.exists() if is_new is None else is_new
    text = job_script(spec, import_paths, environ)
    preflight.refuse_private_directory(run.path)
    preflight.refuse_private_python(run.path, [Path(sys.prefix), Path(sys.base_prefix), PACKAGE_DIR])
    notes = look(spec, import_paths, environ)
    make_run_dir(run, resolved_text, is_new=is_new)
    with _nothing_left_of_new(run, is_new=is_new):
        notes += _freeze_code(spec, run, import_paths)
        replace_text(run.job_script, text)
    return run, notes


def submit(
    resolved_text: str, spec: RunSpec, *, import_paths: Sequence[Path], environ: Mapping[str, str]
) -> Submission:
    """Put the run into Slurm's queue, or say that it is there, runs, or has finished.

    Raises:
        ConfigError: where the input cannot be, or Slurm refuses it; a run that was new leaves nothing behind.
        SlurmUnavailableError: where Slurm does not answer.
    """
    run = RunDir(spec.path)
    refuse_file_in_the_way(run)
    is_new = not run.config.exists()
    client.require("sbatch", environ)
    there = _already(run, spec, environ)
    if there is not None:
        return there
    run, notes = prepare(resolved_text, spec, import_paths=import_paths, environ=environ, is_new=is_new)
    with _nothing_left_of_new(run, is_new=is_new):
        notes += [*_notes_on_restarts(run, spec, environ), *preflight.check(spec, run, environ)]
        attempt = ownership.next_attempt(run)
        job = QueuedJob(job_id=_send(run, environ), attempt=attempt, at=time.time(), since=attempt)
    write_queued_job(run, job)
    return Submission(run, "queued", job.attempt, is_new=is_new, job_id=job.job_id, notes=tuple(notes))


def _notes_on_restarts(run: RunDir, spec: RunSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Say what the run's past means for its next job."""
    spared = spared_nodes(run, spec, environ)
    if spared.left_out:
        yield f"avoids {', '.join(spared.left_out)}, where it failed before (forgotten after {spec.restart.forget_h} h)"
    if spared.told:
        yield spared.told


def _already(run: RunDir, spec: RunSpec, environ: Mapping[str, str]) -> Submission | None:
    """Return what stands in the way of another job: one that waits or runs, or that nothing is left to do."""
    in_slurm = job_of(run, environ)
    if in_slurm is not None:
        return in_slurm
    with contextlib.suppress(OSError):  # a file system without locks
        if processes.is_locked(run.lock):
            return Submission(run, "running", newest_attempt(run))
    if is_finished(run, spec):
        return Submission(run, "finished", newest_attempt(run))
    return None


def job_of(run: RunDir, environ: Mapping[str, str]) -> Submission | None:
    """Return the run's job that waits or runs, if it has one."""
    job = read_queued_job(run)
    if job is None or job.cancelled_at is not None or not is_alive(job.job_id, environ):
        return None
    newest = newest_attempt(run)
    has_begun = newest >= job.attempt
    return Submission(
        run, "running" if has_begun else "waiting", newest if has_begun else job.attempt, job_id=job.job_id
    )


def is_alive(job_id: str, environ: Mapping[str, str]) -> bool:
    """Tell whether Slurm still has plans for a job."""
    job = client.job(job_id, environ)
    return job is not None and not states.has_ended(job.state)


def import_paths_of(spec: RunSpec, import_paths: Sequence[Path]) -> list[Path]:
    """Return where the run's job would import the user's code from."""
    return _job_import_paths(spec, RunDir(spec.path), import_paths)


def _job_import_paths(spec: RunSpec, run: RunDir, import_paths: Sequence[Path]) -> list[Path]:
    """Return where the job imports the user's code from: its frozen copy, or where it lies."""
    code = code_dir_of(spec.recipe.target, import_paths)
    if code is None:
        return []

    return [path_in_snapshot(run, code)] if spec.snapshot.enabled else [code]


def _freeze_code(spec: RunSpec, run: RunDir, import_paths: Sequence[Path]) -> list[str]:
    code = code_dir_of(spec.recipe.target, import_paths)
    if code is None or not spec.snapshot.enabled:
        return []

    needed = module_in(code, spec.recipe.target)
    snapshot = take_snapshot(
        code, run, max_bytes=spec.snapshot.max_mb * 10**6, leave_out=[run.path.parent], needed=needed
    )
    return [f"code: {snapshot.num_files} files of {snapshot.source} copied, {snapshot.num_bytes / 1e6:.1f} MB"]


@contextlib.contextmanager
def _nothing_left_of_new(run: RunDir, *, is_new: bool) -> Iterator[None]:
    """Take a run that was new away again when it cannot be submitted."""
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def _send(run: RunDir, environ: Mapping[str, str]) -> str:
    """Have submitit send the job's script; return the job's number."""
    from submitit import SlurmExecutor  # late: 0.1 s that only a submission waits for
    from submitit.core.utils import CommandFunction, FailedJobError, FailedSubmissionError

    text = run.job_script.read_text(encoding="utf-8")

    class Executor(SlurmExecutor):
        """submitit's executor with our script in place of its own."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002  # submitit's signature
            return text

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return [*client.scrubbing(environ), "sbatch", str(submission_file_path)]

    make_directories(run.submitit)
    executor = Executor(folder=run.submitit)
    executor._throttling = 0.0  # noqa: SLF001  # else it sleeps a fifth of a second before each job
    try:
        job: Any = executor.submit(CommandFunction(["bash", str(run.job_script)]))
    except (FailedJobError, FailedSubmissionError) as error:
        raise ConfigError(f"sbatch refuses the job: {error}") from error
    finally:
        with contextlib.suppress(OSError):  # a file system without modes
            for path in run.submitit.iterdir():  # made by the umask
                path.chmod(private_mode(path))
    return str(job.job_id)


def wait(run: RunDir, attempt: int, environ: Mapping[str, str]) -> Attempt:
    """Return the last attempt, of those from `attempt` on, once it has ended and no other follows.

    While a requeued job is held back by Slurm, it is told to begin (`hasten`).

    Raises:
        WorkerError: where the job left Slurm without a word in the run's directory.
    """
    (pause, longest), files = _ASK_S, rereading.LastRead()
    asked_at, seen = time.monotonic(), read_queued_job(run)
    while True:
        newest = rereading.newest_attempt(run, files)
        if newest is not None and newest.attempt >= attempt and newest.is_last:
            return newest
        queued = patiently(str(run.submission), lambda: files.read(run.submission, lambda: read_queued_job(run)))
        if queued != seen:
            (pause, _), seen = _ASK_S, queued
        if queued is not None and time.monotonic() - asked_at > pause:
            asked_at, pause = time.monotonic(), min(pause * 1.5, longest)
            _require_alive(run, attempt, queued, environ)
        rereading.await_news(newest)


def _last_attempt(run: RunDir, first: int) -> Attempt | None:
    newest = next(reversed(read_attempts(run)), None)
    return newest if newest is not None and newest.attempt >= first and newest.is_last else None


def _require_alive(run: RunDir, attempt: int, queued: QueuedJob, environ: Mapping[str, str]) -> None:
    try:
        job = client.job(queued.job_id, environ)
    except SlurmUnavailableError:
        return  # it may be back soon; the job does not mind
    if job is not None and not states.has_ended(job.state):
        hasten_job(run, queued, job, environ)
        return
    if job is not None and queued.cancelled_at is None and call_back(run, queued, job, environ):
        return
    if _last_attempt(run, attempt) is None and read_queued_job(run) == queued:
        raise WorkerError(preflight.silent_end(run, queued.job_id, job))


def cancel(run: RunDir, environ: Mapping[str, str]) -> str:
    """Take the run's job out of Slurm, whether it waits or runs; return what to tell the user.

    Raises:
        ConfigError: where it has no job.
    """
    job = read_queued_job(run)
    if job is None or not is_alive(job.job_id, environ):
        raise ConfigError(f"{run.name} has no job in the queue, so there is nothing to cancel.")
    write_queued_job(run, replace(job, cancelled_at=time.time()))  # first: a job that is leaving asks for it
    try:
        client.cancel(job.job_id, environ)
    except BaseException:
        write_queued_job(run, job)
        raise
    newest = next(reversed(read_attempts(run)), None)
    if newest is not None and newest.job_id == job.job_id and newest.ending is None:
        record_end(run, attempt=newest.attempt, ending=Ending.CANCELLED, exit_code=-9, reason="cancelled by the user")
    return f"Job {job.job_id} of {run.name} was cancelled. Its newest checkpoint stays; submit it again to go on."


def stop(run: RunDir, *, then: Literal["end", "requeue"] = "end") -> str:
    """Ask the run to commit a checkpoint and leave, for good or for now; return what to tell the user.

    Raises:
        ConfigError: where it has not begun, or runs no more.
    """
    job = read_queued_job(run)
    newest = next(reversed(read_attempts(run)), None)
    is_over = newest is None or (newest.ending is not None and newest.next != "in place")
    if job is None or newest is None or newest.attempt < job.attempt or is_over:
        raise ConfigError(
            f"{run.name} is not running, so there is nothing to stop. A job that waits is taken out of the queue by "
            f"`ddp-hpc cancel {run.name}`."
        )
    ask_to_stop(run, then=then)
    if then == "requeue":
        return f"{run.name} was asked to commit a checkpoint and go back into the queue."
    return f"{run.name} was asked to commit a checkpoint and leave. Submit it again to go on."
