"""From evidence to a verdict: exact, loses at most N steps, differs, does not come back, hangs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ddp_hpc.prove.certify.baseline import Baseline
from ddp_hpc.prove.certify.evidence import Evidence
from ddp_hpc.prove.certify.file_differences import Difference
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
_MOST_DIFFERENCES = 8
"""So many are named in a message, at most."""


@dataclass(kw_only=True)
class Finding:
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
    def is_good(self) -> bool:
        """Whether the script came back, and nothing is wrong with how."""
        return self.verdict in GOOD and not self.defects


def are_good(findings: Iterable[Finding]) -> bool:
    """Tell whether at least one fault was tried, and the script came back from all that were."""
    findings = list(findings)
    return all(one.is_good for one in findings) and any(one.verdict != "not tried" for one in findings)


def needs_second_run(evidence: Evidence) -> bool:
    """Tell whether only a second undisturbed run shows what a difference means."""
    if evidence.outcome not in {"finished", "untouched"}:
        return False
    if evidence.differences:
        return True
    return not evidence.has_same_weights and bool(evidence.first_loss_differs or evidence.later_loss_differs)


def judge(name: str, evidence: Evidence, baseline: Baseline) -> Finding:
    """Return the verdict on one fault."""
    defects = diagnose(evidence)
    finding = Finding(
        fault=name,
        description=evidence.fault.description,
        verdict="exact",
        words="",
        first_difference=first_difference(evidence) if evidence.differs else "",
        newest_state=evidence.newest_state,
        read_back=list(evidence.read_back),
        defects=defects,
    )
    if evidence.outcome == "untouched":
        finding.verdict, finding.words = "untouched", "not tried: the run finished before the moment of the fault"
        return finding
    if evidence.outcome == "hung":
        finding.verdict, finding.words = "hangs", "hangs"
    elif not evidence.came_back:
        finding.verdict, finding.words = "does not come back", "does not come back"
    elif evidence.signal_action == "ignored" or evidence.ran_on:
        finding.verdict, finding.words = "does not stop", "does not stop"
    elif evidence.differs or evidence.doubled:
        finding.verdict, finding.words = "differs", "differs: the script resumed, but its result is another"
    elif evidence.saves_nothing:
        finding.verdict, finding.words = "saves nothing", "saves nothing"
        finding.reason = "certify recognised no saved state among the script's files, and the script started over; name the files with `script.progress=PATTERN`"
    elif evidence.num_repeated:
        finding.verdict, finding.at_most = "loses", max(evidence.num_repeated, _between_saves(evidence, baseline))
        lost = f"{finding.at_most} {evidence.unit}{'' if finding.at_most == 1 else 's'}"
        finding.words = f"loses at most {lost}"
        if evidence.is_deterministic is False:  # `loses` also says that the final files are the same
            finding.verdict, finding.words = "comes back", f"comes back, and repeats at most {lost}"
    elif evidence.is_deterministic is False or not evidence.is_measured or not evidence.num_compared:
        finding.verdict, finding.words = "comes back", "comes back"
    else:
        finding.words = "exact"
    finding.reason = _reason(finding, evidence) or finding.reason
    finding.notes = _notes(finding, evidence)
    return finding


def _between_saves(evidence: Evidence, baseline: Baseline) -> int:
    return 0 if evidence.fault.is_stop and evidence.signal_action == "caught" else baseline.steps_between_saves or 0


def _reason(finding: Finding, evidence: Evidence) -> str:
    if finding.defects:
        names = " or ".join(dict.fromkeys(one.name for one in finding.defects))
        sure = all(one.is_sure for one in finding.defects)
        return names if sure else f"possibly {names}"
    if finding.verdict == "hangs":
        return evidence.error
    if finding.verdict == "does not come back":
        return _no_return(evidence)
    if finding.verdict == "differs":
        read = f"it read {', '.join(evidence.read_back) or 'no saved state'} back"
        return f"{read}, and certify does not know why it differs; what differs first: {finding.first_difference}"
    return ""


def _no_return(evidence: Evidence) -> str:
    if evidence.ended_at is not None:
        at = f"{evidence.unit} {position_text(evidence.ended_at)}"
        return f"the script ended with exit code 0 at {at}, but the undisturbed run goes on after that"
    return evidence.error or "the script starts over from its beginning"


def first_difference(evidence: Evidence) -> str:
    """Return what differs first, in the output or else in the files."""
    if evidence.first_loss_differs:
        return f"the first loss after the resume, at {evidence.unit} {position_text(evidence.resumed_at)}"
    files = [_text(one) for one in evidence.differences[:_MOST_DIFFERENCES]]
    if evidence.later_loss_differs:
        return f"a later loss after the resume{f'; {files[0]}' if files else ''}"
    return files[0] if files else "no difference was recorded"


def _text(difference: Difference) -> str:
    where = f"{difference.path} in {difference.file}" if difference.path else difference.file
    if difference.here.startswith("tensor") and difference.undisturbed.startswith("tensor"):
        return f"the tensor {where} has other values"
    return f"{where} is {difference.here[:60]!r}, and {difference.undisturbed[:60]!r} in the undisturbed run"


def _not_possible(evidence: Evidence) -> str:
    """Return the note on two undisturbed runs that differ: which verdicts are not possible, and what the saved state lacks."""
    saved = evidence.checkpoint
    held = {} if saved is None else {"an optimizer": saved.has_optimizer, "a random generator": saved.has_rng}
    missing = " and ".join(f"no state of {name}" for name, is_there in held.items() if not is_there)
    return (
        "two undisturbed runs differ, so neither losses nor final files can be compared: the verdicts `exact`, `loses at most N steps` "
        "and `differs` are not possible, and a state that is not saved, or data in another order, would not be found. "
        f"{f'Its saved state has {missing}. ' if missing else ''}"
        "Set all seeds and `torch.use_deterministic_algorithms(True)` for the certification, and call it again"
    )


def _notes(finding: Finding, evidence: Evidence) -> list[str]:
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
    if evidence.logged_otherwise is not None:
        notes.append(f"the saved states are the same, but {_text(evidence.logged_otherwise)}")
    if evidence.has_same_weights and (evidence.first_loss_differs or evidence.later_loss_differs):
        notes.append(
            "after the resume, the script prints other losses than the undisturbed run, but both save the same states: so the resume is right, and the printed loss is probably a running mean that starts again"
        )
    return notes
