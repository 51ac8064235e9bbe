"""How soon a run is safe, and trains again: after a signal, and after a death; beside torchrun's and submitit's ways.

On the test cluster (real Slurm, so as root), two nodes of two workers each, steps of some 25 ms, gloo. Slurm holds a
requeued job back for two minutes if the site has not said otherwise; both kinds of site are measured.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.rounds import Benchmark, Row, Samples, Verdict, judge, run_rounds, shown
from ddp_hpc.prove.drill import injector, scenario
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path, committed_steps
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_queued_job
from tests.slurm.cluster import USER, Cluster, booted, why_not
from tests.slurm.runs import LoginNode

ROOT = Path(__file__).resolve().parent.parent
PEER = str(ROOT / "benchmarks" / "survival_peer.py")
COMMITTED, AGAIN = "signal_to_commit_s", "to_next_step_s"
QUICK, DEFAULT = "cred_expire=5", "cred_expire=120"
"""How long Slurm holds a requeued job back: on a site that has changed that, and on others."""
PATIENCE_S = 240
FOR_EVER = ("train.max_steps=1000000", "train.epochs=1000000", "eval.every_epochs=1000000", "train.record_samples=true")

LIMIT = "limit: Slurm's requeue of an empty job"
IN_PLACE, BY_SRUN, TORCHRUN = (
    "a worker killed: ddp_hpc, agent",
    "a worker killed: ddp_hpc, srun",
    "a worker killed: torchrun --max-restarts",
)
AGENT_KILLED = "an agent killed: ddp_hpc"
NODE_LOST = "a node's power cut: ddp_hpc"
REQUEUED, SUBMITIT = "asked to requeue: ddp_hpc", "asked to requeue: submitit"
WAITED, SUCCESSOR = "held back 120 s: ddp_hpc, `--wait`", "held back 120 s: ddp_hpc, successor"
SUBMITIT_HELD = "held back 120 s: submitit"


@dataclass
class Lab:
    """The cluster; `mend` makes a site of it again that holds requeued jobs back but briefly."""

    cluster: Cluster

    def fresh_login(self, hold: str) -> LoginNode:
        """Return the head with a directory of its own, the site being of a kind."""
        if hold != QUICK:
            self.cluster.reconfig(AuthInfo=hold)
        folder = Path(tempfile.mkdtemp(dir=self.cluster.shared))
        shutil.chown(folder, USER, USER)
        return LoginNode(self.cluster, folder)

    def until(self, condition: Callable[[], object]) -> float:
        """Return when a condition is seen to hold: it is looked at every 5 ms."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)
        return time.time()


# --- ours --------------------------------------------------------------------------------------------------------------

Strike = Callable[[Lab, RunDir], float]
"""Does harm to a run; returns when."""


def kill(kind: str) -> Strike:
    """Return what kills the youngest process of a kind; from outside the nodes, where all of them are seen."""

    def strike(_: Lab, run: RunDir) -> float:
        pid, at = injector.pids_by_kind(injector.list_processes(), str(run.path))[kind][-1], time.time()
        psutil.Process(pid).send_signal(signal.SIGKILL)
        return at

    return strike


def tell(lab: Lab, run: RunDir) -> float:
    """Have Slurm signal the steps, as it does before it takes nodes away."""
    job = read_queued_job(run)
    assert job is not None
    return send_usr2(lab, job.job_id)


def send_usr2(lab: Lab, job_id: str) -> float:
    """Send the signal; return when."""
    at = time.time()
    lab.cluster.run("scancel", "--signal=USR2", job_id)
    return at


def cut_power(lab: Lab, _: RunDir) -> float:
    """Cut the power of the job's second node, which boots again with the next row."""
    at = time.time()
    lab.cluster.kill("node2")
    return at


def ours(
    lab: Lab, strike: Strike, *settings: str, hold: str = QUICK, every_steps: int = 10, waits: bool = False
) -> Mapping[str, float]:
    """Start a run, strike it when it is under way, and see it take its next step."""
    login = lab.fresh_login(hold)
    shutil.copy(scenario.CONFIG, login.folder)
    words = ["submit", scenario.CONFIG.name, "name=hit", "--cluster", "slurm", *FOR_EVER, *settings]
    words += [f"checkpoint.every_steps={every_steps}", *(["--wait"] if waits else [])]
    submitted = lab.cluster.popen(sys.executable, "-m", "ddp_hpc", *words, cwd=login.folder)
    run = login.run("hit")
    first, second = run.rank_samples(0, 0), run.rank_samples(1, 0)
    lab.until(lambda: first.exists() and first.stat().st_size > 1000)  # a few dozen steps
    if every_steps < 100:
        lab.until(lambda: committed_steps(run))
    if not waits:
        submitted.wait()
    at = strike(lab, run)
    again_at = lab.until(lambda: second.exists() and second.stat().st_size)
    figures = {AGAIN: again_at - at}
    if strike is tell:
        figures[COMMITTED] = checkpoint_path(run, min(committed_steps(run))).stat().st_ctime - at
    login.type("cancel", "hit")
    lab.cluster.mend()
    return figures


# --- theirs ------------------------------------------------------------------------------------------------------------


def torchrun(lab: Lab) -> Mapping[str, float]:
    """Kill a worker of torchrun's, which starts all of them again."""
    login = lab.fresh_login(QUICK)
    starts = (  # a node's own full name means nothing to another here, as at many sites
        f"exec {sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=3"
        " --local-addr=$SLURMD_NODENAME --rdzv-backend=c10d --rdzv-endpoint=$(scontrol show hostnames | head -n1):29555"
        f" --rdzv-id=peer {PEER} {login.folder}"
    )
    output = f"--output={login.folder}/said"
    options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--mem=8G", output]
    _sbatch(login, *options, f"--wrap=srun bash -c '{starts}'")
    lab.until((login.folder / "last.pt").exists)
    before = _stepped(login)
    workers = [one.pid for one in injector.list_processes() if PEER in one.argv and str(login.folder) in one.argv]
    agents = [one.pid for one in injector.list_processes() if "torch.distributed.run" in one.argv]
    pid, at = max({*workers} - {*agents}), time.time()
    psutil.Process(pid).send_signal(signal.SIGKILL)
    again_at = lab.until(lambda: _stepped(login) > before)
    lab.cluster.mend()
    return {AGAIN: again_at - at}


def submitit(lab: Lab, hold: str) -> Mapping[str, float]:
    """Tell submitit's job to make room: it has rank zero save, and requeues itself."""
    login = lab.fresh_login(hold)
    argv = [sys.executable, PEER, str(login.folder), "--submit"]
    job_id = lab.cluster.run(*argv, cwd=login.folder, env=_peers_environ()).stdout.strip()
    lab.until(lambda: _stepped(login))
    time.sleep(1.0)  # under way, as ours is
    at = send_usr2(lab, job_id)
    again_at = lab.until(lambda: _stepped(login) > 1)
    figures = {AGAIN: again_at - at, COMMITTED: (login.folder / "last.pt").stat().st_mtime - at}
    lab.cluster.mend()
    return figures


def empty_job(lab: Lab) -> Mapping[str, float]:
    """Have a job requeue itself that does nothing else."""
    login = lab.fresh_login(QUICK)
    stamp = f"date +%s.%N >> {login.folder}/stamps"
    _sbatch(
        login, "--output=/dev/null", f'--wrap={stamp}; [ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID'
    )
    stamps = login.folder / "stamps"
    lab.until(lambda: stamps.exists() and len(stamps.read_text().splitlines()) == 2)
    first, second = map(float, stamps.read_text().split())
    lab.cluster.mend()
    return {AGAIN: second - first}


def _peers_environ() -> dict[str, str]:
    """Return what peers need: the network that the nodes share, where their script lies, and a store for each start.

    With torchrun's own store in common, two nodes never met again: they count restarts differently, and look for each other
    under different keys (torch 2.15).
    """
    return {
        "GLOO_SOCKET_IFNAME": "ib0",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _sbatch(login: LoginNode, *options: str) -> subprocess.CompletedProcess[str]:
    return login.cluster.run("sbatch", *options, cwd=login.folder, env=_peers_environ())


def _stepped(login: LoginNode) -> int:
    """Count how often a training of theirs has begun to step."""
    return len(list(login.folder.glob("stepped-*")))


# --- side by side ------------------------------------------------------------------------------------------------------


def _rows(lab: Lab) -> Sequence[Row]:
    rarely = 1_000_000
    return [
        Row(LIMIT, partial(empty_job, lab)),
        Row(IN_PLACE, partial(ours, lab, kill("worker"))),
        Row(BY_SRUN, partial(ours, lab, kill("worker"), "launcher=srun")),
        Row(TORCHRUN, partial(torchrun, lab)),
        Row(AGENT_KILLED, partial(ours, lab, kill("agent"))),
        Row(NODE_LOST, partial(ours, lab, cut_power)),
        Row(REQUEUED, partial(ours, lab, tell, every_steps=rarely)),
        Row(SUBMITIT, partial(submitit, lab, QUICK)),
        Row(WAITED, partial(ours, lab, tell, hold=DEFAULT, every_steps=rarely, waits=True)),
        Row(SUCCESSOR, partial(ours, lab, tell, "restart.by=successor", hold=DEFAULT, every_steps=rarely)),
        Row(SUBMITIT_HELD, partial(submitit, lab, DEFAULT)),
    ]


def measure(rounds: int) -> Samples:
    """Boot a cluster, and measure every rung of the ladder there."""
    if reason := why_not():
        raise SystemExit(f"no Slurm cluster can be booted here: {reason}")
    with booted("bench") as cluster:
        return run_rounds("survival", _rows(Lab(cluster)), rounds=rounds, warm_up=0)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold ours against the peers'."""
    return [
        judge("a worker killed: torchrun's time, by our agent's", samples.ratios(AGAIN, over=TORCHRUN, under=IN_PLACE)),
        judge("asked to requeue: submitit's time, by ours", samples.ratios(AGAIN, over=SUBMITIT, under=REQUEUED)),
        judge("held back 120 s: submitit's, by `--wait`'s", samples.ratios(AGAIN, over=SUBMITIT_HELD, under=WAITED)),
        judge(
            "held back 120 s: submitit's, by a successor's", samples.ratios(AGAIN, over=SUBMITIT_HELD, under=SUCCESSOR)
        ),
        judge("asked to requeue: our time, by an empty job's", samples.ratios(AGAIN, over=REQUEUED, under=LIMIT)),
    ]


BENCHMARK = Benchmark(
    name="survival",
    title="From a signal or a death to safety, and to the next step",
    rounds=3,
    measure=measure,
    columns=[shown("committed after, s", COMMITTED), shown("next step after, s", AGAIN)],
    verdicts=verdicts,
)
