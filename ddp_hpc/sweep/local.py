"""A sweep on this machine: a process that runs one point after another, or a few at once.

python -m ddp_hpc.sweep.local SWEEP_DIR --points 0-9
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.base.durable import open_private
from ddp_hpc.base.patience import known
from ddp_hpc.config import Resolved, render_resolved
from ddp_hpc.errors import ConfigError, DdpHpcError
from ddp_hpc.run_dir.ledger import Ledger
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.submission.run_dir_setup import make_run_dir
from ddp_hpc.sweep.points import Point
from ddp_hpc.sweep.resolving import Points
from ddp_hpc.sweep.states import num_failed
from ddp_hpc.sweep.sweep_dir import Sweep, SweepDir, as_ranges, from_ranges, load_base, make_sweep, read_sweep

_LOOK_S = 1.0


def make_for_this_machine(base: Resolved, sweep: Sweep) -> None:
    """Make the sweep's directory.

    Raises:
        ConfigError: where it exists, or the points need several machines.
    """
    from ddp_hpc.submission import local  # late: a sweep on Slurm needs none

    local.refuse_several_nodes(base.spec)
    make_sweep(SweepDir(base.spec.path), base, sweep)


def is_running(sweep_dir: SweepDir, *, unknown: bool = False) -> bool:
    """Return whether a process of this machine runs the sweep's points; `unknown` where the file system has no locks."""
    try:
        return processes.is_locked(sweep_dir.runner_lock)
    except OSError as error:
        if error.errno not in processes.NO_LOCKS:
            raise
        return unknown


def start_runner(sweep_dir: SweepDir, numbers: Sequence[int], environ: Mapping[str, str]) -> None:
    """Start the process that runs these points, in a session of its own, so that it outlives this terminal.

    Raises:
        ConfigError: where one runs already.
    """
    lock_fd = processes.take_lock(sweep_dir.runner_lock)
    if lock_fd is None:
        raise ConfigError(
            f"A process on this machine runs the points of {sweep_dir.name} already. Wait until it ends: `ddp-hpc list {sweep_dir.name}`."
        )
    sweep_dir.runner_stop.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "ddp_hpc.sweep.local", str(sweep_dir.path), "--points", as_ranges(numbers)]
    argv += ["--lock-fd", str(lock_fd)]  # the process has the lock from its first moment on, so that nobody misses it
    try:
        with open_private(sweep_dir.runner_log, "ab") as log:
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PYTHONSAFEPATH": "ddp_hpc", **environ},
                start_new_session=True,
                cwd=read_sweep(sweep_dir).work_dir,
                pass_fds=(lock_fd,),
            ).returncode = 0  # it outlives this process; else Python warns that it still runs
    finally:
        os.close(lock_fd)  # without unlocking: the lock stays with the new process


def interrupted_points(sweep_dir: SweepDir, sweep: Sweep) -> list[int]:
    """Return the numbers of the points whose run began on this host, and was killed or lost its host before it recorded an end."""
    from ddp_hpc.submission import local  # late: as above

    found = []
    for point in sweep.points:
        run = sweep_dir.run(point)
        newest = Ledger.read(run).newest
        if newest is None or newest.is_last or newest.host != processes.host_name():
            continue
        if not local.works_here(run):
            found.append(point.number)
    return found


def end_runner(sweep_dir: SweepDir) -> None:
    """Have the process on this machine start no other point."""
    if is_running(sweep_dir, unknown=True):
        sweep_dir.runner_stop.touch()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the points; return 0, whatever becomes of each."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.sweep.local", description=__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--points", required=True, help="the numbers of the points: `0-9,12`")
    parser.add_argument("--lock-fd", type=int, help="the descriptor that has the sweep's lock already")
    arguments = parser.parse_args(argv)
    sweep_dir = SweepDir(arguments.sweep)
    inherited: int | None = arguments.lock_fd
    lock_fd = processes.take_lock(sweep_dir.runner_lock) if inherited is None else inherited
    if inherited is not None:
        os.set_inheritable(inherited, False)  # what this process starts outlives it, and must not hold the lock
    if lock_fd is None:
        sys.stderr.write("note: another process runs the points of this sweep already\n")
        return 0
    try:
        run_points(sweep_dir, from_ranges(arguments.points), os.environ)
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        processes.release_lock(lock_fd)
    return 0


def run_points(sweep_dir: SweepDir, numbers: Sequence[int], environ: Mapping[str, str]) -> None:
    """Run points, as many at once as the sweep allows, until all have ended or too many have failed."""
    from concurrent.futures import ThreadPoolExecutor  # late: as above

    sweep = read_sweep(sweep_dir)
    made = Points(load_base(sweep_dir), environ)
    is_over = threading.Event()

    def run(point: Point) -> None:
        most = sweep.stop_after_failures
        if sweep_dir.runner_stop.exists():
            is_over.set()
        if is_over.is_set() or (most is not None and num_failed(sweep_dir, sweep) >= most):
            if not is_over.is_set():
                sys.stderr.write(
                    f"note: {most} points have failed, so no other point is started (`--stop-after-failures`)\n"
                )
            is_over.set()
            return
        _run_point(made, point, sweep, environ)

    with ThreadPoolExecutor(max_workers=sweep.at_most or 1) as pool:
        # Points that go on without the process that began them have a place each until they end.
        live = [pool.submit(_await_end, run, sweep_dir) for run in _live_runs(sweep_dir, sweep, numbers)]
        for _ in pool.map(run, [sweep.points[number] for number in numbers]):
            pass
        for each in live:
            each.result()


def _live_runs(sweep_dir: SweepDir, sweep: Sweep, numbers: Sequence[int]) -> list[RunDir]:
    """Return the runs that work on this host, of points other than these."""
    others = [sweep_dir.run(point) for point in sweep.points if point.number not in set(numbers)]
    return [run for run in others if _is_live(run, unknown=False)]


def _is_live(run: RunDir, *, unknown: bool) -> bool:
    return known(run.lock, lambda: processes.is_locked(run.lock), unknown=unknown)


def _await_end(run: RunDir, sweep_dir: SweepDir) -> None:
    """Wait until no process works on a run, or the sweep's points are to be started no more."""
    while _is_live(run, unknown=True) and not sweep_dir.runner_stop.exists():
        time.sleep(_LOOK_S)


def _run_point(made: Points, point: Point, sweep: Sweep, environ: Mapping[str, str]) -> None:
    """Run one point to its end. Where it fails, its own records or the runner's log say why, and the others run all the same."""
    from ddp_hpc.submission import local  # late: as above

    try:
        resolved = made.resolved(point)
        text, run = render_resolved(resolved), RunDir(resolved.spec.path)
        if not run.config.exists():
            make_run_dir(run, text, is_new=True)  # a refused run that `submit` has made itself would leave no record
        submission = local.submit(text, resolved.spec, import_paths=sweep.import_paths, environ=environ)
        if submission.state != "finished":
            local.wait(submission.run, submission.attempt, environ)
    except DdpHpcError as error:
        _log(f"{point}: {error}\n")
    except Exception:  # noqa: BLE001  a full disk, or a fault of ours, is to end no other point
        _log(
            f"{point} failed with an error that ddp-hpc did not expect; the other points continue. Remove the cause that the last line names, "
            f"then run `ddp-hpc sweep continue` with the sweep's name:\n{traceback.format_exc()}"
        )


def _log(text: str) -> None:
    with suppress(OSError):  # the disk of the log may be full, too
        sys.stderr.write(text)


if __name__ == "__main__":
    sys.exit(main())
