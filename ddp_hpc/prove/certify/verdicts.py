"""From evidence to a verdict: exact, loses at most N steps, differs, does not come back, hangs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ddp_hpc.base.names import shorten_names
from ddp_hpc.prove.certify.evidence import TrialEvidence
from ddp_hpc.prove.certify.file_differences import FileDifference
from ddp_hpc.prove.certify.rules import Defect, diagnose, position_text

GOOD = frozenset({"exact", "loses", "comes back", "not tried"})
"""`not tried`, where the script has no such moment, does no harm beside others; alone it says nothing."""
_TEXT_BY_VERDICT: Mapping[str, str] = {
    "untouched": "not tried: the run finished before the moment of the fault",
    "not tried": "not tried: when the fault came, nothing was left to train",
    "differs": "differs: the script resumed, but its result is another",
}
_VERDICT_RULES: Mapping[str, Callable[[TrialEvidence], object]] = {
    "untouched": lambda seen: seen.record.outcome == "untouched",
    "hangs": lambda seen: seen.record.outcome == "hung",
    "does not come back": lambda seen: not seen.has_come_back,
    "does not stop": lambda seen: seen.injected_fault.signal_action == "ignored" or seen.has_run_on,
    "differs": lambda seen: seen.has_other_end or seen.doubled_row,
    "not tried": lambda seen: seen.is_fault_too_late,
    "saves nothing": lambda seen: seen.has_saved_nothing,
    # which also says that the final files are the same:
    "loses": lambda seen: seen.num_repeated and seen.baseline.is_deterministic is not False,
    "comes back": lambda seen: seen.baseline.is_deterministic is False or not seen.prints_resume or not seen.comparable,
    "exact": lambda _: True,
}
"""The first that holds is the verdict."""


@dataclass(kw_only=True)
class FaultResult:
    """What one fault has shown; the fields are keys of `certify --json`."""

    fault: str
    description: str
    verdict: str
    """One of the table, or `not tried`."""
    words: str
    """The verdict as text."""
    at_most: float | None = None
    """How many steps or epochs were done again, where that is the verdict; part of an epoch, where the output says parts."""
    reason: str = ""
    first_difference: str = ""
    """The loss, the value or the file that differs first."""
    newest_state: str = ""
    """The newest whole state that the script could have read back."""
    read_back: list[str] = field(default_factory=list)
    """The states that it read back."""
    defects: list[Defect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    run: str = ""

    @property
    def read_back_text(self) -> str:
        """Which saved states it read back, or which it left alone, as text."""
        if self.read_back:
            return shorten_names(self.read_back, 2)
        # A script that came back has read something: a file that stays open (`np.load`) is not seen as read.
        return f"not {self.newest_state}" if self.newest_state and self.verdict not in GOOD else ""

    @property
    def is_good(self) -> bool:
        """Whether the script came back, and nothing is wrong with how."""
        return self.verdict in GOOD and not self.defects

    @property
    def was_tried(self) -> bool:
        """Whether the script has such a moment, and did not finish before it."""
        return self.verdict not in {"not tried", "untouched"}


def needs_second_run(evidence: TrialEvidence) -> bool:
    """Tell whether only a second undisturbed run shows what a difference means."""
    seen = evidence.differences or any(evidence.loss_diff_flags)
    return evidence.has_finished and bool(seen) and not evidence.has_same_saved_state


def judge(name: str, evidence: TrialEvidence) -> FaultResult:
    """Return the verdict on one fault."""
    verdict = next(verdict for verdict, holds in _VERDICT_RULES.items() if holds(evidence))
    words, description = _TEXT_BY_VERDICT.get(verdict, verdict), evidence.fault.description
    finding = FaultResult(fault=name, description=description, verdict=verdict, words=words)
    if not finding.was_tried:
        finding.reason = "have the script train on for longer after its last save, or save fewer files at a time"
        return finding
    if evidence.has_other_end:
        at = f"the first loss after the resume, at {evidence.unit} {position_text(evidence.resume_point)}; "
        later = "a later loss after the resume; " if any(evidence.loss_diff_flags) else ""
        where = at if evidence.loss_diff_flags[:1] == [True] else later
        finding.first_difference = f"{where}{_difference_text(evidence.differences[0])}"
    finding.newest_state, finding.read_back = evidence.newest_state, evidence.states_read
    finding.defects = diagnose(evidence)
    if verdict in {"loses", "comes back"} and evidence.num_repeated:
        saves_at_stop = evidence.fault.is_stop and evidence.injected_fault.signal_action == "caught"
        between_saves = 0 if saves_at_stop else evidence.baseline.steps_between_saves
        finding.at_most = max(evidence.num_repeated, between_saves)
        lost = f"at most {finding.at_most:g} {evidence.unit}{'' if finding.at_most == 1 else 's'}"
        finding.words = f"loses {lost}" if verdict == "loses" else f"comes back, and repeats {lost}"
    finding.reason = _reason(finding, evidence)
    finding.notes = [*_notes(finding, evidence)]
    return finding


def _reason(finding: FaultResult, evidence: TrialEvidence) -> str:
    named = " and ".join(dict.fromkeys(one.name for one in finding.defects))
    # A file that could have been cut off, and was not, alters no result.
    harmful = [one for one in finding.defects if one.name != "half-written file used" or evidence.cut_off_files]
    if evidence.has_other_end and finding.verdict == "differs" and not harmful:
        missing = _missing_states(evidence)
        unknown = f"certify does not know why; what differs first: {finding.first_difference}{f'; its saved state has {missing}' if missing else ''}"
        return f"{unknown}; not the reason, but to be mended, too: {named}" if named else unknown
    if named:
        return named
    if finding.verdict in {"hangs", "does not come back"}:
        if evidence.early_end is None:
            return evidence.error or "the script starts over from its beginning"
        at = f"{evidence.unit} {position_text(evidence.early_end)}"
        return f"the script ended with exit code 0 at {at}, but the undisturbed run goes on after that"
    if finding.verdict == "saves nothing":
        return "certify recognised no saved state among the script's files, and the script started over; name the files with `script.progress=PATTERN`"
    return ""


def _difference_text(difference: FileDifference) -> str:
    where = f"{difference.path} in {difference.file}" if difference.path else difference.file
    if difference.here.startswith("tensor") and difference.undisturbed.startswith("tensor"):
        return f"the tensor {where} has other values"
    return f"{where} is {difference.here[:60]!r}, and {difference.undisturbed[:60]!r} in the undisturbed run"


def _missing_states(evidence: TrialEvidence) -> str:
    """Return what the saved state lacks: `no state of an optimizer and no state of a random generator`."""
    saved = evidence.baseline.saved_contents
    held = {} if saved is None else {"an optimizer": saved.has_optimizer, "a random generator": saved.has_rng}
    return " and ".join(f"no state of {name}" for name, is_there in held.items() if not is_there)


def _notes(finding: FaultResult, evidence: TrialEvidence) -> Iterator[str]:
    fault = evidence.fault
    if fault.is_stop and evidence.injected_fault.signal_action == "default":
        yield f"the script sets no handler for SIG{fault.stop_signal}, so at each such stop the work since its last save is lost"
    if fault.moment == "in a save" and not evidence.injected_fault.was_in_save and finding.is_good:
        yield "no kill came while the script wrote a file: its saves are too short for certify to hit"
    if evidence.baseline.is_deterministic is False:
        missing = _missing_states(evidence)
        yield (
            "two undisturbed runs differ, so neither losses nor final files can be compared: the verdicts `exact`, `loses at most N steps` "
            "and `differs` are not possible, and a state that is not saved, or data in another order, would not be found. "
            f"{f'Its saved state has {missing}. ' if missing else ''}"
            "Set all seeds and `torch.use_deterministic_algorithms(True)` for the certification, and call it again"
        )
    if finding.verdict == "exact" and not evidence.injected_fault.present:
        yield "the fault came before the first save, so no resume was tested"
    if finding.verdict == "comes back" and not evidence.prints_resume:
        yield "the script does not print at which step it continues, so the amount of repeated work is not known"
    if evidence.has_finished and not evidence.comparable:
        yield "no file was compared: the script leaves none, or names or all values of files differ between undisturbed runs"
    others = [one for one in evidence.differences if not one.is_of_messages]
    if evidence.has_same_saved_state and others:
        yield f"the saved states are the same, but {_difference_text(others[0])}"
    other = "after the resume, the script prints other losses than the undisturbed run,"
    if any(evidence.loss_diff_flags) and evidence.has_same_saved_state:
        yield f"{other} but both save the same states: so the resume is right, and the printed loss is probably a running mean that starts again"
    elif any(evidence.loss_diff_flags) and finding.verdict in GOOD and evidence.baseline.is_deterministic is not False:
        yield f"{other} and certify could not compare all weights that it saves, so it is not known whether the resume is right"
