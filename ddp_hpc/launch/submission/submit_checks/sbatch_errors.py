"""What sbatch says when it refuses a job, and what to tell the user: asked for, the cluster's own, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_hpc.base.names import plural
from ddp_hpc.cluster.slurm.queries import NodeShape, Partition, chosen_partition
from ddp_hpc.run.spec import RunSpec


@dataclass(frozen=True)
class KnownCluster:
    """What is known of the cluster when a job is refused."""

    partitions: Sequence[Partition] = ()
    associations: Sequence[str] = field(default_factory=tuple)
    """Accounts, each with its qualities of service, that the user may use; empty where accounting is off."""
    shapes: Sequence[NodeShape] = ()
    """What nodes have; empty where Slurm did not say."""


def explain_refusal(said: str, spec: RunSpec, cluster: KnownCluster) -> str:
    """Return what sbatch's refusal means for this spec."""
    lines = said.strip().splitlines()
    errors = [
        line for line in lines if re.search(r"error|failure|failed", line, re.IGNORECASE)
    ] or lines  # without a site's banner
    told = re.sub(r"^(sbatch|allocation failure)?:? ?(error: )?", "", errors[0] if errors else "")
    for pattern, words in _EXPLANATIONS.items():
        if re.search(pattern, "\n".join(errors), flags=re.IGNORECASE):
            return f"Slurm refuses the job ({told}). {words(spec, cluster)}"
    return f"Slurm refuses the job. Correct what sbatch names, or ask your cluster's support: {said.strip()}"


def may_wait(said: str, spec: RunSpec, cluster: KnownCluster) -> bool:
    """Tell whether `sbatch --test-only` may have refused a job that sbatch accepts: it counts no nodes that are down or drained.

    `job_start_data` of Slurm's source.
    """
    return "node configuration is not available" in said and not _too_large_text(spec, _partition_shapes(spec, cluster))


def _explain_partition(spec: RunSpec, cluster: KnownCluster) -> str:
    names = ", ".join(_size_text(partition) for partition in cluster.partitions) or "none that you can see (`sinfo`)"
    return (
        f"`slurm.partition` is {spec.slurm.partition!r}; the cluster has {names}. Set `slurm.partition` to one of them."
    )


def _explain_size(spec: RunSpec, cluster: KnownCluster) -> str:
    chosen = chosen_partition(spec.slurm.partition, cluster.partitions)
    has = f"partition {_size_text(chosen)}" if chosen else ", ".join(map(_size_text, cluster.partitions))
    return _too_large_text(spec, _partition_shapes(spec, cluster)) or (
        f"The run asks for {request_text(spec)}; the cluster has {has}. Choose another `slurm.partition`, or lower `resources.nodes`, "
        "`resources.workers_per_node`, `resources.cpus_per_worker` or other keys of `resources`."
    )


def _explain_gpus(spec: RunSpec, cluster: KnownCluster) -> str:
    chosen, shapes = chosen_partition(spec.slurm.partition, cluster.partitions), _partition_shapes(spec, cluster)
    has = f"; Slurm lists {plural(chosen.num_gpus, 'GPU')} in partition {chosen.name}" if chosen else ""
    return (any(shape.num_gpus for shape in shapes) and _too_large_text(spec, shapes)) or (
        f"The run asks for {request_text(spec)}, by `--{spec.slurm.gpu_option}` (`slurm.gpu_option`){has}. Correct `resources.gpu_type` or `slurm.partition`; "
        "where the site takes `--gres` only, set `slurm.gpu_option=gres`; where it gives whole nodes and counts no GPUs, `slurm.gpu_option=none`."
    )


def _too_large_text(spec: RunSpec, shapes: Sequence[NodeShape]) -> str:
    asked_type, types = spec.resources.gpu_type, {shape.gpu_type for shape in shapes if shape.gpu_type}
    if asked_type and types and asked_type not in types:
        return (
            f"`resources.gpu_type` is {asked_type!r}, but nodes of {_partitions_text(shapes)} have {', '.join(sorted(types))}. Set it to one of these, or "
            "choose another `slurm.partition`."
        )
    causes = " ".join(_oversize_sentences(spec, shapes))
    return causes and f"{causes} Lower it, or choose another `slurm.partition`."


def _partitions_text(shapes: Sequence[NodeShape]) -> str:
    return f"partition {', '.join(sorted({shape.partition for shape in shapes}))}"


def _partition_shapes(spec: RunSpec, cluster: KnownCluster) -> Sequence[NodeShape]:
    """Return the nodes that the job may get; none if unknown."""
    chosen = chosen_partition(spec.slurm.partition, cluster.partitions)
    names = (spec.slurm.partition or (chosen.name if chosen else "")).split(",")
    return [shape for shape in cluster.shapes if shape.partition in names]


def _oversize_sentences(spec: RunSpec, shapes: Sequence[NodeShape]) -> Iterator[str]:
    """Yield a sentence for each key that asks for more than any node has."""
    if not shapes:
        return
    asks, where = spec.resources, _partitions_text(shapes)
    nodes, cpus = sum(shape.num_nodes for shape in shapes), asks.local_world_size * spec.cpus_per_task
    most_cpus, most_mb = max(shape.num_cpus for shape in shapes), max(shape.mem_mb for shape in shapes)
    most_gpus = max(shape.num_gpus for shape in shapes)
    if asks.nodes > nodes:
        yield f"`resources.nodes` is {asks.nodes}, but {where} has {plural(nodes, 'node')}."
    if cpus > most_cpus:
        each = plural(spec.cpus_per_task, "CPU")
        yield (
            f"`resources.workers_per_node` is {asks.local_world_size}, with {each} each (`resources.cpus_per_worker`), but a node "
            f"of {where} has at most {plural(most_cpus, 'CPU')}."
        )
    is_of_extra = any(name.startswith("mem") for name in spec.slurm.extra)
    if (spec.mem_gb or 0) * 1024 > most_mb and not is_of_extra:
        unset = "" if asks.mem_gb else f" for {plural(asks.local_world_size, 'worker')}, as it is not set"
        yield f"`resources.mem_gb` is {spec.mem_gb}{unset}, but a node of {where} has at most {most_mb // 1024} GiB."
    if asks.num_gpus > most_gpus:
        yield f"`resources.gpus_per_node` is {asks.num_gpus}, but a node of {where} has at most {plural(most_gpus, 'GPU')}."


def _explain_time(spec: RunSpec, cluster: KnownCluster) -> str:
    chosen = chosen_partition(spec.slurm.partition, cluster.partitions)
    most = f"; {chosen.name} allows {chosen.max_time_min:.0f} min" if chosen and chosen.max_time_min else ""
    goes_on = spec.slurm.requeue or spec.restart.by == "successor"
    follows = (
        "continues in its next job"
        if goes_on
        else "ends, because `slurm.requeue` is false; submit it again to continue"
    )
    limit_min = spec.resources.time_limit_min
    asked_for, to_do = ("not set", "Set") if limit_min is None else (limit_min, "Lower")
    return f"`resources.time_limit_min` is {asked_for}{most}. {to_do} it: a run that reaches the limit writes a checkpoint and {follows}."


def _explain_account(spec: RunSpec, cluster: KnownCluster) -> str:
    yours = "; ".join(cluster.associations)
    told = (
        f"you may use {yours}. Set one of these"
        if yours
        else "the cluster does not say which you may use (`sacctmgr show assoc`). Ask your cluster's support"
    )
    return f"`slurm.account` is {spec.slurm.account!r} and `slurm.qos` {spec.slurm.qos!r}; {told}."


def _explain_policy(spec: RunSpec, cluster: KnownCluster) -> str:
    return (
        f"The run asks for {request_text(spec)}, more than your account or QOS allows at once, or you have as many jobs as it allows (`squeue "
        f"--me`). Ask for less, or wait until a job has ended. {_explain_account(spec, cluster)}"
    )


_EXPLANATIONS: Mapping[str, Callable[[RunSpec, KnownCluster], str]] = {
    r"invalid partition": _explain_partition,
    r"invalid account|invalid qos|account/partition combination": _explain_account,
    r"MaxSubmit|MaxJobCount": lambda *_: (
        "You have as many jobs in the queue as your account or QOS allows. Wait until one has ended, or cancel one (`squeue --me`), and submit again."
    ),
    r"accounting/QOS policy": _explain_policy,  # it goes on: "(job submit limit, user's size and/or time limits)"
    r"time limit": _explain_time,
    r"feature specification": lambda spec, _: (
        f"`slurm.constraint` is {spec.slurm.constraint!r}, but no node has that. Name features that `sinfo -o '%N %f'` lists."
    ),
    r"invalid node name": lambda spec, _: (
        f"Slurm does not know all nodes of `slurm.nodelist` ({spec.slurm.nodelist!r}) and `slurm.exclude` ({spec.slurm.exclude!r}). Name nodes that `sinfo -N` lists."
    ),
    r"dependency": lambda spec, _: (
        f"Slurm cannot let the job wait for `{spec.slurm.dependency}` (`slurm.dependency`, `--after`). Name jobs that `squeue` lists."
    ),
    r"reservation": lambda spec, _: (
        f"Slurm does not give the job `slurm.extra.reservation={spec.slurm.extra.get('reservation')}`. Name one that `scontrol show reservation` lists for you."
    ),
    r"(unrecognized|invalid|ambiguous) option": lambda spec, _: (
        f"sbatch does not know one of the options in `slurm.extra`: {', '.join(spec.slurm.extra)}. Name options that `sbatch --help` lists."
    ),
    r"generic resource": _explain_gpus,
    r"node configuration is not available|node count|more processors|memory (specification|required)|nodes? .*not available": _explain_size,
    r"QOS|policy|limit": _explain_policy,
}
"""What sbatch says -> what we say to it; the first that matches."""


def request_text(spec: RunSpec) -> str:
    """Return `2 nodes with 4 tasks of 8 CPUs and 4 GPUs each, 64 GiB a node`."""
    resources = spec.resources
    cpus = plural(spec.cpus_per_task, "CPU")
    gpus = f" and {plural(resources.gpus_per_node, 'GPU')}" if resources.gpus_per_node else ""
    memory = f", {resources.mem_gb} GiB a node" if resources.mem_gb else ""
    tasks = plural(resources.local_world_size, "task")
    return f"{plural(resources.nodes, 'node')} with {tasks} of {cpus}{gpus} each{memory}"


def _size_text(partition: Partition) -> str:
    """Return `batch (4 nodes)`."""
    return f"{partition.name} ({plural(partition.total_nodes, 'node')})"
