"""What a user does to a sweep, wherever it runs: start it, cancel it, continue it, delete it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from ddp_hpc.base.errors import (
    ConfigError,
    DdpHpcError,
    RunBusyError,
    SlurmRefusalError,
    SlurmUnavailableError,
    UnreadableError,
)
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm import states as slurm_states
from ddp_hpc.launch.submission import local
from ddp_hpc.launch.submission.backend import Backend, find_job_elsewhere, load_backend
from ddp_hpc.launch.submission.removal import delete_renamed, rename_to_hidden
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.slurm import knows
from ddp_hpc.launch.submission.submit_checks.capacity import SlurmQuestions
from ddp_hpc.launch.sweep import array
from ddp_hpc.launch.sweep.point_configs import check_points
from ddp_hpc.launch.sweep.sweep_dir import (
    Sweep,
    SweepDir,
    append_record,
    failed_attempts,
    has_begun,
    has_ended,
    is_being_sent,
    lock_sending,
    make_sweep,
    points_in_queue,
    read_sweep,
    record_continued,
)
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_queued_job

_SENDING_PATIENCE_S = 120.0
"""How long `cancel` waits for another process that sends points: each sbatch may take `client.TIMEOUT_S`."""
_RUNNER_PATIENCE_S = 30.0
"""How long `cancel` waits, on this machine, for the command that runs the points to end."""
_POLL_S = 0.2
_FAILED_STATES = frozenset({"failed", "refused"})


@dataclass(frozen=True, kw_only=True)
class SweepStart:
    """What became of a sweep's points."""

    sweep_dir: SweepDir
    numbers: Sequence[int]
    """Of the points that were to be started."""
    runs_here: bool = False
    """Whether the caller is to run them on this machine: `sweep.runner.running`."""
    jobs: Mapping[str, int] = field(default_factory=dict)
    """The number of each array that was sent -> how many points it has."""
    refusal: str = ""
    """What Slurm printed where it did not accept all of them."""
    notes: Sequence[str] = ()

    @property
    def num_not_submitted(self) -> int:
        """How many points Slurm did not accept."""
        return 0 if self.runs_here else len(self.numbers) - sum(self.jobs.values())


def submit_sweep(base: SubmitRequest, sweep: Sweep, backend: Backend) -> SweepStart:
    """Check each point, make the sweep's directory, and send its points; on this machine, the caller runs them.

    Raises:
        OSError: where the sweep's records cannot be written; nothing is left of a sweep that Slurm cannot know.
    """
    environ, sweep_dir, numbers = base.environ, sweep.dir, [point.number for point in sweep.points]
    if not backend.HAS_QUEUE:
        check_points(base.resolved, sweep.points, environ, is_array=False)
        local.refuse_too_many_workers(base.spec)
        make_sweep(replace(sweep, import_paths=tuple(base.import_paths)), base.resolved)
        return SweepStart(sweep_dir=sweep_dir, numbers=numbers, runs_here=True)
    questions = SlurmQuestions(environ)  # Slurm answers while this process checks the points
    check_points(base.resolved, sweep.points, environ, is_array=True)
    with ExitStack() as until_sent:
        notes = array.make_for_slurm(base, sweep, questions, until_sent=until_sent)
        try:
            jobs, refusal = array.send_points(sweep, numbers, questions.config(), environ)
        except (ConfigError, OSError) as error:
            there = read_sweep(sweep_dir)
            if not there.arrays and (isinstance(error, ConfigError) or there.unanswered is None):
                # No job knows it, so the user may correct and submit it again.
                until_sent.close()  # NFS keeps a directory with an open file
                shutil.rmtree(sweep_dir.path, ignore_errors=True)
            if isinstance(error, SlurmRefusalError):
                raise questions.refusal(error.printed, base.spec) from error
            raise
    return SweepStart(sweep_dir=sweep_dir, numbers=numbers, jobs=jobs, refusal=refusal, notes=notes)


def cancel_sweep(sweep_dir: SweepDir, environ: Mapping[str, str]) -> int:
    """Cancel the points that run or wait again, and then those that have not begun; return how many had begun.

    What one point's end, or its record, has against it does not keep the others from being cancelled: a full disk may be why the user cancels.
    """
    sweep = read_sweep(sweep_dir)
    backend = load_backend(sweep.backend)
    troubles: list[DdpHpcError | OSError] = []
    with _collect_error(troubles):
        append_record(sweep_dir, cancelled=True)  # first: no other point starts any more
    array.refuse_other_cluster(sweep, environ)
    if not backend.HAS_QUEUE:
        begun = _cancel_begun_runs(sweep, backend, environ, troubles)
        # The command that runs the points may be starting one now, of which no lock says so yet.
        end = time.monotonic() + _RUNNER_PATIENCE_S
        while is_being_sent(sweep_dir) and not troubles and time.monotonic() < end:
            time.sleep(_POLL_S)
            begun |= _cancel_begun_runs(sweep, backend, environ, troubles)
        _raise_first_error(troubles, sweep_dir)
        if is_being_sent(sweep_dir):
            raise RunBusyError(
                f"{sweep_dir.name} was cancelled, but the command that runs its points has not ended within {_RUNNER_PATIENCE_S:.0f} s, so a "
                f"point may still start or run. Run `ddp-hpc sweep cancel {sweep_dir.word}` again."
            )
        return len(begun)
    busy = (
        f"No other point of {sweep_dir.name} starts, but another process has been submitting its points for {_SENDING_PATIENCE_S:.0f} s, "
        f"so its jobs are not cancelled. Run `ddp-hpc sweep cancel {sweep_dir.word}` again when that process has ended."
    )
    with lock_sending(sweep_dir, busy, patience_s=_SENDING_PATIENCE_S), _collect_error(troubles):
        sweep = array.settle_sent_arrays(sweep_dir, environ)  # what was being sent is to be cancelled, too
    # Runs that wait after a requeue are pending tasks as well: each records that the user has cancelled it.
    begun = _cancel_begun_runs(sweep, backend, environ, troubles)
    with _collect_error(troubles):
        array.cancel_waiting(sweep, environ)
    begun |= _cancel_begun_runs(sweep, backend, environ, troubles)  # those that began meanwhile
    _raise_first_error(troubles, sweep_dir)
    return len(begun)


@contextmanager
def _collect_error(troubles: list[DdpHpcError | OSError]) -> Iterator[None]:
    """Keep an error of the block for later, unless Slurm does not answer: it will not answer the next question either."""
    try:
        yield
    except SlurmUnavailableError:
        raise
    except (DdpHpcError, OSError) as error:
        troubles.append(error)


def _raise_first_error(troubles: Sequence[DdpHpcError | OSError], sweep_dir: SweepDir) -> None:
    """Say what was against a cancellation, if anything was: a refusal first."""
    for first in sorted(troubles, key=lambda one: not isinstance(one, ConfigError)):
        if isinstance(first, ConfigError | UnreadableError):
            raise first
        what = f"{first.filename}: {first.strerror}." if isinstance(first, OSError) else str(first)
        raise DdpHpcError(
            f"{sweep_dir.name} was cancelled, but ddp-hpc could not record that for all points, so some may still start. {what} "
            f"Make that path writable, and give the command again: ddp-hpc sweep cancel {sweep_dir.word}"
        ) from first


def _cancel_begun_runs(
    sweep: Sweep, backend: Backend, environ: Mapping[str, str], troubles: list[DdpHpcError | OSError]
) -> set[str]:
    """Cancel the runs that wait again or run; return their names. Add to `troubles` what was against it."""
    cancelled = set()
    for run in map(sweep.dir.run, sweep.points):
        with _collect_error(troubles):
            if not has_begun(run) or has_ended(run) or not _has_job(run, backend, environ):
                continue
            cancelled.add(run.name)
            try:
                backend.cancel(run, environ)
            except ConfigError:
                if _has_job(run, backend, environ):
                    raise
                # It has ended meanwhile, so it cannot be cancelled, and need not be.
    return cancelled


def _has_job(run: RunDir, backend: Backend, environ: Mapping[str, str]) -> bool:
    try:
        return backend.find_job(run, environ) is not None
    except OSError as error:
        raise UnreadableError(
            f"The other points of the sweep were cancelled, but {run.name} was not: its record cannot be read ({error}). "
            f"Run `ddp-hpc cancel {run.word}` when the file system answers again, or cancel its job with `scancel`."
        ) from error


def continue_sweep(
    sweep_dir: SweepDir, environ: Mapping[str, str], *, is_failed: bool = False, limits: Mapping[str, int]
) -> SweepStart:
    """Start the points that have not finished, and neither wait, run, nor have failed; with `is_failed`, those that have failed, and no others.

    Of points that the user has cancelled, it starts those that were cancelled with the whole sweep.
    """
    busy = f"Another process is submitting points of {sweep_dir.name}, or runs them on this machine, at this moment. Try again when it has ended."
    with lock_sending(sweep_dir, busy):
        sweep = array.settle_sent_arrays(sweep_dir, environ)
        is_array = sweep.backend == "slurm"
        numbers, notes = _points_left(sweep, environ, is_failed=is_failed)
        with _record_continuation(sweep, is_failed=is_failed, limits=limits):
            sweep = read_sweep(sweep_dir)
            if is_array and "at_most" in limits and sweep.arrays:
                array.throttle_waiting(sweep, environ)
            if not is_array or not numbers:
                return SweepStart(sweep_dir=sweep_dir, numbers=numbers, runs_here=bool(numbers), notes=notes)
            jobs, refusal = array.send_points(sweep, numbers, client.config(environ), environ)
            return SweepStart(sweep_dir=sweep_dir, numbers=numbers, jobs=jobs, refusal=refusal, notes=notes)


def _points_left(sweep: Sweep, environ: Mapping[str, str], *, is_failed: bool) -> tuple[list[int], list[str]]:
    """Return the points that are to be started, and a note on those whose files cannot be read."""
    from ddp_hpc.launch.sweep.point_states import PointReader  # late: a new sweep has no past
    from ddp_hpc.watch.queue import Queue, QueueStatus, asker, queue_now

    queue = queue_now(environ, time.time()) if sweep.backend == "slurm" else Queue()
    if queue.problem:
        raise ConfigError(
            "Slurm does not answer, so ddp-hpc cannot find out which points have a job in its queue. Try again later; nothing was submitted."
        )

    # Slurm's word on jobs that have left the queue counts for failed points alone, and takes a question for each.
    ask = asker(environ, clock=time.time) if is_failed else lambda job_id, _: QueueStatus(job_id=job_id)
    states = PointReader(ask).read(sweep, queue)
    runs = {number: sweep.dir.run(sweep.points[number]) for number in states}
    if sweep.backend != "slurm":
        busy = next((runs[number] for number, state in states.items() if state.status and state.status.is_alive), None)
        if busy is not None:
            raise RunBusyError(
                f"{busy.name} of {sweep.dir.name} still runs on this machine, without the command that started it. Wait until it has ended "
                f"(`ddp-hpc sweep follow {sweep.dir.word}`), or stop it: `ddp-hpc stop {busy.word}`."
            )
    if is_failed:  # of a lost point, Slurm may say that its job has failed
        numbers = [
            number
            for number, state in states.items()
            if state.left in {"failed", "lost"} and state.word in _FAILED_STATES
        ]
    else:
        cancelled = sweep.cancelled_numbers
        numbers = [
            number
            for number, state in states.items()
            if state.left in {"not begun", "lost"} or (state.left == "ended by the user" and number in cancelled)
        ]
    free = []
    for number in numbers:
        job = read_queued_job(runs[number])
        if job is not None:
            knows(runs[number], job, environ)  # another cluster's is an error
        if find_job_elsewhere(runs[number], sweep.backend, environ) is None:
            free.append(number)
    names = ", ".join(runs[number].name for number, state in states.items() if state.left == "unreadable")
    note = f"note: the files of {names} cannot be read now, so these points were not submitted; `ddp-hpc sweep continue` tries again"
    return free, [note] if names else []


@contextmanager
def _record_continuation(before: Sweep, *, is_failed: bool, limits: Mapping[str, int]) -> Iterator[None]:
    """Record that the user continues the sweep, as tasks that start read it; take it back where nothing could be sent."""
    # With `--failed`, the other points of a cancelled sweep stay cancelled.
    sweep_dir, is_cancelled, forgiven = before.dir, before.is_cancelled and is_failed, failed_attempts(before)
    record_continued(sweep_dir, is_cancelled=is_cancelled, forgiven=forgiven, limits=limits)
    try:
        yield
    except (ConfigError, SlurmUnavailableError):
        now = read_sweep(sweep_dir)
        if len(now.arrays) == len(before.arrays) and now.unanswered is None:
            former = {"at_most": before.at_most, "stop_after_failures": before.stop_after_failures}
            record_continued(sweep_dir, is_cancelled=before.is_cancelled, forgiven=before.forgiven, limits=former)
        raise


def describe_sweep(sweep_dir: SweepDir) -> str:
    """Return what `delete_sweep` deletes: `a sweep of 10 points, 8 of them with a run`."""
    sweep = read_sweep(sweep_dir)
    num_runs = sum(has_begun(sweep_dir.run(point)) for point in sweep.points)
    return (
        f"a sweep of {len(sweep.points)} points; {num_runs} of them have a run, with its checkpoints, metrics and logs"
    )


def delete_sweep(sweep_dir: SweepDir, environ: Mapping[str, str]) -> None:
    """Delete the sweep's directory with all of its runs."""
    if sweep_dir.path.is_symlink():
        raise ConfigError(
            f"{sweep_dir.path} is a symbolic link, so nothing was deleted. Give the path of its target directory, or remove the link."
        )

    def refusal(why: str) -> str:
        return (
            f"The sweep {sweep_dir.name} cannot be deleted: {why}. Cancel it first, and wait until its runs have ended: `ddp-hpc sweep "
            f"cancel {sweep_dir.word}`."
        )

    with lock_sending(sweep_dir, refusal("another process submits or runs its points")):
        for problem in _why_not_delete(sweep_dir, environ):
            raise RunBusyError(refusal(problem))
        away = rename_to_hidden(sweep_dir.path)
    delete_renamed(away, f"The sweep {sweep_dir.name}")


def _why_not_delete(sweep_dir: SweepDir, environ: Mapping[str, str]) -> Iterator[str]:
    sweep = read_sweep(sweep_dir)
    is_array, there = sweep.backend == "slurm", set[str]()
    if is_array:
        sweep = array.settle_sent_arrays(sweep_dir, environ)
        queued = [one for one in client.queue(environ) if not slurm_states.has_ended(one.state)]
        there = {name for entry in queued for name in (entry.job_id, entry.number)}
        for one in sweep.arrays:
            if points_in_queue(one, queued):
                yield f"job {one.job_id} waits or runs"
    for run in map(sweep_dir.run, sweep.points):
        job = read_queued_job(run) if is_array else None
        if job is not None and knows(run, job, environ) and job.job_id in there:
            yield f"job {job.job_id} of {run.name} waits or runs"
        if local.is_working_here(run):
            yield f"its run {run.name} runs on this machine"
        if (elsewhere := local.why_in_use(run, environ)) is not None:
            yield elsewhere.rstrip(".")
