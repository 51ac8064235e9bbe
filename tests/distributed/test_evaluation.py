"""Evaluation counts every held-out sample once, whatever the number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.spec import DataSpec, EvalSpec, RunSpec
from ddp_hpc.train.engine.evaluate import Evaluator
from ddp_hpc.train.engine.precision import Precision
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state import rng
from tests.distributed.processes import in_group
from tests.distributed.trial_recipe import NoisyImages

NUM_SAMPLES = 31
WORLD_SIZES = (1, 2, 3)


def index_of(_: Tensor, targets: Tensor) -> Tensor:
    """Score a sample by its index, so that the mean tells which samples were counted, and how often."""
    return targets.double()


def is_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets % 3).float()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets % 3)


def a_recipe(num_samples: int = NUM_SAMPLES) -> Recipe:
    """Return a model with batch norm and dropout, and held-out rows whose target is their index."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    rows = TensorDataset(torch.randn(num_samples, 5), torch.arange(num_samples))
    metrics = {"accuracy": is_right, "index": index_of}
    return Recipe(model=model, train_data=rows, eval_data=rows, loss=loss, metrics=metrics)


def an_evaluator(group: Group, recipe: Recipe, *, batch_size: int = 4, num_workers: int = 0) -> Evaluator:
    spec = RunSpec(name="held-out", eval=EvalSpec(batch_size=batch_size), data=DataSpec(num_workers=num_workers))
    evaluator = Evaluator(recipe, spec, group, Precision("fp32", group.device))
    evaluator.start(recipe.model)
    return evaluator


def _evaluate(group: Group, *, num_samples: int = NUM_SAMPLES, **settings: Any) -> dict[str, float]:
    recipe = a_recipe(num_samples)
    with torch.no_grad():
        next(recipe.model.buffers()).add_(group.rank_info.rank)  # batch norm's mean: only rank zero's may count
    return an_evaluator(group, recipe, **settings).evaluate(recipe.model)


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, float]]]:
    """What every rank has found out, by the number of ranks."""
    folder = tmp_path_factory.mktemp("evaluations")
    return {size: in_group(size, _evaluate, folder / str(size)) for size in WORLD_SIZES}


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.randn(4),
    "with gaps": lambda: torch.randn(8)[::2],
    "some columns": lambda: torch.randn(4, 6)[:, :3],
    "turned": lambda: torch.randn(4, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "empty": lambda: torch.zeros(0, 3),
    "one number": lambda: torch.randn(()),
    "truths": lambda: torch.randn(5) > 0,
    "short": lambda: torch.randint(-9, 9, (3,), dtype=torch.int16),
    "bf16": lambda: torch.randn(3).bfloat16(),
}


def _evaluate_with_buffers(group: Group) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Return the buffers before and after, and the memory around one of them, which is the rank's own."""
    recipe, rank = a_recipe(), group.rank_info.rank
    torch.manual_seed(rank)
    for name, make in BUFFERS.items():
        recipe.model.register_buffer(name, make())
    before = {name: recipe.model.get_buffer(name).clone() for name in BUFFERS}
    around = torch.full((8,), float(rank))
    recipe.model.register_buffer("every other", around[::2])
    an_evaluator(group, recipe).evaluate(recipe.model)
    return before, {name: recipe.model.get_buffer(name).clone() for name in BUFFERS}, around.tolist()


def test_buffers_with_gaps_in_memory_are_those_of_rank_zero_on_all_ranks(tmp_path: Path) -> None:
    (expected, first, _), (_, second, around) = in_group(2, _evaluate_with_buffers, tmp_path)

    for name in BUFFERS:
        assert torch.equal(first[name], expected[name]), name
        assert torch.equal(second[name], expected[name]), name
    assert around == [0.0, 1.0] * 4, "what lies between the buffer's numbers was overwritten"


def _evaluate_with_own_buffer(group: Group) -> list[float]:
    recipe = a_recipe()
    recipe.model.register_buffer("seen", torch.full((2,), float(group.rank_info.rank)))
    recipe.model._ddp_params_and_buffers_to_ignore = ["seen"]  # type: ignore[assignment]  # as DDP's manual says
    an_evaluator(group, recipe).evaluate(recipe.model)
    return recipe.model.get_buffer("seen").tolist()


def test_a_buffer_that_each_rank_keeps_for_itself_is_left_alone(tmp_path: Path) -> None:
    assert in_group(2, _evaluate_with_own_buffer, tmp_path) == [[0.0, 0.0], [1.0, 1.0]]


class WithCriterion(nn.Module):
    """A model that has its loss, with batch norm, as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.criterion = nn.Linear(5, 3), nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        return outputs


def _evaluate_average_with_criterion(group: Group) -> tuple[bool, bool]:
    recipe, model = a_recipe(), WithCriterion()
    recipe = replace(recipe, model=model, loss=lambda outputs, targets: loss(model.criterion(outputs), targets))
    before = copy.deepcopy(model.state_dict())
    average = copy.deepcopy(model)
    evaluator = an_evaluator(group, recipe)
    evaluator.start(average)
    evaluator.evaluate(average)
    is_same = all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    return is_same, model.criterion.training


def test_a_criterion_in_the_model_learns_nothing_when_the_average_is_evaluated(tmp_path: Path) -> None:
    assert in_group(1, _evaluate_average_with_criterion, tmp_path) == [(True, True)]


def _messages_of(group: Group, num_buffers: int) -> int:
    """Return how many collectives an evaluation takes with so many more buffers of 1 MiB."""
    recipe = a_recipe()
    for number in range(num_buffers):
        recipe.model.register_buffer(f"more {number}", torch.ones(256 << 10))  # 1 MiB
    world: Any = torch.distributed.group.WORLD
    num_collectives: Callable[[], int] = world._get_sequence_number_for_group
    before = num_collectives()
    an_evaluator(group, recipe).evaluate(recipe.model)
    return num_collectives() - before


def test_many_buffers_are_sent_in_a_few_messages_of_bounded_size(tmp_path: Path) -> None:
    (first, second) = in_group(2, lambda group: _messages_of(group, 70), tmp_path)
    (fewer, _) = in_group(2, lambda group: _messages_of(group, 10), tmp_path)

    assert first == second
    assert first - fewer == 2  # 80 MiB take three messages of 32 MiB, 20 one


def in_plain_torch() -> dict[str, float]:
    recipe = a_recipe()
    model = recipe.model.eval()
    assert recipe.eval_data is not None
    inputs, targets = recipe.eval_data[torch.arange(NUM_SAMPLES)]
    with torch.no_grad():
        outputs = model(inputs)
    scores = {name: metric(outputs, targets).double().mean().item() for name, metric in recipe.metrics.items()}
    return {"loss": loss(outputs, targets).item(), **scores}


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_metrics_are_those_of_the_whole_set_at_once(evaluations: dict[int, list[dict[str, float]]], size: int) -> None:
    expected = in_plain_torch()

    for found in evaluations[size]:
        assert found == pytest.approx(expected, rel=1e-6)
        assert (found["accuracy"], found["index"]) == (expected["accuracy"], expected["index"])


def test_each_sample_counts_once_when_the_set_does_not_divide(evaluations: dict[int, list[dict[str, float]]]) -> None:
    means = {found["index"] for ranks in evaluations.values() for found in ranks}

    assert means == {sum(range(NUM_SAMPLES)) / NUM_SAMPLES}


@pytest.mark.parametrize("size", [2, 3])
def test_padding_as_usual_would_be_found_out(size: int) -> None:
    """The guard of the test above: PyTorch's own sampler counts some samples twice."""
    rows = list(range(NUM_SAMPLES))

    samplers = [DistributedSampler(rows, num_replicas=size, rank=rank, shuffle=False) for rank in range(size)]  # type: ignore[arg-type,var-annotated]  # a range has a length
    padded = [int(index) for sampler in samplers for index in sampler]

    assert sum(padded) / len(padded) != sum(rows) / len(rows)


def test_all_ranks_find_the_same(evaluations: dict[int, list[dict[str, float]]]) -> None:
    assert all(found == ranks[0] for ranks in evaluations.values() for found in ranks)


def test_a_set_with_fewer_samples_than_ranks_is_evaluated(tmp_path: Path) -> None:
    ranks = in_group(3, partial(_evaluate, num_samples=2), tmp_path)

    assert [found["index"] for found in ranks] == [0.5] * 3


@pytest.mark.parametrize("settings", [{"batch_size": 31}, {"batch_size": 1}, {"num_workers": 2}], ids=str)
def test_metrics_do_not_depend_on_how_samples_are_loaded(settings: dict[str, Any], tmp_path: Path) -> None:
    (found,) = in_group(1, partial(_evaluate, **settings), tmp_path)

    assert found == pytest.approx(in_plain_torch(), rel=1e-6)


class Restless(nn.Linear):
    """A layer that draws in evaluation too."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(inputs, training=True))


def _evaluate_twice(group: Group) -> tuple[list[dict[str, float]], bool, bool]:
    """Evaluate with samples and a model that draw from the generators; tell what was found, and what was left alone."""
    images = NoisyImages(NUM_SAMPLES, 0.0)
    model = nn.Sequential(nn.Flatten(), Restless(36, 3))
    evaluator = an_evaluator(group, Recipe(model=model, train_data=images, eval_data=images, loss=loss))
    before = rng.capture(group.device)
    found = [evaluator.evaluate(model), evaluator.evaluate(model)]
    after = rng.capture(group.device)
    return found, all(torch.equal(before[name], after[name]) for name in before), model.training


def test_an_evaluation_leaves_the_training_as_it_was_and_can_be_repeated(tmp_path: Path) -> None:
    ((found, generators_are_as_before, is_training),) = in_group(1, _evaluate_twice, tmp_path)

    assert found[0] == found[1]
    assert generators_are_as_before
    assert is_training


def _evaluate_wrongly(group: Group) -> str:
    recipe = replace(a_recipe(), metrics={"mean": lambda outputs, _: outputs.mean()})
    with pytest.raises(ConfigError) as raised:
        an_evaluator(group, recipe).evaluate(recipe.model)
    return str(raised.value)


def test_a_metric_that_averages_by_itself_is_refused(tmp_path: Path) -> None:
    (told,) = in_group(1, _evaluate_wrongly, tmp_path)

    assert told.startswith("Metric 'mean' returned shape () for 4 samples, but must return one value per sample")


def _evaluate_nothing(group: Group) -> dict[str, float]:
    recipe = replace(a_recipe(), eval_data=None)
    return an_evaluator(group, recipe).evaluate(recipe.model)


def test_a_recipe_without_held_out_samples_has_no_metrics(tmp_path: Path) -> None:
    assert in_group(1, _evaluate_nothing, tmp_path) == [{}]
