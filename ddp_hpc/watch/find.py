"""From a run's name or directory to its run directory."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from ddp_hpc.errors import RunNotFoundError
from ddp_hpc.ledger import Ledger
from ddp_hpc.records import read_queued_job
from ddp_hpc.run_dir import RunDir

_JOB = re.compile(r"\d+(_\d+)?")
"""A job's number, or that of a task of an array."""


def is_run(path: Path) -> bool:
    """Return whether a run lives in this directory."""
    return (path / "config.yaml").is_file()


def list_runs(runs_dir: Path) -> list[RunDir]:
    """Return the runs in a directory, the one that was touched last at the end; those that cannot be read are left out."""
    return look_for_runs(runs_dir)[0]


def look_for_runs(runs_dir: Path) -> tuple[list[RunDir], int]:
    """Return the runs in a directory, the one that was touched last at the end, and how many entries cannot be read.

    Another user's run, in a directory that several share, may be closed to us.
    """
    found, num_unreadable = [], 0
    try:
        paths = [path for path in runs_dir.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    for path in paths:
        try:
            if is_run(path):
                run = _run_at(path)
                if not os.access(run.config, os.R_OK, effective_ids=True):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run.config))  # counted below
                found.append((_touched_at(run), run.name, run))
        except OSError:
            num_unreadable += 1
    return [run for _, _, run in sorted(found, key=lambda entry: entry[:2])], num_unreadable


def find_run(text: str, runs_dir: Path) -> RunDir:
    """Return the run of that name in `runs_dir`, the one that lives in the directory `text`, or the one of that job.

    Raises:
        RunNotFoundError: where there is none, with the nearest names.
    """
    candidates = ([] if os.sep in text or text in {".", ".."} else [runs_dir / text]) + [Path(text)]
    for path in candidates:
        if is_run(path):
            return _run_at(path)
    if _JOB.fullmatch(text):
        for run in reversed(list_runs(runs_dir)):
            with suppress(OSError):  # another user's
                if text in _jobs_of(run):
                    return run
    raise _not_found(text, runs_dir)


def _jobs_of(run: RunDir) -> set[str]:
    """Return the numbers of the Slurm jobs that a run had."""
    job = read_queued_job(run)
    had = {attempt.job_id for attempt in Ledger.read(run).attempts if attempt.cluster == "slurm"}
    return had if job is None else had | {job.job_id}


def _not_found(text: str, runs_dir: Path) -> RunNotFoundError:
    import difflib  # late: only an error waits for it

    names = [run.name for run in list_runs(runs_dir)]
    near = difflib.get_close_matches(Path(text).name, names, n=3) or names[-5:][::-1]
    told = (
        f" There is {', '.join(near)}." if near else " It has no runs: submit one, or name another with `--runs-dir`."
    )
    return RunNotFoundError(f"{text!r} is neither a run in {str(runs_dir)!r} nor the directory of one.{told}")


def newest_run(runs_dir: Path) -> RunDir:
    """Return the run that was touched last.

    Raises:
        RunNotFoundError: where there is none.
    """
    runs = list_runs(runs_dir)
    if not runs:
        raise RunNotFoundError(
            f"There are no runs in {str(runs_dir)!r}. Submit one, or name another directory with `--runs-dir`."
        )
    return runs[-1]


def _run_at(path: Path) -> RunDir:
    return RunDir(Path(os.path.abspath(path)))  # noqa: PTH100  # `.` and `..` go, links stay as the user named them


def _touched_at(run: RunDir) -> float:
    """Return when an attempt last began or ended, or else when the run was made."""
    return max((path.stat().st_mtime for path in (run.attempts, run.config) if path.exists()), default=0.0)
