"""Checks that train in their own process: where the loop waits for the device, what a save copies, and rates beside other loops."""

from __future__ import annotations

import importlib.util
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from benchmarks.gpu.place import ROOT, Figures, Place
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec, DataSpec, LogSpec, LrScheduleSpec, OptimizerSpec, RunSpec, TrainSpec
from ddp_hpc.train import process_group
from ddp_hpc.train.data.loader import FetchedBatch, LoadedGlobalBatch
from ddp_hpc.train.data.sample_order import RankSampler
from ddp_hpc.train.engine import loop
from ddp_hpc.train.engine.training import assemble_training, configure_torch
from ddp_hpc.train.process_group import Group, RankInfo
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recipes import image_classification
from ddp_hpc.train.state import training_state
from ddp_hpc.train.state.loading import load_checkpoint
from ddp_hpc.train.stop import StopFlag

NUM_BATCHES = 4
NUM_REPEATS = 250
"""How often an epoch has them: at its end, more is done than train."""
NEVER = 10**9


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and for how long."""

    recipe: Callable[[], Recipe]
    """Returns the same new network each time, and the data."""
    batch: int
    steps: int
    """Timed in each round."""
    lead: int = 5
    """Steps before the clock starts, in each round anew."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section `train`."""
    optimizer: str = "sgd"
    loaders: int = 0
    """Loader processes where batches are not on the device already."""
    units: int = 1
    """What one sample counts for in a rate: the tokens of a text."""

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return the samples as batches on the device."""
        (data, *_) = self.recipe().train_data.datasets  # type: ignore[attr-defined]  # those of `images` and `texts`
        inputs, targets = (tensor.to(device).split(self.batch) for tensor in data.tensors)
        return list(zip(inputs, targets, strict=True))


def images(model: str, size: int, num_classes: int, batch: int) -> Recipe:
    """Return the built-in recipe with random images, held in memory."""
    torch.manual_seed(0)
    recipe = image_classification.build(model=model, dataset="fake", image_size=size, num_classes=num_classes)
    count = NUM_BATCHES * batch
    data = TensorDataset(torch.randn(count, 3, size, size), torch.randint(0, num_classes, (count,)))
    return replace(recipe, train_data=ConcatDataset([data] * NUM_REPEATS), eval_data=None)


def texts(batch: int, context: int, **sizes: int) -> Recipe:
    """Return the GPT of `examples/tiny_lm.py` with random bytes."""
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location("tiny_lm", ROOT / "examples" / "tiny_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe: Recipe = module.build(context=context, **sizes)
    inputs, targets = torch.randint(0, 256, (2, NUM_BATCHES * batch, context))
    data: Dataset[Any] = ConcatDataset([TensorDataset(inputs, targets)] * NUM_REPEATS)
    return replace(recipe, train_data=data, eval_data=None, optimizer=None)


@contextmanager
def alone(place: Place) -> Iterator[Group]:
    """Be a group of one. What is made with it belongs into a function called inside: it must be gone at the end."""
    device = torch.device("cuda", 0) if place.has_cuda else torch.device("cpu")
    rank = RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, master_addr="127.0.0.1", master_port=0
    )
    if not place.has_cuda:
        torch.set_num_threads(1)  # other checks run beside it
    group = process_group.join(rank, device)
    try:
        yield group
    finally:
        process_group.leave_process_group()
        torch.use_deterministic_algorithms(False)


def synchronize(device: torch.device) -> None:
    """Wait for all that the device has to do."""
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
    """What people write by hand, with the settings of a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case, self._device = case, device
        self._batches = case.batches(device)
        recipe = case.recipe()
        self._loss, self._parameters = recipe.loss, list(recipe.model.parameters())
        model = recipe.model.to(device)
        if case.train.get("channels_last"):
            model = model.to(memory_format=torch.channels_last)
        fused = True if device.type == "cuda" else None
        made: Mapping[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(self._parameters, 0.01, momentum=0.9, weight_decay=5e-4, fused=fused),
            "adamw": lambda: torch.optim.AdamW(self._parameters, 0.001, fused=fused),
        }
        self._optimizer = made[case.optimizer]()
        self._call: Callable[[Tensor], Tensor] = torch.compile(model) if case.train.get("compile") else model

    def measure(self) -> float:
        """Train on; return the rate of the timed steps."""
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")  # PyTorch's default, which a run in this process may have changed
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
        self._walk(self._case.lead)
        seconds = seconds_of(self._device, lambda: self._walk(self._case.steps))
        return self._case.steps * self._case.batch * self._case.units / seconds

    def _walk(self, num_steps: int) -> None:
        losses = [self._step(*self._batches[number % NUM_BATCHES]) for number in range(num_steps)]
        assert losses[-1].isfinite(), "the loss is no number any more"

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        train = self._case.train
        if train.get("channels_last"):
            inputs = inputs.to(memory_format=torch.channels_last)
        uses_bf16 = train.get("precision") == "bf16"
        with torch.autocast(inputs.device.type, torch.bfloat16) if uses_bf16 else nullcontext():
            loss = self._loss(self._call(inputs), targets)
        loss.backward()
        if "grad_clip_norm" in train:
            nn.utils.clip_grad_norm_(self._parameters, train["grad_clip_norm"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]  # a tensor


class OurLoop:
    """The real loop in this process; each time it goes on from its own checkpoint."""

    def __init__(self, case: Case, group: Group, path: Path) -> None:
        self._case, self._device = case, group.device
        lr = 0.001 if case.optimizer == "adamw" else 0.01
        sgd = {"momentum": 0.9, "weight_decay": 5e-4} if case.optimizer == "sgd" else {}
        self.spec = RunSpec(
            name=path.name,
            train=TrainSpec(epochs=NEVER, global_batch_size=case.batch, lr=lr, **case.train),
            optimizer=OptimizerSpec(name=case.optimizer, **sgd),  # type: ignore[arg-type]  # one of its names
            lr_schedule=LrScheduleSpec(name="constant"),
            data=DataSpec(num_workers=case.loaders),
            log=LogSpec(every_steps=50),
            checkpoint=CheckpointSpec(every_steps=None, keep_last=1),
        )
        run = RunDir(path)
        path.mkdir(parents=True)
        run.config.write_text(f"name: {path.name}\n")
        ownership.claim_run(run, 0)
        self.run = run
        self.training = assemble_training(
            self.spec, case.recipe(), run, group, attempt=0, stop=StopFlag(run.stop_request)
        )
        self.training.total_steps = 0

    def measure(self, *, own_loader: bool = False, counting: Callable[[], Any] = nullcontext) -> float:
        """Train on, with records and the last commit; return the rate of the timed steps, which `counting` surrounds."""
        torch.use_deterministic_algorithms(False)
        configure_torch(self.spec)
        t = self.training
        t.total_steps += self._case.lead + self._case.steps + 1
        marks: list[float] = []
        source = type(t).global_batches if own_loader else self.on_device
        t.global_batches = lambda: self._timed(source(t), marks, counting)  # type: ignore[method-assign]
        assert loop.train(t), "the loop has been stopped"
        t.recorder.close()
        first, last = marks
        return self._case.steps * self._case.batch * self._case.units / (last - first)

    def _timed(self, windows: Iterator[Any], marks: list[float], counting: Callable[[], Any]) -> Iterator[Any]:
        """Pass batches on; note the time, with the device idle, after the lead and after the timed steps."""
        watch = nullcontext()
        for number, window in enumerate(windows):
            if number - self._case.lead == self._case.steps:
                watch.__exit__(None, None, None)
            if number - self._case.lead in (0, self._case.steps):
                synchronize(self._device)
                marks.append(time.perf_counter())
            if number == self._case.lead:
                watch = counting()
                watch.__enter__()
            yield window

    @cached_property
    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        return self._case.batches(self._device)

    def on_device(self, t: Any = None) -> Iterator[LoadedGlobalBatch]:
        """Yield the batches of the steps to do, which lie on the device already."""
        t = t or self.training
        walk = RankSampler(order=t.order, start=t.state.position, total_steps=t.total_steps, rank=0)
        for number, plan in enumerate(walk):
            parts = self._batches[number % NUM_BATCHES]
            sizes = [len(one.indices) for one in plan.micro_batches]
            split = zip(*(part.split(sizes) for part in parts), strict=True)
            fetched = [FetchedBatch(one.indices, batch) for one, batch in zip(plan.micro_batches, split, strict=True)]
            yield plan, iter(fetched)

    def loaded(self) -> Iterator[Any]:
        """Yield the batches that our loader gives, without training."""
        for _, fetched in self.training.global_batches():
            yield from fetched

    def take_step(self, windows: Iterator[LoadedGlobalBatch]) -> None:
        """Take one step as the loop does."""
        plan, loaded = next(windows)
        loop.accumulate_gradients(self.training, plan, loaded)
        loop.update_weights(self.training)
        self.training.state.position = plan.after


# --- where the loop waits for the device -----------------------------------------------------------------------------


class WaitError(Exception):
    """The host has read a value of the device."""


class NoWaits(TorchDispatchMode):
    """Refuses what would make the host wait for a device, also where the tensors are on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero):  # noqa: SLF001  `item` has no other name
            raise WaitError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for the device."""
    if device.type == "cpu":
        with NoWaits():  # type: ignore[no-untyped-call]  # PyTorch's
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


BF16 = {"precision": "bf16"}
VARIANTS: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "plain": ({}, True),
    "clip": ({"grad_clip_norm": 1.0}, True),
    "accumulate": ({"micro_batch_size": 8}, True),
    "EMA": ({"ema_decay": 0.99}, True),
    # The others skip updates without the host in fused kernels, which are the default on GPUs only.
    "fp16": ({"precision": "fp16"}, False),
    "fp16, clip": ({"precision": "fp16", "grad_clip_norm": 1.0}, False),
    "skip": ({"on_nonfinite": "skip"}, False),
    "compile": ({"compile": True}, False),
}
"""What is trained, and whether it has nothing to wait for on a CPU, too."""


def waits(place: Place) -> Figures:
    """Take 20 steps between two due ones, and return for each variant where the host waited, if it did."""
    found: Figures = {}
    recipe = partial(images, "mini_resnet", 16, 10, 16)
    for name, (train, on_cpu) in VARIANTS.items():
        # On a CPU, AdamW keeps its count of steps in tensors that it reads.
        for optimizer in ("sgd", "adamw") if place.has_cuda else ("sgd",) if on_cpu else ():
            asked = {**(BF16 if place.has_cuda else {}), **train}
            case = Case(recipe=recipe, batch=16, steps=20, train=asked, optimizer=optimizer)
            with alone(place) as group:
                found[f"{name}, {optimizer}"] = _wait_of(case, group, place.path / str(len(found)))
    return {"waits": found}


def _wait_of(case: Case, group: Group, path: Path) -> str:
    ours = OurLoop(case, group, path)
    consensus = ours.training.stop_consensus
    # How often the ranks exchange their flags depends on the time: here, never.
    consensus.agree_before_first_step = lambda _: False  # type: ignore[method-assign, assignment]
    consensus.next_step = NEVER
    try:
        ours.measure(counting=lambda: no_waits(group.device))
    except (RuntimeError, WaitError) as error:
        if not isinstance(error, WaitError) and "synchroniz" not in str(error):
            raise
        frames = [one for one in traceback.extract_tb(error.__traceback__) if "/ddp_hpc/" in one.filename]
        return " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in frames[:-3:-1]) or str(error)
    return ""


# --- saves -----------------------------------------------------------------------------------------------------------


def _large(place: Place) -> Case:
    """Return a case with a large state: weights, two averages of the optimizer, and a moving average."""
    model, size, batch = ("mini_resnet", 16, 4) if place.tiny else ("resnet152", 64, 32)
    train = {"precision": "fp32" if place.tiny else "bf16", "ema_decay": 0.99, "channels_last": True}
    return Case(
        recipe=partial(images, model, size, 10, batch), batch=batch, steps=1, lead=1, train=train, optimizer="adamw"
    )


def copied(place: Place) -> Figures:
    """Save, change all weights at once as the next step may, and compare what is on the disk with the weights before."""
    with alone(place) as group:
        ours = OurLoop(_large(place), group, place.path / "run")
        ours.measure()
        t = ours.training
        t.total_steps = NEVER
        windows = ours.on_device()
        equal, changed = [], []
        for _ in range(2 if place.tiny else 5):
            ours.take_step(windows)
            before = {name: one.clone() for name, one in t.state.model.state_dict().items()}
            t.checkpointer.save(t.state)
            with torch.no_grad():
                torch._foreach_add_(list(t.state.model.parameters()), 1.0)
            t.checkpointer.wait()
            saved = load_checkpoint(ours.run.path, step=t.state.position.step).weights
            equal.append(all(torch.equal(saved[name], one.cpu()) for name, one in before.items()))
            after = t.state.model.state_dict()
            changed.append(any(not torch.equal(after[name], one) for name, one in before.items()))
        return {"equal": equal, "changed": changed}


def save(place: Place) -> Figures:
    """Measure what a save costs the loop, beside the link's speed, DCP and `torch.save`."""
    with alone(place) as group:
        ours = OurLoop(_large(place), group, place.path / "run")
        ours.measure()
        t, device = ours.training, group.device
        t.total_steps = NEVER
        windows = ours.on_device()
        state = {item.name: item.tensor for item in training_state.tensors(t.state)}
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        rounds: list[dict[str, float]] = []
        for number in range(3 if place.tiny else 8):
            with place.turn():
                step = seconds_of(device, partial(ours.take_step, windows))
                began = time.perf_counter()
                t.checkpointer.save(t.state)
                stall = time.perf_counter() - began
                beside = _seconds_beside(ours, windows)
                t.checkpointer.wait()
                whole = time.perf_counter() - began
            if number:  # the first steps and saves make buffers
                rounds.append(
                    {
                        "step_ms": step * 1e3,
                        "stall_ms": stall * 1e3,
                        "beside_ms": beside * 1e3,
                        "durable_ms": whole * 1e3,
                    }
                )
        found: Figures = {name: median(one[name] for one in rounds) for name in rounds[0]}
        pinned = _pinned_bytes(place)
        limit = _link(device, num_bytes)
        lost_ms = found["stall_ms"] + max(found["beside_ms"] - found["step_ms"], 0.0)
        return {
            **found,
            **_peers(state, place, device),
            "bytes": num_bytes,
            "stall_ms_a_gb": found["stall_ms"] / (num_bytes / 1e9),
            "link_gb_a_s": limit / 1e9,
            "hidden_share": 1 - lost_ms / (num_bytes / limit * 1e3),
            "pinned_bytes": pinned,
        }


def _seconds_beside(ours: OurLoop, windows: Iterator[LoadedGlobalBatch]) -> float:
    """Return how long a step takes on a device that still copies: only the steps' own stream is awaited."""
    began = time.perf_counter()
    ours.take_step(windows)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began


def _link(device: torch.device, num_bytes: int) -> float:
    """Return the bytes/s of one plain copy into memory of the host, pinned where that is faster."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return num_bytes / median(seconds_of(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(4))


def _pinned_bytes(place: Place) -> int | None:
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return int(stats()["allocated_bytes.current"]) if place.has_cuda and stats else None


def _peers(state: Mapping[str, Tensor], place: Place, device: torch.device) -> Figures:
    """Return the stalls of others who save the same tensors."""
    waited = []
    for number in range(3):
        synchronize(device)
        began = time.perf_counter()
        saving: Any = async_save(dict(state), checkpoint_id=place.path / f"dcp-{number}")
        waited.append(time.perf_counter() - began)
        saving.result()
    plain = seconds_of(device, lambda: torch.save(dict(state), place.path / "state.pt"))
    return {"dcp_stall_ms": median(waited) * 1e3, "torch_save_ms": plain * 1e3}


# --- rates -----------------------------------------------------------------------------------------------------------


def _rates(place: Place, rows: Mapping[str, Callable[[], float]], rounds: int) -> Figures:
    """Measure each row once a round, a round at a time on this machine; the first time, which compiles, does not count."""
    for measure in rows.values():
        measure()
    samples: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(1 if place.tiny else rounds):
        with place.turn():
            for name, measure in rows.items():
                samples[name].append(measure())
    spreads = {name: {"median": median(got), "low": min(got), "high": max(got)} for name, got in samples.items()}
    hand = samples.pop("by hand")
    over = {name: median(a / b for a, b in zip(got, hand, strict=True)) for name, got in samples.items()}
    return {"rates": spreads, "over_hand": over}


def resnet50(place: Place) -> Figures:
    """Return images/s of ResNet-50: bf16 compiled, and fp32 with PyTorch's defaults, beside loops by hand."""
    model, size, classes, batch = ("mini_resnet", 16, 10, 8) if place.tiny else ("resnet50", 224, 1000, 128)
    train = {} if place.tiny else {**BF16, "channels_last": True, "compile": True}
    recipe, steps = partial(images, model, size, classes, batch), 2 if place.tiny else 20
    case = Case(recipe=recipe, batch=batch, steps=steps, train=train, loaders=0 if place.tiny else 8)
    plain = replace(case, train={})
    with alone(place) as group:
        bf16 = OurLoop(case, group, place.path / "bf16")
        rows: dict[str, Callable[[], float]] = {
            "by hand": PlainLoop(case, group.device).measure,
            "ours": bf16.measure,
            "ours, own loader": partial(bf16.measure, own_loader=True),
        }
        found = _rates(place, rows, 3)
        in_fp32 = {
            "by hand": PlainLoop(plain, group.device).measure,
            "ours": OurLoop(plain, group, place.path / "fp32").measure,
        }
        fp32 = _rates(place, in_fp32, 2)
    return {part: {**found[part], **{f"{row}, fp32": value for row, value in fp32[part].items()}} for part in found}


def gpt(place: Place) -> Figures:
    """Return tokens/s of a GPT of 86 million weights, bf16, compiled and clipped, beside a loop by hand."""
    context, batch = (32, 4) if place.tiny else (1024, 16)
    sizes = (
        {"width": 32, "num_layers": 2, "num_heads": 2}
        if place.tiny
        else {"width": 768, "num_layers": 12, "num_heads": 12}
    )
    case = Case(
        recipe=partial(texts, batch, context, **sizes),
        batch=batch,
        steps=2 if place.tiny else 25,
        train={"grad_clip_norm": 1.0, **({} if place.tiny else {**BF16, "compile": True})},
        optimizer="adamw",
        units=context,
    )
    with alone(place) as group:
        ours, hand = OurLoop(case, group, place.path / "run"), PlainLoop(case, group.device)
        return _rates(place, {"by hand": hand.measure, "ours": ours.measure}, 5)


def small(place: Place) -> Figures:
    """Return images/s of a net so small that the host limits it, with what the loop does besides."""
    size, batch = (16, 8) if place.tiny else (32, 256)
    train = {} if place.tiny else {**BF16, "channels_last": True}
    case = Case(
        recipe=partial(images, "mini_resnet", size, 10, batch),
        batch=batch,
        steps=3 if place.tiny else 150,
        lead=5,
        train=train,
    )
    more: Mapping[str, Mapping[str, Any]] = {"ours": {}, "EMA": {"ema_decay": 0.99}, "skip": {"on_nonfinite": "skip"}}
    with alone(place) as group:
        rows = {"by hand": PlainLoop(case, group.device).measure}
        for name, keys in more.items():
            rows[name] = OurLoop(replace(case, train={**train, **keys}), group, place.path / name).measure
        return _rates(place, rows, 5)


# --- the loader ------------------------------------------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory, one at a time, as most data sets give them."""

    def __init__(self, size: int, count: int) -> None:
        self._images = torch.randn(min(count, 64), 3, size, size)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index % len(self._images)], index % 10


def loader(place: Place) -> Figures:
    """Return samples/s that our loader gives, over those of PyTorch's with the same data, batches and processes."""
    found: Figures = {"over_pytorch": {}, "pytorch_samples_a_s": {}}
    with alone(place) as group:
        for size, batch, steps in ((32, 64, 6),) if place.tiny else ((32, 256, 60), (32, 1024, 20), (224, 128, 20)):
            for processes in (0, 1) if place.tiny else (0, 1, 4, 8):
                data = Images(size, batch * (steps + 2))
                recipe = replace(images("mini_resnet", 16, 10, 8), train_data=data)
                case = Case(recipe=partial(lambda one: one, recipe), batch=batch, steps=1, loaders=processes)
                name = f"{size} px, batch {batch}, {processes} processes"
                ours = OurLoop(case, group, place.path / f"{size}-{batch}-{processes}")
                ours.training.total_steps = NEVER
                theirs = DataLoader(
                    data, batch, shuffle=True, num_workers=processes, pin_memory=place.has_cuda, drop_last=True
                )
                pairs = []
                for _ in range(1 if place.tiny else 2):
                    with place.turn():
                        pairs.append((_rate(ours.loaded(), steps, batch), _rate(iter(theirs), steps, batch)))
                found["over_pytorch"][name] = median(one / other for one, other in pairs)
                found["pytorch_samples_a_s"][name] = median(other for _, other in pairs)
    return found


def _rate(batches: Iterator[Any], steps: int, batch: int) -> float:
    """Return samples/s from the second batch on: starting the processes is no part of it."""
    next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
    seconds = time.perf_counter() - began
    with suppress(AttributeError):
        batches.close()  # type: ignore[attr-defined]  # a generator's
    return steps * batch / seconds
