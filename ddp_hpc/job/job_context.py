"""The run and the job that a supervisor works on, and how an attempt ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.allocation import Allocation
from ddp_hpc.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """A run, its spec, and the Slurm job that it runs in."""

    run: RunDir
    spec: RunSpec
    allocation: Allocation | None
    """None without Slurm, or where a job script was started outside of a job."""
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
    """Exit code of the command that started them, such as srun; None while it runs; minus the number of a signal."""
    reason: str = ""
    """Why it ended, for people, where something other than a worker failed."""
    is_out_of_time: bool = False
    """Whether the supervisor asked them to stop because the time limit was near."""
    was_signalled: bool = False
    """Whether a stop signal came for this job."""
    is_unresponsive: bool = False
    """Whether the supervisor killed them because they wrote nothing for too long."""
    was_suspended: bool = False
    """Whether Slurm suspended the job for longer than the hang timeout, and resumed it a moment ago."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that did not answer."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes that failed before, because of which no workers were started."""
