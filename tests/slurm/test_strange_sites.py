"""Clusters as others set them up: greetings, many interfaces, tasks that are not bound, and homes that nobody can write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import USER, Cluster
from tests.slurm.runs import SMALL, TRIAL_RECIPE, LoginNode, world

pytestmark = pytest.mark.long

RECIPE = """
import torch
import trial_recipe


def build():
    print("threads:", torch.get_num_threads(), flush=True)
    return trial_recipe.build()
"""
GREETING = """#!/bin/sh
echo "print Welcome to this cluster!"
echo "print {'not': 'json'}"
"""
NUM_PAIRS = 10
"""Each is two interfaces."""
NODES = ("node1", "node2")


@pytest.fixture
def greeting_nodes(cluster: Cluster, shared_dir: Path) -> Iterator[None]:
    """Have nodes with many interfaces, whose tasks begin with a greeting and are bound to no CPUs."""
    prolog = shared_dir / "greet.sh"
    prolog.write_text(GREETING)
    prolog.chmod(0o755)
    for number, node in enumerate(NODES):
        for one in range(NUM_PAIRS):
            pair = ("link", "add", f"hca{one}", "type", "veth", "peer", "name", f"hcb{one}")
            address = ("address", "add", f"10.{100 + one}.{number}.1/24", "dev", f"hca{one}")
            ups = (("link", "set", f"{name}{one}", "up") for name in ("hca", "hcb"))
            for words in (pair, address, *ups):
                cluster.run("ip", *words, node=node, user="root")
    cluster.reconfig(TaskProlog=str(prolog), TaskPlugin="task/none")
    yield
    cluster.cancel_all()
    for node in NODES:
        for one in range(NUM_PAIRS):
            cluster.run("ip", "link", "delete", f"hca{one}", node=node, user="root", check=False)


def submit(login: LoginNode, name: str, *settings: str, env: dict[str, str] | None = None) -> None:
    login.add_recipe(TRIAL_RECIPE)
    (login.folder / "told.py").write_text(RECIPE)
    (login.folder / "run.yaml").write_text("recipe: {target: 'told:build'}\n")
    words = ["submit", "run.yaml", f"name={name}", "--cluster", "slurm", "--wait", *SMALL, *world(2, 1), *settings]
    done = login.type(*words, "slurm.nodelist=node1,node2", env=env)
    assert done.returncode == 0, done.stdout + done.stderr + login.console(name)


def test_greetings_twenty_interfaces_and_unbound_tasks_change_nothing(
    cluster: Cluster, login: LoginNode, greeting_nodes: None
) -> None:
    submit(login, "greeted")

    console = login.console("greeted")
    assert "the fastest network that all 2 nodes are on" in console
    assert "did not answer" not in console
    for rank in range(2):
        assert "threads: 1\n" in login.run("greeted").rank_log(0, rank).read_text()


def test_a_home_that_is_not_writable_csh_and_another_locale_change_nothing(cluster: Cluster, login: LoginNode) -> None:
    home = login.folder / "home"
    home.mkdir(mode=0o555)
    environ = {"HOME": str(home), "SHELL": "/bin/csh", "LANG": "tr_TR.ISO-8859-9", "LC_ALL": "tr_TR.ISO-8859-9"}
    assert cluster.run("touch", str(home / "file"), check=False).returncode != 0, f"{USER} can write {home}"

    submit(login, "abroad", env=environ)

    assert login.status("abroad")["state"] == "finished"
    assert list(home.iterdir()) == []
