"""A loss that returns a sum and its weight trains as one process with the whole batch; one that hides its weights is told of."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.record import write_record
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import ReplayRequest
from ddp_hpc.train.engine.replay_trace import set_up_replay
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.engine.weighted_loss import compute_loss, warn_of_no_mean
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe, WeightedLoss
from tests.distributed.processes import in_group
from tests.strange.one_process import trained
from tests.strange.walks import Case, differences, in_plain_torch, sample_ids, walk, walk_in_parts, weights

DOCUMENTED = Path(__file__).parents[2] / "docs/recipes.md"
NUM_SAMPLES, BATCH = 41, 16
"""The last batch of an epoch has 9: four workers with micro batches of 4 get 3, 2, 2 and 2, with those of 1 in the last micro step one or none."""
ROWS = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(NUM_SAMPLES) % 3
CLASSES[::4] = -100
KEYS = {"epochs": 3, "global_batch_size": BATCH}


def documented_loss() -> Callable[[Tensor, Tensor], WeightedLoss]:
    """Return the function of the example in docs/recipes.md."""
    section = DOCUMENTED.read_text().split("## A loss with weights")[1]
    found: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "functional": functional}
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], found)  # noqa: S102  the documents' own code
    return found["loss"]  # type: ignore[no-any-return]  # the function


def hidden(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same, as PyTorch computes it for one batch."""
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 1.0, 5.0]))


def recipe(loss: Callable[[Tensor, Tensor], Any], classes: Tensor = CLASSES) -> Recipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    data = TensorDataset(ROWS, classes)
    sgd = lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)  # noqa: E731
    return Recipe(model=model, train_data=data, eval_data=data, loss=loss, optimizer=sgd)


def case(loss: Callable[[Tensor, Tensor], Any], **train: Any) -> Case:
    return Case(recipe=partial(recipe, loss), train={**KEYS, **train}, log_every=1)


def losses(path: Path, kind: str) -> list[float]:
    return [line["loss"] for line in read_json_lines(RunDir(path).metrics) if line["kind"] == kind]


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "documented": documented_loss(),
    "of PyTorch": nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 5.0])),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("world_size", "accumulation"),
    [
        pytest.param(world_size, accumulation, marks=() if world_size == accumulation != 4 else pytest.mark.long)
        for world_size in (1, 2, 4)
        for accumulation in (1, 2, 4)
    ],
)
def test_weights_and_losses_are_those_of_one_process_with_the_whole_batch(
    world_size: int, accumulation: int, loss: str, tmp_path: Path
) -> None:
    of, path = case(LOSSES[loss], micro_batch_size=BATCH // world_size // accumulation), tmp_path / "whole"
    whole = in_group(world_size, partial(walk, case=of, path=path), tmp_path / "one")
    in_parts = in_group(world_size, partial(walk_in_parts, case=of, path=tmp_path / "parts"), tmp_path / "more")

    ids = sample_ids(path, world_size)
    plain, begun = in_plain_torch(case(hidden), ids), recipe(hidden).model
    for one, other in zip(whole, in_parts, strict=True):
        assert [
            name for name in differences(one, other) if not name.endswith("/rng.python")
        ] == []  # which pytest draws from before each fork
        for name, weight in weights(one).items():
            assert torch.allclose(weight, plain.get_parameter(name), rtol=1e-4, atol=1e-6), name
    assert losses(path, "train")[0] == pytest.approx(hidden(begun(ROWS[ids[0]]), CLASSES[ids[0]]).item(), rel=1e-5)
    assert losses(path, "eval")[-1] == pytest.approx(hidden(plain(ROWS), CLASSES).item(), rel=1e-4)
    assert losses(path, "train") == losses(tmp_path / "parts", "train")


@pytest.mark.parametrize("keys", [{"train__precision": "fp16"}, {"train__on_nonfinite": "skip"}], ids=str)
def test_it_works_with_what_else_uses_the_gradients(keys: dict[str, Any], tmp_path: Path) -> None:
    more: dict[str, Any] = {"train__global_batch_size": BATCH, "train__max_steps": 4, "train__grad_clip_norm": 0.5}

    parts = trained(tmp_path / "parts", recipe(documented_loss()), train__micro_batch_size=4, **more, **keys)
    whole = trained(tmp_path / "whole", recipe(hidden), **more, **keys)

    for one, other in zip(parts.state.model.parameters(), whole.state.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-4)


def test_a_step_without_any_weight_changes_nothing(tmp_path: Path) -> None:
    made = recipe(documented_loss(), torch.full((NUM_SAMPLES,), -100))
    before = [one.detach().clone() for one in made.model.parameters()]

    training = trained(tmp_path / "run", made, train__max_steps=2, train__micro_batch_size=2)

    assert all(map(torch.equal, training.state.model.parameters(), before))
    assert losses(tmp_path / "run", "train") == [0.0, 0.0]


def _warnings_of(group: Group, path: Path, micro: int) -> str:
    of = replace(
        case(hidden, micro_batch_size=micro),
        recipe=partial(recipe, hidden, torch.arange(NUM_SAMPLES) % 3),
    )
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]  # the shortest handler
    logging.getLogger("ddp_hpc").addHandler(handler)
    walk(group, of, path)
    return "\n".join(one for one in records if "Recipe.loss" in one)


@pytest.mark.parametrize(("world_size", "micro"), [(1, 16), (1, 4), (2, 8), (2, 1), (4, 2)])
def test_a_loss_that_hides_its_weights_is_told_of_once_at_the_start(
    world_size: int, micro: int, tmp_path: Path
) -> None:
    (said, *_) = in_group(world_size, partial(_warnings_of, path=tmp_path / "run", micro=micro), tmp_path / "ranks")

    assert said.count("`Recipe.loss` is not a mean over samples") == 1, said
    assert "A loss with weights" in said


def _smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


OUTPUTS, TARGETS = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), torch.arange(16) ** 2 % 3
MASKED = torch.where(torch.arange(16) % 5 == 0, -100, TARGETS)
MEANS: dict[str, tuple[Any, Any, Any]] = {
    "cross entropy": (nn.CrossEntropyLoss(), OUTPUTS, TARGETS),
    "smoothed": (_smooth, OUTPUTS, TARGETS),
    "in bf16": (lambda one, other: (one - other).square().mean(), OUTPUTS.bfloat16(), OUTPUTS.flip(0).bfloat16()),
    "near zero": (lambda one, _: one.mean(), torch.tensor([1.0, -1.0]).repeat(8) + 1e-7, TARGETS),
    "of two outputs": (
        lambda both, to: _smooth(both["a"], to) + both["b"],
        {"a": OUTPUTS, "b": OUTPUTS.mean()},
        TARGETS,
    ),
    "drawn at random": (lambda one, to: _smooth(functional.dropout(one), to), OUTPUTS, TARGETS),
    "of tokens in a row": (lambda one, to: _smooth(one, to.flatten()), OUTPUTS, TARGETS.view(4, 4)),
    "of a batch on its own": (lambda one, to: _smooth(one, TARGETS) + 0 * to.sum(), OUTPUTS, TARGETS),
    "no tensors": (lambda one, to: one.sum() * len(to), OUTPUTS, ["a"] * 16),
    "sum and weight": (documented_loss(), OUTPUTS, MASKED),
    "class weights of PyTorch": (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 1.0])), OUTPUTS, MASKED),
    "class weights, smoothed": (
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 1.0]), label_smoothing=0.1),
        OUTPUTS,
        TARGETS,
    ),
    "class weights of probabilities": (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 1.0])), OUTPUTS, OUTPUTS.softmax(1)),
    "class weights of logarithms": (nn.NLLLoss(torch.tensor([1.0, 2.0, 1.0])), OUTPUTS, TARGETS),
}
NO_MEANS: dict[str, tuple[Any, Any, Any]] = {
    "class weights": (partial(functional.cross_entropy, weight=torch.tensor([1.0, 2.0, 1.0])), OUTPUTS, TARGETS),
    "ignored": (nn.CrossEntropyLoss(), OUTPUTS, MASKED),
    "a part all ignored": (nn.CrossEntropyLoss(), OUTPUTS, torch.where(torch.arange(16) < 4, -100, TARGETS)),
    "a sum": (nn.CrossEntropyLoss(reduction="sum"), OUTPUTS, TARGETS),
    "contrastive": (lambda one, _: functional.cross_entropy(one @ one.T, torch.arange(len(one))), OUTPUTS, TARGETS),
    "a root": (lambda one, _: one.square().mean().sqrt(), OUTPUTS, TARGETS),
    "a mean and its weight": (lambda one, to: WeightedLoss(_smooth(one, to), len(to)), OUTPUTS, TARGETS),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_and_what_cannot_be_divided_is_not_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_no_mean(*MEANS[name], 8)

    assert caplog.messages == []


@pytest.mark.parametrize("name", NO_MEANS)
def test_what_depends_on_how_a_batch_is_divided_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_no_mean(*NO_MEANS[name], 8)

    (said,) = caplog.messages
    assert ("returns a `WeightedLoss`" if name == "a mean and its weight" else "is not a mean") in said


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            (torch.ones(()), 0.5),
            "returned a tuple. Return the mean",
        ),  # as frameworks do that log an accuracy beside the loss
        ({"loss": torch.ones(())}, "returned a dict. Return the mean"),
        (WeightedLoss(torch.ones(()), OUTPUTS), r"of shapes \(\) and \(16, 3\). Return two scalars"),
    ],
)
def test_what_is_neither_a_mean_nor_a_weighted_loss_is_refused(returned: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trained(tmp_path / "run", recipe(lambda *_: returned))


OF_CLASSES = torch.tensor([1.0, 2.0, 5.0])
PIXELS = (OUTPUTS.view(4, 4, 3).transpose(1, 2), OUTPUTS.softmax(1).view(4, 4, 3).transpose(1, 2))
ALIKE: dict[str, tuple[Any, Tensor, Tensor]] = {
    "plain": (nn.CrossEntropyLoss(OF_CLASSES), OUTPUTS, TARGETS),
    "ignored": (nn.CrossEntropyLoss(OF_CLASSES), OUTPUTS, MASKED),
    "ignored by a class": (nn.CrossEntropyLoss(OF_CLASSES, ignore_index=1), OUTPUTS, TARGETS),
    "bytes": (nn.CrossEntropyLoss(OF_CLASSES), OUTPUTS, TARGETS.byte()),
    "smoothed": (nn.CrossEntropyLoss(OF_CLASSES, label_smoothing=0.1), OUTPUTS, TARGETS),
    "of pixels": (nn.CrossEntropyLoss(OF_CLASSES), OUTPUTS.view(4, 4, 3).transpose(1, 2), MASKED.view(4, 4)),
    "probabilities": (nn.CrossEntropyLoss(OF_CLASSES), OUTPUTS, OUTPUTS.softmax(1)),
    "probabilities of pixels": (nn.CrossEntropyLoss(OF_CLASSES), *PIXELS),
    "of one sample": (nn.CrossEntropyLoss(OF_CLASSES), OUTPUTS[0], TARGETS[0]),
    "logarithms": (nn.NLLLoss(OF_CLASSES), OUTPUTS.log_softmax(1), TARGETS),
    "in bf16": (nn.CrossEntropyLoss(OF_CLASSES.bfloat16()), OUTPUTS.bfloat16(), TARGETS),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_sum_by_its_weight_is_what_pytorch_computes(name: str) -> None:
    loss, outputs, targets = ALIKE[name]

    total, weight = compute_loss(loss, outputs, targets)

    assert weight is not None
    torch.testing.assert_close(
        (total / weight).float(), loss(outputs, targets).float(), rtol=0.01 if name == "in bf16" else 1e-5, atol=0
    )


def test_of_a_label_that_is_no_class_and_of_targets_that_are_no_tensor_pytorch_says_why() -> None:
    loss: Any = nn.CrossEntropyLoss(OF_CLASSES)

    with pytest.raises(IndexError, match="Target 5 is out of bounds"):
        compute_loss(loss, OUTPUTS, TARGETS + 5)
    with pytest.raises(TypeError, match="must be Tensor, not list"):
        compute_loss(loss, OUTPUTS, [0] * 16)


def test_a_traced_replay_computes_a_loss_with_class_weights_as_the_run_did(tmp_path: Path) -> None:
    def traced(training: Training) -> None:
        write_record(training.run.replay_request, ReplayRequest(end_step=4, trace_from=1))
        set_up_replay(training)

    made: dict[str, Any] = {"train__max_steps": 4, "train__micro_batch_size": 2}
    run = trained(tmp_path / "run", recipe(LOSSES["of PyTorch"]), **made)
    again = trained(tmp_path / "again", recipe(LOSSES["of PyTorch"]), change=traced, **made)

    assert all(map(torch.equal, run.state.model.parameters(), again.state.model.parameters()))
