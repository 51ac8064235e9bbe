"""Launchers: from a spec, a workload and a world to the command that starts the workers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp_hpc.cluster.containers import BARE, CommandWrapper
from ddp_hpc.cluster.slurm.steps import step_argv
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.launch import LaunchSpec
from ddp_hpc.run.workload.protocol import Workload
from ddp_hpc.run.world import World


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What every attempt of a job starts."""

    spec: LaunchSpec
    run: RunDir
    workload: Workload
    world: World
    wrapper: CommandWrapper = BARE


def agent_argv(launch: Launch) -> list[str]:
    """Return the command of the node agent on this machine."""
    teardown_s = launch.workload.teardown_s
    limit = [] if teardown_s is None else ["--teardown-s", f"{teardown_s:g}"]
    stop = ["--stop-signal", launch.workload.stop_signal]
    worker = ["--worker", launch.workload.worker, *stop, *_nsys(launch), *limit, *_num_workers(launch)]
    return [*launch.wrapper.command, "-m", "ddp_hpc.job.node.agent", str(launch.run.path), *worker]


def step_of_agents(launch: Launch) -> list[str]:
    """Return the command that starts one agent on each node; each gets its orders over its standard input (`line`)."""
    return [*_step(launch, tasks_per_node=1), *agent_argv(launch), "--in-step"]


def step_of_tasks(launch: Launch, attempt: int, endpoint: Endpoint) -> list[str]:
    """Return the command that starts one task a worker."""
    step = _step(launch, tasks_per_node=launch.world.workers_per_node)
    return [*step, *launch.wrapper.command, *_task(launch, attempt), *_gpus(launch), "--meet", str(endpoint)]


def step_of_torchrun(launch: Launch, attempt: int, endpoint: Endpoint) -> list[str]:
    """Return the command that starts one torchrun a node, through `job.torchrun_node`, which knows the node's address."""
    world, sampled = launch.world, [f"--run={launch.run.path}", f"--attempt={attempt}"]
    module, stop = ["-m", "ddp_hpc.job.node.torchrun_node"], ["--stop-signal", launch.workload.stop_signal]
    node = [*module, *_num_workers(launch), *stop, *sampled, "--meet", str(endpoint), "--"]
    options = [
        f"--nnodes={world.num_nodes}",
        f"--nproc-per-node={world.workers_per_node}",
        f"--max-restarts={launch.spec.torchrun.max_restarts}",
    ]
    return [*_step(launch, tasks_per_node=1), *launch.wrapper.command, *node, *options, *_task(launch, attempt)]


def _step(launch: Launch, *, tasks_per_node: int) -> list[str]:
    cpus, teardown_s = launch.workload.cpus_per_worker, launch.workload.teardown_s
    wait_s = 0 if teardown_s is None else round(teardown_s)
    step = step_argv(launch.spec, launch.world, tasks_per_node=tasks_per_node, cpus_per_worker=cpus, wait_s=wait_s)
    return [*step, *launch.wrapper.srun_args]


def _task(launch: Launch, attempt: int) -> list[str]:
    options = ["--worker", launch.workload.worker, "--attempt", str(attempt), *_nsys(launch)]
    return ["-m", "ddp_hpc.job.node.task", str(launch.run.path), *options]


def _num_workers(launch: Launch) -> list[str]:
    asked = launch.spec.resources.cpus_per_worker
    cpus = [] if asked is None else ["--cpus-per-worker", str(asked)]
    return ["--num-workers", str(launch.world.workers_per_node), *cpus, *_gpus(launch)]


def _gpus(launch: Launch) -> list[str]:
    num_gpus = launch.spec.resources.gpus_per_node
    return ["--gpus", str(num_gpus)] if num_gpus else []


def _nsys(launch: Launch) -> list[str]:
    ranks = launch.workload.nsys
    return [f"--nsys={','.join(map(str, ranks))}"] if ranks else []


STEPS: Mapping[str, Callable[[Launch, int, Endpoint], list[str]]] = {
    "srun": step_of_tasks,
    "torchrun": step_of_torchrun,
}
"""Value of `launcher` -> the command of the job step of one attempt; agents have one step for all attempts."""
