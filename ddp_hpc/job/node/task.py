"""One worker in a process that srun or torchrun has started; agents fork theirs.

    python -m ddp_hpc.job.node.task RUN_DIR --worker ddp_hpc.train.worker --attempt 0 --meet "ADDRESS PORT"

With `--meet`, srun has started it, one task a worker, and its rank is Slurm's; without, torchrun has, and says so in
the environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import ConfigError, exit_code_of
from ddp_hpc.cluster.rank_probe.folder import make_folder
from ddp_hpc.cluster.rendezvous.address import this_host
from ddp_hpc.cluster.rendezvous.worker_env import (
    PROBE_FOLDER,
    WorkerEnv,
    endpoint_of_run,
    launched_worker_env,
    node_variables,
    probe_variables,
    ranks_of_step,
    read_worker_env,
    torchrun_facts,
)
from ddp_hpc.cluster.slurm.allocation import step_task
from ddp_hpc.job.node.cpus import share_node_cpus
from ddp_hpc.job.node.python_environ import (
    import_path_variables,
    make_users_code_importable,
    run_and_exit,
    run_worker,
    shorten_tmpdir,
)
from ddp_hpc.job.node.start_sampler import end_sampling, start_sampling
from ddp_hpc.job.wire.endpoint import Endpoint, PortTakenError, listen
from ddp_hpc.run.run_dir.failure_reports import report_failed_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_rank_zero_exit


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return the exit code that srun or torchrun is to see."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.task", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--meet", type=Endpoint.parse, metavar="'ADDRESS PORT'")
    parser.add_argument("--gpus", type=int, default=0)
    arguments = parser.parse_args(argv)
    # A signal that comes during the imports stays pending until the worker has handlers.
    processes.block_awaited_signals()
    processes.block_interruptions()
    run, endpoint, python = RunDir(arguments.run), arguments.meet, import_path_variables(os.environ)
    if endpoint is None:
        processes.die_with_parent(os.getppid())  # torchrun, which would leave its workers behind when killed
    place = None if endpoint is None else step_task(os.environ)
    import_paths = make_users_code_importable(os.environ)
    given = _environ_of_torchrun(import_paths) if endpoint is None else _environ_of_srun(endpoint, import_paths)
    os.environ.update(given.environ)
    # torchrun's node has made one for all its workers. What a killed task leaves, the next one removes.
    probes = None if PROBE_FOLDER in os.environ else make_folder()
    shorten_tmpdir(probes, os.environ, says=(place.rank if place else int(os.environ["RANK"])) == 0)
    os.environ.update(probe_variables(probes.path if probes else None, is_alone=True))
    # torchrun's node samples for all its workers, and of srun's tasks on a node, the first one does.
    sampler = None
    if place is not None and place.local_rank == 0:
        sampler = start_sampling(
            run,
            {**os.environ, **python},
            attempt=arguments.attempt,
            node_rank=place.node_rank,
            num_gpus=arguments.gpus,
            is_of_step=place.local_world_size > 1,
        )
    try:
        code = _run_worker(run, arguments)
    finally:
        if probes:
            probes.close()
        end_sampling(sampler)
    if os.environ["RANK"] == "0":
        write_rank_zero_exit(run, arguments.attempt, code)
    return exit_codes.FINISHED if code == exit_codes.STOPPED else code


def _environ_of_srun(endpoint: Endpoint, import_paths: Sequence[str]) -> WorkerEnv:
    interface, threads = (this_host().interface_towards(endpoint.address), share_node_cpus(os.environ, 1, None).threads)
    address = endpoint_of_run(endpoint.address, endpoint.port)
    made = {**ranks_of_step(step_task(os.environ)), **address, **node_variables(interface, threads)}
    return launched_worker_env("srun", made, os.environ, import_paths)


def _environ_of_torchrun(import_paths: Sequence[str]) -> WorkerEnv:
    """Return what torchrun gives its worker, and what `torchrun_node` gave torchrun."""
    node = read_worker_env(os.environ)
    assert node is not None  # noqa: S101  `torchrun_node` sees to it
    environ = {name: value for name, value in os.environ.items() if name not in node.given}
    made = {**torchrun_facts(os.environ), **node.variables}
    return launched_worker_env("torchrun", made, environ, import_paths)


def _run_worker(run: RunDir, arguments: argparse.Namespace) -> int:
    endpoint, attempt, rank = arguments.meet, arguments.attempt, int(os.environ["RANK"])
    try:
        processes.allow_open_files(int(os.environ["WORLD_SIZE"]))
        listen_fd = listen(endpoint).detach() if endpoint is not None and rank == 0 else None
    except PortTakenError:
        return exit_codes.PORT_TAKEN
    except (ConfigError, OSError, ValueError) as error:
        report_failed_start(run.rank_error(attempt, rank), error, rank=rank, log=run.console)
        return exit_code_of(error)
    return run_worker(run, arguments.worker, os.environ, attempt=attempt, listen_fd=listen_fd)


if __name__ == "__main__":
    run_and_exit(main)
