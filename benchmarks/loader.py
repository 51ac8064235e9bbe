"""What our loader feeds beside PyTorch's DataLoader: the same data sets, transforms, batches, loader processes and cores, in turns.

python benchmarks/run.py loader   # a few minutes
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from torchvision.transforms import v2  # type: ignore[import-untyped]  # it has no types

from benchmarks.rounds import Benchmark, Row, Samples, Verdict, judge, run_rounds, shown
from ddp_hpc.run.spec import DataSpec
from ddp_hpc.train.data.loader import load_global_batches
from ddp_hpc.train.data.sample_order import Position, RankSampler, SampleOrder

LEAD = 4
"""Batches before the clock starts: until then, loader processes start."""
LIMIT = 0.95


class Rows(Dataset[Any]):
    """What many people write: rows of tensors in memory."""

    def __init__(self, rows: TensorDataset) -> None:
        self.images, self.labels = rows.tensors

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __len__(self) -> int:
        return len(self.images)


class Transformed(Rows):
    """The same with a transform."""

    def __init__(self, rows: TensorDataset, transform: Callable[[Tensor], Tensor]) -> None:
        super().__init__(rows)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


@cache
def rows(size: int) -> TensorDataset:
    """Return images of 3 x size x size in memory: 24 or 77 MB."""
    num = 2048 if size == 32 else 128
    return TensorDataset(torch.rand(num, 3, size, size), torch.arange(num) % 10)


def by_hand(image: Tensor) -> Tensor:
    """Flip and add noise, by the generators of Python and numpy."""
    flipped = image.flip(-1) if random.random() < 0.5 else image  # an augmentation
    return flipped + float(np.random.normal(scale=0.1))  # noqa: NPY002  # the global generator, as data sets have it


ROWS, CALLS, LARGE = "3 x 32 x 32, rows", "3 x 32 x 32, rows, each copied by a call", "3 x 224 x 224, rows"
SETS: dict[str, Callable[[], Dataset[Any]]] = {
    ROWS: lambda: Rows(rows(32)),
    "3 x 32 x 32, TensorDataset": lambda: rows(32),
    CALLS: lambda: Transformed(rows(32), torch.clone),
    "3 x 32 x 32, Subset of a TensorDataset": lambda: Subset(rows(32), range(1024)),
    "3 x 32 x 32, torchvision's crop and flip": lambda: Transformed(
        rows(32), v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
    ),
    "3 x 32 x 32, flip and noise by `random` and numpy": lambda: Transformed(rows(32), by_hand),
    LARGE: lambda: Rows(rows(224)),
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    data: str
    batch: int
    num_workers: int
    num_batches: int = 30
    """How many are timed."""

    @property
    def name(self) -> str:
        return f"{self.data}, batches of {self.batch}, {self.num_workers} loader processes"


CASES = [
    *(Case(ROWS, batch, num, num_batches=max(24, 8192 // batch)) for num in (0, 1, 2) for batch in (32, 256, 1024)),
    *(Case(data, 32 if data == LARGE else 256, num) for data in SETS if data != ROWS for num in (0, 2)),
]


def ours(case: Case, data: Dataset[Any], num_batches: int) -> Iterable[Any]:
    """Return our loader's batches, as a worker takes them."""
    order = SampleOrder(
        num_samples=len(data),  # type: ignore[arg-type]  # map-style data has a length
        seed=0,
        global_batch_size=case.batch,
        micro_batch_size=case.batch,
        world_size=1,
    )
    sampler = RankSampler(order=order, start=Position(), total_steps=num_batches, rank=0)
    loaded = load_global_batches(data, sampler, data=DataSpec(num_workers=case.num_workers), pin_memory=False)
    return chain.from_iterable(fetched for _, fetched in loaded)


def pytorchs(case: Case, data: Dataset[Any], num_batches: int) -> Iterable[Any]:
    """Return the batches of PyTorch's loader, with as many processes and batches ahead."""
    ahead = {"prefetch_factor": DataSpec().prefetch_factor, "multiprocessing_context": "fork"}
    return DataLoader(
        data,
        case.batch,
        sampler=RandomSampler(data, num_samples=num_batches * case.batch),  # type: ignore[arg-type]  # as above
        num_workers=case.num_workers,
        **(ahead if case.num_workers else {}),  # type: ignore[arg-type]  # a dict of several types
    )


def us_a_sample(load: Callable[[Case, Dataset[Any], int], Iterable[Any]], case: Case) -> tuple[float, float]:
    """Return how long a sample takes, once the loader runs, and the CPU time of it, with the loader processes'."""
    before = _cpu_s()
    batches = iter(load(case, SETS[case.data](), LEAD + case.num_batches))
    assert sum(1 for _ in islice(batches, LEAD)) == LEAD
    begun = time.perf_counter()
    assert sum(1 for _ in batches) == case.num_batches
    taken = time.perf_counter() - begun
    del batches  # its processes end
    used = (_cpu_s() - before) / (LEAD + case.num_batches)
    return 1e6 * taken / (case.num_batches * case.batch), 1e6 * used / case.batch


def _cpu_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def side_by_side(case: Case) -> Mapping[str, float]:
    """Return what both take for a sample, in turns, and our rate by PyTorch's."""
    loaders = {"ours": ours, "pytorch": pytorchs}
    taken = {name: us_a_sample(loaders[name], case) for name in random.sample([*loaders], 2)}
    times = {name: each[0] for name, each in taken.items()}
    return {**times, "ratio": times["pytorch"] / times["ours"], "by_cpu": taken["pytorch"][1] / taken["ours"][1]}


def measure(rounds: int) -> Samples:
    """Measure all on one thread, as a worker with one CPU and its loader processes have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_rounds("loader", [Row(case.name, partial(side_by_side, case)) for case in CASES], rounds=rounds)
    finally:
        torch.set_num_threads(threads)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold our rate against PyTorch's."""
    return [judge(row, figures["ratio"], limit=LIMIT) for row, figures in samples.by_row.items()]


BENCHMARK = Benchmark(
    name="loader",
    title="What our loader feeds beside PyTorch's DataLoader",
    rounds=10,
    measure=measure,
    columns=[
        shown("PyTorch's, us a sample", "pytorch"),
        shown("ours, us a sample", "ours"),
        shown("rate, by PyTorch's", "ratio"),
        shown("rate by CPU time, by PyTorch's", "by_cpu"),
    ],
    verdicts=verdicts,
)
