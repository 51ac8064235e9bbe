"""The verdict on an attempt as one screen of text, and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from ddp_hpc.base.names import plural
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger, Next
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.status import read_status
from ddp_hpc.watch.why.findings import EvidenceLine, Verdict
from ddp_hpc.watch.why.lines import number_of
from ddp_hpc.watch.why.reading import to_do
from ddp_hpc.watch.why.signatures import REGISTRY, Role

_INDENT = " " * 10
_WRAPPER = TextWrapper(
    110, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
)
_LONGEST_QUOTE = 300
_NEXT_TEXTS = {
    Next.NOTHING: "the run ended with this attempt",
    Next.IN_PLACE: "ddp-hpc started another attempt on the same nodes",
    Next.REQUEUE: "ddp-hpc put the job back into the queue",
    Next.SUCCESSOR: "ddp-hpc submitted a job that follows",
    Next.SLURM: "Slurm put the job back into the queue",
}
_BASIS_TEXTS = {"record": "from the run's records", "log": "from a text in a log", "none": "nothing proves it"}

_ROLES: Mapping[Role, str] = {"root": "root", "cascade": "cascade", "confirmation": "confirms", "either": "perhaps"}
"""What a piece of evidence is -> the word before it; `--json` has the first."""


def as_text(run: RunDir, ledger: Ledger, attempt: Attempt, verdict: Verdict, *, word: str) -> str:
    """Return one screen."""
    rows = dict(_rows(run, ledger, attempt, verdict, word=word))
    return "\n".join(_row(name, text) for name, text in rows.items() if text)


def _row(name: str, text: str) -> str:
    return f"{name:<10}" + "\n".join(map(_WRAPPER.fill, text.splitlines()))[10:]


def _rows(run: RunDir, ledger: Ledger, attempt: Attempt, verdict: Verdict, *, word: str) -> Iterator[tuple[str, str]]:
    which = "the newest" if attempt == ledger.newest else f"the newest is {ledger.attempts[-1].attempt}"
    yield "run", f"{run.name}, attempt {attempt.attempt}, {which}  ({run.path})"
    if attempt.ending is None and verdict.basis == "none" and verdict.rank is None:
        yield (
            "why",
            f"no end of this attempt is recorded: the run is {read_status(run, now=time.time()).state} (`ddp-hpc status {word}`)",
        )
        yield "in logs", "\n".join(f"{_place_text(run, one)}: {_short_quote(one)}" for one in verdict.evidence)
        return
    if not verdict.failure:
        yield "why", f"nothing failed: {attempt.cause or attempt.ending}"
        failed = [str(one.attempt) for one in ledger.attempts if one.ending == "failed"]
        yield (
            "earlier",
            f"attempts that failed: {', '.join(failed)}; `ddp-hpc why {word} --attempt {failed[-1]}`" if failed else "",
        )
        return
    about = verdict.failure_class
    yield "why", f"{about.title}  [{verdict.failure}; {_BASIS_TEXTS[verdict.basis]}]"
    yield "root", verdict.root_text or "no rank is known to have failed first"
    yield "detail", verdict.detail[:_LONGEST_QUOTE]
    yield "in short", verdict.in_short
    yield "at", verdict.place
    yield "concerns", _sample_or_file(attempt, verdict)
    yield "alike", _similar_attempts(ledger, attempt)
    yield (
        "evidence",
        "\n".join(f"{_ROLES[one.role]} ({_place_text(run, one)}): {_short_quote(one)}" for one in verdict.evidence),
    )
    others = {"lost the connection to a peer": verdict.num_cascades, "failed in the same way": verdict.num_alike}
    yield "others", "; ".join(f"{plural(count, 'other rank')} {what}" for what, count in others.items() if count)
    yield "means", about.means
    yield "to do", to_do(run, attempt, verdict, word=word)
    ended = f"{REGISTRY[verdict.end].title}; " if verdict.end else ""
    then = ended + _NEXT_TEXTS[attempt.next] if attempt.end else ""
    yield "then", f"{then}: {attempt.why_last}" if attempt.why_last else then


def _sample_or_file(attempt: Attempt, verdict: Verdict) -> str:
    """Return the sample or file; of a run that one has ended, the ledger's."""
    return attempt.root.entity if attempt.why_last and attempt.root.entity else verdict.entity


def _similar_attempts(ledger: Ledger, attempt: Attempt) -> str:
    """Return which other attempts failed in the same way, at the same sample or file."""
    about = (attempt.root.fingerprint, attempt.root.entity)
    others = [
        one.attempt
        for one in ledger.attempts
        if (one.root.fingerprint, one.root.entity) == about and one.attempt != attempt.attempt
    ]
    if not attempt.root.fingerprint or not others:
        return ""
    return f"{'attempt' if len(others) == 1 else 'attempts'} {', '.join(map(str, others))} failed in the same way"


def _place_text(run: RunDir, evidence: EvidenceLine) -> str:
    rank = "" if evidence.rank is None else f"rank {evidence.rank}, "
    return rank + (evidence_place(run, evidence) or "record")


def _short_quote(evidence: EvidenceLine) -> str:
    return evidence.text[:_LONGEST_QUOTE].strip()


def evidence_place(run: RunDir, evidence: EvidenceLine) -> str:
    """Return the file and the line of a piece of evidence: `logs/attempt-0/rank-1.log:57`."""
    if evidence.line is None:
        return ""
    path: Path = evidence.line.path
    short = path.relative_to(run.path) if path.is_relative_to(run.path) else path
    number = number_of(evidence.line)
    return f"{short}:{number}" if number else str(short)


def as_record(run: RunDir, attempt: Attempt, verdict: Verdict, *, word: str) -> dict[str, Any]:
    """Return what `why --json` prints."""
    about = verdict.failure_class if verdict.failure else None
    return {
        "run": run.name,
        "attempt": attempt.attempt,
        "cause": attempt.cause,
        "failure": verdict.failure or None,
        "title": about.title if about else None,
        "basis": verdict.basis,
        "rank": verdict.rank,
        "host": verdict.host or None,
        "step": verdict.step,
        "detail": verdict.detail,
        "in_short": verdict.in_short or None,
        "place": verdict.place or None,
        "entity": _sample_or_file(attempt, verdict) or None,
        "fingerprint": attempt.root.fingerprint or verdict.fingerprint or None,
        "num_cascades": verdict.num_cascades,
        "num_alike": verdict.num_alike,
        "to_do": to_do(run, attempt, verdict, word=word) if about else None,
        "evidence": [
            {"role": one.role, "rank": one.rank, "place": evidence_place(run, one) or None, "text": one.text}
            for one in verdict.evidence
        ],
    }
