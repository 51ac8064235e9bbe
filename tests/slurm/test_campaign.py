"""The campaign on the cluster: every fault by every launcher, and thirty in a row on one run."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from ddp_hpc.prove.drill import scenario
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_queued_job
from ddp_hpc.watch.samples import read_steps_taken, used_twice
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import node_is_down
from tests.slurm.matrix import FAULTS, ORDER, How, try_cell
from tests.slurm.runs import LoginNode
from tests.slurm.survival_table import LAUNCHERS, add_row, read_results, write_results

pytestmark = pytest.mark.campaign
NUM_FAULTS = 30
SEED = int(os.environ.get("DDP_HPC_SEED", random.SystemRandom().randrange(10_000)))
LONG = ("train.max_steps=2500", "train.epochs=125", "eval.every_epochs=100", "log.every_steps=100")
CELLS = [(fault, how) for fault, hows in FAULTS.items() for how in hows]
IDS = [re.sub(r"\W+", "-", f"{fault} {how.told}").strip("-") for fault, how in CELLS]


def submit(login: LoginNode, name: str, *words: str, timeout: float = 300) -> RunDir:
    shutil.copy(scenario.CONFIG, login.folder)
    argv = ["submit", scenario.CONFIG.name, f"name={name}", "--cluster", "slurm", "train.record_samples=true", *words]
    done = login.type(*argv, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr + login.console(name)
    return login.run(name)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("fault", "how"), CELLS, ids=IDS)
def test_a_run_survives(cluster: Cluster, login: LoginNode, fault: str, how: How) -> None:
    """One line of the table; what came of each cell is written down at once."""
    rows = []

    for launcher in LAUNCHERS:
        if how.site:
            cluster.reconfig(**how.site)
        rows.append(try_cell(login, fault, how, launcher))
        add_row(rows[-1], order=ORDER)
        print(json.dumps(rows[-1], indent=1), flush=True)  # noqa: T201  it lasts half an hour
        cluster.mend()

    assert [row for row in rows if row["verdict"] != "PASS"] == []


# --- thirty faults in a row --------------------------------------------------------------------------------------------


def hand(deed: str, kind: str) -> Callable[[LoginNode, RunDir, str], None]:
    def act(login: LoginNode, run: RunDir, node: str) -> None:
        argv = [sys.executable, "-m", "ddp_hpc.prove.drill.injector", str(run.path), deed, kind]
        login.cluster.run(*argv, node=node, check=False)  # it may be gone already

    return act


def signal(name: str) -> Callable[[LoginNode, RunDir, str], None]:
    def act(login: LoginNode, run: RunDir, node: str) -> None:
        job = read_queued_job(run)
        assert job is not None
        login.cluster.run("scancel", f"--signal={name}", job.job_id, check=False)

    return act


def take_node_away(login: LoginNode, run: RunDir, node: str) -> None:
    """Cut its power for as long as it takes Slurm to notice; the run may need it to go on, where others are left out."""
    login.cluster.kill(node)
    login.cluster.wait_for(lambda: node_is_down(login.cluster, node), 150)
    login.cluster.boot(node)


DEEDS: Mapping[str, tuple[int, Callable[[LoginNode, RunDir, str], None]]] = {
    "kill a worker": (8, hand("kill", "worker")),
    "kill an agent": (4, hand("kill", "agent")),
    "freeze a worker": (3, hand("freeze", "worker")),
    "slow a worker down": (3, hand("stutter", "worker")),
    "SIGTERM to the steps": (4, signal("TERM")),
    "SIGUSR2 to the steps": (4, signal("USR2")),
    "cut the power of a node": (2, take_node_away),
}
"""What may happen, how often beside the others, and how."""


@pytest.mark.timeout(3600)
def test_a_run_survives_thirty_faults_in_a_row(cluster: Cluster, login: LoginNode) -> None:
    chance = random.Random(SEED)
    print(f"seed {SEED} (DDP_HPC_SEED)", flush=True)  # noqa: T201  so that it can be repeated
    undisturbed = submit(login, "undisturbed", *LONG, "--wait", timeout=900)
    run = submit(login, "hit", *LONG, "restart.hang_timeout_s=15")

    names = chance.choices(list(DEEDS), [weight for weight, _ in DEEDS.values()], k=NUM_FAULTS)
    for number, name in enumerate(names, 1):
        step = await_progress(cluster, run, chance.randint(2, 8))
        assert not run.done.exists(), f"it was over after {number - 1} faults: make it longer"
        node = chance.choice(Ledger.read(run).attempts[-1].nodes)
        print(f"{number:2d} step {step:4d}: {name} on {node}", flush=True)  # noqa: T201  it lasts a while
        DEEDS[name][1](login, run, node)
    cluster.wait_for(run.done.exists, 900)

    taken, attempts = read_steps_taken(run), Ledger.read(run).attempts
    story = {"seed": SEED, "faults": dict(Counter(names)), "attempts": len(attempts)}
    story |= {"steps": len(taken.steps), "steps_taken_again": taken.num_repeated}
    print(json.dumps(story), flush=True)  # noqa: T201  it lasts a while
    assert login.digest("hit") == login.digest("undisturbed")
    assert taken.steps == read_steps_taken(undisturbed).steps
    assert used_twice(taken) == []
    cluster.wait_for(lambda: not left_over(cluster, run), 30)
    assert [path.name for path in run.checkpoints.iterdir() if not path.name.startswith("step-")] == []
    assert sorted(path.name for path in run.path.rglob("*.tmp")) == []
    assert not run.stop_request.exists()
    write_results({**read_results(), "in_a_row": story})


def await_progress(cluster: Cluster, run: RunDir, num_checkpoints: int) -> int:
    """Return the newest committed step, once so many more checkpoints are there than now, or the run is over."""
    since = max(committed_steps(run), default=0)

    def is_there() -> bool:
        return run.done.exists() or max(committed_steps(run), default=0) >= since + 10 * num_checkpoints

    cluster.wait_for(is_there, 240)
    return max(committed_steps(run), default=0)


def left_over(cluster: Cluster, run: RunDir) -> list[str]:
    """Return the processes of a run on any node."""
    found = [
        cluster.run("pgrep", "--list-full", "--full", str(run.path), node=node, user="root", check=False).stdout
        for node in cluster.settings.workers
    ]
    return [line for text in found for line in text.splitlines() if "pgrep" not in line]
