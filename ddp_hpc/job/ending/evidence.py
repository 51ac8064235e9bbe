"""What is known when the workers of an attempt have exited: from the run's own files, each read once, and from Slurm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_hpc import exit_codes, ownership
from ddp_hpc.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.failure_reports import WorkerFailure, read_failures
from ddp_hpc.job.ending import stacks
from ddp_hpc.job.ending.causes import Evidence
from ddp_hpc.job.ending.stale_attempts import accounted_end
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.ledger import Attempt, Ledger
from ddp_hpc.records import QueuedJob, read_queued_job, read_stop_request, since_submission
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client
from ddp_hpc.slurm.queries import JobRecord, is_lost


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the files of a run say when an attempt has ended, read once for the decision on what follows."""

    ledger: Ledger
    queued: QueuedJob | None
    """The newest job that was submitted."""
    failures: Sequence[WorkerFailure]
    """Of this attempt, the first cause first."""

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> Recorded:
        return cls(ledger=Ledger.read(run), queued=read_queued_job(run), failures=read_failures(run, attempt))

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
    run, spec, allocation = context.run, context.spec, context.allocation
    owns_run = not ownership.is_fenced(run, attempt) and outcome.code != exit_codes.FENCED
    is_clear = outcome.code == exit_codes.FINISHED or not owns_run  # Slurm, which may not even answer, adds nothing
    job = None if is_clear else job_now(context)
    restart = allocation.restart_count if allocation else 0
    evidence = Evidence(
        code=outcome.code,
        owns_run=owns_run,
        stop_request=read_stop_request(run),
        is_out_of_time=outcome.is_out_of_time,
        is_unresponsive=outcome.is_unresponsive,
        was_suspended=outcome.was_suspended,
        has_stacks=stacks.has_stacks(run, attempt, context.world.world_size),
        lost_nodes=[*outcome.lost_nodes, *outcome.avoided_nodes],
        now=time.time(),
        lead_s=spec.slurm.signal_lead_s,
        restart=restart,
        job=job,
    )
    if evidence.is_for_accounting:
        evidence = replace(evidence, accounted_as=accounted_as(context, ledger))
    if outcome.code in (exit_codes.FINISHED, exit_codes.STOPPED) or job is None:
        return evidence
    lost = [node for node, state in client.node_states(context.environ, context.nodes).items() if is_lost(state)]
    return replace(evidence, lost_nodes=sorted({*evidence.lost_nodes, *lost}))


def job_now(context: JobContext) -> JobRecord | None:
    """Return what Slurm knows of the job now, if it answers."""
    if context.allocation is None:
        return None
    try:
        return client.job(context.allocation.job_id, context.environ)
    except (ConfigError, SlurmUnavailableError):
        return None


def accounted_as(context: JobContext, ledger: Ledger) -> str:
    """Return the final state of this start of the job by accounting; empty where that is not known."""
    return "" if ledger.newest is None else accounted_end(ledger.newest, ledger, context.environ)
