"""Rename or delete a run's directory once no process works on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.base.durable import fsync_path
from ddp_hpc.base.errors import ConfigError, RunBusyError
from ddp_hpc.launch.submission.backend import backends_of
from ddp_hpc.launch.submission.run_dir_setup import PROCESS_EXIT_PATIENCE_S
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir


@contextmanager
def rename_aside(run: RunDir, environ: Mapping[str, str]) -> Iterator[Path | None]:
    """Rename the run's directory to `NAME.old-1` (or -2, ...), for a new run of its name; yield the new path.

    Where the caller then fails to make the new run, the old one comes back. Yields None where there is no run.
    """
    if not run.config.exists():
        yield None
        return
    with _lock_idle_run(run, environ):
        names = (run.path.with_name(f"{run.name}.old-{count}") for count in range(1, 2**31))
        aside = next(path for path in names if not os.path.lexists(path))
        _rename(run.path, aside)
    try:
        yield aside
    except BaseException:
        if not os.path.lexists(run.path):
            _rename(aside, run.path)
        raise


def delete_run(run: RunDir, environ: Mapping[str, str]) -> None:
    """Delete the run's directory. Links in it are deleted, and what they lead to stays.

    It begins with a rename to a hidden name, so that nobody takes a half-deleted one for a run.
    """
    with _lock_idle_run(run, environ):
        away = rename_to_hidden(run.path)
    delete_renamed(away, f"The run {run.name}")


def rename_to_hidden(path: Path) -> Path:
    """Give a directory that is to be deleted a hidden name; return the new path."""
    away = path.with_name(f".{path.name}.{os.urandom(4).hex()}.deleted")
    _rename(path, away)
    return away


def delete_renamed(away: Path, what: str) -> None:
    """Delete a directory that nobody finds by its name any more."""
    try:
        shutil.rmtree(away)
    except OSError as error:
        raise ConfigError(
            f"{what} was removed, but some of its files could not be deleted: {error}. Delete {away} yourself."
        ) from error


def _rename(path: Path, target: Path) -> None:
    try:
        path.rename(target)
        fsync_path(target.parent)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be renamed to {target.name}: {error.strerror or error}. Check that you may write to {path.parent}."
        ) from error


@contextmanager
def _lock_idle_run(run: RunDir, environ: Mapping[str, str]) -> Iterator[None]:
    """Keep other processes from starting the run in the `with` block."""
    if run.path.is_symlink():
        raise ConfigError(
            f"{run.path} is a symbolic link to {run.path.readlink()}, so it was left as it is. Give that directory's path, or remove the link."
        )
    newest = Ledger.read(run).newest
    is_over = newest is not None and newest.ending is not None
    lock_fd = processes.take_lock(run.lock, patience_s=PROCESS_EXIT_PATIENCE_S if is_over else 0.0)
    if lock_fd is None:
        raise RunBusyError(
            f"{run.name} is running on this machine, so it cannot be deleted or renamed. Stop it first: `ddp-hpc cancel {run.word}`."
        )
    try:
        with suppress(OSError):  # a file system without locks
            if processes.is_locked(run.submission_lock):
                raise RunBusyError(
                    f"Another process is submitting {run.name} at this moment, so the run cannot be deleted or renamed. Try again when that is done."
                )
        problem = next(filter(None, (backend.why_in_use(run, environ) for backend in backends_of(run))), None)
        if problem:
            raise RunBusyError(problem)
        yield
    finally:
        os.close(lock_fd)
