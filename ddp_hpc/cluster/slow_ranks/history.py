"""Keeps what each comparison of all ranks has found, as lines in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from ddp_hpc.base.durable import open_private
from ddp_hpc.cluster.slow_ranks.judge import SlowRankVerdict
from ddp_hpc.cluster.slow_ranks.summary import Summary
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

    def note(self, verdict: SlowRankVerdict, reports: Sequence[Summary], *, now: float, step: int | None) -> None:
        """Add a line, where the ranks could be compared and there is none that is nearly as new."""
        is_first = self._noted_at is None
        if not verdict.lost_s or (self._noted_at and now - self._noted_at < SHARE * (now - self.began_at)):
            return
        self._noted_at = now
        look = Look(
            attempt=self.attempt,
            at=now,
            step=step,
            step_s=round(verdict.step_s, 6),
            lost_s={rank: round(lost_s, 5) for rank, lost_s in verdict.lost_s.items()},
            nodes={one.rank: one.node for one in reports} if is_first else {},
            phases=phases_of(reports),
        )
        with suppress(OSError), open_private(self.run.waits, "ab") as file:  # the next comparison tries again
            file.write(b"\n" + encode(look))


def phases_of(reports: Sequence[Summary]) -> Mapping[str, Sequence[float]]:
    """Return the seconds a step of each phase: of the quickest rank, the middle one and the slowest one; empty for a script."""
    known = [one.phases for one in reports if one.phases is not None and one.phases.num_steps]
    names = dict.fromkeys(name for one in known for name in one.seconds)
    times = {name: [one.seconds.get(name, 0.0) / one.num_steps for one in known] for name in names}
    return {name: [round(pick(of_ranks), 6) for pick in (min, median, max)] for name, of_ranks in times.items()}
