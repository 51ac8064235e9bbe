"""Optimizers that are not as PyTorch's: stopped and resumed as unbroken, and as a plain loop trains with them."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.distributed.processes import in_group
from tests.strange.test_models import WIDTH, a_recipe, quiet_layers, rows
from tests.strange.walks import (
    Case,
    begin,
    close,
    differences,
    in_plain_torch,
    sample_ids,
    walk,
    walk_in_parts,
    weights,
)
from tests.unit.made_state import alone


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep PyTorch to one thread, as in a worker of a small run: on a busy machine two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class InGroups(torch.optim.Optimizer):
    """Steps along the gradient; a subclass says how far, and writes into its groups what it must know in the next step."""

    def __init__(self, model: nn.Module, lr: float, **options: Any) -> None:
        first, *others = model.parameters()
        options = {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1, **options}
        super().__init__([{"params": [first]}, {"params": others}], options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, no loss
        for group in self.param_groups:
            group["length"] = float(self.length(group)) * group["lr"]
            for value in group["params"]:
                value.mul_(1 - group["lr"] * group["weight_decay"])
                value.sub_(value.grad * group["length"])

    def length(self, group: dict[str, Any]) -> Tensor | float:
        raise NotImplementedError


class Counting(InGroups):
    """Counts its steps, as timm's LAMB and apex' FusedAdam do."""

    def length(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return float(1 - group["betas"][0] ** group["step"])


class Adapting(InGroups):
    """Adapts numbers, as Prodigy and D-Adaptation do; also keeps a tuple, a list, text and None."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, lr, d=1e-6, d_max=-float("inf"), growth=float("inf"), seen=(), last=[0.5], phase=None)

    def length(self, group: dict[str, Any]) -> float:
        norm = sum(float(value.grad.double().norm()) for value in group["params"])
        assert isinstance(group["seen"], tuple)
        assert isinstance(group["last"], list)
        assert group["phase"] == ("later" if group["seen"] else None)
        group["d"] = min(group["d"] * group["growth"], group["d"] + norm / 3)
        group["d_max"] = max(group["d_max"], group["d"])
        group["seen"], group["last"], group["phase"] = (*group["seen"][-2:], norm), [norm, True], "later"
        return float(group["d"] / group["d_max"] / (1 + sum(group["seen"]) + group["last"][0] + group["d"]))


class KeepingTensors(InGroups):
    """Keeps a tensor that both groups share, one that is replaced, and one of several elements that comes later."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        both, replaced = torch.tensor(0, dtype=torch.int16), torch.tensor(0.1, dtype=torch.bfloat16)
        super().__init__(model, lr, both=both, replaced=replaced)

    def length(self, group: dict[str, Any]) -> Tensor:
        norms = torch.stack([value.grad.norm() for value in group["params"]])
        group["both"] += 1
        group["replaced"] = group["replaced"] * 0.9 + norms.sum().bfloat16() * 0.1
        group["norms"] = norms if "norms" not in group else group["norms"].lerp(norms, 0.25)
        assert self.param_groups[0]["both"] is self.param_groups[1]["both"]
        assert group["replaced"].dtype == torch.bfloat16
        length: Tensor = 1 / (1 + group["both"] + group["replaced"] + group["norms"].sum())
        return length


class Rotating(nn.Module):
    """Has a weight that LAPACK made, column after column."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, 3)
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(32, 32)).Q)
        assert self.rotation.stride() == (1, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs) @ self.rotation))  # type: ignore[no-any-return]  # a Tensor


class Volumes(nn.Module):
    """Convolves volumes, its filters in the memory format of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv3d(2, 4, 2).to(memory_format=torch.channels_last_3d)
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.filters(inputs).mean((2, 3, 4)))  # type: ignore[no-any-return]  # a Tensor


def volumes(optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]) -> Recipe:
    data = rows(2, 3, 3, 2)
    return a_recipe(Volumes(), train_data=data, eval_data=data, optimizer=optimizer)


def fused_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def fused_sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)


class Keeping(torch.optim.Optimizer):
    """Steps along the gradient, by what a subclass makes of it; the first weights are in no group."""

    def __init__(self, model: nn.Module, lr: float, **options: Any) -> None:
        first, *others = model.parameters()
        super().__init__(others, {"lr": lr, **options})
        self.first = first

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, no loss
        for value in self.param_groups[0]["params"]:
            value.sub_(self.direction(value, self.state[value]), alpha=self.param_groups[0]["lr"])

    def direction(self, value: Any, kept: dict[Any, Any]) -> Any:
        raise NotImplementedError


class WithAttributes(Keeping):
    """Counts in attributes, averages weights of no group, has a tensor by columns, and deletes an option."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, lr, warm=0.5)
        self.model, self.calls, self.norms, self.last = model, 0, [0.0], dict[str, tuple[int, ...]]()
        self.total = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, no loss
        self.calls += 1
        if self.calls == 3:
            del self.param_groups[0]["warm"]
        self.state[self.first].setdefault("mean", self.first.detach().clone()).mul_(0.9)
        super().step()

    def direction(self, value: Any, kept: dict[Any, Any]) -> Any:
        self.total += value.grad.norm()
        self.norms[0] += float(value.grad.norm())
        self.last["by"] = (*self.last.get("by", ())[-2:], self.calls)
        by_columns = kept.setdefault("by columns", torch.ones(3, 2).t())
        assert by_columns.stride() == (1, 2)
        by_columns.mul_(0.9)
        factor = sum(self.last["by"]) * self.param_groups[0].get("warm", 0.1) * self.norms[0] * self.total
        return value.grad + self.state[self.first]["mean"].sum() / factor + by_columns.sum()


def _recipe_with(optimizer: Any) -> Recipe:
    return a_recipe(quiet_layers(), optimizer=optimizer)


class WithoutRate(Keeping):
    """Chooses its own rate, as Adafactor can."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, None)  # type: ignore[arg-type]  # on purpose
        del lr

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, no loss
        assert self.param_groups[0]["lr"] is None
        for value in self.param_groups[0]["params"]:
            value.data.sub_(value.grad, alpha=0.05)


KEEPING: dict[str, Any] = {
    "no rate": WithoutRate,
    "attributes of its own": WithAttributes,
    "counts in its groups": Counting,
    "adapts numbers in its groups": Adapting,
    "keeps tensors in its groups": KeepingTensors,
}

CASES = {
    **{name: Case(recipe=partial(_recipe_with, made)) for name, made in KEEPING.items()},
    "fused AdamW of a weight by columns": Case(recipe=lambda: a_recipe(Rotating(), optimizer=fused_adamw)),
    "fused SGD of a weight by columns": Case(recipe=lambda: a_recipe(Rotating(), optimizer=fused_sgd)),
    "fused AdamW of filters in channels_last_3d": Case(recipe=lambda: volumes(fused_adamw)),
    "fused SGD of filters in channels_last_3d": Case(recipe=lambda: volumes(fused_sgd)),
}


def _walk_both_ways(group: Group, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return walk(group, CASES[name], folder / "unbroken"), walk_in_parts(group, CASES[name], folder / "in-parts")


@pytest.mark.parametrize("name", CASES)
def test_a_strange_optimizer_trains_as_in_a_plain_loop_and_is_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    unbroken, in_parts = _walk_both_ways(alone(), name, tmp_path)
    plain = in_plain_torch(CASES[name], sample_ids(tmp_path / "unbroken", 1)).state_dict()

    assert differences(weights(unbroken), plain) == []
    assert differences(unbroken, in_parts) == []


def test_so_it_is_on_two_ranks(tmp_path: Path) -> None:
    walks = partial(_walk_both_ways, name="keeps tensors in its groups", folder=tmp_path)

    for unbroken, in_parts in in_group(2, walks, tmp_path / "ours"):
        assert differences(unbroken, in_parts) == []


def test_an_option_that_is_changed_before_a_resume_applies_beside_those_that_the_optimizer_wrote(
    tmp_path: Path,
) -> None:
    def case(decay: float) -> Case:
        made = partial(Counting, weight_decay=decay)
        return Case(recipe=lambda: a_recipe(quiet_layers(), optimizer=made))

    t = begin(case(0.1), alone(), tmp_path, stop_at=2)
    assert not train(t)
    close(t)
    stopped_at = t.state.position.step
    t = begin(case(0.3), alone(), tmp_path, attempt=1)
    assert train(t)
    close(t)
    groups, step = t.state.optimizer.param_groups, t.state.position.step

    assert 0 < stopped_at < step
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3]
    assert [group["step"] for group in groups] == [step, step]


class Object:
    """A value that no checkpoint can hold."""


WRONG_STATE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "['it']` of type list": lambda: ("it", [Object()]),
    "['it']` of type dict": lambda: ("it", {1: 2}),
    "` with the key `0` of type int": lambda: (0, torch.zeros(1)),
    "` with the key `'a/b'` of type str": lambda: ("a/b", 1),
    "['it']` of type Tensor (torch.float32, torch.sparse_coo)": lambda: ("it", torch.zeros(2, 2).to_sparse()),
    "it` is a tensor of torch.complex128": lambda: ("it", torch.zeros(2, dtype=torch.complex128)),
    "it` was made by `expand`": lambda: ("it", torch.zeros(1).expand(3)),
    "['it']` would not come back from a checkpoint as it is": lambda: ("it", torch.zeros(1, requires_grad=True)),
}
WRONG_ATTRIBUTES: dict[str, Callable[[nn.Module], Any]] = {
    "`own` of type Adam": lambda model: [torch.optim.Adam(model.parameters())],
    "`own` of type Generator": lambda _: torch.Generator(),
    "`own` of type Object": lambda _: Object(),
    "`own` of type defaultdict": lambda _: defaultdict(int),
    "`own` of type deque": lambda _: deque([1]),
    "`own` of type Tensor (torch.float32, torch.strided)": lambda _: {"mean": torch.zeros(2000)},
    "`own` of type Parameter": lambda _: nn.Linear(2, 2),
}


class Refused(Keeping):
    """Takes what is wrong with it as an argument."""

    def __init__(self, model: nn.Module, lr: float, *, wrong: str) -> None:
        super().__init__(model, lr)
        self.wrong, self.counts = wrong, dict[Any, int]()
        if wrong in WRONG_ATTRIBUTES:
            self.own = WRONG_ATTRIBUTES[wrong](model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.wrong.startswith("`zero_grad`"):
            super().zero_grad(set_to_none)

    def direction(self, value: Any, kept: dict[Any, Any]) -> Any:
        if self.wrong in WRONG_STATE:
            key, kept_value = WRONG_STATE[self.wrong]()
            kept.setdefault(key, kept_value)
        elif "share memory" in self.wrong:
            kept["it"] = kept.setdefault("whole", torch.zeros(4))[1:3]
        elif "add_param_group" in self.wrong and len(self.param_groups) == 1:
            self.add_param_group({"params": [self.first]})
        elif "counts" in self.wrong:
            self.counts[value] = 1
        elif "`state['all']`" in self.wrong:
            self.state["all"] = {"calls": 1}  # type: ignore[index]  # PyTorch saves it, too
        elif "tensor of shape" in self.wrong:
            self.state[torch.zeros(3, 2)] = {"calls": 1}
        elif "closure" in self.wrong:
            raise AssertionError("requires closure, but it was not provided")
        return value.grad


def _trained(case: Case, folder: Path) -> None:
    with ExitStack() as ended:
        t = begin(case, alone(), folder)
        ended.callback(close, t)
        train(t)


@pytest.mark.parametrize(
    "wrong",
    [
        *WRONG_STATE,
        *WRONG_ATTRIBUTES,
        "share memory, so a resumed run would have two tensors",
        "`zero_grad` leaves the gradient of",
        "or their order (`add_param_group`, say), so no run could resume",
        "The optimizer has `counts` of type dict",
        "The optimizer has `state['all']`",
        "The optimizer keeps state of a tensor of shape (3, 2) that is not, or no longer, a parameter of the model",
        "Refused asks for a `closure`",
    ],
)
def test_what_cannot_come_back_is_refused_by_name_before_anything_is_saved(wrong: str, tmp_path: Path) -> None:
    case = Case(recipe=lambda: a_recipe(quiet_layers(), optimizer=partial(Refused, wrong=wrong)))

    with pytest.raises(ConfigError, match=re.escape(wrong)):
        _trained(case, tmp_path)

    assert not [*tmp_path.glob("checkpoints/step-*")]


def test_an_optimizer_that_needs_a_closure_is_refused_before_the_first_step(tmp_path: Path) -> None:
    case = Case(recipe=lambda: a_recipe(quiet_layers(), optimizer=lambda m, lr: torch.optim.LBFGS(m.parameters(), lr)))

    with pytest.raises(ConfigError, match="LBFGS asks for a `closure`"):
        begin(case, alone(), tmp_path)


def _refused_on_each(group: Group, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        walk(group, Case(recipe=lambda: a_recipe(quiet_layers(), optimizer=OfEachRank)), folder)
    return str(caught.value)


class OfEachRank(Keeping):
    """Has its rank as an attribute."""

    def direction(self, value: Any, kept: dict[Any, Any]) -> Any:
        self.rank = torch.distributed.get_rank()
        return value.grad


def test_ranks_whose_optimizers_differ_end_with_the_same_words(tmp_path: Path) -> None:
    first, second = in_group(2, partial(_refused_on_each, folder=tmp_path / "run"), tmp_path / "ours")

    assert first == second
    assert "do not have the same `rank of the optimizer`" in first
