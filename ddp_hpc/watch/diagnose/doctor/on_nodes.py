"""Has the nodes of a job checked: in the job that this process is in, or in a short one of its own."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.base.durable import make_directories
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.record import decode_record
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.directives import directives
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.preflight import PreflightReport
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of

_TIME_LIMIT_MIN = 5
_MODULE = "ddp_hpc.job.preflight"
_NUMBER = re.compile(r"[0-9]+")


def check_nodes(  # noqa: PLR0913  what is checked, and where
    spec: RunSpec, nodes: str, environ: Mapping[str, str], *, is_in_job: bool, paths: Sequence[str], patience_s: float
) -> PreflightReport:
    """Check so many nodes, or the named ones; with `is_in_job`, those of the job that `environ` names. `paths` have to be there on each.

    `patience_s`: how long the job may wait in the queue and run.

    Raises:
        ConfigError: where Slurm refuses the job, or the check fails.
        SlurmBusyError: where the job does not start and end in time.
    """
    folder = spec.path.parent / f".doctor-{secrets.token_hex(4)}"
    make_directories(spec.path.parent)
    options = [f"--folder={folder}", f"--gpus-per-node={spec.resources.num_gpus}"]
    options += [f"--path={path}" for path in (*paths, *workload_of(spec).input_paths(Path.cwd()))]
    options += [f"--interface={name}" for name in spec.network.interfaces]
    command = [sys.executable, "-m", _MODULE, *options]
    try:
        if is_in_job:
            answer = client.run_with_job_environ(command, environ, timeout_s=patience_s)
        else:
            answer = client.run_in_allocation(salloc_options(spec, nodes), command, environ, timeout_s=patience_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = parse_result(answer.stdout)
    if found is None:
        said = (answer.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        raise ConfigError(
            f"No node was checked, because the job that checks them did not run to its end. Its last line is: {said} (exit code {answer.returncode}). If Slurm refused the job, change `--nodes`, `resources.*` or `slurm.*`."
        )
    return found


_CHECK_OPTIONS = frozenset({"nodes", "ntasks-per-node", "time", "job-name"})
_LEFT_OUT_OPTIONS = frozenset(
    {"cpus-per-task", "mem", "chdir", "output", "open-mode", "signal", "requeue", "no-requeue", "dependency"}
)
"""Options of a run's job that the job of a check has its own for, or does without."""


def salloc_options(spec: RunSpec, nodes: str) -> list[str]:
    """Return what salloc gets: a short job of one task on each node, in the place where a run's would be."""
    is_list = _NUMBER.fullmatch(nodes) is None
    left_out = _CHECK_OPTIONS | _LEFT_OUT_OPTIONS | ({"nodelist"} if is_list else set())
    made = directives(spec, RunDir(spec.path), chdir=Path("/"), cpus_per_worker=1)
    kept = {flag: value for flag, value in made.items() if flag not in left_out}
    chosen = [f"--{flag}{'' if value is None else f'={value}'}" for flag, value in kept.items()]
    where = f"--nodelist={nodes}" if is_list else f"--nodes={nodes}"
    # Without --no-kill, Slurm ends the whole job when one of its nodes goes down, and what the others said is lost.
    own = ["--no-kill", "--ntasks-per-node=1", f"--time={_TIME_LIMIT_MIN}", "--job-name=ddp-hpc-doctor"]
    return [where, *own, *chosen]


def parse_result(printed: str) -> PreflightReport | None:
    """Return the result among what was printed, by an environment that greets, too; None without one."""
    found = (decode_record(line.encode(), PreflightReport) for line in reversed(printed.splitlines()))
    return next((one for one in found if one is not None), None)
