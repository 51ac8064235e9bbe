"""The commands that a submission would start, and the environment variables of its first worker."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster import containers
from ddp_hpc.cluster.rendezvous import worker_env
from ddp_hpc.cluster.rendezvous.address import this_host
from ddp_hpc.cluster.rendezvous.choose_network import LOOPBACK_ADDRESS
from ddp_hpc.cluster.rendezvous.worker_env import OUR_SOURCE, Sourced
from ddp_hpc.cluster.slurm.steps import probe_argv
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.job.launcher import STEP_ARGV_BY_LAUNCHER, agent_argv, agents_step_argv
from ddp_hpc.job.node.cpus import share_node_cpus
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of

_UNKNOWN_ENDPOINT = Endpoint("ADDRESS", 0)
"""Stands for a value that only the job can determine."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The commands of an attempt, and what its first worker finds in its environment."""

    steps: Mapping[str, str]
    """Purpose -> command."""
    variables: Mapping[str, Sourced]
    """Of rank zero, as `ddp-hpc env` shows them; the other workers' ranks differ."""
    users: Sequence[str]
    """Names of the variables that the key `env` sets; values may be secrets."""

    def as_text(self) -> str:
        """Return it as comments, which may stand below a job script."""
        lines = ["ddp-hpc starts in the job:" if len(self.steps) > 1 else "ddp-hpc starts:"]
        for what, command in self.steps.items():
            lines += [f"  {what}:", f"    {command}"]
        if any("ADDRESS" in command for command in self.steps.values()):
            lines += ["ADDRESS and PORT are those of rank zero; the job chooses them when it has its nodes."]
        lines += ["Rank zero gets these environment variables; other workers get other ranks:"]
        for name, fact in self.variables.items():
            if fact.value is None:
                lines.append(f"  {name} is not known yet: {fact.rule}")
            else:
                lines.append(f"  {name}={fact.value}  ({fact.source}: {fact.rule})")
        lines += [f"  {name}: set by the key `env.{name}`" for name in self.users]
        return "".join(f"# {' '.join(line.splitlines())}\n" for line in lines)


def make_launch_plan(request: SubmitRequest, backend: str, import_paths: Sequence[Path]) -> LaunchPlan:
    """Return what a run of the back end of that name would start, made by the code that starts it.

    `import_paths`: where the run would import the user's code from.
    """
    start = _PLANNERS.get(backend)
    if start is None:
        raise ConfigError(
            f"`--explain` can describe runs on {' and '.join(_PLANNERS)}, but this run would start on {backend}. Leave out `--explain`."
        )
    run, spec, environment = request.run, request.spec, request.environ
    resources = spec.resources
    wrapper = _container_wrapper(spec, run, import_paths, environment)
    context = JobContext(
        run=run, spec=spec, workload=workload_of(spec), world=resources.world, environ=environment, wrapper=wrapper
    )
    steps, facts, is_inherited = start(context, spec)
    paths = list(dict.fromkeys(map(str, import_paths)))
    ranks = worker_env.ranks_by_shape(
        node_rank=0, num_nodes=resources.nodes, num_workers=resources.local_world_size, local_rank=0
    )
    environ = {**(worker_env.users_environ(environment) if is_inherited else {}), **spec.environ}
    return LaunchPlan(
        steps=steps,
        variables={
            **ranks,
            **worker_env.keep_users_values(facts, environ, fixed=worker_env.ENDPOINT),
            **worker_env.path_variables(paths, os.pathsep.join(paths)),
        },
        users=list(spec.environ),
    )


def _container_wrapper(
    spec: RunSpec, run: RunDir, import_paths: Sequence[Path], environment: Mapping[str, str]
) -> containers.CommandWrapper:
    here = Path.cwd()
    inputs = [*workload_of(spec).input_paths(here)]
    paths = containers.HostPaths(work_dir=here, import_paths=import_paths, inputs=inputs)
    inside = containers.container_setup(spec, run, paths, environment)
    if inside is None:
        return containers.BARE
    try:
        runtime = containers.find_runtime(spec, environment)
    except ConfigError:  # the job's nodes may have it, or load its module
        runtime = containers.candidate_runtimes(spec.container.runtime)[0]
    return containers.command_wrapper(inside, runtime, spec.container.python)


_StartPlan = tuple[dict[str, str], dict[str, Sourced], bool]
"""Purpose -> command; the variables that network and CPUs decide; whether workers inherit those of the shell that submits."""


def _plan_local(context: JobContext, spec: RunSpec) -> _StartPlan:
    resources = spec.resources
    address = Sourced(value=LOOPBACK_ADDRESS, source=OUR_SOURCE, rule="the run uses this machine only")
    computing = share_node_cpus({}, resources.local_world_size, resources.cpus_per_worker).threads
    port = Sourced(rule="ddp-hpc takes a free port when the workers start")
    interface = this_host().interface_towards(LOOPBACK_ADDRESS)
    facts = {**worker_env.endpoint(address, port), **worker_env.node_variables(interface, computing)}
    return {"the workers": shlex.join(agent_argv(context))}, facts, True


def _plan_slurm(context: JobContext, spec: RunSpec) -> _StartPlan:
    workers, cpus = spec.resources.local_world_size, spec.resources.cpus_per_worker
    if spec.launcher == "agent":
        step = shlex.join(agents_step_argv(context))
    else:
        step = shlex.join(STEP_ARGV_BY_LAUNCHER[spec.launcher](context, 0, _UNKNOWN_ENDPOINT))
        step = step.replace(str(_UNKNOWN_ENDPOINT), "ADDRESS PORT").replace("ADDRESS:0", "ADDRESS:PORT")
    probe = shlex.join([*probe_argv(context.world.num_nodes), "..."])
    address = Sourced(rule="the job chooses the network when it has its nodes")
    interface = Sourced(rule="each node takes its own interface on the network that leads to rank zero")
    computing = worker_env.threads(spec.cpus_per_task * workers, workers, cpus, source="Slurm")
    port = Sourced(rule="the job takes a free port on its first node")
    facts = {**worker_env.endpoint(address, port), **worker_env.node_variables(interface, computing)}
    # sbatch passes all variables on by default: https://slurm.schedmd.com/sbatch.html#OPT_export
    is_inherited = str(spec.slurm.extra.get("export", "")).upper() != "NONE"
    return {"a probe of each node's networks": probe, "the workers": step}, facts, is_inherited


_PLANNERS: Mapping[str, Callable[[JobContext, RunSpec], _StartPlan]] = {"local": _plan_local, "slurm": _plan_slurm}
"""By back end."""
