"""The examples: their keys exist, their recipes can be made, and the documents show them as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import default_collate

from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.recipe import Recipe, build_recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRAIN_JOB = EXAMPLES / "kubeflow_trainjob.yaml"
CONFIGURATIONS = sorted({*EXAMPLES.glob("*.yaml")} - {TRAIN_JOB})
SHOWN = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block of code whose fence names the file that it is from."""


def spec_of(path: Path) -> RunSpec:
    """Return what an example asks for."""
    return resolve(path, [], {"DDP_HPC_SITE_PROFILE": ""}).spec


def some(data: Any) -> tuple[Any, Any]:
    """Return two samples, collated."""
    inputs, targets = default_collate([data[0], data[1]])
    return inputs, targets


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_an_example_has_only_keys_that_exist_and_its_files_name(path: Path) -> None:
    assert spec_of(path).name == path.stem


def test_the_published_models_of_kubeflow_trainer_take_the_train_job_as_it_is() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="`pip install kubeflow-trainer-api`")
    written = yaml.safe_load(TRAIN_JOB.read_text())

    read = models.TrainerV1alpha1TrainJob.from_dict(written)

    assert read.to_dict() == written, "the models drop a field that they do not know"


def test_the_train_job_has_only_keys_that_exist() -> None:
    args = yaml.safe_load(TRAIN_JOB.read_text())["spec"]["trainer"]["args"]

    assert resolve(None, args, {"DDP_HPC_SITE_PROFILE": ""}).spec.name == "digits"


@pytest.mark.parametrize("name", ["digits", "own_vision", "tiny_lm"])
def test_an_example_that_needs_no_files_makes_its_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its model, loss, metrics and gradients fit its data."""
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = spec_of(EXAMPLES / f"{name}.yaml")

    recipe = build_recipe(spec.recipe.target, spec.recipe.args)

    inputs, targets = some(recipe.train_data)
    outputs = recipe.model(inputs)
    recipe.loss(outputs, targets).backward()
    assert all(parameter.grad is not None for parameter in recipe.model.parameters())
    assert {tuple(metric(outputs, targets).shape) for metric in recipe.metrics.values()} == {(2,)}
    assert recipe.eval_data is not None
    assert some(recipe.eval_data)[0].shape == inputs.shape


@pytest.mark.parametrize("name", ["cifar10_resnet18", "imagenet_resnet50"])
def test_an_example_that_needs_files_names_a_model_there_is(name: str) -> None:
    args = spec_of(EXAMPLES / f"{name}.yaml").recipe.args
    with torch.device("meta"):  # shapes only
        kept = {key: value for key, value in args.items() if key not in ("dataset", "data_dir")}

        recipe = build_recipe("image_classification", {**kept, "dataset": "fake", "num_classes": 10})

    assert isinstance(recipe, Recipe)


def test_the_language_model_sees_nothing_of_what_it_foretells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    recipe = build_recipe("tiny_lm:build", {"context": 16, "width": 32})
    inputs, targets = some(recipe.train_data)
    changed = inputs.clone()
    changed[:, 9:] = 0

    outputs, outputs_of_changed = recipe.model(inputs), recipe.model(changed)

    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.allclose(outputs[:, :9], outputs_of_changed[:, :9], atol=1e-6)
    assert not torch.allclose(outputs[:, 9:], outputs_of_changed[:, 9:], atol=1e-6)


def test_the_language_models_optimizer_is_given_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    recipe = build_recipe("tiny_lm:build", {"context": 16, "width": 32})
    assert recipe.optimizer is not None

    optimizer = recipe.optimizer(recipe.model, 0.5)

    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in given} == {id(parameter) for parameter in recipe.model.parameters()}
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def shown_blocks() -> list[tuple[str, str, str]]:
    """Return (document, file, code) of every block that names its file."""
    return [
        (document.name, file, code)
        for document in sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
        if document.exists()
        for file, code in SHOWN.findall(document.read_text())
    ]


def test_documents_show_files_as_they_are() -> None:
    blocks = shown_blocks()

    stale = [(document, file) for document, file, code in blocks if code not in (ROOT / file).read_text()]

    assert stale == []
    assert {file for _, file, _ in blocks} >= {"examples/own_vision.py", "examples/tiny_lm.py"}
