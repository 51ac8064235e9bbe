"""Reads the log lines of a run, once or as they arrive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.durable import name_errors, numbers_in_names, open_record
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.patience import await_answer
from ddp_hpc.run.run_dir.paths import ATTEMPT, RANK_LOG, RunDir

_LONGEST_LINE = 1 << 20
"""Bytes; a longer line is read in parts."""
_MOST_BYTES = 8 << 20
"""How much one read returns, but for the rest of a line."""


@dataclass(frozen=True, kw_only=True)
class LogSelection:
    """Which logs: the console of all attempts, one rank, or all ranks."""

    rank: int | None = None
    all_ranks: bool = False
    attempt: int | None = None
    """Only this attempt; rank zero unless a rank is named."""


@dataclass
class LineReader:
    """Reads the whole lines that were added to a log since the last read."""

    path: Path
    only_final_text: bool
    prefix: str = ""
    """Of each line."""
    offset: int = 0

    def new_lines(self, *, is_over: bool) -> Iterator[str]:
        """Yield them; wait while the file system does not answer."""
        while some := await_answer(str(self.path), lambda: self._read_some(is_over=is_over)):
            yield from some

    def _read_some(self, *, is_over: bool) -> list[str]:
        lines, offset = [], self.offset
        with open_record(self.path) as stream, name_errors(self.path):
            if stream.seek(0, os.SEEK_END) < offset:  # somebody truncated the file
                offset = 0
            stream.seek(offset)
            end = offset + _MOST_BYTES
            while offset < end and (raw := stream.readline(_LONGEST_LINE)):
                if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE and not is_over:
                    break  # an unfinished line: read it when it is complete
                offset += len(raw)
                line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
                lines.append(self.prefix + (line.rpartition("\r")[2] if self.only_final_text else line))
        self.offset = offset  # only now: what is read again after an error is not left out
        return lines


def labelled_logs(run: RunDir, selection: LogSelection) -> list[tuple[Path, str, str]]:
    """Return the selected files that exist now, the oldest attempt first, each with a prefix for its lines and a header above them."""
    if selection == LogSelection():
        return [(run.console, "", "")] if run.console.exists() else []
    attempts = numbers_in_names(run.path / "logs", ATTEMPT) if selection.attempt is None else [selection.attempt]
    return [
        (
            run.rank_log(attempt, rank),
            f"[rank {rank}] " if selection.all_ranks else "",
            f"==> attempt {attempt} <==" if selection.attempt is None else "",
        )
        for attempt in attempts
        for rank in numbers_in_names(run.attempt_logs(attempt), RANK_LOG)
        if selection.all_ranks or rank == (selection.rank or 0)
    ]


def read_lines(run: RunDir, selection: LogSelection, *, only_final_text: bool = False) -> Iterator[str]:
    """Yield the lines of the selected logs, one rank after another.

    With `only_final_text`, a line that was overwritten by carriage returns, as progress bars do, is its final text.
    """
    require_log(run, selection)
    yield from follow_lines(run, selection, is_over=lambda: True, pause=lambda: None, only_final_text=only_final_text)


def follow_lines(
    run: RunDir,
    selection: LogSelection,
    *,
    is_over: Callable[[], bool],
    pause: Callable[[], None],
    only_final_text: bool = False,
) -> Iterator[str]:
    """Yield the lines of the selected logs, and those added later, until `is_over`; `pause` is called between reads."""
    readers: dict[Path, LineReader] = {}
    header = ""
    while True:
        is_last_read = is_over()  # called first, so that the last read gets all lines written before it
        for path, prefix, of_file in await_answer(str(run.path), lambda: labelled_logs(run, selection)):
            reader = readers.setdefault(path, LineReader(path, only_final_text, prefix))
            for line in reader.new_lines(is_over=is_last_read):
                if of_file != header:
                    yield of_file
                    header = of_file
                yield line
        if is_last_read:
            return
        pause()


def require_log(run: RunDir, selection: LogSelection) -> None:
    """Check that one of the selected logs exists."""
    if labelled_logs(run, selection):
        return
    attempts = numbers_in_names(run.path / "logs", ATTEMPT)
    if selection.attempt is not None and selection.attempt not in attempts:
        with_logs = ", ".join(map(str, attempts)) or "none"
        raise ConfigError(
            f"Attempt {selection.attempt} of run {run.name!r} has no logs. Attempts with logs: {with_logs}."
        )
    ranks = sorted({rank for attempt in attempts for rank in numbers_in_names(run.attempt_logs(attempt), RANK_LOG)})
    if selection.rank is not None and ranks:
        raise ConfigError(f"Rank {selection.rank} of run {run.name!r} has no log. Ranks: {', '.join(map(str, ranks))}.")
    if attempts and selection == LogSelection():
        raise ConfigError(
            f"{run.console} does not exist any more. What ranks have printed is still there: `ddp-hpc logs {run.word} --rank 0`."
        )
    raise ConfigError(f"Run {run.name!r} has no logs yet. `ddp-hpc status {run.word}` shows whether it has started.")
