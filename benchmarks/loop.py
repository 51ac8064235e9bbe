"""What a loop adds to a step of about 0.4 ms: Fabric, Accelerate, Lightning's Trainer, and ours, over the raw loop.

All train the same small network from the same start on the same batches, made beforehand, on one thread; ours with
everything on: metrics and a log line every 50 steps, a checkpoint every 500, progress file, meetings. Its weights must
end equal to the raw loop's. Two more rows bring their batches themselves: ours, and the raw loop with PyTorch's loader.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks.counters import count
from benchmarks.rounds import Benchmark, Row, Samples, Verdict, added, compared, judge, run_rounds, shown
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec, LogSpec, LrScheduleSpec, RunSpec, TrainSpec
from ddp_hpc.train import process_group
from ddp_hpc.train.data.loader import FetchedBatch, LoadedGlobalBatch
from ddp_hpc.train.data.sample_order import Position, RankSampler, SampleOrder
from ddp_hpc.train.engine import loop as our_loop
from ddp_hpc.train.engine.training import Training, assemble_training
from ddp_hpc.train.process_group import RankInfo
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recording.phase_times import PHASES
from ddp_hpc.train.stop import StopFlag

STEPS = 1500
LOG_EVERY = 50
BATCH = 32
TARGET_US, LOADER_TARGET_US = 5.0, 100.0
US, CPU_US, INSTRUCTIONS = "us_a_step", "cpu_us_a_step", "instructions_a_step"
RAW, BY_HAND, OURS = "limit: raw loop", "limit: raw loop, our duties by hand", "ddp_hpc"
ALL_BY_HAND = "limit: raw loop, all our duties by hand"
FABRIC, ACCELERATE, LIGHTNING = "Lightning Fabric", "Accelerate", "Lightning Trainer"
RAW_LOADING, OURS_LOADING = "raw loop, PyTorch's loader", "ddp_hpc, its loader"
NOISY = ("lightning", "lightning.pytorch", "lightning.fabric", "accelerate")
"""Loggers of the peers; ours writes its lines to a file, as in a run."""

NEVER = 10**9
Without = Callable[[RunSpec], RunSpec]
WITHOUT: dict[str, Without] = {
    "comparisons": lambda spec: replace(spec, integrity=replace(spec.integrity, every_steps=None)),
    "saves": lambda spec: replace(spec, checkpoint=replace(spec.checkpoint, every_steps=NEVER)),
    "log lines": lambda spec: replace(spec, log=replace(spec.log, every_steps=NEVER)),
    "checks of losses": lambda spec: replace(spec, train=replace(spec.train, on_nonfinite="ignore")),
}
"""What our loop does besides training, and how a spec leaves it out."""
AT_INTERVALS = "comparisons, saves and log lines"

Batch = tuple[Tensor, Tensor]
T = TypeVar("T")


@cache
def dataset() -> TensorDataset:
    """Return random inputs and labels for all steps."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS * BATCH, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (STEPS * BATCH,), generator=generator))


@cache
def walk() -> RankSampler:
    """Return the order in which our loop takes the samples."""
    order = SampleOrder(
        num_samples=STEPS * BATCH, seed=0, global_batch_size=BATCH, micro_batch_size=BATCH, world_size=1
    )
    return RankSampler(order=order, start=Position(), total_steps=STEPS, rank=0)


@cache
def fetched() -> list[FetchedBatch]:
    """Return the batches in that order, made beforehand."""
    indices = [window.micro_batches[0].indices for window in walk()]
    return [FetchedBatch(taken, dataset()[torch.tensor(taken)]) for taken in indices]


@cache
def batches() -> list[Batch]:
    """Return them as plain pairs."""
    return [item.batch for item in fetched()]


def model() -> nn.Module:
    """Return the network, the same each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def sgd(network: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    """Return the optimizer that all use."""
    return torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9)


class Watch:
    """Takes the time between two moments, on the clock and in CPU time of all threads, and counts instructions if it can."""

    def __init__(self) -> None:
        self._begun = self._ended = (0.0, 0.0, 0)

    def begin(self) -> None:
        self._begun = time.perf_counter(), time.process_time(), count() or 0

    def end(self) -> None:
        self._ended = time.perf_counter(), time.process_time(), count() or 0

    def a_step(self, steps: int = STEPS) -> Mapping[str, float]:
        """Return the times for one step, in microseconds, and its instructions where the machine counts them."""
        spent = (ended - begun for begun, ended in zip(self._begun, self._ended, strict=True))
        wall, cpu, instructions = (each / steps for each in spent)
        counted = {} if count() is None else {INSTRUCTIONS: instructions}
        return {US: wall * 1e6, CPU_US: cpu * 1e6, **counted}


def raw(source: Iterable[Batch] | None = None) -> tuple[Mapping[str, float], nn.Module]:
    """Walk the loop everybody writes first; return its time and the trained network."""
    network = model()
    optimizer = sgd(network)
    chosen = batches() if source is None else source
    watch = Watch()
    watch.begin()
    for inputs, targets in chosen:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    watch.end()
    return watch.a_step(), network


def by_hand() -> Mapping[str, float]:
    """Walk the raw loop with the least of our duties: learning rate, mean loss, counts, and a line with them to a file.

    It saves nothing, compares nothing, and cannot be stopped.
    """
    network = model()
    optimizer, meter, watch = sgd(network), torch.zeros(()), Watch()
    step = num_samples = 0
    with tempfile.TemporaryFile("w") as lines:
        watch.begin()
        for inputs, targets in batches():
            loss = nn.functional.cross_entropy(network(inputs), targets)
            loss.backward()
            meter.add_(loss.detach())
            for options in optimizer.param_groups:
                options["lr"] = 0.01
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, num_samples = step + 1, num_samples + BATCH
            if step % LOG_EVERY == 0:
                lines.write(json.dumps({"step": step, "samples": num_samples, "loss": meter.item() / LOG_EVERY}) + "\n")
                lines.flush()
                meter.zero_()
        watch.end()
    assert all(map(torch.equal, network.parameters(), raw_weights())), "its weights differ from the raw loop's"
    return watch.a_step()


def all_by_hand() -> Mapping[str, float]:
    """Walk the raw loop with all of our duties, in straight code: what they cost however the loop is written.

    What is done at intervals is done by our own parts, as a user would call a library for it.
    """
    with _prepared() as training:
        our_loop.restore(training)
        state, phases, clock, watch = training.state, dict.fromkeys(PHASES, 0.0), time.perf_counter, Watch()
        network, optimizer, meter, note = training.model, state.optimizer, state.loss_meter, training.losses.note
        due, begun = 0, clock()
        for step, (inputs, targets) in enumerate(_watched(batches(), watch), start=1):
            now = clock()
            phases["data"] += now - begun
            loss = nn.functional.cross_entropy(network(inputs), targets)
            begun = clock()
            phases["forward"] += begun - now
            loss.backward()
            now = clock()
            phases["backward"] += now - begun
            loss = loss.detach()
            meter.add_(loss)
            note(step, loss)
            for options in optimizer.param_groups:
                options["lr"] = 0.01
            optimizer.step()
            optimizer.zero_grad()
            begun = clock()
            phases["optimizer"] += begun - now
            if step >= due:
                state.position, state.loss_steps = Position(step=step, samples_in_epoch=step * BATCH), LOG_EVERY
                due = _duties_at_intervals(training, step)
                now = clock()
                phases["other"] += now - begun
                begun = now
        training.checkpointer.wait()
    assert all(map(torch.equal, network.parameters(), raw_weights())), "its weights differ from the raw loop's"
    return watch.a_step(STEPS - 1)


def _duties_at_intervals(training: Training, step: int) -> int:
    """Do what is due after `step`, and return when more is due."""
    if step % LOG_EVERY == 0:
        our_loop.log_loss(training)
    if training.save_plan.is_due(step):
        our_loop.save(training, {})
    training.replicas.compare_due(training.state)
    if step >= training.stop_consensus.next_step:
        training.losses.check()
        assert not training.stop_consensus.agree_to_stop(step)
        training.recorder.record_progress(training.state.position)
    return our_loop.next_due(training, step)


@cache
def raw_weights() -> list[Tensor]:
    """Return what every loop should end with."""
    return [weight.detach() for weight in raw()[1].parameters()]


def raw_loading() -> Mapping[str, float]:
    """Walk the raw loop with PyTorch's loader, in this process, on the same order of samples."""
    order = [list(item.indices) for item in fetched()]
    return raw(DataLoader(dataset(), batch_sampler=order))[0]


def _watched(windows: Iterable[T], watch: Watch) -> Iterator[T]:
    """Pass windows on, timed from the first to the last: neither start nor final commit count."""
    source = iter(windows)

    def first() -> Iterator[T]:
        watch.begin()
        yield next(source)

    def last() -> Iterator[T]:
        watch.end()
        yield from source

    return chain(first(), islice(source, STEPS - 2), last())  # nothing of ours runs between the two


def ours(*, own_loader: bool = False, without: Sequence[str] = ()) -> Mapping[str, float]:
    """Walk our loop with everything on, or `without` some of it, on its own loader or on the batches made beforehand."""
    with _prepared(without) as training:
        watch, windows = Watch(), training.global_batches() if own_loader else _fed()
        training.global_batches = lambda: _watched(windows, watch)  # type: ignore[method-assign]
        assert our_loop.train(training)
        weights = list(training.state.model.parameters())
    assert all(map(torch.equal, weights, raw_weights())), "our weights differ from the raw loop's"
    return watch.a_step(STEPS - 1)


def _fed() -> list[LoadedGlobalBatch]:
    return [(plan, iter((item,))) for plan, item in zip(walk(), fetched(), strict=True)]


@contextlib.contextmanager
def _log_file(run: RunDir) -> Iterator[None]:
    """Write our log lines to a file, as a worker does."""
    ours, handler = logging.getLogger("ddp_hpc"), logging.FileHandler(run.path / "rank-0.log")
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    ours.propagate = False
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _prepared(without: Sequence[str] = ()) -> Iterator[Training]:
    """Prepare a training in a run directory of its own, and leave everything afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        training = _training(RunDir(Path(folder) / "run"), without)
        with _log_file(training.run):
            yield training
        training.recorder.close()
        process_group.leave_process_group()


def _training(run: RunDir, without: Sequence[str] = ()) -> Training:
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.touch()
    ownership.claim_run(run, 0)
    spec = RunSpec(
        name="run",
        runs_dir=str(run.path.parent),
        train=TrainSpec(epochs=1, global_batch_size=BATCH, lr=0.01),
        lr_schedule=LrScheduleSpec(name="constant"),
        log=LogSpec(every_steps=LOG_EVERY),
        checkpoint=CheckpointSpec(every_steps=500),
    )
    for duty in without:
        spec = WITHOUT[duty](spec)
    place = RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, master_addr="127.0.0.1", master_port=0
    )
    group = process_group.join(place, torch.device("cpu"))
    recipe = Recipe(model=model(), train_data=dataset(), loss=nn.functional.cross_entropy, optimizer=sgd)
    return assemble_training(spec, recipe, run, group, attempt=0, stop=StopFlag(run.stop_request))


def fabric() -> Mapping[str, float]:
    """Walk the raw loop with Lightning Fabric's wrappers."""
    from lightning.fabric import Fabric

    wrapper = Fabric(accelerator="cpu", devices=1)
    network = model()
    wrapped, optimizer = wrapper.setup(network, sgd(network))
    watch = Watch()
    watch.begin()
    for inputs, targets in batches():
        optimizer.zero_grad(set_to_none=True)
        wrapper.backward(nn.functional.cross_entropy(wrapped(inputs), targets))
        optimizer.step()
    watch.end()
    return watch.a_step()


def accelerate() -> Mapping[str, float]:
    """Walk the raw loop with Accelerate's wrappers."""
    from accelerate import Accelerator

    wrapper = Accelerator(cpu=True)
    network = model()
    wrapped, optimizer = wrapper.prepare(network, sgd(network))
    watch = Watch()
    watch.begin()
    for inputs, targets in batches():
        with wrapper.accumulate(wrapped):
            optimizer.zero_grad(set_to_none=True)
            wrapper.backward(nn.functional.cross_entropy(wrapped(inputs), targets))
            optimizer.step()
    watch.end()
    return watch.a_step()


class _Prepared(IterableDataset[Batch]):
    """The same batches, one by one: Lightning takes a list for several loaders."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(batches())

    def __len__(self) -> int:
        return STEPS


def lightning() -> Mapping[str, float]:
    """Fit with Lightning's Trainer; logger, checkpoints and progress bar off."""
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]  # untyped where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.network = model()

        def training_step(self, batch: Batch, _index: int) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.network)

    class Clock(pl.Callback):  # type: ignore[misc]
        watch = Watch()

        def on_train_epoch_start(self, *_: Any) -> None:
            self.watch.begin()

        def on_train_epoch_end(self, *_: Any) -> None:
            self.watch.end()

    clock = Clock()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=[clock], **quiet)
    trainer.fit(Module(), _Prepared())
    return clock.watch.a_step()


def _quietly(measure: Callable[[], Mapping[str, float]]) -> Callable[[], Mapping[str, float]]:
    """Return a measurement that lets libraries print nothing."""

    def measure_quietly() -> Mapping[str, float]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return measure()

    return measure_quietly


def measure(rounds: int) -> Samples:
    """Measure all on one thread; a loop of ours whose weights are not the raw loop's ends it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = [
        Row(RAW, lambda: raw()[0]),
        Row(BY_HAND, by_hand),
        Row(ALL_BY_HAND, all_by_hand),
        Row(OURS, ours),
        *(Row(_without(duty), partial(ours, without=[duty])) for duty in WITHOUT),
        Row(_without(AT_INTERVALS), partial(ours, without=["comparisons", "saves", "log lines"])),
        Row(FABRIC, _quietly(fabric)),
        Row(ACCELERATE, _quietly(accelerate)),
        Row(LIGHTNING, _quietly(lightning)),
        Row(RAW_LOADING, raw_loading),
        Row(OURS_LOADING, lambda: ours(own_loader=True)),
    ]
    return run_rounds("loop", rows, rounds=rounds)


def _without(duty: str) -> str:
    return f"{OURS}, without {duty}"


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold what ours adds against the target."""

    def over_raw(row: str, figure: str = US) -> list[float]:
        return samples.differences(figure, of=row, less=RAW)

    def at_least(row: str) -> list[float]:
        """Compare the fastest rounds: other work on the machine can only make a round slower."""
        return [min(samples.by_row[row][CPU_US]) - min(samples.by_row[RAW][CPU_US])]

    return [
        judge("added to a step by our loop", over_raw(OURS), unit="us", limit=TARGET_US, wanted="at most"),
        judge("CPU time added to a step by our loop", over_raw(OURS, CPU_US), unit="us"),
        judge("CPU time added to a step by our duties by hand", over_raw(BY_HAND, CPU_US), unit="us"),
        judge("added to a step by all our duties by hand", over_raw(ALL_BY_HAND), unit="us"),
        judge(
            "added to a step by our loop, over all its duties by hand",
            samples.differences(US, of=OURS, less=ALL_BY_HAND),
            unit="us",
        ),
        *(
            judge(f"of what our loop adds: {duty}", samples.differences(US, of=OURS, less=_without(duty)), unit="us")
            for duty in (*WITHOUT, AT_INTERVALS)
        ),
        *(
            [judge("instructions added to a step by our loop", over_raw(OURS, INSTRUCTIONS), unit="instructions")]
            if samples.has(OURS, INSTRUCTIONS)
            else []
        ),
        judge("CPU time added by our loop and loader", over_raw(OURS_LOADING, CPU_US), unit="us"),
        judge(
            "added to a step by our loop and loader",
            over_raw(OURS_LOADING),
            unit="us",
            limit=LOADER_TARGET_US,
            wanted="at most",
        ),
        judge("added to a step by PyTorch's loader alone", over_raw(RAW_LOADING), unit="us"),
        *(
            judge(f"CPU time added in the fastest rounds: {row}", at_least(row), unit="us")
            for row in (BY_HAND, ALL_BY_HAND, OURS, _without(AT_INTERVALS), RAW_LOADING, OURS_LOADING)
        ),
    ]


BENCHMARK = Benchmark(
    name="loop",
    title="What a loop adds to a step",
    rounds=24,
    measure=measure,
    columns=[
        shown("us a step", US, digits=0),
        added("added, us", US, to=RAW),
        added("CPU time added, us", CPU_US, to=RAW),
        added("instructions added", INSTRUCTIONS, to=RAW),
        compared("speed, by the raw loop's", US, under=RAW, is_inverse=True),
    ],
    verdicts=verdicts,
)
