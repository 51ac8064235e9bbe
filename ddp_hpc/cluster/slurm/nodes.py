"""Choose which of the nodes that failed before a job excludes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.cluster.slurm.queries import takes_jobs
from ddp_hpc.run.spec.launch import LaunchSpec

_LACKS_NODES = re.compile(r"nodes? .*not available", re.IGNORECASE)
"""What sbatch prints of a job whose nodes are too few: `Requested node configuration is not available`."""


@dataclass(frozen=True)
class Exclusions:
    """The nodes that failed before: those that a job excludes, worst first, and those that it may use all the same."""

    excluded: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    num_others: int = 0
    """Nodes that take jobs and did not fail."""

    @property
    def detail(self) -> str:
        """Why the job may use nodes that failed before; empty if there are none."""
        if not self.allowed:
            return ""
        pronoun = "it" if len(self.allowed) == 1 else "them"
        return (
            f"{', '.join(self.allowed)} failed before, but the job may still use {pronoun}: "
            f"of the other nodes that take jobs ({self.num_others}), too few have what the job asks for. To exclude {pronoun} all the same, set `slurm.exclude`"
        )


def nodes_to_exclude(
    suspects: Sequence[str],
    spec: LaunchSpec,
    environ: Mapping[str, str],
    *,
    script: Path | str,
    partition: str | None = None,
) -> Exclusions:
    """Return which of `suspects` (nodes that failed, worst first) a job of this spec excludes.

    `script` is the job's script, its path or its text; `partition` is its partition, for specs that name none. A node that
    the user named is never excluded. If Slurm does not answer, no node is.
    """
    named = expand_hostlist(spec.slurm.nodelist or "")
    suspects = [node for node in suspects if node not in named]
    if not suspects:
        return Exclusions()
    states = client.node_states(environ, partition=spec.slurm.partition or partition)
    gone = {node for node, state in states.items() if not takes_jobs(state)}
    num_others = len(states.keys() - gone - {*expand_hostlist(spec.slurm.exclude or "")} - {*suspects})
    counted = dispensable(suspects, lost=gone, num_others=num_others, num_needed=spec.resources.nodes)

    def lacks_nodes(*left_out: str) -> bool:
        asked = [f"--exclude={','.join(filter(None, [spec.slurm.exclude, *left_out]))}"]
        asked += [f"--partition={partition}"] if partition and not spec.slurm.partition else []
        return _lacks_nodes(script, environ, asked)

    excluded = counted
    if counted and lacks_nodes(*counted):  # nodes may be unlike, and those that are left may not do
        excluded = []
        for node in counted:
            excluded += [] if lacks_nodes(*excluded, node) else [node]
    return Exclusions(tuple(excluded), tuple(node for node in suspects if node not in excluded), num_others)


def _lacks_nodes(script: Path | str, environ: Mapping[str, str], options: Sequence[str]) -> bool:
    """Return whether Slurm says that nodes for the job are too few; an answer that is not known, or another refusal, does not."""
    try:
        refusal = client.test_only(script, environ, options).refusal
    except DdpHpcError:
        return False
    return _LACKS_NODES.search(refusal or "") is not None


def dispensable(suspects: Sequence[str], *, lost: Collection[str], num_others: int, num_needed: int) -> list[str]:
    """Return those of `suspects`, worst first, without which Slurm can still start a job of `num_needed` nodes.

    `num_others` nodes take jobs and did not fail. If these are too few, the job may use suspects, too: first those that
    failed least, last those that Slurm has `lost`. A node that failed once is better than a job that can never start.
    """
    num_missing = max(num_needed - num_others, 0)
    by_guilt = sorted(dict.fromkeys(suspects), key=lambda node: node not in lost)
    return by_guilt[: max(len(by_guilt) - num_missing, 0)]
