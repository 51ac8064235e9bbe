"""Every signal that users have Slurm send to a job's steps is an agreed stop, or nothing: none of them kills a rank or an agent."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import FAULTY, attempts, job_id, newest_step, slow_file
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode, world

STOPS = ("USR1", "INT", "HUP", "USR2", "TERM")
SCRIPT = ROOT / "tests" / "distributed" / "scripts" / "signals.py"
LAUNCHERS = ("agent", "srun", "torchrun")
Row = tuple[str, int, str, str]
"""A signal, the attempt that got it, why that one ended, and what followed."""


def is_in_training(place: LoginNode, name: str, number: int) -> bool:
    """Tell whether an attempt has committed a step of its own, so that all of its ranks have handlers."""
    found = attempts(place, name)
    return len(found) > number and newest_step(place, name) > max(found[number].first_step, 0)


def are_ready(place: LoginNode, number: int) -> bool:
    """Tell whether the scripts of an attempt have set their handlers."""
    marks = [place.folder / f"ready-{rank}" for rank in range(2)]
    return len(attempts(place, "script")) > number and all(mark.exists() for mark in marks)


def send(place: LoginNode, name: str, signal: str, number: int) -> Row:
    """Send a signal to the steps of a job; return what it did to an attempt."""
    place.cluster.run("scancel", f"--signal={signal}", job_id(place, name))
    place.cluster.wait_for(lambda: attempts(place, name)[number].ended_at is not None, 120)
    ended = attempts(place, name)[number]
    return signal, number, str(ended.cause), str(ended.next)


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_recipe_commits_and_comes_back_after_each_signal_to_its_steps(
    launcher: str, cluster: Cluster, place: LoginNode
) -> None:
    slow = json.dumps({"slow_while": str(slow_file(place))})
    settings = [*FAULTY, f"recipe.args={slow}", "checkpoint.every_steps=1", "train.epochs=60", *world(2, 1)]
    place.submit("recipe", *settings, f"launcher={launcher}")
    cluster.wait_for(lambda: is_in_training(place, "recipe", 0), 180)
    before = newest_step(place, "recipe")
    cluster.run("scancel", "--signal=CONT", job_id(place, "recipe"))
    cluster.wait_for(lambda: newest_step(place, "recipe") > before + 1, 60)

    rows = []
    for number, signal in enumerate(STOPS):
        cluster.wait_for(partial(is_in_training, place, "recipe", number), 240)
        rows.append(send(place, "recipe", signal, number))

    assert rows == [(signal, number, "requeue asked", "requeue") for number, signal in enumerate(STOPS)]


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_gets_its_stop_signal_for_each_signal_to_the_steps(
    launcher: str, cluster: Cluster, login: LoginNode
) -> None:
    login.add_recipe(SCRIPT)
    keys = [
        "name=script",
        f"launcher={launcher}",
        "resources.cpus_per_worker=1",
        "restart.max_no_progress=9",
        *world(2, 1),
    ]
    done = login.type("submit", "--cluster", "slurm", *keys, "--", "python", "signals.py", "handles", "TERM", "99")
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.wait_for(lambda: are_ready(login, 0), 180)
    cluster.run("scancel", "--signal=CONT", job_id(login, "script"))
    time.sleep(2.0)  # nothing tells when it has come

    rows = []
    for number, signal in enumerate(STOPS):
        cluster.wait_for(partial(are_ready, login, number), 240)
        for mark in login.folder.glob("ready-*"):
            mark.unlink()
        rows.append(send(login, "script", signal, number))

    assert rows == [(signal, number, "requeue asked", "requeue") for number, signal in enumerate(STOPS)]
