"""What `gpu_check.py` measures in its own process: our loop beside two others, and the copy of a checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

from benchmarks.rounds import Row, Samples, run_rounds
from ddp_hpc.run_dir import ownership
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.spec import CheckpointSpec, DataSpec, LrScheduleSpec, OptimizerSpec, RunSpec, TrainSpec
from ddp_hpc.train import process_group
from ddp_hpc.train.data.loader import Fetched, LoadedGlobalBatch
from ddp_hpc.train.data.sample_order import RankSampler
from ddp_hpc.train.engine import loop
from ddp_hpc.train.engine.training import configure_torch, prepare
from ddp_hpc.train.process_group import Group, RankInfo
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recipes import image_classification
from ddp_hpc.train.state import training_state
from ddp_hpc.train.state.checkpoint import Checkpointer, partition_tensors
from ddp_hpc.train.state.save_buffers import SaveBuffers
from ddp_hpc.train.state.training_state import NamedTensor
from ddp_hpc.train.stop import StopFlag

NUM_BATCHES = 4
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4
NAIVE, TUNED, OURS, LOADED = "naive", "hand-tuned", "ddp_hpc", "ddp_hpc, own loader"
LOOPS = {
    NAIVE: "PyTorch's defaults: fp32 (TF32 in convolutions), NCHW, SGD",
    TUNED: "bf16 autocast, channels_last, fused SGD, torch.compile, cudnn.benchmark",
    OURS: "ddp_hpc.train.engine.loop: precision=bf16, channels_last, compile, fused SGD; recorder and stop consensus on",
    LOADED: "the same, but its own loader brings the batches from the host's memory",
}
"""What each row is. All see the same images of the `fake` set, held on the device as fp32 NCHW batches."""
RATE = "samples_per_s"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and for how long."""

    model: str
    image_size: int
    batch: int
    steps: int
    """Timed in each round."""
    rounds: int
    lead: int = 5
    """Steps before the clock starts, in each round anew."""
    num_classes: int = 10
    compiled: bool = True
    num_loaders: int = 0
    """Loader processes of the row that uses our loader."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    ema_decay: float | None = None

    def recipe(self) -> Recipe:
        """Return the built-in recipe with its synthetic images, and the same new network each time."""
        torch.manual_seed(0)
        return image_classification.build(
            model=self.model,
            dataset="fake",
            image_size=self.image_size,
            num_classes=self.num_classes,
            num_samples=NUM_BATCHES * self.batch,
        )

    @cached_property
    def data(self) -> TensorDataset:
        """The images of the recipe's `fake` set, made once and held in memory."""
        images = self.recipe().train_data
        return TensorDataset(*default_collate([images[index] for index in range(NUM_BATCHES * self.batch)]))

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return the same images as batches on the device, in the layout in which loaders deliver them."""
        images, labels = (tensor.to(device).split(self.batch) for tensor in self.data.tensors)
        return list(zip(images, labels, strict=True))

    @property
    def described(self) -> dict[str, Any]:
        return {"batch": self.batch, "image_size": self.image_size, "precision": "bf16", "compiled": self.compiled}


def cases(device: torch.device, *, tiny: bool) -> tuple[Case, Case, Case]:
    """Return what is measured: MiniResNet, ResNet-50, and a large state to copy."""
    if tiny:
        small = Case(model="mini_resnet", image_size=16, batch=8, steps=4, rounds=2, lead=2)
        deep = replace(small, model="resnet50", image_size=32, batch=4, steps=1, rounds=1, lead=1, compiled=False)
        return small, deep, replace(small, compiled=False, optimizer="adamw", ema_decay=0.9)
    has_room = shutil.disk_usage("/dev/shm").free > 8 << 30  # noqa: S108  where loaders put batches
    loaders = max(1, min(8, len(os.sched_getaffinity(0)) - 2)) if has_room else 0
    batch = 256 if torch.cuda.get_device_properties(device).total_memory > 60 << 30 else 64
    small = Case(model="mini_resnet", image_size=32, batch=1024, steps=100, rounds=5, num_loaders=loaders)
    deep = replace(small, model="resnet50", image_size=224, batch=batch, steps=20, rounds=3, num_classes=1000)
    large = replace(deep, model="resnet152", image_size=64, batch=32, compiled=False, num_loaders=0)
    return small, deep, replace(large, optimizer="adamw", ema_decay=0.999)


@contextmanager
def alone(device: torch.device) -> Iterator[Group]:
    """Be a group of one. What is made with it belongs into a function called inside: it must be gone at the end."""
    place = RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, master_addr="127.0.0.1", master_port=0
    )
    group = process_group.join(place, device)
    try:
        yield group
    finally:
        process_group.leave()
        torch.use_deterministic_algorithms(False)
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Return how long `work` takes on an idle device, to its end."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


class PlainLoop:
    """What people write by hand: naive, with PyTorch's defaults in fp32, or tuned by all the means there are."""

    def __init__(self, case: Case, device: torch.device, *, tuned: bool) -> None:
        self._case = case
        self._device = device
        self._tuned = tuned
        self._batches = case.batches(device)
        network = case.recipe().model.to(device)
        fused = True if tuned and device.type == "cuda" else None
        self._optimizer = torch.optim.SGD(
            network.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused
        )
        if tuned:
            network = network.to(memory_format=torch.channels_last)
        self._call: Callable[[Tensor], Tensor] = torch.compile(network) if tuned and case.compiled else network

    def measure(self) -> Mapping[str, float]:
        """Train on; return the rate of the timed steps."""
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = self._tuned
        torch.backends.cudnn.allow_tf32 = True  # as PyTorch has it; our loop, in this same process, may turn it off
        self._walk(self._case.lead)
        seconds = seconds_of(self._device, lambda: self._walk(self._case.steps))
        return {RATE: self._case.steps * self._case.batch / seconds}

    def _walk(self, num_steps: int) -> None:
        step = self._tuned_step if self._tuned else self._naive_step
        losses = [step(*self._batches[number % NUM_BATCHES]) for number in range(num_steps)]
        assert losses[-1].isfinite(), "the loss is no number any more"

    def _naive_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._call(inputs), targets)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _tuned_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = inputs.to(memory_format=torch.channels_last)
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
            loss = functional.cross_entropy(self._call(inputs), targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class OurLoop:
    """The real loop in this process, bf16 and channels_last; each time it goes on from its own checkpoint."""

    def __init__(self, case: Case, group: Group, path: Path, *, deterministic: bool = False) -> None:
        self._case = case
        self._device = group.device
        self._batches = case.batches(group.device)
        self._spec = RunSpec(
            name=path.name,
            train=TrainSpec(
                epochs=1,
                global_batch_size=case.batch,
                lr=LR,
                precision="bf16",
                channels_last=True,
                compile=case.compiled,
                deterministic=deterministic,
                ema_decay=case.ema_decay,
            ),
            optimizer=OptimizerSpec(name=case.optimizer, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
            lr_schedule=LrScheduleSpec(name="constant"),
            data=DataSpec(num_workers=case.num_loaders),
            checkpoint=CheckpointSpec(every_steps=None, keep_last=1),
        )
        run = RunDir(path)
        ownership.claim(run, 0)
        recipe = replace(case.recipe(), train_data=case.data, eval_data=None)
        self.training = prepare(self._spec, recipe, run, group, attempt=0, stop=StopFlag(run.stop_request))
        self.training.total_steps = 0

    def measure(self, *, own_loader: bool = False) -> Mapping[str, float]:
        """Train on, with journal, meetings and the last commit; return the rate of the timed steps."""
        torch.use_deterministic_algorithms(False)
        configure_torch(self._spec)
        t = self.training
        t.total_steps += self._case.lead + self._case.steps + 1
        marks: list[float] = []
        source = type(t).global_batches if own_loader else self.fed
        t.global_batches = lambda: self._timed(source(t), marks)  # type: ignore[method-assign]
        assert loop.train(t), "the loop was told to stop"
        t.recorder.close()
        first, last = marks
        return {RATE: self._case.steps * self._case.batch / (last - first)}

    def _timed(self, windows: Iterator[LoadedGlobalBatch], marks: list[float]) -> Iterator[LoadedGlobalBatch]:
        """Pass windows on; note the time, with the device idle, after the lead and after the timed steps."""
        for number, window in enumerate(windows):
            if number - self._case.lead in (0, self._case.steps):
                synchronize(self._device)
                marks.append(time.perf_counter())
            yield window

    def fed(self, t: Any = None) -> Iterator[LoadedGlobalBatch]:
        """Yield the windows of the steps to do, with batches that lie on the device already."""
        t = t or self.training
        walk = RankSampler(order=t.order, start=t.state.position, total_steps=t.total_steps, rank=0)
        for number, plan in enumerate(walk):
            fetched = Fetched(plan.micro_batches[0].indices, self._batches[number % NUM_BATCHES])
            yield LoadedGlobalBatch(plan, iter((fetched,)))

    def take_step(self, windows: Iterator[LoadedGlobalBatch]) -> None:
        """Take one step as the loop does."""
        window = next(windows)
        loop.accumulate_gradients(self.training, window)
        loop.update_weights(self.training)
        self.training.state.position = window.plan.after

    def named(self) -> list[NamedTensor]:
        """Return the tensors of the training state, as they are handed to `SaveBuffers`."""
        return partition_tensors(training_state.tensors(self.training.state), rank=0, world_size=1)


# --- samples/s -------------------------------------------------------------------------------------------------------


def measure_rates(case: Case, device: torch.device) -> dict[str, Any]:
    """Return samples/s of a naive loop, a tuned one, and ours; every row once a round."""

    def measure(group: Group, folder: Path) -> Samples:
        ours = OurLoop(case, group, folder / "run")
        rows = [
            Row(NAIVE, PlainLoop(case, device, tuned=False).measure),
            Row(TUNED, PlainLoop(case, device, tuned=True).measure),
            Row(OURS, ours.measure),
            Row(LOADED, partial(ours.measure, own_loader=True)),
        ]
        return run_rounds(case.model, rows, rounds=case.rounds)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, alone(device) as group:
        samples = measure(group, Path(folder))
    return {
        **case.described,
        "loader_processes": case.num_loaders,
        RATE: _spreads(samples),
        "ours_over_tuned": samples.median_ratio(RATE, over=OURS, under=TUNED),
        "ours_over_naive": samples.median_ratio(RATE, over=OURS, under=NAIVE),
    }


def measure_determinism(case: Case, device: torch.device) -> dict[str, Any]:
    """Return our samples/s with `train.deterministic` and without, not compiled."""
    case = replace(case, compiled=False)
    names = {False: "any algorithm", True: "deterministic"}

    def measure(group: Group, folder: Path) -> Samples:
        rows = [
            Row(name, OurLoop(case, group, folder / f"run-{wanted}", deterministic=wanted).measure)
            for wanted, name in names.items()
        ]
        return run_rounds(f"{case.model}, determinism", rows, rounds=case.rounds)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, alone(device) as group:
        samples = measure(group, Path(folder))
    ratio = samples.median_ratio(RATE, over=names[True], under=names[False])
    return {**case.described, RATE: _spreads(samples), "deterministic_over_any": ratio}


def _spreads(samples: Samples) -> dict[str, dict[str, float]]:
    return {
        row: {"median": samples.median(row, RATE), "lowest": min(by[RATE]), "highest": max(by[RATE])}
        for row, by in samples.by_row.items()
    }


# --- the copy of a checkpoint ----------------------------------------------------------------------------------------


def with_trained(case: Case, device: torch.device, measure: Callable[[OurLoop], dict[str, Any]]) -> dict[str, Any]:
    """Call `measure` with our loop after a few steps, so that there is a state worth copying."""

    def begin(group: Group, folder: Path) -> dict[str, Any]:
        ours = OurLoop(replace(case, steps=1), group, folder / "run")
        ours.measure()
        return measure(ours)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, alone(device) as group:
        return begin(group, Path(folder))


def check_copied_bytes(case: Case, device: torch.device, *, trials: int = 5) -> dict[str, Any]:
    """Compare what is copied with a synchronous copy, although the state changes right after `fill`."""

    def check(ours: OurLoop) -> dict[str, Any]:
        named, buffers = ours.named(), SaveBuffers(device)
        for trial in range(trials):
            expected = _synchronous_copy(named)
            copied = _copied_while_changing(buffers, named, hold_back=True)
            assert torch.equal(copied, expected), f"trial {trial}: the copied bytes differ from a synchronous copy"
            assert not torch.equal(_synchronous_copy(named), expected), "the state did not change: nothing was tried"
        expected = _synchronous_copy(named)
        differs = not torch.equal(_copied_while_changing(buffers, named, hold_back=False), expected)
        found = {"bytes": expected.numel(), "tensors": len(named), "trials": trials}
        return found if device.type == "cpu" else {**found, "differs_without_hold_back": differs}

    return with_trained(case, device, check)


def _synchronous_copy(named: Sequence[NamedTensor]) -> Tensor:
    return torch.cat([item.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for item in named])


def _copied_while_changing(buffers: SaveBuffers, named: Sequence[NamedTensor], *, hold_back: bool) -> Tensor:
    """Fill, change buffers at once, weights as soon as they may be; return what the writer would get."""
    buffers.fill(named)
    with torch.no_grad():
        for item in named:
            if item.owner is not None:  # a buffer: the next forward may change it
                item.tensor.add_(1)
        if hold_back:
            buffers.wait_for_copy()
        for item in named:
            if item.owner is None:
                item.tensor.add_(1)
    _, *parts = buffers.parts()
    return torch.cat([torch.frombuffer(part, dtype=torch.uint8) for part in parts])


def measure_copy(case: Case, device: torch.device, *, repeats: int = 7) -> dict[str, Any]:
    """Return what a copy costs the loop, how fast it is, and how much of it hides behind the next step (CUDA)."""

    def measure(ours: OurLoop) -> dict[str, Any]:
        ours.training.total_steps += 100
        windows, buffers = ours.fed(), SaveBuffers(device)
        saves = [_stall_of_save(ours, windows) for _ in range(4)][1:]  # the first one makes the buffers
        ours.training.checkpointer = cast("Checkpointer", buffers)  # asked by `update_weights` to hold back, no more
        named = ours.named()
        first_fill = seconds_of(device, lambda: buffers.fill(named))
        stalls: list[float] = []
        pairs = [
            (
                seconds_of(device, lambda: ours.take_step(windows)),
                seconds_of(device, lambda: stalls.append(_fill_and_step(ours, buffers, windows))),
            )
            for _ in range(repeats)
        ]
        step, with_copy = (median(seconds) for seconds in zip(*pairs, strict=True))
        copied = median(seconds_of(device, lambda: buffers.fill(named)) for _ in range(repeats))
        plain = median(seconds_of(device, lambda: [item.tensor.cpu() for item in named]) for _ in range(repeats))
        num_bytes = sum(item.tensor.nbytes for item in named)
        seconds = {"first_fill": first_fill, "stall_of_fill": median(stalls), "stall_of_save": median(saves)}
        seconds |= {"copy": copied, "unpinned_copy": plain, "step": step, "step_beside_copy": with_copy}
        return {
            "bytes": num_bytes,
            "gb_per_s": num_bytes / copied / 1e9,
            "limit_gb_per_s": _pinned_bandwidth(device, num_bytes, repeats) / 1e9,
            "hidden_share": 1 - (with_copy - step) / copied,
            **{f"{name}_ms": value * 1e3 for name, value in seconds.items()},
        }

    return with_trained(case, device, measure)


def _pinned_bandwidth(device: torch.device, num_bytes: int, repeats: int) -> float:
    """Return bytes/s of one plain copy into pinned memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return num_bytes / median(
        seconds_of(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(repeats)
    )


def _stall_of_save(ours: OurLoop, windows: Iterator[LoadedGlobalBatch]) -> float:
    """Return how long the real `save` keeps the loop, on an idle device; the write is awaited, not timed."""
    ours.take_step(windows)
    torch.cuda.synchronize()
    began = time.perf_counter()
    ours.training.checkpointer.save(ours.training.state)
    seconds = time.perf_counter() - began
    ours.training.checkpointer.wait()
    return seconds


def _fill_and_step(ours: OurLoop, buffers: SaveBuffers, windows: Iterator[LoadedGlobalBatch]) -> float:
    """Return how long `fill` keeps the loop; then take the next step beside the copy."""
    began = time.perf_counter()
    buffers.fill(ours.named())
    seconds = time.perf_counter() - began
    ours.take_step(windows)
    return seconds
