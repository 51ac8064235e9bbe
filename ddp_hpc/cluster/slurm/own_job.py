"""Whether the job that a shell's variables name still runs: a shell of salloc, or a tmux, outlives its job."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from ddp_hpc.base.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.allocation import (
    claimed_cluster,
    claimed_job_id,
    claimed_nodes,
    is_one_of_many_tasks,
    without_job,
)
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.cluster.slurm.queries import JobRecord
from ddp_hpc.cluster.slurm.states import parse_state, state_as_verb

JobStanding = Literal["none", "runs", "gone", "unknown"]
"""Of the job that a shell's variables name: there is none; it runs; it does not, or not here; Slurm does not say."""

ASK_S = 5.0
"""How long a command waits for Slurm's answer."""
SHELL_ADVICE = "open a new shell, or in bash `unset ${!SLURM_@}`: ddp-hpc ignores these variables here, but srun and sbatch read them"

_BOOTING = frozenset({"CONFIGURING", "POWER_UP_NODE"})
"""States of a job that has its nodes, such as one of `salloc` that shows its shell before they are up."""


def without_ended_job(environ: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Return the environment without the variables of a job that has ended, and a note that says so; else the same one, and no note.

    Slurm is asked, but not by each of many tasks: srun has just started these, so their job runs. Where Slurm does not answer, the
    variables stay, because a job's processes go on while the controller is down.
    """
    job_id = claimed_job_id(environ)
    if job_id is None or is_one_of_many_tasks(environ):
        return environ, ""
    job, problem, asked = None, "", ""
    try:
        job = client.job(job_id, environ, timeout_s=ASK_S)
        asked = client.config(environ, timeout_s=ASK_S).name if job is None else ""
    except (ConfigError, SlurmUnavailableError) as error:
        problem = str(error)
    state, said = standing_of_job(environ, job, problem, asked=asked)
    return (without_job(environ), f"note: {said}; {SHELL_ADVICE}") if state == "gone" else (environ, "")


def standing_of_job(
    environ: Mapping[str, str], job: JobRecord | None, problem: str = "", *, asked: str = ""
) -> tuple[JobStanding, str]:
    """Return whether the job of a shell's variables runs, and why that is so.

    `job` is that job as Slurm knows it, None where it knows no such job; `problem` says why Slurm gave no answer; `asked` is the
    name of the cluster that gave it, where that is known.
    """
    job_id = claimed_job_id(environ)
    if job_id is None:
        return "none", ""
    said = f"the Slurm variables of this shell name job {job_id}"
    if problem:
        return "unknown", f"{said}, but whether it runs is not known: {problem}"
    cluster = claimed_cluster(environ)
    if asked and cluster and asked != cluster:
        return "unknown", f"{said} of cluster {cluster}, but cluster {asked} answers here"
    if job is None:
        return "gone", f"{said}, but Slurm knows no such job"
    state = parse_state(job.state)
    if state not in {"running", "suspended", "ending"}:
        is_unknown = state == "unknown" or job.state in _BOOTING
        return "unknown" if is_unknown else "gone", f"{said}, which {state_as_verb(job.state)}"
    return _standing_by_nodes(job_id, said, claimed_nodes(environ), job.nodes)


def _standing_by_nodes(job_id: str, said: str, claimed: AbstractSet[str] | None, nodes: str) -> tuple[JobStanding, str]:
    """Tell a job that runs from one that has got other nodes since, or another user's that has its number."""
    if claimed is None:
        return "unknown", f"{said}, but SLURM_JOB_NODELIST does not name the job's nodes"
    # Slurm takes a failed node out of a job (`--no-kill`), and a user may give some back: the shell keeps the whole list.
    if nodes and not claimed >= frozenset(expand_hostlist(nodes)):
        return "gone", f"{said}, which runs on {nodes}, but SLURM_JOB_NODELIST names {', '.join(sorted(claimed))}"
    return "runs", f"job {job_id} runs on {nodes or ', '.join(sorted(claimed))}"
