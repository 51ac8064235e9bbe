"""Show how the points of a sweep go until all have ended; on this machine, run them meanwhile."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TextIO

from ddp_hpc.base import exit_codes
from ddp_hpc.base.names import plural
from ddp_hpc.cli import INTERRUPTED_CODE
from ddp_hpc.cli.formatting import as_json
from ddp_hpc.launch.sweep.point_states import PointState, SweepStatus, follow_points
from ddp_hpc.launch.sweep.sweep_dir import SweepDir

_BEGUN_STATES = frozenset({"starting", "running", "stopping"})


def follow_sweep(  # noqa: PLR0913  a sweep, and how its user wants to see it
    sweep_dir: SweepDir,
    environment: Mapping[str, str],
    *,
    word: str,
    here: Sequence[int] = (),
    is_json: bool = False,
    is_quiet: bool = False,
) -> int:
    """Follow the sweep that `word` names to its end; return the exit code that its points mean.

    `here`: run these points on this machine meanwhile; Ctrl-C then stops those that run. `is_quiet`: print no line for a point.
    `is_json`: print these lines on standard error, and the counts at the end as JSON.
    """
    out = sys.stderr if is_json else sys.stdout
    with ExitStack() as until_end:
        stop = None
        if here:
            from ddp_hpc.launch.sweep.run_points import run_here  # late: a sweep on Slurm needs none

            stop = until_end.enter_context(run_here(sweep_dir, here, environment))
        try:
            last = show_points(follow_points(sweep_dir, environment), out, is_quiet=is_quiet)
        except KeyboardInterrupt:
            told = (
                f" continues without this command. Follow it again: ddp-hpc sweep follow {word}; cancel it: ddp-hpc sweep cancel {word}"
                if stop is None
                else f": no other point starts, and those that run write a checkpoint and stop. To go on: ddp-hpc sweep continue {word}"
            )
            print(f"\n{sweep_dir.name}{told}", file=sys.stderr)
            if stop is not None:
                stop()
            return INTERRUPTED_CODE
    counts = _counts(last.states.values())
    if is_json:
        print(as_json({"sweep": sweep_dir.name, "points": len(last.sweep.points), "states": counts}))
    else:
        if is_quiet:
            print(_counts_line(last), file=out)
        for reason, count in Counter(one.reason for one in last.states.values() if one.word == "waiting").items():
            print(f"{count} of the points never start: {reason}", file=out)
        print("\n".join(_next_commands(counts, word, is_cancelled=last.sweep.is_cancelled)), file=out)
    return exit_codes.FINISHED if set(counts) == {"finished"} else exit_codes.FAILED


def show_points(looks: Iterable[SweepStatus], out: TextIO, *, is_quiet: bool) -> SweepStatus:
    """Print a line for each point whose state changes, and then the counts; return the last look."""
    before: SweepStatus | None = None
    for look in looks:
        if look.problem and (before is None or before.problem != look.problem):
            print(f"note: {look.problem}", file=sys.stderr, flush=True)
        old = {} if before is None else before.states
        events = ((point.name, _event(old.get(point.number), look.states[point.number])) for point in look.sweep.points)
        lines = [f"{name} {event}" for name, event in events if event]
        is_news = before is None or _counts(before.states.values()) != _counts(look.states.values())
        if not is_quiet and (lines or is_news):
            print("\n".join([*lines, _counts_line(look)]), file=out, flush=True)
        before = look
    return look


def _event(old: PointState | None, new: PointState) -> str:
    """Return what has happened to a point; empty where nothing has that the user follows."""
    if old is None or (old.word, old.attempt) == (new.word, new.attempt):
        return ""
    reason = f": {new.reason}" if new.reason else ""
    if new.is_over:
        return f"{new.word}{reason}"
    if new.word == "waiting" and new.attempt is not None:
        return f"requeued{reason}"
    if new.word not in _BEGUN_STATES or (old.word in _BEGUN_STATES and old.attempt == new.attempt):
        return ""
    return f"begun again, attempt {new.attempt}" if new.attempt else "begun"


def _counts(states: Iterable[PointState]) -> dict[str, int]:
    return dict(sorted(Counter(str(state.word) for state in states).items()))


def _counts_line(look: SweepStatus) -> str:
    counts = _counts(look.states.values())
    return (
        f"{plural(len(look.sweep.points), 'point')}: {', '.join(f'{count:,} {word}' for word, count in counts.items())}"
    )


def _next_commands(counts: Mapping[str, int], word: str, *, is_cancelled: bool) -> list[str]:
    steps = [f"list the points: ddp-hpc list {word}"]
    startable = {"not submitted", "interrupted", "unknown", "prepared"}
    if counts.keys() & (startable | {"cancelled"} if is_cancelled else startable):
        steps.append(f"start the rest: ddp-hpc sweep continue {word}")
    if "waiting" in counts:
        steps.append(f"cancel what waits: ddp-hpc sweep cancel {word}")
    if counts.keys() & {"failed", "refused"}:
        steps.append(f"start failed points again: ddp-hpc sweep continue {word} --failed")
    return steps
