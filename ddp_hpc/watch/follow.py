"""A run as it goes: one look after another, over all its attempts, until it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_hpc.ledger import Attempt, Ledger
from ddp_hpc.patience import patiently
from ddp_hpc.rereading import LastRead, Tail, newest_attempt
from ddp_hpc.run_dir import RunDir
from ddp_hpc.watch.queue import Ask
from ddp_hpc.watch.status import RunStatus, read_status


@dataclass(frozen=True)
class Look:
    """Where the run stands, and which evaluations came since the look before."""

    status: RunStatus
    evaluations: Sequence[dict[str, Any]]


def follow(
    run: RunDir,
    attempt: int,
    *,
    clock: Callable[[], float],
    pause: Callable[[Attempt | None], object],
    ask: Ask | None = None,
) -> Iterator[Look]:
    """Yield looks at a run from one attempt on, the last one when no other follows.

    `pause` is called between them, with the newest attempt.
    """
    files, metrics = LastRead(), Tail(run.metrics)
    begun = Ledger.read(run).attempt(attempt)
    seen_until = begun.started_at if begun else 0.0
    while True:
        # First, so that the last look has all evaluations; a file system that does not answer ends no look at a run.
        status = patiently(str(run.path), lambda: read_status(run, now=clock(), ask=ask, files=files))
        lines = patiently(str(run.metrics), metrics.new_lines)
        evaluations = [line for line in lines if _is_evaluation(line) and line["at"] > seen_until]
        seen_until = max([seen_until, *(line["at"] for line in evaluations)])
        yield Look(status, evaluations)
        if not status.is_alive:
            return
        pause(newest_attempt(run, files))


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    """Tell whether a line is an evaluation as a run writes it; anything may stand in a file that users may edit."""
    return line.get("kind") == "eval" and all(isinstance(line.get(key), (int, float)) for key in ("at", "step"))
