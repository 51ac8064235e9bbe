"""The directory of a sweep: its paths, its points, which of them were sent, have begun, have failed or wait; and who sends points."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hpc.base import processes
from ddp_hpc.base.durable import (
    append_json_line,
    fsync_path,
    make_directories,
    make_directory,
    read_json_lines,
    replace_text,
)
from ddp_hpc.base.errors import ConfigError, RunBusyError, UnreadableError
from ddp_hpc.base.leftovers import scratch_dir_path
from ddp_hpc.base.patience import ask_once
from ddp_hpc.cluster.slurm import states
from ddp_hpc.launch.sweep.points import Point
from ddp_hpc.run.config.resolve import Resolved, load_resolved, render_resolved
from ddp_hpc.run.run_dir.ledger import Attempt, Ending, Ledger
from ddp_hpc.run.run_dir.paths import SWEEP_LEDGER, RunDir, RunPath, is_sweep_dir

if TYPE_CHECKING:
    from ddp_hpc.cluster.slurm.queries import QueuedEntry
    from ddp_hpc.watch.queue import QueueStatus


class SweepDir(RunDir):
    """The paths of a sweep, in whose directory its points' runs lie. Its job script and its snapshot are where a run has them."""

    base = RunPath("base.yaml")
    """The configuration that all points share."""
    ledger = RunPath(SWEEP_LEDGER)
    """The points, and the arrays of them that were sent; locked (flock) by the process that sends some, or runs them here."""
    logs = RunPath("logs")
    """What tasks print before they find their run."""

    def run(self, point: Point) -> RunDir:
        return RunDir(self.path / point.name)


@dataclass(frozen=True, kw_only=True)
class SentArray:
    """Points that were sent to Slurm as one job array."""

    numbers: tuple[int, ...]
    """Of the points."""
    offset: int = 0
    """The number of the point of task 0."""
    job_id: str = ""
    """Empty until it is known that Slurm has accepted the array."""
    at: float = 0.0
    """When Slurm accepted it."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep's files say."""

    dir: SweepDir
    points: Sequence[Point]
    arrays: Sequence[SentArray] = ()
    """Oldest first."""
    unanswered: SentArray | None = None
    """What was sent last, where it is not known whether Slurm has accepted it."""
    backend: str = "slurm"
    work_dir: Path = field(default_factory=Path.cwd)
    """Where the sweep was submitted: relative paths of its configuration and its script are looked for there."""
    slurm_cluster: str = ""
    """The ClusterName of the Slurm that has its arrays; empty where that is not known."""
    import_paths: tuple[Path, ...] = ()
    """Where jobs import the user's code from."""
    at_most: int | None = None
    """How many points may run at once."""
    stop_after_failures: int | None = None
    """From how many failed points on no other point starts."""
    forgiven: Mapping[int, int] = field(default_factory=dict)
    """Points that had failed when the user continued the sweep -> the attempt that had; `stop_after_failures` does not count them."""
    is_cancelled: bool = False
    """Whether the user has cancelled it, and has not continued it since."""
    sent_since_cancel: frozenset[int] | None = None
    """Numbers of the points that were sent after the user has cancelled the sweep for the last time; None where nobody has."""

    @property
    def never_sent(self) -> list[int]:
        """Numbers of the points that no array has had, as far as that is known."""
        sent = {number for array in self.arrays for number in array.numbers} | self.unanswered_numbers
        return [point.number for point in self.points if point.number not in sent]

    @property
    def unanswered_numbers(self) -> set[int]:
        """Numbers of the points of which it is not known whether Slurm has them."""
        return set() if self.unanswered is None else set(self.unanswered.numbers)

    @property
    def cancelled_numbers(self) -> set[int]:
        """Numbers of the points that the user has cancelled with the whole sweep, and that were not sent since."""
        since = self.sent_since_cancel
        return set() if since is None else {point.number for point in self.points} - since


def sweep_named(text: str, runs_dir: Path) -> SweepDir | None:
    """Return the sweep that `text` names: a sweep in `runs_dir`, or its directory; None where there is none."""
    paths = (path for path in (runs_dir / text, Path(text)) if is_sweep_dir(path))
    return next((SweepDir(Path(os.path.abspath(path))) for path in paths), None)  # noqa: PTH100  as `find_run` does


def find_sweep(text: str, runs_dir: Path) -> SweepDir:
    """Return the sweep that `text` names: a sweep in `runs_dir`, or its directory."""
    found = sweep_named(text, runs_dir)
    if found is not None:
        return found
    raise ConfigError(
        f"{text!r} is neither a sweep in {str(runs_dir)!r} nor a sweep's directory. Make one with `ddp-hpc submit CONFIG --sweep KEY=VALUES`."
    )


def make_sweep(
    sweep: Sweep,
    base: Resolved,
    fill: Callable[[SweepDir], object] = lambda _beside: None,
    *,
    until_sent: ExitStack | None = None,
) -> None:
    """Make the sweep's directory by one rename, with what `fill` writes into it; a killed process leaves a hidden directory.

    No other process sends its points before `until_sent` is closed.
    """
    path = sweep.dir.path
    refuse_existing(sweep.dir)
    header = {
        "sweep": sweep.dir.name,
        "num_points": len(sweep.points),
        "at": time.time(),
        "backend": sweep.backend,
        "slurm_cluster": sweep.slurm_cluster,
        "import_paths": [str(path) for path in sweep.import_paths],
        "work_dir": str(Path.cwd()),
        "at_most": sweep.at_most,
        "stop_after_failures": sweep.stop_after_failures,
    }
    lines = [header, *({"point": one.number, "name": one.name, "set": one.settings} for one in sweep.points)]
    beside = SweepDir(scratch_dir_path(path))
    try:
        make_directories(path.parent)
        beside.path.mkdir(mode=0o700)
        try:
            replace_text(beside.base, render_resolved(base), is_secret=True)
            replace_text(
                beside.ledger,
                "".join(f"{json.dumps(each, separators=(',', ':'), default=str)}\n" for each in lines),
                is_secret=True,
            )
            make_directory(beside.logs)
            fill(beside)
            lock_fd = None if until_sent is None else processes.take_lock(beside.ledger)
            if until_sent is not None and lock_fd is not None:
                until_sent.callback(processes.release_lock, lock_fd)
            beside.path.rename(path)
        except BaseException as error:
            shutil.rmtree(beside.path, ignore_errors=True)
            if isinstance(error, OSError):
                refuse_existing(sweep.dir)
            raise
        fsync_path(path.parent)
    except OSError as error:
        raise ConfigError(
            f"The sweep's directory {path} cannot be written: {error.strerror or error}. Choose another directory with `runs_dir=...`."
        ) from error


def refuse_existing(sweep: SweepDir) -> None:
    """Refuse a name that is in use."""
    if is_sweep_dir(sweep.path):
        raise ConfigError(
            f"The sweep {sweep.name} exists already in {sweep.path}, and its points never change. To send those that were not "
            f"submitted, or that failed: `ddp-hpc sweep continue {sweep.word}`. For other points, choose another `name=...`."
        )
    if sweep.path.exists():
        raise ConfigError(
            f"{sweep.path} exists already, but it is not a sweep. Choose another name for the sweep with `name=...`."
        )


def append_record(sweep: SweepDir, **fields: object) -> None:
    """Add a line to the ledger: an array that is about to be sent, that Slurm has accepted or refused; or that the user has cancelled the sweep."""
    append_json_line(sweep.ledger, {**fields, "at": time.time()})


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return the numbers of `0-3,7`, and of `9-19:2`, as squeue prints tasks that are equally far apart."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(numbers)


def read_sweep(sweep: SweepDir) -> Sweep:
    """Return what the sweep's files say."""
    try:
        records = [*read_json_lines(sweep.ledger)]
        header = records[0] if records else {}
        points = [Point(one["point"], one["name"], one["set"]) for one in records if "point" in one]
        if [point.number for point in points] != list(range(header["num_points"])):
            raise ValueError(f"it has {len(points)} of {header['num_points']} points")  # noqa: TRY301  as any other damage
        found = Sweep(
            dir=sweep,
            points=points,
            backend=str(header["backend"]),
            slurm_cluster=str(header.get("slurm_cluster", "")),
            import_paths=tuple(map(Path, header["import_paths"])),
            work_dir=Path(header["work_dir"]),
            at_most=header["at_most"],
            stop_after_failures=header["stop_after_failures"],
        )
        for one in records:
            found = _apply_line(found, one)
    except OSError as error:
        raise UnreadableError(
            f"The sweep's list of points {sweep.ledger} cannot be read now: {error.strerror}. Try again later."
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The sweep's list of points {sweep.ledger} is damaged ({error}). Restore the file, or make another sweep; this sweep's runs are not affected."
        ) from error
    return found


def _apply_line(sweep: Sweep, line: Mapping[str, Any]) -> Sweep:
    """Return the sweep after what a line says of its arrays, or of what the user has decided on it since."""
    of, since = sweep.unanswered, sweep.sent_since_cancel
    if "sending" in line:
        # Older versions wrote the points beside a token, and the token into the lines that follow.
        sent = SentArray(numbers=parse_ranges(line.get("points", line["sending"])), offset=line["offset"])
        return replace(sweep, unanswered=sent, sent_since_cancel=None if since is None else since.union(sent.numbers))
    if "array" in line:
        if of is None:
            raise ValueError(f"array {line['array']} has no points")
        array = replace(of, job_id=line["array"], at=line["at"])
        return replace(sweep, unanswered=None, arrays=(*sweep.arrays, array))
    if "refused" in line:
        return replace(sweep, unanswered=None, sent_since_cancel=since and since - sweep.unanswered_numbers)
    if "cancelled" in line:
        is_cancelled = bool(line["cancelled"])
        return replace(sweep, is_cancelled=is_cancelled, sent_since_cancel=frozenset() if is_cancelled else since)
    if "continued" in line:
        forgiven = {int(number): attempt for number, attempt in line["forgiven"].items()}
        return replace(sweep, is_cancelled=bool(line["is_cancelled"]), forgiven=forgiven, **line["limits"])
    return sweep


def record_continued(
    sweep: SweepDir, *, is_cancelled: bool, forgiven: Mapping[int, int], limits: Mapping[str, int | None]
) -> None:
    """Record with what the user continues the sweep; `is_cancelled`: points that have not begun stay cancelled."""
    append_record(sweep, continued=True, is_cancelled=is_cancelled, forgiven=dict(forgiven), limits=dict(limits))


def load_base(sweep: SweepDir, *, is_patient: bool = False) -> Resolved:
    """Return the configuration that all points share, as of the directory that the sweep is in now."""
    from ddp_hpc.run.config.resolve import flat_spec

    spec = load_resolved(sweep.base, is_patient=is_patient)
    spec = replace(spec, name=sweep.name, runs_dir=str(sweep.path.parent.absolute()))
    return Resolved(spec, dict.fromkeys(flat_spec(spec), f"sweep {sweep.name}"))


def has_begun(run: RunDir) -> bool:
    """Return whether a task, or this machine, has made the point's run."""
    return ask_once(run.config, run.config.exists, unknown=True)


def has_ended(run: RunDir) -> bool:
    """Return whether the run's newest attempt is known to have ended, and no other follows; a run without an attempt has not."""
    newest = _newest_attempt(run)
    return newest is not None and newest.is_last


def _newest_attempt(run: RunDir) -> Attempt | None:
    try:
        return Ledger.read(run).newest
    except (OSError, UnreadableError):  # of one point; the others are not to wait for its file system
        return None


def num_failed(sweep: Sweep) -> int:
    """Return how many points have failed since the user has continued the sweep for the last time."""
    return sum(sweep.forgiven.get(number) != attempt for number, attempt in failed_attempts(sweep).items())


def failed_attempts(sweep: Sweep) -> dict[int, int]:
    """Return the points that have failed, and the attempt that has."""
    newest = {point.number: _newest_attempt(sweep.dir.run(point)) for point in sweep.points}
    return {
        number: one.attempt
        for number, one in newest.items()
        if one is not None and one.is_last and one.ending in {Ending.FAILED, Ending.REFUSED}
    }


@contextmanager
def lock_sending(sweep_dir: SweepDir, refusal: str, *, patience_s: float = 0.0) -> Iterator[None]:
    """Keep other processes from sending points, or running them here, in the `with` block; refuse where one does so already."""
    lock_fd = processes.take_lock(sweep_dir.ledger, patience_s=patience_s)
    if lock_fd is None:
        raise RunBusyError(refusal)
    try:
        yield
    finally:
        processes.release_lock(lock_fd)


def is_being_sent(sweep_dir: SweepDir) -> bool:
    """Return whether a process of this host sends points, or runs them here; False where the file system has no locks."""
    try:
        return processes.is_locked(sweep_dir.ledger)
    except OSError:
        return False


def points_in_queue(array: SentArray, queued: Iterable[QueuedEntry | QueueStatus]) -> set[int]:
    """Return which points of an array have a task that waits or runs."""
    tasks: set[int] = set()
    for entry in queued:
        job, _, task = entry.job_id.partition("_")
        if job != array.job_id or entry.state is None or states.has_ended(entry.state):
            continue
        listed = task.strip("[]").partition("%")[0]
        try:
            tasks |= set(parse_ranges(listed))
        except ValueError:  # a list that squeue has cut off, or one it writes in another way: any of them may wait
            return set(array.numbers)
    return {number for number in array.numbers if number - array.offset in tasks}
