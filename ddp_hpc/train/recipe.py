"""`Recipe`, the user's part of a training, and the function that builds it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ddp_hpc.base.errors import ConfigError, text_of
from ddp_hpc.base.names import did_you_mean
from ddp_hpc.run.run_dir.records import NON_METRIC_FIELDS

TARGETS = {
    "image_classification": "ddp_hpc.train.recipes.image_classification:build",
    "drill": "ddp_hpc.train.recipes.drill:build",
}
"""Recipes known by a short name."""

FOREIGN_CODE_PATHS = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    sysconfig.get_path("stdlib"),
    str(Path(__file__).parents[1]),
    "<frozen ",
)
"""Parts of paths of code that is not the user's."""


class WeightedLoss(NamedTuple):
    """A loss of samples that count differently: its mean is the sum divided by the weight, over all of a batch."""

    total: Tensor
    """The sum over the samples, a scalar."""
    weight: Tensor | float
    """What to divide it by: the sum of the class weights, or the number of tokens that count."""


Loss = Callable[[Any, Any], Any]
"""(outputs, targets) -> the mean over the samples, a scalar; or a sum over them and its weight."""
Scorer = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> one value per sample, shape (num_samples,); averaged over the held-out set."""


def _pair(batch: Any) -> tuple[Any, Any]:
    inputs, targets = batch
    return inputs, targets


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model, data, loss, optimizer and metrics of one training: plain PyTorch objects.

    The loop does the rest: devices, DDP, precision, accumulation, data order, evaluation, checkpoints.
    """

    model: nn.Module
    """On the CPU, in fp32; the same on every rank, because all use the same seed (and DDP broadcasts rank zero's weights)."""
    train_data: Dataset[Any]
    """Map-style: `len(data)` and `data[index]`. Random augmentation may use torch's, numpy's or Python's generator."""
    loss: Loss
    """(outputs, targets) -> the mean over the samples, a scalar; or a `WeightedLoss`."""
    eval_data: Dataset[Any] | None = None
    """Held-out samples, map-style."""
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] | None = None
    """(model, lr) -> optimizer; default: what the configuration's `optimizer` section says."""
    metrics: Mapping[str, Scorer] = field(default_factory=dict)
    """Metrics of the evaluation besides `loss`, by name."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes one batch of a list of samples, in training and evaluation; default: torch's `default_collate`."""
    inputs_and_targets: Callable[[Any], tuple[Any, Any]] = _pair
    """Splits a batch into inputs and targets; default: a pair. The model is called with the inputs."""
    tokens: int | Callable[[Any], int] | None = None
    """For tokens/s: how many tokens a sample has, or a function of a batch, as the loader gives it, that counts them."""

    def __post_init__(self) -> None:
        require(isinstance(self.model, nn.Module), "Recipe.model", self.model, "a `torch.nn.Module`")
        require(callable(self.loss), "Recipe.loss", self.loss, "a function of (outputs, targets)")
        require(_is_map_style(self.train_data), "Recipe.train_data", self.train_data, MAP_STYLE)
        if self.eval_data is not None:
            require(_is_map_style(self.eval_data), "Recipe.eval_data", self.eval_data, MAP_STYLE)
        is_number = isinstance(self.tokens, int) and not isinstance(self.tokens, bool) and self.tokens > 0
        require(
            self.tokens is None or is_number or callable(self.tokens),
            "Recipe.tokens",
            self.tokens,
            "a number of tokens above zero, or a function of a batch",
        )
        require(
            not {"loss", *NON_METRIC_FIELDS} & {*self.metrics},
            "Recipe.metrics",
            dict(self.metrics),
            f"without `loss`, {', '.join(f'`{name}`' for name in NON_METRIC_FIELDS)}, which are always recorded",
        )


MAP_STYLE = "map-style and not empty: with `len(data)` above zero and `data[index]`, so that samples can be numbered"


def _is_map_style(data: object) -> bool:
    if isinstance(data, IterableDataset):
        return False
    return isinstance(data, Sized) and hasattr(data, "__getitem__") and len(data) > 0


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Refuse a value unless a condition holds."""
    if not condition:
        raise ConfigError(f"`{name}` is {value!r}, but it must be {wanted}.")


def did_you_mean_name(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the nearest and all known names, for an unknown name."""
    names = list(known)
    return f"{did_you_mean(str(name), names)}Known: {', '.join(names)}."


def load_builder(target: str) -> Callable[..., Recipe]:
    """Import `module:function` (or a built-in recipe's name) and return the function."""
    module_name, _, function_name = TARGETS.get(target, target).partition(":")
    if not function_name:
        module, _, function = target.rpartition(".")  # written as in Python
        raise ConfigError(
            f"`recipe.target` is {target!r}, but there is no built-in recipe of that name. {did_you_mean_name(target, TARGETS)} "
            f"Name your own function as `module:function`{f': `{module}:{function}`' if module else ''}."
        )
    try:
        imported = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        here = [path.stem for path in Path.cwd().glob("*.py")]
        meant = "" if module_name in here else did_you_mean(module_name, here)
        raise ConfigError(
            f"`recipe.target` is {target!r}, but importing {module_name!r} raised "
            f"{type(error).__name__}: {error}. {meant}Try `python -c 'import {module_name}'` in the directory that "
            "you submit from."
        ) from error
    builder = getattr(imported, function_name, None)
    if not callable(builder):
        is_pythons = module_name.partition(".")[0] in sys.stdlib_module_names
        advice = (
            f" Python's own {module_name!r} comes first: give your module another name."
            if is_pythons
            else f" {did_you_mean(function_name, vars(imported))}Correct the name after the colon."
        )
        raise ConfigError(
            f"`recipe.target` is {target!r}, but module {module_name!r} ({getattr(imported, '__file__', 'built in')}) "
            f"has no function {function_name!r}.{advice}"
        )
    return builder  # type: ignore[no-any-return]  # what it returns is checked by build_recipe


def refuse_other_return(target: str, builder: Callable[..., object]) -> None:
    """Refuse a function that says by its annotation that it returns something else than a `Recipe`."""
    if hasattr(builder, "__wrapped__"):  # its annotations are those of the function that a decorator has changed
        return
    try:
        returned = get_type_hints(builder).get("return", Recipe)
        kind = get_origin(returned) or returned
        is_free = not isinstance(kind, type) or kind in {Any, UnionType}
        may_be = is_free or issubclass(kind, Recipe) or issubclass(Recipe, kind)
    except Exception:  # noqa: BLE001  a user's annotation may be any text, or a class that refuses the question
        return
    if not may_be:
        raise ConfigError(
            f"`{target}` says that it returns {kind.__name__}, but must return a `ddp_hpc.train.recipe.Recipe`."
        )


def build_recipe(target: str, args: Mapping[str, Any]) -> Recipe:
    """Call the builder and check that it returned a `Recipe`."""
    builder = load_builder(target)
    check_args(target, builder, args)
    recipe = _call(target, builder, args)
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"`{target}` returned {type(recipe).__name__}, but must return a `ddp_hpc.train.recipe.Recipe`."
        )
    return recipe


def _call(target: str, builder: Callable[..., Recipe], args: Mapping[str, Any]) -> Recipe:
    """Call the builder; an error that wrong arguments cause gets its arguments and the user's lines in the message.

    Other exceptions (a disk that cannot be read, a GPU that fails) may not occur in the next attempt, and pass unchanged.
    """
    try:
        return builder(**args)
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError, NameError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not any(part in frame.filename for part in FOREIGN_CODE_PATHS)]
        lines = "".join(f"  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}\n" for frame in own[-3:])
        raise ConfigError(
            f"`{target}` was called with `recipe.args` {dict(args)!r} and raised {type(error).__name__}: {text_of(error)}\n"
            f"{lines}Change the arguments, or the function."
        ) from error


def check_args(target: str, builder: Callable[..., Recipe], args: Mapping[str, Any]) -> None:
    """Check the arguments without a call, so that a TypeError inside the function is reported as the user's own."""
    try:
        signature = inspect.signature(builder, eval_str=True)
    except Exception:  # noqa: BLE001  an annotation may be any text
        signature = inspect.signature(builder)
    try:
        signature.bind(**args)
    except TypeError as error:
        unknown = [name for name in args if name not in signature.parameters]
        raise ConfigError(
            f"`recipe.args` is {dict(args)!r}, but `{target}` does not accept that: {error}. "
            f"{did_you_mean_name(unknown[0] if unknown else '', signature.parameters)}"
        ) from error
    for name, value in args.items():
        wanted = signature.parameters[name].annotation if name in signature.parameters else Any
        if not _may_match_type(value, wanted):
            takes = wanted.__name__ if isinstance(wanted, type) else str(wanted).replace("typing.", "")
            raise ConfigError(
                f"`recipe.args.{name}` is {value!r}, but `{target}` takes {takes} there. Correct the "
                "value, or the function's annotation."
            )


def _may_match_type(value: Any, wanted: Any) -> bool:
    """Return False where a value is surely not what an annotation asks for: a text for a number, an unknown word."""
    if get_origin(wanted) in (Union, UnionType):
        return any(_may_match_type(value, one) for one in get_args(wanted))
    if get_origin(wanted) is Literal:
        return value is None or value in get_args(wanted)
    if isinstance(wanted, type) and wanted in (int, float, bool, NoneType):  # it may be any object, also an array
        return not isinstance(value, str | list | dict)
    return not (wanted is str and isinstance(value, list | dict))


def code_hashes(import_paths: Sequence[str]) -> dict[str, str]:
    """Return the files below `import_paths` that this process has imported, each with the xxh3_64 of its content.

    Other people's packages are left out: the versions of these are in the environment's record.
    """
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = {
        path
        for path in files
        if isinstance(path, str)
        and any(Path(path).is_relative_to(folder) for folder in import_paths)
        and not any(part in path for part in FOREIGN_CODE_PATHS)
    }
    return {path: xxhash.xxh3_64_hexdigest(Path(path).read_bytes()) for path in sorted(own) if Path(path).is_file()}
