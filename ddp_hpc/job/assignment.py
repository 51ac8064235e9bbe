"""What a supervisor was given to do, and how an attempt at it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.allocation import Allocation
from ddp_hpc.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A run, and the job it has."""

    run: RunDir
    spec: RunSpec
    allocation: Allocation | None
    """None on this machine, or where a job script was started outside of a job."""
    is_for_slurm: bool
    environ: Mapping[str, str]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the job's nodes, rank zero's first; none without Slurm."""
        return self.allocation.node_names if self.allocation else ()

    def node_of(self, rank: int) -> str | None:
        """Return the name of the node that a rank works on."""
        node_rank = rank // self.spec.resources.local_world_size
        return self.nodes[node_rank] if 0 <= node_rank < len(self.nodes) else None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the workers of an attempt ended."""

    code: int
    """What their exit codes mean together."""
    step_code: int | None = None
    """What the command that started them ended with; None where it goes on. Below zero, a signal's number."""
    reason: str = ""
    """In words, where something else than a worker failed."""
    is_out_of_time: bool = False
    """Whether they were told to leave because the time limit was near."""
    was_told: bool = False
    """Whether a stop signal came for this job."""
    is_wedged: bool = False
    """Whether they had to be ended because nothing was heard of them."""
    was_suspended: bool = False
    """Whether the whole job stood still for longer than the workers may, and went on a moment ago."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that did not answer."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes for which the attempt was not begun: they have failed before."""
