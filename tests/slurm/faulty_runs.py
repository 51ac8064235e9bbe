"""Runs of a recipe that fails as it is told to, and what is to be found out of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from tests.slurm.cluster import Cluster
from tests.slurm.runs import LoginNode, world

RECIPE = Path(__file__).with_name("faulty_recipe.py")
STEPS = 120
FAULTY = (
    "recipe.target=faulty_recipe:build",
    "recipe.args={}",
    "train.epochs=6",
    "train.global_batch_size=24",
    "train.record_samples=true",
    "resources.cpus_per_worker=1",  # so many threads everywhere: sums are the same to the bit
    "checkpoint.every_steps=10",
    "checkpoint.keep_best=0",
    "log.every_steps=10",
)
"""120 steps of some 25 ms, in six epochs."""
MAY_LOSE = 20
"""Two intervals: a checkpoint may still be under way, until the next one waits for it."""


def attempts(login: LoginNode, name: str) -> list[Attempt]:
    return list(Ledger.read(login.run(name)).attempts)


def newest_step(login: LoginNode, name: str) -> int:
    return max(checkpoint_names.committed_steps(login.run(name)), default=0)


def slow_file(login: LoginNode) -> Path:
    """Return a file that slows a run down as `recipe.args.slow_while`: until it goes, the run does not finish."""
    path = login.folder / "slow"
    path.touch()
    return path


def job_id(login: LoginNode, name: str) -> str:
    record: dict[str, Any] = json.loads(login.run(name).submission.read_text())
    return str(record["job_id"])


def await_step(login: LoginNode, name: str, step: int = 10) -> None:
    """Return once a run has committed a step."""
    login.cluster.wait_for(lambda: newest_step(login, name) >= step, 180)


def await_first_end(login: LoginNode, name: str) -> None:
    """Return once a run's first attempt has ended."""
    login.cluster.wait_for(lambda: attempts(login, name)[0].ended_at is not None, 120)


def await_done(login: LoginNode, *names: str, timeout_s: float = 240) -> None:
    """Return once runs have finished, and their ledgers say so, which is a moment later."""

    def is_done(name: str) -> bool:
        return login.run(name).done.exists() and attempts(login, name)[-1].ended_at is not None

    try:
        login.cluster.wait_for(lambda: all(map(is_done, names)), timeout_s)
    except AssertionError as error:
        starts = login.cluster.run("sacct", "--duplicates", "--allocations", check=False).stdout
        ledgers = [
            f"--- {name}\n{login.run(name).attempts.read_text()}" for name in names
        ]  # first, as CI cuts what is long
        told = [f"--- {name}\n{login.console(name)}" for name in names if not is_done(name)]
        raise AssertionError("\n".join([*ledgers, starts, str(error), *told])) from error


def steps_taken(run: RunDir) -> Counter[int]:
    """Count how often rank zero took each step, over all attempts."""
    lines = (path.read_text().splitlines() for path in run.samples.glob("attempt-*/rank-0.jsonl"))
    return Counter(json.loads(line)["step"] for part in lines for line in part)


def samples_by_epoch(run: RunDir) -> dict[int, list[int]]:
    """Return the samples of each epoch, of each step as the newest attempt took it."""
    newest: dict[int, tuple[int, int, list[int]]] = {}
    for path in run.samples.glob("attempt-*/rank-*.jsonl"):
        attempt = int(path.parent.name.removeprefix("attempt-"))
        for line in path.read_text().splitlines():
            record = json.loads(line)
            known = newest.get(record["step"])
            if known is None or known[0] < attempt:
                newest[record["step"]] = known = (attempt, record["epoch"], [])
            if known[0] == attempt:
                known[2].extend(record["samples"])
    epochs: dict[int, list[int]] = {}
    for _, epoch, ids in newest.values():
        epochs.setdefault(epoch, []).extend(ids)
    return {epoch: sorted(ids) for epoch, ids in epochs.items()}


_UNBROKEN: dict[int, str] = {}
"""Digests of undisturbed runs by their number of workers, made when they are first needed."""


def unbroken_digest(login: LoginNode, world_size: int) -> str:
    """Return the digest of an undisturbed run, which is the same on one machine (`test_training`)."""
    name = f"unbroken-{world_size}"
    if world_size not in _UNBROKEN:
        words = ["submit", "digits.yaml", f"name={name}", "--cluster", "local", "--wait"]
        done = login.type(*words, *FAULTY, *world(1, world_size))
        assert done.returncode == 0, done.stdout + done.stderr
        _UNBROKEN[world_size] = login.digest(name)
    return _UNBROKEN[world_size]


def assert_unbroken(login: LoginNode, name: str, *, world_size: int, may_lose: int = 0) -> None:
    """Check that a run came to the bits of an undisturbed one, each sample once, with no more steps taken twice."""
    assert login.digest(name) == unbroken_digest(login, world_size)
    taken = steps_taken(login.run(name))
    assert sum(taken.values()) - STEPS <= may_lose, taken
    assert list(samples_by_epoch(login.run(name)).values()) == [list(range(480))] * 6


def signal_worker(cluster: Cluster, node: str, number: str, run: RunDir) -> None:
    """Send a signal to one worker of a run on a node."""
    code = (
        "import psutil, sys\n"
        "agents = [p for p in psutil.process_iter(['cmdline'])"
        " if 'ddp_hpc.job.node.agent' in (p.info['cmdline'] or []) and sys.argv[1] in p.info['cmdline']"
        " and 'srun' not in p.info['cmdline'][0]]\n"
        "workers = [child for agent in agents for child in agent.children()]\n"
        "workers[-1].send_signal(int(sys.argv[2]))\n"
    )
    cluster.run(sys.executable, "-c", code, str(run.path), number, node=node, user="root")


def kill_agents(cluster: Cluster, node: str, run: RunDir) -> None:
    """Kill the agent of a run on a node, and with it its workers."""
    cluster.run(
        "pkill",
        "--signal=KILL",
        "--full",
        f"^\\S*python\\S* -m ddp_hpc.job.node.agent {run.path} ",
        node=node,
        user="root",
    )


def node_is_down(cluster: Cluster, node: str) -> bool:
    """Ask by scontrol: on Slurm 24.11, sinfo went on for minutes without telling that a node was down (seen twice)."""
    return "State=DOWN" in cluster.run("scontrol", "--oneliner", "show", "node", node).stdout


def processes_of(cluster: Cluster, node: str, run: RunDir) -> str:
    """Return the command lines on a node that name a run."""
    listing: subprocess.CompletedProcess[str] = cluster.run(
        "pgrep", "--full", "--list-full", str(run.path), node=node, check=False
    )
    return "".join(line for line in listing.stdout.splitlines(keepends=True) if "pgrep" not in line)
