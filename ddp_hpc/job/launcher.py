"""Launchers: from a spec to the command that starts its workers."""

from __future__ import annotations

import sys

from ddp_hpc.run_dir import RunDir
from ddp_hpc.spec import RunSpec

WORKER = "ddp_hpc.train.worker"


def agent_argv(spec: RunSpec, run: RunDir, *, attempt: int) -> list[str]:
    """Return the command of the node agent on this machine."""
    resources = spec.resources
    argv = [sys.executable, "-m", "ddp_hpc.job.agent", str(run.path), "--worker", WORKER]
    argv += ["--attempt", str(attempt), "--num-workers", str(resources.local_world_size)]
    if resources.cpus_per_worker is not None:
        argv += ["--cpus-per-worker", str(resources.cpus_per_worker)]
    return argv
