"""Follow a sweep: read where its points stand until nothing waits or runs. It changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.base.patience import patiently
from ddp_hpc.launch.sweep.point_states import PointReader, PointState
from ddp_hpc.launch.sweep.points import Point
from ddp_hpc.launch.sweep.states import is_being_sent
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, read_sweep
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
    follower = _Follower(sweep_dir, environ, clock)
    while True:
        began = clock()
        look = follower.look()
        yield look
        if look.is_over:
            return
        num_read = sum(not state.is_over and state.attempt is not None for state in look.states.values())
        pause(max(LOOK_INTERVAL_S, num_read / READS_PER_S, clock() - began))


class _Follower:
    """What is remembered from one look to the next."""

    def __init__(self, sweep_dir: SweepDir, environ: Mapping[str, str], clock: Callable[[], float]) -> None:
        self._sweep_dir = sweep_dir
        self._files, self._reader = LastRead(), PointReader(sweep_dir, asker(environ, clock=clock), clock=clock)
        self._missed: dict[int, set[float]] = {}
        """Number of a point without a run -> when squeue did not list its task."""
        self._read_queue = queue_reader(environ, clock=clock)

    def look(self) -> SweepLook:
        """Read each point once."""
        is_sending = is_being_sent(self._sweep_dir)  # first: what is sent meanwhile is not over
        ledger = self._sweep_dir.ledger
        sweep = patiently(str(ledger), lambda: self._files.read(ledger, lambda: read_sweep(self._sweep_dir)))
        queue = Queue(jobs={}, at=0.0)
        if sweep.arrays and len(self._reader.finished) < len(sweep.points):
            queue = self._read_queue(max(array.at for array in sweep.arrays))
        states = self._states(sweep, queue, is_sending=is_sending)
        return SweepLook(
            points=sweep.points,
            states=states,
            problem=queue.problem,
            is_over=not is_sending and all(state.is_over for state in states.values()),
            is_cancelled=sweep.is_cancelled,
        )

    def _states(self, sweep: Sweep, queue: Queue, *, is_sending: bool) -> dict[int, PointState]:
        states = self._reader.read(sweep, queue, is_being_sent=is_sending)
        for number, state in states.items():
            if state.word == "waiting":
                self._missed.pop(number, None)
            elif state.left == "not begun" and state.reason:
                # Two answers: the first may be older than the submission, if another host with another clock has asked for it.
                missed = self._missed.setdefault(number, set())
                missed.add(queue.at)
                if len(missed) == 1:
                    states[number] = PointState(word="waiting")
        return states
