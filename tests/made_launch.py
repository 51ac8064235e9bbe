"""What a job of a spec would start, for tests of commands."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.cluster.containers import BARE, CommandWrapper, HostPaths
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of


def launch_of(spec: RunSpec, run: RunDir | None = None, wrapper: CommandWrapper = BARE) -> JobContext:
    """Return what is started where a job gives the world that the spec asks for."""
    return JobContext(
        spec=spec,
        run=run or RunDir(spec.path),
        workload=workload_of(spec),
        world=spec.resources.world,
        environ={},
        wrapper=wrapper,
    )


def context_of(
    spec: RunSpec, run: RunDir, allocation: Allocation | None, environ: dict[str, str], *, is_for_slurm: bool = True
) -> JobContext:
    """Return the context of a supervisor in a job that has the world that the spec asks for."""
    return JobContext(
        run=run,
        spec=spec,
        workload=workload_of(spec),
        world=spec.resources.world,
        allocation=allocation,
        is_for_slurm=is_for_slurm,
        environ=environ,
    )


def paths_of(spec: RunSpec, work_dir: Path = Path("/"), import_paths: tuple[str, ...] = ()) -> HostPaths:
    """Return the paths of this host that the workers of a run use."""
    inputs = [*workload_of(spec).input_paths(work_dir)]
    return HostPaths(work_dir=work_dir, import_paths=[Path(path) for path in import_paths], inputs=inputs)
