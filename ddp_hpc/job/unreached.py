"""Finds the nodes of a job on which Slurm starts no command any more: tries each one alone.

A step over all nodes does not tell: where srun cannot start one of its tasks, it ends the step on the other nodes, too; and where a
node has lost its power, srun waits for it until the controller notices (SlurmdTimeout, 5 minutes on most sites).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ddp_hpc.base import processes
from ddp_hpc.job.wire.subprocesses import printed_by
from ddp_hpc.slurm.steps import probe_argv

PATIENCE_S = 15.0
"""How long Slurm may take to start a command on one node: less than a second, but a connection may be tried more than once."""
MOST_S = 60.0
"""How long all of it takes at most; of a node that is not tried in this time, nothing is known."""
_AT_A_TIME = 16
_WORD = "ddp-hpc-is-reached"


def unreached(nodes: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return those of the nodes on which a command of its own does not start; none of those that there was no time to try."""
    until = time.monotonic() + MOST_S - PATIENCE_S

    def is_reached(node: str) -> bool:
        is_over = time.monotonic() > until or processes.is_stop_pending()
        return is_over or are_all_reached([node], environ)

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return [node for node, reached in zip(nodes, pool.map(is_reached, nodes), strict=True) if not reached]


def are_all_reached(nodes: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether a step starts a command on each of the nodes; a stop signal to this process ends the question, and counts as yes."""
    argv = [*probe_argv(len(nodes)), f"--nodelist={','.join(nodes)}", "echo", _WORD]
    printed, _ = printed_by(argv, environ=environ, timeout_s=PATIENCE_S, is_over=processes.is_stop_pending)
    return printed.count(_WORD) >= len(nodes) or processes.is_stop_pending()
