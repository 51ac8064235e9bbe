"""Finds a run directory by the run's name, its path or the number of a job."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import RunNotFoundError
from ddp_hpc.base.names import near_names, shorten_names
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import SWEEP_LEDGER, RunDir, is_sweep_dir
from ddp_hpc.run.run_dir.records import read_queued_job

_JOB = re.compile(r"\d+(_\d+)?")
"""The number of a job, or of a task of a job array."""
_SUBMIT_ONE = "Submit one, or name another directory with `--runs-dir`."


def is_run(path: Path) -> bool:
    """Return whether this is the directory of a run."""
    return (path / "config.yaml").is_file()


def list_runs(runs_dir: Path) -> list[RunDir]:
    """Return the readable runs in a directory, the most recently active one last."""
    return scan_runs(runs_dir)[0]


def scan_runs(runs_dir: Path) -> tuple[list[RunDir], int]:
    """Return the runs in a directory, the most recently active one last, and how many entries cannot be read.

    In a directory that several users share, permissions may hide another user's run.
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
                # When an attempt last started or ended, or else when the run was created. A run that is shared with a group
                # may have a configuration that is not: it holds secrets.
                written = [path for path in (run.attempts, run.config) if path.exists()]
                if written and not os.access(written[0], os.R_OK, effective_ids=True):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(written[0]))  # counted below
                found.append((max((path.stat().st_mtime for path in written), default=0.0), run.name, run))
        except OSError:
            num_unreadable += 1
    return [run for _, _, run in sorted(found, key=lambda entry: entry[:2])], num_unreadable


def find_run(text: str, runs_dir: Path) -> RunDir:
    """Return the run that `text` names: a run in `runs_dir`, a run directory, a sweep's point, or a job of a run in `runs_dir`."""
    candidates = ([] if os.sep in text or text in {".", ".."} else [runs_dir / text]) + [Path(text)]
    if os.sep in text:
        candidates.append(runs_dir / text)  # `SWEEP/POINT`; a path that exists here comes first
    for path in candidates:
        if is_run(path):
            return _run_at(path)
    if (point := _point(text, runs_dir)) is not None:
        return point
    if _JOB.fullmatch(text):
        of_sweeps = [run for ledger in runs_dir.glob(f"*/{SWEEP_LEDGER}") for run in list_runs(ledger.parent)]
        for run in reversed([*of_sweeps, *list_runs(runs_dir)]):
            with suppress(OSError):  # a run of another user
                job = read_queued_job(run)
                had = {attempt.job_id for attempt in Ledger.read(run).attempts if attempt.cluster == "slurm"}
                if text in had or (job is not None and job.job_id == text):
                    return run
    raise _not_found(text, runs_dir)


def _point(text: str, runs_dir: Path) -> RunDir | None:
    """Return what `SWEEP/POINT` names, the point by its name or its number; None where there is no such sweep."""
    sweep, _, point = text.rstrip(os.sep).rpartition(os.sep)
    path = next((one for one in (Path(sweep), runs_dir / sweep) if sweep and is_sweep_dir(one)), None)
    if path is None:
        return None
    names = [str(line.get("name")) for line in read_json_lines(path / SWEEP_LEDGER) if "point" in line]
    numbered = {str(number): name for number, name in enumerate(names)}
    name = point if point in names else numbered.get(point.lstrip("0") or "0")
    if name is None:
        near = near_names(point, names, cutoff=0.6) or names[:5]
        raise RunNotFoundError(f"The sweep {sweep!r} has no point {point!r}. Points there: {', '.join(near)}.")
    if not is_run(path / name):
        raise RunNotFoundError(
            f"The point {name!r} of the sweep {sweep!r} has not begun. `ddp-hpc list {sweep}` shows what it waits for."
        )
    return _run_at(path / name)


def _not_found(text: str, runs_dir: Path) -> RunNotFoundError:
    if any(is_sweep_dir(path) for path in (runs_dir / text, Path(text))):
        return RunNotFoundError(
            f"{text!r} is a sweep of several runs. List them with `ddp-hpc list {text}`, and name one by its name or its number: `{text.rstrip(os.sep)}/0`. `ddp-hpc sweep` follows, "
            "continues or cancels all of them."
        )
    names = [run.name for run in list_runs(runs_dir)]
    near = near_names(Path(text).name, names, cutoff=0.6) or names[::-1]
    hint = f"Runs there: {shorten_names(near, 5)}." if near else f"There are no runs there. {_SUBMIT_ONE}"
    return RunNotFoundError(f"{text!r} is neither a run in {str(runs_dir)!r} nor a run directory. {hint}")


def newest_run(runs_dir: Path) -> RunDir:
    """Return the most recently active run."""
    runs = list_runs(runs_dir)
    if not runs:
        raise RunNotFoundError(f"There are no runs in {str(runs_dir)!r}. {_SUBMIT_ONE}")
    return runs[-1]


def _run_at(path: Path) -> RunDir:
    return RunDir(Path(os.path.abspath(path)))  # noqa: PTH100  # removes `.` and `..`, but keeps links as the user named them
