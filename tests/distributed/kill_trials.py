"""Trials of the promise that a run killed at any moment, and submitted again, ends with the same bits.

A trial kills one process of a run, at random or in the middle of a save, has it resumed, kills again, lets it end,
and compares the digest of the whole training state with that of a run that nothing disturbed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import psutil

from ddp_hpc.base import processes
from ddp_hpc.run.run_dir.hang_records import read_hang_records
from ddp_hpc.run.run_dir.ledger import Cause, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from tests.distributed.whole_runs import Workplace, live_processes

NUM_SAMPLES = 480
GLOBAL_BATCH_SIZE = 24
STEPS_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH_SIZE
STEP_S = 0.03
"""About how long a step lasts, so that a kill finds every state there is."""
MAX_KILLS = 3
HANG_TIMEOUT_S = 120
"""Many times as long as anything takes here, and short enough that a run that hangs says why before its test gives up."""
_PATIENCE_S = 60.0

CONFIG = f"""
recipe: {{target: "trial_recipe:build", args: {{num_samples: {NUM_SAMPLES}}}}}
train: {{epochs: 2, global_batch_size: {GLOBAL_BATCH_SIZE}, lr: 0.01, ema_decay: 0.9, grad_clip_norm: 1.0}}
optimizer: {{name: adamw}}
checkpoint: {{every_steps: 2, keep_best: 1}}
restart: {{hang_timeout_s: {HANG_TIMEOUT_S}}}
log: {{every_steps: 4}}
"""


@dataclass(frozen=True)
class Case:
    """One kind of run."""

    world_size: int
    accumulation: int
    num_loaders: int
    precision: str

    @cached_property
    def name(self) -> str:
        return f"w{self.world_size}-a{self.accumulation}-l{self.num_loaders}-{self.precision}"

    def settings(self) -> list[str]:
        micro_batch_size = GLOBAL_BATCH_SIZE // (self.world_size * self.accumulation)
        load_s = STEP_S * self.world_size * max(self.num_loaders, 1) / GLOBAL_BATCH_SIZE
        return [
            f"resources.workers_per_node={self.world_size}",
            f"train.micro_batch_size={micro_batch_size}",
            f"data.num_workers={self.num_loaders}",
            f"train.precision={self.precision}",
            f"recipe.args.load_s={load_s:.6f}",
        ]


CASES = [
    Case(world_size, accumulation, num_loaders, precision)
    for world_size in (1, 2, 4)
    for accumulation in (1, 3)
    for num_loaders in (0, 2)
    for precision in ("fp32", "bf16")
]


@dataclass
class Outcome:
    """What a trial did and found."""

    case: Case
    digest: str
    kills: list[str] = field(default_factory=list)
    """Who was killed, when, and where the run resumed, in words."""
    resumed_at: list[int] = field(default_factory=list)
    """The step of each resume."""

    @property
    def resumes_in_one_epoch(self) -> int:
        """The most resumes amid the same epoch."""
        epochs = [step // STEPS_PER_EPOCH for step in self.resumed_at if step % STEPS_PER_EPOCH]
        return max((epochs.count(epoch) for epoch in epochs), default=0)


def unbroken_digest(workplace: Workplace, case: Case) -> str:
    """Return the digest of a run of `case` that nothing disturbed."""
    return workplace.finish(f"unbroken-{case.name}", *case.settings())


def run_trial(workplace: Workplace, case: Case, seed: int, num_kills: int = MAX_KILLS) -> Outcome:
    """Kill a run of `case` up to so many times, at moments that follow from `seed`, and let it end."""
    chance = random.Random(seed)
    name = f"killed-{case.name}-{seed}"
    run = workplace.run(name)
    outcome = Outcome(case, digest="")
    for _ in range(num_kills):
        begun = workplace.submit(name, *case.settings())
        assert begun.returncode == 0, begun.stdout + begun.stderr
        if run.done.exists():
            break
        _note_resume(run, outcome)
        victim = _kill_one(run, chance)
        if victim is None:
            break
        outcome.kills.append(victim)
        _await_quiet(run)
    outcome.digest = workplace.finish(name, *case.settings())
    hung = [attempt.attempt for attempt in Ledger.read(run).attempts if attempt.cause is Cause.HANG]
    records = [record for attempt in hung for record in read_hang_records(run, attempt)]
    assert not hung, f"{name} hung, killed before: {outcome.kills}\n{workplace.command('why', name).stdout}\n{records}"
    return outcome


def _note_resume(run: RunDir, outcome: Outcome) -> None:
    attempt = Ledger.read(run).attempts[-1].attempt
    log = run.rank_log(attempt, 0).read_text()
    resumed = [line for line in log.splitlines() if "resumed at step" in line]
    if resumed:
        outcome.resumed_at.append(int(resumed[0].split("resumed at step ")[1].split()[0]))


def _kill_one(run: RunDir, chance: random.Random) -> str | None:
    """Kill one process of the run, at a random moment or while a checkpoint is being written; say which."""
    moment = chance.choice(("any moment", "any moment", "mid-save"))
    if moment == "mid-save":
        _await_uncommitted(run)
    else:
        time.sleep(chance.uniform(0.0, 12 * STEP_S))
    kind = chance.choice(("worker", "worker", "worker", "agent", "loader", "supervisor"))
    candidates = live_processes(run)
    victims = candidates[kind] or candidates["worker"] or candidates["agent"]
    if not victims:
        return None
    index = chance.randrange(len(victims))
    try:
        if kind == "supervisor":  # with its guardian, who would start another
            guardian = victims[index].parent()
            if guardian is not None and "ddp_hpc.job.guardian" in guardian.cmdline():
                guardian.kill()
        victims[index].kill()
    except psutil.NoSuchProcess:
        return None
    progress = read_progress(run)
    return f"{kind} {index} at {moment}, about step {progress.step if progress else 0}"


def _await_uncommitted(run: RunDir) -> None:
    """Return as soon as a checkpoint is being written."""
    deadline = time.monotonic() + 10 * STEP_S
    while time.monotonic() < deadline and not any(run.checkpoints.glob("*.writing/step-*")):
        time.sleep(0.0002)


def _await_quiet(run: RunDir) -> None:
    """Return once the last process of the run is gone."""
    deadline = time.monotonic() + _PATIENCE_S
    while processes.is_locked(run.lock):
        assert time.monotonic() < deadline, f"{run.name}: {live_processes(run)} still live {_PATIENCE_S} s after a kill"
        time.sleep(0.01)


def cases_for(num_trials: int) -> Sequence[Case]:
    """Return the cases of so many trials, spread evenly, in an order that mixes them."""
    order = random.Random(0).sample(CASES, len(CASES))
    return [order[index % len(order)] for index in range(num_trials)]
