"""What a supervisor writes when the workers are gone: why the attempt ended, and what follows. Slurm is made of shell scripts here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base import durable, exit_codes
from ddp_hpc.job.ending.attempt_end import conclude_attempt
from ddp_hpc.job.ending.requeue_job import carry_out_decision
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.differences import Difference, judge_by_vote, write_difference
from ddp_hpc.run.run_dir.ledger import Ledger, record_start
from ddp_hpc.run.run_dir.records import ask_to_stop, write_remark
from tests.made_run import add_checkpoint, add_failure
from tests.unit.made_job import CRASHED, NODES, STOPPED, Make, Supervised


def test_a_finished_run_is_done_and_nobody_owns_it_any_more(supervised: Make) -> None:
    one = supervised()

    concluded = one.ends(Outcome(code=exit_codes.FINISHED))

    assert (one.last.ending, one.last.cause, one.last.next) == ("finished", "finished", "")
    assert one.run.done.exists()
    assert ownership.claiming_attempts(one.run) == []
    assert concluded.end.exit_code == 0
    assert one.slurm.orders() == []


def test_a_worker_that_was_killed_is_its_nodes_failure(supervised: Make) -> None:
    one = supervised()

    one.killed_on(rank=1)

    assert (one.last.cause, one.last.next, one.last.failed_nodes) == ("worker crashed", "in place", ("node2",))
    assert one.last.reason == "rank 1 on node1: killed by SIGKILL"
    assert ownership.claiming_attempts(one.run) == [0]  # until the next attempt takes it over


def test_an_exception_is_no_nodes_failure(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_failure(one.run, attempt, rank=1)

    conclude_attempt(one.context, attempt, CRASHED)

    assert (one.last.next, one.last.failed_nodes) == ("in place", ())
    assert "ValueError: rank 1 is out of luck" in one.last.reason


@pytest.mark.parametrize(
    ("known", "is_nodes"),
    [
        ({"exception": "killed by SIGKILL", "signal": 9}, True),
        ({"exception": "lost its connection", "signal": 6, "is_secondary": True}, False),
        ({"exception": "killed by SIGABRT", "signal": 6, "is_code_error": True}, False),
        ({"exception": "RuntimeError: CUDA error: uncorrectable ECC error", "is_hardware": True}, True),
        ({"exception": "killed by SIGKILL", "signal": 9, "memory_ran_out": "of the job,"}, False),
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

    conclude_attempt(one.context, attempt, CRASHED)

    assert one.last.failed_nodes == (("node2",) if is_nodes else ())
    assert str(known["exception"]) in one.last.reason


@pytest.mark.parametrize(
    ("is_secondary", "cause", "nodes"), [(False, "worker crashed", ()), (True, "node failed", ("node2",))]
)
def test_a_node_that_is_silent_while_a_rank_elsewhere_fails_of_itself_has_not_failed(
    supervised: Make, *, is_secondary: bool, cause: str, nodes: tuple[str, ...]
) -> None:
    """It may import PyTorch from a slow file system, and reads no order meanwhile."""
    one = supervised()
    attempt = one.begin()
    add_failure(one.run, attempt, rank=0, exception="FileNotFoundError: train.tar", is_secondary=is_secondary)

    conclude_attempt(one.context, attempt, replace(CRASHED, lost_nodes=("node2",)))

    assert (one.last.cause, one.last.failed_nodes) == (cause, nodes)


def test_an_attempt_that_lost_the_run_leaves_the_word_to_the_newer_one(supervised: Make) -> None:
    one = supervised()
    older, newer = one.begin(), one.begin()

    concluded = conclude_attempt(one.context, older, CRASHED)

    first, second = Ledger.read(one.run).attempts
    assert (first.ending, first.cause) == ("fenced", None)
    assert second.ending is None
    assert ownership.claiming_attempts(one.run) == [newer]
    assert concluded.end.exit_code == exit_codes.FENCED


def test_a_run_that_is_stopped_by_its_user_does_not_go_back(
    supervised: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised()
    ask_to_stop(one.run)

    one.ends(STOPPED)

    assert (one.last.ending, one.last.cause, one.last.next) == ("stopped", "stop asked", "")
    assert one.slurm.orders() == []


def test_a_run_whose_last_save_fails_when_its_user_stops_it_has_failed_and_ends(supervised: Make) -> None:
    one = supervised()
    ask_to_stop(one.run)
    attempt = one.begin()
    add_failure(one.run, attempt, exception="CheckpointError: no space left", exception_type="CheckpointError")

    one.conclude(attempt, CRASHED)

    assert (one.last.ending, one.last.cause, one.last.next) == ("failed", "stop asked", "")
    assert "CheckpointError: no space left" in one.last.reason


def refuses(one: Supervised, *, rank: int = 1, host: str = "node2") -> None:
    """Begin an attempt that ends with a worker's word that the input cannot be."""
    attempt = one.begin()
    add_failure(one.run, attempt, rank=rank, host=host, exception="no GPU is visible", is_input_error=True)
    one.conclude(attempt, Outcome(code=exit_codes.REFUSED))


def test_a_script_obeys_a_stop_though_its_ranks_lose_each_other_as_they_end(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    ask_to_stop(one.run)
    add_failure(one.run, attempt, rank=1, exception="Connection closed by peer", is_secondary=True, of_script=True)

    conclude_attempt(one.context, attempt, CRASHED)

    assert (one.last.ending, one.last.cause, one.last.next) == ("stopped", "stop asked", "")
    assert one.last.reason.startswith("stopped as asked; another rank stopped before rank 1 on node1")


def test_a_rank_that_finished_alone_is_named_where_the_others_lost_their_connections(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_failure(one.run, attempt, rank=1, exception="Connection closed by peer", is_secondary=True, of_script=True)
    one.run.remark(attempt, 0).parent.mkdir(parents=True, exist_ok=True)
    write_remark(
        one.run, attempt, 0, "the script exited with code 0 after 2 s; its last line: Experiment already exists"
    )

    conclude_attempt(one.context, attempt, CRASHED)

    assert one.last.reason.startswith("rank 1 on node1 lost its connection to another rank")
    assert "the script exited with code 0 after 2 s; its last line: Experiment already exists" in one.last.reason


def test_input_that_cannot_be_ends_the_run(supervised: Make) -> None:
    one = supervised()

    refuses(one)

    assert (one.last.ending, one.last.cause, one.last.next) == ("refused", "refused", "")


@pytest.mark.parametrize(("rank", "host", "node"), [(1, "elsewhere", "node2"), (-1, "node1", "node1"), (-1, "x", None)])
def test_input_that_has_been_good_before_is_its_nodes_failure(
    rank: int, host: str, node: str | None, supervised: Make
) -> None:
    one = supervised()
    record_start(one.run, attempt=0, job_id="7", cluster="slurm", nodes=NODES)
    add_checkpoint(one.run, 4)  # by attempt 0
    carry_out_decision(one.context, conclude_attempt(one.context, 0, STOPPED))

    refuses(one, rank=rank, host=host)

    assert (one.last.ending, one.last.cause, one.last.next) == ("failed", "worker crashed", "in place")
    assert one.last.failed_nodes == ((node,) if node else ())
    assert "no GPU is visible" in one.last.reason


def test_an_end_is_decided_on_one_reading_of_each_record(supervised: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supervised()
    one.killed_on(rank=1)
    attempt = one.begin()
    add_failure(one.run, attempt, rank=1, exception="killed by SIGKILL", signal=9)
    one.slurm.knows(state="PENDING", restarts=1)
    one.slurm.accounts("NODE_FAIL")
    reads: list[str] = []
    read_lines, read_file = durable.read_json_lines, durable.record_bytes

    def lines(path: Path, **more: Any) -> Any:
        reads.append(path.name)
        return read_lines(path, **more)

    def file(path: Path) -> Any:
        reads.extend([path.name] if path.exists() else [])
        return read_file(path)

    monkeypatch.setattr("ddp_hpc.run.run_dir.ledger.read_json_lines", lines)
    monkeypatch.setattr("ddp_hpc.base.record.record_bytes", file)

    conclude_attempt(one.context, attempt, replace(CRASHED, avoided_nodes=("node2",)))

    assert sorted(name for name in reads if name != one.run.stop_request.name) == [
        "attempts.jsonl",
        "rank-1.json",
        "submission.json",
    ]


def differs(one: Supervised, attempt: int, digests: str, **more: Any) -> None:
    write_difference(
        one.run,
        judge_by_vote(
            Difference(
                attempt=attempt,
                step=50,
                digests=tuple(digests),
                hosts=NODES[: len(digests)],
                processors=("x",) * len(digests),
                tensors=("model/w",),
                num_tensors=1,
                at=1.0,
                **more,
            )
        ),
    )


DIFFER = Outcome(code=exit_codes.RANKS_DIFFER)


def test_ranks_that_differ_start_again_in_place_until_it_is_known_which_was_wrong(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    differs(one, attempt, "ab")
    add_failure(one.run, attempt, exception="the ranks differ after step 50: ...", ranks_differ=True)

    conclude_attempt(one.context, attempt, DIFFER)

    assert (one.last.cause, one.last.next, one.last.failed_nodes) == ("ranks differ", "in place", ())
    assert one.last.reason == "the ranks differ after step 50: ..."


def test_a_node_that_the_next_attempt_proves_wrong_is_left_out_from_then_on(supervised: Make) -> None:
    one = supervised()
    first = one.begin()
    differs(one, first, "ab")
    conclude_attempt(one.context, first, DIFFER)
    differs(one, first, "ab", odd_ranks=(1,), told_by="repetition", told_in=1)

    one.killed_on(rank=0)

    ledger = Ledger.read(one.run)
    assert [attempt.failed_nodes for attempt in ledger.attempts] == [("node2",), ("node1",)]
    assert one.last.next == "requeue"  # to get another node than node2


def test_ranks_that_differ_again_in_the_same_way_end_the_run_and_blame_no_node(supervised: Make) -> None:
    one = supervised()
    for number in range(2):
        differs(one, number, "ab")
        conclude_attempt(one.context, one.begin(), DIFFER)

    assert (one.last.next, one.last.failed_nodes) == ("", ())
    assert one.last.why_last.startswith("in attempt 0, each rank had the same values after the same step")
