"""Each node is asked once; one that does not answer is named, and the others are compared and probed without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.node_checks.facts import NodeFacts
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job import preflight
from ddp_hpc.job.ending import network_probe
from ddp_hpc.job.preflight import NodesCheckRequest, examine_nodes, outcome_of_findings
from ddp_hpc.job.wire.subprocesses import NodesAnswers, ask_nodes
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.run_dir.preflight import PreflightReport
from tests.unit.test_node_verdict import network

NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return of which nodes the network is probed."""
    probed: list[tuple[str, ...]] = []

    def probe(nodes: Sequence[str], *_: Any, **__: Any) -> NetworkFindings:
        probed.append(tuple(nodes))
        return network(tuple(nodes))

    monkeypatch.setattr(network_probe, "probe_network", probe)
    return probed


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, Any]) -> PreflightReport:
    """Check four nodes, of which some give an answer; a second question would fail."""
    questions = iter([NodesAnswers(by_node=answers, silent=[], last_error="srun: error: n3: step killed")])
    monkeypatch.setattr(preflight, "ask_nodes", lambda *_, **__: next(questions))
    allocation = Allocation(job_id="7", node_names=NODES, tasks_per_node=(1,) * 4)
    environ = {"MASTER_ADDR": "10.0.0.1"}
    return examine_nodes(NodesCheckRequest(allocation=allocation, folder=folder / "asked", environ=environ))


FACTS = asdict(NodeFacts(num_cpus=4))


def test_a_node_that_does_not_answer_is_left_out_of_the_probe_and_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, ...]]
) -> None:
    found = checked(tmp_path, monkeypatch, {node: FACTS for node in NODES if node != "n3"})

    (failure,) = found.failures
    assert (failure.check, failure.nodes) == ("nodes", ("n3",))
    assert failure.found == "no answer from n3 (srun: error: n3: step killed)"
    assert asked == [("n1", "n2", "n4")]
    outcome = outcome_of_findings(found, "exclude")
    assert outcome is not None
    assert outcome.lost_nodes == ("n3",)


@pytest.mark.parametrize(("has_image", "timeout_s"), [(False, 30), (True, 300)])
def test_nodes_that_may_have_to_unpack_an_image_have_longer_to_answer(
    has_image: bool, timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def ask(*_: Any, **more: Any) -> NodesAnswers:
        given.append(more["timeout_s"])
        return NodesAnswers(by_node={}, silent=[], last_error="")

    monkeypatch.setattr(preflight, "ask_nodes", ask)
    allocation = Allocation(job_id="7", node_names=NODES, tasks_per_node=(1,) * 4)

    examine_nodes(NodesCheckRequest(allocation=allocation, folder=tmp_path / "asked", environ={}, has_image=has_image))

    assert given == [timeout_s]


@pytest.mark.parametrize("answers", [{}, {"n1": FACTS}])
def test_without_two_nodes_that_answer_no_network_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, ...]], answers: Mapping[str, Any]
) -> None:
    found = checked(tmp_path, monkeypatch, answers)

    assert asked == []
    assert found.bad_nodes == ()


def test_where_no_node_answers_the_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(tmp_path, monkeypatch, {})

    assert [(one.check, one.level) for one in found.findings] == [("nodes", "unknown")]
    assert [outcome_of_findings(found, on_fail) for on_fail in ("stop", "exclude")] == [None, None]


def test_the_nodes_are_named_on_which_srun_could_not_start_the_command() -> None:
    said = "srun: error: Task launch for StepId=7.0 failed on node n3: Communication connection failure"
    step = ["sh", "-c", f"echo '{said}' >&2; echo 'srun: error: n4: task 3: Killed' >&2", "srun"]

    answers = ask_nodes(["true"], NODES, environ={"PATH": "/usr/bin:/bin"}, timeout_s=60, step=step)

    assert (answers.unstarted, answers.last_error) == (["n3"], "srun: error: n4: task 3: Killed")
