"""What a supervisor reads and writes in a run's directory: the ledger, the claim, the queued job, stop requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.differences import Difference, read_differences
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, read_failures
from ddp_hpc.run.run_dir.ledger import End, JobFacts, Ledger, record_end, record_more, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import (
    QueuedJob,
    is_done,
    read_queued_job,
    read_remarks,
    read_stop_request,
    write_done,
    write_queued_job,
    write_rendezvous_token,
)


@dataclass(frozen=True)
class RunRecords:
    """The records of one run."""

    run: RunDir

    def ledger(self) -> Ledger:
        return Ledger.read(self.run)

    def queued(self) -> QueuedJob | None:
        """Return the newest job that was submitted for the run."""
        return read_queued_job(self.run)

    def stop_request(self) -> Literal["end", "requeue"] | None:
        """Return what is to follow a stop that the user has asked for."""
        return read_stop_request(self.run)

    def failures(self, attempt: int) -> Sequence[WorkerFailure]:
        """Return the error reports of an attempt, the first cause first."""
        return read_failures(self.run, attempt)

    def remarks(self, attempt: int, world_size: int) -> Sequence[str]:
        """Return what the workers have remarked on a run that has finished."""
        return read_remarks(self.run, attempt, world_size)

    def has_script_asked(self, attempt: int, world_size: int) -> bool:
        """Tell whether a script asked for another attempt without having been asked to stop."""
        return any(self.run.script_asked(attempt, rank).exists() for rank in range(world_size))

    def is_fenced(self, attempt: int) -> bool:
        """Tell whether a newer attempt has claimed the run."""
        return ownership.is_fenced(self.run, attempt)

    def claim(self, ledger: Ledger) -> int:
        """Claim the run for another attempt; return its number.

        Raises:
            FencedError: where another process has claimed it.
        """
        attempt = ownership.next_attempt(self.run, ledger)
        for name in ownership.claim(self.run, attempt):
            sys.stderr.write(
                f"note: removed {name}, an unfinished checkpoint that killed workers left; committed ones are not affected\n"
            )
        write_rendezvous_token(self.run.rendezvous_token(attempt))
        if self.stop_request() is None:
            self.run.stop_request.unlink(missing_ok=True)  # the supervisor wrote it for the attempt before
        return attempt

    def begin(self, attempt: int, *, job_id: str, job: JobFacts | None, first_step: int, image: str) -> None:
        """Write the start of an attempt into the ledger; record a job that plain sbatch has submitted."""
        noted = self.queued() if job is not None else None
        if job is not None and noted is not None and (noted.job_id, noted.attempt) == (job_id, attempt):
            job = replace(job, queued_at=noted.at)
        record_start(self.run, attempt=attempt, job_id=job_id, job=job, first_step=first_step, image=image)
        if job is None:
            return
        if noted is None or noted.job_id != job_id:
            self.note_queued(QueuedJob(job_id=job_id, attempt=attempt, at=time.time(), since=attempt))
        self.run.gave_up.unlink(missing_ok=True)

    def note_queued(self, job: QueuedJob) -> None:
        """Record the job that continues the run."""
        write_queued_job(self.run, job)

    def begin_without_workers(self, *, job_id: str, job: JobFacts | None) -> int:
        """Write the start of an attempt that only records why no workers are started; return its number."""
        attempt = ownership.next_attempt(self.run)
        record_start(self.run, attempt=attempt, job_id=job_id, job=job)
        return attempt

    def end(self, attempt: int, end: End) -> None:
        """Write into the ledger how an attempt ended."""
        record_end(self.run, attempt, end)

    def differences(self) -> Sequence[Difference]:
        """Return what the ranks of attempts had that differed, the oldest first."""
        return read_differences(self.run)

    def blame(self, attempt: int, nodes: Sequence[str]) -> None:
        """Write into the ledger on which nodes an earlier attempt failed."""
        record_more(self.run, attempt=attempt, failed_nodes=list(nodes))

    def note_end(self, attempt: int, ends_at: float) -> None:
        """Write into the ledger that the attempt's job ends at another time than was known."""
        record_more(self.run, attempt=attempt, ends_at=ends_at)

    def is_done(self, goal: Mapping[str, Any]) -> bool:
        """Tell whether the run has reached this goal; asking for another makes it unfinished again."""
        return is_done(self.run, goal)

    def write_done(self, goal: Mapping[str, Any]) -> None:
        """Record that the run has reached its goal."""
        write_done(self.run, goal)

    def forget_stop_request(self) -> None:
        self.run.stop_request.unlink(missing_ok=True)

    def release(self, attempt: int) -> None:
        """Give up the claim of the run's last attempt."""
        ownership.release(self.run, attempt)
