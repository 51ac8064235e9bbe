"""Which samples each step takes, and who of the ranks takes them."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.train.data import sample_order
from ddp_hpc.train.data.sample_order import GlobalBatch, Position, RankSampler, SampleOrder, derive_seed, permutation


def an_order(**changes: int | bool) -> SampleOrder:
    """Return the order of 41 samples in windows of 24, the last of them short: 17."""
    plain = SampleOrder(num_samples=41, seed=3, global_batch_size=24, micro_batch_size=2, world_size=4)
    return replace(plain, **changes)  # type: ignore[arg-type]  # each field has its own type


def walk(order: SampleOrder, *, epochs: int = 2, rank: int = 0, start: Position = Position()) -> list[GlobalBatch]:
    """Return a rank's windows from `start` to the end of so many epochs."""
    return list(RankSampler(order=order, start=start, total_steps=epochs * order.steps_per_epoch, rank=rank))


def real(window: GlobalBatch) -> list[int]:
    """Return the samples that count, as one rank sees its window."""
    return [index for batch in window.micro_batches for index in batch.indices[: batch.num_real]]


def walk_all(order: SampleOrder, *, epochs: int = 2) -> list[tuple[Position, list[int]]]:
    """Return where each step ends, and the samples of all its ranks in the order of their ids."""
    ranks = [walk(order, epochs=epochs, rank=rank) for rank in range(order.world_size)]
    return [
        (views[0].after, sorted(index for view in views for index in real(view))) for views in zip(*ranks, strict=True)
    ]


@dataclass(frozen=True)
class Layout:
    """A way to divide a global batch."""

    world_size: int
    micro_batch_size: int


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    """Draw an order whose global batch divides evenly among its ranks and micro steps."""
    layout = Layout(draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    return SampleOrder(
        num_samples=draw(st.integers(1, 120)),
        seed=draw(st.integers(0, 2**63 - 1)),
        global_batch_size=layout.world_size * layout.micro_batch_size * draw(st.integers(1, 4)),
        micro_batch_size=layout.micro_batch_size,
        world_size=layout.world_size,
    )


LAYOUTS_OF_24 = [
    Layout(world_size, micro_batch_size)
    for world_size in (1, 2, 3, 4, 6, 8)
    for micro_batch_size in (1, 2, 3, 4, 8, 24)
    if 24 % (world_size * micro_batch_size) == 0
]


def test_a_seed_follows_from_its_parts_on_every_machine_and_in_every_version() -> None:
    parts = ("order", 0, 0)

    seed = derive_seed(*parts)

    assert seed == 8073061470549175911
    assert permutation(10, 0, 0).tolist() == [3, 7, 1, 5, 4, 9, 2, 8, 6, 0]


def test_parts_of_a_seed_do_not_run_into_each_other() -> None:
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed(123), derive_seed("1", "2", "3")}) == 4


def test_a_permutation_is_the_same_whatever_has_been_drawn_before() -> None:
    first = permutation(50, 3, 1)
    torch.rand(7)

    second = permutation(50, 3, 1)

    assert torch.equal(first, second)


@pytest.mark.parametrize("num_samples", [0, 1, 2, 17, 20_003])
def test_an_order_is_that_of_pytorch_in_64_bits(num_samples: int) -> None:
    """Checkpoints of runs from before orders took 32 bits resume in the same order."""
    generator = torch.Generator().manual_seed(derive_seed("order", 3, 1))

    order = permutation(num_samples, 3, 1)

    assert order.dtype is torch.int32
    assert order.tolist() == torch.randperm(num_samples, generator=generator).tolist()


@pytest.mark.parametrize("other", [(50, 3, 2), (50, 4, 1)], ids=["another epoch", "another seed"])
def test_epochs_and_seeds_have_permutations_of_their_own(other: tuple[int, int, int]) -> None:
    assert not torch.equal(permutation(50, 3, 1), permutation(*other))


@given(orders())
def test_each_sample_comes_once_an_epoch(order: SampleOrder) -> None:
    steps = walk_all(order)

    for epoch in range(2):
        of_epoch = steps[epoch * order.steps_per_epoch :][: order.steps_per_epoch]
        assert sorted(index for _, ids in of_epoch for index in ids) == list(range(order.num_samples))


@given(st.integers(1, 120), st.sampled_from(LAYOUTS_OF_24), st.sampled_from(LAYOUTS_OF_24))
def test_windows_hold_the_same_samples_on_every_world(num_samples: int, one: Layout, other: Layout) -> None:
    first, second = (an_order(num_samples=num_samples, **vars(layout)) for layout in (one, other))

    assert walk_all(first) == walk_all(second)


@given(orders(), st.data())
def test_from_any_position_the_rest_is_that_of_the_unbroken_walk(order: SampleOrder, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, order.world_size - 1))
    unbroken = walk(order, epochs=3, rank=rank)
    done = data.draw(st.integers(0, len(unbroken)))

    resumed = walk(order, epochs=3, rank=rank, start=unbroken[done - 1].after if done else Position())

    assert resumed == unbroken[done:]


@given(orders())
def test_no_rank_has_more_than_its_micro_batch_or_one_more_than_another(order: SampleOrder) -> None:
    ranks = [walk(order, rank=rank) for rank in range(order.world_size)]

    for views in zip(*ranks, strict=True):
        for batches in zip(*(view.micro_batches for view in views), strict=True):  # as many for every rank: none waits
            counts = [batch.num_real for batch in batches]
            assert max(counts) <= order.micro_batch_size
            assert max(counts) - min(counts) <= 1


@given(orders())
def test_shares_of_a_window_add_up_to_it(order: SampleOrder) -> None:
    ranks = [walk(order, rank=rank) for rank in range(order.world_size)]

    for views in zip(*ranks, strict=True):
        assert {view.num_samples for view in views} == {sum(len(real(view)) for view in views)}


def test_a_rank_without_samples_has_one_of_the_windows_without_weight() -> None:
    order = an_order()  # 17 samples are left for the second window: 8, 8, and 1
    short = Position(step=1, samples_in_epoch=24)
    of_window = permutation(41, 3, 0)[24:].tolist()

    walks = [RankSampler(order=order, start=short, total_steps=2, rank=rank) for rank in range(4)]
    last = [next(iter(walk)).micro_batches[-1] for walk in walks]

    assert [batch.num_real for batch in last] == [1, 0, 0, 0]
    assert all(batch.indices[0] in of_window for batch in last)


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "sizes"),
    [
        (48, False, [24, 24]),
        (41, False, [24, 17]),
        (25, False, [24, 1]),
        (5, False, [5]),
        (48, True, [24, 24]),
        (41, True, [24]),
        (5, True, []),
    ],
)
def test_an_epochs_last_window_is_short_or_left_out(num_samples: int, drop_last: bool, sizes: list[int]) -> None:
    order = an_order(num_samples=num_samples, drop_last=drop_last)

    epoch = walk(order, epochs=1)

    assert [window.num_samples for window in epoch] == sizes
    assert (order.steps_per_epoch, order.samples_per_epoch) == (len(sizes), sum(sizes))


def test_what_is_left_out_is_another_part_in_each_epoch() -> None:
    steps = walk_all(an_order(drop_last=True), epochs=2)

    first, second = (set(range(41)) - set(ids) for _, ids in steps)

    assert len(first) == len(second) == 17
    assert first != second


def test_positions_count_steps_epochs_and_samples() -> None:
    ends = [position for position, _ in walk_all(an_order(), epochs=2)]

    assert ends == [
        Position(step=1, epoch=0, samples_in_epoch=24),
        Position(step=2, epoch=1, samples_in_epoch=0),
        Position(step=3, epoch=1, samples_in_epoch=24),
        Position(step=4, epoch=2, samples_in_epoch=0),
    ]


@given(orders(), st.data())
def test_samples_between_two_positions_are_those_of_the_steps_between(order: SampleOrder, data: st.DataObject) -> None:
    """The walk may begin amid an epoch, where an attempt with another batch size has ended."""
    if not order.steps_per_epoch:
        return
    start = Position(step=5, epoch=1, samples_in_epoch=data.draw(st.integers(0, order.num_samples + 3)))
    steps = list(RankSampler(order=order, start=start, total_steps=5 + 3 * order.steps_per_epoch, rank=0))
    begin, end = sorted((data.draw(st.integers(0, len(steps))), data.draw(st.integers(0, len(steps)))))
    positions = [start, *(step.after for step in steps)]

    num_samples = order.samples_between(positions[begin], positions[end])

    assert num_samples == sum(step.num_samples for step in steps[begin:end])


def test_a_walk_ends_at_its_last_step_even_amid_an_epoch() -> None:
    windows = RankSampler(order=an_order(), start=Position(), total_steps=3, rank=0)

    ends = [window.after for window in windows]

    assert ends[-1] == Position(step=3, epoch=1, samples_in_epoch=24)
    assert [window.after for window in windows] == ends  # and can be walked again


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return what is noted of each order that is made, a large one as it were: in which thread, its epoch, how many whole ones are kept."""
    noted: list[tuple[str, int, int]] = []
    kept: list[weakref.ref[Any]] = []

    def note(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
        numbers = permutation(num_samples, seed, epoch).numpy().copy()  # as long as a tensor or a view of it lives
        is_beside = threading.current_thread() is not threading.main_thread()
        noted.append(("beside" if is_beside else "waited for", epoch, sum(one() is not None for one in kept)))
        kept.append(weakref.ref(numbers))
        return torch.from_numpy(numbers)

    monkeypatch.setattr(sample_order, "MIN_SAMPLES_FOR_THREAD", 1)
    monkeypatch.setattr(sample_order, "permutation", note)
    return noted


LARGE = {"num_samples": 24 * 40 + 5}


def test_orders_are_made_beside_the_steps_and_one_is_kept(made: list[tuple[str, int, int]]) -> None:
    walk(an_order(**LARGE), epochs=4)

    assert made == [("waited for", 0, 0), ("beside", 1, 0), ("beside", 2, 0), ("beside", 3, 0)]


@given(orders(), st.data())
def test_a_walk_whose_orders_are_made_beside_it_is_the_same(order: SampleOrder, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, order.world_size - 1))
    start = Position(samples_in_epoch=data.draw(st.integers(0, order.num_samples)))
    plain = walk(order, epochs=3, rank=rank, start=start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_order, "MIN_SAMPLES_FOR_THREAD", 1)
        patch.setattr(sample_order, "NEAR_END_DIVISOR", data.draw(st.integers(1, 8)))
        assert walk(order, epochs=3, rank=rank, start=start) == plain


@pytest.mark.parametrize("samples_in_epoch", [0, 24 * 38], ids=["from its beginning", "resumed near its end"])
def test_no_order_is_made_of_an_epoch_after_the_last(made: list[tuple[str, int, int]], samples_in_epoch: int) -> None:
    order = an_order(**LARGE)
    start = Position(step=samples_in_epoch // 24, samples_in_epoch=samples_in_epoch)

    walk(order, epochs=1, start=start)

    assert [epoch for _, epoch, _ in made] == [0]


def test_a_walk_that_begins_near_an_epochs_end_has_the_next_order_made_at_once(
    made: list[tuple[str, int, int]],
) -> None:
    walk(an_order(**LARGE), epochs=2, start=Position(step=39, samples_in_epoch=24 * 39))

    assert made == [("waited for", 0, 0), ("beside", 1, 0)]


def test_a_walk_that_is_left_leaves_no_thread(made: list[tuple[str, int, int]]) -> None:
    order, before = an_order(**LARGE), threading.active_count()
    windows = iter(RankSampler(order=order, start=Position(), total_steps=99, rank=0))
    for window in windows:
        if window.after.step == 39:
            break
    during = threading.active_count()

    del windows

    assert (during, threading.active_count()) == (before + 1, before)
    assert [epoch for _, epoch, _ in made] == [0, 1]
