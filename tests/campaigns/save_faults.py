"""A real training whose workers are killed at random times, by `checkpoint.every_steps=auto` and by three fixed intervals.

Two workers; a step takes 20 ms, a save half a second, on purpose. The times between kills are exponential, and the same for each
interval. `python -m tests.campaigns.save_faults` adds to docs/results/save-intervals.json, and writes save-intervals.md.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ddp_hpc.base import processes
from ddp_hpc.run.checkpoints.save_interval import SaveCosts, best_interval_s
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Mark, read_marks
from ddp_hpc.watch.attempt_times import AttemptTime, read_times
from tests.campaigns.command_line import parser_of
from tests.campaigns.save_intervals import JSON, TABLE, as_text
from tests.campaigns.written import stamp
from tests.distributed.whole_runs import HERE, Workplace, live_processes

STEP_S, SAVE_S, MEAN_S = 0.02, 0.5, 12.0
EVERY = ("auto", 25, 170, 1000)
"""The intervals, in steps: `auto`, too short (0.5 s), about the best one (3.4 s), and too long (20 s)."""
PATIENCE_S = 120.0

CONFIG = f"""
recipe: {{target: "slow_recipe:build", args: {{load_s: {STEP_S / 12}, save_s: {SAVE_S}}}}}
train: {{epochs: 1000, global_batch_size: 24, lr: 0.01}}
eval: {{every_epochs: 1000}}
integrity: {{every_steps: null}}
checkpoint: {{min_interval_s: 1}}
resources: {{workers_per_node: 2}}
"""


def workplace_in(path: Path) -> Workplace:
    """Return a directory with the recipes and their configuration."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "trial_recipe.py").symlink_to(HERE / "trial_recipe.py")
    (path / "slow_recipe.py").symlink_to(Path(__file__).with_name("slow_recipe.py"))
    workplace = Workplace(path)
    workplace.config.write_text(CONFIG)
    return workplace


def marks_of(run: RunDir, attempt: int) -> list[Mark]:
    return [mark for mark in read_marks(run) if mark.attempt == attempt]


def await_(what: str, is_true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE_S} s"
        time.sleep(0.05)


def killed_after(run: RunDir, life_s: float, source: random.Random) -> None:
    """Kill one worker, so many seconds after the newest attempt has begun to train; return when the run has ended."""
    attempt = Ledger.read(run).attempts[-1].attempt
    await_("the beginning", lambda: marks_of(run, attempt))
    begun_at = marks_of(run, attempt)[0].at
    time.sleep(max(0.0, begun_at + life_s - time.time()))
    victim: psutil.Process = source.choice(live_processes(run)["worker"])
    victim.kill()
    await_("the end", lambda: not processes.is_locked(run.lock))


def trained(every: str | int, *, path: Path, lives: list[float], steps: int) -> dict[str, Any]:
    """Train under these kills, then to the end; return what came of it until the last kill, and the digest of the end."""
    workplace, source = workplace_in(path / str(every)), random.Random(3)
    words = [f"checkpoint.every_steps={every}", f"train.max_steps={steps}"]
    run = workplace.run("faulty")
    for life_s in lives:
        begun = workplace.submit("faulty", *words)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        killed_after(run, life_s, source)
    times = read_times(run, now=time.time(), is_alive=False)
    intervals = [mark.interval for mark in read_marks(run) if mark.kind == "interval"]
    digest = workplace.finish("faulty", *words)
    seconds = {kind: sum(one.seconds[kind] for one in times) for kind in ("training", "saving", "lost")}
    return {
        "every_steps": every,
        "attempts": len(times),
        **{f"{kind}_s": round(value, 1) for kind, value in seconds.items()},
        "goodput": round(seconds["training"] / sum(seconds.values()), 4),
        "steps_kept": newest_step(times),
        "chosen": [[int(one["every_steps"]), round(one["expected_cost"], 4)] for one in intervals],
        "digest": digest,
    }


def newest_step(times: list[AttemptTime]) -> int:
    return max(one.kept_step for one in times)


def main(argv: Sequence[str] | None = None) -> int:
    """Train by each interval, all at a time, and undisturbed; write the results."""
    parser = parser_of("tests.campaigns.save_faults", __doc__)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4000)
    asked = parser.parse_args(argv)
    source = random.Random(14)
    lives = [round(source.expovariate(1 / MEAN_S), 2) for _ in range(asked.kills)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        unbroken = workplace_in(path / "unbroken")
        with ThreadPoolExecutor(len(EVERY)) as pool:
            rows = list(pool.map(partial(trained, path=path, lives=lives, steps=asked.steps), EVERY))
        digest = unbroken.finish("unbroken", f"train.max_steps={asked.steps}", "checkpoint.every_steps=null")
    mean_s = sum(lives) / len(lives)
    costs = SaveCosts(stall_s=SAVE_S, between_failures_s=mean_s)
    predicted = 1 - costs.cost_share(best_interval_s(SAVE_S, mean_s))
    result = {**stamp(), "lives_s": lives, "predicted": round(predicted, 4), "unbroken": digest, "rows": rows}
    known = json.loads(JSON.read_text(encoding="utf-8")) if JSON.exists() else {}
    both = {**known, "real": result}
    JSON.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(as_text(both), encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["digest"] == digest for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
