"""The faults of a drill, as a table: what each does, by whose power, and what it may cost."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.drill.hand import HAND
from ddp_hpc.errors import ConfigError
from ddp_hpc.records import read_progress
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client
from ddp_hpc.slurm.answers import read_answers
from ddp_hpc.spec import RunSpec

DISK_PATIENCE_S = 60.0
"""How long a run may take to notice that it cannot save."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run at work, to which a fault is about to happen."""

    run: RunDir
    spec: RunSpec
    job_id: str
    nodes: Sequence[str]
    """The batch host first."""
    node: str
    """Which of them it hits."""
    signal: str
    """By what name a preemption comes (`TERM`, `USR2`)."""
    environ: Mapping[str, str]


@dataclass(frozen=True)
class Deed:
    """What was done."""

    told: str
    at: float | None = None
    """When, in seconds since the epoch; None where only the run's silence says."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    told: str
    """What it is, in words."""
    inflict: Callable[[Scene], Deed] | None = None
    """Makes it by a user's own power; None where that takes an administrator."""
    by_hand: str = ""
    """What to ask somebody to do instead (`--by-hand`); empty where there is nothing to ask for."""
    settings: tuple[str, ...] = ()
    """Of the run that suffers it."""
    train_settings: tuple[str, ...] = ()
    """Of both runs."""
    is_graceful: bool = False
    """Whether the run is told beforehand, and so must lose nothing."""
    restarts: bool = True
    """Whether the workers end by it and are started again."""


def _hand(scene: Scene, deed: str, kind: str, node: str) -> Deed:
    """Do something to a process of the run, on a node of its job."""
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", HAND, str(scene.run.path), deed, kind, f"--mark={mark}"]
    done = next(iter(read_answers(client.run_in_job(scene.job_id, node, command, scene.environ), mark).values()), None)
    if done is None:
        raise ConfigError(
            f"{deed} {kind} on {node} may be done or not: {HAND} gave no answer there. Start the drill again."
        )
    return Deed(f"{deed} {kind} {done['pid']} on {node}", float(done["at"]))


def _preempt(scene: Scene) -> Deed:
    """Send what a preemption sends: SIGTERM goes to the steps, the job's own signal to where it was asked for."""
    at, to_batch = time.time(), scene.signal != "TERM" and scene.spec.slurm.signal_to == "batch"
    client.signal(scene.job_id, scene.signal, scene.environ, batch_only=to_batch)
    return Deed(f"sent {scene.signal} to the job's {'batch shell' if to_batch else 'steps'}, as a preemption does", at)


def _wait_for_limit(scene: Scene) -> Deed:  # noqa: ARG001  every fault's signature
    return Deed("the job's time limit is a minute; Slurm looks at limits every 30 s")


def _kill_worker(scene: Scene) -> Deed:
    return _hand(scene, "kill", "worker", scene.node)


def _kill_agent(scene: Scene) -> Deed:
    """Kill what started a node's workers: our agent, torchrun; or srun, which stands on the batch host."""
    is_srun = scene.spec.launcher == "srun"
    return _hand(scene, "kill", "srun" if is_srun else "agent", scene.nodes[0] if is_srun else scene.node)


def _hang(scene: Scene) -> Deed:
    return _hand(scene, "freeze", "worker", scene.node)


def _slow_rank(scene: Scene) -> Deed:
    return _hand(scene, "stutter", "worker", scene.node)


def _fill_disk(scene: Scene) -> Deed:
    """Forbid the run to write checkpoints until it has noticed: what a user can do of a full disk on a shared one."""
    writing = next(iter(scene.run.checkpoints.glob("attempt-*.writing")), scene.run.checkpoints)
    mode, at = writing.stat().st_mode, time.time()
    writing.chmod(0o500)
    try:
        deadline = time.monotonic() + DISK_PATIENCE_S
        while (progress := read_progress(scene.run)) is None or progress.save_error is None:
            if time.monotonic() > deadline or scene.run.done.exists():
                raise ConfigError(
                    f"{writing} was made read-only, but no save failed. Is this user root, whom that does not stop?"
                )
            time.sleep(0.05)
    finally:
        writing.chmod(mode)
    return Deed(f"no checkpoint could be written for {time.time() - at:.1f} s ({progress.save_error})", at)


FAULTS: Mapping[str, Fault] = {
    "preempt": Fault(
        told="the job is told to make room",
        inflict=_preempt,
        by_hand="Preempt job {job_id} now: submit a job that needs {nodes} to a partition or QOS that goes before",
        is_graceful=True,
    ),
    "timeout": Fault(
        told="the job's time limit comes near, more than once",
        inflict=_wait_for_limit,
        settings=("resources.time_limit_min=2", "slurm.signal_lead_s=30"),  # Slurm may warn a minute earlier
        train_settings=("train.max_steps=4000", "train.epochs=200"),
        is_graceful=True,
    ),
    "kill-worker": Fault(told="a worker is killed", inflict=_kill_worker),
    "kill-agent": Fault(told="what starts a node's workers is killed", inflict=_kill_agent),
    "kill-node": Fault(told="a node loses its power", by_hand="Cut the power of {node} now"),
    "cut-network": Fault(told="a node loses its network", by_hand="Cut the network of {node} now"),
    "hang": Fault(told="a worker stands still", inflict=_hang, settings=("restart.hang_timeout_s=15",)),
    "disk-full": Fault(
        told="no checkpoint can be written for a while",
        inflict=_fill_disk,
        by_hand="Fill the disk under {run} now, and free it again when `ddp-hpc status {run}` says that a save failed",
        restarts=False,
    ),
    "slow-rank": Fault(
        told="a worker stands still now and then",
        inflict=_slow_rank,
        settings=("restart.hang_timeout_s=30",),
        restarts=False,
    ),
}
