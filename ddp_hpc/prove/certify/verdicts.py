"""From evidence to a verdict: exact, loses at most N steps, differs, does not come back, hangs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddp_hpc.prove.certify.baseline import Baseline
from ddp_hpc.prove.certify.evidence import TrialEvidence
from ddp_hpc.prove.certify.file_differences import FileDifference
from ddp_hpc.prove.certify.rules import Defect, diagnose, position_text

Verdict = Literal[
    "exact",
    "loses",
    "comes back",
    "saves nothing",
    "does not stop",
    "differs",
    "does not come back",
    "hangs",
    "not tried",
    "untouched",
]
GOOD: frozenset[Verdict] = frozenset({"exact", "loses", "comes back", "not tried"})
"""`not tried`, where the script has no such moment, does no harm beside others; alone it says nothing (`are_good`)."""
_WORDS: Mapping[Verdict, str] = {
    "untouched": "not tried: the run finished before the moment of the fault",
    "differs": "differs: the script resumed, but its result is another",
}


@dataclass(kw_only=True)
class FaultResult:
    """What one fault has shown; the fields are keys of `certify --json`."""

    fault: str
    description: str
    verdict: Verdict
    words: str
    """The verdict as text."""
    at_most: int | None = None
    """How many steps or epochs were done again, where that is the verdict."""
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
    def read_words(self) -> str:
        """Which saved states it read back, or which it left alone, as text."""
        if self.read_back:
            return ", ".join(self.read_back[:2]) + (", ..." if len(self.read_back) > 2 else "")
        return f"not {self.newest_state}" if self.newest_state else ""

    @property
    def is_good(self) -> bool:
        """Whether the script came back, and nothing is wrong with how."""
        return self.verdict in GOOD and not self.defects


def are_good(findings: Iterable[FaultResult]) -> bool:
    """Tell whether at least one fault was tried, and the script came back from all that were."""
    findings = list(findings)
    return all(one.is_good for one in findings) and any(one.verdict != "not tried" for one in findings)


def needs_second_run(evidence: TrialEvidence) -> bool:
    """Tell whether only a second undisturbed run shows what a difference means."""
    if evidence.outcome not in {"finished", "untouched"}:
        return False
    seen = evidence.differences or evidence.first_loss_differs or evidence.later_loss_differs
    return bool(seen) and not evidence.has_same_weights


def judge(name: str, evidence: TrialEvidence, baseline: Baseline) -> FaultResult:
    """Return the verdict on one fault."""
    verdict = _verdict(evidence)
    finding = FaultResult(
        fault=name,
        description=evidence.fault.description,
        verdict=verdict,
        words=_WORDS.get(verdict, verdict),
        first_difference=_first_difference(evidence) if evidence.differs else "",
        newest_state=evidence.newest_state,
        read_back=list(evidence.read_back),
        defects=diagnose(evidence),
    )
    if verdict == "untouched":
        return finding
    if verdict in {"loses", "comes back"} and evidence.num_repeated:
        finding.at_most = max(evidence.num_repeated, _between_saves(evidence, baseline))
        lost = f"at most {finding.at_most} {evidence.unit}{'' if finding.at_most == 1 else 's'}"
        finding.words = f"loses {lost}" if verdict == "loses" else f"comes back, and repeats {lost}"
    finding.reason = _reason(finding, evidence)
    finding.notes = _notes(finding, evidence)
    return finding


def _verdict(seen: TrialEvidence) -> Verdict:
    """Return the first verdict of the table that holds."""
    is_random = seen.is_deterministic is False
    table: Sequence[tuple[Verdict, bool]] = (
        ("untouched", seen.outcome == "untouched"),
        ("hangs", seen.outcome == "hung"),
        ("does not come back", not seen.came_back),
        ("does not stop", seen.signal_action == "ignored" or seen.ran_on),
        ("differs", seen.differs or bool(seen.doubled)),
        ("saves nothing", seen.saves_nothing),
        ("loses", bool(seen.num_repeated) and not is_random),  # which also says that the final files are the same
        ("comes back", is_random or not seen.is_measured or not seen.num_compared),
    )
    return next((verdict for verdict, holds in table if holds), "exact")


def _between_saves(evidence: TrialEvidence, baseline: Baseline) -> int:
    return 0 if evidence.fault.is_stop and evidence.signal_action == "caught" else baseline.steps_between_saves or 0


def _reason(finding: FaultResult, evidence: TrialEvidence) -> str:
    if finding.defects:
        return " and ".join(dict.fromkeys(one.name for one in finding.defects))
    if finding.verdict == "hangs":
        return evidence.error
    if finding.verdict == "does not come back":
        return _no_return(evidence)
    if finding.verdict == "saves nothing":
        return "certify recognised no saved state among the script's files, and the script started over; name the files with `script.progress=PATTERN`"
    if finding.verdict == "differs":
        missing = _missing(evidence)
        return f"certify does not know why; what differs first: {finding.first_difference}{f'; its saved state has {missing}' if missing else ''}"
    return ""


def _no_return(evidence: TrialEvidence) -> str:
    if evidence.ended_at is not None:
        at = f"{evidence.unit} {position_text(evidence.ended_at)}"
        return f"the script ended with exit code 0 at {at}, but the undisturbed run goes on after that"
    return evidence.error or "the script starts over from its beginning"


def _first_difference(evidence: TrialEvidence) -> str:
    """Return what differs first, in the output or else in the files."""
    first = _text(evidence.differences[0])
    if evidence.first_loss_differs:
        return f"the first loss after the resume, at {evidence.unit} {position_text(evidence.resumed_at)}; {first}"
    return f"a later loss after the resume; {first}" if evidence.later_loss_differs else first


def _text(difference: FileDifference) -> str:
    where = f"{difference.path} in {difference.file}" if difference.path else difference.file
    if difference.here.startswith("tensor") and difference.undisturbed.startswith("tensor"):
        return f"the tensor {where} has other values"
    return f"{where} is {difference.here[:60]!r}, and {difference.undisturbed[:60]!r} in the undisturbed run"


def _missing(evidence: TrialEvidence) -> str:
    """Return what the saved state lacks: `no state of an optimizer and no state of a random generator`."""
    saved = evidence.checkpoint
    held = {} if saved is None else {"an optimizer": saved.has_optimizer, "a random generator": saved.has_rng}
    return " and ".join(f"no state of {name}" for name, is_there in held.items() if not is_there)


def _not_possible(evidence: TrialEvidence) -> str:
    """Return the note on two undisturbed runs that differ: which verdicts are not possible, and what the saved state lacks."""
    missing = _missing(evidence)
    return (
        "two undisturbed runs differ, so neither losses nor final files can be compared: the verdicts `exact`, `loses at most N steps` "
        "and `differs` are not possible, and a state that is not saved, or data in another order, would not be found. "
        f"{f'Its saved state has {missing}. ' if missing else ''}"
        "Set all seeds and `torch.use_deterministic_algorithms(True)` for the certification, and call it again"
    )


def _notes(finding: FaultResult, evidence: TrialEvidence) -> list[str]:
    notes = []
    fault = evidence.fault
    if fault.is_stop and evidence.signal_action == "default":
        notes.append(
            f"the script sets no handler for SIG{fault.stop_signal}, so at each such stop the work since its last save is lost"
        )
    if fault.moment == "in a save" and not evidence.was_in_save:
        notes.append("no kill came while the script wrote a file: its saves are too short for certify to hit")
    if evidence.is_deterministic is False:
        notes.append(_not_possible(evidence))
    if finding.verdict == "comes back" and not evidence.is_measured:
        notes.append(
            "the script does not print at which step it continues, so the amount of repeated work is not known"
        )
    if evidence.num_compared == 0:
        notes.append(
            "no file was compared: the script leaves none, or names or all values of files differ between undisturbed runs"
        )
    if evidence.has_same_weights and evidence.differences:
        notes.append(f"the saved states are the same, but {_text(evidence.differences[0])}")
    if evidence.has_same_weights and (evidence.first_loss_differs or evidence.later_loss_differs):
        notes.append(
            "after the resume, the script prints other losses than the undisturbed run, but both save the same states: so the resume is right, and the printed loss is probably a running mean that starts again"
        )
    return notes
