"""Workers that the user's own srun has started find their places by Slurm's variables, on two real nodes."""

from __future__ import annotations

import sys

import pytest

from ddp_hpc.run.run_dir.ledger import Ledger
from tests.slurm.runs import SMALL, LoginNode

pytestmark = pytest.mark.long


def test_workers_of_a_plain_srun_on_two_nodes_train_as_those_of_a_submitted_job(login: LoginNode) -> None:
    join = [sys.executable, "-m", "ddp_hpc", "join", "digits.yaml", "name=by-srun", *SMALL]
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mem=2G", "--kill-on-bad-exit=1"]
    done = login.cluster.run(*srun, *join, node="head", cwd=login.folder, check=False, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    (attempt,) = Ledger.read(login.run("by-srun")).attempts
    assert attempt.ending == "finished"
    assert "started by srun" in done.stderr
    login.submit("submitted", *SMALL, "resources.nodes=2", "resources.workers_per_node=1", "--wait")
    assert login.digest("by-srun") == login.digest("submitted")
