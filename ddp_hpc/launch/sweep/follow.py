"""Follow a sweep: read where its points stand until nothing waits or runs. It changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.base.patience import patiently
from ddp_hpc.launch.sweep.point_states import PointReader, PointState
from ddp_hpc.launch.sweep.points import Point
from ddp_hpc.launch.sweep.states import is_being_sent
from ddp_hpc.launch.sweep.sweep_dir import SweepDir, read_sweep
from ddp_hpc.run.run_dir.rereading import LOOK_INTERVAL_S, LastRead
from ddp_hpc.watch.queue import Queue, asker, queue_reader

READS_PER_S = 50
"""At most so many runs are read in a second, so that one follower of a large sweep does not load the file system."""


@dataclass(frozen=True, kw_only=True)
class SweepLook:
    """All points at one moment."""

    points: Sequence[Point]
    states: Mapping[int, PointState]
    """By the points' numbers."""
    problem: str = ""
    """Why something is not known."""
    is_over: bool = False
    """Whether nothing waits or runs."""
    is_cancelled: bool = False
    """Whether the user has cancelled the sweep."""


def follow(
    sweep_dir: SweepDir,
    environ: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[SweepLook]:
    """Yield one look after another; the last one is of a sweep in which nothing waits or runs."""
    files, reader = LastRead(), PointReader(sweep_dir, asker(environ, clock=clock), clock=clock)
    read_queue = queue_reader(environ, clock=clock)
    missed: dict[int, float] = {}
    """Number of a point without a run -> when squeue first did not list its task."""
    while True:
        began = clock()
        is_sending = is_being_sent(sweep_dir)  # first: what is sent meanwhile is not over
        sweep = patiently(str(sweep_dir.ledger), lambda: files.read(sweep_dir.ledger, lambda: read_sweep(sweep_dir)))
        queue = Queue(jobs={}, at=0.0)
        if sweep.arrays and len(reader.finished) < len(sweep.points):
            queue = read_queue(max(array.at for array in sweep.arrays))
        states = reader.read(sweep, queue, is_being_sent=is_sending)
        for number, state in states.items():
            if state.word == "waiting":
                missed.pop(number, None)
            # Two answers: the first may be older than the submission, if another host with another clock has asked for it.
            elif state.left == "not begun" and state.reason and missed.setdefault(number, queue.at) == queue.at:
                states[number] = PointState(word="waiting")
        is_over = not is_sending and all(state.is_over for state in states.values())
        yield SweepLook(
            points=sweep.points,
            states=states,
            problem=queue.problem,
            is_over=is_over,
            is_cancelled=sweep.is_cancelled,
        )
        if is_over:
            return
        num_read = sum(not state.is_over and state.attempt is not None for state in states.values())
        pause(max(LOOK_INTERVAL_S, num_read / READS_PER_S, clock() - began))
