"""Where a run went on after a fault, and where it should have: by its saved states and its output. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ddp_hpc.prove.certify.baseline import Baseline
from ddp_hpc.prove.certify.output_lines import Position, Scale, positions
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord, Strike
from ddp_hpc.prove.certify.saved_files import Contents

_MOST_LEFT = 2
"""So many positions may be missing at the end where a step was counted twice: the script did finish."""
_EXPORT = re.compile(r"(?:^|[^a-z])(?:best|ema|swa|final|export|average)", re.IGNORECASE)
"""In names of files that are made beside the state to resume from."""
_UNREADABLE_STATES = frozenset({".distcp", ".pt", ".pth", ".ckpt", ".tar", ".state"})
"""Files of these kinds may hold the whole state though their values cannot be read."""


def facts_of_resume(record: RunRecord, strike: Strike, baseline: Baseline, *, can_be_same: bool) -> dict[str, Any]:
    """Return the fields of the evidence that say where the run went on, and where it should have."""
    scale = baseline.scale
    all_positions = positions(baseline.attempt.lines, scale)
    later = record.attempts[strike.attempt + 1 :]
    states = _states_of(record, strike, baseline)
    after = [one for attempt in later for one in positions(attempt.lines, scale)]
    before = {one for attempt in record.attempts[: strike.attempt + 1] for one in positions(attempt.lines, scale)}
    is_start = after[:1] == all_positions[:1] != []
    is_whole = after[-1:] == all_positions[-1:] != []
    if is_start and not is_whole and states.has_read_any and can_be_same:
        after = []  # it counts its steps from the resume on
    is_foreign = _counts_otherwise(later, baseline)
    resumed_at = after[0] if after else None
    expected = _position_after_newest(record, strike, baseline, states.resumable)
    skipped = 0
    if resumed_at in all_positions and before and scale.bar_total is None:  # a bar is not drawn at each step
        newest = max((all_positions.index(one) for one in before if one in all_positions), default=-1)
        skipped = max(0, all_positions.index(resumed_at) - newest - 1)
    reached = [one for one in all_positions if one in before or one in after]
    num_left = len(all_positions) - 1 - all_positions.index(reached[-1]) if reached else 0
    is_unknown = not after and (is_start or is_foreign)
    is_short = record.outcome == "finished" and num_left > (_MOST_LEFT if after else 0) and not is_unknown
    too_early = 0
    if resumed_at in all_positions and expected in all_positions:
        too_early = max(0, all_positions.index(expected) - all_positions.index(resumed_at))
    written_in_place = {one.path for one in record.attempts[strike.attempt].saves if one.in_place}
    has_saved = bool(states.resumable) or bool(states.half_read)
    starts_over = False
    if has_saved and resumed_at is not None:
        starts_over = is_start and len(before) > 1 and expected != all_positions[0]
        starts_over = starts_over and (is_whole or not states.has_read_any)
    elif has_saved and (is_foreign or not all_positions):
        starts_over = not states.has_read_any and _saves_all_again(later, baseline)
    return {
        "resumed_at": resumed_at,
        "should_resume_at": expected,
        "starts_over": starts_over,
        "ended_at": reached[-1] if is_short else None,
        "newest_state": states.resumable[-1] if states.resumable else "",
        "read_states": states.read,
        "read_half_written": states.half_read,
        "in_place": tuple(path for path in states.read if path in written_in_place),
        "num_repeated": _num_repeated(before, after, scale),
        "num_too_early": too_early,
        "num_skipped": skipped * scale.stride,
        "is_measured": bool(all_positions) and not is_unknown and not is_foreign,
        "saves_nothing": not baseline.attempt.saves and bool(later) and (resumed_at is None or is_start),
    }


def _num_repeated(before: Collection[Position], after: Sequence[Position], scale: Scale) -> int:
    """Return how many steps (or epochs) were done again, at most."""
    if scale.bar_total is not None and not scale.has_epochs:  # it counts what is done, and is not drawn at each step
        return int(max(0, max(before)[0] - after[0][0])) if before and after else 0
    repeated = len({*after}.intersection(before))
    return repeated * scale.stride + (scale.stride - 1 if repeated else 0)


def _counts_otherwise(later: Sequence[AttemptRecord], baseline: Baseline) -> bool:
    """Tell whether the first step that was printed after the fault cannot be compared with those of the undisturbed run."""
    lines = (line for attempt in later for line in attempt.lines if line.step is not None)
    first = next(lines, None)
    return baseline.scale.unit == "step" and first is not None and baseline.scale.position(first) is None


def _saves_all_again(later: Sequence[AttemptRecord], baseline: Baseline) -> bool:
    num_saves = len(baseline.attempt.saves)
    return any(num_saves and len(attempt.saves) >= num_saves for attempt in later)


def _position_after_newest(
    record: RunRecord, strike: Strike, baseline: Baseline, resumable: Sequence[str]
) -> Position | None:
    """Return the first position that the undisturbed run printed after it had saved what is the newest state now."""
    all_positions = positions(baseline.attempt.lines, baseline.scale)
    attempt = record.attempts[strike.attempt]
    saves = [one for one in attempt.saves if one.path in resumable]
    if not saves or not all_positions:
        return None
    printed = positions(attempt.lines[: saves[-1].num_lines], baseline.scale)
    known = [all_positions.index(one) for one in printed if one in all_positions]
    if not known:
        return all_positions[0] if not printed else None
    number = max(known) + 1
    return all_positions[number] if number < len(all_positions) else None


@dataclass(frozen=True, kw_only=True)
class _States:
    """The saved states that the script found when it started again."""

    own: tuple[str, ...]
    """Those that it had written, the oldest first."""
    resumable: tuple[str, ...]
    """Those of them to resume from: no exports of the weights beside the state."""
    read: tuple[str, ...]
    """Those that it read."""
    half_read: str
    """One that was cut off, and that it read."""
    has_read_any: bool
    """Whether it read any file that the undisturbed run did not read, or one of its own."""


def _states_of(record: RunRecord, strike: Strike, baseline: Baseline) -> _States:
    saves = [one for attempt in record.attempts[: strike.attempt + 1] for one in attempt.saves]
    names = {_kind(one.path) for one in [*baseline.attempt.saves, *saves]}
    own = tuple(path for path in strike.present if _kind(path) in names)
    later = record.attempts[strike.attempt + 1 :]
    read = tuple(path for path in (later[0].reads if later else ()) if path in own)
    all_read = {path for attempt in later for path in attempt.reads}
    half = [path for path in strike.half_written if path in all_read and any(one.path == path for one in saves)]
    return _States(
        own=own,
        resumable=_resumable(own, read, strike, baseline),
        read=read,
        half_read=half[0] if half else "",
        has_read_any=any(path in own or path not in baseline.attempt.reads for path in all_read - {*half}),
    )


def _kind(path: str) -> str:
    """Return a file's name without its numbers: `epoch_#.pt`."""
    return re.sub(r"[0-9]+", "#", PurePosixPath(path).name)


def _resumable(own: Sequence[str], read: Sequence[str], strike: Strike, baseline: Baseline) -> tuple[str, ...]:
    """Return the states that hold the most, as the undisturbed run shows; and those of a kind that the script reads."""
    known = {_kind(one.path): one.contents for one in baseline.attempt.saves}
    richness = {path: _richness(path, strike.contents.get(path) or known.get(_kind(path))) for path in own}
    wanted = max((_richness(one.path, one.contents) for one in baseline.attempt.saves), default=0)
    kept = {path for path in own if richness[path] >= wanted}
    kept = {path for path in kept if not _EXPORT.search(PurePosixPath(path).name)} or kept
    if read and not kept.intersection(read):
        kinds = set(map(_kind, read))
        kept |= {path for path in own if _kind(path) in kinds}
    return tuple(path for path in own if path in kept)


def _richness(path: str, contents: Contents | None) -> int:
    """Return 2 for a state with an optimizer, 1 for one that says where the training was, 0 for weights alone."""
    if contents is None or contents.kind != "values":
        return 2 if PurePosixPath(path).suffix in _UNREADABLE_STATES else 0
    return 2 if contents.has_optimizer else int(contents.has_counter)
