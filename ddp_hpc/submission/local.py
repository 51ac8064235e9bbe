"""Running a training on this machine: the same supervisor, agent and workers as on a cluster, without Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc import exit_codes, ownership, processes, rereading
from ddp_hpc.durable import open_private
from ddp_hpc.errors import ConfigError, RunBusyError, WorkerError
from ddp_hpc.patience import known
from ddp_hpc.records import (
    Attempt,
    Cause,
    End,
    Ending,
    ask_to_stop,
    newest_attempt,
    read_attempts,
    read_progress,
    record_end,
)
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client
from ddp_hpc.spec import RunSpec
from ddp_hpc.submission import slurm
from ddp_hpc.submission.image_preflight import look_at_image
from ddp_hpc.submission.run_dir_setup import (
    Submission,
    is_finished,
    make_run_dir,
    note_on_parents,
    refuse_file_in_the_way,
)

START_PATIENCE_S = 120.0
"""How long `submit` waits for the first step to begin before it lets the run go on alone."""
STOP_PATIENCE_S = 600.0
"""How long a run that was told to stop may take to finish its step and commit."""
VANISH_PATIENCE_S = 10.0
"""How long the processes of an attempt that is over may take to vanish."""
_POLL_S = 0.05


def supervisor_argv(run: RunDir) -> list[str]:
    """Return the command that starts the run: of the supervisor's guardian."""
    return [sys.executable, "-m", "ddp_hpc.job.guardian", str(run.path)]


def refuse_several_nodes(spec: RunSpec) -> None:
    """Refuse a run that asks for more machines than this one.

    Raises:
        ConfigError: where it does.
    """
    if spec.resources.nodes > 1:
        raise ConfigError(
            f"`resources.nodes` is {spec.resources.nodes}, but the run would start on this machine alone. Submit it on a "
            "login node of Slurm (`--cluster slurm`), or set `resources.nodes=1` and `resources.workers_per_node`."
        )


def submit(resolved_text: str, spec: RunSpec, *, import_paths: Sequence[Path]) -> Submission:
    """Start the run, or go on with it, and return once its training has begun.

    Raises:
        ConfigError: where the input cannot be; a run that was new leaves nothing behind.
        WorkerError: where the workers failed before the first step.
    """
    refuse_several_nodes(spec)
    run = RunDir(spec.path)
    refuse_file_in_the_way(run)
    is_new = not run.config.exists()
    if _is_busy(run):
        return Submission(run, "running", newest_attempt(run))
    in_slurm = slurm.job_of(run, os.environ) if run.submission.exists() and client.is_here(os.environ) else None
    if in_slurm is not None:
        return in_slurm
    if is_finished(run, spec):
        return Submission(run, "finished", newest_attempt(run))
    notes = tuple(look(spec, import_paths))
    make_run_dir(run, resolved_text, is_new=is_new)
    attempt = ownership.next_attempt(run)
    guardian = _start_guardian(run, import_paths)
    ended = _await_training(run, attempt, guardian)
    if ended is not None and ended.exit_code == exit_codes.REFUSED:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        raise ConfigError(ended.reason)
    return Submission(run, "started", attempt, is_new=is_new, notes=notes)


def look(spec: RunSpec, import_paths: Sequence[Path]) -> list[str]:
    """Return what the user should know of a run before it is made; also for a dry run.

    Raises:
        ConfigError: where its image, or a path that it is to see, cannot be used.
    """
    run = RunDir(spec.path)
    return [*look_at_image(spec, run, import_paths, os.environ, is_for_slurm=False), *note_on_parents(run.path)]


def _is_busy(run: RunDir) -> bool:
    """Tell whether somebody works on the run; an attempt that is over, or was told to stop, is given time to leave."""
    began = time.monotonic()
    while processes.is_locked(run.lock):
        if time.monotonic() - began > _patience_s(run):
            return True
        time.sleep(_POLL_S)
    return False


def _patience_s(run: RunDir) -> float:
    newest = next(reversed(read_attempts(run)), None)
    if newest is None:
        return 0.0
    if newest.ending is not None or not newest.lives(socket.gethostname()):
        return VANISH_PATIENCE_S
    return STOP_PATIENCE_S if known(run.stop_request, run.stop_request.exists, unknown=False) else 0.0


def _start_guardian(run: RunDir, import_paths: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Start the supervisor's guardian in a session of its own, so that both outlive this terminal."""
    paths = [str(path) for path in import_paths]
    environ = {"PYTHONSAFEPATH": "ddp_hpc", **os.environ}  # else a `json.py` here would be taken for Python's
    with open_private(run.console, "ab") as console:
        return subprocess.Popen(
            [*supervisor_argv(run), *(f"--import-path={path}" for path in paths)],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=environ,
            start_new_session=True,
        )


def _await_training(run: RunDir, attempt: int, guardian: subprocess.Popen[bytes]) -> Attempt | None:
    """Wait until the attempt trains, or has ended; return its ledger entry if it has."""
    deadline = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline:
        is_guarded = guardian.poll() is None  # asked first, so that the last entry is not missed
        entry = _newest_since(run, attempt)
        if entry is not None and entry.is_last:
            return entry
        progress = read_progress(run)
        if progress is not None and progress.attempt >= attempt:
            return None
        if not is_guarded and entry is None:
            raise RunBusyError(f"{run.path} could not be started; {run.console} ends: {_last_line(run.console)}")
        if not is_guarded and entry is not None and not entry.lives(socket.gethostname()):
            raise WorkerError(_gone(run, entry.attempt))
        time.sleep(_POLL_S)
    return None


def wait(run: RunDir, attempt: int) -> Attempt:
    """Return the last attempt, of those from `attempt` on, once it has ended and no other follows.

    Raises:
        WorkerError: where all processes of the run are gone, and none wrote down how it ended.
    """
    files = rereading.LastRead()
    while True:
        is_alive = processes.is_locked(run.lock)
        newest = rereading.newest_attempt(run, files)
        if newest is not None and newest.attempt >= attempt and newest.is_last:
            return newest
        if not is_alive:
            raise WorkerError(_gone(run, attempt if newest is None else max(attempt, newest.attempt)))
        rereading.await_news(newest)


def _gone(run: RunDir, attempt: int) -> str:
    return (
        f"Attempt {attempt} of {run.name} has ended and the ledger does not say how: its supervisor and its guardian are gone. "
        f"They were killed, or the guardian gave up and could not write that down. {run.console} ends: "
        f"{_last_line(run.console)}\nSubmit the run again; it resumes from its newest checkpoint."
    )


def stop(run: RunDir) -> str:
    """Ask the run to commit a checkpoint and leave; return what to tell the user.

    Raises:
        ConfigError: where it is not running.
    """
    if not processes.is_locked(run.lock):
        raise ConfigError(f"{run.name} is not running, so there is nothing to stop.")
    ask_to_stop(run)
    return f"{run.name} was asked to commit a checkpoint and leave. Submit it again to go on."


def cancel(run: RunDir) -> str:
    """End the run at once, without a checkpoint; return what to tell the user.

    Raises:
        ConfigError: where it is not running.
    """
    is_known = False
    deadline = time.monotonic() + VANISH_PATIENCE_S
    while processes.is_locked(run.lock) and time.monotonic() < deadline:
        newest = next(reversed(read_attempts(run)), None)
        if newest is not None:
            is_known = True
            _end_attempt(run, newest)
        time.sleep(_POLL_S)  # a supervisor that the guardian starts meanwhile sees what was written
    if not is_known:
        raise ConfigError(f"{run.name} is not running, so there is nothing to cancel.")
    return f"{run.name} was cancelled. Its newest checkpoint stays; submit it again to go on from there."


def _end_attempt(run: RunDir, attempt: Attempt) -> None:
    """Write down that the user has ended it, and kill its supervisor, if that is a process of this host.

    Raises:
        ConfigError: where it is another host's.
    """
    here = socket.gethostname()
    if attempt.host != here:
        raise ConfigError(
            f"{run.name} was to be cancelled on {here}, but its supervisor is process {attempt.pid} on {attempt.host}. "
            f"Cancel it there, or ask it from here to commit and leave: `ddp-hpc stop {run.name}`."
        )
    if attempt.ending is None or attempt.next:
        end = End(cause=Cause.CANCELLED, last_step=attempt.last_step, failed_nodes=attempt.failed_nodes)
        code, reason = -signal.SIGKILL, "cancelled by the user"
        record_end(run, attempt=attempt.attempt, ending=Ending.CANCELLED, exit_code=code, reason=reason, end=end)
    if attempt.lives(here):
        processes.kill([attempt.pid])


def _newest_since(run: RunDir, attempt: int) -> Attempt | None:
    newest = next(reversed(read_attempts(run)), None)
    return newest if newest is not None and newest.attempt >= attempt else None


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return f"({error.strerror})"
    return lines[-1] if lines else "(nothing)"
