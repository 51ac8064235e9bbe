"""Run this process's share of a run, where another program has started the processes: torchrun, srun, mpiexec, flux, Kubeflow, SkyPilot.

torchrun --nproc-per-node=4 -m ddp_hpc join my_run.yaml     a process for each worker
mpiexec -n 8 ddp-hpc join my_run.yaml                       the same
ddp-hpc join my_run.yaml                                    on each node, where one process for each node was started
ddp-hpc join my_run.yaml --nnodes 2 --node-rank 0 --master-addr 10.0.0.1      likewise, started by hand

`ddp-hpc env` says which launcher it recognises. That launcher restarts what fails; the run resumes from its newest checkpoint.
After `--` stands the command of your own script, as for `ddp-hpc submit`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.runs import add_config_arguments, runs_dir_setting
from ddp_hpc.cli.verbs.submit import config_and_settings
from ddp_hpc.run.run_dir.paths import RunDir

if TYPE_CHECKING:
    from ddp_hpc.cluster.rendezvous.launchers import RankPlace
    from ddp_hpc.run.config.resolve import Resolved

_PLACE_OPTIONS = ("nnodes", "node_rank", "master_addr", "master_port")
"""Options; the table of launchers looks for each in a variable, such as PET_NNODES."""
_DEFAULT_PORT = "29500"
"""torchrun's own default."""
_WORKER_MODULE = "ddp_hpc.job.node.join"
_NODE_MODULE = "ddp_hpc.job.node.join_node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nnodes", metavar="N", help="by hand: how many nodes there are")
    parser.add_argument("--node-rank", metavar="N", help="by hand: the number of this node, from 0")
    parser.add_argument("--master-addr", metavar="ADDRESS", help="by hand: the address of node 0")
    parser.add_argument(
        "--master-port", metavar="PORT", help=f"by hand: a free port of node 0 (default: {_DEFAULT_PORT})"
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Find this process's place, and become the worker, or the process that starts the workers of this node."""
    from ddp_hpc.cluster.rendezvous.address import this_host
    from ddp_hpc.cluster.rendezvous.launchers import find_place, with_port_of_run
    from ddp_hpc.cluster.slurm.allocation import read_allocation
    from ddp_hpc.cluster.slurm.own_job import without_ended_job

    environment, note = without_ended_job(environment)
    if note:
        print(note, file=sys.stderr)
    environ = _environ_with_options(args, environment)
    first_node = first_pbs_node(environ)
    # In a task of srun, too, the user's word counts.
    allocation = read_allocation(environ) if args.nnodes is None else None
    place = find_place(environ, allocation, this_host(), first_node=first_node)
    if place is None:
        raise ConfigError(
            "No launcher that ddp-hpc knows has started this process, so its place among the others is not known. Start it by torchrun, "
            "srun or mpiexec, name the nodes with `--nnodes`, `--node-rank` and `--master-addr`, or use `ddp-hpc submit`."
        )
    words = [word for word in (args.config, *args.settings) if word is not None]
    # Where the container has no file, settings alone do, if one is `name`.
    is_complete = any(word.startswith("name=") for word in words) and all("=" in word for word in words)
    path, settings = (None, words) if is_complete else config_and_settings(args, environment)
    place, resolved = _resolve_world(args, place, path, settings, environment)
    run_dir = RunDir(resolved.spec.path)
    import_paths = [Path.cwd(), *([] if path is None else [path.absolute().parent])]
    is_finished = place.rank == 0 and _prepare_run_dir(run_dir, resolved)
    options = [*(f"--import-path={one}" for one in import_paths), *(["--finished"] if is_finished else [])]
    options += [] if first_node is None else [f"--first-node={first_node}"]
    place = with_port_of_run(place, run_dir.path.absolute())
    argv = _worker_argv(run_dir, options) if place.scope == "worker" else _node_argv(run_dir, resolved, place, options)
    sys.stdout.flush()
    sys.stderr.flush()
    # The same process goes on, so that its launcher signals the right one, and as a new Python, which has nothing of a command.
    # It does not import a json.py of this directory in place of Python's own.
    os.execve(sys.executable, [sys.executable, *argv], {"PYTHONSAFEPATH": "ddp_hpc", **environ})  # noqa: S606  no shell is needed


def _environ_with_options(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with the options that name a place by hand."""
    given = {name: value for name in _PLACE_OPTIONS if (value := getattr(args, name)) is not None}
    if not given:
        return dict(environment)
    missing = [f"`--{name.replace('_', '-')}`" for name in ("nnodes", "node_rank", "master_addr") if name not in given]
    if missing:
        raise ConfigError(
            f"The place of this node is given by hand, but {' and '.join(missing)} is missing. Give all three."
        )
    from ddp_hpc.cluster.rendezvous.launchers import LAUNCHERS  # late: most starts name no place by hand

    marks = {name for launcher in LAUNCHERS for name in launcher.marks}
    others = {name: value for name, value in environment.items() if name not in marks}  # the user's word counts
    by_hand = {f"PET_{name.upper()}": value for name, value in given.items()}
    return {**others, "PET_MASTER_PORT": _DEFAULT_PORT, **by_hand}


def first_pbs_node(environ: Mapping[str, str]) -> str | None:
    """Return the first node of a job of PBS, on the host that has the file of its nodes."""
    try:
        words = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
    except (KeyError, OSError, ValueError):
        return None
    return words[0] if words else None


def _resolve_world(
    args: argparse.Namespace,
    place: RankPlace,
    path: Path | None,
    settings: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[RankPlace, Resolved]:
    """Return the place with its number of workers, and the configuration with the nodes and workers that the launcher gives."""
    from ddp_hpc.cluster.rendezvous.launchers import with_workers
    from ddp_hpc.run.config.resolve import resolve

    here, command = runs_dir_setting(args.runs_dir), args.command or ()

    def resolved_with(more: Sequence[str]) -> Resolved:
        return resolve(
            path, [*settings, *here, *more], environment, site=args.site, is_for_slurm=False, command=command
        )

    asked = resolved_with([])
    resources = asked.spec.resources
    is_set = {key for key, source in asked.sources.items() if source != "default"}
    known = place.local_world_size
    if known is not None and place.scope == "node" and "resources.workers_per_node" in is_set:
        # Fewer workers than GPUs, or several on a CPU: the launcher only counts GPUs.
        known = resources.local_world_size
        by_node = replace(place, local_world_size=None, sources={"node_rank": place.sources["node_rank"]})
        place = with_workers(by_node, known)
    placed = with_workers(place, resources.local_world_size)
    given = [f"resources.nodes={placed.num_nodes}", f"resources.workers_per_node={placed.local_world_size}"]
    has_gpus = (
        "local_world_size" in placed.sources and placed.scope == "node" and "GPU" in placed.sources["local_world_size"]
    )
    if has_gpus and "resources.gpus_per_node" not in is_set:
        given.append(f"resources.gpus_per_node={placed.local_world_size}")
    if placed.scope == "worker" and placed.launcher != "torchrun":
        given.append("launcher=srun")  # one task for each worker, which may see its own GPU alone
    if placed.rank == 0 and resources.nodes != placed.num_nodes and "resources.nodes" in is_set:
        print(
            f"note: `resources.nodes` is {resources.nodes}, but {placed.launcher} has started {placed.num_nodes}, which counts",
            file=sys.stderr,
        )
    resolved = resolved_with(given)
    for key, value in (("container.image", resolved.spec.container.image), ("stage.dir", resolved.spec.stage.dir)):
        if value is not None:
            raise ConfigError(
                f"`{key}` is set, but another program has started this process, and it chooses the image and copies files. Unset "
                f"`{key}`, and name the image there."
            )
    return placed, resolved


def _prepare_run_dir(run_dir: RunDir, resolved: Resolved) -> bool:
    """Make the run's directory, or renew its configuration; return whether the run has finished already."""
    from ddp_hpc.launch.submission.run_dir_setup import is_finished, make_run_dir, refuse_unusable_place
    from ddp_hpc.run.config.resolve import render_resolved

    refuse_unusable_place(run_dir)
    is_new = not run_dir.config.exists()
    if not is_new and is_finished(run_dir, resolved.spec):
        print(f"{run_dir.name} has finished already, so there is nothing to do", file=sys.stderr)
        return True
    make_run_dir(run_dir, render_resolved(resolved), is_new=is_new)
    return False


def _worker_argv(run_dir: RunDir, options: Sequence[str]) -> list[str]:
    return ["-m", _WORKER_MODULE, str(run_dir.path), *options]


def _node_argv(run_dir: RunDir, resolved: Resolved, place: RankPlace, options: Sequence[str]) -> list[str]:
    """Return the command that starts torchrun on this node."""
    from ddp_hpc.cluster.rendezvous.choose_network import LOOPBACK_ADDRESS
    from ddp_hpc.job.wire.endpoint import Endpoint
    from ddp_hpc.run.workload.table import workload_of

    endpoint = Endpoint(LOOPBACK_ADDRESS, 0)
    if place.num_nodes > 1:
        endpoint = Endpoint(str(place.address.value), int(str(place.port.value)))
    stop_signal = workload_of(resolved.spec).stop_signal
    return [
        *("-m", _NODE_MODULE, str(run_dir.path), f"--stop-signal={stop_signal}", "--"),
        *(f"--nnodes={place.num_nodes}", f"--nproc-per-node={place.local_world_size}"),
        *(f"--rdzv-endpoint={endpoint.netloc}", f"--rdzv-conf=rank={place.node_rank}"),
        f"--max-restarts={resolved.spec.torchrun.max_restarts}",
        *_worker_argv(run_dir, [*options, "--of-node"]),
    ]
