"""Finds the nodes of a job on which Slurm starts no command any more: tries each one alone.

A step over all nodes does not tell: where srun cannot start one of its tasks, it ends the step on the other nodes, too; and where a
node has lost its power, srun waits for it until the controller notices (SlurmdTimeout, 5 minutes on most sites).

One failed trial proves nothing of a node: a controller that restarts, or that many jobs ask at once, starts no command anywhere. So
a node is lost only where two trials fail, and between them and after them Slurm starts a command on another node of the job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ddp_hpc.base import processes
from ddp_hpc.job.wire.subprocesses import printed_by
from ddp_hpc.slurm.steps import probe_argv

PATIENCE_S = 15.0
"""How long Slurm may take to start a command on one node: less than a second, but a connection may be tried more than once."""
MOST_S = 90.0
"""How long all of it takes at most; of a node that is not tried in this time, nothing is known."""
_AT_A_TIME = 16
_MOST_CONTROLS = 3
_WORD = "ddp-hpc-is-reached"
_OF_CONTROLLER = re.compile("slurm controller", re.IGNORECASE)
"""What srun's errors hold where the controller does not answer it: then nothing is known of the node."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What trials of some nodes showed of those on which no command started."""

    lost: tuple[str, ...] = ()
    """Slurm starts no command there, and does on others."""
    unsure: tuple[str, ...] = ()
    """No command started there, but Slurm may start none anywhere now, or there was no time for two trials."""


def reach_of(nodes: Sequence[str], environ: Mapping[str, str], *, job_nodes: Sequence[str]) -> Reach:
    """Try each of the nodes alone. `job_nodes` are all that the job still has: one of the others shows whether Slurm starts anything."""
    until = time.monotonic() + MOST_S
    first = _tried(nodes, environ, until - 4 * PATIENCE_S)
    suspects = [node for node in nodes if not first[node]]
    others = [node for node in nodes if first[node]] or [node for node in job_nodes if node not in nodes]
    controls = others[:_MOST_CONTROLS]

    def starts_any() -> bool:
        return any(_tried(controls, environ, until).values())

    if not suspects or processes.is_stop_pending():
        return Reach()
    if not controls or not starts_any():
        return Reach(unsure=(*suspects,))
    again = _tried(suspects, environ, until - 2 * PATIENCE_S)
    still = [node for node in suspects if not again[node]]
    lost = tuple(node for node in still if first[node] is False and again[node] is False)
    if not lost or not starts_any():
        return Reach(unsure=(*still,))
    return Reach(lost=lost, unsure=tuple(node for node in still if node not in lost))


def are_all_reached(nodes: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether a step starts a command on each of the nodes; a stop signal to this process ends the question, and counts as yes."""
    return bool(_is_reached(nodes, environ)) or processes.is_stop_pending()


def _tried(nodes: Sequence[str], environ: Mapping[str, str], until: float) -> dict[str, bool | None]:
    """Return of each node whether a command starts there; None where that is not known, such as of one not tried until then."""

    def is_reached(node: str) -> bool | None:
        is_over = time.monotonic() > until or processes.is_stop_pending()
        return None if is_over else _is_reached([node], environ)

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return dict(zip(nodes, pool.map(is_reached, nodes), strict=True))


def _is_reached(nodes: Sequence[str], environ: Mapping[str, str]) -> bool | None:
    argv = [*probe_argv(len(nodes)), f"--nodelist={','.join(nodes)}", "echo", _WORD]
    printed, errors = printed_by(argv, environ=environ, timeout_s=PATIENCE_S, is_over=processes.is_stop_pending)
    if printed.count(_WORD) >= len(nodes):
        return True
    return None if processes.is_stop_pending() or _OF_CONTROLLER.search(errors) else False
