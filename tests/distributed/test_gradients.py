"""Gradients of several ranks, with accumulation and short windows, are those of one process with the big batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, TrainSpec
from ddp_hpc.train.data import sample_order
from ddp_hpc.train.data.loader import FetchedBatch
from ddp_hpc.train.data.sample_order import GlobalBatch, MicroBatch, Position, SampleOrder
from ddp_hpc.train.engine.loop import accumulate_gradients, batches_after_warmup, without_sync
from ddp_hpc.train.engine.training import Training, assemble_training
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state import rng
from ddp_hpc.train.stop import StopFlag
from tests.distributed.processes import in_group

GLOBAL_BATCH_SIZE = 24
SHORT = 17
"""Samples left for the second window: with 4 ranks and 3 micro steps, ranks take 2, 2, 1 or 2, 2, none."""
WINDOWS = {"full": Position(), "short": Position(step=1, samples_in_epoch=GLOBAL_BATCH_SIZE)}


def a_recipe() -> Recipe:
    """Return a classifier in float64, so that what is left of a difference is no rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    data = TensorDataset(
        torch.randn(GLOBAL_BATCH_SIZE + SHORT, 5).double(), torch.arange(GLOBAL_BATCH_SIZE + SHORT) % 3
    )
    return Recipe(model=model, train_data=data, loss=nn.CrossEntropyLoss())


@dataclass(frozen=True)
class Measured:
    """What a rank has after one window."""

    gradients: list[Tensor]
    loss: float
    """Its part of the window's mean loss."""
    exchanges: int
    """How often the ranks have added up their gradients."""


@dataclass(frozen=True)
class World:
    """Who works together, and in how many micro steps a full window."""

    size: int
    accumulation: int


RankSampler = Callable[[Training, GlobalBatch, Iterator[FetchedBatch]], None]
Shares = Callable[[Training, MicroBatch, GlobalBatch], float]


def _by_hand(
    t: Training,
    window: GlobalBatch,
    loaded: Iterator[FetchedBatch],
    *,
    share: Shares,
    keeps_to_itself: Callable[[int, int], bool] = lambda index, last: index < last,
) -> None:
    """Accumulate like the loop, but with the choices that it makes left to the caller."""
    last = len(window.micro_batches) - 1
    for index, (plan, fetched) in enumerate(zip(window.micro_batches, loaded, strict=True)):
        with without_sync(t) if keeps_to_itself(index, last) else nullcontext():
            inputs, targets = t.recipe.inputs_and_targets(fetched.batch)
            loss = t.recipe.loss(t.model(inputs), targets)
            (loss * share(t, plan, window)).backward()


def _right_share(t: Training, plan: MicroBatch, window: GlobalBatch) -> float:
    return plan.num_real * t.group.rank_info.world_size / window.num_samples


@dataclass(frozen=True)
class Wrong:
    """A walk with one mistake, and where it shows in the gradients."""

    walk: RankSampler
    shows: Callable[[World, bool], bool]
    """By the world, and whether the window is short."""


def _share_of_short_as_of_full(t: Training, plan: MicroBatch, _: GlobalBatch) -> float:
    return plan.num_real * t.group.rank_info.world_size / t.order.global_batch_size


def _share_with_spare_samples(t: Training, plan: MicroBatch, window: GlobalBatch) -> float:
    return max(plan.num_real, 1) * t.group.rank_info.world_size / window.num_samples


RIGHT: Mapping[str, RankSampler] = {
    "the loop": accumulate_gradients,
    "by hand": partial(_by_hand, share=_right_share),
}
WRONG = {
    "never exchanged": Wrong(
        partial(_by_hand, share=_right_share, keeps_to_itself=lambda *_: True),
        shows=lambda world, _: world.size > 1,
    ),
    "exchanged at first, not at last": Wrong(
        partial(_by_hand, share=_right_share, keeps_to_itself=lambda index, last: index == last > 0),
        shows=lambda world, _: world.size > 1 and world.accumulation > 1,
    ),
    "the mean over ranks forgotten": Wrong(
        partial(_by_hand, share=lambda _, plan, window: plan.num_real / window.num_samples),
        shows=lambda world, _: world.size > 1,
    ),
    "micro batches added up": Wrong(
        partial(_by_hand, share=lambda *_: 1.0),
        shows=lambda world, is_short: world.accumulation > 1 or (is_short and world.size > 1),
    ),
    "micro batches of equal weight": Wrong(
        partial(_by_hand, share=lambda _t, _plan, window: 1 / len(window.micro_batches)),
        shows=lambda world, is_short: is_short and (world.accumulation > 1 or world.size > 1),
    ),
    "short windows taken for full": Wrong(
        partial(_by_hand, share=_share_of_short_as_of_full),
        shows=lambda _, is_short: is_short,
    ),
    "ranks without samples counted": Wrong(
        partial(_by_hand, share=_share_with_spare_samples),
        shows=lambda world, is_short: is_short and world.size > 1 and world.accumulation > 1,
    ),
}
TOO_OFTEN = {"exchanged in every micro step": partial(_by_hand, share=_right_share, keeps_to_itself=lambda *_: False)}
ALL_WALKS: Mapping[str, RankSampler] = {**RIGHT, **{name: wrong.walk for name, wrong in WRONG.items()}, **TOO_OFTEN}


def _measure(group: Group, *, accumulation: int, folder: Path) -> dict[str, Measured]:
    """Walk through each window in every way; return what this rank has then, by `WALK/WINDOW`."""
    measured = {}
    for (walk_name, walk), (window_name, start) in product(ALL_WALKS.items(), WINDOWS.items()):
        t = _prepare(group, accumulation, folder)
        t.state.position = start
        exchanges = _count_exchanges(t)
        window = next(t.global_batches())
        walk(t, *window)
        measured[f"{walk_name}/{window_name}"] = Measured(
            [parameter.grad.clone() for parameter in t.state.model.parameters() if parameter.grad is not None],
            t.state.loss_meter.item(),
            len(exchanges),
        )
    return measured


def _prepare(group: Group, accumulation: int, folder: Path) -> Training:
    world_size = group.rank_info.world_size
    spec = RunSpec(
        name="gradients",
        train=TrainSpec(
            epochs=1,
            global_batch_size=GLOBAL_BATCH_SIZE,
            micro_batch_size=GLOBAL_BATCH_SIZE // (world_size * accumulation),
        ),
        resources=ResourcesSpec(workers_per_node=world_size),
    )
    return assemble_training(spec, a_recipe(), RunDir(folder), group, attempt=0, stop=StopFlag(folder / "STOP"))


def _count_exchanges(t: Training) -> list[int]:
    """Return a list that grows by one with every exchange of gradients; they all fit into one bucket."""
    exchanges: list[int] = []

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        exchanges.append(bucket.index())
        return allreduce_hook(state, bucket)

    hook.__annotations__.clear()  # DDP wants the very types there, or none; here they are text
    if isinstance(t.model, nn.parallel.DistributedDataParallel):
        t.model.register_comm_hook(None, hook)
    return exchanges


def expected(window_name: str) -> tuple[list[Tensor], float]:
    """Return gradients and loss of the whole window as one batch, in plain PyTorch."""
    recipe = a_recipe()
    order = SampleOrder(
        num_samples=GLOBAL_BATCH_SIZE + SHORT,
        seed=0,
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=GLOBAL_BATCH_SIZE,
        world_size=1,
    )
    begin = WINDOWS[window_name]
    (window,) = sample_order.RankSampler(order=order, start=begin, total_steps=begin.step + 1, rank=0)
    (whole,) = window.micro_batches
    inputs, targets = recipe.train_data[torch.tensor(whole.indices)]
    loss = recipe.loss(recipe.model(inputs), targets)
    loss.backward()
    return [parameter.grad for parameter in recipe.model.parameters() if parameter.grad is not None], loss.item()


def are_close(measured: Measured, window_name: str) -> bool:
    gradients, _ = expected(window_name)
    return len(gradients) == len(measured.gradients) and all(
        torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        for one, other in zip(measured.gradients, gradients, strict=True)
    )


WORLDS = [World(size, accumulation) for size in (1, 2, 4) for accumulation in (1, 3)]


@pytest.fixture(
    scope="module", params=WORLDS, ids=lambda world: f"world {world.size}, accumulation {world.accumulation}"
)
def world(request: pytest.FixtureRequest) -> World:
    return request.param  # type: ignore[no-any-return]  # a World


@pytest.fixture(scope="module")
def ranks(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Measured]]:
    """What every rank has measured: real processes, joined by gloo."""
    folder = tmp_path_factory.mktemp("gradients")
    return in_group(world.size, partial(_measure, accumulation=world.accumulation, folder=folder), folder / "ranks")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("walk", RIGHT)
def test_every_rank_has_the_gradients_of_the_big_batch(
    ranks: list[dict[str, Measured]], walk: str, window: str
) -> None:
    assert all(are_close(rank[f"{walk}/{window}"], window) for rank in ranks)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_parts_of_the_loss_add_up_to_that_of_the_big_batch(ranks: list[dict[str, Measured]], window: str) -> None:
    _, loss = expected(window)

    assert sum(rank[f"the loop/{window}"].loss for rank in ranks) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("window", WINDOWS)
def test_ranks_exchange_gradients_once_a_window(world: World, ranks: list[dict[str, Measured]], window: str) -> None:
    once = 1 if world.size > 1 else 0

    assert {rank[f"the loop/{window}"].exchanges for rank in ranks} == {once}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("walk", WRONG)
def test_gradients_tell_of_a_wrong_scale_or_exchange(
    world: World, ranks: list[dict[str, Measured]], walk: str, window: str
) -> None:
    """The guard of the comparison above: each mistake is found in every world where it makes a difference."""
    is_found = not all(are_close(rank[f"{walk}/{window}"], window) for rank in ranks)

    assert is_found is WRONG[walk].shows(world, window == "short")


@pytest.mark.parametrize("walk", TOO_OFTEN)
def test_exchanges_tell_of_a_forgotten_no_sync(world: World, ranks: list[dict[str, Measured]], walk: str) -> None:
    """The guard of the count above; the gradients are right, only too dear."""
    each_time = world.accumulation if world.size > 1 else 0

    assert {rank[f"{walk}/full"].exchanges for rank in ranks} == {each_time}
    assert are_close(ranks[0][f"{walk}/full"], "full")


def _rehearse_first(group: Group, folder: Path) -> tuple[Measured, bool]:
    """Take the first window after a rehearsal; return what this rank has then, and whether generators are as before."""
    t = _prepare(group, 3, folder)
    exchanges = _count_exchanges(t)
    before = rng.capture(group.device)
    window = next(batches_after_warmup(t, t.global_batches()))
    after = rng.capture(group.device)
    accumulate_gradients(t, *window)
    gradients = [parameter.grad.clone() for parameter in t.state.model.parameters() if parameter.grad is not None]
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return Measured(gradients, t.state.loss_meter.item(), len(exchanges)), unchanged


def test_the_first_window_after_a_rehearsal_is_whole_and_counted_once(tmp_path: Path) -> None:
    _, loss = expected("full")

    ranks = in_group(2, partial(_rehearse_first, folder=tmp_path), tmp_path / "ranks")

    assert all(are_close(measured, "full") and unchanged for measured, unchanged in ranks)
    assert sum(measured.loss for measured, _ in ranks) == pytest.approx(loss, rel=1e-6)
    assert [measured.exchanges for measured, _ in ranks] == [2, 2]  # one is the rehearsal's
