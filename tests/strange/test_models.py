"""Models that are not a plain stack of layers: stopped and resumed as unbroken, and as a plain loop trains them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.distributed.processes import in_group
from tests.strange.walks import (
    EPOCHS,
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

NUM_SAMPLES, WIDTH = 24, 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep PyTorch to one thread, as in a worker of a small run: on a busy machine two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=lr, momentum=0.9)


def rows(*shape: int, kinds: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(NUM_SAMPLES, *shape, generator=generator), torch.arange(NUM_SAMPLES) % kinds)


def a_recipe(model: nn.Module, **changes: Any) -> Recipe:
    data = rows(WIDTH)
    kept: dict[str, Any] = {"train_data": data, "eval_data": data, "loss": nn.CrossEntropyLoss(), "optimizer": sgd}
    return Recipe(model=model, **(kept | changes))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def quiet_layers() -> nn.Sequential:
    """Return layers without chance and without statistics over the batch."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def held_in_evaluation() -> Recipe:
    """Batch norm with statistics of an earlier training, and dropout, held in evaluation mode by the user."""
    model = layers()
    model[1].running_mean.fill_(0.3)  # type: ignore[operator]  # a buffer
    model[1].eval()
    model[3].eval()
    return a_recipe(model)


class FreezesItself(nn.Module):
    """The usual way to freeze batch norm: in `train`, which a loop calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.layers[1].running_mean.fill_(0.3)  # type: ignore[operator]  # a buffer

    def train(self, mode: bool = True) -> FreezesItself:
        super().train(mode)
        self.layers[1].eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]  # a Tensor


def head_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Train the last layer alone; the others have gradients all the same, as they were not frozen."""
    assert isinstance(model, nn.Sequential)
    return torch.optim.SGD(model[-1].parameters(), lr=lr, momentum=0.9)


def head_without_gradients_elsewhere() -> Recipe:
    model = layers()
    for value in model[:-1].parameters():
        value.requires_grad_(False)
    return a_recipe(model)


class Tempered(nn.Module):
    """A loss with a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs * self.scale, targets)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = quiet_layers()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs.mul_(2).sub_(0.5))  # type: ignore[no-any-return]  # a Tensor


class Unused(nn.Module):
    """Has a branch that no forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.never = quiet_layers(), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.taken(inputs)  # type: ignore[no-any-return]  # a Tensor


class Tied(nn.Module):
    """Reads and writes tokens with one matrix, like many a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.output = nn.Linear(5, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens).mean(dim=1))  # type: ignore[no-any-return]  # a Tensor


def tied() -> Recipe:
    tokens = torch.randint(11, (NUM_SAMPLES, 4), generator=torch.Generator().manual_seed(7))
    data = TensorDataset(tokens, tokens[:, 0])
    return a_recipe(Tied(), train_data=data, eval_data=data)


class Dicts(Dataset[Any]):
    """Samples in a nest of dicts and tuples, as of a tokenizer or a detector, with text besides."""

    def __init__(self) -> None:
        self._values, self._kinds = rows(WIDTH).tensors

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        value = self._values[index]
        return {"pixels": {"left": value[:3], "right": (value[3:], f"id-{index}")}, "kind": self._kinds[index]}


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Take a dict, change it, return a dict."""
        right, names = inputs.pop("right")
        assert all(name.startswith("id-") for name in names)
        inputs["left"] += 1
        return {"scores": self.layers(torch.cat([inputs["left"], right], dim=1))}


def dict_inputs() -> Recipe:
    def split(batch: dict[str, Any]) -> tuple[Any, Any]:
        return batch.pop("pixels"), batch.pop("kind")

    def loss(outputs: dict[str, Tensor], kinds: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs["scores"], kinds)

    return a_recipe(TakesDict(), train_data=Dicts(), eval_data=Dicts(), loss=loss, inputs_and_targets=split)


class TakesTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return self.layers(torch.cat(inputs, dim=1))  # type: ignore[no-any-return]  # a Tensor


def tuple_inputs() -> Recipe:
    values, kinds = rows(WIDTH).tensors
    data = TensorDataset(values[:, :2], values[:, 2:], kinds)
    return a_recipe(
        TakesTuple(), train_data=data, eval_data=data, inputs_and_targets=lambda batch: ((batch[0], batch[1]), batch[2])
    )


class Balance(nn.Module):
    """A loss with a parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        error = nn.functional.cross_entropy(outputs, targets)
        return error * (-self.log_scale).exp() + self.log_scale


class TakesTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]  # a Tensor


def loss_within_the_model() -> Recipe:
    model = TakesTensor()
    criterion = Balance()
    model.criterion = criterion
    return a_recipe(model, loss=criterion)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.lstm(inputs)
        return self.last(outputs[:, -1])  # type: ignore[no-any-return]  # a Tensor


class Spectral(nn.Module):
    """Complex weights, as of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (torch.fft.rfft(inputs) @ self.weight).abs()  # type: ignore[no-any-return]  # a Tensor


class Counts(nn.Module):
    """Puts another tensor in the place of its buffer in each forward, and keeps one on the side that it never saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("limits", torch.tensor([-3.0, 3.0]), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(dim=0)
        return self.layers(inputs - self.mean)  # type: ignore[no-any-return]  # a Tensor


class Late(nn.Module):
    """Makes what it saves in its first forward, as code does that does not know the inputs' shape before."""

    def __init__(self, how: str, *, on_rank: int | None = None) -> None:
        super().__init__()
        self.layers, self.how, self.on_rank = quiet_layers(), how, on_rank
        self.num_passes = 0
        self.seen: Tensor
        if how != "registered":
            self.register_buffer("seen", torch.zeros(1) if how.startswith("grows") else None)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and (self.on_rank is None or self.on_rank == torch.distributed.get_rank()):
            self._keep(inputs.detach().mean(dim=0))
        return self.layers(inputs)  # type: ignore[no-any-return]  # a Tensor

    def _keep(self, mean: Tensor) -> None:
        self.num_passes += 1
        if self.how == "None":
            self.seen = mean
        elif self.how == "registered" and not hasattr(self, "seen"):
            self.register_buffer("seen", mean)
        elif self.how == "for itself":
            self.register_buffer("seen", mean, persistent=False)
        elif self.how == "grows" or (self.how == "grows in step 4" and self.num_passes == 4):
            self.seen = torch.cat([self.seen, torch.ones(1)])


class LateButLoads(Late):
    """Does the same, and knows how to load it."""

    def __init__(self) -> None:
        super().__init__("None")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        if f"{prefix}seen" in state_dict:
            self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *more)


def with_gradients_left() -> Recipe:
    """The builder goes backward, to look at its model, and forgets to drop the gradients."""
    model = layers()
    model(torch.ones(4, WIDTH)).sum().backward()
    return a_recipe(model)


class EvaluatesDifferently(nn.Linear):
    """Folds a part of its weights in when it is put into evaluation mode, as layers of LoRA do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))
        self.unfolded: Tensor | None = None

    def train(self, mode: bool = True) -> EvaluatesDifferently:
        with torch.no_grad():
            if mode and self.unfolded is not None:
                self.weight.copy_(self.unfolded)
                self.unfolded = None
            if not mode and self.unfolded is None:
                self.unfolded = self.weight.clone()
                self.weight += self.extra
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Tensor:
        extra = inputs @ self.extra.T if self.unfolded is None else 0
        return super().forward(inputs) + extra


CASES = {
    "batch norm and dropout held in evaluation mode": Case(recipe=held_in_evaluation),
    "batch norm frozen by a train() of its own": Case(recipe=lambda: a_recipe(FreezesItself()), plain_calls_train=True),
    "a head alone in the optimizer": Case(
        recipe=lambda: a_recipe(quiet_layers(), optimizer=head_of), train={"grad_clip_norm": 0.5}
    ),
    "a head alone with gradients": Case(recipe=head_without_gradients_elsewhere, train={"grad_clip_norm": 0.5}),
    "a forward that works in place": Case(recipe=lambda: a_recipe(InPlace())),
    "unused parameters": Case(recipe=lambda: a_recipe(Unused()), train={"find_unused_parameters": True}),
    "tied weights": Case(recipe=tied),
    "dict inputs": Case(recipe=dict_inputs),
    "tuple inputs": Case(recipe=tuple_inputs),
    "a loss module with buffers": Case(recipe=lambda: a_recipe(layers(), loss=Tempered())),
    "a loss module with parameters, in the model": Case(recipe=loss_within_the_model),
    "a model under torch.compile": Case(
        recipe=lambda: a_recipe(torch.compile(layers(), backend="eager"))  # type: ignore[arg-type]  # typed as a callable
    ),
    "LSTM": Case(
        recipe=lambda: a_recipe(Recurrent(), train_data=rows(5, 2), eval_data=rows(5, 2)),
    ),
    "complex weights": Case(recipe=lambda: a_recipe(Spectral())),
    "a buffer that forward replaces": Case(recipe=lambda: a_recipe(Counts())),
    "a buffer made in forward by a model that can load it": Case(recipe=lambda: a_recipe(LateButLoads())),
    "a buffer made in forward that is not saved": Case(recipe=lambda: a_recipe(Late("for itself"))),
    "gradients left by the builder": Case(recipe=with_gradients_left),
    "a layer that folds its weights for evaluation": Case(
        recipe=lambda: a_recipe(nn.Sequential(EvaluatesDifferently(), nn.ReLU(), nn.Linear(WIDTH, 3)))
    ),
}


def _walk_both_ways(group: Group, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    case = CASES[name]
    return walk(group, case, folder / "unbroken"), walk_in_parts(group, case, folder / "in-parts")


QUICK_CASES = 10
"""So many of the first are in `make test`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if at < QUICK_CASES else pytest.mark.long) for at, name in enumerate(CASES)]
)
def test_a_strange_model_is_trained_as_by_a_plain_loop_and_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    unbroken, in_parts = _walk_both_ways(alone(), name, tmp_path)
    batches = sample_ids(tmp_path / "unbroken", 1)
    plain = in_plain_torch(CASES[name], batches).state_dict()

    assert sorted(index for batch in batches for index in batch) == sorted([*range(NUM_SAMPLES)] * EPOCHS)
    assert differences(weights(unbroken), plain) == []
    assert differences(unbroken, in_parts) == []


MADE_LATE = {
    "None": (1, "new: seen"),
    "registered": (1, "new: seen"),
    "grows": (1, r"of another shape: seen \(2,\) instead of \(1,\)"),
    "grows in step 4": (5, r"of another shape: seen \(2,\) instead of \(1,\)"),
}


@pytest.mark.parametrize("how", MADE_LATE)
def test_a_model_that_no_run_could_resume_is_refused_before_it_is_saved(how: str, tmp_path: Path) -> None:
    step, told = MADE_LATE[how]
    t = begin(Case(recipe=lambda: a_recipe(Late(how))), alone(), tmp_path)

    with pytest.raises(ConfigError, match=rf"\({told}\).*constructor.*`persistent=False`"):
        train(t)

    close(t)
    assert t.state.position.step == step
    assert not checkpoint_names.committed_steps(RunDir(tmp_path))


def _refused(group: Group, how: str, folder: Path, on_rank: int | None) -> tuple[str, int]:
    t = begin(Case(recipe=lambda: a_recipe(Late(how, on_rank=on_rank))), group, folder)
    with pytest.raises(ConfigError) as raised:
        train(t)
    close(t)
    return str(raised.value), t.state.position.step


@pytest.mark.parametrize(("how", "on_rank"), [("registered", None), ("None", None), ("None", 1)])
def test_all_ranks_refuse_it_together(how: str, on_rank: int | None, tmp_path: Path) -> None:
    """Also where one rank alone has changed: none waits for another in an exchange."""
    refuse = partial(_refused, how=how, folder=tmp_path / "run", on_rank=on_rank)
    (told, step), others = in_group(2, refuse, tmp_path / "ours")

    assert others == (told, step)
    assert step == 1
    assert "(new: seen)" in told


ALIKE_ON_TWO_RANKS = [
    "batch norm and dropout held in evaluation mode",
    "a head alone in the optimizer",
    "a forward that works in place",
    "unused parameters",
    "tied weights",
]
"""Where two halves of a batch give the gradients of the whole: no batch norm or dropout that is being trained."""
ONLY_RESUMED_ON_TWO_RANKS = ["batch norm frozen by a train() of its own", "dict inputs"]


@pytest.mark.long
@pytest.mark.parametrize("name", [*ALIKE_ON_TWO_RANKS, *ONLY_RESUMED_ON_TWO_RANKS])
def test_so_it_is_on_two_ranks(name: str, tmp_path: Path) -> None:
    ranks = in_group(2, partial(_walk_both_ways, name=name, folder=tmp_path), tmp_path / "ours")
    batches = sample_ids(tmp_path / "unbroken", 2)
    plain = in_plain_torch(CASES[name], batches).state_dict()

    for unbroken, in_parts in ranks:
        assert differences(unbroken, in_parts) == []
    if name in ALIKE_ON_TWO_RANKS:
        trained = weights(ranks[0][0])
        assert trained.keys() == plain.keys()
        for key, value in plain.items():
            torch.testing.assert_close(trained[key], value, msg=f"{key} differs")


class Locked(nn.Linear):
    """Has what cannot be copied."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_has_no_moving_average(tmp_path: Path) -> None:
    case = Case(recipe=lambda: a_recipe(Locked()), train={"ema_decay": 0.9})

    with pytest.raises(ConfigError, match=r"`train.ema_decay` is 0.9, which needs a copy of `Recipe.model`, but"):
        begin(case, alone(), tmp_path)


class Rare(nn.Linear):
    """Has a buffer that ranks cannot send."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(WIDTH, 3)
        self.register_buffer("rare", torch.ones(4).to(dtype))


def gathering_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Take the mean over all ranks from the outputs."""
    centre = outputs.detach().mean(0)
    torch.distributed.all_reduce(centre)
    return nn.functional.cross_entropy(outputs - centre, targets)


def _refused_on_two_ranks(group: Group, folder: Path) -> list[str]:
    whole = a_recipe(nn.Linear(WIDTH, 3))
    uneven = replace(whole, loss=gathering_loss, eval_data=Subset(whole.train_data, range(7)))
    even = replace(uneven, eval_data=Subset(whole.train_data, range(6)))
    rare = [lambda kind=kind: a_recipe(Rare(kind)) for kind in (torch.float8_e4m3fn, torch.uint16)]
    told = []
    of_rank = replace(whole, train_data=Subset(whole.train_data, range(8 - group.rank_info.rank)))
    for number, recipe in enumerate([lambda: uneven, lambda: of_rank, *rare]):
        with pytest.raises(ConfigError) as caught:
            walk(group, Case(recipe=recipe), folder / str(number))
        told.append(str(caught.value))
    walk(group, Case(recipe=lambda: even), folder / "even")
    return told


def test_what_ranks_cannot_do_together_is_refused_in_plain_words(tmp_path: Path) -> None:
    for uneven, of_rank, *rare in in_group(2, partial(_refused_on_two_ranks, folder=tmp_path), tmp_path / "ours"):
        assert "some ranks have 2 batches of `eval_data` and some 1: those with more would wait for ever" in uneven
        assert (
            "`Recipe.train_data` has 8 samples on rank 0, but 7 on another rank. Give each rank all samples" in of_rank
        )
        assert ["has 'rare' of torch.float8_e4m3fn" in rare[0], "has 'rare' of torch.uint16" in rare[1]] == [True, True]
