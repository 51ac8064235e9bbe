"""What can only go wrong later is refused before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.recipe import Recipe
from tests.strange.one_process import trained


def nearness(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs - targets).abs().squeeze(1)


def a_recipe(**more: Any) -> Recipe:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    parts: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)),
        "train_data": data,
        "eval_data": data,
        "loss": nn.functional.mse_loss,
        "metrics": {"nearness": nearness},
    }
    return Recipe(**{**parts, **more})


def test_a_best_metric_that_no_evaluation_gives_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 'nearnes', but .* Did you mean 'nearness'\? Known: loss, nearness\."):
        trained(
            tmp_path / "run",
            a_recipe(),
            checkpoint__keep_best=1,
            checkpoint__best_metric="nearnes",
            checkpoint__best_is="highest",
        )


def test_keeping_the_best_without_held_out_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the recipe has no `eval_data`"):
        trained(tmp_path / "run", a_recipe(eval_data=None, metrics={}), checkpoint__keep_best=1)


def test_a_best_metric_without_a_direction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Set `checkpoint\.best_is` to `highest` or `lowest`\."):
        CheckpointSpec(keep_best=1, best_metric="accuracy")


@pytest.mark.parametrize(
    ("metric", "best_is", "best"),
    [("loss", None, min), ("loss", "highest", max), ("nearness", "highest", max), ("nearness", "lowest", min)],
)
def test_a_run_keeps_the_checkpoint_of_its_best_evaluation(
    metric: str, best_is: str | None, best: Any, tmp_path: Path
) -> None:
    """Four steps an epoch, five epochs; the rate is such that evaluations go up and down."""
    training = trained(
        tmp_path / "run",
        a_recipe(),
        train__max_steps=20,
        train__lr=0.05,
        checkpoint__every_steps=None,
        checkpoint__keep_last=1,
        checkpoint__keep_best=1,
        checkpoint__best_metric=metric,
        checkpoint__best_is=best_is,
    )

    values = {line["step"]: line[metric] for line in read_json_lines(training.run.metrics) if line["kind"] == "eval"}
    assert list(values) == [4, 8, 12, 16, 20]
    wanted = best(values, key=values.__getitem__)
    assert checkpoint_names.committed_steps(training.run) == sorted({wanted, 20})


@pytest.mark.parametrize("returned", [torch.tensor(1.0), 1.0])
def test_a_metric_that_is_not_one_value_a_sample_is_refused_before_the_first_step(
    returned: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="must return one value per sample"):
        trained(tmp_path / "run", a_recipe(metrics={"accuracy": lambda *_: returned}))

    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_the_trial_of_the_metrics_leaves_no_trace(tmp_path: Path) -> None:
    """Batch norm, dropout and a metric that draws numbers: the same weights come out with an evaluation and without."""
    states = []
    ways: dict[str, dict[str, Any]] = {
        "with": {"metrics": {"chance": lambda outputs, _: torch.rand(len(outputs))}},
        "without": {"eval_data": None, "metrics": {}},
    }
    for name, more in ways.items():
        training = trained(tmp_path / name, a_recipe(**more), train__max_steps=3)
        states.append(json.dumps({key: one.tolist() for key, one in training.state.model.state_dict().items()}))

    assert states[0] == states[1]


LAZY: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 1)),
    "a norm without weights": lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 1)),
}


@pytest.mark.parametrize("kind", LAZY)
def test_layers_that_wait_for_their_first_input_are_refused_with_what_to_do(tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        ConfigError, match=r"`Recipe\.model` .* '0\.\w+', .*\n.*`with torch\.no_grad\(\): model\(inputs\)`"
    ):
        trained(tmp_path / "run", a_recipe(model=LAZY[kind]()))


@pytest.mark.parametrize("kind", LAZY)
def test_layers_that_have_seen_an_input_are_trained(tmp_path: Path, kind: str) -> None:
    model = LAZY[kind]()
    with torch.no_grad():
        model(torch.randn(4, 3))

    assert trained(tmp_path / "run", a_recipe(model=model)).state.position.step == 12


def test_batch_norm_over_all_workers_is_refused_without_gpus_unless_it_is_frozen(tmp_path: Path) -> None:
    synced = nn.Sequential(nn.Linear(3, 1), nn.SyncBatchNorm(1))

    with pytest.raises(ConfigError, match=r"`Recipe\.model` has a `SyncBatchNorm`.*`train\.sync_batch_norm=true`"):
        trained(tmp_path / "run", a_recipe(model=synced))

    frozen = nn.Sequential(nn.Linear(3, 1), synced[1].eval().requires_grad_(False))
    assert trained(tmp_path / "frozen", a_recipe(model=frozen)).state.position.step == 12
