"""Whether the job that a shell's variables name still runs: a shell of salloc, or a tmux, outlives its job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from ddp_hpc.diagnose.doctor.questions import Answers, has_commands
from ddp_hpc.slurm.allocation import claimed_job_id, claimed_nodes
from ddp_hpc.slurm.hostlist import expand_hostlist
from ddp_hpc.slurm.states import parse_state, phrase

Standing = Literal["none", "runs", "gone", "unknown"]
"""Of the job that a shell's variables name: there is none; it runs; it does not, or not here; Slurm does not say."""


def standing(environ: Mapping[str, str], told: Answers) -> tuple[Standing, str]:
    """Return whether the job of a shell's variables runs, and what Slurm says of it."""
    job_id = claimed_job_id(environ)
    if job_id is None:
        return "none", ""
    said = f"the Slurm variables of this shell name job {job_id}"
    if "job" in told.problems or not has_commands(environ):
        return "unknown", f"{said}, but whether it runs is not known: {told.why_not('job')}"
    if told.job is None:
        return "gone", f"{said}, but Slurm knows no such job"
    state = parse_state(told.job.state)
    if state not in {"running", "suspended", "ending"}:
        return "unknown" if state == "unknown" else "gone", f"{said}, which {phrase(told.job.state)}"
    return _by_nodes(job_id, said, claimed_nodes(environ), told.job.nodes)


def _by_nodes(job_id: str, said: str, claimed: AbstractSet[str] | None, nodes: str) -> tuple[Standing, str]:
    """Tell a job that runs from one that has got other nodes since, or another user's that has its number."""
    if claimed is None:
        return "unknown", f"{said}, but SLURM_JOB_NODELIST does not name its nodes"
    if nodes and claimed != frozenset(expand_hostlist(nodes)):
        return "gone", f"{said}, which runs on {nodes}; they name {', '.join(sorted(claimed))}"
    return "runs", f"job {job_id} runs on {nodes or ', '.join(sorted(claimed))}"
