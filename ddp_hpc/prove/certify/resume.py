"""Where a run went on after a fault, and from which saved state: by the files that it read, and by its output. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ddp_hpc.prove.certify.baseline import Baseline
from ddp_hpc.prove.certify.output_lines import Position, Scale, positions
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord, Strike
from ddp_hpc.prove.certify.saved_files import kind_of

_MOST_LEFT = 2
"""So many positions may be missing at the end where a step was counted twice: the script did finish."""


def facts_of_resume(record: RunRecord, strike: Strike, baseline: Baseline) -> dict[str, Any]:
    """Return the fields of the evidence that say what the run read back, and where it went on."""
    earlier, later = record.attempts[: strike.attempt + 1], record.attempts[strike.attempt + 1 :]
    whole, before, after = (
        positions([line for attempt in attempts for line in attempt.lines], baseline.scale)
        for attempts in ([baseline.attempt], earlier, later)
    )
    read_back = _read_back(later, baseline)
    states = _states(strike, baseline, read_back)
    is_measured = bool(whole) and not _counts_otherwise(later, baseline)
    if whole and after and after[0] == whole[0] and after[-1] != whole[-1] and read_back:
        is_measured = False  # it counts its steps from the resume on
    facts = {
        "read_back": read_back,
        "newest_state": states[-1] if states else "",
        "in_place": _written_in_place(record.attempts[strike.attempt], read_back),
        "is_measured": is_measured,
        "saves_nothing": not baseline.attempt.saves and bool(later) and (not after or after[0] == whole[0]),
    }
    if not is_measured:
        saves_all_again = any(len(attempt.saves) >= len(baseline.attempt.saves) for attempt in later)
        return {**facts, "starts_over": bool(states) and not read_back and saves_all_again}
    has_saved = _has_saved_later_than_start(earlier, {*states, *read_back}, baseline.scale)
    return {
        **facts,
        "resumed_at": after[0] if after else None,
        "starts_over": has_saved and len(before) > 1 and after[:1] == whole[:1],
        "ended_at": _early_end(whole, {*before, *after}, has_gone_on=bool(after))
        if record.outcome == "finished"
        else None,
        "num_repeated": _num_repeated(before, after, baseline.scale),
    }


def _read_back(later: Sequence[AttemptRecord], baseline: Baseline) -> tuple[str, ...]:
    """Return the states that the script read after the fault: what the undisturbed run read, too, is not its own."""
    return tuple(
        dict.fromkeys(path for attempt in later for path in attempt.reads if path not in baseline.attempt.reads)
    )


def _states(strike: Strike, baseline: Baseline, read_back: Sequence[str]) -> list[str]:
    """Return the states that the script could have read back, the oldest first: of the kinds that it reads, if it reads any."""
    kinds = baseline.kinds.intersection(map(kind_of, read_back)) or baseline.kinds
    return [path for path in strike.present if kind_of(path) in kinds and path not in baseline.attempt.reads]


def _written_in_place(attempt: AttemptRecord, paths: Collection[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.path for one in attempt.saves if one.in_place and one.path in paths))


def _counts_otherwise(later: Sequence[AttemptRecord], baseline: Baseline) -> bool:
    """Tell whether the first step that was printed after the fault cannot be compared with those of the undisturbed run."""
    lines = (line for attempt in later for line in attempt.lines if line.step is not None)
    first = next(lines, None)
    return baseline.scale.unit == "step" and first is not None and baseline.scale.position(first) is None


def _has_saved_later_than_start(attempts: Sequence[AttemptRecord], paths: Collection[str], scale: Scale) -> bool:
    """Tell whether one of these states was saved after the first position: a state of the very start resumes there."""
    return any(
        save.path in paths and positions(attempt.lines[: save.num_lines], scale)
        for attempt in attempts
        for save in attempt.saves
    )


def _early_end(whole: Sequence[Position], reached: Collection[Position], *, has_gone_on: bool) -> Position | None:
    """Return the last position of a run that ended well before that of the undisturbed run; None where it did not."""
    numbers = [number for number, one in enumerate(whole) if one in reached]
    if not numbers or len(whole) - 1 - numbers[-1] <= (_MOST_LEFT if has_gone_on else 0):
        return None
    return whole[numbers[-1]]


def _num_repeated(before: Collection[Position], after: Collection[Position], scale: Scale) -> int:
    """Return how many steps (or epochs) were done again, at most."""
    repeated = len({*before}.intersection(after))
    return repeated * scale.stride + (scale.stride - 1 if repeated else 0)
