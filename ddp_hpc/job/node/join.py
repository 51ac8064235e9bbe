"""One worker in a process that another program's launcher has started (torchrun, srun, mpiexec, flux): it joins the others.

    python -m ddp_hpc.job.node.join RUN_DIR

The launcher owns what a supervisor does otherwise: it starts the workers, ends them when one has failed, and restarts them. Rank
zero acquires the run and writes the ledger; the others learn from it which attempt this is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import ConfigError, exit_code_of
from ddp_hpc.cluster.rendezvous.address import this_host
from ddp_hpc.cluster.rendezvous.launchers import TORCHRUN, RankPlace, find_place, numeric_address, of_run, variables_of
from ddp_hpc.cluster.rendezvous.worker_env import import_path
from ddp_hpc.cluster.slurm.allocation import read_allocation
from ddp_hpc.job.ending import last_resort
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.node.cpus import share_here
from ddp_hpc.job.node.gather import Gathering, gather_at_port, gather_in_store
from ddp_hpc.job.node.python_environ import IMPORT_PATH, make_users_code_importable, run_and_leave, run_worker
from ddp_hpc.job.run_records import LOCK_PATIENCE_S, in_use
from ddp_hpc.run.config import load_resolved
from ddp_hpc.run.run_dir.failure_reports import report
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_rendezvous_token, read_stop_request
from ddp_hpc.run.workload.table import workload_of
from ddp_hpc.run.world import World

_FINISHED = -1
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
        os.environ[IMPORT_PATH] = os.pathsep.join(arguments.import_path)
    place = find_place(os.environ, read_allocation(os.environ), this_host(), first_node=arguments.first_node)
    if place is None or place.scope == "node":
        raise ConfigError(
            "No launcher that ddp-hpc knows has started this process as a worker. Start it with `ddp-hpc join`."
        )
    if place.launcher == TORCHRUN.name:
        processes.die_with_parent(
            os.getppid()
        )  # a killed torchrun ends no worker, and this one would hold the run and its GPU
    run = RunDir(arguments.run)
    joining = _Joining(run=run, place=of_run(place, run.path.absolute()))
    try:
        with nullcontext() if joining.place.is_store_hosted else processes.leaving_at_stop_signals():
            gathering, attempt = joining.gather(is_finished=arguments.finished)
    except processes.StopSignalled:
        sys.stderr.write(f"{run.name}: rank {place.rank} was stopped while it waited for the other ranks\n")
        return exit_codes.STOPPED
    if attempt == _FINISHED:
        return exit_codes.FINISHED
    processes.block_awaited_signals()  # a signal that comes during the imports stays pending until the worker has handlers
    code = joining.work(attempt, gathering)
    if place.rank == 0:
        joining.conclude(attempt, code)
    if code != exit_codes.STOPPED:
        return code
    # To a launcher, each code but zero is a failure, and the highest one counts: rank zero's is enough.
    is_to_continue = place.rank == 0 and not arguments.of_node and not joining.is_stop_asked
    return exit_codes.STOPPED if is_to_continue else exit_codes.FINISHED


@dataclass(kw_only=True)
class _Joining:
    """This worker's share of a run."""

    run: RunDir
    place: RankPlace
    lock_fd: int | None = None
    is_stop_asked: bool = False
    """Whether the user has asked the run to stop, as rank zero sees it."""
    context: JobContext | None = None
    """Rank zero's."""

    def gather(self, *, is_finished: bool) -> tuple[Gathering, int]:
        """Wait for all ranks, and learn the attempt's number, which rank zero chooses when all are there."""

        def begin() -> dict[str, int]:
            processes.block_awaited_signals()  # the attempt that begins is to be ended by the worker
            return {"attempt": _FINISHED if is_finished else self._begin()}

        if self.place.world_size == 1:
            return Gathering(), begin()["attempt"]
        if self.place.is_store_hosted:
            gathering = gather_in_store(self.place, begin)
        else:
            address = numeric_address(self.place, this_host())
            gathering = gather_at_port(self.place, address, begin, run=self.run)
        return gathering, int(gathering.answer["attempt"])

    def _begin(self) -> int:
        """Acquire the run, as a supervisor does; return the attempt's number."""
        self.lock_fd = processes.take_lock(self.run.lock, patience_s=LOCK_PATIENCE_S)
        if self.lock_fd is None:
            raise ConfigError(in_use(self.run))
        spec = load_resolved(self.run.config, is_patient=True)
        world = World(num_nodes=self.place.num_nodes, workers_per_node=self.place.local_world_size or 1)
        self.context = JobContext(
            run=self.run,
            spec=spec,
            workload=workload_of(spec),
            world=world,
            environ=dict(os.environ),
        )
        records, workload = self.context.records, self.context.workload
        ledger = Ledger.read(self.run)
        newest = ledger.newest
        if newest is not None and newest.ending is None:
            reason = "the launcher that started the workers ended them before they recorded how this attempt ended"
            progress = workload.progress(self.run, ledger)
            end = End(ending=Ending.FAILED, exit_code=-9, reason=reason, cause=Cause.UNEXPLAINED, last_step=progress)
            records.end(newest.attempt, end)
        self.run.stop_request.unlink(missing_ok=True)
        attempt = records.begin(workload, None)
        sys.stderr.write(f"{self.run.name}, attempt {attempt}: {self.place.description}\n")
        return attempt

    def work(self, attempt: int, gathering: Gathering) -> int:
        """Run this rank to its end; return its exit code, one of `exit_codes`."""
        place, run = self.place, self.run
        try:
            if place.world_size > 1:
                read_rendezvous_token(run.rendezvous_token(attempt))  # waits until this node's file system shows it
            spec = load_resolved(run.config, is_patient=True)
            os.environ.update(spec.environ)
            import_paths = make_users_code_importable(os.environ)
            num_workers, asked = (
                (1, None) if place.launcher == "srun" else (place.local_world_size or 1, spec.resources.cpus_per_worker)
            )
            computing = share_here(os.environ, num_workers, asked).threads
            made = variables_of(place, os.environ, this_host(), computing)
            paths = import_path(import_paths, os.environ.get("PYTHONPATH"))
            of_paths = {name: fact.value for name, fact in paths.items() if fact.value is not None}
            os.environ.update({**made.environ, **of_paths})
        except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
            report(run.rank_error(attempt, place.rank), error, rank=place.rank, log=run.console)
            return exit_code_of(error)
        name, listen_fd = workload_of(spec).worker, gathering.listen_fd
        return run_worker(run, name, os.environ, attempt=attempt, listen_fd=listen_fd)

    def conclude(self, attempt: int, code: int) -> None:
        """Write into the ledger how the attempt ended, as far as rank zero knows."""
        assert self.context is not None  # noqa: S101  rank zero has begun the attempt
        self.is_stop_asked = read_stop_request(self.run) is not None
        conclusion = last_resort.conclude(self.context, attempt, Outcome(code=code))
        if conclusion.end.reason:
            sys.stderr.write(f"ended: {conclusion.end.reason}\n")


if __name__ == "__main__":
    run_and_leave(main)
