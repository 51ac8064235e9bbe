"""Show a run until it ends: a screen on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from ddp_hpc.cli.status_text import evaluation_line, progress_line
from ddp_hpc.launch.submission.release_hold import require_startable
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import await_next_poll
from ddp_hpc.run.run_dir.records import failed_save
from ddp_hpc.watch.follow import FollowUpdate, follow
from ddp_hpc.watch.queue import AskSlurm, QueueStatus
from ddp_hpc.watch.status import RunStatus

LINE_INTERVAL_S = 2.0


def show_run(run: RunDir, attempt: int, out: TextIO, *, ask: AskSlurm) -> None:
    """Show how the run goes until it is over, or its job will never start: a screen on a terminal, lines elsewhere."""

    def ask_or_end(job_id: str, submitted_at: float) -> QueueStatus:
        found = ask(job_id, submitted_at)
        if found.is_waiting:
            require_startable(run, job_id, found.reason)
        return found

    _show_updates(run, follow(run, attempt, clock=time.time, pause=await_next_poll, ask=ask_or_end), out, is_kept=False)


def show_status_live(run: RunDir, out: TextIO, *, ask: AskSlurm) -> None:
    """Show in the same way how the run goes from now on, until the user has seen enough."""
    looks = follow(run, None, clock=time.time, pause=await_next_poll, ask=ask)
    with suppress(KeyboardInterrupt):
        _show_updates(run, looks, out, is_kept=True)


def _show_updates(run: RunDir, looks: Iterable[FollowUpdate], out: TextIO, *, is_kept: bool) -> None:
    if out.isatty():
        from ddp_hpc.cli.live import draw_screens  # late: for eyes only

        if draw_screens(run, looks, out, is_kept=is_kept):
            return
    show_progress_lines(looks, out, clock=time.monotonic)


def show_progress_lines(looks: Iterable[FollowUpdate], out: TextIO, *, clock: Callable[[], float]) -> None:
    """Print a line when the state changes, every few seconds when the step does, for every evaluation, and what a script prints."""
    told: RunStatus | None = None
    told_at = 0.0
    has_failed_save = False
    warned: set[tuple[int, float]] = set()
    for look in looks:
        status = look.status
        for line in (*look.printed, *map(evaluation_line, look.evaluations)):
            print(line, file=out, flush=True)
        for alarm in status.slow_ranks:
            if (alarm.rank, alarm.at) not in warned:
                warned.add((alarm.rank, alarm.at))
                print(f"warning: {alarm.sentence()}", file=out, flush=True)
        if status.save_error and not has_failed_save:
            print(f"warning: {failed_save(status.save_error)}", file=out, flush=True)
        has_failed_save = bool(status.save_error)
        is_new = told is None or told.state != status.state
        if is_new or (told is not None and told.step != status.step and clock() - told_at >= LINE_INTERVAL_S):
            print(progress_line(status), file=out, flush=True)
            told, told_at = status, clock()
