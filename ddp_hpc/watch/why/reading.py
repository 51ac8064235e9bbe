"""Reads what a run directory holds on one attempt: ledger, error reports and logs. Slurm is not asked."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.record import try_read_record
from ddp_hpc.run.requeue import MESSAGE_BY_NEXT
from ddp_hpc.run.run_dir.differences import read_difference
from ddp_hpc.run.run_dir.failure_reports import read_failures, read_rank_ends
from ddp_hpc.run.run_dir.joined_ranks import read_missing, started_ranks
from ddp_hpc.run.run_dir.ledger import Attempt, Ending, Ledger
from ddp_hpc.run.run_dir.network import read_network
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.preflight import PreflightReport
from ddp_hpc.watch.failed_worker_log import last_words
from ddp_hpc.watch.status import effect_of_resubmitting
from ddp_hpc.watch.why.findings import AttemptFacts, Verdict
from ddp_hpc.watch.why.lines import LogLine, tail

MOST_LOGS = 256
"""Of more ranks, only the logs of those that have an error report, and of the first, are read."""
_ENDED = "ended: "
"""What the supervisor prints before the reason why the run ended; after that of an attempt that another one follows, what follows."""
_CONTINUED = tuple(
    f"; {text.partition(',')[0]}" for text in MESSAGE_BY_NEXT.values()
)  # older logs go on in other words


def chosen_attempt(run: RunDir, ledger: Ledger, number: int | None) -> Attempt:
    """Return the attempt of this number; without one, the newest, or the one before where that failed and the newest still runs."""
    if not ledger.attempts:
        where = last_words(run) or f"`ddp-hpc status {run.name}` shows what it waits for."
        raise ConfigError(f"Run {run.name!r} has not begun an attempt. {where}")
    if number is None:
        newest = ledger.attempts[-1]
        before = ledger.newest_before(newest.attempt) if newest.ending is None else None
        return before if before is not None and before.ending == Ending.FAILED else newest
    attempt = ledger.attempt(number)
    if attempt is None:
        numbers = ", ".join(str(one.attempt) for one in ledger.attempts)
        raise ConfigError(f"Run {run.name!r} has no attempt {number}. Its attempts: {numbers}.")
    return attempt


def read_facts(run: RunDir, ledger: Ledger, attempt: Attempt) -> AttemptFacts:
    """Return what the run directory holds on an attempt."""
    number = attempt.attempt
    failures = read_failures(run, number)
    reported = {failure.rank for failure in failures}
    ranks = sorted(started_ranks(run, number) or (), key=lambda rank: (rank not in reported, rank))[:MOST_LOGS]
    return AttemptFacts(
        attempt=attempt,
        failures=failures,
        logs={rank: tail(run.rank_log(number, rank)) for rank in sorted(ranks)},
        console=_attempt_lines(tail(run.console), ledger, attempt),
        missing=read_missing(run, number),
        network=read_network(run, number),
        difference=read_difference(run, number),
        preflight=try_read_record(run.preflight(number), PreflightReport),
        ends=read_rank_ends(run, number, sorted(ranks)),
    )


def _attempt_lines(lines: Sequence[LogLine], ledger: Ledger, attempt: Attempt) -> Sequence[LogLine]:
    """Return the lines of the job's log that belong to an attempt; none where that is not sure."""
    parts: list[list[LogLine]] = [[]]
    for line in lines:
        parts[-1].append(line)
        if line.text.startswith(_ENDED) or any(text in line.text for text in _CONTINUED):
            parts.append([])
    ended = [one.attempt for one in ledger.attempts if one.ending is not None]
    *whole, rest = parts
    if attempt.attempt == ledger.attempts[-1].attempt:
        return [*(whole[-1] if whole and attempt.ending is not None else []), *rest]
    return whole[ended.index(attempt.attempt)] if attempt.attempt in ended and len(whole) == len(ended) else []


def to_do(run: RunDir, attempt: Attempt, verdict: Verdict, *, word: str) -> str:
    """Return what to do next, with commands that name this run by its `word`."""
    about = verdict.failure_class.to_do
    again = effect_of_resubmitting(run) if "{again}" in about else ""
    return about.format(run=word, attempt=attempt.attempt, rank=verdict.rank or 0, again=again)
