"""`metrics.jsonl`: one line for each log interval or evaluation, each step once, whatever was killed in between."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

import msgspec

from ddp_hpc.base.durable import open_private, read_json_lines, replace_text
from ddp_hpc.base.patience import patiently
from ddp_hpc.run_dir.paths import RunDir


class MetricsFile:
    """The metrics of a run, open for the lines of one attempt."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._file: IO[bytes] | None = None
        self._is_torn = False

    def open(self, step: int) -> list[dict[str, Any]]:
        """Move the lines after `step`, whose steps will be repeated, to another file; return those that are left."""
        text = patiently(str(self._run.metrics), self._read)
        lines = list(read_json_lines(self._run.metrics)) if text else []
        kept = [line for line in lines if _step_of(line) <= step]
        if _as_lines(kept) != text:
            if len(kept) < len(lines):  # otherwise only an incomplete line is removed
                self._set_aside([line for line in lines if _step_of(line) > step])
            replace_text(self._run.metrics, _as_lines(kept))
        self._file = open_private(self._run.metrics, "ab", buffering=0)
        return kept

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            OSError: if the disk takes none, or a part of it.
        """
        assert self._file is not None  # noqa: S101  `open` comes first
        line = msgspec.json.encode(record) + b"\n"
        # On a full disk, write(2) may write only a part, or fail: https://man7.org/linux/man-pages/man2/write.2.html
        # The next line then first ends the incomplete one, so that only that one is lost.
        whole = b"\n" + line if self._is_torn else line
        self._is_torn = True
        written = self._file.write(whole)
        if written < len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._run.metrics))
        self._is_torn = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> str:
        try:
            return self._run.metrics.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def _set_aside(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Keep the lines of steps that will be repeated, in case they never are."""
        with open_private(self._run.superseded_metrics, "a") as file:
            file.write(_as_lines(lines))
            file.flush()
            os.fsync(file.fileno())


def _step_of(line: Mapping[str, Any]) -> int:
    step = line.get("step", 0)
    return step if isinstance(step, int) else 0


def _as_lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(msgspec.json.encode(record).decode() + "\n" for record in records)
