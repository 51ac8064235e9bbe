"""What is written of workers that hung, and which node it counts against."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.job.ending import network_probe
from ddp_hpc.job.ending.attempt_end import conclude_attempt
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.run.run_dir.failure_reports import read_failures
from ddp_hpc.run.run_dir.hang_records import DUMPING_STATE, RankInHang, write_hang_record
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.network import NetworkFindings, PairFault, read_network
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import ask_to_stop
from ddp_hpc.run.world import World
from tests.distributed import stands_for_srun
from tests.made_run import add_failure
from tests.unit.made_job import CRASHED, NODES, Make
from tests.unit.test_compare_ranks import BEFORE, LOADS, OPEN, OWN, launched, rank


def test_a_job_that_was_suspended_begins_again_without_blame(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "stand_still")

    concluded = conclude_attempt(one.context, attempt, replace(CRASHED, was_suspended=True))

    assert (concluded.end.cause, one.last.next, one.last.failed_nodes) == ("suspended", "in place", ())
    assert "suspended for longer than `restart.hang_timeout_s`" in one.last.reason


@pytest.mark.parametrize("is_built", [True, False])
def test_a_recipe_that_is_never_built_is_named_and_blames_no_node(supervised: Make, *, is_built: bool) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "build_recipe", rank=1)  # rank 0 says nothing; a user's function may bear that name
    if not is_built:
        one.run.allowance(attempt).write_text("building")

    concluded = conclude_attempt(one.context, attempt, CRASHED)

    assert concluded.end.cause == "hang"
    assert one.last.reason.startswith(
        "no rank made progress for 900 s"
        if is_built
        else "the recipe did not return within 1800 s; if it needs longer, raise `restart.hang_timeout_s` above 1800;"
    )
    assert "; other ranks wait for rank 0" in one.last.reason  # it printed no stack
    assert bool(one.last.failed_nodes) is is_built


def test_stacks_that_a_script_dumps_itself_do_not_make_its_failure_a_hang(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "wait_for_slow_data")  # `faulthandler.dump_traceback_later(repeat=True)`
    add_failure(one.run, attempt, rank=0, exception="KeyError: 7")

    concluded = conclude_attempt(one.context, attempt, CRASHED)

    assert (concluded.end.cause, one.last.failed_nodes) == ("worker crashed", ())
    assert "KeyError: 7" in one.last.reason


def add_stacks(run: RunDir, attempt: int, function: str, *, rank: int = 0) -> None:
    """Write what a rank's watchdog leaves in its log."""
    log = run.rank_log(attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    frame = f'  File "/x/y.py", line 7 in {function}\n'
    log.write_text(f"Timeout (0:15:00)!\nThread 0x00007f (most recent call first):\n{frame}")


def test_a_hang_that_cannot_be_written_down_is_a_hang_all_the_same(supervised: Make) -> None:
    one = supervised()
    (one.run.path / "errors").write_text("a file in the way")

    concluded = one.ends(Outcome(code=exit_codes.FAILED, is_unresponsive=True))

    assert (concluded.end.cause, one.last.cause) == ("hang", "hang")
    assert "no rank made progress" in one.last.reason


def test_a_node_that_no_other_reaches_is_left_out_at_once(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "all_reduce")
    cut_off = replace(PROBED, bad_nodes=("node2",), pairs=(NOTHING_PASSES,))

    concluded = conclude_attempt(one.context, attempt, replace(CRASHED, network=cut_off))

    assert (concluded.end.cause, one.last.next, one.last.failed_nodes) == ("hang", "requeue", ("node2",))
    assert concluded.exclude == ("node2",)
    assert (
        "; all ranks wait for each other, and node2 does not reach the other nodes on the network of 10.2.0.1: no"
        in one.last.reason
    )


def test_of_a_pair_that_does_not_carry_neither_node_is_blamed(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "all_reduce")

    conclude_attempt(one.context, attempt, replace(CRASHED, network=replace(PROBED, pairs=(NOTHING_PASSES,))))

    assert (one.last.next, one.last.failed_nodes) == ("in place", ())
    assert (
        "; all ranks wait for each other, and on the network of 10.2.0.1, no packet passes between node1 and node2"
        in one.last.reason
    )


def test_a_network_that_carries_is_said_to_and_changes_no_blame(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "build_recipe", rank=1)

    conclude_attempt(one.context, attempt, replace(CRASHED, network=PROBED))

    assert one.last.failed_nodes == ("node1",)  # the others wait for rank 0, which printed no stack
    assert "other ranks wait for rank 0" in one.last.reason


def test_a_rank_that_is_elsewhere_is_named_and_the_broken_network_beside_it(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "read_a_file")
    add_failure(one.run, attempt, rank=1, host="node2", exception="Connection reset", is_secondary=True)

    conclude_attempt(one.context, attempt, replace(CRASHED, network=replace(PROBED, pairs=(NOTHING_PASSES,))))

    waits = "other ranks wait for rank 0 on node1, which is in /x/y.py:7 in read_a_file"
    assert f"{waits}; besides, on the network of 10.2.0.1, no packet passes" in one.last.reason


def test_workers_that_lost_their_connections_are_explained_by_a_broken_network(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    for number in (0, 1):
        add_failure(
            one.run, attempt, rank=number, host=f"node{number + 1}", exception="Connection reset", is_secondary=True
        )
    cut_off = replace(PROBED, bad_nodes=("node2",), pairs=(NOTHING_PASSES,))

    concluded = conclude_attempt(one.context, attempt, replace(CRASHED, network=cut_off))

    assert (concluded.end.cause, one.last.next, one.last.failed_nodes) == ("worker crashed", "requeue", ("node2",))
    assert "; node2 does not reach the other nodes" in one.last.reason


PROBED = NetworkFindings(at=0.0, seconds=3.0, address="10.2.0.1", num_nodes=2, num_pairs=1)
NOTHING_PASSES = PairFault(nodes=("node1", "node2"), fault="nothing passes")


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(code=exit_codes.FAILED, met_at="10.2.0.1"),  # a crash with no lost connection
        Outcome(code=exit_codes.FAILED, is_unresponsive=True),  # no meeting: not in Slurm
        Outcome(code=exit_codes.FAILED, is_unresponsive=True, was_signalled=True, met_at="10.2.0.1"),
        Outcome(code=exit_codes.FAILED, is_unresponsive=True, was_suspended=True, met_at="10.2.0.1"),
        Outcome(code=exit_codes.FENCED, is_unresponsive=True, met_at="10.2.0.1"),
        Outcome(code=exit_codes.FAILED, is_unresponsive=True, lost_nodes=("node2",), met_at="10.2.0.1"),
    ],
)
def test_an_end_that_no_network_explains_costs_no_probe(supervised: Make, outcome: Outcome) -> None:
    one = supervised()
    attempt = one.begin()

    assert network_probe.explain_by_network(one.context, attempt, outcome) is outcome


def test_ranks_that_lose_each_other_as_they_obey_a_stop_cost_no_probe(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    ask_to_stop(one.run)
    add_failure(one.run, attempt, exception="Connection closed by peer", is_secondary=True)
    crashed = Outcome(code=exit_codes.FAILED, met_at="10.2.0.1")

    assert network_probe.explain_by_network(one.context, attempt, crashed) is crashed


def test_a_job_whose_time_is_nearly_over_is_not_kept_by_a_probe(supervised: Make) -> None:
    one = supervised()
    record_start(one.run, attempt=0, job_id="7", cluster="slurm", nodes=NODES, ends_at=time.time() + 30)
    hung = Outcome(code=exit_codes.FAILED, is_unresponsive=True, met_at="10.2.0.1")

    assert network_probe.explain_by_network(one.context, 0, hung) is hung


def test_a_hang_has_one_task_on_each_node_probe_the_network_and_keeps_what_it_found(
    supervised: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for srun starts the command once for each node that it is given, on this machine."""
    srun = tmp_path / "bin-of-srun" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "from ddp_hpc.cluster.slurm.hostlist import expand_hostlist\n"
        "at = next(n for n, word in enumerate(sys.argv) if n and not word.startswith('--'))\n"
        "nodes = expand_hostlist(next(word for word in sys.argv if word.startswith('--nodelist=')).partition('=')[2])\n"
        "assert '--overlap' in sys.argv and f'--ntasks={len(nodes)}' in sys.argv\n"
        f"stand_in = {stands_for_srun.__file__!r}\n"
        "os.execv(sys.executable, [sys.executable, stand_in, json.dumps(dict.fromkeys(nodes, '')), *sys.argv[at:]])\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    one = supervised()
    attempt = one.begin()
    hung = Outcome(code=exit_codes.FAILED, is_unresponsive=True, met_at="127.0.0.1")

    outcome = network_probe.explain_by_network(one.context, attempt, hung)
    conclude_attempt(one.context, attempt, outcome)

    kept = read_network(one.run, attempt)
    assert kept == outcome.network
    assert kept is not None
    assert kept.carries_everywhere
    assert "no stack is in its log; all 2 nodes that were probed reach each other" in one.last.reason


@pytest.mark.parametrize(
    ("second", "kind", "said"),
    [
        (
            rank(1, BEFORE, frames=LOADS),
            "behind",
            "which is in /home/u/data.py:30 in load: it has launched 3 collectives",
        ),
        (
            rank(1, launched(4, done=False, op="broadcast")),
            "different",
            "; rank 0 calls all_reduce of 4 Float elements",
        ),
        (rank(1, OPEN), "network", "; no rank is behind: all have launched the same collectives, up to all_reduce"),
        (
            rank(1, flight_record=None, stacks=None, answers=False),
            "behind",
            "; other ranks wait for rank 1",
        ),  # no stack
        (
            rank(1, flight_record=None, stacks=None, answers=False, state=DUMPING_STATE),
            "crashed",
            "which has crashed, and the kernel still writes its core file",
        ),
    ],
)
def test_the_reason_of_a_scripts_hang_is_what_the_collectives_of_all_ranks_show(
    second: RankInHang, kind: str, said: str, supervised: Make
) -> None:
    one = supervised()
    attempt = one.begin()
    for record in (rank(0, BEFORE, OPEN), second):
        write_hang_record(one.run, attempt, record)

    conclude_attempt(one.context, attempt, Outcome(code=exit_codes.FAILED, is_unresponsive=True))

    assert said in one.last.reason
    [failure] = read_failures(one.run, attempt)
    assert failure.hang_kind == kind
    assert failure.hang_detail
    assert failure.hang_detail in one.last.reason
    assert "rank 0 on " in one.run.stacks(attempt).read_text()


def test_where_no_rank_says_where_it_is_nothing_is_made_up(supervised: Make) -> None:
    one = supervised()

    one.ends(Outcome(code=exit_codes.FAILED, is_unresponsive=True))

    assert "no rank says where it is" in one.last.reason


@pytest.mark.parametrize(
    ("pair", "blamed"), [(("node1", "node2"), ("node4",)), (("node2", "node4"), ()), (("node4", "node1"), ())]
)
def test_a_faulty_pair_hides_the_rank_that_hangs_only_on_one_of_its_nodes(
    supervised: Make, pair: tuple[str, str], blamed: tuple[str, ...]
) -> None:
    one = supervised(node_names=("node1", "node2", "node3", "node4"), tasks_per_node=(1, 1, 1, 1))
    context = replace(one.context, world=World(num_nodes=4, workers_per_node=1))
    attempt = one.begin()
    for number in (0, 1, 2):  # rank 3 prints nothing: it is stopped
        add_stacks(one.run, attempt, "all_reduce", rank=number)
    faulty = replace(PROBED, num_nodes=4, num_pairs=6, pairs=(PairFault(nodes=pair, fault="large packets"),))

    conclude_attempt(context, attempt, replace(CRASHED, network=faulty))

    assert one.last.failed_nodes == blamed
    assert ("other ranks wait for rank 3 on node4" in one.last.reason) is bool(blamed)
    assert "large packets from" in one.last.reason


@pytest.mark.parametrize("problem", ["the ledger", "a bug"])
def test_a_probe_that_fails_leaves_the_decision_to_the_supervisor(
    supervised: Make, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised()
    attempt = one.begin()
    address = "10.0.0.1" if problem == "the ledger" else "10.0.0.1\0"  # which no command line can hold
    hung = replace(CRASHED, is_unresponsive=True, met_at=address)
    if problem == "the ledger":  # as if its file server did not answer
        one.run.attempts.unlink()
        one.run.attempts.mkdir()

    assert network_probe.explain_by_network(one.context, attempt, hung) is hung
    assert "could not examine the network between the nodes and continues without it" in capsys.readouterr().err


def test_where_ranks_of_several_nodes_are_behind_they_are_named_and_no_node_is_counted(supervised: Make) -> None:
    one = supervised(node_names=(*NODES, "node3"), tasks_per_node=(1, 1, 1))
    context = replace(one.context, world=World(num_nodes=3, workers_per_node=1))
    attempt = one.begin()
    for record in (rank(0, OPEN), rank(1, BEFORE, frames=LOADS), rank(2, BEFORE, frames=LOADS)):
        write_hang_record(one.run, attempt, record)

    conclude_attempt(context, attempt, Outcome(code=exit_codes.FAILED, is_unresponsive=True))

    assert "other ranks wait for rank 1 on node2" in one.last.reason
    assert "(so does rank 2)" in one.last.reason
    assert one.last.failed_nodes == ()


def test_where_a_rank_may_wait_itself_no_rank_is_blamed(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    for record in (rank(0, OPEN), rank(1, BEFORE, frames=OWN, line="request.wait()")):
        write_hang_record(one.run, attempt, record)

    conclude_attempt(one.context, attempt, Outcome(code=exit_codes.FAILED, is_unresponsive=True))

    assert "may wait for a rank themselves: rank 1 is in /home/u/pipe.py:7 in step" in one.last.reason
    assert one.last.failed_nodes == ()
