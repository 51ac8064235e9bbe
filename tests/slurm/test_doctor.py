"""The doctor on a real cluster: what is broken is found, and the node is named; a healthy cluster passes."""

from __future__ import annotations

import json
from typing import Any

from tests.slurm.cluster import Cluster
from tests.slurm.runs import LoginNode


def doctor(login: LoginNode, *words: str, **options: Any) -> dict[str, Any]:
    """Return what the doctor says of four nodes."""
    done = login.type("doctor", "--json", "--nodes=4", *words, **options)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "code": done.returncode}


def failures(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in found["checked"]["findings"] if one["level"] == "fail"]


def test_a_healthy_cluster_passes_in_a_quarter_of_a_minute(cluster: Cluster, login: LoginNode) -> None:
    found = doctor(login)

    assert failures(found) == []
    assert found["code"] == 0
    assert found["checked"]["seconds"] < 15
