"""The table of faults: what each does, who can cause it, and what it may cost."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.framing import read_answers
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.prove.drill.injector import INJECTOR_MODULE
from ddp_hpc.run.run_dir.ledger import Attempt
from ddp_hpc.run.run_dir.records import read_progress

DISK_PATIENCE_S = 60.0
"""How long to wait until a save of the run fails."""

Injection = tuple[str, float | None]
"""What was injected; and when, in seconds since the epoch, or None if only the run's last step tells."""
Inject = Callable[[SubmitRequest, Attempt, str, str], Injection]
"""Injects a fault into an attempt of a run, on a node of its job; the last argument is the signal that `preempt` sends."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    description: str
    inject: Inject | None = None
    """Works with a user's permissions; None if the fault takes an administrator."""
    by_hand: str = ""
    """What to ask an administrator to do (`--by-hand`); empty if nobody needs to do anything."""
    settings: tuple[str, ...] = ()
    """Settings of the run with the fault."""
    train_settings: tuple[str, ...] = ()
    """Settings of both runs."""
    is_graceful: bool = False
    """Whether the run gets a signal in advance, so that it must lose no step."""
    restarts: bool = True
    """Whether the workers exit because of the fault, and another attempt starts."""


def _node_injector(action: str, kind: str) -> Inject:
    """Return what applies an action to a process of the run on the node; srun runs on the batch host."""

    def inject(request: SubmitRequest, attempt: Attempt, node: str, _: str) -> Injection:
        is_by_srun = kind == "agent" and request.spec.launcher == "srun"
        what, where = ("srun", attempt.nodes[0]) if is_by_srun else (kind, node)
        mark = secrets.token_hex(8)
        command = [sys.executable, "-m", INJECTOR_MODULE, str(request.run.path), action, what, f"--mark={mark}"]
        answers = read_answers(client.run_in_job(attempt.job_id, where, command, request.environ), mark)
        answer = next(iter(answers.values()), None)
        if answer is None:
            raise ConfigError(
                f"The drill started a job step on {where} that should {action} a {what} process, but got no answer from it, so it does "
                "not know whether the fault was injected. Start the drill again."
            )
        return f"{action} {what} process {answer['pid']} on {where}", float(answer["at"])

    return inject


def _preempt(request: SubmitRequest, attempt: Attempt, _: str, signal: str) -> Injection:
    """Send what Slurm sends for a preemption."""
    # SIGTERM goes to the job steps, the signal of `sbatch --signal` to the steps or, with `B:`, to the batch shell only:
    # https://slurm.schedmd.com/preempt.html and https://slurm.schedmd.com/sbatch.html#OPT_signal
    at, to_batch = time.time(), signal != "TERM" and request.spec.slurm.signal_to == "batch"
    client.signal(attempt.job_id, signal, request.environ, batch_only=to_batch)
    return f"sent SIG{signal} to the job's {'batch shell' if to_batch else 'steps'}, as Slurm does for a preemption", at


def _fill_disk(request: SubmitRequest, *_: object) -> Injection:
    """Make the checkpoint directory read-only until a save fails: a user cannot fill a shared disk."""
    # Not the attempt's own directory in it: progress.json goes through that, and says that a save has failed.
    run, folder = request.run, request.run.checkpoints
    mode, at = folder.stat().st_mode, time.time()
    folder.chmod(0o500)
    try:
        deadline = time.monotonic() + DISK_PATIENCE_S
        while (progress := read_progress(run)) is None or progress.save_error is None:
            if time.monotonic() > deadline or run.done.exists():
                raise ConfigError(
                    f"The drill made {folder} read-only, but no save failed within {DISK_PATIENCE_S:.0f} s, or before "
                    "the run finished. Root can write to read-only directories: run the drill as another user."
                )
            time.sleep(0.05)
    finally:
        folder.chmod(mode)
    return f"made {folder} read-only for {time.time() - at:.1f} s ({progress.save_error})", at


FAULTS: Mapping[str, Fault] = {
    "preempt": Fault(
        description="Slurm preempts the job",
        inject=_preempt,
        by_hand="Preempt job {job_id} now: submit a job that needs {nodes} to a partition or QOS that preempts this job's",
        is_graceful=True,
    ),
    "timeout": Fault(
        description="the job reaches its time limit, more than once",
        inject=lambda *_: (
            "waiting for the job's time limit (`resources.time_limit_min`), which Slurm checks every 30 s",
            None,
        ),
        # Slurm may send its signal up to 60 s earlier: https://slurm.schedmd.com/sbatch.html#OPT_signal
        settings=("resources.time_limit_min=2", "slurm.signal_lead_s=30"),
        train_settings=("train.max_steps=4000", "train.epochs=200"),
        is_graceful=True,
    ),
    "kill-worker": Fault(description="a worker is killed", inject=_node_injector("kill", "worker")),
    "kill-agent": Fault(
        description="the process that started a node's workers (agent, torchrun or srun) is killed",
        inject=_node_injector("kill", "agent"),
    ),
    "kill-node": Fault(description="a node loses power", by_hand="Cut the power of {node} now"),
    "cut-network": Fault(description="a node loses its network", by_hand="Cut the network of {node} now"),
    "hang": Fault(
        description="a worker hangs", inject=_node_injector("freeze", "worker"), settings=("restart.hang_timeout_s=15",)
    ),
    "disk-full": Fault(
        description="checkpoints cannot be written for a while",
        inject=_fill_disk,
        by_hand="Fill the disk under {run} now, and free it again when `ddp-hpc status {run}` shows a save error",
        restarts=False,
    ),
    "slow-rank": Fault(
        description="a worker is slow: it is suspended for a moment, several times",
        inject=_node_injector("stutter", "worker"),
        settings=("restart.hang_timeout_s=30",),
        restarts=False,
    ),
}
