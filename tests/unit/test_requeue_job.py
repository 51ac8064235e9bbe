"""A job's way back into the queue, and the nodes that it should not get again. Slurm is made of shell scripts here."""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.job.ending import attempt_end, requeue_job, stale_attempts
from ddp_hpc.job.ending.attempt_end import conclude_attempt
from ddp_hpc.job.ending.requeue_job import carry_out_decision
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run.run_dir.ledger import Ledger, Next
from ddp_hpc.run.run_dir.records import ask_to_stop, read_queued_job, write_queued_job
from ddp_hpc.run.spec import RestartSpec, SlurmSpec
from tests.unit.made_job import CRASHED, SLURM_IS_AWAY, STOPPED, Make, Supervised


def test_a_job_goes_back_under_its_number_and_the_next_attempt_is_announced(supervised: Make) -> None:
    one = supervised(array_job_id="5", array_task_id=2)

    one.ends(STOPPED)

    assert one.slurm.orders() == ["scontrol requeue 5_2"]
    noted = read_queued_job(one.run)
    assert noted is not None
    assert (noted.job_id, noted.attempt, noted.since) == ("5_2", 1, 0)


def test_a_successor_is_a_new_job_behind_this_one(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(by="successor", exclude_after=1), slurm_spec=SlurmSpec(exclude="node9"))
    one.slurm.has("sbatch", "echo '8;cluster'")

    one.killed_on(rank=1)

    said = f"sbatch --parsable --dependency=afterany:7 --exclude=node9,node2 {one.run.job_script}"
    assert one.slurm.orders() == [said]
    noted = read_queued_job(one.run)
    assert noted is not None
    assert noted.job_id == "8"


def test_a_successor_whose_answer_was_lost_is_not_submitted_again(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(by="successor"))
    one.slurm.has("squeue", f"""printf '7\\037{one.run.job_script}\\036\\n8\\037{one.run.job_script}\\036\\n'""")

    one.ends(STOPPED)

    noted = read_queued_job(one.run)
    assert one.slurm.orders("sbatch") == []
    assert noted is not None
    assert noted.job_id == "8"


HIGH = "echo 'JobId=7 JobName=x UserId=u(1) Account=lab QOS=gold JobState=RUNNING TimeLimit=00:33:00 Partition=high NodeList=node1 Command=x'"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (SlurmSpec(), "--partition=high --account=lab --qos=gold --time=33 "),
        (SlurmSpec(partition="low", account="lab", qos="gold"), "--partition=high --time=33 "),
        (SlurmSpec(partition="low,high", account="lab,x", qos="gold"), "--time=33 "),
    ],
)
def test_a_successor_keeps_the_place_that_sbatch_was_told_on_its_command_line(
    asked: SlurmSpec, kept: str, supervised: Make
) -> None:
    one = supervised(restart=RestartSpec(by="successor"), slurm_spec=asked)
    one.slurm.has("sbatch", "echo '8;cluster'")
    one.slurm.has("scontrol", HIGH)

    one.ends(STOPPED)

    assert one.slurm.orders("sbatch") == [f"sbatch --parsable --dependency=afterany:7 {kept}{one.run.job_script}"]


def test_a_successor_goes_where_its_script_says_if_slurm_refuses_the_other_place(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(by="successor"))
    one.slurm.has(
        "sbatch",
        'case "$*" in *--time=*) echo "sbatch: error: Requested time limit is invalid" >&2; exit 1;; esac; echo 8',
    )
    one.slurm.has("scontrol", HIGH)

    one.ends(STOPPED)

    noted = read_queued_job(one.run)
    assert noted is not None
    assert noted.job_id == "8"


def test_what_slurm_has_put_back_is_not_put_back_again(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows(state="PENDING", restarts=1)
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
    concluded = conclude_attempt(one.context, one.begin(), STOPPED)
    one.slurm.knows(state=state, reason=reason)

    carry_out_decision(one.context, concluded)

    assert one.slurm.orders("scontrol requeue") == (["scontrol requeue 7"] if goes else [])
    assert one.last.ending == ("stopped" if goes else "cancelled")
    assert one.last.next == ("requeue" if goes else "")


def test_a_job_that_slurm_puts_back_meanwhile_is_not_put_back_again(supervised: Make) -> None:
    """A second requeue would be refused while it waits, and end it where it has begun elsewhere already."""
    one = supervised()
    concluded = conclude_attempt(one.context, one.begin(), STOPPED)
    one.slurm.knows(state="RUNNING", restarts=1)

    carry_out_decision(one.context, concluded)

    assert one.slurm.orders("scontrol requeue") == []
    assert (one.last.ending, one.last.next) == ("stopped", "requeue")
    noted = read_queued_job(one.run)
    assert noted is not None
    assert noted.attempt == 1


def test_a_requeue_whose_answer_was_lost_has_happened(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows(orders="echo 'Job is pending execution' >&2; exit 1", restarts_then=1)

    one.ends(STOPPED)

    assert one.last.next == "requeue"
    assert one.last.last_step == 0


def test_a_requeue_that_is_refused_while_slurm_answers_now_and_then_is_no_refusal_of_the_job(
    supervised: Make, tmp_path: Path
) -> None:
    """Slurm was first, but the question whether it was is not answered at once."""
    one = supervised()
    concluded = conclude_attempt(one.context, one.begin(), CRASHED)
    asked = tmp_path / "asked"
    concluded = replace(concluded, end=replace(concluded.end, next=Next.REQUEUE))
    shown = "JobId=7 JobName=x UserId=ada(1) JobState=PENDING Reason=None Restarts=$n PreemptTime=None Command=x"
    answers = f'n=$(cat {asked} | wc -l); if [ "$n" = 1 ]; then echo x >> {asked}; {SLURM_IS_AWAY}; fi; n=$((n > 1)); echo "{shown}"'
    refuses = f"echo x >> {asked}; echo 'Job is pending execution' >&2; exit 1"
    one.slurm.has(
        "scontrol", f'touch {asked}; if [ "$2" = show ]; then {answers}; elif [ "$1" = requeue ]; then {refuses}; fi'
    )

    carry_out_decision(one.context, concluded)

    assert len(one.slurm.orders("scontrol requeue")) == 1
    assert "could not go back" not in one.last.reason


def test_a_supervisor_stays_for_the_second_in_which_its_job_went_back(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts no job while it runs; what it starts again in the second in which it ended it, it calls failed."""
    monkeypatch.undo()
    one = supervised()
    began = time.monotonic()

    one.ends(STOPPED)

    assert time.monotonic() - began >= 1.0
    assert one.slurm.orders() == ["scontrol requeue 7"]


def test_a_requeue_that_fails_while_slurm_answers_no_question_either_is_tried_again(
    supervised: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised()
    asked = tmp_path / "asked"  # how often, from the first requeue on: the fourth time, Slurm is back
    counts = f'if [ "$1" = requeue ] || [ -e {asked} ]; then echo x >> {asked}; fi; [ $(cat {asked} | wc -l) -lt 4 ]'
    one.slurm.has("scontrol", f"if {counts}; then echo 'error: an authentication that nobody knows' >&2; exit 1; fi")

    one.ends(STOPPED)

    assert one.last.next == "requeue"
    assert len(one.slurm.orders("scontrol requeue")) == 2
    assert "the job waits until Slurm answers" in capsys.readouterr().err


def test_a_job_that_ddp_hpc_has_cancelled_does_not_go_back_also_while_it_is_preempted(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows(preempted="2026-11-22T08:00:00")
    concluded = conclude_attempt(one.context, one.begin(), STOPPED)
    noted = read_queued_job(one.run)
    assert noted is not None
    write_queued_job(one.run, replace(noted, cancelled_at=1.0))

    carry_out_decision(one.context, concluded)

    assert (concluded.end.cause, one.last.ending, one.last.next) == ("preempted", "cancelled", "")
    assert one.slurm.orders() == []


def test_a_cancel_that_comes_while_slurm_is_asked_once_more_is_not_undone(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy controller may take half a minute to answer, in which the user cancels."""
    one = supervised()
    one.begin()
    concluded = conclude_attempt(one.context, 0, STOPPED)
    now = SlurmJob.query_record

    def cancelled_meanwhile(self: SlurmJob) -> Any:
        job, noted = now(self), read_queued_job(one.run)
        assert noted is not None
        write_queued_job(one.run, replace(noted, cancelled_at=1.0))
        return job

    monkeypatch.setattr(SlurmJob, "query_record", cancelled_meanwhile)

    carry_out_decision(one.context, concluded)

    assert one.slurm.orders("scontrol requeue") == []
    noted = read_queued_job(one.run)
    assert noted is not None
    assert noted.cancelled_at == 1.0
    assert one.last.ending == "cancelled"


@pytest.mark.parametrize(("accounted_as", "is_back"), [("CANCELLED by 1001", False), ("PREEMPTED", True)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_that_is_cancelled_while_it_is_preempted_does_not_go_back(
    supervised: Make, when: str, accounted_as: str, *, is_back: bool
) -> None:
    one = supervised()
    cancelled = partial(one.slurm.knows, state="COMPLETING", preempted="2026-11-22T08:00:00")
    one.slurm.accounts(accounted_as)
    if when == "before":
        cancelled()
    concluded = conclude_attempt(one.context, one.begin(), STOPPED)
    cancelled()

    carry_out_decision(one.context, concluded)

    assert one.last.cause == (concluded.end.cause if is_back else "cancelled")
    assert one.last.next == ("requeue" if is_back else "")
    assert bool(one.slurm.orders()) == is_back


def test_a_run_that_its_user_stops_while_it_leaves_does_not_go_back(supervised: Make) -> None:
    one = supervised()
    concluded = conclude_attempt(one.context, one.begin(), STOPPED)
    ask_to_stop(one.run)

    carry_out_decision(one.context, concluded)

    assert (one.last.ending, one.last.cause, one.last.next) == ("stopped", "stop asked", "")
    assert one.slurm.orders() == []


def test_a_controller_that_is_away_for_a_moment_is_waited_for(supervised: Make, tmp_path: Path) -> None:
    one = supervised()
    once = tmp_path / "once"
    one.slurm.knows(orders=f"[ -e {once} ] || {{ touch {once}; {SLURM_IS_AWAY}; }}")

    one.ends(STOPPED)

    assert one.slurm.orders() == ["scontrol requeue 7"] * 2
    assert one.last.next == "requeue"


def test_a_job_that_cannot_go_back_says_so_in_the_ledger(
    supervised: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requeue_job, "SLURM_PATIENCE_S", 0.0)
    one = supervised()
    one.slurm.knows(orders=SLURM_IS_AWAY)

    one.ends(STOPPED)

    assert one.last.next == ""
    assert "could not go back into the queue" in one.last.reason
    assert "Unable to contact slurm controller" in capsys.readouterr().err


def test_a_refused_requeue_is_told_with_slurms_words(supervised: Make) -> None:
    one = supervised()
    one.slurm.knows(orders="echo 'Requested operation is presently disabled for job 7' >&2; exit 1")

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
    monkeypatch.setattr(attempt_end, "record_end", no_room)
    monkeypatch.setattr(requeue_job, "write_queued_job", no_room)

    carry_out_decision(one.context, conclude_attempt(one.context, attempt, STOPPED))

    assert one.slurm.orders() == ["scontrol requeue 7"]
    assert (
        "could not write one of its records and continues without it: [Errno 28] No space left on device"
        in capsys.readouterr().err
    )


def excluded(one: Supervised) -> list[str]:
    return [order.partition("ExcNodeList=")[2] for order in one.slurm.orders("scontrol update")]


def test_a_node_that_fails_twice_is_left_out_as_soon_as_slurm_takes_it(
    supervised: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised(slurm_spec=SlurmSpec(exclude="node9"))
    once = tmp_path / "once"
    refuses = f"echo 'Job is no longer pending execution' >&2; touch {once}; exit 1"
    one.slurm.knows(orders=f"[ $1 = requeue ] || [ -e {once} ] || {{ {refuses}; }}")

    one.killed_on(rank=1)
    assert excluded(one) == []
    one.killed_on(rank=1)

    assert one.last.next == "requeue"
    assert excluded(one) == ["node9,node2"] * 2  # it took the second
    said = "note: the run failed on node2, so the job now excludes node2, besides node9 of `slurm.exclude`"
    assert said in capsys.readouterr().err


def test_nodes_that_the_user_excludes_are_not_said_to_have_failed(
    supervised: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1), slurm_spec=SlurmSpec(exclude="node[3-4]"))
    one.slurm.knows_nodes(node1="mixed", node2="mixed")

    one.killed_on(rank=1)

    assert excluded(one) == ["node[3-4]"]
    assert "the run failed on" not in capsys.readouterr().err


def test_a_list_that_leaves_too_few_nodes_is_made_shorter(supervised: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1))

    one.killed_on(rank=1)
    one.slurm.knows_nodes(node1="mixed", node2="idle", node3="drained", node4="draining")
    one.killed_on(rank=0)

    assert excluded(one) == ["node2", ""]
    assert (
        "node1, node2 failed before, but the job may still use them: too few of the other nodes take jobs and have what the job asks for. To exclude them all the same, set `slurm.exclude`"
        in capsys.readouterr().err
    )


def test_nodes_that_the_user_named_are_kept(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1), slurm_spec=SlurmSpec(nodelist="node[1-2]"))

    one.killed_on(rank=1)

    assert excluded(one) == [""]
    assert stale_attempts.bad_nodes_of_job(one.context, one.job, Ledger.read(one.run)) == ()


def test_a_job_that_was_given_a_bad_node_again_is_told_to_ask_for_another(supervised: Make) -> None:
    one = supervised(restart=RestartSpec(exclude_after=1))
    one.killed_on(rank=1)

    assert stale_attempts.bad_nodes_of_job(one.context, one.job, Ledger.read(one.run)) == ("node2",)


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
        "sinfo",
        r"""case "$*" in
          *--partition=gpu*) printf 'node1\037mixed\037none\036\nnode2\037mixed\037none\036\n' ;;
          *) seq 9 | while read -r number; do printf 'cpu%s\037idle\037none\036\n' "$number"; done ;;
        esac""",
    )

    one.killed_on(rank=1)

    assert excluded(one) == [""]
