"""A run's log lines, as they are or as they come."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir import RunDir

_NUMBER = re.compile(r"(?:attempt|rank)-(\d+)(?:\.log)?")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Whose lines: the console's of all attempts, or one rank's, or all ranks'."""

    rank: int | None = None
    all_ranks: bool = False
    attempt: int | None = None
    """One attempt only; without a rank, its rank zero."""


@dataclass(frozen=True)
class LogFile:
    """One file of lines, with what stands before each and above all of them."""

    path: Path
    prefix: str = ""
    header: str = ""


@dataclass
class _Reader:
    """Reads whole lines where it left off."""

    file: LogFile
    is_drawn: bool
    offset: int = 0

    def new_lines(self, *, is_over: bool) -> Iterator[str]:
        with self.file.path.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < self.offset:  # the file was cut
                self.offset = 0
            stream.seek(self.offset)
            for raw in stream:
                if not raw.endswith(b"\n") and not is_over:
                    return  # half a line: its rest comes later
                self.offset += len(raw)
                line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
                yield self.file.prefix + (line.rpartition("\r")[2] if self.is_drawn else line)


def log_files(run: RunDir, choice: Choice) -> list[LogFile]:
    """Return the files of the chosen lines that exist by now, oldest attempt first."""
    if choice == Choice():
        return [LogFile(run.console)] if run.console.exists() else []
    attempts = _numbers(run.path / "logs", "attempt-*") if choice.attempt is None else [choice.attempt]
    return [
        LogFile(
            run.rank_log(attempt, rank),
            f"[rank {rank}] " if choice.all_ranks else "",
            f"==> attempt {attempt} <==" if choice.attempt is None else "",
        )
        for attempt in attempts
        for rank in _numbers(run.attempt_logs(attempt), "rank-*.log")
        if choice.all_ranks or rank == (choice.rank or 0)
    ]


def _numbers(directory: Path, pattern: str) -> list[int]:
    matches = (_NUMBER.fullmatch(path.name) for path in directory.glob(pattern))
    return sorted(int(match.group(1)) for match in matches if match)


def read_lines(run: RunDir, choice: Choice, *, is_drawn: bool = False) -> Iterator[str]:
    """Yield the chosen lines that there are; of several ranks, one rank after another.

    `is_drawn`, of a line that was written over and over, as progress bars do by carriage returns, what it was in the end.

    Raises:
        ConfigError: where there is no such log.
    """
    if not log_files(run, choice):
        raise _no_log(run, choice)
    yield from follow_lines(run, choice, is_over=lambda: True, pause=lambda: None, is_drawn=is_drawn)


def follow_lines(
    run: RunDir,
    choice: Choice,
    *,
    is_over: Callable[[], bool],
    pause: Callable[[], None],
    is_drawn: bool = False,
) -> Iterator[str]:
    """Yield the chosen lines and those that are added, until `is_over`; `pause` is called between looks."""
    readers: dict[Path, _Reader] = {}
    header = ""
    while True:
        last_look = is_over()  # asked first, so that the last look sees all that was written before
        for file in log_files(run, choice):
            reader = readers.setdefault(file.path, _Reader(file, is_drawn))
            for line in reader.new_lines(is_over=last_look):
                if file.header != header:
                    yield file.header
                    header = file.header
                yield line
        if last_look:
            return
        pause()


def _no_log(run: RunDir, choice: Choice) -> ConfigError:
    attempts = _numbers(run.path / "logs", "attempt-*")
    if choice.attempt is not None and choice.attempt not in attempts:
        told = ", ".join(map(str, attempts)) or "none"
        return ConfigError(f"Attempt {choice.attempt} of run {run.name!r} has no logs. Attempts with logs: {told}.")
    ranks = sorted({rank for attempt in attempts for rank in _numbers(run.attempt_logs(attempt), "rank-*.log")})
    if choice.rank is not None and ranks:
        return ConfigError(f"Rank {choice.rank} of run {run.name!r} has no log. Ranks: {', '.join(map(str, ranks))}.")
    return ConfigError(f"Run {run.name!r} has no logs yet. Look at `ddp-hpc status {run.name}`.")
