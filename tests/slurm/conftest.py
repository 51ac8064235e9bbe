"""The cluster of a test session, idle before each test."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.slurm.cluster import USER, Cluster, booted, why_not
from tests.slurm.faulty_runs import RECIPE
from tests.slurm.runs import LoginNode


@pytest.fixture(scope="session")
def can_boot() -> None:
    """Skip, or fail where `DDP_HPC_REQUIRE_SLURM` is set, what needs a cluster on a machine that cannot have one."""
    reason = why_not()
    if not reason:
        return
    if os.environ.get("DDP_HPC_REQUIRE_SLURM"):
        pytest.fail(f"DDP_HPC_REQUIRE_SLURM is set, but {reason}", pytrace=False)
    pytest.skip(f"not tested on a real Slurm cluster: {reason}")


def boot(name: str = "", *options: str) -> AbstractContextManager[Cluster]:
    """Boot a cluster; of Slurm in `DDP_HPC_SLURM_ROOTFS`, if that is set."""
    rootfs = os.environ.get("DDP_HPC_SLURM_ROOTFS")
    return booted(name, *options, rootfs=Path(rootfs) if rootfs else None)


@pytest.fixture(scope="session")
def cluster(can_boot: None) -> Iterator[Cluster]:
    """Return a cluster of four nodes with four GPUs each."""
    with boot() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def unlike_cluster(can_boot: None) -> Iterator[Cluster]:
    """Return another one beside it, whose Slurm counts no GPUs: two nodes of 64 GB and two of 32 GB."""
    with boot("unlike", "--small=2", "--gpus=0", "--no-db", "--set=GresTypes=") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _mended_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave to the next test what this one found: an empty queue, all nodes and daemons up."""
    yield
    for name in {"cluster", "unlike_cluster"}.intersection(request.fixturenames):
        request.getfixturevalue(name).mend()


@pytest.fixture
def shared_dir(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """Return a fresh directory of the jobs' user that all nodes see."""
    return _fresh_dir(cluster, request)


def _fresh_dir(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    name = re.sub(r"\W+", "-", request.node.name)[:40]
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cluster.shared))
    shutil.chown(path, USER, USER)
    return path


@pytest.fixture
def login(cluster: Cluster, shared_dir: Path) -> LoginNode:
    """Return the head, with a configuration to submit in a fresh directory."""
    return LoginNode(cluster, shared_dir)


@pytest.fixture
def unlike(unlike_cluster: Cluster, request: pytest.FixtureRequest) -> LoginNode:
    """Return the same as `place`, on the cluster of unlike nodes."""
    login = LoginNode(unlike_cluster, _fresh_dir(unlike_cluster, request))
    login.add_recipe(RECIPE)
    return login


@pytest.fixture
def place(login: LoginNode) -> LoginNode:
    """Return the head, with a recipe that fails as it is told to beside the configuration."""
    login.add_recipe(RECIPE)
    return login
