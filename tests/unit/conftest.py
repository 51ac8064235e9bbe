"""Fixtures of the tests of what follows an attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job.ending import requeue_job
from ddp_hpc.run.spec import ResourcesSpec, RestartSpec, RunSpec, SlurmSpec
from tests.made_launch import context_of
from tests.made_run import make_run
from tests.unit.fake_slurm import FakeSlurm
from tests.unit.made_job import NODES, Supervised


@pytest.fixture(autouse=True)
def _leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a supervisor leave once its job is back in the queue: there is no Slurm to start it too early."""
    monkeypatch.setattr(requeue_job, "STAY_AFTER_REQUEUE_S", 0.0)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path)
    slurm.knows()
    slurm.knows_nodes(node1="mixed", node2="mixed", node3="idle", node4="idle")
    return slurm


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
            context_of(spec, make_run(tmp_path), Allocation(**known), dict(slurm.environ)),
            slurm,
        )

    return make
