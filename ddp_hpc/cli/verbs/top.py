"""Watch a run in the terminal: progress, loss, where its time goes, and the ranks that the others wait for. Ctrl-C ends this command, not the run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from ddp_hpc.base.patience import patiently
from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import add_run, chosen_run, slurm_asker
from ddp_hpc.run.run_dir.machine_use import record_of
from ddp_hpc.run.run_dir.rereading import await_news
from ddp_hpc.watch.report.looking import Looker
from ddp_hpc.watch.report.top import RunScreen


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
    from ddp_hpc.cli.live import draw  # late: rich is for eyes only

    with suppress(KeyboardInterrupt):
        draw(_screens(looker, is_once=args.once), sys.stdout, is_kept=True)
    return 0


def _screens(looker: Looker, *, is_once: bool) -> Iterator[tuple[RunScreen, Sequence[str]]]:
    while True:
        seen = patiently(str(looker.run.path), lambda: looker.look(time.time()))
        yield seen, ()
        if is_once or not seen.status.is_alive:
            return
        await_news(looker.newest)


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
