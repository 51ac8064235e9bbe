"""What a supervisor does when the workers are gone, and what it finds when it begins. Slurm is made of shell scripts here."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc import exit_codes, ownership
from ddp_hpc.containers import BARE
from ddp_hpc.job import aftermath, last_resort, node_probe, predecessors
from ddp_hpc.job.aftermath import conclude, leave
from ddp_hpc.job.assignment import Assignment, Outcome
from ddp_hpc.ledger import Ledger
from ddp_hpc.records import (
    Attempt,
    JobFacts,
    QueuedJob,
    ask_to_stop,
    read_attempts,
    read_queued_job,
    record_start,
    write_queued_job,
)
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.allocation import Allocation
from ddp_hpc.spec import ResourcesSpec, RestartSpec, RunSpec, SlurmSpec
from tests.made_run import add_checkpoint, add_failure, make_run
from tests.unit.fake_slurm import FakeSlurm

NODES = ("node1", "node2")
CRASHED, STOPPED = Outcome(code=exit_codes.FAILED), Outcome(code=exit_codes.STOPPED)
SLURM_IS_AWAY = "echo 'slurm_update error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path)
    slurm.knows_job()
    slurm.knows_nodes(node1="mixed", node2="mixed", node3="idle", node4="idle")
    return slurm


@dataclass
class Supervised:
    """A run of two nodes that job 7 works on."""

    assignment: Assignment
    slurm: FakeSlurm

    @property
    def run(self) -> RunDir:
        return self.assignment.run

    @property
    def last(self) -> Attempt:
        return read_attempts(self.run)[-1]

    def begin(self, *, restart: int = 0) -> int:
        """Begin one more attempt, as the supervisor does; return its number."""
        attempt = ownership.next_attempt(self.run)
        ownership.claim(self.run, attempt)
        record_start(self.run, attempt=attempt, job_id="7", job=JobFacts(nodes=NODES, restart=restart))
        if read_queued_job(self.run) is None:
            write_queued_job(self.run, QueuedJob(job_id="7", attempt=attempt, at=0.0, since=attempt))
        return attempt

    def ends(self, outcome: Outcome) -> aftermath.Conclusion:
        """Begin an attempt that ends so, and do what follows."""
        conclusion = conclude(self.assignment, self.begin(), outcome)
        leave(self.assignment, conclusion)
        return conclusion

    def killed_on(self, rank: int) -> None:
        """Begin an attempt that ends because a rank is killed."""
        attempt = self.begin()
        add_failure(self.run, attempt, rank=rank, exception="killed by SIGKILL", signal=9)
        leave(self.assignment, conclude(self.assignment, attempt, CRASHED))


@pytest.fixture
def supervised(slurm: FakeSlurm, tmp_path: Path) -> Callable[..., Supervised]:
    def make(*, restart: RestartSpec | None = None, slurm_spec: SlurmSpec | None = None, **more: Any) -> Supervised:
        spec = RunSpec(
            name="digits",
            resources=ResourcesSpec(nodes=2, workers_per_node=1),
            restart=restart or RestartSpec(),
            slurm=slurm_spec or SlurmSpec(),
        )
        known = {"job_id": "7", "node_names": NODES, "tasks_per_node": (1, 1), "partition": "gpu", **more}
        return Supervised(
            Assignment(
                run=make_run(tmp_path),
                spec=spec,
                allocation=Allocation(**known),
                is_for_slurm=True,
                environ=slurm.environ,
            ),
            slurm,
        )

    return make


Make = Callable[..., Supervised]


# --- what the ledger says --------------------------------------------------------------------------------------------


def test_a_finished_run_is_done_and_nobody_owns_it_any_more(supervised: Make) -> None:
    one = supervised()

    concluded = one.ends(Outcome(code=exit_codes.FINISHED))

    assert (one.last.ending, one.last.cause, one.last.next) == ("finished", "finished", "")
    assert one.run.done.exists()
    assert ownership.claims(one.run) == []
    assert concluded.exit_code == 0
    assert one.slurm.orders() == []


def test_a_worker_that_was_killed_is_its_nodes_failure(supervised: Make) -> None:
    one = supervised()

    one.killed_on(rank=1)

    assert (one.last.cause, one.last.next, one.last.failed_nodes) == ("worker crashed", "in place", ("node2",))
    assert one.last.reason == "rank 1 on node1: killed by SIGKILL"
    assert ownership.claims(one.run) == [0]  # until the next attempt takes it over


def test_an_exception_is_no_nodes_failure(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_failure(one.run, attempt, rank=1)

    conclude(one.assignment, attempt, CRASHED)

    assert (one.last.next, one.last.failed_nodes) == ("in place", ())
    assert "ValueError: rank 1 is out of luck" in one.last.reason


@pytest.mark.parametrize(
    ("known", "is_nodes"),
    [
        ({"exception": "killed by SIGKILL", "signal": 9}, True),
        ({"exception": "RuntimeError: CUDA error: uncorrectable ECC error", "is_hardware": True}, True),
        ({"exception": "ValueError: killed by SIGKILL, said a user's own message"}, False),
        ({"exception": "killed by SIGKILL"}, False),
        ({"exception": "ValueError: no CUDA error, NCCL error or ECC error was expected"}, False),
    ],
)
def test_a_node_is_blamed_by_the_fields_of_a_report_and_not_by_its_words(
    supervised: Make, known: dict[str, Any], *, is_nodes: bool
) -> None:
    one = supervised()
    attempt = one.begin()
    add_failure(one.run, attempt, rank=1, **known)

    conclude(one.assignment, attempt, CRASHED)

    assert one.last.failed_nodes == (("node2",) if is_nodes else ())
    assert str(known["exception"]) in one.last.reason


def test_an_attempt_that_lost_the_run_leaves_the_word_to_the_newer_one(supervised: Make) -> None:
    one = supervised()
    older, newer = one.begin(), one.begin()

    concluded = conclude(one.assignment, older, CRASHED)

    first, second = read_attempts(one.run)
    assert (first.ending, first.cause) == ("fenced", None)
    assert second.ending is None
    assert ownership.claims(one.run) == [newer]
    assert concluded.exit_code == exit_codes.FENCED


def test_a_run_that_is_stopped_by_its_user_does_not_go_back(
    supervised: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised()
    ask_to_stop(one.run)

    one.ends(STOPPED)

    assert (one.last.ending, one.last.cause, one.last.next) == ("stopped", "stop asked", "")
    assert one.slurm.orders() == []


# --- the way back ----------------------------------------------------------------------------------------------------


def test_a_job_goes_back_under_its_number_and_the_next_attempt_is_announced(supervised: Make) -> None:
    one = supervised(array_job_id="5", array_task_id=2)

    one.ends(STOPPED)

    assert one.slurm.orders() == ["scontrol requeue 5_2"]
    noted = read_queued_job(one.run)
    assert noted is not None
    assert (noted.job_id, noted.attempt, noted.since) == ("7", 1, 0)


def test_a_successor_is_a_new_job_behind_this_one(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(by="successor", exclude_after=1), slurm_spec=SlurmSpec(exclude="node9"))
    one.slurm.has("sbatch", "echo '8;cluster'")

    one.killed_on(rank=1)

    said = f"sbatch --parsable --dependency=afterany:7 --exclude=node9,node2 {one.run.job_script}"
    assert one.slurm.orders() == [said]
    noted = read_queued_job(one.run)
    assert noted is not None
    assert noted.job_id == "8"


def test_what_slurm_has_put_back_is_not_put_back_again(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows_job(state="PENDING", restarts=1)
    one.slurm.accounts("NODE_FAIL")

    one.ends(CRASHED)

    assert (one.last.cause, one.last.next) == ("node failed", "slurm")
    assert one.slurm.orders("scontrol requeue") == []


@pytest.mark.parametrize(
    ("state", "reason", "goes"),
    [("COMPLETING", "None", False), ("COMPLETING", "TimeLimit", True), ("COMPLETING", "NodeDown", True)],
)
def test_a_job_that_is_cancelled_meanwhile_is_not_called_back(
    supervised: Make, state: str, reason: str, goes: bool
) -> None:
    one = supervised()
    concluded = conclude(one.assignment, one.begin(), STOPPED)
    one.slurm.knows_job(state=state, reason=reason)

    leave(one.assignment, concluded)

    assert one.slurm.orders("scontrol requeue") == (["scontrol requeue 7"] if goes else [])
    assert one.last.ending == ("stopped" if goes else "cancelled")
    assert one.last.next == ("requeue" if goes else "")


def test_a_job_that_slurm_puts_back_meanwhile_is_not_put_back_again(supervised: Make) -> None:
    """A second requeue would be refused while it waits, and end it where it has begun elsewhere already."""
    one = supervised()
    concluded = conclude(one.assignment, one.begin(), STOPPED)
    one.slurm.knows_job(state="RUNNING", restarts=1)

    leave(one.assignment, concluded)

    assert one.slurm.orders("scontrol requeue") == []
    assert (one.last.ending, one.last.next) == ("stopped", "requeue")
    noted = read_queued_job(one.run)
    assert noted is not None
    assert noted.attempt == 1


def test_a_requeue_whose_answer_was_lost_has_happened(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows_job(orders="echo 'Job is pending execution' >&2; exit 1", restarts_then=1)

    one.ends(STOPPED)

    assert one.last.next == "requeue"
    assert one.last.last_step == 0


def test_a_job_that_ddp_hpc_has_cancelled_does_not_go_back_also_while_it_is_preempted(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows_job(preempted="2026-11-22T08:00:00")
    concluded = conclude(one.assignment, one.begin(), STOPPED)
    noted = read_queued_job(one.run)
    assert noted is not None
    write_queued_job(one.run, replace(noted, cancelled_at=1.0))

    leave(one.assignment, concluded)

    assert (concluded.cause, one.last.ending, one.last.next) == ("preempted", "cancelled", "")
    assert one.slurm.orders() == []


@pytest.mark.parametrize(("accounted_as", "is_back"), [("CANCELLED by 1001", False), ("PREEMPTED", True)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_that_is_cancelled_while_it_is_preempted_does_not_go_back(
    supervised: Make, when: str, accounted_as: str, *, is_back: bool
) -> None:
    one = supervised()
    cancelled = partial(one.slurm.knows_job, state="COMPLETING", preempted="2026-11-22T08:00:00")
    one.slurm.accounts(accounted_as)
    if when == "before":
        cancelled()
    concluded = conclude(one.assignment, one.begin(), STOPPED)
    cancelled()

    leave(one.assignment, concluded)

    assert one.last.cause == (concluded.cause if is_back else "cancelled")
    assert one.last.next == ("requeue" if is_back else "")
    assert bool(one.slurm.orders()) == is_back


def test_a_run_that_its_user_stops_while_it_leaves_does_not_go_back(supervised: Make) -> None:
    one = supervised()
    concluded = conclude(one.assignment, one.begin(), STOPPED)
    ask_to_stop(one.run)

    leave(one.assignment, concluded)

    assert (one.last.ending, one.last.cause, one.last.next) == ("stopped", "stop asked", "")
    assert one.slurm.orders() == []


def test_a_controller_that_is_away_for_a_moment_is_waited_for(supervised: Make, tmp_path: Path) -> None:
    one = supervised()
    once = tmp_path / "once"
    one.slurm.knows_job(orders=f"[ -e {once} ] || {{ touch {once}; {SLURM_IS_AWAY}; }}")

    one.ends(STOPPED)

    assert one.slurm.orders() == ["scontrol requeue 7"] * 2
    assert one.last.next == "requeue"


def test_a_job_that_cannot_go_back_says_so_in_the_ledger(
    supervised: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aftermath, "SLURM_PATIENCE_S", 0.0)
    one = supervised()
    one.slurm.knows_job(orders=SLURM_IS_AWAY)

    one.ends(STOPPED)

    assert one.last.next == ""
    assert "could not be put back into the queue" in one.last.reason
    assert "Unable to contact slurm controller" in capsys.readouterr().err


def test_a_refused_requeue_is_told_with_slurms_words(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows_job(orders="echo 'Requested operation is presently disabled for job 7' >&2; exit 1")

    one.ends(STOPPED)

    assert "presently disabled for job 7" in one.last.reason
    assert one.last.next == ""


def test_a_record_that_finds_no_room_does_not_keep_a_job_from_going_back(
    supervised: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    one = supervised()
    attempt = one.begin()
    monkeypatch.setattr(aftermath, "record_end", no_room)
    monkeypatch.setattr(aftermath, "write_queued_job", no_room)

    leave(one.assignment, conclude(one.assignment, attempt, STOPPED))

    assert one.slurm.orders() == ["scontrol requeue 7"]
    assert "a record was not written: [Errno 28] No space left on device" in capsys.readouterr().err


# --- input that has been good before ---------------------------------------------------------------------------------


def refuses(one: Supervised, *, rank: int = 1, host: str = "node2") -> None:
    """Begin an attempt that ends with a worker's word that the input cannot be."""
    attempt = one.begin()
    add_failure(one.run, attempt, rank=rank, host=host, exception="no GPU is visible", is_input_error=True)
    leave(one.assignment, conclude(one.assignment, attempt, Outcome(code=exit_codes.REFUSED)))


def test_input_that_cannot_be_ends_the_run(supervised: Make) -> None:
    one = supervised()

    refuses(one)

    assert (one.last.ending, one.last.cause, one.last.next) == ("refused", "refused", "")


@pytest.mark.parametrize(("rank", "host", "node"), [(1, "elsewhere", "node2"), (-1, "node1", "node1"), (-1, "x", None)])
def test_input_that_has_been_good_before_is_its_nodes_failure(
    rank: int, host: str, node: str | None, supervised: Make
) -> None:
    one = supervised()
    record_start(one.run, attempt=0, job_id="7", job=JobFacts(nodes=NODES))
    add_checkpoint(one.run, 4)  # by attempt 0
    leave(one.assignment, conclude(one.assignment, 0, STOPPED))

    refuses(one, rank=rank, host=host)

    assert (one.last.ending, one.last.cause, one.last.next) == ("failed", "worker crashed", "in place")
    assert one.last.failed_nodes == ((node,) if node else ())
    assert "no GPU is visible" in one.last.reason


# --- nodes that fail -------------------------------------------------------------------------------------------------


def excluded(one: Supervised) -> list[str]:
    return [order.partition("ExcNodeList=")[2] for order in one.slurm.orders("scontrol update")]


def test_a_node_that_fails_twice_is_left_out_as_soon_as_slurm_takes_it(supervised: Make, tmp_path: Path) -> None:
    one = supervised(slurm_spec=SlurmSpec(exclude="node9"))
    once = tmp_path / "once"
    refuses = f"echo 'Job is no longer pending execution' >&2; touch {once}; exit 1"
    one.slurm.knows_job(orders=f"[ $1 = requeue ] || [ -e {once} ] || {{ {refuses}; }}")

    one.killed_on(rank=1)
    assert excluded(one) == []
    one.killed_on(rank=1)

    assert one.last.next == "requeue"
    assert excluded(one) == ["node9,node2"] * 2  # it took the second


def test_a_list_that_leaves_too_few_nodes_is_made_shorter(supervised: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1))

    one.killed_on(rank=1)
    one.slurm.knows_nodes(node1="mixed", node2="idle", node3="drained", node4="draining")
    one.killed_on(rank=0)

    assert excluded(one) == ["node2", ""]
    assert "node1, node2 failed before, but only 0 others are in order" in capsys.readouterr().err


def test_nodes_that_the_user_named_are_kept(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1), slurm_spec=SlurmSpec(nodelist="node[1-2]"))

    one.killed_on(rank=1)

    assert excluded(one) == [""]
    assert predecessors.nodes_to_avoid(one.assignment, Ledger.read(one.run)) == ()


def test_a_job_that_was_given_a_bad_node_again_is_told_to_ask_for_another(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1))
    one.killed_on(rank=1)

    assert predecessors.nodes_to_avoid(one.assignment, Ledger.read(one.run)) == ("node2",)


def test_a_node_that_an_attempt_was_not_begun_on_has_not_failed_once_more(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(max_no_progress=9))
    for _ in range(2):
        one.killed_on(rank=1)

    one.ends(replace(CRASHED, reason="node2 failed before", avoided_nodes=("node2",)))

    assert (one.last.cause, one.last.next, one.last.failed_nodes) == ("node failed", "requeue", ())
    assert excluded(one) == ["node2", "node2"]


def test_only_nodes_of_the_jobs_partition_count(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1))
    one.slurm.has(
        "sinfo", 'case "$*" in *--partition=gpu*) echo node1 mixed; echo node2 mixed;; *) seq -f "cpu%g idle" 9;; esac'
    )

    one.killed_on(rank=1)

    assert excluded(one) == [""]


# --- what came before ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "cause", "failed"),
    [
        (["NODE_FAIL"], "node failed", ("node2",)),
        (["PREEMPTED"], "preempted", ()),
        (["TIMEOUT"], "time limit", ()),
        (["REQUEUED"], "requeue asked", ()),
        (["CANCELLED by 1001"], "cancelled", ()),
        (["RUNNING"], "unexplained", ()),
        ([], "unexplained", ()),
    ],
)
def test_an_attempt_that_died_without_a_word_gets_the_one_that_slurm_has(
    supervised: Make, ends: list[str], cause: str, failed: tuple[str, ...]
) -> None:
    one = supervised()
    one.begin()
    one.slurm.accounts(*ends)
    one.slurm.knows_nodes(node1="idle", node2="down")

    predecessors.bury(one.run, one.slurm.environ)

    assert (one.last.cause, one.last.ending, one.last.failed_nodes) == (cause, "failed", failed)
    assert one.last.reason.startswith("ended without a word")


def test_a_second_start_of_a_job_is_not_taken_for_its_first(supervised: Make) -> None:
    one = supervised()
    one.begin(restart=1)
    one.slurm.accounts("NODE_FAIL", "PREEMPTED")

    predecessors.bury(one.run, one.slurm.environ)

    assert one.last.cause == "preempted"


def test_an_attempt_that_had_its_word_keeps_it(supervised: Make) -> None:
    one = supervised()
    one.ends(STOPPED)
    before = one.last

    predecessors.bury(one.run, one.slurm.environ)

    assert one.last == before


@pytest.mark.parametrize(("state", "is_its"), [("RUNNING", True), ("COMPLETING", True), ("FAILED", False)])
def test_another_job_that_works_on_the_run_is_noticed(supervised: Make, state: str, is_its: bool) -> None:
    one = supervised()
    one.begin()
    one.slurm.knows_job(state=state)
    assert one.assignment.allocation is not None
    other = replace(one.assignment.allocation, job_id="8")

    assert predecessors.is_anothers(one.last, other, one.slurm.environ) is is_its
    assert not predecessors.is_anothers(one.last, one.assignment.allocation, one.slurm.environ)


def test_where_slurm_does_not_say_no_other_job_is_believed_to_work(supervised: Make) -> None:
    one = supervised()
    one.begin()
    one.slurm.has("scontrol", SLURM_IS_AWAY)
    assert one.assignment.allocation is not None

    assert not predecessors.is_anothers(one.last, replace(one.assignment.allocation, job_id="8"), one.slurm.environ)


# --- where the supervisor itself fails -------------------------------------------------------------------------------


def test_an_error_of_ours_amid_the_verdict_sends_the_job_back_all_the_same(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cause_of(evidence: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(aftermath, "cause_of", cause_of)
    one = supervised()

    conclusion = last_resort.conclude(one.assignment, one.begin(), CRASHED)
    last_resort.leave(one.assignment, conclusion)

    assert (one.last.cause, one.last.next) == ("unexplained", "requeue")
    assert one.last.reason == "the supervisor failed: KeyError: 'odd'"
    assert one.slurm.orders("scontrol requeue") == ["scontrol requeue 7"]


def test_errors_of_ours_without_progress_end_the_run(supervised: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aftermath, "cause_of", lambda evidence: evidence.nothing)
    one = supervised(restart=RestartSpec(max_no_progress=2))

    found = [last_resort.conclude(one.assignment, one.begin(), CRASHED) for _ in range(2)]

    assert [each.decision.next for each in found] == ["requeue", ""]
    assert "2 attempts in a row ended without a new checkpoint" in one.last.reason


def test_a_job_goes_back_into_the_queue_though_its_ledger_cannot_be_read_or_written(
    supervised: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised()
    attempt = one.begin()
    one.run.attempts.unlink()
    one.run.attempts.mkdir()

    conclusion = last_resort.conclude(one.assignment, attempt, STOPPED)
    last_resort.leave(one.assignment, conclusion)

    assert "scontrol requeue 7" in one.slurm.orders("scontrol requeue")
    assert f"the end of attempt {attempt} could not be written down" in capsys.readouterr().err


UNHEARD = Outcome(code=exit_codes.UNHEARD, step_code=128 + 15)
"""What is left where one task cannot start, and srun ends the others before they listen."""


@pytest.mark.parametrize(
    ("outcome", "mute"), [(CRASHED, ("worker crashed", "in place")), (UNHEARD, ("unexplained", "requeue"))]
)
@pytest.mark.parametrize(
    ("unable", "blamed"), [(["node2"], ("node2",)), (["node1", "node2"], ()), ([], ())], ids=["one", "all", "none"]
)
def test_nodes_that_cannot_start_a_worker_are_blamed_where_nobody_says_why_twice(
    supervised: Make, unable: list[str], blamed: tuple[str, ...], outcome: Outcome, mute: tuple[str, str]
) -> None:
    one = supervised()
    broken = " | ".join(f"*--nodelist={node}*" for node in unable or ["nowhere"])
    one.slurm.has("srun", f'case "$*" in {broken}) exit 1;; esac\nshift 9; exec "$@"')
    (one.run.path / "python").write_text("#!/bin/sh\necho a greeting of the site\necho ddp-hpc-can-start\n")
    (one.run.path / "python").chmod(0o755)
    housing = replace(BARE, python=str(one.run.path / "python"))

    def fails() -> aftermath.Conclusion:
        attempt = one.begin()
        return conclude(one.assignment, attempt, node_probe.blame(one.assignment, housing, attempt, outcome))

    fails()
    concluded = fails()

    first, second = read_attempts(one.run)
    assert (first.cause, first.next, first.failed_nodes) == (*mute, ())
    assert (second.cause, second.next) == ("node failed" if blamed else mute[0], "requeue")
    assert second.failed_nodes == concluded.decision.exclude == blamed
    assert ("node2 cannot start a worker's Python; 1 other nodes can" in second.reason) is bool(blamed)


def test_nodes_are_not_asked_where_the_job_was_told_to_leave(supervised: Make) -> None:
    one = supervised()
    one.slurm.has("srun", "exit 1")
    told = replace(UNHEARD, was_told=True)
    for attempt in (one.begin(), one.begin()):
        conclude(one.assignment, attempt, node_probe.blame(one.assignment, BARE, attempt, told))

    assert one.slurm.orders("srun") == []
    assert "told to leave before anybody could listen" in one.last.reason


def test_nodes_are_not_asked_where_the_jobs_time_would_be_over_before_they_answer(supervised: Make) -> None:
    one = supervised()
    one.slurm.has("srun", "exit 1")
    for _ in range(2):
        attempt = ownership.next_attempt(one.run)
        ownership.claim(one.run, attempt)
        facts = JobFacts(nodes=NODES, restart=0, ends_at=time.time() + 60)
        record_start(one.run, attempt=attempt, job_id="7", job=facts)
        conclude(one.assignment, attempt, node_probe.blame(one.assignment, BARE, attempt, CRASHED))

    assert one.slurm.orders("srun") == []


def test_a_job_that_was_suspended_begins_again_without_blame(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "stand_still")

    concluded = conclude(one.assignment, attempt, replace(CRASHED, was_suspended=True))

    assert (concluded.cause, one.last.next, one.last.failed_nodes) == ("suspended", "in place", ())
    assert "suspended for longer than `restart.hang_timeout_s`" in one.last.reason


@pytest.mark.parametrize("is_built", [True, False])
def test_a_recipe_that_is_never_built_is_named_and_blames_no_node(supervised: Make, *, is_built: bool) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "build_recipe", rank=1)  # rank 0 says nothing; a user's function may bear that name
    if not is_built:
        one.run.allowance(attempt).write_text("building")

    concluded = conclude(one.assignment, attempt, CRASHED)

    assert concluded.cause == "hang"
    assert one.last.reason.startswith(
        "no rank moved for 900 s" if is_built else "the recipe was not built within 1800 s"
    )
    assert bool(one.last.failed_nodes) is is_built


def add_stacks(run: RunDir, attempt: int, function: str, *, rank: int = 0) -> None:
    """Write what a rank's watchdog leaves in its log."""
    log = run.rank_log(attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    frame = f'  File "/x/y.py", line 7 in {function}\n'
    log.write_text(f"Timeout (0:15:00)!\nThread 0x00007f (most recent call first):\n{frame}")


def test_an_older_job_of_the_same_number_says_nothing(supervised: Make) -> None:
    one = supervised()
    one.begin()
    old = "7|TIMEOUT|0:0|2001-01-01T00:00:00|2001-01-01T00:00:00|2001-01-01T00:00:09|1|10|node1|None"
    new = "7|PREEMPTED|0:0|2099-01-01T00:00:00|2099-01-01T00:00:00|2099-01-01T00:00:09|1|10|node1|None"
    one.slurm.has("sacct", "\n".join(f"printf '%s\\n' '{row}' | tr '|' '\\037'" for row in (old, new)))

    predecessors.bury(one.run, one.slurm.environ)

    assert one.last.cause == "preempted"


def test_a_hang_that_cannot_be_written_down_is_a_hang_all_the_same(supervised: Make) -> None:
    one = supervised()
    (one.run.path / "errors").write_text("a file in the way")

    concluded = one.ends(Outcome(code=exit_codes.FAILED, is_wedged=True))

    assert (concluded.cause, one.last.cause) == ("hang", "hang")
    assert "no rank moved" in one.last.reason
