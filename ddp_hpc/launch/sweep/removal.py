"""Delete a sweep once none of its points waits or runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_hpc.base.errors import ConfigError, RunBusyError
from ddp_hpc.cluster.slurm import client, states
from ddp_hpc.launch.submission.local import works_here
from ddp_hpc.launch.submission.other_cluster import knows
from ddp_hpc.launch.submission.removal import delete_renamed, renamed_away
from ddp_hpc.launch.sweep import array
from ddp_hpc.launch.sweep.states import has_begun, points_in_queue, sending_alone
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, read_sweep
from ddp_hpc.run.run_dir.records import read_queued_job


def described(sweep_dir: SweepDir) -> str:
    """Return what `delete_sweep` deletes: `a sweep of 10 points, 8 of them with a run`."""
    sweep = read_sweep(sweep_dir)
    num_runs = sum(has_begun(sweep_dir.run(point)) for point in sweep.points)
    return (
        f"a sweep of {len(sweep.points)} points; {num_runs} of them have a run, with its checkpoints, metrics and logs"
    )


def delete_sweep(sweep_dir: SweepDir, environ: Mapping[str, str]) -> None:
    """Delete the sweep's directory with all of its runs."""
    if sweep_dir.path.is_symlink():
        raise ConfigError(
            f"{sweep_dir.path} is a symbolic link, so nothing was deleted. Give the path of its target directory, or remove the link."
        )
    with sending_alone(sweep_dir) as is_alone:
        problem = next(_reasons(sweep_dir, environ), None) if is_alone else "another process submits or runs its points"
        if problem is not None:
            raise RunBusyError(
                f"The sweep {sweep_dir.name} cannot be deleted: {problem}. Cancel it first, and wait until its runs have ended: `ddp-hpc sweep "
                f"cancel {sweep_dir.name}`."
            )
        away = renamed_away(sweep_dir.path)
    delete_renamed(away, f"The sweep {sweep_dir.name}")


def _reasons(sweep_dir: SweepDir, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield why the sweep must not be deleted."""
    sweep = read_sweep(sweep_dir)
    if sweep.backend == "slurm":
        yield from _jobs(sweep_dir, array.settled(sweep_dir, environ), environ)
    for run in map(sweep_dir.run, sweep.points):
        if works_here(run):
            yield f"its run {run.name} runs on this machine"


def _jobs(sweep_dir: SweepDir, sweep: Sweep, environ: Mapping[str, str]) -> Iterator[str]:
    queued = [one for one in client.queue(client.user_name(), environ) if not states.has_ended(one.state)]
    for one in sweep.arrays:
        if points_in_queue(one, queued):
            yield f"job {one.job_id} waits or runs"
    there = {name for entry in queued for name in (entry.job_id, entry.number)}
    for run in map(sweep_dir.run, sweep.points):
        job = read_queued_job(run)
        if job is not None and knows(run, job, environ) and job.job_id in there:
            yield f"job {job.job_id} of {run.name} waits or runs"
