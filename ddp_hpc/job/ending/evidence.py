"""What is known when the workers of an attempt have exited: from the run's own files, each read once, and from Slurm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_hpc.base import exit_codes
from ddp_hpc.job.ending import stacks
from ddp_hpc.job.ending.causes import Evidence
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.run_records import RunRecords
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.records import QueuedJob, since_submission


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the files of a run say when an attempt has ended, read once for the decision on what follows."""

    ledger: Ledger
    queued: QueuedJob | None
    """The newest job that was submitted."""
    failures: Sequence[WorkerFailure]
    """Of this attempt, the first cause first."""

    @classmethod
    def read(cls, records: RunRecords, attempt: int) -> Recorded:
        return cls(ledger=records.ledger(), queued=records.queued(), failures=records.failures(attempt))

    def with_corrected(self, corrected: Sequence[Attempt]) -> Recorded:
        """Return this with other attempts of the same numbers."""
        by_number = {one.attempt: one for one in corrected}
        attempts = tuple(by_number.get(one.attempt, one) for one in self.ledger.attempts)
        return replace(self, ledger=replace(self.ledger, attempts=attempts))

    @property
    def attempts(self) -> Sequence[Attempt]:
        """Those of the user's newest submission."""
        return since_submission(self.ledger, self.queued)

    @property
    def failure(self) -> WorkerFailure | None:
        """The first to fail; None without a report."""
        return self.failures[0] if self.failures else None


def has_trained(attempts: Sequence[Attempt]) -> bool:
    """Tell whether one of these attempts trained: then the input that all of them have is valid."""
    return any((one.last_step or 0) > one.first_step for one in attempts)


def gather(context: JobContext, attempt: int, outcome: Outcome, ledger: Ledger) -> Evidence:
    """Return what is known of an attempt that has ended; Slurm is asked where its answer can matter."""
    records, slurm_job = context.records, context.job
    owns_run = not records.is_fenced(attempt) and outcome.code != exit_codes.FENCED
    is_clear = outcome.code == exit_codes.FINISHED or not owns_run  # Slurm, which may not even answer, adds nothing
    job = None if is_clear or slurm_job is None else slurm_job.now()
    may_ask = outcome.code == exit_codes.STOPPED and not outcome.was_signalled
    evidence = Evidence(
        code=outcome.code,
        owns_run=owns_run,
        stop_request=records.stop_request(),
        has_script_asked=may_ask and records.has_script_asked(attempt, context.world.world_size),
        is_out_of_time=outcome.is_out_of_time,
        is_unresponsive=outcome.is_unresponsive,
        was_suspended=outcome.was_suspended,
        has_failed_preflight=outcome.has_failed_preflight,
        has_stacks=stacks.has_stacks(context.run, attempt, context.world.world_size),
        lost_nodes=[*outcome.lost_nodes, *outcome.avoided_nodes],
        now=time.time(),
        lead_s=context.spec.slurm.signal_lead_s,
        restart=slurm_job.allocation.restart_count if slurm_job else 0,
        job=job,
    )
    if slurm_job is None or job is None:
        return evidence
    if evidence.is_for_accounting:
        evidence = replace(evidence, accounted_as=slurm_job.accounted_end(ledger))
    if outcome.code in (exit_codes.FINISHED, exit_codes.STOPPED):
        return evidence
    return replace(evidence, lost_nodes=sorted({*evidence.lost_nodes, *slurm_job.lost_nodes()}))
