"""From a spec to srun's options."""

from __future__ import annotations

from ddp_hpc.spec import RunSpec


def step_argv(spec: RunSpec, *, tasks_per_node: int) -> list[str]:
    """Return the beginning of the command that starts a step on all nodes of the job.

    Nodes and tasks are both named: `--ntasks-per-node` alone is ignored where the job has more. CPUs are named again,
    for srun does not take them from the job since Slurm 22.05. A task that fails takes the step with it.

    A job submitted with `--export=NONE` leaves SLURM_EXPORT_ENV=NONE behind, and srun would start its tasks without the
    run's `env`, its code and its image's variables (https://slurm.schedmd.com/srun.html#OPT_SLURM_EXPORT_ENV).
    """
    nodes, resources = spec.resources.nodes, spec.resources
    cpus_per_task = spec.cpus_per_task * resources.local_world_size // tasks_per_node
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--cpus-per-task={cpus_per_task}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--export=ALL",
        *spec.slurm.srun_args,
    ]


def probe_argv(num_nodes: int, *, is_all_or_none: bool = False) -> list[str]:
    """Return the beginning of the command that asks every node one question, beside whatever else runs there.

    With `is_all_or_none`, a node that fails ends the step on all of them: the answers of the others are of no use then.
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
