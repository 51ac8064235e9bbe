"""Reads a run again and again, but only what has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ddp_hpc.base.processes import host_name
from ddp_hpc.base.record import record_in
from ddp_hpc.run.run_dir.ledger import Attempt
from ddp_hpc.run.run_dir.machine_use import MachineUse, newest_uses
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.rereading import LastRead, Tail, newest_attempt
from ddp_hpc.run.run_dir.timeline import Look, Mark, read_marks, read_nodes
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.goodput import goodput_of
from ddp_hpc.watch.queue import Ask
from ddp_hpc.watch.report.screen import RunScreen
from ddp_hpc.watch.report.series import Series, finite, read_losses
from ddp_hpc.watch.status import RunStatus, read_status

_NUM_BINS = 250
_MOST_BYTES = 4 << 20
"""Of a file of lines that are read at first: a screen shows no more of a long run."""
_MACHINES_S = 15.0
"""How long what was read of the nodes is shown."""
T = TypeVar("T")


@dataclass
class Looker:
    """What was read of a run so far."""

    run: RunDir
    ask: Ask | None = None
    newest: Attempt | None = None
    _files: LastRead = field(default_factory=LastRead)
    _waits: Tail = field(init=False)
    _look: Look | None = None
    _nodes: Mapping[int, str] = field(default_factory=dict)
    _unread: list[str] = field(default_factory=list)
    _newest_uses: Sequence[MachineUse] = ()
    _machines_of: int = -1
    _machines_at: float = 0.0

    def __post_init__(self) -> None:
        self._waits = Tail(self.run.waits, most_bytes=_MOST_BYTES)

    def look(self, now: float, status: RunStatus | None = None) -> RunScreen:
        """Return the newest state. Except for the status, files that cannot be read now are left out and named in `unread`.

        `status`: what was read of it just now, if it was.

        Raises:
            OSError: if the file system does not answer.
        """
        self._unread = []
        status = status or read_status(self.run, now=now, host=host_name(), ask=self.ask, files=self._files)
        self.newest = newest_attempt(self.run, self._files)
        number = -1 if self.newest is None else self.newest.attempt
        timeline = self.run.timeline
        marks: list[Mark] | None = self._read(lambda: self._files.read(timeline, lambda: read_marks(self.run)), None)
        metrics = self.run.metrics
        series = self._read(
            lambda: self._files.read(metrics, lambda: read_losses(self.run, num_bins=_NUM_BINS)), Series()
        )
        self._read(lambda: self._read_waits(number), None)
        phases = [mark.phases for mark in marks or [] if mark.attempt == number and mark.phases]
        return RunScreen(
            status=status,
            goodput=None
            if marks is None
            else goodput_of(read_times(self.run, now=now, is_alive=status.is_alive, marks=marks)),
            loss=finite(series.loss),
            phases=phases[-1] if phases else {},
            look=self._look,
            nodes=self._nodes,
            now=now,
            machines=self._read(lambda: self._machines(number, now), ()),
            unread=self._unread,
        )

    def _read(self, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except OSError as error:
            self._unread.append(f"{Path(error.filename or self.run.path).name}: {error.strerror or error}")
            return otherwise

    def _machines(self, attempt: int, now: float) -> Sequence[MachineUse]:
        """Return the newest record of each node: many files, of which each is written once a minute."""
        if attempt >= 0 and (attempt != self._machines_of or now - self._machines_at >= _MACHINES_S):
            self._newest_uses, self._machines_of, self._machines_at = newest_uses(self.run, attempt), attempt, now
        return self._newest_uses

    def _read_waits(self, attempt: int) -> None:
        """Keep the newest comparison of the ranks of the newest attempt, and their nodes."""
        if self._look is not None and self._look.attempt != attempt:
            self._look, self._nodes = None, {}
        for line in self._waits.new_raw_lines():
            look = record_in(line, Look)
            if look is not None and look.attempt == attempt:
                self._look, self._nodes = look, look.nodes or self._nodes
        if self._look is not None and not self._nodes:  # in a part of the file that was not read
            self._nodes = read_nodes(self.run, attempt)
