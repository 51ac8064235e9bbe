"""Another user of the cluster attacks the ranks of a run: nothing of theirs is unpickled, and a flood of connections ends no run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode, world

STRANGER = "nobody"
SECONDS = 12.0
SCRIPT = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(150):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"step": step, "rank": dist.get_rank()})
    assert [one["rank"] for one in found] == list(range(dist.get_world_size()))
    time.sleep(0.05)
dist.destroy_process_group()
print("exchanged all", flush=True)
"""


@dataclass(frozen=True)
class Cell:
    """A run, and what the stranger does to it."""

    launcher: str
    what: str
    nodes: int
    attacks: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.launcher}-{self.what}-{self.nodes}-{'-'.join(self.attacks)}"


ATTACKS = [("flood",), ("flood", "join"), ("flood", "overwrite")]
CELLS = [
    Cell(launcher, what, nodes, attacks)
    for launcher, what, nodes, attacks in product(("agent", "srun", "torchrun"), ("recipe", "script"), (2, 1), ATTACKS)
    if launcher == "agent" or nodes == 2
]
SHORT = {"agent-script-2-flood-join"}


def attack(login: LoginNode, name: str, cell: Cell) -> dict[str, Any]:
    """Let the stranger at the place where the ranks meet, from the node beside rank zero's, or from the same one."""
    meeting = login.cluster.wait_for(lambda: re.search(r"ranks meet at (\S+) port (\d+)", login.console(name)), 90)
    assert meeting is not None
    job = login.status(name)["job_id"]
    nodes = login.cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").stdout.strip()
    first, *_, last = login.cluster.run("scontrol", "show", "hostnames", nodes).stdout.split() * 2
    node = first if cell.nodes == 1 else last
    program = login.folder / "stranger.py"
    words = [sys.executable, program, meeting[1], meeting[2], login.folder / "unpickled", str(SECONDS), *cell.attacks]
    said = login.cluster.run(*words, node=node, user=STRANGER, check=False, timeout=120)
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def submit(login: LoginNode, name: str, cell: Cell) -> None:
    settings = [
        *world(cell.nodes, 2 // cell.nodes),
        f"launcher={cell.launcher}",
        f"name={name}",
        "restart.hang_timeout_s=20",
    ]
    if cell.what == "script":
        (login.folder / "exchanges.py").write_text(SCRIPT)
        done = login.type("submit", "--cluster", "slurm", *settings, "--", "python", "exchanges.py")
    else:
        login.add_recipe(ROOT / "tests" / "slurm" / "faulty_recipe.py")
        recipe = ["recipe.target=faulty_recipe:build", "recipe.args={}", "recipe.args.load_s=0.02", "train.epochs=1"]
        done = login.type(
            "submit",
            "digits.yaml",
            "--cluster",
            "slurm",
            *settings,
            *recipe,
            "checkpoint.every_steps=3",
            "checkpoint.keep_best=0",
        )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.name, marks=() if cell.name in SHORT else (pytest.mark.long, pytest.mark.campaign))
        for cell in CELLS
    ],
)
def test_a_stranger_at_the_ranks_port_has_nothing_unpickled(cell: Cell, login: LoginNode) -> None:
    """Who only connects delays nothing; who takes keys or a rank's place may end the attempt, or hold it while its ranks meet."""
    shutil.copy(ROOT / "tests" / "slurm" / "stranger.py", login.folder)
    (login.folder / "stranger.py").chmod(0o644)
    login.folder.chmod(0o755)
    submit(login, "run", cell)

    done = attack(login, "run", cell)

    sys.stdout.write(f"{cell.name}: {done}\n")  # the campaign shows it
    assert done["connected"] > 10
    if cell.attacks == ("flood",):
        state = login.await_state("run", "finished", "failed", "no_progress")
        assert state["state"] == "finished", login.console("run")
    assert not (login.folder / "unpickled").exists()


@pytest.mark.long
def test_ranks_of_one_node_cannot_be_reached_from_another(login: LoginNode) -> None:
    cell = Cell("agent", "script", 1, ())
    submit(login, "alone", cell)

    assert login.await_state("alone", "finished", "failed")["state"] == "finished", login.console("alone")
    assert "ranks meet at 127.0.0.1 port" in login.console("alone")
