"""Print the environment variables that ddp_hpc gives a worker: the value, the source and the reason of each.

In a worker of a run, and in its child processes, these are the variables that it has got. Anywhere else they are those that
this process would get: as a task of a Slurm job, as a job's shell on behalf of all tasks, or as a single process.

srun bash -c 'eval "$(ddp-hpc env --export)"; exec python train.py'

ddp-hpc env capture        print this Python's versions, GPU driver, loaded modules and packages
ddp-hpc env capture RUN    print those of a run, and what differs here
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.formatting import as_json, or_dash, table
from ddp_hpc.cli.runs import add_runs_dir_option, chosen_run

if TYPE_CHECKING:
    from ddp_hpc.cluster.rendezvous.worker_env import WorkerEnv
    from ddp_hpc.run.run_dir.software_versions import Environment


_DIFFERENCE_HINT = (
    "Drivers, modules and variables often differ between a login node and a compute node: that needs no action. Where Python or "
    "packages differ, a run that this `ddp-hpc` submits uses those of this host, unless it has a container or `stage.archive`."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("capture",), nargs="?", help="default: print the variables")
    parser.add_argument("run", metavar="RUN", nargs="?", help="with `capture`: a run's name, directory or job id")
    add_runs_dir_option(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON instead of text")
    how.add_argument(
        "--export",
        action="store_true",
        help="print `export` lines for the shell's `eval`, for variables that are not set yet",
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if args.action == "capture":
        return _show_software(args, environment)
    from ddp_hpc.cluster.rendezvous.worker_env import read_worker_env
    from ddp_hpc.cluster.slurm.own_job import without_ended_job

    found = read_worker_env(environment)
    if found is None:
        environment, note = without_ended_job(environment)
        if note:
            print(note, file=sys.stderr)
        found = _derive_worker_env(environment)
    if args.json:
        rows = [
            {"name": name, **asdict(fact), "refused": [{"name": one, "why": why} for one, why in fact.refused.items()]}
            for name, fact in found.variables.items()
        ]
        print(as_json({"process": found.process, "variables": rows}))
    elif args.export:
        _print_exports(found)
    else:
        _print_variables(found)
    return 0


def _derive_worker_env(environment: Mapping[str, str]) -> WorkerEnv:
    """Return the variables of a process that a launcher of another program has started, or of Slurm's, which are derived."""
    from ddp_hpc.cli.verbs.join import first_pbs_node
    from ddp_hpc.cluster.rendezvous.address import this_host
    from ddp_hpc.cluster.rendezvous.derive_env import derive
    from ddp_hpc.cluster.rendezvous.launchers import SRUN, find_place, recognise, worker_env_of
    from ddp_hpc.cluster.slurm.allocation import read_allocation

    allocation, host, place = read_allocation(environment), this_host(), None
    if recognise(environment, allocation) is not SRUN:
        place = find_place(environment, allocation, host, first_node=first_pbs_node(environment))
    return derive(environment, allocation, host) if place is None else worker_env_of(place, environment, host)


def _show_software(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.run.run_dir.software_versions import change_texts, environment_here, newest_environment

    if args.export:
        raise ConfigError(
            "`--export` exports the workers' variables, which `capture` does not print. Leave out one of them."
        )
    here = environment_here(environment)
    if args.run is None:
        print(as_json(asdict(here)) if args.json else _software_text(here))
        return 0
    run_dir = chosen_run(args, environment)
    newest = newest_environment(run_dir)
    if newest is None:
        raise ConfigError(
            f"{run_dir.name} has not recorded its environment yet, because its workers have not started. Try again when they have."
        )
    attempt, used = newest
    changed = list(change_texts(used, here))
    if args.json:
        print(as_json({"attempt": attempt, "environment": asdict(used), "differs_here": changed}))
    else:
        print(f"{run_dir.name}, attempt {attempt}, as recorded when its workers started\n\n{_software_text(used)}\n")
        if changed:
            print(f"different on this host now (attempt {attempt} -> this host):", *changed, _DIFFERENCE_HINT, sep="\n")
        else:
            print("This host has the same.")
    return 0


def _software_text(found: Environment) -> str:
    rows: list[tuple[str, str]] = []
    for name, value in asdict(found).items():
        if isinstance(value, dict):
            rows += [(f"{name}: {key}", text) for key, text in value.items()]
        else:
            rows.append((name, or_dash(", ".join(value) if isinstance(value, tuple) else value)))
    return table(("", ""), rows).lstrip("\n")


def _print_exports(found: WorkerEnv) -> None:
    for name, value in found.given.items():
        quoted = shlex.quote(value)  # in quotes in any case: the form of a line does not depend on its value
        print(f"export {name}={quoted if quoted != value else repr(value)}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # the only ones that nobody can do without
        if found.value(name) is None:
            print(
                f"note: {name} is not exported, as ddp-hpc cannot find its value: {found.variables[name].rule}",
                file=sys.stderr,
            )


def _print_variables(found: WorkerEnv) -> None:
    print(f"{found.process}\n")
    rows = [(name, or_dash(fact.value), fact.source, fact.rule) for name, fact in found.variables.items()]
    print(table(("NAME", "VALUE", "SOURCE", "WHY"), rows))
    refused = [(name, *other) for name, fact in found.variables.items() for other in fact.refused.items()]
    if refused:
        print()
        print(table(("FOR", "NOT TAKEN", "WHY"), refused))
