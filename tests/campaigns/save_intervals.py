"""Thousands of simulated runs that fail: what `checkpoint.every_steps=auto` reaches beside fixed intervals, and beside its prediction.

The decisions are those of `train.auto_interval`, with a clock of its own. `python -m tests.campaigns.save_intervals` writes
docs/results/save-intervals.json and .md.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ddp_hpc.cluster.slow_ranks.summary import Phases
from ddp_hpc.run.checkpoints.past_saves import PastAttempt, summarize_attempts
from ddp_hpc.run.checkpoints.save_interval import SaveCosts, best_interval_s
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.auto_interval import AutoInterval
from tests.campaigns.command_line import parser_of
from tests.campaigns.written import RESULTS, stamp

JSON, TABLE = RESULTS / "save-intervals.json", RESULTS / "save-intervals.md"
HOUR, DAY = 3600.0, 86_400.0
KEYS = CheckpointSpec(min_interval_s=60, max_interval_s=3600)
"""The defaults."""
STEP_S = 1.0
FIXED = [*(1.25**number for number in range(-5, 6)), 8.0, 16.0, 1000.0]
"""The fixed intervals among which the best of each history is sought, as multiples of the optimum by Daly; the last is never to save."""
SHAPES = {"independent": 1.0, "clustered": 0.5}
"""Shape of the Weibull distribution of the times between failures; below 1, a failure follows soon after another."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, in seconds."""

    name: str
    stall_s: float
    write_s: float
    restart_s: float
    between_failures_s: float
    length_s: float
    num_nodes: int = 1
    slow: float = 1.0
    """By what the stall and the writing are multiplied during 6 hours of each day."""

    def costs(self) -> SaveCosts:
        return SaveCosts(
            stall_s=self.stall_s,
            write_s=self.write_s,
            restart_s=self.restart_s,
            between_failures_s=self.between_failures_s,
        )

    def slowness(self, at: float) -> float:
        return self.slow if 9 * HOUR <= at % DAY < 15 * HOUR else 1.0


CASES = (
    Case(name="workstation, one failure a month", stall_s=0.2, write_s=2, restart_s=20, between_failures_s=30 * DAY, length_s=7 * DAY),
    Case(name="16 nodes, one in 8 h", num_nodes=16, stall_s=1, write_s=10, restart_s=60, between_failures_s=8 * HOUR, length_s=5 * DAY),
    Case(name="128 nodes, one in 7.9 h", num_nodes=128, stall_s=5, write_s=30, restart_s=300, between_failures_s=7.9 * HOUR, length_s=7 * DAY),
    Case(name="128 nodes, a save stalls a minute", num_nodes=128, stall_s=60, write_s=0, restart_s=600, between_failures_s=7.9 * HOUR, length_s=14 * DAY),
    Case(name="2,048 nodes, one in 1.8 h", num_nodes=2048, stall_s=2, write_s=20, restart_s=180, between_failures_s=1.8 * HOUR, length_s=3 * DAY),
    Case(name="preempted without notice, one in 2 h", num_nodes=4, stall_s=5, write_s=20, restart_s=190, between_failures_s=2 * HOUR, length_s=3 * DAY),
    Case(name="a bad node, one in 10 min", num_nodes=4, stall_s=0.5, write_s=5, restart_s=30, between_failures_s=600, length_s=DAY / 2),
    Case(name="a file system 10 times slower at noon", num_nodes=16, stall_s=2, write_s=20, restart_s=60, between_failures_s=4 * HOUR, length_s=5 * DAY, slow=10),
)  # fmt: skip


def lifetimes(case: Case, shape: float, source: random.Random) -> list[float]:
    """Return how long each attempt of a run lives, from its start, until the run's time is over."""
    scale = case.between_failures_s / math.gamma(1 + 1 / shape)
    found: list[float] = []
    while sum(found) < case.length_s:
        found.append(source.weibullvariate(scale, shape))
    return [*found[:-1], found[-1] - (sum(found) - case.length_s)]


class World:
    """A run that is simulated: its clock, its steps, and what it keeps."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now = 0.0
        self.kept = self.lost = self.reached = 0
        """Steps that a later attempt does not repeat, and that it does; the newest one of the newest attempt."""

    def attempt(self, lifetime: float, policy: Policy) -> PastAttempt:
        """Train until the attempt fails; a save is committed some time after it was made."""
        case, ends_at = self.case, self.now + lifetime
        first = step = self.kept
        self.now += case.restart_s
        policy.begin()
        trained_s = 0.0
        pending: list[tuple[float, int]] = []
        while self.now < ends_at:
            steps = policy.steps_until_save()
            left = int(max(0.0, ends_at - self.now) / STEP_S)
            steps = min(steps, left)
            step, self.now, trained_s = step + steps, self.now + steps * STEP_S, trained_s + steps * STEP_S
            pending = self._commit(pending, policy)
            policy.trained(steps)
            if steps == left:
                break
            if policy.is_due():
                slowness = case.slowness(self.now)
                policy.save(case.stall_s * slowness)
                pending.append((self.now + case.write_s * slowness, step))
        self.now = ends_at
        self._commit(pending, policy)
        saved, self.kept = self.kept, max(first, self.kept)
        self.lost += step - saved
        self.reached = step
        return PastAttempt(
            is_sudden=True,
            trained_s=trained_s,
            started_s=case.restart_s,
        )

    def _commit(self, pending: list[tuple[float, int]], policy: Policy) -> list[tuple[float, int]]:
        for at, step in pending:
            if at <= self.now:
                self.kept = step
                policy.written(self.case.write_s * self.case.slowness(at))
        return [one for one in pending if one[0] > self.now]


class Policy:
    """A fixed interval."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every, self.since = world, every, 0

    def begin(self) -> None:
        self.since = 0

    def steps_until_save(self) -> int:
        return max(1, self.every - self.since)

    def trained(self, steps: int) -> None:
        self.since += steps

    def is_due(self) -> bool:
        return self.since >= self.every

    def save(self, stall_s: float) -> None:
        self.world.now += stall_s
        self.since = 0

    def written(self, seconds: float) -> None:
        """Nothing follows from it."""


class Auto(Policy):
    """The interval that rank zero chooses; it is asked when a save is due, instead of twice a second."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 0)
        self.past: list[PastAttempt] = []
        self.stalls: list[float] = []
        self.writes: list[float] = []
        self.steps = 0

    def begin(self) -> None:
        case = self.world.case
        past = summarize_attempts(self.past, stalls_s=self.stalls, writes_s=self.writes)
        self.since = self.steps = self.every = 0
        self.auto = AutoInterval(
            KEYS,
            past if past.restart_s is not None else replace(past, restart_s=case.restart_s),
            phases=lambda: Phases(num_steps=self.steps, seconds={"forward": self.steps * STEP_S}),
            note=lambda _step, _interval: None,
            clock=lambda: self.world.now,
        )

    def steps_until_save(self) -> int:
        return max(1, self.every - self.since)

    def trained(self, steps: int) -> None:
        super().trained(steps)
        self.steps += steps
        self.every = self.auto.choose(self.steps)

    def is_due(self) -> bool:
        return 0 < self.every <= self.since

    def save(self, stall_s: float) -> None:
        with self.auto.measure_stall(self.steps):
            super().save(stall_s)
        self.stalls.append(stall_s)

    def written(self, seconds: float) -> None:
        self.auto.note_written(seconds)
        self.writes.append(seconds)


def goodput(case: Case, lives: Sequence[float], make: Callable[[World], Policy]) -> float:
    """Return which share of the time was training that counts; the run ends at a moment when it saves."""
    world = World(case)
    policy = make(world)
    for number, lifetime in enumerate(lives):
        one = world.attempt(lifetime, policy)
        if number == len(lives) - 1:
            world.kept = world.reached  # it is asked to stop, and commits
        if isinstance(policy, Auto):
            policy.past.append(one)
    return world.kept * STEP_S / case.length_s


def tried(case: Case, shape: float, seed: int) -> dict[str, float]:
    """Return the goodput of one history: by auto, by the best fixed interval of all, and by a save an hour."""
    lives = lifetimes(case, shape, random.Random(f"{case.name}{shape}{seed}"))
    costs = case.costs()
    optimum = best_interval_s(costs.stall_s, costs.between_failures_s)
    fixed = {every: goodput(case, lives, partial(Policy, every=max(1, round(every * optimum)))) for every in FIXED}
    best = max(fixed, key=lambda every: fixed[every])
    return {
        "failures": len(lives) - 1,
        "auto": goodput(case, lives, Auto),
        "best": fixed[best],
        "best_multiple": best,
        "hour": goodput(case, lives, partial(Policy, every=3600)),
    }


def rows(histories: int, pool: ProcessPoolExecutor) -> Iterator[dict[str, Any]]:
    for case, (process, shape) in itertools.product(CASES, SHAPES.items()):
        began = time.monotonic()
        found = list(pool.map(partial(tried, case, shape), range(histories), chunksize=4))
        costs = case.costs()
        predicted = 1 - costs.cost_share(best_interval_s(costs.stall_s, costs.between_failures_s))
        yield {
            **asdict(case),
            "process": process,
            "histories": histories,
            "failures": round(statistics.mean(one["failures"] for one in found), 1),
            "predicted": round(predicted, 5),
            **{name: round(statistics.mean(one[name] for one in found), 5) for name in ("auto", "best", "hour")},
            "of_best": round(statistics.mean(one["auto"] / one["best"] for one in found), 5),
            "least_of_best": round(min(one["auto"] / one["best"] for one in found), 5),
            "of_predicted": round(statistics.mean(one["auto"] for one in found) / predicted, 5),
            "seconds": round(time.monotonic() - began),
        }


def percent(share: float) -> str:
    return f"{share:.1%}"


def as_text(result: dict[str, Any]) -> str:
    """Return the page of both campaigns' results; each part where it is there."""
    parts = ["# How often to save\n"]
    if simulated := result.get("simulated"):
        parts.append(_simulated_text(simulated))
    if real := result.get("real"):
        parts.append(_real_text(real))
    return "\n".join(parts)


def _simulated_text(result: dict[str, Any]) -> str:
    rows, num_runs = result["rows"], sum(row["histories"] for row in result["rows"])
    lines = [
        "| run | failures | a save stalls, s | failures in a run | Young/Daly expects | `auto` | best in hindsight | a save an hour | `auto` of the best (least) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row['name']} | {row['process']} | {row['stall_s']:g} | {row['failures']:g} | {percent(row['predicted'])} | {percent(row['auto'])} | "
            f"{percent(row['best'])} | {percent(row['hour'])} | {percent(row['of_best'])} ({percent(row['least_of_best'])}) |"
            for row in rows
        ),
    ]
    return (
        "## Simulated\n\n"
        f"{num_runs} runs by [`checkpoint.every_steps=auto`](../checkpoints.md), each of which begins without knowing anything: not how long a save stalls, nor how often it "
        "fails. Each row is the mean share of the time that was training that counts. *Best in hindsight* is the best of 14 fixed intervals for that very "
        "history of failures, the last of which is never to save. *Clustered*: times between failures by Weibull with shape 0.5, so that a failure often follows soon after another. "
        f"The decisions are those of the program, with its default limits (60 s to an hour). Commit {result['commit'][:12]}, {result['date']}, by "
        "`python -m tests.campaigns.save_intervals`.\n\n" + "\n".join(lines) + "\n"
    )


def _real_text(result: dict[str, Any]) -> str:
    lives, rows = result["lives_s"], result["rows"]
    are_equal = all(row["digest"] == result["unbroken"] for row in rows)
    lines = [
        "| `checkpoint.every_steps` | share that was training that counts | saving, s | lost, s | steps kept |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row['every_steps']} | {percent(row['goodput'])} | {row['saving_s']:g} | {row['lost_s']:g} | {row['steps_kept']} |"
            for row in rows
        ),
    ]
    chosen = next(row["chosen"] for row in rows if row["every_steps"] == "auto")
    return (
        "## Real, killed\n\n"
        f"A training by two workers, 20 ms a step, in which a save stalls half a second on purpose. One worker is killed by SIGKILL {len(lives)} times, after random times "
        f"(exponential, mean {sum(lives) / len(lives):.1f} s, the same for all intervals); the run is submitted again each time. Starts are not part of the shares. Young/Daly expects "
        f"{percent(result['predicted'])} with the best interval, if stall and rate are known. `auto` chose {', '.join(str(steps) for steps, _ in chosen)} steps, one after the other. "
        "That leaves out the time in which a kill is noticed, which counts as lost here, and what `auto` loses until it has measured; and with so few kills, chance decides over several points. "
        f"All ended with {'the bits of the undisturbed training' if are_equal else 'OTHER BITS (WRONG)'}. "
        f"Commit {result['commit'][:12]}, {result['date']}, by `python -m tests.campaigns.save_faults`, on a machine of two cores while other work ran.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Try all; write the results."""
    parser = parser_of("tests.campaigns.save_intervals", __doc__)
    parser.add_argument("--histories", type=int, default=250, help="of each case and process")
    asked = parser.parse_args(argv)
    logging.disable(logging.INFO)
    with ProcessPoolExecutor(2) as pool:
        found = []
        for row in rows(asked.histories, pool):
            found.append(row)
            sys.stdout.write(f"{json.dumps(row)}\n")
            sys.stdout.flush()
    result = {**stamp(), "rows": found}
    known = json.loads(JSON.read_text(encoding="utf-8")) if JSON.exists() else {}
    both = {**known, "simulated": result}
    JSON.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(as_text(both), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
