"""The run and the job that a supervisor works on, and how an attempt ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_hpc.cluster.containers import BARE, CommandWrapper
from ddp_hpc.cluster.slurm.allocation import Allocation, shape_problem
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.requeue import requeue_reserve_s
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.launch import LaunchSpec
from ddp_hpc.run.workload.protocol import Workload
from ddp_hpc.run.workload.table import workload_of
from ddp_hpc.run.world import World


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """A run, its spec, and the Slurm job that it runs in."""

    run: RunDir
    spec: LaunchSpec
    workload: Workload
    world: World
    """The nodes and workers that this job was given; what the run asked for stands in the spec."""
    allocation: Allocation | None = None
    """None without Slurm, or where a job script was started outside of a job."""
    environ: Mapping[str, str]
    is_for_slurm: bool = False
    wrapper: CommandWrapper = BARE
    """How commands run on the nodes: in the run's image, or without one."""
    is_supervised: bool = False
    """Whether a supervisor starts the attempts, without Slurm, too; under `ddp-hpc join`, another program's launcher does."""

    @property
    def job(self) -> SlurmJob | None:
        """The job at Slurm; None where there is none."""
        return SlurmJob(allocation=self.allocation, environ=self.environ) if self.allocation else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the job's nodes, rank zero's first; none without Slurm."""
        return self.allocation.node_names if self.allocation else ()

    def has_time(self, seconds: float) -> bool:
        """Tell whether the job goes on for so long, and can be requeued after that: one that its time limit ends does not come back."""
        newest = Ledger.read(self.run).newest
        reserved_s = seconds + requeue_reserve_s(self.spec.slurm.signal_lead_s)
        return newest is None or newest.ends_at is None or time.time() <= newest.ends_at - reserved_s

    def node_of(self, rank: int) -> str | None:
        """Return the name of the node that a rank works on."""
        node_rank = self.world.node_rank_of(rank)
        return self.nodes[node_rank] if 0 <= node_rank < len(self.nodes) else None


def read_context(run: RunDir, job: SlurmJob | None, *, patience_s: float | None = None) -> JobContext:
    """Return what the run's configuration asks for, and its job; `patience_s` as in `load_resolved`."""
    spec = load_resolved(run.config, is_patient=True, patience_s=patience_s)
    allocation = job.allocation if job else None
    return JobContext(
        run=run,
        spec=spec,
        workload=workload_of(spec),
        world=given_world(spec, allocation),
        allocation=allocation,
        environ=job.environ if job else {},
        is_for_slurm=job is not None,
    )


def given_world(spec: LaunchSpec, allocation: Allocation | None) -> World:
    """Return the nodes of this job, or this machine, with as many workers on each as were asked for.

    No worker starts before `why_job_misfits` has found that a job has room for them.
    """
    num_nodes = len(allocation.node_names) if allocation else 1
    return World(num_nodes=num_nodes, workers_per_node=spec.resources.world.workers_per_node)


def why_job_misfits(spec: LaunchSpec, allocation: Allocation) -> str | None:
    """Return why this job is not the world that the run asked for; None if it is."""
    return shape_problem(allocation, spec.resources.world)


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
    has_failed_preflight: bool = False
    """Whether no workers were started, because the check of the nodes failed."""
    met_at: str = ""
    """The address where the ranks met; empty without Slurm."""
    network: NetworkFindings | None = None
    """What a probe of the network between the nodes found; None without one."""
