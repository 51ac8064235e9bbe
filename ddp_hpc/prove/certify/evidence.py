"""What a run under a fault shows beside the undisturbed one: the facts from which verdict and diagnosis are made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ddp_hpc.prove.certify import failure
from ddp_hpc.prove.certify.baseline import Baseline, attempt_with_epochs
from ddp_hpc.prove.certify.faults import Fault
from ddp_hpc.prove.certify.file_differences import Difference
from ddp_hpc.prove.certify.final_files import facts_of_files
from ddp_hpc.prove.certify.output_lines import Position, Scale, learning_rates, losses, positions, with_epochs
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord, SignalAction, Strike
from ddp_hpc.prove.certify.resume import facts_of_resume
from ddp_hpc.prove.certify.saved_files import Contents
from ddp_hpc.prove.certify.source_reading import SourceFacts


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


def evidence_of(fault: Fault, record: RunRecord, baseline: Baseline) -> Evidence:
    """Compare a run under a fault with the undisturbed one."""
    record = replace(record, attempts=tuple(map(attempt_with_epochs, record.attempts)))
    strike = record.strike
    if strike is None:
        return Evidence(
            fault=fault,
            outcome=record.outcome,
            source=baseline.source,
            scale=baseline.scale,
            stacks=record.stacks,
            hung_in=failure.hung_in(record, baseline),
        )
    struck = record.attempts[strike.attempt]
    later = record.attempts[strike.attempt + 1 :]
    of_files = facts_of_files(record, baseline)
    is_same = bool(of_files.get("has_same_weights")) or (bool(of_files) and baseline.is_deterministic is False)
    return Evidence(
        fault=fault,
        outcome=record.outcome,
        source=baseline.source,
        scale=baseline.scale,
        checkpoint=baseline.checkpoint,
        is_deterministic=baseline.is_deterministic,
        stacks=record.stacks,
        hung_in=failure.hung_in(record, baseline),
        half_written=tuple(
            path for path in strike.half_written if baseline.lasting_name(path) in _final_names(baseline)
        ),
        was_in_save=strike.was_in_save,
        load_error=failure.load_error(later),
        error=failure.error_of(record),
        had_state=bool(strike.present),
        loader_died=failure.loader_death(struck),
        failed_ranks=struck.failed_ranks,
        lost_ranks=struck.lost_ranks,
        signal_action=strike.signal_action,
        **_facts_of_stop(fault, strike, struck, baseline),
        **facts_of_resume(record, strike, baseline, can_be_same=is_same),
        **_facts_of_losses(record, strike, baseline),
        **of_files,
    )


def _final_names(baseline: Baseline) -> set[str]:
    """Return the paths under which saved states were complete, with those of any number in their place."""
    return {baseline.lasting_name(one.path) for one in baseline.attempt.saves}


def _facts_of_stop(fault: Fault, strike: Strike, struck: AttemptRecord, baseline: Baseline) -> dict[str, Any]:
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


def _facts_of_losses(record: RunRecord, strike: Strike, baseline: Baseline) -> dict[str, Any]:
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
