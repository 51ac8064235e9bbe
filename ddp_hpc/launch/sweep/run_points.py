"""Runs the points of a sweep on this machine: one after another, or a few at once, for as long as the command lives that runs them."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ddp_hpc.base import processes
from ddp_hpc.base.errors import ConfigError, DdpHpcError, RunBusyError
from ddp_hpc.base.patience import await_answer
from ddp_hpc.launch.submission import local, run_dir_setup
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.sweep.point_configs import PointResolver
from ddp_hpc.launch.sweep.points import Point
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, append_record, load_base, num_failed, read_sweep
from ddp_hpc.run.config.resolve import render_resolved


@contextmanager
def run_here(sweep_dir: SweepDir, numbers: Sequence[int], environ: Mapping[str, str]) -> Iterator[Callable[[], object]]:
    """Run points beside the `with` block, and wait for them at its end; yield what asks them to stop, and starts no other."""
    lock_fd = processes.take_lock(sweep_dir.ledger)
    if lock_fd is None:
        raise RunBusyError(
            f"Another command runs the points of {sweep_dir.name} already. Wait until it ends: `ddp-hpc sweep follow {sweep_dir.word}`."
        )
    work_dir = read_sweep(sweep_dir).work_dir
    try:
        os.chdir(work_dir)
    except OSError as error:
        processes.release_lock(lock_fd)
        raise ConfigError(
            f"{sweep_dir.name} was submitted in {work_dir}, which cannot be entered: {error.strerror}."
        ) from error
    is_over = threading.Event()

    def run_all() -> None:
        try:
            run_points(sweep_dir, numbers, environ, is_over)
        finally:
            processes.release_lock(lock_fd)

    def stop() -> None:
        """Ask the points that run to write a checkpoint and stop, so that `continue` goes on with them."""
        is_over.set()
        for point in read_sweep(sweep_dir).points:
            with suppress(DdpHpcError, OSError):  # it does not run
                local.stop(sweep_dir.run(point), environ)
        append_record(sweep_dir, cancelled=True)  # no other point starts until the user continues it

    runner = threading.Thread(target=run_all, daemon=True)
    runner.start()
    yield stop
    runner.join()


def run_points(
    sweep_dir: SweepDir, numbers: Sequence[int], environ: Mapping[str, str], is_over: threading.Event
) -> None:
    """Run points, as many at once as the sweep allows, until all have ended, too many have failed, or it is over."""
    sweep, made, left = read_sweep(sweep_dir), PointResolver(load_base(sweep_dir), environ), deque(numbers)

    def work() -> None:
        while left and not is_over.is_set():
            if _must_stop_starting(sweep_dir):
                left.clear()
                return
            with suppress(IndexError):  # another thread has taken the last one
                _run_point(made, sweep.points[left.popleft()], sweep, environ, is_over)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(sweep.at_most or 1, len(numbers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _must_stop_starting(sweep_dir: SweepDir) -> bool:
    """Return whether no other point may start: the user has cancelled the sweep, or too many points have failed."""
    sweep = await_answer(str(sweep_dir.ledger), lambda: read_sweep(sweep_dir))
    most = sweep.stop_after_failures
    if sweep.is_cancelled or most is None or num_failed(sweep) < most:
        return sweep.is_cancelled
    sys.stderr.write(f"note: {most} points have failed, so no other point is started (`--stop-after-failures`)\n")
    return True


def _run_point(
    made: PointResolver, point: Point, sweep: Sweep, environ: Mapping[str, str], is_over: threading.Event
) -> None:
    """Run one point to its end. Where it fails, its own records or a line here say why, and the others run all the same."""
    try:
        resolved = made.resolve(point)
        request = SubmitRequest(resolved=resolved, import_paths=sweep.import_paths, environ=environ)
        if not request.run.config.exists():
            # A refused run that `submit` has made itself would leave no record.
            run_dir_setup.make_run_dir(request.run, render_resolved(resolved), is_new=True)
        submission = local.submit(request)
        if is_over.is_set():  # it was just being started when the others were asked to stop
            with suppress(DdpHpcError):
                local.stop(request.run, environ)
        if submission.state != "finished":
            local.wait(submission.run, submission.attempt, environ)
    except DdpHpcError as error:
        sys.stderr.write(f"{point}: {error}\n")
    except Exception:  # noqa: BLE001  a full disk, or a fault of ours, is to end no other point
        sys.stderr.write(
            f"{point} failed with an error that ddp-hpc did not expect; the other points continue. Remove the cause that the last line names, "
            f"then run `ddp-hpc sweep continue` with the sweep's name:\n{traceback.format_exc()}"
        )
