"""The srun options of a run's job steps."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.cluster.slurm.hostlist import compress_hostlist
from ddp_hpc.run.spec.launch import LaunchSpec
from ddp_hpc.run.world import World


def step_argv(
    spec: LaunchSpec, world: World, *, tasks_per_node: int, cpus_per_worker: int, wait_s: int = 60
) -> list[str]:
    """Return the beginning of the command that starts a step on all nodes of the job. One failed task ends the step.

    After a task that has ended well, the others have `wait_s` to end, too; 0: as long as they take.
    """
    return [
        "srun",
        f"--nodes={world.num_nodes}",
        # Both counts: without --ntasks, srun takes the job's number of tasks, and treats --ntasks-per-node as a maximum
        # (https://slurm.schedmd.com/srun.html#OPT_ntasks-per-node).
        f"--ntasks={world.num_nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        # Since Slurm 22.05, srun does not take --cpus-per-task from the job; without it a task gets one CPU
        # (https://slurm.schedmd.com/srun.html#OPT_cpus-per-task).
        f"--cpus-per-task={cpus_per_worker * world.workers_per_node // tasks_per_node}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        f"--wait={wait_s}",
        # sbatch --export=NONE sets SLURM_EXPORT_ENV=NONE in the job. srun would obey that, and start the tasks without the
        # run's `env`, its code and its image's variables (https://slurm.schedmd.com/srun.html#OPT_SLURM_EXPORT_ENV).
        "--export=ALL",
        *spec.slurm.srun_args,
    ]


def probe_argv(num_nodes: int, *, is_all_or_none: bool = False) -> list[str]:
    """Return the beginning of the command that runs one short task on every node, beside the steps that run there.

    With `is_all_or_none`, one failed task ends the step on all nodes: the answers of the others are of no use then.
    """
    return [
        "srun",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--overlap",
        "--quiet",
        "--export=ALL",
        f"--kill-on-bad-exit={int(is_all_or_none)}",
    ]


def probe_on_argv(nodes: Sequence[str], *, is_all_or_none: bool = False) -> list[str]:
    """Return the same for these nodes, by their names: srun might take others of the job's where these are not all."""
    return [*probe_argv(len(nodes), is_all_or_none=is_all_or_none), f"--nodelist={compress_hostlist(nodes)}"]


def overlap_step_argv(spec: LaunchSpec, world: World, *, cpus_per_worker: int) -> list[str]:
    """Return the beginning of the command that runs one short task on every node, bound to CPUs as an agent and its workers are."""
    step = step_argv(spec, world, tasks_per_node=1, cpus_per_worker=cpus_per_worker)
    return [*step, "--overlap", "--quiet", "--kill-on-bad-exit=0"]  # of an option given twice, srun takes the last
