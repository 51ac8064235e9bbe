"""What is known when the workers of an attempt have exited: from the run's own files, each read once, and from Slurm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ddp_hpc.base import exit_codes
from ddp_hpc.job.ending import blame
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.ending.causes import Evidence
from ddp_hpc.job.ending.hang_report import has_stacks
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.run.run_dir.differences import read_differences
from ddp_hpc.run.run_dir.failure_reports import read_failures
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger, record_addition
from ddp_hpc.run.run_dir.ownership import is_fenced
from ddp_hpc.run.run_dir.records import attempts_of_submission, read_queued_job, read_stop_request


def has_trained(attempts: Sequence[Attempt]) -> bool:
    """Tell whether one of these attempts trained: then the input that all of them have is valid."""
    return any((one.last_step or 0) > one.first_step for one in attempts)


def gather_evidence(context: JobContext, attempt: int, outcome: Outcome) -> Evidence:
    """Return what is known of an attempt that has ended; Slurm is asked where its answer can matter.

    Correct in the ledger on which nodes earlier attempts failed, where the records show that by now.
    """
    run, world_size, slurm_job = context.run, context.world.world_size, context.job
    read, queued, failures = Ledger.read(run), read_queued_job(run), read_failures(run, attempt)
    differences = read_differences(run)
    corrected = {one.attempt: one for one in blame.corrected_attempts(read.attempts, differences)}
    with best_effort():
        for one in corrected.values():
            record_addition(run, attempt=one.attempt, failed_nodes=one.failed_nodes)
    ledger = replace(read, attempts=tuple(corrected.get(one.attempt, one) for one in read.attempts))
    attempts = attempts_of_submission(ledger, queued)
    owns_run = not is_fenced(run, attempt) and outcome.code != exit_codes.FENCED
    is_clear = outcome.code == exit_codes.FINISHED or not owns_run  # Slurm, which may not even answer, adds nothing
    job = None if is_clear or slurm_job is None else slurm_job.query_record()
    may_ask = outcome.code == exit_codes.STOPPED and not outcome.was_signalled
    # On one machine, a submission may change the input, and waits for the refusal.
    same_input = [one for one in attempts if context.allocation or one.job_id == attempts[-1].job_id]
    evidence = Evidence(
        outcome=outcome,
        ledger=ledger,
        attempts=attempts,
        failures=failures,
        difference=next((one for one in differences if one.attempt == attempt), None),
        differs_as=blame.earlier_same_difference(differences, attempts, attempt),
        owns_run=owns_run,
        stop_request=read_stop_request(run),
        has_script_asked=may_ask and any(run.script_asked(attempt, rank).exists() for rank in range(world_size)),
        has_trained=has_trained(same_input),
        # A rank that reported its own failure ended by that, and not by a watchdog: its log may hold stacks that it dumped itself.
        has_stacks=all(one.is_secondary for one in failures) and has_stacks(run, attempt, world_size),
        # A node that is silent may still import PyTorch while a rank elsewhere fails of itself; a dead one, Slurm names below.
        lost_nodes=[
            *(() if any(not one.is_secondary for one in failures) else outcome.lost_nodes),
            *outcome.avoided_nodes,
        ],
        now=time.time(),
        lead_s=context.spec.slurm.signal_lead_s,
        restart=slurm_job.allocation.restart_count if slurm_job else 0,
        job=job,
    )
    if slurm_job is None or job is None:
        return evidence
    if evidence.is_accounting_needed:
        evidence = replace(evidence, accounted_as=slurm_job.accounted_end(ledger))
    if outcome.code in (exit_codes.FINISHED, exit_codes.STOPPED):
        return evidence
    return replace(evidence, lost_nodes=sorted({*evidence.lost_nodes, *slurm_job.lost_nodes()}))
