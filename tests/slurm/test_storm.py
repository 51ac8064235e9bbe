"""The storm's plan and its checks; and a short one on the cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.prove.drill.injector import NodeProcess
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import add_checkpoint, add_metrics, make_run
from tests.slurm.cluster import Cluster
from tests.slurm.runs import LoginNode
from tests.slurm.storm.check import problems_of
from tests.slurm.storm.course import Asked, storm
from tests.slurm.storm.deeds import Done
from tests.slurm.storm.hand import processes_of
from tests.slurm.storm.plan import KINDS, kinds_of, plan
from tests.slurm.storm.results import add_result, as_table


def test_a_seed_has_one_plan_and_another_seed_another() -> None:
    first, again, other = (plan(seed, seconds=480, num_runs=3, gap_s=6, kinds=kinds_of()) for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert {fault.run for fault in first} == {0, 1, 2}
    assert all(fault.at_s + fault.lasts_s <= 480 for fault in first)


def test_kinds_are_left_out_or_chosen_by_their_whole_name_or_its_last_word() -> None:
    assert "kill shell" not in kinds_of()
    assert {*kinds_of()} - {*kinds_of(without=["supervisor"])} == {"kill supervisor", "pause supervisor"}
    assert kinds_of(only=["kill shell", "power"]) == ["kill shell", "power"]
    with pytest.raises(ValueError, match="no kind 'lightning'"):
        kinds_of(without=["lightning"])


def test_a_runs_processes_are_told_apart_by_what_they_are() -> None:
    run = "/runs/digits"
    agent = ["python", "-m", "ddp_hpc.job.node.agent", run, "0"]
    seen = [
        NodeProcess(1, 0, ["/sbin/init"]),
        NodeProcess(10, 1, ["/bin/bash", "/var/spool/slurmd/job00012/slurm_script"]),
        NodeProcess(11, 10, ["python", "-m", "ddp_hpc.job.supervisor", run, "--cluster", "slurm"]),
        NodeProcess(12, 11, ["srun", "--nodes=2", *agent]),
        NodeProcess(13, 12, ["srun", "--nodes=2", *agent]),
        NodeProcess(20, 1, agent),
        NodeProcess(21, 20, agent),
        NodeProcess(22, 21, agent),
        NodeProcess(30, 1, ["/bin/bash", "/var/spool/slurmd/job00013/slurm_script"]),
        NodeProcess(31, 1, ["python", "-m", "ddp_hpc.job.node.agent", "/runs/other", "0"]),
    ]

    found = processes_of(seen, run, "12")

    assert found == {"rank": [21], "agent": [20], "srun": [12], "loader": [22], "supervisor": [11], "shell": [10]}


def finished_run(folder: Path, name: str, *, attempt: int = 0, **line: object) -> RunDir:
    """Make a run of four steps, with what it has recorded of them; `line` changes the ledger's last line."""
    run = make_run(folder, name)
    run.attempts.touch()
    record_start(run, attempt=attempt, job_id="1")
    record_end(run, attempt, End(ending=Ending.FINISHED, exit_code=0, cause=Cause.FINISHED))
    if line:
        append_json_line(run.attempts, {"attempt": attempt, **line})
    add_metrics(run, [{"kind": "train", "step": step, "loss": 1 / step} for step in (2, 4)])
    path = run.rank_samples(attempt, 0)
    path.parent.mkdir(parents=True)
    records = [{"step": step, "epoch": 0, "samples": [2 * step, 2 * step + 1]} for step in range(1, 5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    add_checkpoint(run, 4)
    return run


def test_a_run_like_the_undisturbed_one_has_no_problem(tmp_path: Path) -> None:
    undisturbed, run = finished_run(tmp_path, "undisturbed"), finished_run(tmp_path, "run", attempt=3)

    assert problems_of(run, undisturbed, []) == []


def test_what_a_storm_may_not_do_to_a_run_is_found(tmp_path: Path) -> None:
    undisturbed = finished_run(tmp_path, "undisturbed")
    run = finished_run(tmp_path, "run", failed_nodes=["node1", "node2"])
    run.metrics.write_text('{"kind":"train","step":2,"loss":0.25}\n' * 2)
    run.rank_samples(0, 0).write_text('{"step":1,"epoch":0,"samples":[7,7]}\n')
    (run.checkpoints / "attempt-2.writing").mkdir()
    run.stop_request.touch()
    hit = Done(kind="power", at=1.0, run="other", node="node1", was_made=True, may_be_blamed="*")

    found = "\n".join(problems_of(run, undisturbed, [hit]))

    assert "twice: ('train', 2)" in found
    assert "missing: ('train', 4)" in found
    assert "another loss at 2" in found
    assert "other ones than the undisturbed run's in the steps 1, 2, 3, 4" in found
    assert "used twice in an epoch: (0, 7)" in found
    assert "left behind: STOP, attempt-2.writing" in found
    assert "blames node2, where nothing was done" in found


def test_only_the_run_whose_process_was_killed_may_blame_the_node(tmp_path: Path) -> None:
    undisturbed, run = (finished_run(tmp_path, name, failed_nodes=["node1"]) for name in ("undisturbed", "run"))
    killed = Done(kind="kill rank", at=1.0, run="undisturbed", node="node1", was_made=True, may_be_blamed="undisturbed")

    assert problems_of(undisturbed, undisturbed, [killed]) == []
    assert "blames node1" in problems_of(run, undisturbed, [killed])[0]


def test_results_of_a_seed_replace_its_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    row = {"attempts": 3, "steps_taken_again": 7, "state": "finished", "problems": ["it has other bits"]}
    for seed, verdict in ((2, "PASS"), (1, "PASS"), (2, "FAIL")):
        result = {"seed": seed, "minutes": 8.0, "verdict": verdict, "faults": {"power": 2}, "runs": {"run-0": row}}
        add_result(result, path)

    found = json.loads(path.read_text())

    assert [(one["seed"], one["verdict"]) for one in found] == [(1, "PASS"), (2, "FAIL")]
    assert "seed 2, run-0: it has other bits" in as_table(found)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_runs_come_through_a_storm_of_ninety_seconds(cluster: Cluster, login: LoginNode) -> None:
    faults = plan(12, seconds=90, num_runs=2, gap_s=5, kinds=kinds_of())
    said: list[str] = []

    result = storm(cluster, login, Asked(seed=12, minutes=1.5, num_runs=2, faults=faults), said.append)

    assert {name: run["problems"] for name, run in result["runs"].items()} == {"run-0": [], "run-1": []}, "\n".join(
        said
    )
    assert {*result["faults"]} <= {*KINDS}
