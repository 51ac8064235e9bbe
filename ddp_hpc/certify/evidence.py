"""What a run under a fault shows beside the undisturbed one: the facts from which verdict and diagnosis are made. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from ddp_hpc.certify.faults import Fault
from ddp_hpc.certify.output_lines import Position, Scale, learning_rates, losses, parse, positions, scale_of
from ddp_hpc.certify.records import AttemptRecord, RunRecord, SignalAction, Strike
from ddp_hpc.certify.saved_files import Contents
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

    @property
    def attempt(self) -> AttemptRecord:
        """The only one."""
        return self.record.attempts[-1]

    @property
    def scale(self) -> Scale:
        """How its lines say where the training is."""
        return scale_of(self.attempt.lines)

    @property
    def volatile(self) -> frozenset[tuple[str, str]]:
        """Values that differ between two undisturbed runs: times of day, for instance."""
        if self.second is None:
            return frozenset()
        return frozenset((one.file, one.path) for one in differences(self.second.final, self.record.final))

    @property
    def is_deterministic(self) -> bool | None:
        """Whether two undisturbed runs print the same losses and save the same tensors; None if there was only one run."""
        if self.second is None:
            return None
        same_losses = losses(self.second.attempts[-1].lines, self.scale) == losses(self.attempt.lines, self.scale)
        tensors = [one for one in differences(self.second.final, self.record.final) if one.here.startswith("tensor")]
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
        elif mine.digest != other.digest:
            found.append(Difference(file, "", mine.digest[:16], other.digest[:16]))
    return found


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
        if any(key and often[key] > once[key] for key in once):
            found.append(file)
    return found


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
    return Evidence(
        fault=fault,
        outcome=record.outcome,
        source=baseline.source,
        scale=baseline.scale,
        checkpoint=baseline.checkpoint,
        is_deterministic=baseline.is_deterministic,
        stacks=record.stacks,
        hung_in=_hung_in(record, baseline),
        half_written=tuple(path for path in strike.half_written if path in _final_names(baseline)),
        was_in_save=strike.was_in_save,
        load_error=_load_error(later),
        error=_error_of(record),
        had_state=bool(strike.present),
        loader_died=_first_match(_LOADER_DIED, [struck]),
        failed_ranks=struck.failed_ranks,
        lost_ranks=struck.lost_ranks,
        signal_action=strike.signal_action,
        **_of_stop(fault, strike, struck, baseline),
        **_of_resume(record, strike, baseline),
        **_of_losses(record, strike, baseline),
        **_of_files(record, baseline),
    )


def _final_names(baseline: Baseline) -> set[str]:
    """Return the paths under which saved states were complete, with those of any number in their place."""
    return {one.path for one in baseline.attempt.saves}


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


def _of_resume(record: RunRecord, strike: Strike, baseline: Baseline) -> dict[str, Any]:
    """Where the run went on, and where it should have."""
    scale = baseline.scale
    all_positions = positions(baseline.attempt.lines, scale)
    later = record.attempts[strike.attempt + 1 :]
    after = [one for attempt in later for one in positions(attempt.lines, scale)]
    before = {one for attempt in record.attempts[: strike.attempt + 1] for one in positions(attempt.lines, scale)}
    resumed_at = after[0] if after else None
    repeated = len({*after} & before)
    expected = _position_after_newest(record, strike, baseline)
    skipped = 0
    if resumed_at in all_positions and before:
        newest = max((all_positions.index(one) for one in before if one in all_positions), default=-1)
        skipped = max(0, all_positions.index(resumed_at) - newest - 1)
    reached = [one for one in all_positions if one in before or one in after]
    num_left = len(all_positions) - 1 - all_positions.index(reached[-1]) if reached else 0
    is_short = record.outcome == "finished" and num_left > (_MOST_LEFT if after else 0)
    too_early = 0
    if resumed_at in all_positions and expected in all_positions:
        too_early = max(0, all_positions.index(expected) - all_positions.index(resumed_at))
    whole = bool(strike.present)
    read = tuple(path for path in (later[0].reads if later else ()) if path in strike.present)
    written_in_place = {one.path for one in record.attempts[strike.attempt].saves if one.in_place}
    is_start = resumed_at is not None and bool(all_positions) and resumed_at == all_positions[0]
    starts_over = whole and is_start and len(before) > 1 and expected != all_positions[0]
    return {
        "resumed_at": resumed_at,
        "should_resume_at": expected,
        "starts_over": starts_over,
        "ended_at": reached[-1] if is_short else None,
        "newest_state": strike.present[-1] if strike.present else "",
        "read_states": read,
        "in_place": tuple(path for path in read if path in written_in_place),
        "num_repeated": repeated * scale.stride + (scale.stride - 1 if repeated else 0),
        "num_too_early": too_early,
        "num_skipped": skipped * scale.stride,
    }


def _position_after_newest(record: RunRecord, strike: Strike, baseline: Baseline) -> Position | None:
    """Return the first position that the undisturbed run printed after it had saved what is the newest state now."""
    all_positions = positions(baseline.attempt.lines, baseline.scale)
    attempt = record.attempts[strike.attempt]
    saves = [one for one in attempt.saves if one.path in strike.present]
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
    firsts = None if second is None else losses(second.attempts[-1].lines, scale)
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
    doubled = doubled_files(record.final, baseline.record.final)
    # A stop makes one more file, and a directory of the newest files then has other ones: the last file counts.
    last = baseline.attempt.saves[-1].path if baseline.attempt.saves else ""
    earlier = {one.path for one in baseline.attempt.saves} - {last}
    found = [
        one
        for one in differences(record.final, baseline.record.final)
        if (one.file, one.path) not in volatile
        and one.file not in changing_texts
        and one.file not in doubled
        and one.undisturbed != NO_FILE
        and not (one.here == NO_FILE and one.file in earlier)
        and one.file not in _saved_for_the_stop(record)
    ]
    return {"differences": tuple(found), "doubled": tuple(doubled)}


def _saved_for_the_stop(record: RunRecord) -> set[str]:
    """Return saved states of the middle of an epoch, which have the name of one that the undisturbed run saved at its end."""
    strike = record.strike
    if strike is None:
        return set()
    there = {one.path for one in record.attempts[strike.attempt].saves if one.at >= strike.at}
    return there - {one.path for attempt in record.attempts[strike.attempt + 1 :] for one in attempt.saves}


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
    wanted, there = (positions(one.lines, baseline.scale) for one in (baseline.attempt, record.attempts[-1]))
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
