"""What a run under a fault shows beside the undisturbed one: the facts from which verdict and diagnosis are made. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ddp_hpc.certify.faults import Fault
from ddp_hpc.certify.output_lines import (
    Position,
    Scale,
    learning_rates,
    losses,
    parse,
    positions,
    scale_of,
    with_epochs,
)
from ddp_hpc.certify.records import AttemptRecord, RunRecord, SignalAction, Strike
from ddp_hpc.certify.saved_files import Contents, is_saved_state
from ddp_hpc.certify.source_reading import SourceFacts

MOST_DIFFERENCES = 8
NO_FILE = "no such file"
_MOST_LEFT = 2
"""So many positions may be missing at the end where a step was counted twice: the script did finish."""
_LOAD_ERRORS = re.compile(
    r"PytorchStreamReader|EOFError|unexpected EOF|UnpicklingError|truncated|zip archive|Ran out of input|"
    r"HeaderTooSmall|InvalidHeader|SafetensorError|unexpected end|BadZipFile|JSONDecodeError",
    re.IGNORECASE,
)
_LOADER_DIED = re.compile(r"DataLoader worker .*(?:exited unexpectedly|is killed by signal)")
_EXPORT = re.compile(r"(?:^|[^a-z])(?:best|ema|swa|final|export|average)", re.IGNORECASE)
"""In names of files that are made beside the state to resume from."""
_UNREADABLE_STATES = frozenset({".distcp", ".pt", ".pth", ".ckpt", ".tar", ".state"})
"""Files of these kinds may hold the whole state though their values cannot be read."""
_LOGS = frozenset({".log", ".out", ".err"})
_TIME_OF_DAY = re.compile(r"\d\d:\d\d:\d\d")
_TEARDOWN = re.compile(r"_shutdown|destroy_process_group|_exit_function|atexit|_python_exit|in join\b")
_COLLECTIVE = re.compile(
    r"in (?:all_reduce|all_gather\w*|broadcast\w*|barrier|reduce\w*|backward|_engine_run_backward|gather)\b"
)


@dataclass(frozen=True)
class Difference:
    """A value that differs from the undisturbed run's."""

    file: str
    path: str
    """Of the value in the file; a line's number in a text; empty for a whole file."""
    here: str
    undisturbed: str


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the undisturbed runs have shown."""

    record: RunRecord
    source: SourceFacts
    second: RunRecord | None = None
    """A second undisturbed run, where one was needed."""

    @cached_property
    def attempt(self) -> AttemptRecord:
        """The only one."""
        return _with_epochs(self.record.attempts[-1])

    @cached_property
    def scale(self) -> Scale:
        """How its lines say where the training is."""
        return scale_of(self.attempt.lines)

    @property
    def volatile(self) -> frozenset[tuple[str, str]]:
        """Values that differ between two undisturbed runs: times of day, for instance."""
        if self.second is None:
            return frozenset()
        here, other = self.lasting_names(self.second.final), self.lasting_names(self.record.final)
        return frozenset((one.file, one.path) for one in differences(here, other))

    @cached_property
    def _stamps(self) -> frozenset[tuple[int, str]]:
        """Parts of paths, with their depth, that two undisturbed runs name otherwise: by the time of day, or by an id."""
        if self.second is None:
            return frozenset()
        one, other = ({each for path in run.final for each in _parts(path)} for run in (self.record, self.second))
        masked = [
            {(depth, mask) for depth, part in parts if "#" in (mask := _mask(part))}
            for parts in (one - other, other - one)
        ]
        return frozenset(masked[0] & masked[1])

    def lasting_name(self, path: str) -> str:
        """Return a file's path with `#` for a time of day or an id in it."""
        parts = [_mask(part) if (depth, _mask(part)) in self._stamps else part for depth, part in _parts(path)]
        return "/".join(parts)

    def lasting_names(self, files: Mapping[str, Contents], newest: frozenset[str] = frozenset()) -> dict[str, Contents]:
        """Return the files by these names; where several have the same one, that of the newest, or else the last."""
        return {self.lasting_name(path): files[path] for path in sorted(files, key=lambda path: (path in newest, path))}

    @property
    def is_deterministic(self) -> bool | None:
        """Whether two undisturbed runs print the same losses and save the same tensors; None if there was only one run."""
        if self.second is None:
            return None
        second = with_epochs(self.second.attempts[-1].lines)
        same_losses = losses(second, self.scale) == losses(self.attempt.lines, self.scale)
        here, other = self.lasting_names(self.second.final), self.lasting_names(self.record.final)
        tensors = [one for one in differences(here, other) if one.here.startswith("tensor")]
        return same_losses and not tensors

    @property
    def checkpoint(self) -> Contents | None:
        """The values of the newest saved state that has the most to say: one with an optimizer, if any has one."""
        saved = [one.contents for one in self.attempt.saves if one.contents is not None and one.contents.values]
        return next((one for one in reversed(saved) if one.has_optimizer), saved[-1] if saved else None)

    @property
    def steps_between_saves(self) -> int | None:
        """The most positions that lie between two saves."""
        if not self.attempt.saves or not self.scale.unit:
            return None
        counts = [0, *(self._num_positions(one.num_lines) for one in self.attempt.saves)]
        gaps = [later - earlier for earlier, later in pairwise(counts)]
        return max(gaps) * self.scale.stride

    def _num_positions(self, num_lines: int) -> int:
        return len(positions(self.attempt.lines[:num_lines], self.scale))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The facts of one run under a fault."""

    fault: Fault
    outcome: Literal["finished", "failed", "hung", "untouched"]
    source: SourceFacts
    scale: Scale
    checkpoint: Contents | None = None
    is_deterministic: bool | None = None
    first_losses_differ: bool = False
    """Two undisturbed runs differ at their first printed loss already."""
    signal_action: SignalAction = ""
    ran_on: bool = False
    """After the stop signal, the script went on to its end, or until it was killed."""
    num_after_signal: int = 0
    """Positions that were printed after the signal in the same attempt."""
    saved_after_signal: bool = False
    has_stopped: bool = False
    failed_ranks: Mapping[int, str] = field(default_factory=dict)
    """Of the attempt in which the fault came."""
    lost_ranks: frozenset[int] = frozenset()
    loader_died: str = ""
    """The line that says that a loader process died."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    hung_in: Literal["", "teardown", "collective", "elsewhere"] = ""
    hung_after_fault: bool = True
    half_written: tuple[str, ...] = ()
    """Files under their final names that ended before their end."""
    was_in_save: bool = False
    in_place: tuple[str, ...] = ()
    """Saved states that the script came back from, and that it writes under their own names."""
    load_error: str = ""
    """The line that says why a saved state could not be read, in an attempt after the fault."""
    error: str = ""
    """How the last attempt failed."""
    had_state: bool = False
    """A whole saved state was there when the script started again."""
    resumed_at: Position | None = None
    should_resume_at: Position | None = None
    """The first position after the newest saved state."""
    starts_over: bool = False
    ended_at: Position | None = None
    """The last position, where the script ended well before the last one of the undisturbed run."""
    newest_state: str = ""
    read_states: tuple[str, ...] = ()
    """Saved states that the script read when it came back."""
    num_repeated: int = 0
    """Steps (or epochs) that were done again, at most."""
    num_skipped: int = 0
    is_measured: bool = True
    """Whether its output says where it went on."""
    saves_nothing: bool = False
    """No run has written a file that is known as a saved state, and the script did not go on where it was."""
    read_half_written: str = ""
    """A file that was cut off and that the script read when it came back."""
    num_compared: int | None = None
    """How many files of its result were compared; None where it did not finish."""
    has_same_weights: bool = False
    """Tensors were compared, and nothing but lines of a log differs."""
    logged_otherwise: Difference | None = None
    """The first line of a log that differs beside the same weights."""
    num_too_early: int = 0
    """How many positions before the one after the newest saved state it went on."""
    first_loss_differs: bool | None = None
    """The first loss after the fault against the undisturbed run's at the same position; None where there is none to compare."""
    later_loss_differs: bool | None = None
    lr_differs: tuple[Position, float, float] | None = None
    first_lr: float | None = None
    """The first learning rate that the undisturbed run printed."""
    differences: tuple[Difference, ...] = ()
    doubled: tuple[str, ...] = ()
    """Text files in which lines stand twice that the undisturbed run has once."""

    @property
    def came_back(self) -> bool:
        """Whether the run went on from what it had saved, to its end."""
        return self.outcome in {"finished", "untouched"} and not self.starts_over and self.ended_at is None

    @property
    def unit(self) -> str:
        """What its output counts."""
        return self.scale.unit or "line"


def _parts(path: str) -> list[tuple[int, str]]:
    return list(enumerate(PurePosixPath(path).parts))


def _mask(part: str) -> str:
    """Return a part of a path with `#` for each number and each id in it."""
    return re.sub(r"[^\W_]*\d[^\W_]*|(?<![^\W_])[0-9a-f]{4,}(?![^\W_])", "#", part)


def _with_epochs(attempt: AttemptRecord) -> AttemptRecord:
    return replace(attempt, lines=with_epochs(attempt.lines))


def differences(here: Mapping[str, Contents], undisturbed: Mapping[str, Contents]) -> list[Difference]:
    """Return the values by which the files of two runs differ."""
    found: list[Difference] = []
    for file in sorted({*here, *undisturbed}):
        mine, other = here.get(file), undisturbed.get(file)
        if mine is None or other is None:
            found.append(
                Difference(file, "", NO_FILE if mine is None else "a file", NO_FILE if other is None else "a file")
            )
        elif mine.kind == other.kind == "values":
            found.extend(
                Difference(file, path, mine.values.get(path, "nothing"), other.values.get(path, "nothing"))
                for path in [*other.values, *(path for path in mine.values if path not in other.values)]
                if mine.values.get(path) != other.values.get(path)
            )
        elif mine.kind == other.kind == "text":
            if not _has_all_lines(mine.lines, other.lines):
                found.extend(_different_lines(file, mine.lines, other.lines))
        elif (mine.digest, mine.num_bytes) != (other.digest, other.num_bytes):
            found.append(Difference(file, "", _bytes_text(mine), _bytes_text(other)))
    return found


def _bytes_text(contents: Contents) -> str:
    return contents.digest[:16] or f"{contents.num_bytes} bytes"


def _has_all_lines(mine: Sequence[str], other: Sequence[str]) -> bool:
    """Tell whether a log has all lines of the other in their order; more lines, such as `resumed at step 10`, do no harm."""
    rest = iter(mine)
    return all(line in rest for line in other)


def _different_lines(file: str, mine: Sequence[str], other: Sequence[str]) -> list[Difference]:
    longest = max(len(mine), len(other))
    pairs = [
        (number, mine[number] if number < len(mine) else "nothing", other[number] if number < len(other) else "nothing")
        for number in range(longest)
    ]
    return [Difference(file, f"line {number + 1}", one, two) for number, one, two in pairs if one != two]


def doubled_files(here: Mapping[str, Contents], undisturbed: Mapping[str, Contents]) -> list[str]:
    """Return text files in which lines stand more often than in the undisturbed run's, by what they say of the position."""
    found = []
    for file, mine in here.items():
        other = undisturbed.get(file)
        if other is None or mine.kind != "text" or other.kind != "text" or len(mine.lines) <= len(other.lines):
            continue
        often, once = Counter(map(_key, mine.lines)), Counter(map(_key, other.lines))
        if _is_for_readers(file, mine.lines):
            continue
        if any(key and often[key] > once[key] for key in once):
            found.append(file)
    return found


def _is_for_readers(file: str, lines: Sequence[str]) -> bool:
    """Tell whether a text is a log, which may say twice what was done twice, and no table of measurements."""
    num_timed = sum(_TIME_OF_DAY.search(line) is not None for line in lines)
    return PurePosixPath(file).suffix in _LOGS or 2 * num_timed > len(lines)


_FIRST_FIELD = re.compile(r"\s*(\d+)\s*[,;\t ]")


def _key(line: str) -> str:
    """Return what a line of a log measures: its step and epoch, or the first field of a table; empty for any other line."""
    parsed = parse(line)
    if parsed.loss is not None and (parsed.step is not None or parsed.epoch is not None):
        return f"{parsed.epoch}/{parsed.step}/{parsed.is_evaluation}"
    match = _FIRST_FIELD.match(line)
    return match[1] if match else ""


def evidence_of(fault: Fault, record: RunRecord, baseline: Baseline) -> Evidence:
    """Compare a run under a fault with the undisturbed one."""
    record = replace(record, attempts=tuple(map(_with_epochs, record.attempts)))
    strike = record.strike
    if strike is None:
        return Evidence(
            fault=fault,
            outcome=record.outcome,
            source=baseline.source,
            scale=baseline.scale,
            stacks=record.stacks,
            hung_in=_hung_in(record, baseline),
        )
    struck = record.attempts[strike.attempt]
    later = record.attempts[strike.attempt + 1 :]
    of_files = _of_files(record, baseline)
    is_same = bool(of_files.get("has_same_weights")) or (bool(of_files) and baseline.is_deterministic is False)
    return Evidence(
        fault=fault,
        outcome=record.outcome,
        source=baseline.source,
        scale=baseline.scale,
        checkpoint=baseline.checkpoint,
        is_deterministic=baseline.is_deterministic,
        stacks=record.stacks,
        hung_in=_hung_in(record, baseline),
        half_written=tuple(
            path for path in strike.half_written if baseline.lasting_name(path) in _final_names(baseline)
        ),
        was_in_save=strike.was_in_save,
        load_error=_load_error(later),
        error=_error_of(record),
        had_state=bool(strike.present),
        loader_died=_first_match(_LOADER_DIED, [struck]),
        failed_ranks=struck.failed_ranks,
        lost_ranks=struck.lost_ranks,
        signal_action=strike.signal_action,
        **_of_stop(fault, strike, struck, baseline),
        **_of_resume(record, strike, baseline, can_be_same=is_same),
        **_of_losses(record, strike, baseline),
        **of_files,
    )


def _final_names(baseline: Baseline) -> set[str]:
    """Return the paths under which saved states were complete, with those of any number in their place."""
    return {baseline.lasting_name(one.path) for one in baseline.attempt.saves}


def _of_stop(fault: Fault, strike: Strike, struck: AttemptRecord, baseline: Baseline) -> dict[str, Any]:
    if not fault.is_stop:
        return {}
    all_positions = positions(baseline.attempt.lines, baseline.scale)
    before = positions(struck.lines[: strike.at_line], baseline.scale)
    there = positions(struck.lines, baseline.scale)
    reached_end = bool(all_positions) and bool(there) and there[-1] == all_positions[-1]
    was_killed = any("killed it" in text for text in struck.failed_ranks.values())
    num_after = len(there) - len(before)
    return {
        "ran_on": was_killed or (reached_end and num_after >= max(2, len(all_positions) // 4)),
        "num_after_signal": num_after,
        "saved_after_signal": any(one.at >= strike.at for one in struck.saves),
        "has_stopped": struck.ending == "stopped",
    }


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


def _of_resume(record: RunRecord, strike: Strike, baseline: Baseline, *, can_be_same: bool) -> dict[str, Any]:
    """Where the run went on, and where it should have."""
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


def _of_losses(record: RunRecord, strike: Strike, baseline: Baseline) -> dict[str, Any]:
    scale = baseline.scale
    undisturbed = losses(baseline.attempt.lines, scale)
    rates = learning_rates(baseline.attempt.lines, scale)
    later = [line for attempt in record.attempts[strike.attempt + 1 :] for line in attempt.lines]
    mine = {position: loss for position, loss in losses(later, scale).items() if position in undisturbed}
    compared = [(position, loss, undisturbed[position]) for position, loss in mine.items()]
    other_rates = [
        (position, rate, rates[position])
        for position, rate in learning_rates(later, scale).items()
        if position in rates and rate != rates[position]
    ]
    second = baseline.second
    firsts = None if second is None else losses(with_epochs(second.attempts[-1].lines), scale)
    return {
        "first_loss_differs": compared[0][1] != compared[0][2] if compared else None,
        "later_loss_differs": any(one != other for _, one, other in compared[1:]) if len(compared) > 1 else None,
        "first_lr": next(iter(rates.values()), None),
        "lr_differs": other_rates[0] if other_rates else None,
        "first_losses_differ": bool(firsts)
        and bool(undisturbed)
        and next(iter(firsts.items())) != next(iter(undisturbed.items())),  # type: ignore[union-attr]
    }


def _of_files(record: RunRecord, baseline: Baseline) -> dict[str, Any]:
    if record.outcome not in {"finished", "untouched"}:
        return {}
    volatile = baseline.volatile
    changing_texts = {file for file, path in volatile if path.startswith("line ")}
    written = frozenset(one.path for one in record.attempts[-1].saves)
    mine, other = baseline.lasting_names(record.final, written), baseline.lasting_names(baseline.record.final)
    doubled = doubled_files(mine, other)
    mine = _with_next_folders(mine, other, frozenset(map(baseline.lasting_name, written)))
    # A stop makes one more file, and a directory of the newest files then has other ones: the last file counts.
    saves = [baseline.lasting_name(one.path) for one in baseline.attempt.saves]
    earlier = {*saves} - {*saves[-1:]}
    for_stop = _saved_for_the_stop(record, baseline)
    found = [
        one
        for one in differences(mine, other)
        if (one.file, one.path) not in volatile
        and one.file not in changing_texts
        and one.file not in doubled
        and one.undisturbed != NO_FILE
        and not (one.here == NO_FILE and one.file in earlier)
        and one.file not in for_stop
    ]
    compared = [
        file
        for file in other
        if file in mine and file not in {*changing_texts, *for_stop} and _is_comparable(file, other[file], volatile)
    ]
    differing = {one.file for one in found if not _is_of_log(one)}
    has_weights = any(_has_tensors(file, other[file], volatile) for file in compared)
    has_same_weights = has_weights and not differing
    return {
        "differences": () if has_same_weights else tuple(found),
        "doubled": tuple(doubled),
        "num_compared": len(compared),
        "has_same_weights": has_same_weights,
        "logged_otherwise": found[0] if has_same_weights and found else None,
    }


def _with_next_folders(
    mine: Mapping[str, Contents], other: Mapping[str, Contents], newest: frozenset[str]
) -> dict[str, Contents]:
    """Return the files with those that the undisturbed run has in a directory of an earlier number, as `version_0`.

    Loggers make such a directory for each attempt: a log whose first lines stand in the old one goes on in the new one.
    """
    found = dict(mine)
    extra = [path for path in mine if path not in other]
    for path, contents in other.items():
        here = mine.get(path)
        if here is not None and (contents.kind != "text" or len(here.lines) >= len(contents.lines)):
            continue
        name = PurePosixPath(path).name
        alike = [one for one in extra if PurePosixPath(one).name == name and _mask(one) == _mask(path)]
        if not alike:
            continue
        there = mine[max(alike, key=lambda one: (one in newest, one))]
        found[path] = there if here is None else replace(there, lines=(*here.lines, *there.lines))
    return found


def _is_comparable(file: str, contents: Contents, volatile: frozenset[tuple[str, str]]) -> bool:
    """Tell whether a file has anything that is the same in two undisturbed runs."""
    if contents.kind == "values":
        return any((file, path) not in volatile for path in contents.values)
    return (file, "") not in volatile and bool(contents.digest if contents.kind == "bytes" else contents.lines)


def _has_tensors(file: str, contents: Contents, volatile: frozenset[tuple[str, str]]) -> bool:
    if contents.kind == "bytes":
        return is_saved_state(Path(file))
    return any(text.startswith("tensor") and (file, path) not in volatile for path, text in contents.values.items())


def _is_of_log(difference: Difference) -> bool:
    """Tell whether two lines measure the same step, and only their numbers differ."""
    key = _key(difference.undisturbed)
    return difference.path.startswith("line ") and bool(key) and _key(difference.here) == key


def _saved_for_the_stop(record: RunRecord, baseline: Baseline) -> set[str]:
    """Return saved states of the middle of an epoch, which have the name of one that the undisturbed run saved at its end."""
    strike = record.strike
    if strike is None:
        return set()
    there = {one.path for one in record.attempts[strike.attempt].saves if one.at >= strike.at}
    again = {one.path for attempt in record.attempts[strike.attempt + 1 :] for one in attempt.saves}
    return set(map(baseline.lasting_name, there - again))


def _hung_in(record: RunRecord, baseline: Baseline) -> Literal["", "teardown", "collective", "elsewhere"]:
    if record.outcome != "hung":
        return ""
    # The main thread's stack stands last: faulthandler begins with the thread that got the signal, which is any of them.
    texts = list(record.stacks.values())
    if any(_TEARDOWN.search(text) for text in texts) or _has_trained(record, baseline):
        return "teardown"
    return "collective" if any(_COLLECTIVE.search(text) for text in texts) else "elsewhere"


def _has_trained(record: RunRecord, baseline: Baseline) -> bool:
    """Tell whether the last attempt has printed the last position of the training, and so has only its end before it."""
    if baseline.record.outcome != "finished":
        return False
    ends = (baseline.attempt, _with_epochs(record.attempts[-1]))
    wanted, there = (positions(one.lines, baseline.scale) for one in ends)
    return bool(wanted) and bool(there) and there[-1] == wanted[-1]


def _load_error(attempts: Sequence[AttemptRecord]) -> str:
    return _first_match(_LOAD_ERRORS, [one for one in attempts if one.ending == "failed"])


def _first_match(pattern: re.Pattern[str], attempts: Sequence[AttemptRecord]) -> str:
    for attempt in attempts:
        for text in [*attempt.failed_ranks.values(), *attempt.logs.values()]:
            match = next((line for line in text.splitlines() if pattern.search(line)), None)
            if match is not None:
                return match.strip()[:200]
    return ""


def _error_of(record: RunRecord) -> str:
    last = record.attempts[-1]
    first_causes = [text for rank, text in sorted(last.failed_ranks.items()) if rank not in last.lost_ranks]
    texts = first_causes or list(last.failed_ranks.values()) or [last.reason]
    return next(iter(texts[0].strip().splitlines()), "")[:300] if texts else ""
