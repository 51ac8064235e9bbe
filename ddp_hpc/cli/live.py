"""The live view of a run on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddp_hpc.base.shown_text import visible
from ddp_hpc.cli.formatting import number, numbers
from ddp_hpc.cli.status_text import evaluation_line, knows_steps, rate, steps
from ddp_hpc.cli.terminal import unguarded
from ddp_hpc.watch.follow import FollowUpdate
from ddp_hpc.watch.status import RunStatus


def show_live(looks: Iterable[FollowUpdate], out: TextIO) -> None:
    """Redraw a bar and the newest numbers until the looks end; evaluations stay as lines above."""
    console = Console(file=unguarded(out), highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for look in looks:
            for line in look.evaluations:
                live.console.print(_text(evaluation_line(line)))
            live.update(view(look.status), refresh=True)


def view(status: RunStatus) -> Group:
    """Return what is drawn of one status."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        _text(f"{status.run} {status.state}", style="bold"),
        ProgressBar(total=status.total_steps or 1, completed=status.step, width=30),
        _text(f"step {steps(status)}" if knows_steps(status) else ""),
        _text("" if status.epoch is None else f"epoch {status.epoch} of {status.epochs}"),
    )
    now = "  ".join(filter(None, ["" if status.loss is None else f"loss {number(status.loss)}", rate(status)]))
    saved = "" if status.last_checkpoint is None else f"checkpoint at step {status.last_checkpoint}"
    problem = (
        ""
        if status.save_error is None
        else f"the newest checkpoint could not be written: {status.save_error}; the training continues, and the next save tries again"
    )
    newest = "  ".join(filter(None, [f"evaluation {numbers(status.metrics)}" if status.metrics else "", saved]))
    problems = [*filter(None, [problem]), *(one.sentence() for one in status.slow_ranks)]
    return Group(bar, _text(now), _text(newest), *(_text(one, style="red") for one in problems))


def _text(words: str, *, style: str = "") -> Text:
    """Return text that rich prints unchanged: without markup, and with control characters escaped."""
    return Text(visible(words), style=style)
