"""A run as one screen, drawn again and again: for `status --watch`, and for `--follow` on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ddp_hpc.base.discretion import escape_controls
from ddp_hpc.base.patience import ask_once
from ddp_hpc.cli.details import status_details
from ddp_hpc.cli.status_text import as_text, evaluation_line
from ddp_hpc.cli.terminal import unguarded_stream
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.follow import FollowUpdate
from ddp_hpc.watch.report.series import ChartPoint, finite_points, read_losses
from ddp_hpc.watch.report.words import moment
from ddp_hpc.watch.status import RunStatus

LEVELS, PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.-=*#"
_WIDTH = 40
"""Characters of the bar and of the line of losses."""
_REREAD_FACTOR = 20
"""Rows that need many files are read again after this many times as long as that took, or a second."""


def draw_screens(run: RunDir, looks: Iterable[FollowUpdate], out: TextIO, *, is_kept: bool) -> bool:
    """Draw one screen in the place of the last one, below a script's lines and evaluations; return False if the terminal cannot draw.

    `is_kept`: leave the last screen on the terminal.
    """
    console = Console(file=unguarded_stream(out), force_terminal=True, color_system=None)
    if console.is_dumb_terminal:
        return False
    rows: Mapping[str, str] = {}
    losses: Sequence[ChartPoint] = ()
    next_read = 0.0
    levels = PLAIN_LEVELS if console.options.ascii_only else LEVELS
    with Live(console=console, auto_refresh=False, transient=not is_kept, redirect_stdout=False) as live:
        for look in looks:
            for line in (*look.printed, *map(evaluation_line, look.evaluations)):
                console.print(_verbatim(line), soft_wrap=True)
            now = time.time()
            if now >= next_read or not look.status.is_alive:
                _, rows = status_details(run, look.status, now=now)
                losses = ask_once(run.metrics, lambda: read_losses(run, num_bins=_WIDTH).loss, unknown=())
                next_read = now + max(1.0, _REREAD_FACTOR * (time.time() - now))
            width, height = console.size
            # One column stays free, as some terminals begin a new line there, and one line for the shell.
            drawn = screen(look.status, rows, sparkline(finite_points(losses), _WIDTH, levels), now=now, word=run.word)
            shown = [escape_controls(line)[: max(1, width - 1)] for line in drawn[: max(1, height - 1)]]
            live.update(_verbatim("\n".join(shown)), refresh=True)
    return True


def _verbatim(words: str) -> Text:
    """Return text that rich prints unchanged: without markup, and with control characters escaped."""
    return Text("\n".join(map(escape_controls, words.split("\n"))), no_wrap=True, overflow="ignore")


def screen(status: RunStatus, details: Mapping[str, str], losses: str, *, now: float, word: str) -> list[str]:
    """Return what `status` prints, below a bar of the steps and a line of the losses."""
    lines = [f"{status.run}  {status.state}  {moment(now, '%H:%M:%S')}"]
    if status.total_steps:
        done = min(1.0, status.step / status.total_steps)
        filled = round(done * _WIDTH)
        lines.append(f"{'#' * filled}{'-' * (_WIDTH - filled)} {done:.0%}")
    rest = as_text(status, now=now, word=word, details=details).splitlines()[2:]  # without the run and its state
    return [*lines, *([f"{'losses':<12}{losses}"] if losses else []), *rest]


def sparkline(points: Sequence[ChartPoint], width: int, levels: str = LEVELS) -> str:
    """Return a line of characters whose height is the mean of the points below them, from the lowest to the highest."""
    count = min(width, len(points))
    parts = [points[number * len(points) // count : (number + 1) * len(points) // count] for number in range(count)]
    means = [sum(point.value for point in part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((one - low) * scale)] for one in means)
