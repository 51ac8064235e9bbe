"""What is known when the workers of an attempt have exited: from the run's own files, each read once, and from Slurm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_hpc.base import exit_codes
from ddp_hpc.job.ending import stacks, wrong_ranks
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.ending.causes import Evidence
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.run.run_dir.differences import Difference, read_differences
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, read_failures
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.records import read_queued_job, read_stop_request, since_submission


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the files of a run say when an attempt has ended, read once for the decision on what follows."""

    ledger: Ledger
    attempts: Sequence[Attempt]
    """Those of the user's newest submission."""
    failures: Sequence[WorkerFailure]
    """Of this attempt, the first cause first."""
    difference: Difference | None
    """What this attempt's ranks had that differed; None where none was found."""
    differs_as: int | None
    """The earlier attempt in which each rank had the same values after the same step."""

    @classmethod
    def read(cls, context: JobContext, attempt: int) -> Recorded:
        """Read them; correct in the ledger on which nodes earlier attempts failed, where the records show that by now."""
        run = context.run
        read, queued, failures = Ledger.read(run), read_queued_job(run), read_failures(run, attempt)
        differences = read_differences(run)
        corrected = {one.attempt: one for one in wrong_ranks.corrected(read.attempts, differences)}
        with best_effort():
            for one in corrected.values():
                context.records.note(one.attempt, failed_nodes=one.failed_nodes)
        ledger = replace(read, attempts=tuple(corrected.get(one.attempt, one) for one in read.attempts))
        attempts = since_submission(ledger, queued)
        return cls(
            ledger=ledger,
            attempts=attempts,
            failures=failures,
            difference=next((one for one in differences if one.attempt == attempt), None),
            differs_as=wrong_ranks.same_again(differences, attempts, attempt),
        )


def has_trained(attempts: Sequence[Attempt]) -> bool:
    """Tell whether one of these attempts trained: then the input that all of them have is valid."""
    return any((one.last_step or 0) > one.first_step for one in attempts)


def gather(context: JobContext, attempt: int, outcome: Outcome, known: Recorded) -> Evidence:
    """Return what is known of an attempt that has ended; Slurm is asked where its answer can matter."""
    run, world_size, slurm_job = context.run, context.world.world_size, context.job
    owns_run = not context.records.is_fenced(attempt) and outcome.code != exit_codes.FENCED
    is_clear = outcome.code == exit_codes.FINISHED or not owns_run  # Slurm, which may not even answer, adds nothing
    job = None if is_clear or slurm_job is None else slurm_job.now()
    may_ask = outcome.code == exit_codes.STOPPED and not outcome.was_signalled
    # On one machine, a submission may change the input, and waits for the refusal.
    same_input = [one for one in known.attempts if context.allocation or one.job_id == known.attempts[-1].job_id]
    evidence = Evidence(
        outcome=outcome,
        owns_run=owns_run,
        stop_request=read_stop_request(run),
        has_script_asked=may_ask and any(run.script_asked(attempt, rank).exists() for rank in range(world_size)),
        has_trained=has_trained(same_input),
        has_stacks=stacks.has_stacks(run, attempt, world_size),
        lost_nodes=[*outcome.lost_nodes, *outcome.avoided_nodes],
        now=time.time(),
        lead_s=context.spec.slurm.signal_lead_s,
        restart=slurm_job.allocation.restart_count if slurm_job else 0,
        job=job,
    )
    if slurm_job is None or job is None:
        return evidence
    if evidence.is_for_accounting:
        evidence = replace(evidence, accounted_as=slurm_job.accounted_end(known.ledger))
    if outcome.code in (exit_codes.FINISHED, exit_codes.STOPPED):
        return evidence
    return replace(evidence, lost_nodes=sorted({*evidence.lost_nodes, *slurm_job.lost_nodes()}))
