"""What the comparison of the ranks' weights costs a rank: the digests of its state, and the record of them.

python benchmarks/run.py integrity   # a minute
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

import torch
from torch import nn

from benchmarks import loop
from benchmarks.rounds import Benchmark, Row, Samples, Verdict, judge, run_rounds, shown
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import record_digest
from ddp_hpc.run.spec import IntegritySpec
from ddp_hpc.train.state import digests, training_state
from ddp_hpc.train.state.training_state import TrainingState

EVERY = IntegritySpec().every_steps or 0
LIMIT_PERCENT = 1.0
BATCH, WIDTH, LAYERS = 32, 2500, 4
SMALL, LARGE = "0.1 MB of weights, SGD", "100 MB of weights, AdamW"
REPEATS = {SMALL: 200, LARGE: 3}


def large() -> nn.Module:
    """Return layers of 25 million weights."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def cpu_s(work: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of one call, with all threads of this process."""
    before = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - before) / repeats


def costs(name: str, run: RunDir) -> Mapping[str, float]:
    """Return what a step takes, what a comparison takes besides the exchange of 8 bytes a rank, and its share of the steps between two."""
    network = loop.model() if name == SMALL else large()
    optimizer = loop.sgd(network) if name == SMALL else torch.optim.AdamW(network.parameters())
    inputs = torch.randn(BATCH, 64 if name == SMALL else WIDTH)
    state = TrainingState(
        model=network,
        optimizer=optimizer,
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
        loss_meter=torch.zeros(()),
    )

    def step() -> None:
        network(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def compare() -> None:
        record_digest(
            run,
            attempt=0,
            step=0,
            world_size=2,
            digest=digests.combined_digest(digests.digests_of_tensors(training_state.replicated_tensors(state))),
        )

    step()
    compare()
    a_step, once = cpu_s(step, REPEATS[name]), cpu_s(compare, REPEATS[name])
    return {"step": a_step, "once": once, "share": once / (EVERY * a_step)}


def measure(rounds: int) -> Samples:
    """Measure both models on one thread, as a worker with one CPU has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = [Row(name, partial(costs, name, RunDir(Path(folder)))) for name in (SMALL, LARGE)]
            return run_rounds("integrity", rows, rounds=rounds)
    finally:
        torch.set_num_threads(threads)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold the comparison against the steps from one to the next."""
    return [
        judge(
            f"{row}, of the {EVERY} steps between two comparisons",
            [100 * share for share in samples.by_row[row]["share"]],
            unit="%",
            limit=LIMIT_PERCENT,
            wanted="at most",
        )
        for row in samples.by_row
    ]


BENCHMARK = Benchmark(
    name="integrity",
    title="What the comparison of the ranks' weights costs a rank (CPU time)",
    rounds=9,
    measure=measure,
    columns=[
        shown("a step, ms of a CPU", "step", scale=1e3, digits=3),
        shown("a comparison, ms of a CPU", "once", scale=1e3, digits=3),
        shown("share, %", "share", scale=100, digits=3),
    ],
    verdicts=verdicts,
)
