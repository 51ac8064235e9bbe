"""Who was wrong, by the results of ranks that have computed the same several times; and what is sent, kept and put back for that."""

from __future__ import annotations

import random
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_hpc.run_dir.differences import Difference
from ddp_hpc.run_dir.recomputed import by_recomputation, is_nondeterministic
from ddp_hpc.train.data.sent_values import NotSendableError, as_bytes, from_bytes, taken_apart
from ddp_hpc.train.engine.set_aside import rank_state, set_aside, take_over

CPU = torch.device("cpu")
STEADY = {
    "aab": ("vote", (2,)),
    "abaa": ("vote", (1,)),
    "abb": ("vote", (0,)),
    "ab": ("", ()),
    "abc": ("", ()),
    "aabb": ("", ()),
}
"""What each rank finds each time."""
UNSTEADY = {
    ("aa", "ba"): ("itself", (1,)),
    ("ba", "aa", "aa"): ("itself", (0,)),
    ("ba", "ca", "aa"): ("", ()),
    ("ab", "aa", "bb"): ("", ()),
}
"""What each rank finds the first and the second time."""


def told(results: list[str]) -> tuple[str, tuple[int, ...]]:
    num = len(results)
    difference = Difference(
        attempt=3,
        step=40,
        digests=tuple(one[0] for one in results),
        hosts=("node1",) * num,
        processors=("CPU",) * num,
        tensors=("the loss",),
        num_tensors=1,
        at=0.0,
        of_gradients=True,
    )
    found = by_recomputation(difference, results)
    assert found.who
    assert "the gradients of the same micro batch" in found.what
    assert not found.is_open
    return found.told_by, found.odd_ranks


@pytest.mark.parametrize(("digests", "expected"), STEADY.items())
def test_most_ranks_decide_where_each_finds_the_same_each_time(digests: str, expected: tuple[str, Any]) -> None:
    assert told([one * 4 for one in digests]) == expected


@pytest.mark.parametrize(("results", "expected"), UNSTEADY.items())
def test_a_rank_that_alone_differs_from_itself_was_wrong(results: tuple[str, ...], expected: tuple[str, Any]) -> None:
    assert told([*results]) == expected


def test_several_ranks_that_differ_from_themselves_prove_that_the_model_is_not_deterministic() -> None:
    assert is_nondeterministic(["ab", "ba", "aa"])
    assert not is_nondeterministic(["ab", "aa", "aa"])
    assert not is_nondeterministic(["ab", "bb"])


def test_one_rank_that_differs_from_itself_while_the_others_disagree_proves_nothing_either() -> None:
    assert is_nondeterministic(["ab", "aa", "bb"])
    assert not is_nondeterministic(["aa", "aa", "bb"])


# --- what is sent ----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  as users write it


class Plain:
    """An object that is no more than its attributes."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.names = ["one", None]


@dataclass
class Record:
    rows: torch.Tensor
    weight: float


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(6).reshape(2, 3).to(dtype)


def read_only() -> np.ndarray[Any, Any]:
    made = np.arange(3)
    made.flags.writeable = False
    return made


VALUES = [
    rows(),
    rows().T,
    rows()[:, 1],
    torch.ones(1).expand(4),
    torch.tensor(True),
    torch.zeros(0, 3),
    rows(torch.bfloat16),
    rows(torch.complex64).conj(),
    [rows(torch.uint8), rows(torch.int64), rows(torch.float64)],
    {"inputs": rows(), 3: (rows(), "text", 1.5, None, True, float("inf"))},
    OrderedDict(b=rows(), a=[]),
    Pair(rows(), {}),
    deque([1, 2], maxlen=2),
    np.arange(4.0).reshape(2, 2),
    np.arange(4.0).reshape(2, 2).T,
    np.arange(4)[::-1],
    np.array(3.0),
    np.zeros((0, 2)),
    read_only(),
]


@pytest.mark.parametrize("value", VALUES, ids=[str(number) for number in range(len(VALUES))])
def test_values_arrive_as_they_were_sent(value: Any) -> None:
    taken = taken_apart(value)

    made = from_bytes(as_bytes(taken), taken.classes)

    assert type(made) is type(value)
    assert as_lists(made) == as_lists(value)


def as_lists(value: Any) -> Any:
    """Return what has no type of its own."""
    if isinstance(value, dict):
        return {str(key): as_lists(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return {str(number): as_lists(one) for number, one in enumerate(value)}
    return (value.tolist(), str(value.dtype)) if isinstance(value, (torch.Tensor, np.ndarray)) else value


@pytest.mark.parametrize("value", [Plain(rows()), Record(rows(), 2.0)])
def test_objects_are_made_of_classes_that_the_receiver_has_itself(value: Any) -> None:
    taken = taken_apart({"batch": value})

    made = from_bytes(as_bytes(taken), taken.classes)["batch"]

    assert type(made) is type(value)
    assert torch.equal(made.rows, rows())
    with pytest.raises(NotSendableError, match="this rank's batch has no"):
        from_bytes(as_bytes(taken), {})


def in_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


UNSENDABLE = {
    "sparse": rows().to_sparse(),
    "the type set": {1, 2},
    "the type function": rows,
    "the type Random": random.Random(),
    "contains itself": in_itself(),
    "a key of the type tuple": {(1, 2): rows()},
    "the type Generator": torch.Generator(),
    "the type type": Plain,
    "the type MaskedArray": np.ma.masked_equal([1, 2], 2),
    "an array of '>f4'": np.ones(2, ">f4"),
    f"an array of {np.dtype(np.longdouble).str!r}": np.ones(2, np.longdouble),
    r"an array of '\|O'": np.array([None]),
}


@pytest.mark.parametrize(("why", "value"), UNSENDABLE.items(), ids=UNSENDABLE)
def test_what_cannot_be_sent_is_named(why: str, value: Any) -> None:
    with pytest.raises(NotSendableError, match=rf"the batch\[0\].*{why}|{why}"):
        taken_apart([value])


def test_a_small_part_of_a_large_tensor_is_sent_alone() -> None:
    assert as_bytes(taken_apart(torch.zeros(1_000_000)[:10])).numel() < 1000


# --- what is put back ------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """A layer with all kinds of state of its own."""

    average: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(3))
        self.calls = 0
        self.cache: dict[str, Any] = {"rows": [torch.zeros(2)]}
        self.plain = torch.zeros(3)
        self.own, self.numpys, self.pythons = (
            torch.Generator().manual_seed(seed),
            np.random.default_rng(seed),
            random.Random(seed),
        )

    def drawn(self) -> tuple[float, ...]:
        return torch.rand(1, generator=self.own).item(), self.numpys.random(), self.pythons.random()

    def forward(self) -> torch.Tensor:
        self.calls += 1
        self.average.add_(1)
        self.average = self.average * 2
        self.weight.data.mul_(2)
        self.plain += 1
        self.cache["rows"][0] += 1
        self.cache["more"] = 1
        self.new = 1
        torch.rand(1)
        return self.weight.sum() * sum(self.drawn())


def seen(layer: Stateful) -> Any:
    values = (layer.weight, layer.average, layer.plain, layer.cache["rows"][0])
    return [one.tolist() for one in values], layer.calls, [*layer.cache], hasattr(layer, "new")


@pytest.mark.parametrize("raises", [False, True])
def test_all_that_a_pass_changes_is_put_back_also_when_it_raises(raises: bool) -> None:
    layer, calls = Stateful(1), list[int]()
    layer.weight.register_hook(lambda _: calls.append(1))
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append(2))
    torch.manual_seed(0)
    before, cache, average = seen(layer), layer.cache, layer.average

    def run() -> None:
        with set_aside(layer, (), CPU):
            layer().backward()
            assert layer.weight.grad is not None
            if raises:
                raise OSError

    if raises:
        with pytest.raises(OSError):  # noqa: PT011
            run()
    else:
        run()

    assert seen(layer) == before
    assert (layer.cache is cache, layer.average is average, layer.weight.grad, calls) == (True, True, None, [])
    assert layer.drawn() == Stateful(1).drawn()
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert drawn == torch.rand(1)
    layer.weight.sum().backward()
    assert calls == [1, 2]


def test_a_rank_takes_over_what_another_one_has_of_its_own() -> None:
    one, other = Stateful(1), Stateful(2)
    one()
    sent = taken_apart(rank_state(one, ()))

    take_over(other, (), from_bytes(as_bytes(sent), {}))

    assert other.calls == 1
    assert other.drawn() == one.drawn()
    assert torch.equal(other.plain, one.plain)
