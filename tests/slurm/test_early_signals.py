"""A run that is told to leave before anybody can listen comes back all the same."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from ddp_hpc.job.node.torchrun_node import STOP_REPEAT_S
from tests.slurm.cluster import USER, Cluster
from tests.slurm.faulty_runs import FAULTY, assert_unbroken, attempts, await_done, job_id
from tests.slurm.runs import LoginNode, world

LATE = """
import os, sys, time
from pathlib import Path
words = [*sys.orig_argv, "", ""]
if "-m" in words and words[words.index("-m") + 1] in %r:
    late = Path(%r)
    (late / os.environ["SLURM_PROCID"]).touch()
    while (late / "wait").exists():
        time.sleep(0.01)
"""
"""Keeps the interpreters of some modules from starting; Python runs a module `sitecustomize` before anything else."""


def hold_back(place: LoginNode, *modules: str) -> Path:
    """Let no interpreter of these modules start while the file exists that is returned."""
    late, shim = place.folder / "late", place.folder / "sitecustomize.py"
    late.mkdir()
    (late / "wait").touch()
    shim.write_text(LATE % (modules, str(late)))
    for path in (late, late / "wait", shim):
        shutil.chown(path, USER, USER)
    return late / "wait"


def with_shim(place: LoginNode) -> str:
    """Return the setting by which the interpreters of a job find what `hold_back` has made."""
    return f"slurm.setup={json.dumps([f'export PYTHONPATH={place.folder}'])}"


def await_held_back(cluster: Cluster, wait: Path, *tasks: str) -> None:
    """Return once an interpreter of each of Slurm's tasks is held back."""
    cluster.wait_for(lambda: {path.name for path in wait.parent.iterdir()} == {*tasks, wait.name}, 60)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("agent", "USR2"),
        pytest.param("agent", "TERM", marks=pytest.mark.campaign),
        pytest.param("srun", "USR2", marks=pytest.mark.campaign),
        pytest.param("srun", "TERM", marks=pytest.mark.campaign),
        pytest.param("torchrun", "USR2", marks=pytest.mark.campaign),
        pytest.param("torchrun", "TERM", marks=pytest.mark.campaign),
    ],
)
def test_a_run_that_is_told_to_leave_before_it_can_listen_leaves(
    cluster: Cluster, place: LoginNode, launcher: str, number: str
) -> None:
    wait = hold_back(place, "ddp_hpc.job.node.agent", "ddp_hpc.job.node.task", "ddp_hpc.job.node.torchrun_node")
    place.submit("early", *FAULTY, *world(2, 1), with_shim(place), f"launcher={launcher}")
    await_held_back(cluster, wait, "0", "1")

    cluster.run("scancel", f"--signal={number}", job_id(place, "early"))
    cluster.wait_for(lambda: attempts(place, "early")[0].ended_at is not None, 60)
    wait.unlink()
    await_done(place, "early")

    first, _ = attempts(place, "early")
    assert (first.cause, first.next, first.ending) == ("unexplained", "requeue", "failed")
    assert "a stop signal killed the workers before they had installed their signal handlers" in first.reason
    assert_unbroken(place, "early", world_size=2)


@pytest.mark.campaign
def test_workers_of_torchrun_are_not_told_before_they_can_listen(cluster: Cluster, place: LoginNode) -> None:
    wait = hold_back(place, "ddp_hpc.job.node.task")
    place.submit("early", *FAULTY, *world(2, 1), with_shim(place), "launcher=torchrun")
    await_held_back(cluster, wait, "0", "1")

    cluster.run("scancel", "--signal=USR2", job_id(place, "early"))
    time.sleep(3 * STOP_REPEAT_S)
    wait.unlink()
    await_done(place, "early")

    first, _ = attempts(place, "early")
    assert (first.cause, first.next, first.ending) == ("requeue asked", "requeue", "stopped")
    assert_unbroken(place, "early", world_size=2)


@pytest.mark.long
def test_a_job_that_is_told_to_leave_while_it_sets_up_leaves(cluster: Cluster, place: LoginNode) -> None:
    setting_up = place.folder / "setting-up"
    once = f"[[ -e {setting_up} ]] || {{ touch {setting_up}; sleep 3; }}"
    place.submit("early", *FAULTY, *world(2, 1), "slurm.signal_to=batch", f"slurm.setup=[{json.dumps(once)}]")
    cluster.wait_for(setting_up.exists, 60)

    cluster.run("scancel", "--batch", "--signal=USR2", job_id(place, "early"))
    await_done(place, "early")

    first, _ = attempts(place, "early")
    assert (first.cause, first.next, first.ending) == ("requeue asked", "requeue", "stopped")
    assert_unbroken(place, "early", world_size=2)


@pytest.mark.campaign
def test_a_job_outlives_a_signal_that_nobody_can_hear_yet(cluster: Cluster, place: LoginNode) -> None:
    wait = hold_back(place, "ddp_hpc.job.supervisor")
    place.submit("early", *FAULTY, *world(2, 1), with_shim(place), "slurm.signal_to=batch")
    await_held_back(cluster, wait, "0")

    cluster.run("scancel", "--batch", "--signal=USR2", job_id(place, "early"))
    time.sleep(2.0)  # nothing tells when it has come
    wait.unlink()
    await_done(place, "early")

    assert [one.cause for one in attempts(place, "early")] == ["finished"]
    assert_unbroken(place, "early", world_size=2)
