"""What a supervisor writes in a run's directory: the ledger, the claim, the queued job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run.requeue import TABLE
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Cause, End, Ledger, record_end, record_more, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import (
    QueuedJob,
    read_queued_job,
    read_stop_request,
    write_done,
    write_queued_job,
    write_rendezvous_token,
)
from ddp_hpc.run.workload.protocol import Workload

LOCK_PATIENCE_S = 10.0
"""How long the processes of a killed attempt may take to exit, which hold the run's lock."""


def in_use(run: RunDir, by: str = "another process") -> str:
    """Say that a run cannot be acquired."""
    return f"{run.path} is already in use by {by}. Wait until it ends, or end it: `ddp-hpc cancel {run.word}`."


@dataclass(frozen=True)
class RunRecords:
    """What a supervisor writes of a run: whose it is, and how its attempts began and ended."""

    run: RunDir

    def is_fenced(self, attempt: int) -> bool:
        """Tell whether a newer attempt has claimed the run."""
        return ownership.is_fenced(self.run, attempt)

    def begin(self, workload: Workload, job: SlurmJob | None, *, image: str = "") -> int:
        """Claim the run for another attempt, and write its start into the ledger; return its number.

        Raises:
            FencedError: where another process has claimed it.
        """
        run, ledger = self.run, Ledger.read(self.run)
        attempt = ownership.next_attempt(run, ledger)
        for name in ownership.claim(run, attempt):
            sys.stderr.write(
                f"note: removed {name}, an unfinished checkpoint that killed workers left; committed ones are not affected\n"
            )
        write_rendezvous_token(run.rendezvous_token(attempt))
        if read_stop_request(run) is None:
            run.stop_request.unlink(missing_ok=True)  # the supervisor wrote it for the attempt before
        first_step = workload.progress(run, ledger)
        if job is None:
            record_start(run, attempt=attempt, job_id=str(os.getpid()), first_step=first_step, image=image)
            return attempt
        queued, facts = read_queued_job(run), job.facts()
        if queued is not None and (queued.job_id, queued.attempt) == (job.job_id, attempt):
            facts = replace(facts, queued_at=queued.at)
        record_start(run, attempt=attempt, job_id=job.job_id, job=facts, first_step=first_step, image=image)
        if queued is None or queued.job_id != job.job_id:  # plain sbatch has submitted it
            self.note_queued(QueuedJob(job_id=job.job_id, attempt=attempt, at=time.time(), since=attempt))
        run.gave_up.unlink(missing_ok=True)
        return attempt

    def begin_without_workers(self, job: SlurmJob | None) -> int:
        """Write the start of an attempt that only records why no workers are started; return its number."""
        attempt = ownership.next_attempt(self.run)
        job_id, facts = (job.job_id, job.facts()) if job else (str(os.getpid()), None)
        record_start(self.run, attempt=attempt, job_id=job_id, job=facts)
        return attempt

    def note_unbegun(self, job: SlurmJob | None, cause: Cause, reason: str, exit_code: int) -> None:
        """Write the start and the end of an attempt that started no workers."""
        attempt = self.begin_without_workers(job)
        self.end(attempt, End(ending=TABLE[cause].ending, exit_code=exit_code, reason=reason, cause=cause))

    def note_queued(self, job: QueuedJob) -> None:
        """Record the job that continues the run."""
        write_queued_job(self.run, job)

    def end(self, attempt: int, end: End) -> None:
        """Write into the ledger how an attempt ended."""
        record_end(self.run, attempt, end)

    def note(self, attempt: int, **known: object) -> None:
        """Write into the ledger what has become known of an attempt: the nodes it failed on, another end of its job."""
        record_more(self.run, attempt=attempt, **known)

    def write_done(self, goal: Mapping[str, Any]) -> None:
        """Record that the run has reached its goal."""
        write_done(self.run, goal)

    def release(self, attempt: int) -> None:
        """Give up the claim of the run's last attempt."""
        ownership.release(self.run, attempt)
