"""A run as one screen, drawn again and again: for `status --watch`, and for `--follow` on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ddp_hpc.base.discretion import visible
from ddp_hpc.base.patience import patiently
from ddp_hpc.cli.terminal import unguarded
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.rereading import await_news
from ddp_hpc.watch.queue import Ask
from ddp_hpc.watch.report.looking import Looker
from ddp_hpc.watch.report.screen import RunScreen, screen

_HEIGHT_ELSEWHERE = 200
"""Lines of a screen in a file or a pipe."""


def watch(run: RunDir, out: TextIO, ask: Ask | None) -> None:
    """Draw a run until it ends, or the user has seen enough."""
    looker = Looker(run, ask=ask)

    def screens() -> Iterator[tuple[RunScreen, Sequence[str]]]:
        while True:
            seen = patiently(str(run.path), lambda: looker.look(time.time()))
            yield seen, ()
            if not seen.status.is_alive:
                return
            await_news(looker.newest)

    with suppress(KeyboardInterrupt):
        draw(screens(), out, is_kept=True)


def draw(screens: Iterable[tuple[RunScreen, Sequence[str]]], out: TextIO, *, is_kept: bool) -> None:
    """Draw one screen in the place of the last one, below the lines that come with it; in a file or a pipe, all below each other.

    `is_kept`: leave the last screen on the terminal.
    """
    console = Console(file=unguarded(out), force_terminal=out.isatty(), color_system=None)
    can_draw = console.is_terminal and not console.is_dumb_terminal
    with Live(console=console, auto_refresh=False, transient=not is_kept, redirect_stdout=False) as live:
        for number, (seen, lines) in enumerate(screens):
            for line in lines:
                console.print(_text(line), soft_wrap=True)
            width, height = console.size
            # One column stays free, as some terminals begin a new line there, and one line for the shell.
            height = max(1, height - 1) if console.is_terminal else _HEIGHT_ELSEWHERE
            drawn = screen(seen, width=max(1, width - 1), height=height, is_plain=console.options.ascii_only)
            if can_draw:
                live.update(_text("\n".join(drawn)), refresh=True)
            else:
                console.print(_text("\n".join([""] * bool(number) + drawn)))


def _text(words: str) -> Text:
    """Return text that rich prints unchanged: without markup, and with control characters escaped."""
    return Text("\n".join(map(visible, words.split("\n"))), no_wrap=True, overflow="ignore")
