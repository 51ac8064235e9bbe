"""One worker in a process that another program's launcher has started (torchrun, srun, mpiexec, flux): it joins the others.

    python -m ddp_hpc.job.node.join RUN_DIR

The launcher owns what a supervisor does otherwise: it starts the workers, ends them when one has failed, and restarts them. Rank
zero acquires the run and writes the ledger; the others learn from it which attempt this is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import ConfigError, exit_code_of
from ddp_hpc.cluster.rendezvous.address import this_host
from ddp_hpc.cluster.rendezvous.launchers import (
    TORCHRUN,
    RankPlace,
    find_place,
    numeric_address,
    with_port_of_run,
    worker_env_of,
)
from ddp_hpc.cluster.rendezvous.worker_env import path_variables
from ddp_hpc.cluster.slurm.allocation import read_allocation
from ddp_hpc.job import attempt_start
from ddp_hpc.job.ending import last_resort
from ddp_hpc.job.job_context import JobContext, Outcome, read_context
from ddp_hpc.job.node.cpus import share_node_cpus
from ddp_hpc.job.node.join_attempt import gather_at_port, gather_in_store
from ddp_hpc.job.node.python_environ import IMPORT_PATH_NAME, make_users_code_importable, run_and_exit, run_worker
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.failure_reports import report_failed_start
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_rendezvous_token, read_stop_request
from ddp_hpc.run.workload.table import workload_of
from ddp_hpc.run.world import World

_ATTEMPT_OF_FINISHED_RUN = -1
"""In place of an attempt's number: the run has finished already."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return the exit code that its launcher is to see."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.join", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--import-path", action="append", default=[], help="where the worker finds the user's code")
    parser.add_argument("--first-node", help="the first node of the job, where PBS names it")
    parser.add_argument("--finished", action="store_true", help="the run has finished already; tell the other ranks")
    parser.add_argument("--of-node", action="store_true", help="`join_node` has started the launcher")
    arguments = parser.parse_args(argv)
    if arguments.import_path:
        os.environ[IMPORT_PATH_NAME] = os.pathsep.join(arguments.import_path)
    place = find_place(os.environ, read_allocation(os.environ), this_host(), first_node=arguments.first_node)
    if place is None or place.scope == "node":
        raise ConfigError(
            "No launcher that ddp-hpc knows has started this process as a worker. Start it with `ddp-hpc join`."
        )
    if place.launcher == TORCHRUN.name:
        # A killed torchrun ends no worker, and this one would hold the run and its GPU.
        processes.die_with_parent(os.getppid())
    run, place = RunDir(arguments.run), with_port_of_run(place, RunDir(arguments.run).path.absolute())

    def begin() -> int:
        processes.block_awaited_signals()  # the attempt that begins is to be ended by the worker
        return _ATTEMPT_OF_FINISHED_RUN if arguments.finished or context is None else _begin_attempt(context, place)

    try:
        with nullcontext() if place.is_store_hosted else processes.leaving_at_stop_signals():
            context = None
            if place.rank == 0 and not arguments.finished:  # it begins and concludes the attempt, as a supervisor does
                world = World(num_nodes=place.num_nodes, workers_per_node=place.local_world_size or 1)
                context = replace(read_context(run, None), world=world, environ=dict(os.environ))
            attempt, listen_fd = _gather_ranks(run, place, begin)
    except processes.StopSignalled:
        sys.stderr.write(f"{run.name}: rank {place.rank} was stopped while it waited for the other ranks\n")
        return exit_codes.STOPPED
    if attempt == _ATTEMPT_OF_FINISHED_RUN:
        return exit_codes.FINISHED
    processes.block_awaited_signals()  # a signal that comes during the imports stays pending until the worker has handlers
    code = _run_rank(run, place, attempt, listen_fd)
    is_stop_asked = context is not None and read_stop_request(run) is not None
    if context is not None:
        reason = last_resort.conclude_in_any_case(context, attempt, Outcome(code=code)).end.reason
        sys.stderr.write(f"ended: {reason}\n" if reason else "")
    if code != exit_codes.STOPPED:
        return code
    # To a launcher, each code but zero is a failure, and the highest one counts: rank zero's is enough.
    is_to_continue = place.rank == 0 and not arguments.of_node and not is_stop_asked
    return exit_codes.STOPPED if is_to_continue else exit_codes.FINISHED


def _gather_ranks(run: RunDir, place: RankPlace, begin: Callable[[], int]) -> tuple[int, int | None]:
    """Wait for all ranks; return the attempt's number, which rank zero chooses when all are there, and its socket for the store."""
    if place.world_size == 1:
        return begin(), None
    if place.is_store_hosted:
        return gather_in_store(place, begin), None
    return gather_at_port(place, numeric_address(place, this_host()), begin, run=run)


def _begin_attempt(context: JobContext, place: RankPlace) -> int:
    """Acquire the run, as a supervisor does; return the attempt's number."""
    run, workload = context.run, context.workload
    if processes.take_lock(run.lock, patience_s=ownership.LOCK_PATIENCE_S) is None:  # this process holds it to its end
        raise ConfigError(ownership.busy_message(run))
    ledger = Ledger.read(run)
    newest = ledger.newest
    if newest is not None and newest.ending is None:
        reason = "the launcher that started the workers ended them before they recorded how this attempt ended"
        progress = workload.progress(run, ledger)
        end = End(ending=Ending.FAILED, exit_code=-9, reason=reason, cause=Cause.UNEXPLAINED, last_step=progress)
        record_end(run, newest.attempt, end)
    run.stop_request.unlink(missing_ok=True)
    attempt = attempt_start.begin_attempt(run, workload, None)
    sys.stderr.write(f"{run.name}, attempt {attempt}: {place.description}\n")
    return attempt


def _run_rank(run: RunDir, place: RankPlace, attempt: int, listen_fd: int | None) -> int:
    """Run this rank to its end; return its exit code, one of `exit_codes`."""
    try:
        if place.world_size > 1:
            read_rendezvous_token(run.rendezvous_token(attempt))  # waits until this node's file system shows it
        spec = load_resolved(run.config, is_patient=True)
        os.environ.update(spec.environ)
        import_paths = make_users_code_importable(os.environ)
        num_workers, asked = (
            (1, None) if place.launcher == "srun" else (place.local_world_size or 1, spec.resources.cpus_per_worker)
        )
        computing = share_node_cpus(os.environ, num_workers, asked).threads
        made = worker_env_of(place, os.environ, this_host(), computing)
        paths = path_variables(import_paths, os.environ.get("PYTHONPATH"))
        of_paths = {name: fact.value for name, fact in paths.items() if fact.value is not None}
        os.environ.update({**made.environ, **of_paths})
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
        report_failed_start(run.rank_error(attempt, place.rank), error, rank=place.rank, log=run.console)
        return exit_code_of(error)
    return run_worker(run, workload_of(spec).worker, os.environ, attempt=attempt, listen_fd=listen_fd)


if __name__ == "__main__":
    run_and_exit(main)
