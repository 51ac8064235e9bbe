"""Reads a run again and again, but only what has changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ddp_hpc.base.processes import host_name
from ddp_hpc.report.series import Point, thinned
from ddp_hpc.report.top import Seen
from ddp_hpc.run_dir.ledger import Attempt
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.rereading import LastRead, Tail, newest_attempt
from ddp_hpc.run_dir.timeline import read_looks, read_marks
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.goodput import goodput_of
from ddp_hpc.watch.queue import Ask
from ddp_hpc.watch.status import read_status

_MOST_POINTS = 4000


@dataclass
class Looker:
    """What was read of a run so far."""

    run: RunDir
    ask: Ask | None = None
    newest: Attempt | None = None
    _files: LastRead = field(default_factory=LastRead)
    _metrics: Tail = field(init=False)
    _loss: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._metrics = Tail(self.run.metrics)

    def look(self, now: float) -> Seen:
        """Return the newest state.

        Raises:
            OSError: if the file system does not answer.
        """
        status = read_status(self.run, now=now, host=host_name(), ask=self.ask, files=self._files)
        self.newest = newest_attempt(self.run, self._files)
        number = -1 if self.newest is None else self.newest.attempt
        marks = self._files.read(self.run.timeline, lambda: read_marks(self.run))
        looks = self._files.read(self.run.waits, lambda: read_looks(self.run))
        self._read_loss()
        phases = [mark.phases for mark in marks if mark.attempt == number and mark.phases]
        return Seen(
            status=status,
            goodput=goodput_of(read_times(self.run, now=now, is_alive=status.is_alive, marks=marks)),
            loss=self._loss,
            phases=phases[-1] if phases else {},
            look=next((one for one in reversed(looks) if one.attempt == number), None),
            nodes={rank: node for one in looks if one.attempt == number for rank, node in one.nodes.items()},
            now=now,
        )

    def _read_loss(self) -> None:
        for line in self._metrics.new_lines():
            step, loss = line.get("step"), line.get("loss")
            if (
                line.get("kind") == "train"
                and isinstance(step, int)
                and isinstance(loss, (int, float))
                and math.isfinite(loss)
            ):
                if self._loss and step <= self._loss[-1].step:  # the run went back, and the file was replaced
                    self._loss = [point for point in self._loss if point.step < step]
                self._loss.append(Point(step, loss))
        if len(self._loss) > _MOST_POINTS:
            self._loss = thinned(self._loss, _MOST_POINTS // 16)
