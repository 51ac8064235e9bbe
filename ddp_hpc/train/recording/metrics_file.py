"""`metrics.jsonl`: one line for each log interval or evaluation, each step once, whatever was killed in between."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

import msgspec

from ddp_hpc.base.durable import MOST_BYTES_OF_LINES, lines_from_end, name_errors, open_private, read_line, record_bytes
from ddp_hpc.base.patience import await_answer
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir

MOST_WAITING_BYTES = 8 << 20
"""So much is kept in memory while the disk takes nothing: about 60,000 lines."""

_LINE_KINDS = frozenset({"train", "eval"})


class MetricsFile:
    """The metrics of a run, open for the lines of one attempt."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._file: IO[bytes] | None = None
        self._waiting = bytearray()
        """What the disk has not taken yet; it begins amid a line if the disk took a part of that."""
        self._num_lost = 0
        self._writing = threading.Lock()
        """Held by the loop's thread or by the checkpoint writer's, which calls `flush`."""

    def open(self, step: int) -> list[dict[str, Any]]:
        """Move the lines after `step`, whose steps will be repeated, to another file; return the newest of each kind before them."""
        end, after, newest = await_answer(str(self._run.metrics), lambda: self._find_split(step))
        if after:
            ownership.refuse_fenced(self._run, self._attempt)
            with open_private(self._run.superseded_metrics, "ab") as file:  # in case they are never repeated
                file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in after))
                file.flush()
                os.fsync(file.fileno())
        # A new file also where the lines stay: an older attempt that still runs has the old one open, and writes there.
        await_answer(str(self._run.metrics), lambda: self._renew(end), done="written")
        self._file = open_private(self._run.metrics, "ab", buffering=0)
        return newest

    def _renew(self, end: int | None) -> None:
        """Replace the file by a copy of what stands before `end`, if any."""
        try:
            kept = record_bytes(self._run.metrics, most_bytes=MOST_BYTES_OF_LINES)[:end]
        except FileNotFoundError:
            kept = b""
        ownership.replace_record(self._run, self._attempt, self._run.metrics, kept)

    def _find_split(self, step: int) -> tuple[int | None, list[dict[str, Any]], list[dict[str, Any]]]:
        """Return where the lines after `step` begin, if there are any, these lines, and the newest ones before them.

        Steps grow, so it reads from the end: a long run has a million lines.
        """
        end: int | None = None
        after: list[dict[str, Any]] = []
        newest: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            for at, raw in lines_from_end(self._run.metrics):
                if newest and not any(f'"{kind}"'.encode() in raw for kind in _LINE_KINDS - newest.keys()):
                    continue
                line = read_line(raw) if raw.endswith(b"\n") else None
                at_step = 0 if line is None else line.get("step", 0)
                if line is not None and (not isinstance(at_step, int) or at_step <= step):
                    newest.setdefault(str(line.get("kind")), line)
                elif not newest:
                    end = at
                    after += [] if line is None else [line]
                if newest.keys() >= _LINE_KINDS:
                    break
        return end, after[::-1], [*newest.values()]

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, after those that wait since an earlier error.

        Raises:
            OSError: if the disk does not take all of it; the rest is written by a later call.
        """
        line = msgspec.json.encode(record) + b"\n"
        with self._writing:
            if len(self._waiting) + len(line) > MOST_WAITING_BYTES:
                self._num_lost += 1
            else:
                self._waiting += line
            self._write()

    def flush(self) -> None:
        """Write what waits, and wait until all lines are on the disk; nothing on other ranks than zero."""
        with self._writing, name_errors(self._run.metrics):
            if (file := self._file) is None:
                return
            self._write()
            copy = os.dup(file.fileno())
        try:
            os.fsync(copy)  # not under the lock, for which the training may wait
        finally:
            os.close(copy)

    def close(self) -> int:
        """Write what waits; return how many lines the disk has not taken. No error is raised, and a second call does nothing."""
        with self._writing:
            if self._file is None:
                return 0
            with suppress(OSError):
                self._write()
            file, self._file = self._file, None
        with suppress(OSError):
            file.close()  # NFS may say only here that the disk is full: https://man7.org/linux/man-pages/man2/close.2.html
        return self._num_lost + self._waiting.count(b"\n")

    def _write(self) -> None:
        assert self._file is not None  # noqa: S101  `open` comes first
        # On a full disk, write(2) may write only a part, or fail: https://man7.org/linux/man-pages/man2/write.2.html
        # The rest waits, so that the next write goes on where this one has ended, amid a line.
        while self._waiting:
            num_written = self._file.write(self._waiting)
            if not num_written:  # a file system in user space may answer so, again and again
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._run.metrics))
            del self._waiting[:num_written]
