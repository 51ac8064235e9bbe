"""Choose which of the nodes that failed before a job excludes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.cluster.slurm.queries import takes_jobs
from ddp_hpc.run.spec.launch import LaunchSpec

_LACKS_NODES = re.compile(r"nodes? .*not available", re.IGNORECASE)
"""What sbatch prints of a job whose nodes are too few: `Requested node configuration is not available`."""


def nodes_to_exclude(
    suspects: Sequence[str],
    spec: LaunchSpec,
    environ: Mapping[str, str],
    *,
    script: Path | str,
    partition: str | None = None,
) -> tuple[tuple[str, ...], str]:
    """Return which of `suspects` (nodes that failed, worst first) a job of this spec excludes: those that it can start without.

    Return also a note on the others, which it may use all the same; empty if there are none.

    `script` is the job's script, its path or its text; `partition` is its partition, for specs that name none. A node that
    the user named is never excluded. If Slurm does not answer, no node is. A node that failed is better than a job that can never start.
    """
    named = expand_hostlist(spec.slurm.nodelist or "")
    suspects = [node for node in suspects if node not in named]
    if not suspects:
        return (), ""
    states = client.node_states(environ, partition=spec.slurm.partition or partition)
    in_order = {node for node, state in states.items() if takes_jobs(state)} - {
        *expand_hostlist(spec.slurm.exclude or "")
    }

    def can_start(left_out: Sequence[str]) -> bool:
        asked = [f"--exclude={','.join(filter(None, [spec.slurm.exclude, *left_out]))}"]
        asked += [f"--partition={partition}"] if partition and not spec.slurm.partition else []
        with suppress(DdpHpcError):
            told = client.estimate_start(script, environ, asked)
            if told.starts_at is not None or _LACKS_NODES.search(told.refusal or ""):
                return told.starts_at is not None
        # Slurm does not say, or refuses for another reason.
        return len(in_order - {*left_out}) >= spec.resources.nodes

    excluded = suspects if can_start(suspects) else []
    for node in [] if excluded else suspects:
        excluded = [*excluded, node] if can_start([*excluded, node]) else excluded
    allowed = [node for node in suspects if node not in excluded]
    pronoun = "it" if len(allowed) == 1 else "them"
    note = (
        f"{', '.join(allowed)} failed before, but the job may still use {pronoun}: too few of the other nodes take jobs "
        f"and have what the job asks for. To exclude {pronoun} all the same, set `slurm.exclude`"
    )
    return tuple(excluded), note if allowed else ""
