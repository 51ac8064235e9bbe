"""The run directory as `submit` makes it, whichever back end the run goes to."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.base.durable import fsync_path, make_directories, make_directory, replace_text
from ddp_hpc.base.errors import ConfigError, RunBusyError
from ddp_hpc.base.leftovers import scratch_dir_path
from ddp_hpc.launch.submission.backend import Submission, find_job_elsewhere
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.run.config.resolve import Resolved, render_resolved
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir, is_sweep_dir
from ddp_hpc.run.run_dir.records import is_done
from ddp_hpc.run.run_dir.write_permissions import refuse_strangers_dir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of

PROCESS_EXIT_PATIENCE_S = 10.0
"""How long the processes of an attempt that is over may take to vanish."""


def is_finished(run: RunDir, spec: RunSpec) -> bool:
    """Return whether the run has done all that its configuration asks for."""
    return is_done(run, workload_of(spec).goal)


def refuse_unusable_place(run: RunDir) -> None:
    """Refuse a run's directory that is a sweep's, or is a file, or would lie below one or where nothing may be written."""
    if is_sweep_dir(run.path):
        raise ConfigError(
            f"{run.name} is a sweep in {run.path}, so no run can have its name. To send the points that no job has: `ddp-hpc sweep "
            f"continue {run.word}`. For a run, choose another `name=...`."
        )
    for place in (run.path, *run.path.parents):
        try:
            mode = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue  # the next one above says more
        except OSError:
            return  # the code that opens the path reports why it fails
        if not stat.S_ISDIR(mode):
            raise ConfigError(
                f"`runs_dir` and `name` put the run at {run.path}, but {place} is a file, not a directory. Choose another directory with `runs_dir=...`."
            )
        if place != run.path and not os.access(place, os.W_OK | os.X_OK):
            raise _unwritable_error(run, PermissionError(errno.EACCES, os.strerror(errno.EACCES)), is_new=True)
        return


def check_settings(spec: RunSpec, path: Path, environ: Mapping[str, str]) -> list[str]:
    """Refuse settings that no back end can start, before anything is made at `path`; return notes on others."""
    if not spec.environment_key:  # else workers may have the packages that this Python lacks: rank zero looks
        spec.log.require_recorders()
    refuse_torchrun_per_worker(spec)
    notes = [*notes_on_writable_parents(path)]
    program, search_path = next(iter(spec.notify.command), None), spec.env.get("PATH", environ.get("PATH"))
    if program is not None and shutil.which(program, path=search_path) is None:
        notes.append(
            f"note: `notify.command` starts {program!r}, and this host has no such program. Correct the name, unless the host that runs the supervisor has it."
        )
    return notes


def refuse_torchrun_per_worker(spec: RunSpec) -> None:
    """Refuse several workers a node that would each start a torchrun of its own, so also where all of these meet at one place."""
    if not spec.script.is_set or spec.resources.local_world_size == 1:
        return
    program = spec.script.program
    is_torchrun = program.name == "torchrun" or program.module in {"torch.distributed.run", "torch.distributed.launch"}
    if is_torchrun:
        raise ConfigError(
            f"`script.command` starts torchrun, and `resources.workers_per_node` is {spec.resources.local_world_size}: each worker would start a "
            "torchrun of its own with ranks of its own. Name the script alone (`-- python train.py`), as its workers get "
            "torchrun's variables; or set `resources.workers_per_node=1`."
        )


def make_run_dir(run: RunDir, resolved_text: str, *, is_new: bool) -> None:
    """Make the run's directory by one rename, or renew its configuration."""
    if is_new:
        processes.release_lock(_make_locked_dir(run, resolved_text))
        return
    try:
        refuse_strangers_dir(run.path)
        for word in (run.done, run.gave_up, run.stop_request):  # of earlier jobs
            word.unlink(missing_ok=True)
        replace_text(run.config, resolved_text, is_secret=True)
    except OSError as error:
        raise _unwritable_error(run, error, is_new=False) from error


def _make_locked_dir(run: RunDir, resolved_text: str) -> int:
    """Make a new run's directory by one rename, of which only this process may submit the run; return its lock."""
    try:
        make_directories(run.path.parent)
        beside = RunDir(scratch_dir_path(run.path))
        beside.path.mkdir(mode=0o700)
        try:
            replace_text(beside.config, resolved_text, is_secret=True)
            make_directory(beside.console.parent)
            return _lock_and_rename(beside, run)
        except OSError as error:
            shutil.rmtree(beside.path, ignore_errors=True)
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise ConfigError(
                    f"The run's directory {run.path} exists, but its configuration file was not visible a moment ago. Another "
                    "submission made it meanwhile, or its file system was slow to show it: submit again. Where it holds no run, choose another `name=...`."
                ) from error
            raise
    except OSError as error:
        raise _unwritable_error(run, error, is_new=True) from error


def _lock_and_rename(beside: RunDir, run: RunDir) -> int:
    lock_fd = processes.take_lock(beside.submission_lock)
    assert lock_fd is not None  # noqa: S101  nobody else knows that file
    try:
        beside.path.rename(run.path)  # fails where a run exists by now: only this process fills a new run
        fsync_path(run.path.parent)
    except OSError as error:
        processes.release_lock(lock_fd)  # also because NFS keeps a directory that has an open file in it
        if not isinstance(error, PermissionError):
            raise
        beside.path.rename(run.path)  # SMB renames no directory that has an open file in it
        return _take_submission_lock(run, 0.0)
    return lock_fd


@dataclass
class SubmissionLock:
    """A run's directory while this process, and no other, submits the run."""

    run: RunDir
    lock_fd: int | None
    """None for a new run until `write` makes its directory."""
    is_new: bool
    is_to_stay: bool = False
    """Whether an error leaves a new run's directory: something is started in it."""
    before: Mapping[Path, str | None] = field(default_factory=dict)
    """What `write` has changed in a run that was there."""

    def write(self, resolved: Resolved) -> None:
        """Make the run's directory, or renew its configuration."""
        run, text = self.run, render_resolved(resolved)
        if self.is_new:
            self.lock_fd = _make_locked_dir(run, text)
            return
        files = (run.config, run.job_script, run.done, run.gave_up, run.stop_request)
        code = str(run.snapshot.readlink()) if run.snapshot.is_symlink() else None
        texts = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in files}
        self.before = {**texts, run.snapshot: code}
        make_run_dir(run, text, is_new=False)


@contextmanager
def lock_submission(run: RunDir, *, patience_s: float) -> Iterator[SubmissionLock]:
    """Let one process at a time submit a run: two that find it idle would start it twice.

    After an error, nothing is left of a new run that was not started; another one is left as it was.
    """
    refuse_unusable_place(run)
    claim = SubmissionLock(run, None, is_new=not run.config.exists())
    if not claim.is_new:
        refuse_strangers_dir(run.path)  # first: the owner of the directory could hold the lock, or replace it by a link
        claim.lock_fd = _take_submission_lock(run, patience_s)
    try:
        yield claim
    except BaseException:
        if claim.is_new and claim.lock_fd is not None and not claim.is_to_stay:
            processes.release_lock(claim.lock_fd)  # first: NFS keeps a directory with an open file
            claim.lock_fd = None
            shutil.rmtree(run.path, ignore_errors=True)
        elif not claim.is_new and not claim.is_to_stay:
            for path, text in claim.before.items():
                if text is None or path == run.snapshot:
                    path.unlink(missing_ok=True)
                if text is not None and path == run.snapshot:
                    path.symlink_to(text)
                elif text is not None:
                    replace_text(path, text, is_secret=path == run.config)
        raise
    finally:
        if claim.lock_fd is not None:
            processes.release_lock(claim.lock_fd)


def find_existing_start(request: SubmitRequest, backend: str, here: Submission | None) -> Submission | None:
    """Return why no new start is needed: the run waits or runs, `here` in this back end or in another one, or has finished."""
    run = request.run
    there = here or find_job_elsewhere(run, backend, request.environ)
    if there is None and is_finished(run, request.spec):
        return Submission(run, backend, "finished", Ledger.read(run).newest_number)
    return there


def _take_submission_lock(run: RunDir, patience_s: float) -> int:
    try:
        lock_fd = processes.take_lock(run.submission_lock, patience_s=patience_s)
    except FileNotFoundError as error:
        raise RunBusyError(_removed_message(run)) from error
    except OSError as error:
        raise _unwritable_error(run, error, is_new=False) from error
    if lock_fd is None:
        raise RunBusyError(
            f"Another process has been submitting {run.name} for {patience_s:.0f} s. Submit again when it is done."
        )
    # While this process waited, another one may have removed the run and a third one made it anew: then the lock is that of
    # a file which nobody else finds.
    # Both signs together: some file systems (CIFS, FUSE) number a file anew at each look, some report no links at all.
    with suppress(FileNotFoundError):
        held, found = os.fstat(lock_fd), run.submission_lock.stat()
        if run.config.exists() and (held.st_nlink or os.path.samestat(held, found)):
            return lock_fd
    processes.release_lock(lock_fd)
    raise RunBusyError(_removed_message(run))


def _removed_message(run: RunDir) -> str:
    return (
        f"The directory of {run.name} existed a moment ago and is missing now. Another submission of the run was refused "
        "and removed it, or its file system is slow to show it. Submit again."
    )


def _unwritable_error(run: RunDir, error: OSError, *, is_new: bool) -> ConfigError:
    """Return the refusal; a run that exists would begin at step 0 in another directory."""
    other = ", or choose another directory with `runs_dir=...`" if is_new else ""
    return ConfigError(
        f"The run's directory {run.path} cannot be written: {error.strerror or error}. Free space there, or make it writable{other}; then submit again."
    )


def notes_on_writable_parents(path: Path) -> Iterator[str]:
    """Yield a note for each parent in which any user could replace the run's directory, even though that directory is closed."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode if folder.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield (
                f"note: every user of this host may rename and replace the runs in {folder}. Run `chmod o-w "
                f"{shlex.quote(str(folder))}` if the directory is yours; otherwise choose another `runs_dir`."
            )
