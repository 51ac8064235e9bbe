"""Launchers: from a spec to the command that starts its workers. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp_hpc.job.meeting import Meeting
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.steps import step_argv
from ddp_hpc.spec import RunSpec

WORKER = "ddp_hpc.train.worker"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is to be started."""

    spec: RunSpec
    run: RunDir
    attempt: int
    job_id: str
    meeting: Meeting


def agent_argv(spec: RunSpec, run: RunDir, *, attempt: int) -> list[str]:
    """Return the command of the node agent on this machine."""
    return [*_module("ddp_hpc.job.agent", run, attempt), *_crew(spec)]


def step_of_agents(start: Start) -> list[str]:
    """Return the command that starts one agent a node."""
    agent = agent_argv(start.spec, start.run, attempt=start.attempt)
    return [*step_argv(start.spec, tasks_per_node=1), *agent, "--meet", str(start.meeting)]


def step_of_tasks(start: Start) -> list[str]:
    """Return the command that starts one task a worker."""
    task = _module("ddp_hpc.job.task", start.run, start.attempt)
    tasks_per_node = start.spec.resources.local_world_size
    return [*step_argv(start.spec, tasks_per_node=tasks_per_node), *task, "--meet", str(start.meeting)]


def step_of_torchrun(start: Start) -> list[str]:
    """Return the command that starts one torchrun a node, through `job.torchrun_node`, which knows the node's address."""
    resources = start.spec.resources
    node = [sys.executable, "-m", "ddp_hpc.job.torchrun_node", *_crew(start.spec), "--meet", str(start.meeting), "--"]
    options = [
        f"--nnodes={resources.nodes}",
        f"--nproc-per-node={resources.local_world_size}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={start.meeting.endpoint}",
        f"--rdzv-id={start.job_id}-{start.attempt}",
        f"--max-restarts={start.spec.torchrun.max_restarts}",
    ]
    _, *task = _module("ddp_hpc.job.task", start.run, start.attempt)
    return [*step_argv(start.spec, tasks_per_node=1), *node, *options, *task]


def _module(name: str, run: RunDir, attempt: int) -> list[str]:
    return [sys.executable, "-m", name, str(run.path), "--worker", WORKER, "--attempt", str(attempt)]


def _crew(spec: RunSpec) -> list[str]:
    resources = spec.resources
    cpus = [] if resources.cpus_per_worker is None else ["--cpus-per-worker", str(resources.cpus_per_worker)]
    return ["--num-workers", str(resources.local_world_size), *cpus]


LAUNCHERS: Mapping[str, Callable[[Start], list[str]]] = {
    "agent": step_of_agents,
    "srun": step_of_tasks,
    "torchrun": step_of_torchrun,
}
"""Key `launcher` -> the command of the job's one step."""
