"""Which nodes a job can do without."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.slurm import client
from ddp_hpc.slurm.hostlist import expand_hostlist
from ddp_hpc.slurm.queries import takes_jobs
from ddp_hpc.spec import RunSpec


@dataclass(frozen=True)
class Spared:
    """Of the nodes under suspicion, those that are left out, worst first, and those that are let in after all."""

    left_out: tuple[str, ...] = ()
    let_in: tuple[str, ...] = ()
    num_others: int = 0
    """Nodes in order, and under no suspicion."""

    @property
    def told(self) -> str:
        """Why some are let in; empty where none is."""
        if not self.let_in:
            return ""
        return f"{', '.join(self.let_in)} failed before, but only {self.num_others} others are in order"


def spare_nodes(
    suspects: Sequence[str], spec: RunSpec, environ: Mapping[str, str], *, partition: str | None = None
) -> Spared:
    """Return which of `suspects`, worst first, a job of this spec can do without; `partition` is where it runs unless asked.

    Never a node that the user named. Where Slurm does not tell of its nodes, none can be spared.
    """
    named = expand_hostlist(spec.slurm.nodelist or "")
    suspects = [node for node in suspects if node not in named]
    if not suspects:
        return Spared()
    states = client.node_states(environ, partition=spec.slurm.partition or partition)
    gone = {node for node, state in states.items() if not takes_jobs(state)}
    num_others = len(states.keys() - gone - {*expand_hostlist(spec.slurm.exclude or "")} - {*suspects})
    left_out = spare(suspects, lost=gone, num_others=num_others, num_needed=spec.resources.nodes)
    return Spared(tuple(left_out), tuple(node for node in suspects if node not in left_out), num_others)


def spare(suspects: Sequence[str], *, lost: Collection[str], num_others: int, num_needed: int) -> list[str]:
    """Return those of `suspects`, worst first, that a job of `num_needed` nodes can do without.

    `num_others` nodes are in order and under no suspicion. Where they are too few, the least suspect come back first, and
    those that Slurm has `lost` last: a job that waits for a node which once failed beats one that waits for ever.
    """
    num_missing = max(num_needed - num_others, 0)
    by_guilt = sorted(dict.fromkeys(suspects), key=lambda node: node not in lost)
    return by_guilt[: max(len(by_guilt) - num_missing, 0)]
