"""The run directory as `submit` makes it, whichever back end the run goes to."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.base.durable import fsync_path, make_directories, make_directory, replace_text
from ddp_hpc.base.errors import ConfigError, RunBusyError
from ddp_hpc.base.leftovers import name_beside
from ddp_hpc.run.run_dir.paths import RunDir, holds_sweep
from ddp_hpc.run.run_dir.records import is_done
from ddp_hpc.run.run_dir.strangers import refuse_strangers
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of


def is_finished(run: RunDir, spec: RunSpec) -> bool:
    """Return whether the run has done all that its configuration asks for."""
    return is_done(run, workload_of(spec).goal)


def refuse_unusable_place(run: RunDir) -> None:
    """Refuse a run's directory that is a sweep's, or is a file, or would lie below one or where nothing may be written."""
    if holds_sweep(run.path):
        raise ConfigError(
            f"{run.name} is a sweep in {run.path}, so no run can have its name. To send the points that no job has: `ddp-hpc sweep "
            f"continue {run.name}`. For a run, choose another `name=...`."
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
                f"`runs_dir` and `name` put the run at {run.path}, but {place} is a file, not a directory. "
                "Choose another directory with `runs_dir=...`."
            )
        if place != run.path and not os.access(place, os.W_OK | os.X_OK):
            raise _unwritable(run, PermissionError(errno.EACCES, os.strerror(errno.EACCES)), is_new=True)
        return


def refuse_missing_recorders(spec: RunSpec) -> None:
    """Refuse recorders whose package this Python lacks, where workers surely use the same one; otherwise rank zero looks."""
    if not spec.own_environment:
        spec.log.require_recorders()


def refuse_several_torchruns(spec: RunSpec) -> None:
    """Refuse several workers a node that would each start a torchrun of its own, and so train apart from each other."""
    if not spec.script.is_set or spec.resources.local_world_size == 1:
        return
    program = spec.script.program
    is_torchrun = program.name == "torchrun" or program.module in {"torch.distributed.run", "torch.distributed.launch"}
    if is_torchrun and not any(re.match(r"--(nnodes|rdzv)", word) for word in program.arguments):
        raise ConfigError(
            f"`script.command` starts torchrun, and `resources.workers_per_node` is {spec.resources.local_world_size}: each worker would start a "
            "torchrun of its own, which trains apart from the others. Name the script alone (`-- python train.py`), as its workers get "
            "torchrun's variables; or set `resources.workers_per_node=1`."
        )


def refuse_missing_nsys(spec: RunSpec, environ: Mapping[str, str]) -> None:
    """Refuse a profile by Nsight Systems where this machine, on which the workers run, has no such program.

    Raises:
        ConfigError: where that is so; nothing is known of an image.
    """
    path = spec.env.get("PATH", environ.get("PATH"))
    if spec.profile.kind == "nsys" and not spec.container.image and shutil.which("nsys", path=path) is None:
        raise ConfigError(
            "`profile.kind` is 'nsys', but there is no program 'nsys' on this machine's PATH. Install Nsight Systems, set PATH by "
            "`env.PATH`, or use `profile.kind=torch`."
        )


def make_run_dir(run: RunDir, resolved_text: str, *, is_new: bool) -> None:
    """Make the run's directory by one rename, or renew its configuration."""
    try:
        if not is_new:
            refuse_strangers(run.path)
            for word in (run.done, run.gave_up, run.stop_request):  # of earlier jobs
                word.unlink(missing_ok=True)
            replace_text(run.config, resolved_text, is_secret=True)
            return
        make_directories(run.path.parent)
        beside = RunDir(name_beside(run.path))
        beside.path.mkdir(mode=0o700)
        try:
            replace_text(beside.config, resolved_text, is_secret=True)
            make_directory(beside.console.parent)
            beside.path.rename(run.path)  # fails where a run exists by now: only this process fills a new run
        except OSError as error:
            shutil.rmtree(beside.path, ignore_errors=True)
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise ConfigError(
                    f"The run's directory {run.path} exists, but its configuration file was not visible a moment ago. Another "
                    "submission made it meanwhile, or its file system was slow to show it: submit again. Where it holds no run, "
                    "choose another `name=...`."
                ) from error
            raise
        fsync_path(run.path.parent)
    except OSError as error:
        raise _unwritable(run, error, is_new=is_new) from error


@contextmanager
def unchanged_if_refused(run: RunDir) -> Iterator[None]:
    """Put back what `make_run_dir` changes in a run that exists, where the submission is refused."""
    files = (run.config, run.job_script, run.done, run.gave_up, run.stop_request)
    before = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in files}
    try:
        yield
    except ConfigError:
        for path, text in before.items():
            if text is None:
                path.unlink(missing_ok=True)
            else:
                replace_text(path, text, is_secret=path == run.config)
        raise


@contextmanager
def submitting_alone(run: RunDir, *, patience_s: float) -> Iterator[None]:
    """Let one process at a time submit a run that has a directory: two that find it idle would start it twice.

    Raises:
        ConfigError: where the run's directory is another user's, or cannot be written.
        RunBusyError: where another process submits the run for longer than `patience_s`, or has removed it.
    """
    refuse_strangers(run.path)  # first: the owner of the directory could hold the lock, or replace it by a link
    lock_fd = _submission_lock(run, patience_s)
    try:
        if not run.config.exists():
            raise RunBusyError(_removed(run))
        yield
    finally:
        processes.release_lock(lock_fd)


def _submission_lock(run: RunDir, patience_s: float) -> int:
    try:
        lock_fd = processes.take_lock(run.submission_lock, patience_s=patience_s)
    except FileNotFoundError as error:
        raise RunBusyError(_removed(run)) from error
    except OSError as error:
        raise _unwritable(run, error, is_new=False) from error
    if lock_fd is None:
        raise RunBusyError(
            f"Another process has been submitting {run.name} for {patience_s:.0f} s. Submit again when it is done."
        )
    # While this process waited, another one may have removed the run and a third one made it anew: then the lock is that of
    # a file which nobody else finds.
    # Both signs together: some file systems (CIFS, FUSE) number a file anew at each look, some report no links at all.
    with suppress(FileNotFoundError):
        held, found = os.fstat(lock_fd), run.submission_lock.stat()
        if held.st_nlink or os.path.samestat(held, found):
            return lock_fd
    processes.release_lock(lock_fd)
    raise RunBusyError(_removed(run))


def _removed(run: RunDir) -> str:
    return (
        f"The directory of {run.name} existed a moment ago and is missing now. Another submission of the run was refused "
        "and removed it, or its file system is slow to show it. Submit again."
    )


def _unwritable(run: RunDir, error: OSError, *, is_new: bool) -> ConfigError:
    """Return the refusal; a run that exists would begin at step 0 in another directory."""
    other = ", or choose another directory with `runs_dir=...`" if is_new else ""
    return ConfigError(
        f"The run's directory {run.path} cannot be written: {error.strerror or error}. Free space there, or make it writable{other}; "
        "then submit again."
    )


def note_on_parents(path: Path) -> Iterator[str]:
    """Yield a note for each parent in which any user could replace the run's directory, even though that directory is closed."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode if folder.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield (
                f"note: every user of this host may rename and replace the runs in {folder}. Run `chmod o-w "
                f"{shlex.quote(str(folder))}` if the directory is yours; otherwise choose another `runs_dir`."
            )
