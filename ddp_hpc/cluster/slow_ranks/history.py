"""Keeps what each comparison of all ranks has found, as lines in the run directory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ddp_hpc.base.durable import open_private
from ddp_hpc.cluster.slow_ranks.judge import SlowRankVerdict
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Look, encode

SHARE = 0.005
"""The time between two lines grows with the attempt, to this share of its age: the lines of a week are about 1,500."""


@dataclass(kw_only=True)
class WaitHistory:
    """The comparisons of one attempt."""

    run: RunDir
    attempt: int
    began_at: float
    _noted_at: float | None = None

    def note(self, verdict: SlowRankVerdict, *, now: float, step: int | None) -> None:
        """Add a line, where the ranks could be compared and there is none that is nearly as new."""
        if not verdict.lost_s or (self._noted_at and now - self._noted_at < SHARE * (now - self.began_at)):
            return
        self._noted_at = now
        look = Look(
            attempt=self.attempt,
            at=now,
            step=step,
            step_s=round(verdict.step_s, 6),
            lost_s={rank: round(lost_s, 5) for rank, lost_s in verdict.lost_s.items()},
        )
        with suppress(OSError), open_private(self.run.waits, "ab") as file:  # the next comparison tries again
            file.write(b"\n" + encode(look))
