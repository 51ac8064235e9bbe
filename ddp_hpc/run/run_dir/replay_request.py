"""What a replay asks of the workers of its private run directory, and what they write down for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.record import read_record, write_record
from ddp_hpc.run.run_dir.paths import RunDir


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """Where the steps end that are computed again, and what to record of them."""

    end_step: int
    start_step: int | None = None
    """The step after which it begins; a worker whose checkpoint is of another step refuses to train. None: of any."""
    commits: bool = False
    """Whether to commit a checkpoint at the end, from which another part of the replay goes on."""
    state_steps: tuple[int, ...] = ()
    """After which steps the hash of each tensor of the training state is written down."""
    digest_steps: tuple[int, ...] = ()
    """After which steps the digest of what all ranks have equal is written down, as in the run's own record of digests."""
    every_state: bool = False
    """Whether one hash of the whole training state is written down after each step."""
    trace_from: int | None = None
    """The first step of which each tensor is written down, in the order in which it is computed; None: of no step."""
    trace_to: int | None = None
    """The last such step; None: the end."""

    def traces(self, step: int) -> bool:
        """Return whether each tensor of this step is written down."""
        return self.trace_from is not None and self.trace_from <= step <= (self.trace_to or self.end_step)


def write_request(run: RunDir, request: ReplayRequest) -> None:
    """Ask the workers of a private run directory for a replay, at their next start."""
    write_record(run.replay_request, request)


def read_request(run: RunDir) -> ReplayRequest | None:
    """Return what a replay asks for; None in the directory of an ordinary run."""
    return read_record(run.replay_request, ReplayRequest)


def read_trace(run: RunDir, rank: int) -> Iterator[dict[str, Any]]:
    """Yield what a rank has written down of its steps, in their order (`train.engine.replayed`)."""
    return read_json_lines(run.rank_trace(rank))
