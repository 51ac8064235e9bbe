"""Whether a run's job belongs to another Slurm cluster than this host's: clusters may share a file system, and so run directories."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob

_names: dict[str, str] = {}
"""PATH -> the ClusterName of the Slurm whose commands are there; asked for once, as a sweep may have a thousand points."""


def knows(run: RunDir, job: QueuedJob, environ: Mapping[str, str]) -> bool:
    """Return whether this host's Slurm is the one to ask about a job; False where another cluster had it, and the run has ended.

    Another cluster's Slurm does not know the job, which does not mean that the job is gone; and it may have another job of that
    number.
    """
    if not job.slurm_cluster:
        return True
    path = environ.get("PATH", "")
    if path not in _names:
        _names[path] = client.config(environ).name
    here = _names[path]
    if here in {"", job.slurm_cluster}:
        return True
    newest = Ledger.read(run).newest
    if newest is not None and newest.attempt >= job.attempt and newest.is_last:
        return False
    raise ConfigError(
        f"{run.name} was submitted as job {job.job_id} of the Slurm cluster {job.slurm_cluster}, but this host belongs to the cluster {here}, "
        f"so ddp-hpc cannot find out whether the job still waits or runs. Run the command on a login node of {job.slurm_cluster}."
    )
