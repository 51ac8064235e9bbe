"""What a check of a job's nodes asks, and how commands run on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_hpc.node_checks.answers import Asked
from ddp_hpc.slurm.allocation import Allocation
from ddp_hpc.slurm.steps import probe_argv


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is checked, and how commands run on the nodes."""

    allocation: Allocation
    folder: Path
    """A directory that all nodes share; each writes a file there. It is removed."""
    environ: Mapping[str, str]
    paths: Sequence[str] = ()
    """What workers read."""
    python: Sequence[str] = (sys.executable,)
    step: Sequence[str] | None = None
    """The beginning of the command that starts a process on each node as workers start; None for a step of one CPU."""
    interfaces: Sequence[str] = ()
    """Networks to prefer (`network.interfaces`)."""
    asked: Asked = field(default_factory=Asked)
    all_reduce: bool = False
    """Whether the nodes also add up numbers by the workers' back end."""


def without(question: Question, lost: Sequence[str]) -> Question:
    """Return the same question to the other nodes of the job, as if it had only these."""
    whole = question.allocation
    kept = [(node, count) for node, count in zip(whole.node_names, _counts(whole), strict=True) if node not in lost]
    if len(kept) in (0, len(whole.node_names)):
        return question
    names = tuple(node for node, _ in kept)
    allocation = replace(whole, node_names=names, tasks_per_node=tuple(count for _, count in kept))
    begin = probe_argv(len(names)) if question.step is None else question.step
    # Of an option given twice, srun takes the last.
    step = [*begin, f"--nodes={len(names)}", f"--ntasks={len(names)}", f"--nodelist={','.join(names)}"]
    return replace(question, allocation=allocation, step=step)


def _counts(allocation: Allocation) -> Sequence[int]:
    """Return the tasks of each node; in a step, which has variables of its own, they may be those of fewer nodes."""
    counts, num_nodes = allocation.tasks_per_node, len(allocation.node_names)
    return counts if len(counts) == num_nodes else [1] * num_nodes
