"""A run that goes on with more or fewer workers takes each sample once, in the same global batches."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

from ddp_hpc.launch.submission import local
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.data.sample_order import permutation
from tests.distributed.trial_recipe import Net
from tests.distributed.whole_runs import Workplace, live_processes, make_workplace

pytestmark = pytest.mark.long

NUM_SAMPLES = 475
GLOBAL_BATCH_SIZE = 12
NUM_STEPS = 40
"""The last takes seven samples."""
STEP_S = 0.2
"""About how long a step lasts until the last leg, so that a slow machine interrupts in time."""
CONFIG = f"""
recipe: {{target: "trial_recipe:build", args: {{num_samples: {NUM_SAMPLES}, width: 8}}}}
train: {{epochs: 1, global_batch_size: {GLOBAL_BATCH_SIZE}, lr: 0.01, record_samples: true}}
checkpoint: {{every_steps: 2}}
log: {{every_steps: 1}}
"""


@dataclass(frozen=True)
class Leg:
    """A part of the way: with which world, and what ends it after how many steps."""

    world_size: int
    micro_batch_size: int
    num_steps: int
    interrupt: Callable[[Workplace, RunDir], None]
    ending: str

    def settings(self, step_s: float = STEP_S) -> list[str]:
        load_s = step_s * self.world_size / GLOBAL_BATCH_SIZE
        return [
            f"resources.workers_per_node={self.world_size}",
            f"train.micro_batch_size={self.micro_batch_size}",
            f"recipe.args.load_s={load_s:.6f}",
        ]


def stop(workplace: Workplace, run: RunDir) -> None:
    done = workplace.command("stop", run.name)
    assert done.returncode == 0, done.stderr


def kill_a_worker(_: Workplace, run: RunDir) -> None:
    live_processes(run)["worker"][-1].kill()


def tell_one_worker(_: Workplace, run: RunDir) -> None:
    """Send the signal of a cluster to one worker alone: the others hear of it when they meet."""
    live_processes(run)["worker"][-1].send_signal(signal.SIGTERM)


LEGS = [
    Leg(4, 1, num_steps=3, interrupt=stop, ending="stopped"),
    Leg(2, 3, num_steps=5, interrupt=kill_a_worker, ending="failed"),
    Leg(3, 2, num_steps=3, interrupt=tell_one_worker, ending="stopped"),
]


def await_steps(run: RunDir, attempt: int, num_steps: int) -> None:
    """Return once an attempt has taken so many steps."""
    deadline = time.monotonic() + 60
    path = run.rank_samples(attempt, 0)
    while not path.exists() or len(path.read_bytes().splitlines()) < num_steps:
        assert time.monotonic() < deadline, f"attempt {attempt} did not take {num_steps} steps in a minute"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("world"), CONFIG)


@pytest.fixture(scope="module")
def changed(workplace: Workplace) -> RunDir:
    """A run of 4, then 2, then 3 workers, interrupted three times, and ended with 3."""
    run = workplace.run("changed")
    for attempt, leg in enumerate(LEGS):
        begun = workplace.submit(run.name, *leg.settings())
        assert begun.returncode == 0, begun.stdout + begun.stderr
        await_steps(run, attempt, leg.num_steps)
        leg.interrupt(workplace, run)
        assert local.wait(run, attempt, os.environ).ending == leg.ending
    workplace.finish(run.name, *LEGS[-1].settings(step_s=0.0))
    return run


@pytest.fixture(scope="module")
def unbroken(workplace: Workplace) -> RunDir:
    """The same by one worker, undisturbed."""
    workplace.finish("unbroken")
    return workplace.run("unbroken")


def test_every_interruption_came_amid_the_epoch_with_another_world(changed: RunDir) -> None:
    first_steps, last_steps, worlds = [], [], []
    for attempt in range(len(LEGS) + 1):
        ranks = sorted((changed.samples / f"attempt-{attempt}").glob("rank-*.jsonl"))
        steps = [json.loads(line)["step"] for line in ranks[0].read_text().splitlines()]
        worlds.append(len(ranks))
        first_steps.append(steps[0])
        last_steps.append(steps[-1])

    assert worlds == [4, 2, 3, 3]
    assert first_steps[0] == 1
    assert first_steps[1] == last_steps[0] + 1  # it was stopped: nothing is done twice
    assert last_steps[1] - 4 <= first_steps[2] <= last_steps[1] + 1  # it was killed: from the newest checkpoint
    assert first_steps[3] == last_steps[2] + 1
    assert max(last_steps[:3]) < last_steps[3] == NUM_STEPS


def test_each_sample_of_the_epoch_is_seen_exactly_once(workplace: Workplace, changed: RunDir) -> None:
    steps = workplace.samples(changed.name)

    seen = sorted(index for _, ids in steps.values() for index in ids)

    assert seen == list(range(NUM_SAMPLES))


def test_global_batches_follow_the_order_of_the_epoch(workplace: Workplace, changed: RunDir) -> None:
    order = permutation(NUM_SAMPLES, 0, 0).tolist()
    batches = [sorted(order[at : at + GLOBAL_BATCH_SIZE]) for at in range(0, NUM_SAMPLES, GLOBAL_BATCH_SIZE)]

    steps = workplace.samples(changed.name)

    assert [sorted(steps[step][1]) for step in range(1, NUM_STEPS + 1)] == batches
    assert [len(batch) for batch in batches] == [GLOBAL_BATCH_SIZE] * 39 + [7]


def test_global_batches_are_the_sets_of_the_unbroken_run(
    workplace: Workplace, changed: RunDir, unbroken: RunDir
) -> None:
    batches = [
        {step: (epoch, sorted(ids)) for step, (epoch, ids) in workplace.samples(run.name).items()}
        for run in (changed, unbroken)
    ]

    assert batches[0] == batches[1]


def test_ranks_share_each_batch_evenly(changed: RunDir) -> None:
    for path in (changed.samples / "attempt-0").glob("rank-*.jsonl"):
        counts = {len(json.loads(line)["samples"]) for line in path.read_text().splitlines()}
        assert counts == {GLOBAL_BATCH_SIZE // LEGS[0].world_size}


def test_each_step_stands_in_the_metrics_once(changed: RunDir) -> None:
    lines = [json.loads(line) for line in changed.metrics.read_text().splitlines()]

    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, NUM_STEPS + 1))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [NUM_STEPS]


def test_the_ledger_tells_the_story(changed: RunDir) -> None:
    attempts = Ledger.read(changed).attempts

    assert [entry.ending for entry in attempts] == ["stopped", "failed", "stopped", "finished"]
    assert f"rank 1 on {socket.gethostname()}: killed by SIGKILL" in attempts[1].reason


def test_weights_of_a_run_of_several_workers_are_exported_by_the_models_own_names(
    workplace: Workplace, changed: RunDir, tmp_path: Path
) -> None:
    done = workplace.command("export", changed.name, "-o", str(tmp_path / "weights.safetensors"))

    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as file:
        assert set(file.keys()) == Net(8).state_dict().keys()
