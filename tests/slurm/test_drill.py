"""`ddp-hpc drill` makes faults by a user's own power, and tells what came of them."""

from __future__ import annotations

import json

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import LoginNode

QUICK = ("train.max_steps=200", "recipe.args.sample_s=0.02")
"""Some 25 s, so that the fault finds it at work."""


def drill(login: LoginNode, *words: str) -> tuple[int, dict[str, object], str]:
    """Return the exit code, the report, and what was said on the way."""
    done = login.type("drill", *words, "--json", timeout=340)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    ["preempt", *(pytest.param(fault, marks=pytest.mark.campaign) for fault in ("kill-worker", "hang"))],
)
def test_a_run_passes_its_drill(cluster: Cluster, login: LoginNode, fault: str) -> None:
    code, report, said = drill(login, fault, *QUICK, "restart.hang_timeout_s=20")

    assert (code, report.get("verdict")) == (0, "PASS"), f"{report}\n{said}"
    assert report["seconds_to_running"] is not None


@pytest.mark.long
def test_a_run_that_does_not_come_back_fails_its_drill_with_what_is_known(login: LoginNode) -> None:
    ways_back = ("restart.in_place=false", "slurm.requeue=false")

    code, report, _ = drill(login, "kill-worker", *QUICK, *ways_back)

    assert (code, report.get("verdict")) == (1, "FAIL")
    assert "Slurm has no job of" in str(report["reason"])
    assert "killed by SIGKILL" in str(report["reason"])
