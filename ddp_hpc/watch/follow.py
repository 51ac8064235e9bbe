"""Follows a run over all its attempts, until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_hpc.base.durable import read_line
from ddp_hpc.base.patience import await_answer
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import ReadCache, Tail, newest_attempt
from ddp_hpc.watch.logs import LineReader
from ddp_hpc.watch.queue import AskSlurm
from ddp_hpc.watch.status import RunStatus, read_status


@dataclass(frozen=True)
class FollowUpdate:
    """The status of a run, and its evaluations since the update before; of a script, also what rank zero has printed."""

    status: RunStatus
    evaluations: Sequence[dict[str, Any]]
    printed: Sequence[str] = ()


def follow(
    run: RunDir,
    attempt: int | None,
    *,
    clock: Callable[[], float],
    pause: Callable[[Attempt | None], object],
    ask: AskSlurm | None = None,
) -> Iterator[FollowUpdate]:
    """Yield updates of a run, beginning with one attempt; the last update is of a run that has ended.

    Without an attempt, updates have the status alone. `pause` is called between two updates, with the newest attempt.
    """
    files, metrics, logs = ReadCache(), Tail(run.metrics), dict[int, LineReader]()
    begun = None if attempt is None else Ledger.read(run).attempt(attempt)
    seen_until = begun.started_at if begun else 0.0
    while True:
        # The status is read before the metrics, so that the last update has all evaluations. `await_answer` retries while the
        # file system does not answer.
        status = await_answer(str(run.path), lambda: read_status(run, now=clock(), ask=ask, files=files))
        raws = await_answer(str(run.metrics), metrics.new_raw_lines) if attempt is not None else []
        lines = (read_line(raw) or {} for raw in raws if b'"eval"' in raw)
        # Users may edit this file, so a line may be anything.
        found = [line for line in lines if line.get("kind") == "eval" and isinstance(line.get("step"), (int, float))]
        evaluations = [line for line in found if isinstance(line.get("at"), (int, float)) and line["at"] > seen_until]
        seen_until = max([seen_until, *(line["at"] for line in evaluations)])
        printed = _new_lines(run, status, attempt, logs) if attempt is not None and status.saves is not None else []
        yield FollowUpdate(status, evaluations, printed)
        if not status.is_alive:
            return
        pause(newest_attempt(run, files))


def _new_lines(run: RunDir, status: RunStatus, first: int, logs: dict[int, LineReader]) -> list[str]:
    """Return what rank zero has printed since the last call, in the attempts from `first` on."""
    newest = first if status.attempt is None else status.attempt
    lines: list[str] = []
    for attempt in range(max(logs, default=first), newest + 1):
        path = run.rank_log(attempt, 0)
        if await_answer(str(path), path.exists):
            reader = logs.setdefault(attempt, LineReader(path, only_final_text=True))
            lines += reader.new_lines(is_over=attempt < newest or not status.is_alive)
    return lines
