"""Having a requeued job begin although Slurm holds it back."""

from __future__ import annotations

import pytest

from ddp_hpc.records import QueuedJob
from ddp_hpc.slurm.queries import JobRecord
from ddp_hpc.submission.slurm_executor import hastening


@pytest.mark.parametrize(
    ("eligible_in_s", "change"),
    [
        (120.0, {"StartTime": "now+2"}),  # Slurm's own
        (None, {"StartTime": "now+2"}),
        (1.5, {}),  # ours: not yet
        (-0.5, {"StartTime": "now"}),
    ],
)
def test_a_requeued_job_is_told_to_begin_but_not_in_the_second_of_its_requeue(
    eligible_in_s: float | None, change: dict[str, str]
) -> None:
    eligible_at = None if eligible_in_s is None else 1000.0 + eligible_in_s
    job = JobRecord(job_id="7", state="PENDING", reason="BeginTime", eligible_at=eligible_at)

    assert hastening(QueuedJob(job_id="7", attempt=2, at=0.0, since=1), job, now=1000.0) == change


@pytest.mark.parametrize(
    ("attempt", "state", "reason"),
    [(1, "PENDING", "BeginTime"), (2, "PENDING", "Resources"), (2, "RUNNING", ""), (2, "COMPLETING", "BeginTime")],
)
def test_a_job_that_waits_for_anything_else_is_left_alone(attempt: int, state: str, reason: str) -> None:
    """Such as for the time that the user has set at submit."""
    queued = QueuedJob(job_id="7", attempt=attempt, at=0.0, since=1)

    assert hastening(queued, JobRecord(job_id="7", state=state, reason=reason), now=0.0) == {}
