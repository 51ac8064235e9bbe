"""Ask a run to write a checkpoint and go back into Slurm's queue; with `--now`, also ask Slurm to start it at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.cli.runs import add_flag, add_run_argument, chosen_own_run, slurm_asker
from ddp_hpc.cluster.slurm import states
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import LOOK_INTERVAL_S
from ddp_hpc.watch.status import RunStatus, read_status

if TYPE_CHECKING:
    from ddp_hpc.launch.submission.backend import Backend

REQUEUE_PATIENCE_S = 600.0
CLEANUP_PATIENCE_S = 60.0
"""How long a job that waits in the queue already may take until Slurm has cleaned up its last start."""
BEGIN_PATIENCE_S = 10.0
"""Slurm may start the job before this command asks again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    add_flag(
        parser,
        "--now",
        "ask Slurm to start a waiting job now: end the delay after a requeue (usually 2 minutes), release a job that Slurm "
        "holds after a failed launch, and allow excluded nodes again if the other nodes are too few",
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.launch.submission.backend import backend_of  # late: `--help` needs no back end

    run_dir = chosen_own_run(args, environment)
    backend = backend_of(run_dir)
    status = read_status(run_dir, now=time.time(), ask=slurm_asker(environment))
    has_waited = status.state == "waiting" and backend.HAS_QUEUE
    if args.now and not has_waited:  # as Slurm's queue was some seconds ago: ask about this job
        there = backend.find_job(run_dir, environment)
        has_waited = there is not None and there.state == "waiting"
    if not has_waited:
        print(backend.stop(run_dir, environment, then="requeue"), flush=True)
    elif not args.now:
        why = f" ({status.reason})" if status.reason else ""
        to_do = "" if states.is_held(status.reason) else " To have Slurm start it now, add `--now`."
        raise ConfigError(f"{run_dir.name} waits in the queue already{why}.{to_do}")
    if args.now:
        _start_pending_job(run_dir, backend, status, environment, has_waited=has_waited)
    return 0


def _start_pending_job(
    run_dir: RunDir, backend: Backend, status: RunStatus, environment: Mapping[str, str], *, has_waited: bool
) -> None:
    """Wait until the job is pending, and ask Slurm to start it as soon as nodes are free."""
    from ddp_hpc.run.run_dir.ledger import Ledger

    patience_s = CLEANUP_PATIENCE_S if has_waited else REQUEUE_PATIENCE_S
    if has_waited and states.is_held(status.reason):
        patience_s = LOOK_INTERVAL_S  # a person's turn, unless Slurm lets it be released at once
    deadline, times_asked = time.monotonic() + patience_s, 0
    while time.monotonic() < deadline:
        times_asked += backend.hasten(run_dir, environment)
        if times_asked == 1:
            deadline = min(deadline, time.monotonic() + BEGIN_PATIENCE_S)
        if times_asked > 1:  # first with a short delay, which nodes need; then without one
            break
        newest = Ledger.read(run_dir).newest
        if newest is not None and status.attempt is not None and newest.attempt > status.attempt:
            print(f"{run_dir.name} is running again.")
            return
        if not has_waited and newest is not None and newest.ending is not None and not newest.next:
            raise WorkerError(
                f"{run_dir.name} ended instead of going back into the queue: {newest.reason or newest.ending}. Unless it has finished, submit it again to resume it."
            )
        time.sleep(LOOK_INTERVAL_S)
    if not times_asked and has_waited:
        raise WorkerError(
            f"`--now` cannot start {run_dir.name} sooner. Its job waits, and `--now` does not change the reason: {status.reason}."
        )
    if not times_asked:
        raise WorkerError(
            f"{run_dir.name} did not go back into the queue within {patience_s:.0f} s. The request stays; `ddp-hpc logs {run_dir.word}` shows what the run does."
        )
    print(f"{run_dir.name} is back in the queue, without a delay: it starts as soon as Slurm has nodes for it.")
