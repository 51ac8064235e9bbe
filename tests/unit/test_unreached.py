"""A node counts as lost only where Slurm starts no command there, twice, and does on another: else Slurm itself may be busy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.job import preflight, unreached
from ddp_hpc.job.node_question import Question
from ddp_hpc.job.unreached import Reach, reach_of
from ddp_hpc.job.wire.subprocesses import NodesAnswers
from ddp_hpc.node_checks.facts import NodeFacts
from ddp_hpc.run_dir.preflight import Preflight
from ddp_hpc.slurm.allocation import Allocation

NODES = ("n1", "n2", "n3", "n4")
NO_CONTROLLER = "srun: error: Unable to create step for job 7: Unable to contact slurm controller (connect failure)"
LATE = "srun did not end within 15 s"
Trial = Callable[[str, int], str]
"""A node, and how often it was tried before -> why no command starts there; empty where one does."""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trial], None]:
    """Return what has srun start commands on some nodes only."""

    def behave(trial: Trial) -> None:
        tried: dict[str, int] = {}

        def printed_by(argv: Sequence[str], **_: Any) -> tuple[str, str]:
            nodes = next(word for word in argv if word.startswith("--nodelist=")).partition("=")[2].split(",")
            if len(nodes) > 1:
                return "", LATE  # where one does not start, srun waits for all
            count = tried.get(nodes[0], 0)
            tried[nodes[0]] = count + 1
            why = trial(nodes[0], count)
            return ("" if why else "ddp-hpc-is-reached\n"), why

        monkeypatch.setattr(unreached, "printed_by", printed_by)

    return behave


def only(bad: Mapping[str, int], why: str = LATE) -> Trial:
    """Have the first trials of some nodes fail."""
    return lambda node, count: why if count < bad.get(node, 0) else ""


@pytest.mark.parametrize(
    ("trial", "reach"),
    [
        (only({}), Reach()),
        (only({"n3": 9}), Reach(lost=("n3",))),
        (only({"n3": 9, "n4": 1}), Reach(lost=("n3",))),
        (only({"n3": 1}), Reach()),  # the controller was slow once
        (only(dict.fromkeys(NODES, 9)), Reach(unsure=NODES)),
        (only(dict.fromkeys(NODES, 9), NO_CONTROLLER), Reach(unsure=NODES)),
        (only({"n3": 9}, NO_CONTROLLER), Reach(unsure=("n3",))),
        (
            lambda node, count: LATE if node == "n3" or count else "",
            Reach(unsure=("n3",)),
        ),  # down after the first trials
        (
            lambda node, count: LATE if node == "n3" or count > 1 else "",
            Reach(unsure=("n3",)),
        ),  # down at the second trial
    ],
    ids=[
        "all well",
        "one lost",
        "one lost, one slow",
        "one slow",
        "hangs",
        "restarts",
        "restarts, one",
        "down later",
        "down in between",
    ],
)
def test_a_node_is_lost_where_slurm_starts_nothing_there_twice_and_something_elsewhere_meanwhile(
    slurm: Callable[[Trial], None], trial: Trial, reach: Reach
) -> None:
    slurm(trial)

    assert reach_of(NODES, {}, job_nodes=NODES) == reach


@pytest.mark.parametrize(("bad", "reach"), [(("n2",), Reach(lost=("n2",))), (NODES, Reach(unsure=("n2",)))])
def test_a_node_that_is_tried_alone_is_compared_with_the_others_of_the_job(
    slurm: Callable[[Trial], None], bad: Sequence[str], reach: Reach
) -> None:
    slurm(only(dict.fromkeys(bad, 9)))

    assert reach_of(["n2"], {}, job_nodes=NODES) == reach


def test_a_job_of_one_node_has_no_other_to_compare_it_with(slurm: Callable[[Trial], None]) -> None:
    slurm(only({"n1": 9}))

    assert reach_of(["n1"], {}, job_nodes=["n1"]) == Reach(unsure=("n1",))


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Preflight:
    """Check nodes that all answer each question, before Slurm is asked once more whether it reaches them."""
    answers = NodesAnswers(by_node=dict.fromkeys(NODES, asdict(NodeFacts(num_cpus=4))), silent=[])
    monkeypatch.setattr(preflight, "ask_nodes", lambda *_, **__: answers)
    monkeypatch.setattr(preflight, "_network", lambda _: None)
    allocation = Allocation(job_id="7", node_names=NODES, tasks_per_node=(1,) * 4)
    return preflight.examine(Question(allocation=allocation, folder=folder / "asked", environ={}))


@pytest.mark.parametrize(
    "trial",
    [
        only(dict.fromkeys(NODES, 9), NO_CONTROLLER),  # the controller restarts
        only(dict.fromkeys(NODES, 9)),  # it hangs
        only(dict.fromkeys(NODES[1:], 9)),  # it is so slow that one command starts in time
    ],
    ids=["restarts", "hangs", "slow"],
)
def test_a_controller_that_does_not_answer_takes_no_node_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: Callable[[Trial], None], trial: Trial
) -> None:
    slurm(trial)

    found = checked(tmp_path, monkeypatch)

    told = [one for one in found.findings if one.check == "nodes"]
    assert [(one.level, one.nodes) for one in told] == [("unknown", ())]
    assert [preflight.outcome_of(found, on_fail) for on_fail in ("stop", "exclude")] == [None, None]


def test_a_node_that_is_lost_at_the_end_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: Callable[[Trial], None]
) -> None:
    slurm(only({"n3": 9}))

    outcome = preflight.outcome_of(checked(tmp_path, monkeypatch), "exclude")

    assert outcome is not None
    assert outcome.lost_nodes == ("n3",)
