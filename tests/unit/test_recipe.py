"""What a user brings: found by name, called with its arguments, and checked before anything runs."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.recipe import Recipe, build_recipe, did_you_mean_name, load_builder, refuse_other_return

SAMPLES = TensorDataset(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))

WriteModule = Callable[[str, str], None]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """Return what writes a module that can be imported until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


RECIPE = """
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe

def build(width=2, *, depth=1):
    data = TensorDataset(torch.zeros(3, width), torch.zeros(3, dtype=torch.long))
    return Recipe(model=torch.nn.Linear(width, 2), train_data=data, loss=torch.nn.CrossEntropyLoss())
"""


def test_a_function_of_the_users_is_called_with_its_arguments(write_module: WriteModule) -> None:
    write_module("mine", RECIPE)

    recipe = build_recipe("mine:build", {"width": 5})

    assert recipe.model.weight.shape == (2, 5)


class HasModel(Protocol):
    """A class that `issubclass` refuses."""

    model: nn.Module


@pytest.mark.parametrize(
    "returned", [None, "Recipe", "Any", "object", "Recipe | None", "Iterator", "nosuch[", "Recipe[int]", "HasModel"]
)
def test_a_function_may_say_that_it_returns_a_recipe_or_nothing_that_can_be_judged(returned: str | None) -> None:
    def build() -> Any: ...

    build.__annotations__ = {} if returned is None else {"return": returned}

    if returned == "Iterator":
        with pytest.raises(ConfigError, match="`mine:build` says that it returns Iterator, but must return a"):
            refuse_other_return("mine:build", build)
    else:
        refuse_other_return("mine:build", build)


def test_a_decorated_function_is_not_judged_by_the_annotation_of_what_it_decorates() -> None:
    def model() -> torch.nn.Module:
        return nn.Linear(1, 1)

    @functools.wraps(model)
    def build() -> Any: ...

    refuse_other_return("mine:build", build)


def test_the_built_in_recipe_has_a_short_name() -> None:
    assert load_builder("image_classification").__module__ == "ddp_hpc.train.recipes.image_classification"


@pytest.mark.parametrize(
    ("target", "text", "complaint"),
    [
        (
            "image_clasification",
            "",
            r"'image_clasification'.*no built-in recipe of that name.*mean 'image_classification'.*drill.*`module:func",
        ),
        ("not_there:build", "", "'not_there:build'.*No module named 'not_there'.*python -c 'import not_there'"),
        ("mine:build", "import not_there_either", "importing 'mine' raised ModuleNotFoundError: .*'not_there_either'"),
        ("mine:build", "x = 1 / 0", "importing 'mine' raised ZeroDivisionError: division by zero"),
        ("mine:build", "def build(:", "importing 'mine' raised SyntaxError"),
        ("mine:build", "raise SystemExit(3)", "importing 'mine' raised SystemExit: 3"),
        ("mine:biuld", RECIPE, r"module 'mine' \(.*mine.py\) has no function 'biuld'"),
        ("mine:build", "build = 3", "has no function 'build'"),
    ],
    ids=["no such short name", "no module", "bad import", "raises", "syntax", "exits", "no function", "no callable"],
)
def test_a_recipe_that_cannot_be_had_is_refused_with_the_reason(
    write_module: WriteModule, target: str, text: str, complaint: str
) -> None:
    write_module("mine", text)

    with pytest.raises(ConfigError, match=complaint):
        load_builder(target)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"widht": 3}, "unexpected keyword argument 'widht'. Did you mean 'width'.? Known: width, depth."),
        ({"zzz": 3}, "unexpected keyword argument 'zzz'. Known: width, depth."),
    ],
    ids=["nearly right", "far off"],
)
def test_an_unknown_argument_is_refused_with_the_ones_there_are(
    write_module: WriteModule, args: dict[str, Any], complaint: str
) -> None:
    write_module("mine", RECIPE)

    with pytest.raises(ConfigError, match=complaint):
        build_recipe("mine:build", args)


def test_a_missing_argument_is_named(write_module: WriteModule) -> None:
    write_module("mine", "def build(width, depth): ...")

    with pytest.raises(ConfigError, match="`mine:build` does not accept that: missing a required argument: 'depth'"):
        build_recipe("mine:build", {"width": 1})


def test_what_the_function_cannot_use_is_told_with_its_arguments_and_the_users_own_lines(
    write_module: WriteModule,
) -> None:
    """The exception comes from torch's code, where no user looks."""
    write_module("mine", "import torch\n\n\ndef build(width):\n    return torch.nn.Linear(4, width)")

    with pytest.raises(ConfigError) as refused:
        build_recipe("mine:build", {"width": "wide"})

    told = str(refused.value)
    assert told.startswith("`mine:build` was called with `recipe.args` {'width': 'wide'} and raised TypeError: ")
    assert "mine.py:5, in build: return torch.nn.Linear(4, width)\n" in told
    assert "site-packages" not in told


def test_an_error_that_may_be_gone_next_time_stays_the_users_own(write_module: WriteModule) -> None:
    write_module("mine", "def build():\n    raise OSError(5, 'Input/output error')")

    with pytest.raises(OSError, match="Input/output error"):
        build_recipe("mine:build", {})


def test_a_function_that_returns_something_else_is_refused(write_module: WriteModule) -> None:
    write_module("mine", "def build():\n    return {'model': 1}")

    with pytest.raises(ConfigError, match="`mine:build` returned dict, but must return"):
        build_recipe("mine:build", {})


class Stream(IterableDataset[int]):
    """A stream that even knows its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("model", nn.Linear, "`Recipe.model` is <class 'torch.nn.modules.linear.Linear'>.*must be a `torch.nn.Module`"),
        ("loss", 0.5, "`Recipe.loss` is 0.5, but it must be a function of"),
        ("train_data", Stream(), "`Recipe.train_data` is .*Stream.*must be map-style"),
        ("train_data", NoLength(), "`Recipe.train_data` is .*NoLength.*must be map-style"),
        ("train_data", [], r"`Recipe.train_data` is \[\].* not empty"),
        ("eval_data", iter([1]), "`Recipe.eval_data` is .*must be map-style"),
        ("metrics", {"loss": len}, "`Recipe.metrics` is .*without `loss`"),
        (
            "metrics",
            {"step": len},
            "`Recipe.metrics` is .*'step'.* without `loss`, `kind`, `step`, `epoch`, `at`, which are",
        ),
    ],
    ids=["class", "number", "stream", "no length", "empty", "iterator", "loss", "step"],
)
def test_a_recipe_checks_itself_when_made(field: str, value: object, complaint: str) -> None:
    fields: dict[str, Any] = {"model": nn.Linear(2, 2), "train_data": SAMPLES, "loss": nn.CrossEntropyLoss()}

    with pytest.raises(ConfigError, match=complaint):
        Recipe(**(fields | {field: value}))


def test_a_plain_list_is_map_style_data() -> None:
    recipe = Recipe(model=nn.Linear(2, 2), train_data=[(1, 2)], loss=nn.CrossEntropyLoss())  # type: ignore[arg-type]  # users do

    assert recipe.inputs_and_targets(recipe.train_data[0]) == (1, 2)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("resnet19", "Did you mean 'resnet18' or 'resnet50'? Known: resnet18, resnet50, vgg."), (7, "Known: resnet18,")],
    ids=["near", "a number"],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all(name: object, sentence: str) -> None:
    assert re.match(re.escape(sentence), did_you_mean_name(name, ["resnet18", "resnet50", "vgg"]))
