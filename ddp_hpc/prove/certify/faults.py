"""The table of faults: what is done to the script's processes, and at which moment of its run. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ddp_hpc.prove.certify.output_lines import PrintedLine
from ddp_hpc.prove.certify.records import RunRecord, Save

Action = Literal["stop", "stop everything", "kill a rank", "kill all"]
Moment = Literal["stop", "first steps", "in a save", "after a save", "in evaluation", "random"]
EARLIEST, LATEST = 0.25, 0.6
"""The part of the output in which a stop signal is sent: late enough to have saved, early enough to see whether it stops."""
FIRST_STEPS_LINE = 2


@dataclass(frozen=True)
class TrialFault:
    """One kind of fault."""

    description: str
    action: Action
    moment: Moment
    stop_signal: str = "TERM"

    @property
    def is_stop(self) -> bool:
        """Whether the script is asked to stop, and so can lose nothing."""
        return self.action in {"stop", "stop everything"}


FAULTS: Mapping[str, TrialFault] = {
    "term": TrialFault("SIGTERM to the ranks, one after another", "stop", "stop"),
    "usr2": TrialFault("SIGUSR2 to the ranks, one after another", "stop", "stop", "USR2"),
    "preempt": TrialFault("SIGTERM to every process, loaders included, as Slurm preempts", "stop everything", "stop"),
    "kill-first-steps": TrialFault("a rank is killed in the first steps", "kill a rank", "first steps"),
    "kill-in-save": TrialFault("all are killed while a file is saved", "kill all", "in a save"),
    "kill-after-save": TrialFault("all are killed right after a save", "kill all", "after a save"),
    "kill-in-evaluation": TrialFault("a rank is killed in an evaluation", "kill a rank", "in evaluation"),
    "kill-at-random": TrialFault("all are killed at a random moment", "kill all", "random"),
}


Trigger = tuple[Literal["line", "save begun", "save done"], int, float]
"""The moment of a fault: the line that rank zero has printed, or the save, counted from 1, and how many seconds after that."""


def trigger_of(fault: TrialFault, undisturbed: RunRecord, rng: random.Random) -> Trigger | str:
    """Return the moment of a fault; or, as text, why the run has no such moment."""
    lines, saves = undisturbed.attempts[-1].lines, undisturbed.attempts[-1].saves
    if fault.moment in {"in a save", "after a save"}:
        return _save_trigger(fault, saves)
    if not lines:
        return "line", 0, undisturbed.attempts[-1].script_s * rng.uniform(EARLIEST, LATEST)
    if fault.moment == "first steps":
        return "line", min(FIRST_STEPS_LINE, len(lines)), 0.0
    if fault.moment == "in evaluation":
        return _evaluation_trigger(lines, rng)
    last = max(1, len(lines) - 1)
    if fault.moment == "random":
        number = rng.randint(1, last)
    else:
        first = max(int(EARLIEST * len(lines)), saves[0].num_lines + 1 if saves else 1)
        number = min(last, rng.randint(first, max(first, int(LATEST * len(lines)))))
    return "line", number, _gap(lines, number) * rng.random()


def _save_trigger(fault: TrialFault, saves: Sequence[Save]) -> Trigger | str:
    if not saves:
        return "certify recognised no saved state among the script's files; name them with `script.progress=PATTERN`"
    if fault.moment == "in a save":
        return "save begun", len(saves) // 2 + 1, 0.0
    # Late, so that there are several to choose from, but not the last one: the run may end right after it. Files between which
    # nothing was printed belong to one save, which is whole with its last file.
    ends = [number for number, (one, after) in enumerate(pairwise(saves), 1) if after.num_lines > one.num_lines]
    ends = ends or [*range(1, len(saves))]  # nothing was printed, so each may be a save of its own
    return "save done", max((one for one in ends if one <= len(saves) - 2), default=[len(saves), *ends][-1]), 0.0


def _evaluation_trigger(lines: Sequence[PrintedLine], rng: random.Random) -> Trigger | str:
    """Return a moment between a line and the next one, where the next one prints the result of an evaluation."""
    found = [number for number, line in enumerate(lines) if number and line.is_evaluation]
    if not found:
        return "no line of the script's output names an evaluation, so certify does not know when one runs"
    number = found[len(found) // 2]
    return "line", number, _gap(lines, number) * rng.uniform(0.2, 0.8)


def _gap(lines: Sequence[PrintedLine], number: int) -> float:
    """Return the time between a line, counted from 1, and the next one, in seconds."""
    return max(0.0, lines[number].at - lines[number - 1].at) if 0 < number < len(lines) else 0.0
