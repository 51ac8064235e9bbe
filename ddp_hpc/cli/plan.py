"""What a submission would start beyond the line that the user sees: the commands, and the variables that follow."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.containers import BARE, Housing, candidate_runtimes, find_runtime, house, inside_of
from ddp_hpc.errors import ConfigError
from ddp_hpc.job.agent import Crew, rank_environ
from ddp_hpc.job.cpus import share_here
from ddp_hpc.job.launcher import STEPS, Start, agent_argv, step_of_agents
from ddp_hpc.job.meeting import LOOPBACK, Meeting, network_defaults
from ddp_hpc.job.surroundings import torch_defaults
from ddp_hpc.records import Cluster
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.steps import probe_argv
from ddp_hpc.spec import RunSpec

_IN_JOB = Meeting("ADDRESS", 0)
"""Stands for what is decided in the job."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The commands of an attempt, and what its first worker finds in its environment."""

    steps: Mapping[str, str]
    """What it is for -> the command."""
    variables: Mapping[str, str]
    """For rank zero; the other workers' ranks differ."""
    users: Sequence[str]
    """Names of the variables that the key `env` sets; values may be secrets."""

    def as_text(self) -> str:
        """Return it as comments, which may stand below a job script."""
        lines = ["In the job, the supervisor starts:" if len(self.steps) > 1 else "The supervisor starts:"]
        for what, command in self.steps.items():
            lines += [f"  {what}:", f"    {command}"]
        lines += ["ADDRESS, PORT and INTERFACE are what the supervisor and each node find when the job has its nodes."]
        lines += [
            "Rank zero finds these variables (the others' ranks differ; but for the ranks, what is set already stays):"
        ]
        lines += [f"  {name}={value}" for name, value in self.variables.items()]
        lines += [f"  {name}: by the key `env.{name}`" for name in self.users]
        return "".join(f"# {' '.join(line.splitlines())}\n" for line in lines)


def plan_of(spec: RunSpec, cluster: Cluster, import_paths: Sequence[Path], environment: Mapping[str, str]) -> Plan:
    """Return what would be started, made by the code that starts it.

    Raises:
        ConfigError: where the image cannot be used.
    """
    run = RunDir(spec.path)
    housing = _housing(spec, run, import_paths, environment)
    steps = {"the workers": _command(spec, run, cluster, housing)}
    if cluster == "slurm":
        probe = [*probe_argv(spec.resources.nodes), "..."]
        steps = {"a look at each node's networks": shlex.join(probe), **steps}
    return Plan(
        steps=steps,
        variables=_variables(spec, run, cluster, import_paths),
        users=list(spec.environ),
    )


def _housing(spec: RunSpec, run: RunDir, import_paths: Sequence[Path], environment: Mapping[str, str]) -> Housing:
    inside = inside_of(spec, run, import_paths=list(map(str, import_paths)), work_dir=Path.cwd(), environ=environment)
    if inside is None:
        return BARE
    try:
        runtime = find_runtime(spec, environment)
    except ConfigError:
        runtime = candidate_runtimes(spec.container.runtime)[0]  # the job's nodes may have it, or load its module
    return house(inside, runtime, spec.container.python)


def _command(spec: RunSpec, run: RunDir, cluster: Cluster, housing: Housing) -> str:
    if cluster == "local":
        return shlex.join(agent_argv(spec, run, housing))
    if spec.launcher == "agent":
        return shlex.join(step_of_agents(spec, run, housing))
    start = Start(spec=spec, run=run, attempt=0, meeting=_IN_JOB, housing=housing)
    return (
        shlex.join(STEPS[spec.launcher](start))
        .replace(str(_IN_JOB), "ADDRESS PORT")
        .replace("ADDRESS:0", "ADDRESS:PORT")
    )


def _variables(spec: RunSpec, run: RunDir, cluster: Cluster, import_paths: Sequence[Path]) -> dict[str, str]:
    resources = spec.resources
    num_workers = resources.local_world_size
    share = share_here({}, num_workers, resources.cpus_per_worker)
    crew = Crew(run=run, attempt=0, num_workers=num_workers, share=share, meeting=_IN_JOB, num_nodes=resources.nodes)
    ranks = {**rank_environ(crew, 0, 0), "MASTER_ADDR": "ADDRESS", "MASTER_PORT": "PORT"}
    threads = torch_defaults(spec.cpus_per_task if cluster == "slurm" else share.num_threads)
    shown = network_defaults(LOOPBACK) if cluster == "slurm" else {}
    networks = {name: "INTERFACE" if name.endswith("_IFNAME") else value for name, value in shown.items()}
    code = os.pathsep.join(dict.fromkeys(map(str, import_paths)))
    return {**ranks, **threads, **networks, **({"PYTHONPATH": code} if code else {})}
