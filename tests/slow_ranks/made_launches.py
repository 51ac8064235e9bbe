"""The launches of a training that is computed here, not run: ranks wait for each other at the end of each backward pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddp_hpc.cluster.slow_ranks.launches import Launches
from ddp_hpc.cluster.slow_ranks.summary import ClockOffset, Phases, RankReport

STEP_S = 0.1
Delay = Callable[[int, int], float]
"""From a rank and a step to the time that the rank loses in it."""


def none(_rank: int, _step: int) -> float:
    return 0.0


def of_rank(slow: int, seconds: float) -> Delay:
    return lambda rank, _: seconds if rank == slow else 0.0


@dataclass(kw_only=True)
class Made:
    """A training."""

    world_size: int = 4
    num_steps: int = 60
    buckets: Sequence[str] = ("all_reduce 100", "all_reduce 400", "all_reduce 37")
    """What each rank launches in each step, without waiting for the others in between."""
    after: Sequence[str] = ()
    """What each rank launches after it has waited for the others, one after the other."""
    now_and_then: int = 0
    """After how many steps there is one more collective."""
    extra: str = "all_reduce loss"
    """That one."""
    delay: Delay = none
    noise_s: float = 0.0
    nodes: Sequence[str] = ()
    ahead_s: dict[str, float] = field(default_factory=dict)
    """How far the clock of a node is ahead."""
    clocks: dict[str, ClockOffset] = field(default_factory=dict)
    group: str = "0"
    evaluation_s: float = 0.0
    """How long an evaluation in the middle takes."""
    phases: Callable[[int], Phases | None] = lambda _: None

    def summaries(self) -> list[RankReport]:
        chance = random.Random(1)
        kinds = sorted({*self.buckets, *self.after, self.extra})
        rows: list[list[tuple[str, float]]] = [[] for _ in range(self.world_size)]
        now = 1000.0
        for step in range(self.num_steps):
            now += self.evaluation_s if step == self.num_steps // 2 else 0.0
            ends = []
            for rank, row in enumerate(rows):
                at = now + 0.4 * STEP_S + self.delay(rank, step) + chance.uniform(0, self.noise_s)
                for bucket in self.buckets:
                    at += 0.5 * STEP_S / len(self.buckets)
                    row.append((bucket, at))
                ends.append(at)
            now = max(ends) + 0.1 * STEP_S
            extra = [self.extra] if self.now_and_then and step % self.now_and_then == 0 else []
            for name in [*self.after, *extra]:
                for row in rows:
                    row.append((name, now + chance.uniform(0, self.noise_s / 10)))
                now += 0.001
        return [self._summary(rank, row, kinds) for rank, row in enumerate(rows)]

    def _summary(self, rank: int, row: Sequence[tuple[str, float]], kinds: list[str]) -> RankReport:
        node = self.nodes[rank] if self.nodes else "node0"
        at_us = [round((at + self.ahead_s.get(node, 0.0)) * 1e6) for _, at in row]
        launches = Launches(self.group, [*range(1, len(row) + 1)], [kinds.index(name) for name, _ in row], at_us)
        return RankReport(
            rank=rank,
            world_size=self.world_size,
            node=node,
            turn=7,
            kinds=kinds,
            launches=[launches],
            clock=self.clocks.get(node),
            phases=self.phases(rank),
        )
