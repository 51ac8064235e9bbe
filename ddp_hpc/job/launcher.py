"""Launchers: from a spec to the command that starts its workers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp_hpc.containers import BARE, CommandWrapper
from ddp_hpc.job.wire.endpoint import Meeting
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.steps import step_argv
from ddp_hpc.spec import RunSpec

WORKER = "ddp_hpc.train.worker"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What to start where each attempt is a job step of its own."""

    spec: RunSpec
    run: RunDir
    attempt: int
    meeting: Meeting
    wrapper: CommandWrapper = BARE


def agent_argv(spec: RunSpec, run: RunDir, wrapper: CommandWrapper = BARE) -> list[str]:
    """Return the command of the node agent on this machine."""
    return [*wrapper.command, "-m", "ddp_hpc.job.node.agent", str(run.path), "--worker", WORKER, *_crew(spec)]


def step_of_agents(spec: RunSpec, run: RunDir, wrapper: CommandWrapper = BARE) -> list[str]:
    """Return the command that starts one agent on each node; each gets its orders over its standard input (`line`)."""
    return [*step_argv(spec, tasks_per_node=1), *wrapper.srun_args, *agent_argv(spec, run, wrapper), "--in-step"]


def step_of_tasks(start: Start) -> list[str]:
    """Return the command that starts one task a worker."""
    step = step_argv(start.spec, tasks_per_node=start.spec.resources.local_world_size)
    wrapper = start.wrapper
    return [*step, *wrapper.srun_args, *wrapper.command, *_task(start), "--meet", str(start.meeting)]


def step_of_torchrun(start: Start) -> list[str]:
    """Return the command that starts one torchrun a node, through `job.torchrun_node`, which knows the node's address."""
    resources, wrapper = start.spec.resources, start.wrapper
    meeting = ["--meet", str(start.meeting), "--token-file", str(start.run.rendezvous_token(start.attempt))]
    node = [*wrapper.command, "-m", "ddp_hpc.job.node.torchrun_node", *_crew(start.spec), *meeting, "--"]
    options = [
        f"--nnodes={resources.nodes}",
        f"--nproc-per-node={resources.local_world_size}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={start.meeting.endpoint}",
        f"--max-restarts={start.spec.torchrun.max_restarts}",
    ]
    return [*step_argv(start.spec, tasks_per_node=1), *wrapper.srun_args, *node, *options, *_task(start)]


def _task(start: Start) -> list[str]:
    options = ["--worker", WORKER, "--attempt", str(start.attempt)]
    return ["-m", "ddp_hpc.job.node.task", str(start.run.path), *options]


def _crew(spec: RunSpec) -> list[str]:
    resources = spec.resources
    cpus = [] if resources.cpus_per_worker is None else ["--cpus-per-worker", str(resources.cpus_per_worker)]
    return ["--num-workers", str(resources.local_world_size), *cpus]


STEPS: Mapping[str, Callable[[Start], list[str]]] = {
    "srun": step_of_tasks,
    "torchrun": step_of_torchrun,
}
"""Value of `launcher` -> the command of the job step of one attempt; agents have one step for all attempts."""
