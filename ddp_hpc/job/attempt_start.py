"""How an attempt starts: it claims the run, and its first line goes into the ledger."""

from __future__ import annotations

import os
import sys
import time

from ddp_hpc.base.durable import read_json
from ddp_hpc.base.errors import FencedError
from ddp_hpc.base.patience import ask_once
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run.requeue import RULES
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Cause, End, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job, write_rendezvous_token
from ddp_hpc.run.workload.protocol import Workload


def begin_attempt(run: RunDir, workload: Workload, job: SlurmJob | None, *, image: str = "") -> int:
    """Claim the run for another attempt, and write its start into the ledger; return its number.

    Raises:
        FencedError: where another process has claimed it, or Slurm has started the job again since.
    """
    ledger = Ledger.read(run)
    refuse_older_start(run, ledger, job)
    attempt = ownership.next_attempt(run, ledger)
    for name in ownership.claim_run(run, attempt):
        sys.stderr.write(
            f"note: removed {name}, an unfinished checkpoint that killed workers left; committed ones are not affected\n"
        )
    write_rendezvous_token(run.rendezvous_token(attempt))
    stop_request = ask_once(run.stop_request, lambda: read_json(run.stop_request), unknown=None) or {}
    if stop_request.get("by") == "supervisor":  # for the attempt before; what cannot be read may be the user's
        run.stop_request.unlink(missing_ok=True)
    first_step = workload.progress(run, ledger)
    if job is None:
        record_start(run, attempt=attempt, job_id=str(os.getpid()), first_step=first_step, image=image)
        return attempt
    queued, facts = read_queued_job(run), job.ledger_fields()
    if queued is not None and (queued.job_id, queued.attempt) == (job.job_id, attempt):
        facts["queued_at"] = queued.at
    record_start(run, attempt=attempt, job_id=job.job_id, first_step=first_step, image=image, **facts)
    if queued is None or queued.job_id != job.job_id:  # plain sbatch has submitted it
        write_queued_job(run, QueuedJob(job_id=job.job_id, attempt=attempt, at=time.time(), since=attempt))
    run.gave_up.unlink(missing_ok=True)
    return attempt


def refuse_older_start(run: RunDir, ledger: Ledger, job: SlurmJob | None) -> None:
    """Return while Slurm has not started the job again, as it does where it has lost this start's node for some minutes.

    Raises:
        FencedError: where the newer start of the job has begun an attempt, which goes on alone.
    """
    newest = ledger.newest
    if newest and job and newest.job_id == job.job_id and newest.restart > job.allocation.restart_count:
        raise FencedError(
            f"Slurm has started job {job.job_id} of {run.name} again, on {newest.host}, so this older start of it ends. You need do nothing."
        )


def record_start_without_workers(run: RunDir, job: SlurmJob | None) -> int:
    """Write the start of an attempt that only records why no workers are started; return its number."""
    attempt = ownership.next_attempt(run)
    job_id, facts = (job.job_id, job.ledger_fields()) if job else (str(os.getpid()), {})
    record_start(run, attempt=attempt, job_id=job_id, **facts)
    return attempt


def record_unbegun_attempt(run: RunDir, job: SlurmJob | None, cause: Cause, reason: str, exit_code: int) -> None:
    """Write the start and the end of an attempt that started no workers."""
    end = End(ending=RULES[cause].ending, exit_code=exit_code, reason=reason, cause=cause)
    record_end(run, record_start_without_workers(run, job), end)
