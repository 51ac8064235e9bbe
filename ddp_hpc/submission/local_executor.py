"""Running a training on this machine: the same supervisor, agent and workers as on a cluster, without Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ddp_hpc import exit_codes, ownership, processes
from ddp_hpc.durable import open_private
from ddp_hpc.errors import ConfigError, RunBusyError, WorkerError
from ddp_hpc.records import Attempt, ask_to_stop, newest_attempt, read_attempts, read_progress, record_end
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client
from ddp_hpc.spec import RunSpec
from ddp_hpc.submission import slurm_executor
from ddp_hpc.submission.folder import Submission, is_finished, make_run_dir, note_on_parents, refuse_file_in_the_way
from ddp_hpc.submission.image import look_at_image

START_PATIENCE_S = 120.0
"""How long `submit` waits for the first step to begin before it lets the run go on alone."""
STOP_PATIENCE_S = 600.0
"""How long a run that was told to stop may take to finish its step and commit."""
VANISH_PATIENCE_S = 10.0
"""How long the processes of an attempt that is over may take to vanish."""
_POLL_S = 0.05


def supervisor_argv(run: RunDir) -> list[str]:
    """Return the command of the supervisor of one attempt."""
    return [sys.executable, "-m", "ddp_hpc.job.supervisor", str(run.path)]


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
    in_slurm = (
        slurm_executor.job_of(run, os.environ) if run.submission.exists() and client.is_here(os.environ) else None
    )
    if in_slurm is not None:
        return in_slurm
    if is_finished(run, spec):
        return Submission(run, "finished", newest_attempt(run))
    notes = (
        *look_at_image(spec, run, import_paths, os.environ, is_for_slurm=False),
        *note_on_parents(run.path),
    )
    make_run_dir(run, resolved_text, is_new=is_new)
    attempt = ownership.next_attempt(run)
    supervisor = _start_supervisor(run, import_paths)
    ended = _await_training(run, attempt, supervisor)
    if ended is not None and ended.exit_code == exit_codes.REFUSED:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        raise ConfigError(ended.reason)
    return Submission(run, "started", attempt, is_new=is_new, notes=notes)


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
    if newest.ending is not None or not psutil.pid_exists(newest.pid):
        return VANISH_PATIENCE_S
    return STOP_PATIENCE_S if run.stop_request.exists() else 0.0


def _start_supervisor(run: RunDir, import_paths: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own, so that it outlives this terminal."""
    paths = [str(path) for path in import_paths]
    inherited = os.environ.get("PYTHONPATH")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])])}
    with open_private(run.console, "ab") as console:
        return subprocess.Popen(
            [*supervisor_argv(run), *(f"--import-path={path}" for path in paths)],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=environ,
            start_new_session=True,
        )


def _await_training(run: RunDir, attempt: int, supervisor: subprocess.Popen[bytes]) -> Attempt | None:
    """Wait until the attempt trains, or has ended; return its ledger entry if it has."""
    deadline = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline:
        entry = _entry(run, attempt)
        if entry is not None and entry.ending is not None:
            return entry
        progress = read_progress(run)
        if progress is not None and progress.attempt == attempt:
            return None
        if supervisor.poll() is not None and _entry(run, attempt) is None:
            raise RunBusyError(f"{run.path} could not be started; {run.console} ends: {_last_line(run.console)}")
        time.sleep(_POLL_S)
    return None


def wait(run: RunDir, attempt: int) -> Attempt:
    """Return the attempt once it has ended; an attempt whose processes are gone without a word has failed."""
    while True:
        is_alive = processes.is_locked(run.lock)
        entry = _entry(run, attempt)
        if entry is not None and entry.ending is not None:
            return entry
        if not is_alive:
            raise WorkerError(
                f"Attempt {attempt} of {run.name} is gone without a word: its supervisor was killed. "
                "Submit the run again; it resumes from its newest checkpoint."
            )
        time.sleep(_POLL_S)


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
    attempts = read_attempts(run)
    if not attempts or not processes.is_locked(run.lock):
        raise ConfigError(f"{run.name} is not running, so there is nothing to cancel.")
    newest = attempts[-1]
    record_end(
        run, attempt=newest.attempt, ending="cancelled", exit_code=-signal.SIGKILL, reason="cancelled by the user"
    )
    processes.kill([newest.pid])
    return f"{run.name} was cancelled. Its newest checkpoint stays; submit it again to go on from there."


def _entry(run: RunDir, attempt: int) -> Attempt | None:
    return next((entry for entry in read_attempts(run) if entry.attempt == attempt), None)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "(nothing)"
