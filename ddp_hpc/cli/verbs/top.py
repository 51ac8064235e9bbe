"""Watch a run in the terminal: progress, loss, where its time goes, and the ranks that the others wait for. Ctrl-C ends this command, not the run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TextIO

from ddp_hpc.base.patience import patiently
from ddp_hpc.base.shown_text import visible
from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import add_run, chosen_run, slurm_asker
from ddp_hpc.cli.terminal import unguarded
from ddp_hpc.run.run_dir.machine_use import record_of
from ddp_hpc.run.run_dir.rereading import await_news
from ddp_hpc.watch.report.looking import Looker
from ddp_hpc.watch.report.top import LEVELS, RunScreen, screen

_UP_AND_CLEAR = "\x1b[{}F\x1b[J"
_CLEAR_ALL = "\x1b[2J\x1b[H"
_MOST_DIGITS = 6
"""Of a number of columns; more are no number of columns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser, optional=True)
    parser.add_argument("--once", action="store_true", help="print one screen, and exit")
    parser.add_argument("--json", action="store_true", help="print the values of one screen as JSON, and exit")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Draw the run until it ends, or the user has seen enough."""
    looker = Looker(chosen_run(args, environment), ask=slurm_asker(environment))
    if args.json:
        print(as_json(as_record(looker.look(time.time()))))
        return 0
    screens = Screens(sys.stdout, environment)
    try:
        while True:
            seen = patiently(str(looker.run.path), lambda: looker.look(time.time()))
            screens.draw(seen)
            if args.once or not seen.status.is_alive:
                return 0
            await_news(looker.newest)
    except KeyboardInterrupt:
        return 0


def as_record(seen: RunScreen) -> dict[str, object]:
    """Return what a screen shows as `--json` prints it."""
    look = seen.look
    waits = (
        None
        if look is None
        else {"at": look.at, "step_s": look.step_s, "lost_s": {str(rank): one for rank, one in look.lost_s.items()}}
    )
    return {
        **asdict(seen.status),
        "goodput": None if seen.goodput is None else asdict(seen.goodput),
        "phases": dict(seen.phases),
        "waits": waits,
        "machines": record_of(seen.machines),
        "unread": list(seen.unread),
    }


class Screens:
    """Draws one screen in the place of the last one, and changes nothing else of the terminal, so nothing is to be put back."""

    def __init__(self, out: TextIO, environment: Mapping[str, str]) -> None:
        self._out = unguarded(out)
        self._environment = environment
        self._is_terminal = out.isatty()
        self._can_draw = self._is_terminal and environment.get("TERM") != "dumb"  # which shows a command as text
        self._is_plain = not _can_encode(LEVELS, self._out.encoding)
        self._height = 0
        self._size: tuple[int, int] | None = None

    def draw(self, seen: RunScreen) -> None:
        """Draw one screen; in a file or a pipe, below the last one."""
        terminal = tuple(os.get_terminal_size(self._out.fileno())) if self._is_terminal else None
        width, height = size = size_of(terminal, self._environment)
        # One column stays free, as some terminals begin a new line there, and one line for the shell.
        lines = [
            visible(line)
            for line in screen(seen, width=max(1, width - 1), height=max(1, height - 1), is_plain=self._is_plain)
        ]
        if self._can_draw and self._height:
            # After a change of the size, the lines drawn before may have wrapped: how many they are now is not known.
            self._out.write(_UP_AND_CLEAR.format(self._height) if size == self._size else _CLEAR_ALL)
        elif self._height:
            self._out.write("\n")
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()
        self._height, self._size = len(lines), size


def size_of(terminal: tuple[int, ...] | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the columns and lines of a screen: of COLUMNS and LINES, but no more than the terminal has; None for a file or a pipe."""
    # Longer lines would wrap, and then nobody knows how many lines up the next screen begins.
    fallback = (100, 200) if terminal is None else (80, 24)
    known = terminal or (0, 0)  # a terminal may not know its size, and says 0
    found = []
    for name, of_terminal, otherwise in zip(("COLUMNS", "LINES"), known, fallback, strict=True):
        text = environment.get(name, "")
        asked = int(text) if text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS else 0
        found.append(min(filter(None, (asked, of_terminal)), default=otherwise))
    return found[0], found[1]


def _can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
