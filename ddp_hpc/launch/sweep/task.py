"""The start of one task of a sweep's job array: make the directory of the point's run, and print its path.

    python -m ddp_hpc.launch.sweep.task SWEEP_DIR --offset NUMBER

The array's script runs it, and goes on with the run's own job script. It prints no path where the task has nothing to do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.base.errors import ConfigError, DdpHpcError, SlurmUnavailableError
from ddp_hpc.base.patience import await_answer
from ddp_hpc.cluster.slurm.allocation import Allocation, claimed_cluster, read_allocation
from ddp_hpc.launch.render import render
from ddp_hpc.launch.submission import slurm
from ddp_hpc.launch.submission.run_dir_setup import make_run_dir
from ddp_hpc.launch.sweep.point_configs import PointResolver
from ddp_hpc.launch.sweep.points import Point
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, load_base, num_failed, read_sweep
from ddp_hpc.run.config.resolve import render_resolved
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the run of this task's point; print its directory, if the task is to go on with it."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.launch.sweep.task", description=__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--offset", type=int, default=0, help="the number of the point of task 0")
    parser.add_argument("--sending", help=argparse.SUPPRESS)  # scripts of older versions, whose jobs may wait, give it
    arguments = parser.parse_args(argv)
    try:
        run = prepare_task(SweepDir(arguments.sweep), arguments.offset, os.environ)
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        word = SweepDir(arguments.sweep).word
        sys.stderr.write(
            f"error: the point's run cannot be prepared: {error}. Correct that; then `ddp-hpc sweep continue {word}` starts the point.\n"
        )
        return 1
    if run is not None:
        sys.stdout.write(f"{run.path}\n")
    return 0


def prepare_task(sweep_dir: SweepDir, offset: int, environ: Mapping[str, str]) -> RunDir | None:
    """Make the run of this task's point, or find it after a requeue; None where the task has nothing to do."""
    allocation = read_allocation(environ)
    if allocation is None or allocation.array_task_id is None:
        raise ConfigError(
            f"The sweep's job script was started outside of a job array. Submit the sweep's points with `ddp-hpc sweep continue {sweep_dir.word}`."
        )
    sweep = await_answer(str(sweep_dir.ledger), lambda: read_sweep(sweep_dir))
    number = offset + allocation.array_task_id
    if not 0 <= number < len(sweep.points):
        raise ConfigError(
            f"Task {allocation.scontrol_id} would be point {number}, but the sweep has {len(sweep.points)} points. Submit them with `ddp-hpc sweep continue {sweep_dir.word}`, not the script with sbatch."
        )
    point = sweep.points[number]
    run = sweep_dir.run(point)
    before = await_answer(str(run.submission), lambda: read_queued_job(run))
    has_it = before is not None and before.job_id == allocation.scontrol_id
    if sweep.is_cancelled and number in sweep.cancelled_numbers:
        if has_it and before is not None:  # Slurm starts its job again: record that the run does not go on
            write_queued_job(run, replace(before, cancelled_at=before.cancelled_at or time.time()))
            newest = Ledger.read(run).newest
            if newest is not None and newest.ending is None:
                end = End(ending=Ending.CANCELLED, exit_code=-9, reason="its sweep was cancelled")
                record_end(run, newest.attempt, end)
        sys.stderr.write(
            f"note: {point} of {sweep_dir.name} is not started: the sweep was cancelled. `ddp-hpc sweep continue {sweep_dir.word}` submits it again\n"
        )
        return None
    if has_it:
        return run  # Slurm has started the task again
    why_not = _why_not_start(sweep, run, before, environ)
    if why_not is not None:
        sys.stderr.write(f"note: {point} of {sweep_dir.name} is not started: {why_not}\n")
        return None
    _make_run_dir(sweep, point, allocation, environ)
    return run


def _why_not_start(sweep: Sweep, run: RunDir, before: QueuedJob | None, environ: Mapping[str, str]) -> str | None:
    """Return why the point is not to start in this job; None where it is."""
    if before is not None:
        try:
            there = slurm.find_job(run, environ)
        except SlurmUnavailableError:
            there = None  # the supervisor finds out whether another job works on the run
        except ConfigError as error:  # another cluster has it
            return str(error)
        if there is not None:
            return f"job {before.job_id} has the point already"
        newest = Ledger.read(run).newest
        if newest is not None and newest.is_last and newest.ending == Ending.FINISHED:
            return "the run has finished"
    if sweep.stop_after_failures is not None:
        failed, word = num_failed(sweep), sweep.dir.word
        if failed >= sweep.stop_after_failures:
            return (
                f"{failed} points have failed since the sweep was submitted or continued, and the sweep stops at {sweep.stop_after_failures} "
                f"(`--stop-after-failures`). List them with `ddp-hpc list {word} --failed`; `ddp-hpc sweep continue {word}` submits the "
                "others again, and counts failures from zero"
            )
    return None


def _make_run_dir(sweep: Sweep, point: Point, allocation: Allocation, environ: Mapping[str, str]) -> None:
    """Make the run's directory as `submit` does, or renew it; record last that this task has it."""
    run = sweep.dir.run(point)
    resolved = PointResolver(load_base(sweep.dir, is_patient=True), environ).resolve(point)
    make_run_dir(run, render_resolved(resolved), is_new=not run.config.exists())
    make_directories(run.console.parent)
    replace_text(run.job_script, render(resolved.spec, run, sweep.import_paths, chdir=Path.cwd()))
    attempt = ownership.next_attempt(run)
    write_queued_job(
        run,
        QueuedJob(
            job_id=allocation.scontrol_id,
            attempt=attempt,
            at=time.time(),
            since=attempt,
            backend=slurm.NAME,
            slurm_cluster=claimed_cluster(environ),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
