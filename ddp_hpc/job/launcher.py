"""Launchers: from a job's context to the command that starts the workers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddp_hpc.cluster.slurm.steps import step_argv
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.job.wire.endpoint import Endpoint


def agent_argv(context: JobContext) -> list[str]:
    """Return the command of the node agent on this machine."""
    teardown_s = context.workload.teardown_s
    limit = [] if teardown_s is None else ["--teardown-s", f"{teardown_s:g}"]
    stop = ["--stop-signal", context.workload.stop_signal]
    worker = ["--worker", context.workload.worker, *stop, *limit, *_resource_options(context)]
    return [*context.wrapper.command, "-m", "ddp_hpc.job.node.agent", str(context.run.path), *worker]


def agents_step_argv(context: JobContext) -> list[str]:
    """Return the command that starts one agent on each node; each gets its orders over its standard input (`job.wire.control_channel`)."""
    return [*_step_argv(context, tasks_per_node=1), *agent_argv(context), "--in-step"]


def tasks_step_argv(context: JobContext, attempt: int, endpoint: Endpoint) -> list[str]:
    """Return the command that starts one task a worker."""
    step = _step_argv(context, tasks_per_node=context.world.workers_per_node)
    return [*step, *context.wrapper.command, *_task(context, attempt), *_gpu_options(context), "--meet", str(endpoint)]


def torchrun_step_argv(context: JobContext, attempt: int, endpoint: Endpoint) -> list[str]:
    """Return the command that starts one torchrun a node, through `job.node.torchrun_node`, which knows the node's address."""
    world, sampled = context.world, [f"--run={context.run.path}", f"--attempt={attempt}"]
    module, stop = ["-m", "ddp_hpc.job.node.torchrun_node"], ["--stop-signal", context.workload.stop_signal]
    node = [*module, *_resource_options(context), *stop, *sampled, "--meet", str(endpoint), "--"]
    options = [
        f"--nnodes={world.num_nodes}",
        f"--nproc-per-node={world.workers_per_node}",
        f"--max-restarts={context.spec.torchrun.max_restarts}",
    ]
    return [*_step_argv(context, tasks_per_node=1), *context.wrapper.command, *node, *options, *_task(context, attempt)]


def _step_argv(context: JobContext, *, tasks_per_node: int) -> list[str]:
    cpus, teardown_s = context.workload.cpus_per_worker, context.workload.teardown_s
    wait_s = 0 if teardown_s is None else round(teardown_s)
    step = step_argv(context.spec, context.world, tasks_per_node=tasks_per_node, cpus_per_worker=cpus, wait_s=wait_s)
    return [*step, *context.wrapper.srun_args]


def _task(context: JobContext, attempt: int) -> list[str]:
    options = ["--worker", context.workload.worker, "--attempt", str(attempt)]
    return ["-m", "ddp_hpc.job.node.task", str(context.run.path), *options]


def _resource_options(context: JobContext) -> list[str]:
    asked = context.spec.resources.cpus_per_worker
    cpus = [] if asked is None else ["--cpus-per-worker", str(asked)]
    return ["--num-workers", str(context.world.workers_per_node), *cpus, *_gpu_options(context)]


def _gpu_options(context: JobContext) -> list[str]:
    num_gpus = context.spec.resources.gpus_per_node
    return ["--gpus", str(num_gpus)] if num_gpus else []


STEP_ARGV_BY_LAUNCHER: Mapping[str, Callable[[JobContext, int, Endpoint], list[str]]] = {
    "srun": tasks_step_argv,
    "torchrun": torchrun_step_argv,
}
"""Value of `launcher` -> the command of the job step of one attempt; agents have one step for all attempts."""
