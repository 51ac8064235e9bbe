"""What models hold can be put back after a pass, or is refused by name before anything has changed."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import random
import re
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ddp_hpc.train.engine.set_aside import choose_copy_device, restore_after, values_to_keep
from ddp_hpc.train.engine.value_copies import MOST_VALUES, NotKeptError, keep_items

CPU = torch.device("cpu")


class Object:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None: ...


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class SlotsBelow(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.more = 0


class Dict(dict[str, int]):
    """With attributes of its own."""


class Kind(Enum):
    ONE = 1


class Two(NamedTuple):
    one: Any
    two: Any


@dataclass(frozen=True)
class Settings:
    width: int = 3
    kinds: tuple[Kind, ...] = (Kind.ONE,)
    folder: Path = Path("/data")
    more: dict[str, Any] = field(default_factory=lambda: {"a": [1, None, torch.float32]})


def holding(value: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].held = value
    return model


HEALTHY: dict[str, Callable[[], Any]] = {
    "a configuration": Settings,
    "a logger": lambda: logging.getLogger("here"),
    "a lock": threading.Lock,
    "an event": threading.Event,
    "a vocabulary": lambda: Object(ids={str(n): n for n in range(50_000)}, words=["a"] * 50_000, pattern=re.compile("a")),
    "a partial": lambda: functools.partial(nn.LayerNorm, eps=1e-6),
    "functions": lambda: [torch.relu, nn.functional.gelu, nn.functional.relu, np.tanh, len, lambda: 1, Object().method],
    "a loss without tensors, in an object": lambda: Object(loss=nn.CrossEntropyLoss()),
    "constants": lambda: (1, "a", b"b", None, 1j, ..., range(3), object(), np.float32(3), torch.Size([1]), Kind.ONE, np),
    "a class": lambda: Object,
    "a named tuple": lambda: Two(1, torch.ones(1)),
    "an expanded tensor": lambda: torch.ones(1, 1).expand(4, 2),
    "an array that cannot be written": lambda: np.broadcast_to(np.zeros(1), (1 << 30,)),
}  # fmt: skip


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_what_healthy_models_hold_is_not_refused(make: Callable[[], Any]) -> None:
    model = holding(make())

    with restore_after(model, (), CPU):
        pass


MODELS: dict[str, Callable[[], nn.Module]] = {
    "an encoder and a decoder": lambda: nn.Transformer(8, 2, 1, 1, 8, batch_first=True),
    "a recurrent layer": lambda: nn.LSTM(3, 4, 2),
    "normalised weights": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "spectral normalisation": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "one layer several times": lambda: nn.Sequential(*[nn.SyncBatchNorm(2)] * 3),
    "a compiled graph": lambda: torch.fx.symbolic_trace(nn.Linear(2, 2)),
    "thousands of layers": lambda: nn.Sequential(*(nn.ReLU() for _ in range(1000))),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_healthy_models_are_not_refused(make: Callable[[], nn.Module]) -> None:
    with restore_after(make(), (nn.functional.cross_entropy, Object(loss=nn.MSELoss()).method), CPU):
        pass


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet18", "vit_b_32"])
def test_models_of_torchvision_are_not_refused(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = models.get_model(name)

    values_to_keep(model, (nn.CrossEntropyLoss(label_smoothing=0.1),))


def test_what_cannot_be_put_back_is_noted_where_a_list_is_given_and_the_rest_is_put_back() -> None:
    held, refused = [Slots(), [0], itertools.count(), {"a": 1}], list[str]()
    model = holding(held)

    with restore_after(model, (), CPU, refused=refused):
        held[1][0] = held[3]["a"] = 5  # type: ignore[index]  # a list and a dict
        held.append(3)

    assert refused == ["`model.0.held[0]` is of the type Slots", "`model.0.held[2]` is of the type count"]
    assert [one if type(one) in (list, dict) else None for one in held] == [None, [0], None, {"a": 1}]


def test_too_many_values_are_noted_once_and_those_before_are_put_back() -> None:
    held, refused = [[1]], list[str]()
    model = holding([*held, [[n] for n in range(MOST_VALUES + 1)], [[1]]])

    with restore_after(model, (), CPU, refused=refused):
        held[0][0] = 3

    assert [one.partition(" up to ")[0] for one in refused] == ["there are too many values"]
    assert held == [[1]]


def in_itself() -> Any:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    return value


REFUSED: dict[str, Callable[[], Any]] = {
    "`model.0.held` is of the type Slots": Slots,
    "`model.0.held` is of the type SlotsBelow": SlotsBelow,
    "`model.0.held` is of the type Dict": Dict,
    "`model.0.held` is of the type range_iterator": lambda: iter(range(3)),
    "`model.0.held` is of the type generator": lambda: (one for one in "ab"),
    "`model.0.held[1].inner['a']` is of the type count": lambda: (1, Object(inner={"a": itertools.count()})),
    "`model.0.held.default_factory.__self__` is of the type count":
        lambda: collections.defaultdict(itertools.count().__next__),
    "`model.0.held.args[0]` is of the type Slots": lambda: functools.partial(print, Slots()),
    "`model.0.held` is of the type _lru_cache_wrapper": lambda: functools.cache(lambda: 1),
    "`model.0.held` is of the type ndarray": lambda: np.array([object()]),
    "there are too many values": lambda: [(n,) for n in range(MOST_VALUES + 1)],
    "is in more than 50 other values": in_itself,
    "need more than 1024 MiB": lambda: torch.empty(1 << 29, device="meta"),
}  # fmt: skip


@pytest.mark.parametrize(("told", "make"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_put_back_is_refused_by_name(told: str, make: Callable[[], Any]) -> None:
    with pytest.raises(NotKeptError, match=re.escape(told)), restore_after(holding(make()), (), CPU):
        pytest.fail("a pass has begun")


def test_what_the_loss_holds_is_refused_as_well() -> None:
    with pytest.raises(NotKeptError, match=r"`method\.__self__\.n` is of the type Slots"):
        values_to_keep(nn.Linear(1, 1), (Object(n=Slots()).method,))


# --- what is put back ------------------------------------------------------------------------------------------------


def counted(values: Any) -> Any:
    """Change all that can change in `values`, and return it."""
    values.inner.n += 1
    values.inner.rows += 1
    values.inner.new = 1
    values.space.k += 1
    values.array[0] += 1
    values.counter["a"] += 1
    values.bytes[0] += 1
    values.expanded.add_(torch.ones(1))
    values.pair.two[0].append(3)
    values.partial.keywords["rows"].append(1)
    values.replaced.data = torch.ones(3)
    return values


def test_what_objects_hold_is_put_back() -> None:
    shared = [0]

    def make() -> Any:
        return Object(
            inner=Object(n=0, rows=torch.zeros(2)),
            space=types.SimpleNamespace(k=0),
            array=np.zeros(20_000),
            counter=collections.Counter(a=1),
            bytes=bytearray(2),
            expanded=torch.zeros(1),
            pair=Two(1, ([1, 2], shared)),
            partial=functools.partial(print, rows=shared),
            replaced=torch.zeros(2),
        )

    values = make()
    model = holding(values)

    with restore_after(model, (), CPU):
        counted(values)

    assert (values.inner.n, values.space.k, values.array.sum(), values.counter["a"], shared) == (0, 0, 0, 1, [0])
    assert (values.bytes, values.pair.two[0], hasattr(values.inner, "new")) == (bytearray(2), [1, 2], False)
    assert all(one.sum() == 0 for one in (values.inner.rows, values.expanded, values.replaced))
    assert values.replaced.shape == (2,)


def test_a_module_that_is_not_registered_is_put_back_with_its_tensors() -> None:
    norm = nn.BatchNorm1d(2)

    with restore_after(holding((norm,)), (), CPU):
        norm(torch.randn(4, 2))

    assert norm.running_mean is not None
    assert (norm.running_mean.tolist(), int(norm.num_batches_tracked or 0)) == ([0, 0], 0)


def test_the_module_that_a_partial_loss_has_is_put_back() -> None:
    norm = nn.BatchNorm1d(2)

    with restore_after(nn.Identity(), (functools.partial(print, norm),), CPU):
        norm(torch.randn(4, 2))

    assert int(norm.num_batches_tracked or 0) == 0


def test_tensors_have_their_memory_shape_and_flag_again() -> None:
    layer: Any = nn.Linear(2, 2)
    layer.register_buffer("grows", torch.ones(1))
    address = layer.weight.data_ptr()

    with restore_after(layer, (), CPU):
        layer.grows.resize_(3).fill_(7)
        layer.weight.data = torch.zeros(2, 2)
        layer.bias.requires_grad_(False)

    assert (layer.grows.tolist(), layer.weight.data_ptr(), layer.bias.requires_grad) == ([1], address, True)


class Watched(dict[str, int]):
    """Tells when it is emptied."""

    def clear(self) -> None:
        raise AssertionError("another thread may use it")


def test_a_container_that_has_not_changed_is_not_written_and_one_that_has_is_never_empty() -> None:
    values = Watched(a=1, b=2)
    restore = keep_items(values)

    restore()
    values["b"], values["c"] = 3, 4
    restore()

    assert values == {"a": 1, "b": 2}


@pytest.mark.parametrize(("num_bytes", "device"), [(5, None), (6, CPU)])
def test_copies_that_need_much_of_a_gpus_free_memory_are_made_on_the_host(
    num_bytes: int, device: torch.device | None
) -> None:
    assert choose_copy_device(num_bytes << 30, 100 << 30) == device


@pytest.mark.parametrize("before", [None, torch.zeros(1)])
def test_a_buffer_that_is_none_now_and_then_is_put_back(before: torch.Tensor | None) -> None:
    layer: Any = nn.Identity()
    layer.register_buffer("now_and_then", before)

    with restore_after(layer, (), CPU):
        layer.now_and_then = torch.ones(1) if before is None else None

    assert layer.now_and_then is before


def test_buffers_and_layers_that_a_pass_adds_are_taken_off() -> None:
    layer = nn.Identity()

    with restore_after(layer, (), CPU):
        layer.register_buffer("new", torch.ones(1))
        layer.more = nn.Linear(1, 1)

    assert not [*layer.state_dict(), *layer.children()]


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
        with restore_after(layer, (), CPU):
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


def test_of_a_large_value_that_is_refused_nothing_is_examined_so_that_the_others_are_put_back() -> None:
    model = nn.Module()
    model.vocab, model.inner = Dict({str(number): number for number in range(MOST_VALUES + 1)}), nn.Module()  # type: ignore[assignment]
    model.inner.seen = [1]  # type: ignore[assignment]
    refused: list[str] = []

    with restore_after(model, (), CPU, refused=refused):
        model.inner.seen.append(2)  # type: ignore[operator,union-attr]

    assert model.inner.seen == [1]
    assert refused == ["`model.vocab` is of the type Dict"]
