"""What a run under a fault shows beside the undisturbed one: the facts from which verdict and diagnosis are made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddp_hpc.prove.certify import failure
from ddp_hpc.prove.certify.baseline import Baseline
from ddp_hpc.prove.certify.faults import TrialFault
from ddp_hpc.prove.certify.file_differences import FileDifference
from ddp_hpc.prove.certify.final_files import facts_of_files
from ddp_hpc.prove.certify.output_lines import Position, losses, positions
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord, SignalAction, Strike
from ddp_hpc.prove.certify.resume import facts_of_resume
from ddp_hpc.prove.certify.saved_files import Contents, kind_of


@dataclass(frozen=True, kw_only=True)
class TrialEvidence:
    """The facts of one run under a fault."""

    fault: TrialFault
    outcome: Literal["finished", "failed", "hung", "untouched"]
    unit: str
    """What its output counts."""
    checkpoint: Contents | None = None
    """What the undisturbed run saves."""
    is_deterministic: bool | None = None
    signal_action: SignalAction = ""
    ran_on: bool = False
    """After the stop signal, the script went on to its end, or until it was killed."""
    num_after_signal: int = 0
    """Positions that were printed after the signal in the same attempt."""
    lost_ranks: frozenset[int] = frozenset()
    """Of the attempt in which the fault came."""
    loader_died: str = ""
    """The line that says that a loader process died."""
    waits_in_collective: bool = False
    """It hangs, and a rank waits for the others."""
    error: str = ""
    """How the last attempt failed, or where it hangs."""
    half_written: tuple[str, ...] = ()
    """Files under their final names that ended before their end."""
    was_in_save: bool = False
    in_place: tuple[str, ...] = ()
    """Saved states that the script came back from, and that it writes under their own names."""
    newest_state: str = ""
    """The newest whole state that the script could have read back."""
    read_back: tuple[str, ...] = ()
    """Saved states that the script read when it came back."""
    resumed_at: Position | None = None
    starts_over: bool = False
    ended_at: Position | None = None
    """The last position, where the script ended well before the last one of the undisturbed run."""
    num_repeated: int = 0
    """Steps (or epochs) that were done again, at most."""
    is_measured: bool = True
    """Whether its output says where it went on."""
    saves_nothing: bool = False
    """No run has written a file that is known as a saved state, and the script did not go on where it was."""
    num_compared: int | None = None
    """How many files of its result were compared; None where it did not finish."""
    has_same_weights: bool = False
    """Tensors were compared, and nothing but lines of a log differs."""
    first_loss_differs: bool | None = None
    """The first loss after the fault against the undisturbed run's at the same position; None where there is none to compare."""
    later_loss_differs: bool | None = None
    differences: tuple[FileDifference, ...] = ()
    doubled: tuple[str, str] | None = None
    """A table, and a line that stands there more often than in the undisturbed run's."""

    @property
    def came_back(self) -> bool:
        """Whether the run went on from what it had saved, to its end."""
        return self.outcome in {"finished", "untouched"} and not self.starts_over and self.ended_at is None

    @property
    def differs(self) -> bool:
        """Whether the run came back to another end, and undisturbed runs are all the same."""
        is_same = self.has_same_weights or self.is_deterministic is False
        return self.came_back and not is_same and bool(self.differences)


def evidence_of(fault: TrialFault, record: RunRecord, baseline: Baseline) -> TrialEvidence:
    """Compare a run under a fault with the undisturbed one."""
    found = TrialEvidence(
        fault=fault,
        outcome=record.outcome,
        unit=baseline.scale.unit or "line",
        error=failure.error_of(record),
        waits_in_collective=failure.waits_in_collective(record),
    )
    strike = record.strike
    if strike is None:
        return found
    struck = record.attempts[strike.attempt]
    return replace(
        found,
        checkpoint=baseline.checkpoint,
        is_deterministic=baseline.is_deterministic,
        half_written=_under_final_names(strike, baseline),
        was_in_save=strike.was_in_save,
        loader_died=failure.loader_death(struck),
        lost_ranks=struck.lost_ranks,
        signal_action=strike.signal_action,
        **_facts_of_stop(fault, strike, struck, baseline),
        **facts_of_resume(record, strike, baseline),
        **_facts_of_losses(record, strike, baseline),
        **facts_of_files(record, baseline),
    )


def _under_final_names(strike: Strike, baseline: Baseline) -> tuple[str, ...]:
    """Return the files that were cut off and are of a kind that the undisturbed run has saved to its end."""
    kinds = {kind_of(one.path) for one in baseline.attempt.saves}
    return tuple(path for path in strike.half_written if kind_of(path) in kinds)


def _facts_of_stop(fault: TrialFault, strike: Strike, struck: AttemptRecord, baseline: Baseline) -> Mapping[str, Any]:
    if not fault.is_stop:
        return {}
    whole = positions(baseline.attempt.lines, baseline.scale)
    before = positions(struck.lines[: strike.at_line], baseline.scale)
    there = positions(struck.lines, baseline.scale)
    reached_end = bool(whole) and there[-1:] == whole[-1:]
    was_killed = any("killed it" in text for text in struck.failed_ranks.values())
    num_after = len(there) - len(before)
    return {
        "ran_on": was_killed or (reached_end and num_after >= max(2, len(whole) // 4)),
        "num_after_signal": num_after,
    }


def _facts_of_losses(record: RunRecord, strike: Strike, baseline: Baseline) -> Mapping[str, Any]:
    undisturbed = losses(baseline.attempt.lines, baseline.scale)
    later = [line for attempt in record.attempts[strike.attempt + 1 :] for line in attempt.lines]
    mine = losses(later, baseline.scale)
    differ = [loss != undisturbed[position] for position, loss in mine.items() if position in undisturbed]
    return {
        "first_loss_differs": differ[0] if differ else None,
        "later_loss_differs": any(differ[1:]) if len(differ) > 1 else None,
    }
