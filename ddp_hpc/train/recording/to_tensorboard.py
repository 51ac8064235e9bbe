"""Writes a run's numbers as TensorBoard's event files, one file an attempt, which replaces those before.

Event files cannot be changed, and readers take them in the order of their names, which begin with a node's clock. So the file
of an attempt has all steps from the first on, and then the files of earlier attempts are deleted. Its first event makes a
TensorBoard that runs forget what it has read in the same directory, so these files have one of their own.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ddp_hpc.base.durable import make_directories, open_private
from ddp_hpc.train.recording.recorders import Ending, MetricsRow, RecordedRun

FOLDER = "ddp_hpc"
"""Below `tensorboard/`, where a recipe may write event files itself."""
_VERSION = "brain.Event:2"
"""What the first event of a file must say: https://github.com/tensorflow/tensorboard, `event_file_writer.py`."""


def open_recorder(subject: RecordedRun) -> TensorBoard:
    """Begin a new event file."""
    return TensorBoard(subject.run.tensorboard / FOLDER)


class TensorBoard:
    """One event file with all steps of a run."""

    def __init__(self, folder: Path) -> None:
        make_directories(folder)
        self._older = [*folder.glob("events.out.tfevents.*")]
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = open_private(folder / name, "wb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=_VERSION))
        # A TensorBoard that has read an older file drops what it knows from this step on, of every tag of the directory.
        self._write(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))

    def record(self, row: MetricsRow) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.numbers.items()]
        self._write(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write what was taken; the first time, delete the files of earlier attempts, whose steps it holds."""
        self._file.flush()
        for path in self._older:
            path.unlink(missing_ok=True)
        self._older = []

    def close(self, ending: Ending) -> None:
        del ending  # TensorBoard shows none
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
