"""Where a job of Slurm's stands, told from its run directory and, where that says too little, from what Slurm says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.cluster.slurm import states
from ddp_hpc.run.run_dir.ledger import Attempt, Ending, Next
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, QueuedJob, write_queued_job
from ddp_hpc.watch.queue import QueueStatus
from ddp_hpc.watch.status import _BY_SLURM, SLURM_SILENCE_S, Observation, State, _needs_slurm, read_status, status_of
from tests.made_run import add_progress, changed, made_attempt, make_run, progress

RUN = RunDir(Path("runs/digits"))
NOW = 10_000.0
DOWN = "Slurm does not answer"


def attempt(number: int = 0, ending: Ending | None = None, *, started_at: float = 800.0) -> Attempt:
    """Return an attempt of job 7 on another host."""
    ended_at = None if ending is None else started_at + 50
    return made_attempt(
        number, started_at=started_at, cluster="slurm", nodes=("node1",),
        ends_at=NOW + 600, ending=ending, ended_at=ended_at, reason="" if ending is None else "of old",
    )  # fmt: skip


def word(state: str | None = None, reason: str = "", *, at: float = NOW - 4, **more: object) -> QueueStatus:
    return replace(QueueStatus(job_id="7", state=state, reason=reason, at=at), **more)  # type: ignore[arg-type]  # any field


def seen(
    *attempts: Attempt,
    said: QueueStatus | None = None,
    newest: Progress | None = None,
    queued_for: int | None = 0,
    cancelled_at: float | None = None,
    wants_stop: bool = False,
    is_done: bool = False,
) -> Observation:
    """Return an observation made at NOW on a login node, where no process of the job can be seen."""
    queued = (
        None if queued_for is None else QueuedJob(job_id="7", attempt=queued_for, at=700.0, cancelled_at=cancelled_at)
    )
    return Observation(
        attempts=attempts,
        progress=newest,
        committed=[10, 20],
        is_held=False,
        wants_stop=wants_stop,
        is_done=is_done,
        is_rendered=True,
        host="login",
        now=NOW,
        queued=queued,
        queue_status=said,
    )


SILENT = progress(at=NOW - 60)
FRESH = progress(at=NOW - 5)
WAITING = word("PENDING", "Priority", starts_at=NOW + 300)
STATES: list[tuple[str, Observation, State, str]] = [
    # Not begun yet.
    ("waits", seen(said=WAITING), "waiting", "jobs with higher priority are ahead of the job in the queue; wait for its turn"),
    ("waits, just submitted", seen(said=word("PENDING")), "waiting", ""),
    ("waits, Slurm was not asked", seen(), "waiting", ""),
    ("waits, as far as is known", seen(said=word(at=0.0, problem=DOWN)), "waiting", ""),
    ("waits again after a failure", seen(attempt(0, Ending.FAILED), said=word("PENDING"), queued_for=1), "waiting", ""),
    ("waits again, Slurm is down", seen(attempt(0, Ending.FAILED), said=word(problem=DOWN), queued_for=1), "waiting", ""),
    ("boots its nodes", seen(said=word("CONFIGURING")), "waiting", ""),
    ("was cancelled while it waited", seen(cancelled_at=900.0), "cancelled", "cancelled by the user while it waited"),
    ("has its nodes, has written nothing yet", seen(said=word("RUNNING")), "starting", ""),
    ("is on its way out without a word", seen(said=word("COMPLETING")), "stopping", ""),
    (
        "ended without a word",
        seen(said=word("FAILED")),
        "failed",
        "job 7 failed and wrote nothing to the run directory: check that its nodes can write there, and submit again",
    ),
    ("completed without a word", seen(said=word("COMPLETED")), "failed", "wrote nothing"),
    ("cancelled by others without a word", seen(said=word("CANCELLED by 0")), "cancelled", "was cancelled and wrote"),
    ("lost its node before a word", seen(said=word("NODE_FAIL")), "interrupted", "lost a node and wrote nothing"),
    ("is unknown to Slurm", seen(said=word()), "unknown", "Slurm has no job 7 any more, and the job wrote nothing"),
    ("rendered, for plain sbatch", seen(queued_for=None), "prepared", "submit the script with `sbatch`"),
    # Begun, and writes.
    ("begun lately", seen(attempt(started_at=NOW - 5)), "starting", ""),
    ("steps", seen(attempt(), newest=FRESH), "running", ""),
    ("steps, told to stop", seen(attempt(), newest=FRESH, wants_stop=True), "stopping", ""),
    ("of plain sbatch, steps", seen(attempt(), newest=FRESH, queued_for=None), "running", ""),
    ("ended in the ledger", seen(attempt(0, Ending.STOPPED), newest=SILENT), "stopped", "of old"),
    # Begun, and silent.
    (
        "silent, though it runs",
        seen(attempt(), newest=SILENT, said=word("RUNNING")),
        "running",
        "the run has written nothing for 60 s, but Slurm says that its job runs; if this lasts, read its log (`ddp-hpc logs`)",
    ),
    ("silent before its first step", seen(attempt(), said=word("RUNNING")), "starting", ""),
    ("silent, told to stop", seen(attempt(), newest=SILENT, said=word("RUNNING"), wants_stop=True), "stopping", ""),
    ("suspended", seen(attempt(), newest=SILENT, said=word("SUSPENDED")), "running", "Slurm says that its job is suspended"),
    ("requeued while silent", seen(attempt(), newest=SILENT, said=word("PENDING", "BeginTime")), "waiting", "requeue"),
    ("held after its requeue", seen(attempt(), newest=SILENT, said=word("REQUEUE_HOLD", "JobHeldUser")), "waiting", "held"),
    ("lost its node", seen(attempt(), newest=SILENT, said=word("NODE_FAIL")), "interrupted", "job 7 lost a node"),
    ("preempted", seen(attempt(), newest=SILENT, said=word("PREEMPTED")), "interrupted", "7 was preempted. Submit the run again"),
    ("out of time", seen(attempt(), newest=SILENT, said=word("TIMEOUT")), "interrupted", "job 7 reached its time limit"),
    (
        "out of memory",
        seen(attempt(), newest=SILENT, said=word("OUT_OF_MEMORY")),
        "failed",
        "job 7 ran out of host memory, so it needs more or must use less; see its log (`ddp-hpc logs`). Submit the run again: it ",
    ),
    ("cancelled by scancel", seen(attempt(), newest=SILENT, said=word("CANCELLED by 0")), "cancelled", "job 7 was cancelled"),
    (
        "done, but its last word was lost with its node",
        seen(attempt(), newest=SILENT, said=word("NODE_FAIL"), is_done=True),
        "finished",
        "job 7 lost a node",
    ),
    ("in a state of tomorrow", seen(attempt(), newest=SILENT, said=word("QUANTUM")), "unknown", "node1"),
    ("silent for a while, Slurm is down", seen(attempt(), newest=SILENT, said=word(problem=DOWN)), "running", ""),
    (
        "silent for long, Slurm is down",
        seen(attempt(), newest=progress(at=NOW - 600), said=word(problem=DOWN)),
        "unknown",
        "it ran on node1",
    ),
    (
        "silent for long, unknown to Slurm",
        seen(attempt(), newest=progress(at=NOW - 600), said=word()),
        "unknown",
        "it ran on node1",
    ),
    (
        "silent, Slurm's last word is old",
        seen(attempt(), newest=SILENT, said=word("RUNNING", at=NOW - 40, problem=DOWN)),
        "running",
        "has written nothing for 60 s",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "failed_nodes", "is_told"),
    [
        ("(ReqNodeNotAvail, UnavailableNodes:node1)", ("node2",), True),
        ("ReqNodeNotAvail", (), False),
        ("Resources", ("node2",), False),
    ],
)
def test_a_run_that_leaves_out_nodes_while_others_are_gone_is_told_how_to_get_them_back(
    reason: str, failed_nodes: tuple[str, ...], *, is_told: bool
) -> None:
    before = changed(attempt(ending=Ending.FAILED), failed_nodes=failed_nodes, next=Next.REQUEUE)

    status = status_of(RUN, seen(before, said=word("PENDING", reason), queued_for=1))

    assert ("`ddp-hpc requeue 7 --now`" in status.reason) == is_told


@pytest.mark.parametrize(
    ("observation", "state", "reason"), [row[1:] for row in STATES], ids=[row[0] for row in STATES]
)
def test_a_job_is_in_the_state_that_its_directory_and_slurm_show(
    observation: Observation, state: State, reason: str
) -> None:
    status = status_of(RUN, observation)

    assert status.state == state
    assert reason in status.reason
    assert bool(reason) == bool(status.reason)


@pytest.mark.parametrize("state", states._STATES)
@pytest.mark.parametrize("attempts", [[], [attempt()]], ids=["not begun", "begun"])
def test_every_state_of_slurms_is_told(state: str, attempts: Sequence[Attempt]) -> None:
    status = status_of(RUN, seen(*attempts, newest=SILENT if attempts else None, said=word(state)))

    assert status.state in {*_BY_SLURM.values(), "running", "starting"}
    assert status.slurm_state == state
    assert not (status.is_alive and states.has_ended(state))


def test_while_a_job_waits_its_number_and_its_estimate_are_told() -> None:
    status = status_of(RUN, seen(attempt(0, Ending.STOPPED), said=WAITING, queued_for=1, newest=SILENT))

    assert (status.job_id, status.starts_at, status.slurm_state) == ("7", NOW + 300, "PENDING")
    assert (status.eta_s, status.limit_s) == (None, None)
    assert (status.step, status.last_checkpoint) == (20, 20)
    assert status.is_alive


def test_a_job_that_runs_has_an_end_by_its_limit_and_no_start() -> None:
    status = status_of(RUN, seen(attempt(), newest=FRESH))

    assert (status.limit_s, status.starts_at, status.slurm_state, status.attempt) == (600.0, None, None, 0)


SOURCES = [
    (None, "run directory", 60.0),
    (word("RUNNING"), "squeue", 4.0),
    (word("FAILED", source="scontrol or sacct"), "scontrol or sacct", 4.0),
    (word("RUNNING", at=NOW - 100, problem=DOWN), f"squeue; since then: {DOWN}", 100.0),
    (word(at=0.0, problem=DOWN), f"run directory; {DOWN}", 60.0),
]


@pytest.mark.parametrize(("said", "source", "age_s"), SOURCES, ids=[row[1] for row in SOURCES])
def test_who_told_and_when_is_told(said: QueueStatus | None, source: str, age_s: float) -> None:
    status = status_of(RUN, seen(attempt(), newest=SILENT, said=said))

    assert (status.source, status.age_s) == (source, age_s)


LATELY = NOW - SLURM_SILENCE_S + 1
ASKED = [
    ("waits", seen(), True),
    ("waits again", seen(attempt(0, Ending.STOPPED), queued_for=1), True),
    ("cancelled while it waited", seen(cancelled_at=900.0), False),
    ("writes", seen(attempt(), newest=progress(at=LATELY)), False),
    ("just begun", seen(attempt(started_at=LATELY)), False),
    ("silent", seen(attempt(), newest=SILENT), True),
    ("silent since it began", seen(attempt()), True),
    ("silent, but held by a process here", replace(seen(attempt(), newest=SILENT), is_held=True), False),
    ("silent, for it ended", seen(attempt(0, Ending.FAILED), newest=SILENT), False),
    ("silent, of this machine", seen(replace(attempt(), cluster="local"), newest=SILENT), False),
]


@pytest.mark.parametrize(("observation", "is_asked"), [row[1:] for row in ASKED], ids=[row[0] for row in ASKED])
def test_slurm_is_asked_only_of_who_waits_or_is_silent(observation: Observation, is_asked: bool) -> None:
    assert _needs_slurm(observation) == is_asked


class Asked:
    """Somebody to ask, who counts."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.questions = list[tuple[str, float]]()

    def __call__(self, job_id: str, submitted_at: float) -> QueueStatus:
        self.questions.append((job_id, submitted_at))
        return word(self.state)


def begin(run: RunDir, *, at: float) -> None:
    """Write the ledger's line of an attempt of job 7 on another host."""
    append_json_line(
        run.attempts,
        {"attempt": 0, "job_id": "7", "host": "node1", "pid": 1, "started_at": at, "cluster": "slurm"},
    )


def test_a_run_that_writes_costs_slurm_nothing(tmp_path: Path) -> None:
    run, ask = make_run(tmp_path), Asked("RUNNING")
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=700.0))
    begin(run, at=800.0)
    add_progress(run, at=NOW - 1)

    status = read_status(run, now=NOW, ask=ask)

    assert (status.state, status.source) == ("running", "run directory")
    assert ask.questions == []


def test_a_run_that_is_silent_is_asked_about_once_with_its_job_and_when_it_was_submitted(tmp_path: Path) -> None:
    run, ask = make_run(tmp_path), Asked("NODE_FAIL")
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=700.0))
    begin(run, at=800.0)
    add_progress(run, at=NOW - 60)

    status = read_status(run, now=NOW, ask=ask)

    assert (status.state, status.source) == ("interrupted", "squeue")
    assert ask.questions == [("7", 700.0)]


def test_without_anybody_to_ask_the_directory_has_the_word(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=700.0))

    assert read_status(run, now=NOW).state == "waiting"


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "job requeued in held state", "PartitionTimeLimit"])
def test_a_job_that_is_held_or_will_not_start_has_no_time_of_its_start(reason: str) -> None:
    status = status_of(RunDir(Path("/runs/digits")), seen(said=word("PENDING", reason, starts_at=NOW + 3)))

    assert (status.state, status.starts_at) == ("waiting", None)
