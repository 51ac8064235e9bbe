"""Starts that fail before a worker can say so: a node without Python, a job that Slurm cannot launch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.cluster.slurm.queries import JobRecord, parse_job
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import FAULTY, assert_unbroken, attempts, await_done, job_id
from tests.slurm.runs import LoginNode, world

pytestmark = pytest.mark.long


@pytest.fixture
def node2_without_python(cluster: Cluster) -> Iterator[None]:
    """Hide this Python's commands from the jobs of a node that is not the first one."""
    commands = f"{sys.prefix}/bin"
    cluster.run("mount", "-t", "tmpfs", "-o", "ro", "lost", commands, node="node2", user="root")
    yield
    cluster.cancel_all()
    cluster.run("umount", "--lazy", commands, node="node2", user="root")


def test_a_node_that_has_lost_its_python_is_named_and_left_out(
    cluster: Cluster, place: LoginNode, node2_without_python: None
) -> None:
    place.submit("spared", *FAULTY, *world(2, 1))

    await_done(place, "spared")

    *mute, last = attempts(place, "spared")
    assert [(one.nodes, one.next, one.failed_nodes) for one in mute] == [
        (("node1", "node2"), "requeue", ()),
        (("node1", "node2"), "requeue", ("node2",)),
    ]
    assert "node2 cannot start a worker's Python and import its modules; the 1 other nodes can" in mute[-1].reason
    assert "node2" not in last.nodes
    assert_unbroken(place, "spared", world_size=2)


HELD = "Slurm holds the job, because a node could not launch it"


@pytest.fixture
def prolog_that_fails(cluster: Cluster, place: LoginNode) -> Path:
    """Have Slurm's prolog fail on the first node while a file is there."""
    broken, prolog = place.folder / "broken", place.folder / "prolog.sh"
    broken.touch()
    prolog.write_text(f'#!/bin/sh\n[ "$(hostname)" != node1 ] || ! [ -e {broken} ]\n')
    prolog.chmod(0o755)
    cluster.reconfig(Prolog=str(prolog))
    return broken


def record_of(cluster: Cluster, job: str) -> JobRecord:
    shown = parse_job(cluster.run("scontrol", "--oneliner", "show", "job", job).stdout)
    assert shown is not None
    return shown


def await_held(cluster: Cluster, job: str, restarts: int) -> None:
    """Return once Slurm could not launch a job for that number of times, and holds it."""
    held = ("launch_failed_requeued_held", restarts)
    cluster.wait_for(lambda: (record_of(cluster, job).reason, record_of(cluster, job).restarts) == held, 60)


def drain_reason(cluster: Cluster, node: str) -> str:
    return cluster.run("sinfo", "--noheader", f"--nodes={node}", "--format=%T %E").stdout.splitlines()[0]


def test_a_job_that_slurm_cannot_launch_is_released_by_its_user_and_starts_elsewhere(
    cluster: Cluster, place: LoginNode, prolog_that_fails: Path
) -> None:
    place.submit("launched", *FAULTY, *world(1, 1))
    await_held(cluster, job_id(place, "launched"), 1)

    released = place.type("requeue", "launched", "--now")

    assert released.returncode == 0, released.stderr
    await_done(place, "launched")
    (only,) = attempts(place, "launched")
    assert (only.restart, only.failed_nodes) == (1, ())
    assert only.nodes != ("node1",)
    assert drain_reason(cluster, "node1") == "drained Prolog error"


def test_a_user_may_release_what_slurm_holds_and_not_what_an_administrator_does(
    cluster: Cluster, place: LoginNode, prolog_that_fails: Path
) -> None:
    place.submit("held", *FAULTY, *world(1, 1), "slurm.nodelist=node1")
    job = job_id(place, "held")
    await_held(cluster, job, 1)
    said = place.type("status", "held", env={"XDG_CACHE_HOME": str(place.folder / "cache")}).stdout  # asks Slurm anew
    cluster.run("scontrol", "hold", job, user="root")

    refused = place.type("requeue", "held", "--now")
    resumed = cluster.run("scontrol", "update", "nodename=node1", "state=resume", check=False)
    cluster.run("scontrol", "release", job, user="root")
    cluster.run("scontrol", "update", "nodename=node1", "state=resume", user="root")
    await_held(cluster, job, 2)
    prolog_that_fails.unlink()
    cluster.run("scontrol", "update", "nodename=node1", "state=resume", user="root")
    released = place.type("requeue", "held", "--now")
    await_done(place, "held")

    assert HELD in said
    assert refused.returncode == 2
    assert "An administrator holds the job, and only they can release it" in refused.stderr
    assert "Invalid user id" in resumed.stderr
    assert released.returncode == 0, released.stderr
    assert [one.cause for one in attempts(place, "held")] == ["finished"]
