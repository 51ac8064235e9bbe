"""The back end of this machine: the same supervisor, agent and workers as on a cluster, without Slurm."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.durable import open_private
from ddp_hpc.base.errors import ConfigError, DdpHpcError, RunBusyError, WorkerError
from ddp_hpc.base.patience import ask_once, await_answer
from ddp_hpc.launch.submission.backend import Submission, SubmissionPlan
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.run_dir_setup import (
    PROCESS_EXIT_PATIENCE_S,
    check_settings,
    find_existing_start,
    lock_submission,
)
from ddp_hpc.run.run_dir import ownership, poll_files
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, End, Ending, Ledger, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import ask_to_stop, read_progress
from ddp_hpc.run.spec import LaunchSpec
from ddp_hpc.watch.failed_worker_log import last_words

NAME = "local"
HAS_QUEUE = False
START_PATIENCE_S = 120.0
"""How long `submit` waits for the first step to begin before it lets the run go on alone."""
SCRIPT_TRIAL_S = 1.0
"""How long a script must have run before `submit` says that it runs: most mistakes end a script at its first lines."""
STOP_PATIENCE_S = 600.0
"""How long a run that a user asked to stop may take to finish its step and commit."""
MOST_WORKERS, _MOST_A_CPU = 64, 4
"""Workers that any machine may have, and how many for each CPU a larger one."""
_POLL_S = 0.05
_guardians: list[subprocess.Popen[bytes]] = []
"""Guardians that this process has started and not reaped."""


def guardian_argv(run: RunDir) -> list[str]:
    """Return the command that starts the supervisor's guardian, and so the run."""
    return [sys.executable, "-m", "ddp_hpc.job.guardian", str(run.path)]


def refuse_too_many_workers(spec: LaunchSpec) -> None:
    """Refuse a run that asks for more than this machine."""
    if spec.resources.nodes > 1:
        raise ConfigError(
            f"`resources.nodes` is {spec.resources.nodes}, but the run would start on this machine only. Submit it on a "
            "login node of Slurm (`--cluster slurm`), or set `resources.nodes=1`."
        )
    workers, cpus = spec.resources.local_world_size, len(os.sched_getaffinity(0))
    if workers > max(MOST_WORKERS, _MOST_A_CPU * cpus):
        raise ConfigError(
            f"`resources.workers_per_node` is {workers}, but this machine has {cpus} CPUs, and so many processes may use up its memory. "
            f"Set it to {max(MOST_WORKERS, _MOST_A_CPU * cpus)} or less."
        )


def is_here(environ: Mapping[str, str]) -> bool:
    """Return True: every host can run a run locally."""
    del environ
    return True


def describe(request: SubmitRequest) -> SubmissionPlan:
    """Return what `submit` would do; make nothing."""
    run, spec, environ = request.run, request.spec, request.environ
    refuse_too_many_workers(spec)
    notes = check_settings(spec, run.path, environ)
    if spec.container.image is not None or spec.stage.archive is not None:
        from ddp_hpc.launch.submission.submit_checks.image import image_notes  # late: most runs here have neither

        notes += image_notes(spec, run, request.import_paths, environ, is_for_slurm=False)
    return SubmissionPlan(notes=notes, command=guardian_argv(run), import_paths=request.import_paths)


def prepare(request: SubmitRequest) -> list[str]:
    """Make the run's directory, or renew its configuration; return what the user should know."""
    with lock_submission(request.run, patience_s=2 * START_PATIENCE_S) as claim:
        notes = describe(request).notes
        claim.write(request.resolved)
        claim.is_to_stay = True
    return list(notes)


def submit(request: SubmitRequest) -> Submission:
    """Start the run, or go on with it, and return once its training has begun, or its script has run for a moment."""
    run = request.run
    refuse_too_many_workers(request.spec)
    with lock_submission(run, patience_s=2 * START_PATIENCE_S) as claim:
        if not claim.is_new:
            here = Submission(run, NAME, "running", Ledger.read(run).newest_number) if _is_busy(run) else None
            there = find_existing_start(request, NAME, here)
            if there is not None:
                return there
        notes = describe(request).notes
        claim.write(request.resolved)
        attempt = ownership.next_attempt(run)
        claim.is_to_stay = True  # first: Ctrl-C must not take the directory of what has started
        guardian = start_guardian(run, request.import_paths, request.environ)
        ended = _await_training(run, attempt, guardian)
        if ended is not None and ended.exit_code == exit_codes.REFUSED:
            claim.is_to_stay = False
            raise ConfigError(ended.reason if claim.is_new else f"{ended.reason}\nThe run {run.name} is as it was.")
    return Submission(run, NAME, "started", attempt, is_new=claim.is_new, notes=tuple(notes))


def find_job(run: RunDir, environ: Mapping[str, str]) -> Submission | None:
    """Return the run's start that works on this host; None without one, or where the file system does not answer."""
    del environ
    with suppress(OSError):
        if is_working_here(run):
            return Submission(run, NAME, "running", Ledger.read(run).newest_number)
    return None


def why_in_use(run: RunDir, environ: Mapping[str, str]) -> str | None:
    """Return why the run's directory must not be moved: another host started it; None where it may.

    The caller holds the run's lock on this host.
    """
    del environ
    newest = Ledger.read(run).newest
    here = processes.host_name()
    if newest is None or newest.cluster != NAME or newest.ending is not None or newest.host == here:
        return None
    return (
        f"{run.name} was started on {newest.host}, and this host, {here}, cannot find out whether it still runs there. "
        f"Run the command on {newest.host}; if that machine is gone for good, rename the directory {run.path}."
    )


def is_working_here(run: RunDir) -> bool:
    """Tell whether a process of this host works on the run, by its lock; where the file system has no locks, by its ledger.

    Raises:
        OSError: if the file system does not answer.
    """
    try:
        return processes.is_locked(run.lock)
    except OSError as error:
        if error.errno not in processes.NO_LOCKS_ERRNOS:
            raise
    newest = Ledger.read(run).newest
    return newest is not None and not newest.is_last and newest.is_alive_on(processes.host_name())


def hasten(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Change nothing: no queue holds a run back here."""
    del run, environ
    return False


def _is_busy(run: RunDir) -> bool:
    """Return whether a process works on the run. An attempt that has ended, or that a user asked to stop, gets time to exit."""
    began = time.monotonic()
    while is_working_here(run):
        if time.monotonic() - began > _exit_patience_s(run):
            return True
        time.sleep(_POLL_S)
    return False


def _exit_patience_s(run: RunDir) -> float:
    # Read before the ledger: the request is removed after the end of the attempt that obeyed it is recorded.
    is_asked = ask_once(run.stop_request, run.stop_request.exists, unknown=False)
    newest = Ledger.read(run).newest
    if newest is None:
        return 0.0
    if newest.ending is not None or not newest.is_alive_on(processes.host_name()):
        return PROCESS_EXIT_PATIENCE_S
    return STOP_PATIENCE_S if is_asked else 0.0


def start_guardian(
    run: RunDir, import_paths: Iterable[str | Path], environ: Mapping[str, str], *, place: str | None = None
) -> subprocess.Popen[bytes]:
    """Start the supervisor's guardian in a session of its own, so that both outlive this terminal; in `place`, or else here."""
    with open_private(run.console, "ab") as console:
        guardian = subprocess.Popen(
            [*guardian_argv(run), *(f"--import-path={path}" for path in import_paths)],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            # Else a `json.py` here would be taken for Python's.
            env={"PYTHONSAFEPATH": "ddp_hpc", **environ},
            cwd=place,
            start_new_session=True,
        )
    let_outlive(guardian)
    return guardian


def let_outlive(guardian: subprocess.Popen[bytes]) -> None:
    """Let a process outlive this one, without a warning of Python."""
    # Python warns of a Popen that is collected while its process runs, and a program that submits often, by
    # `ddp_hpc.submit`, would collect zombies: keep those that run, and reap the others.
    if not _guardians:
        atexit.register(_mute_popen_warnings)
    _guardians[:] = [*(one for one in _guardians if one.poll() is None), guardian]


def _mute_popen_warnings() -> None:
    for one in _guardians:
        if one.poll() is None:
            one.returncode = 0  # it is set, so `Popen.__del__` asks for nothing


def _await_training(run: RunDir, attempt: int, guardian: subprocess.Popen[bytes]) -> End | None:
    """Wait until the attempt trains, or its script has run for a moment, or it has ended; return its end if it has."""
    from ddp_hpc.run.run_dir.failure_reports import read_failures  # late: a dry run starts nothing

    deadline = time.monotonic() + START_PATIENCE_S
    began: dict[int, float] = {}
    while time.monotonic() < deadline:
        is_guarded = guardian.poll() is None  # asked first, so that the last entry is not missed
        newest = await_answer(str(run.attempts), lambda: Ledger.read(run).newest)
        entry = newest if newest is not None and newest.attempt >= attempt else None
        if entry is not None and entry.is_last:
            return entry.end
        progress = await_answer(str(run.progress), lambda: read_progress(run))
        if progress is not None and progress.attempt >= attempt:
            ran_s = time.monotonic() - began.setdefault(progress.attempt, time.monotonic())
            is_of_script = progress.saves is not None  # a recipe's progress says that it trains
            if not is_of_script or (ran_s >= SCRIPT_TRIAL_S and not read_failures(run, progress.attempt)):
                return None
        if not is_guarded and entry is None:
            raise RunBusyError(
                f"The run in {run.path} could not be started. {last_words(run)}\nCorrect that, and submit the run again."
            )
        if not is_guarded and entry is not None and not entry.is_alive_on(processes.host_name()):
            raise WorkerError(_unknown_end_message(run, entry.attempt))
        time.sleep(_POLL_S)
    return None


def wait(run: RunDir, attempt: int, environ: Mapping[str, str]) -> Attempt:
    """Return the last attempt, of those from `attempt` on, once it has ended and no other follows."""
    del environ
    files = poll_files.ReadCache()
    saves = poll_files.SaveWatch(run, attempt, files)
    while True:
        is_alive = await_answer(str(run.lock), lambda: is_working_here(run))
        newest = poll_files.newest_attempt(run, files)
        if newest is not None and newest.attempt >= attempt and newest.is_last:
            return newest
        if not is_alive:
            raise WorkerError(_unknown_end_message(run, attempt if newest is None else max(attempt, newest.attempt)))
        saves.warn_of_failures()
        poll_files.await_next_poll(newest)


def _unknown_end_message(run: RunDir, attempt: int) -> str:
    from ddp_hpc.watch.status import effect_of_resubmitting  # late: most submissions need no status

    return (
        f"Attempt {attempt} of {run.name} has ended, and attempts.jsonl does not say how: the ddp-hpc processes that watched the "
        f"workers were killed, or could not write that file. {last_words(run)}\nSubmit the run again: {effect_of_resubmitting(run)}."
    )


def stop(run: RunDir, environ: Mapping[str, str], *, then: Literal["end", "requeue"] = "end") -> str:
    """Ask the run to commit a checkpoint and exit; return a message for the user."""
    del environ
    if then == "requeue":
        raise ConfigError(
            f"{run.name} runs on this machine, which has no queue to go back into. To stop it: `ddp-hpc stop {run.word}`."
        )
    if not is_working_here(run):
        raise ConfigError(f"{run.name} is not running, so there is nothing to stop. Start it with `ddp-hpc submit`.")
    ask_to_stop(run)
    from ddp_hpc.watch.status import stop_text  # late: most submissions need no status

    return stop_text(run)


def cancel(run: RunDir, environ: Mapping[str, str]) -> str:
    """End the run at once, without a checkpoint; return a message for the user."""
    del environ
    is_known = False
    deadline = time.monotonic() + PROCESS_EXIT_PATIENCE_S
    while is_working_here(run) and time.monotonic() < deadline:
        newest = Ledger.read(run).newest
        if newest is not None:
            is_known = True
            _end_attempt(run, newest)
        time.sleep(_POLL_S)  # a supervisor that the guardian starts meanwhile sees what was written
    if not is_known:
        raise ConfigError(f"{run.name} is not running, so there is nothing to cancel. Start it with `ddp-hpc submit`.")
    from ddp_hpc.watch.status import effect_of_resubmitting  # late: as above

    return f"{run.name} was cancelled. Submit it again to go on: {effect_of_resubmitting(run)}."


def _end_attempt(run: RunDir, attempt: Attempt) -> None:
    """Write down that the user has ended it, and kill its supervisor, if that is a process of this host."""
    here = processes.host_name()
    if attempt.host != here:
        raise ConfigError(
            f"{run.name} cannot be cancelled from {here}: it runs on {attempt.host} (process {attempt.pid}). Cancel it "
            f"there, or have it write a checkpoint and stop: `ddp-hpc stop {run.word}`."
        )
    try:
        if attempt.ending is None or attempt.next:
            reason = "cancelled by the user"
            end = End(ending=Ending.CANCELLED, exit_code=-signal.SIGKILL, reason=reason, cause=Cause.CANCELLED)
            record_end(run, attempt.attempt, end)
    except OSError as error:  # such as a full disk, which may be why the user cancels
        if not attempt.is_alive_on(here):
            raise
        # The guardian goes by what is written down, so it would start another supervisor.
        processes.kill([*_guardian_pids(attempt.pid), attempt.pid])
        raise DdpHpcError(
            f"{run.name} was killed, but that the user cancelled it could not be written to {run.attempts}: {error.strerror}. "
            "`ddp-hpc status` shows another reason for its end. Free some space there before you submit it again."
        ) from error
    if attempt.is_alive_on(here):
        processes.kill([attempt.pid])


def _guardian_pids(pid: int) -> list[int]:
    """Return the process that would start the supervisor `pid` again; none where its parent is something else."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        if parent is not None and "ddp_hpc.job.guardian" in parent.cmdline():
            return [parent.pid]
    return []
