"""Slurm keeps the contract of a back end, on a real cluster; all tests share one run's life."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.contract.suite import Answer, BackendContract, furnished, run_of
from tests.slurm.cluster import USER, Cluster
from tests.slurm.lab.settings import ROOT

pytestmark = pytest.mark.long


class OnLoginNode:
    """Calls the back end on the cluster's head, as its user."""

    backend = "slurm"
    refused = "slurm.extra.nodes=3"
    may_commit_when_cancelled = True  # scancel sends SIGTERM, and SIGKILL after the cluster's KillWait

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = Path(tempfile.mkdtemp(prefix="contract-", dir=cluster.shared))
        for path in (furnished(self.folder), *self.folder.iterdir()):
            shutil.chown(path, USER, USER)

    def call(self, function: str, name: str, *words: str) -> Answer:
        argv = ["-m", "tests.contract.driver", self.backend, function, str(self.folder / "trial.yaml"), name, *words]
        env = {"PYTHONPATH": str(ROOT)}
        answer: Answer = json.loads(
            self.cluster.run(sys.executable, *argv, cwd=self.folder, env=env, timeout=300).stdout
        )
        return answer


class TestSlurm(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, cluster: Cluster) -> OnLoginNode:
        return OnLoginNode(cluster)

    def test_what_slurm_itself_refuses_leaves_nothing_behind(self, bench: OnLoginNode) -> None:
        told = bench.call("submit", "refused", "slurm.partition=nosuch")

        assert told["error"] == "ConfigError"
        assert "`slurm.partition` is 'nosuch'" in told["message"]
        assert not run_of(bench, "refused").path.exists()
