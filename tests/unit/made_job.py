"""A run that a job of two nodes works on, for the tests of what follows an attempt. Slurm is made of shell scripts here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddp_hpc.base import exit_codes
from ddp_hpc.job.ending.attempt_end import Conclusion, conclude_attempt
from ddp_hpc.job.ending.requeue_job import carry_out_decision
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger, Next, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from tests.made_run import add_failure
from tests.unit.fake_slurm import FakeSlurm

NODES = ("node1", "node2")
CRASHED, STOPPED = Outcome(code=exit_codes.FAILED), Outcome(code=exit_codes.STOPPED)
SLURM_IS_AWAY = "echo 'slurm_update error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


@dataclass
class Supervised:
    """A run of two nodes that job 7 works on."""

    context: JobContext
    slurm: FakeSlurm

    @property
    def run(self) -> RunDir:
        return self.context.run

    @property
    def job(self) -> SlurmJob:
        job = self.context.job
        assert job is not None
        return job

    @property
    def last(self) -> Attempt:
        newest = Ledger.read(self.run).newest
        assert newest is not None
        return newest

    def begin(self, *, restart: int = 0) -> int:
        """Begin one more attempt, as the supervisor does; return its number."""
        attempt = ownership.next_attempt(self.run)
        ownership.claim_run(self.run, attempt)
        record_start(self.run, attempt=attempt, job_id="7", cluster="slurm", nodes=NODES, restart=restart)
        if read_queued_job(self.run) is None:
            write_queued_job(self.run, QueuedJob(job_id="7", attempt=attempt, at=0.0, since=attempt))
        return attempt

    def ends(self, outcome: Outcome) -> Conclusion:
        """Begin an attempt that ends so, and do what follows."""
        return self.conclude(self.begin(), outcome)

    def killed_on(self, rank: int) -> None:
        """Begin an attempt that ends because a rank is killed."""
        attempt = self.begin()
        add_failure(self.run, attempt, rank=rank, exception="killed by SIGKILL", signal=9)
        self.conclude(attempt, CRASHED)

    def conclude(self, attempt: int, outcome: Outcome) -> Conclusion:
        """End an attempt so, and do what follows, where the job ends with it."""
        conclusion = conclude_attempt(self.context, attempt, outcome)
        if conclusion.end.next != Next.IN_PLACE:
            carry_out_decision(self.context, conclusion)
        return conclusion


Make = Callable[..., Supervised]
