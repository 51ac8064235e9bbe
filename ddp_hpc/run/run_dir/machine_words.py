"""How busy machines are, in one sentence."""

from __future__ import annotations

from ddp_hpc.run.run_dir.machine_use import Summary

UNEVEN = 0.10
"""A node is named where it differs from the mean by more than this."""
THROTTLED = 0.05
FULL = 0.9


def sentence(use: Summary) -> str:
    """Return `GPUs 35% busy, 61.0 of 80.0 GiB of memory; 16 CPUs 98% busy; memory 40.2 of 64.0 GiB`."""
    return "; ".join(filter(None, [gpus(use), cpus(use), memory(use)]))


def gpus(use: Summary) -> str:
    """Return what is known of the GPUs; empty for a run without any."""
    if not use.num_gpus:
        return ""
    told = []
    if use.gpu_busy is not None:
        is_uneven = use.num_nodes > 1 and use.gpu_busy - (use.gpu_busy_least or 0.0) > UNEVEN
        least = f" ({use.gpu_busy_least:.0%} on {use.gpu_least_node})" if is_uneven else ""
        some = "" if use.num_gpus_known >= use.num_gpus else f" ({use.num_gpus_known} of {use.num_gpus} are known)"
        told.append(f"GPUs {use.gpu_busy:.0%} busy{least}{some}")
    else:
        told.append(f"use of the GPUs is not known{f' ({use.gpu_problem})' if use.gpu_problem else ''}")
    if use.gpu_memory_gib is not None and use.gpu_memory_total_gib is not None:
        told.append(f"{use.gpu_memory_gib:.1f} of {use.gpu_memory_total_gib:.1f} GiB of GPU memory")
    return ", ".join(told)


def cpus(use: Summary) -> str:
    """Return what is known of the CPUs that the job may use."""
    if use.cpu_busy is None or use.num_cpus is None:
        return "use of the CPUs is not known"
    is_uneven = use.num_nodes > 1 and (use.cpu_busy_most or 0.0) - use.cpu_busy > UNEVEN
    most = f" ({use.cpu_busy_most:.0%} on {use.cpu_busiest_node})" if is_uneven else ""
    told = [f"{use.num_cpus:g} CPUs {use.cpu_busy:.0%} busy{most}"]
    if use.throttled is not None and use.num_cpus and use.throttled / use.num_cpus > THROTTLED:
        told.append(f"the cgroup's quota stops them for {use.throttled / use.num_cpus:.0%} of the time")
    return ", ".join(told)


def memory(use: Summary) -> str:
    """Return what is known of the memory of the node that has the least left."""
    if use.memory_gib is None or use.memory_limit_gib is None:
        return ""
    where = f" on {use.memory_node}" if use.num_nodes > 1 else ""
    nearly = ", nearly all" if not use.is_memory_of_node and (use.memory_share or 0.0) >= FULL else ""
    return f"memory {use.memory_gib:.1f} of {use.memory_limit_gib:.1f} GiB{where}{nearly}"
