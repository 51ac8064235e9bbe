"""Beginning from somebody's weights, with frozen parts; batches that a recipe collates itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.run.spec import LrScheduleSpec
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.recipe import Recipe
from tests.strange.one_process import trained


def network(num_classes: int) -> nn.Sequential:
    torch.manual_seed(num_classes)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))


def a_recipe(model: nn.Module, num_classes: int = 2) -> Recipe:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.arange(24) % num_classes)
    return Recipe(model=model, train_data=data, eval_data=data, loss=nn.functional.cross_entropy)


def frozen_but_for_its_head(num_classes: int) -> nn.Sequential:
    model = network(num_classes)
    for part in model[:-1]:
        part.requires_grad_(False)
    return model


def weights(training: Training) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in training.state.model.state_dict().items()}


def test_a_head_is_trained_on_the_frozen_body_of_another_run_and_resumes_without_it(tmp_path: Path) -> None:
    """The other run is gone by the resume, which so shows that weights are taken at step 0 alone."""
    keys: dict[str, Any] = {"train__init_from": "body", "train__init_strict": False, "train__ema_decay": 0.5}
    keys |= {"lr_schedule": LrScheduleSpec(name="constant")}
    body = weights(trained(tmp_path / "body", a_recipe(network(2))))

    unbroken = trained(tmp_path / "head", a_recipe(frozen_but_for_its_head(3), 3), **keys, train__max_steps=6)
    part = trained(tmp_path / "parts", a_recipe(frozen_but_for_its_head(3), 3), **keys, train__max_steps=2)
    (tmp_path / "body").rename(tmp_path / "gone")
    resumed = trained(tmp_path / "parts", a_recipe(frozen_but_for_its_head(3), 3), **keys, train__max_steps=6)

    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(weights(unbroken)[name], body[name]), name
    assert part.state.position.step == 2
    assert not torch.equal(weights(unbroken)["3.weight"], weights(part)["3.weight"])
    assert not torch.equal(weights(unbroken)["3.weight"], network(3).state_dict()["3.weight"])
    assert all(torch.equal(weights(resumed)[name], one) for name, one in weights(unbroken).items())


@pytest.mark.parametrize("kind", ["safetensors", "pt", "wrapped", "checkpoint", "run"])
def test_weights_come_from_files_and_runs_alike(kind: str, tmp_path: Path) -> None:
    source = trained(tmp_path / "source", a_recipe(network(2)))
    wanted = weights(source)
    (step,) = checkpoint_names.committed_steps(source.run)
    checkpoint = checkpoint_names.checkpoint_path(source.run, step)
    path = {"checkpoint": checkpoint, "run": source.run.path}.get(kind, tmp_path / f"weights.{kind}")
    if kind == "safetensors":
        checkpoint_store.export_weights(checkpoint, path)
    elif kind == "pt":
        torch.save(wanted, path)
    elif kind == "wrapped":
        torch.save({"epoch": 3, "state_dict": {f"module.{name}": one for name, one in wanted.items()}}, path)
    taken: list[dict[str, Tensor]] = []

    class Seen(nn.Sequential):
        """Keeps the weights that its first forward of the training finds."""

        def forward(self, rows: Tensor) -> Any:
            if self.training and not taken:
                taken.append({name: one.clone() for name, one in self.state_dict().items()})
            return super().forward(rows)  # type: ignore[no-untyped-call]  # torch's

    trained(tmp_path / "tuned", a_recipe(Seen(*network(2))), train__init_from=str(path))

    assert all(torch.equal(taken[0][name], one) for name, one in wanted.items())


class Trap:
    """What a pickle can do: run code as it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("sprung"),)


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Trap()}, tmp_path / "weights.pt")

    with pytest.raises(ConfigError, match="Only tensors are read, never code"):
        trained(tmp_path / "run", a_recipe(network(2)), train__init_from="weights.pt")

    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"0.weight": torch.ones(8, 3)}, r"missing: 0\.bias, 1\.bias, .* and 3 more\. .*`train\.init_strict=false`"),
        ({**network(3).state_dict()}, r"of another shape: 3\.bias \(3,\) instead of \(2,\), 3\.weight "),
        ([1, 2], "holds no weights by name"),
        (None, "but neither the file"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_differs(content: Any, told: str, tmp_path: Path) -> None:
    if content is not None:
        torch.save(content, tmp_path / "weights.pt")

    with pytest.raises(ConfigError, match=told):
        trained(tmp_path / "run", a_recipe(network(2)), train__init_from=str(tmp_path / "weights.pt"))


def test_a_safetensors_file_of_a_dtype_that_pytorch_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    table = json.dumps({"0.weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(len(table).to_bytes(8, "little") + table + bytes(1))

    with pytest.raises(ConfigError, match=r"init_from` is '.*weights\.safetensors'.* dtype 'F4'.* Copy it again"):
        trained(tmp_path / "run", a_recipe(network(2)), train__init_from=str(path))


class Sentences(Dataset[tuple[Tensor, int]]):
    """Rows of numbers, each of another length: torch's own collation refuses them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1 + index % 5,), float(index)) + 0.1 * torch.rand(1), index


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.linear(batch["rows"].sum(1, keepdim=True) / batch["lengths"].unsqueeze(1))


def test_a_recipes_own_collation_makes_the_batches_of_training_and_evaluation(tmp_path: Path) -> None:
    """With loader processes and without, the same samples in the same order, and the same weights in the end."""
    ends, orders = [], []
    for num_workers in (0, 2):
        seen: list[int] = []

        def padded(samples: list[tuple[Tensor, int]]) -> Any:
            rows = [row for row, _ in samples]
            batch = {"rows": pad_sequence(rows, batch_first=True), "lengths": torch.tensor([len(row) for row in rows])}
            return batch, torch.tensor([[float(index)] for _, index in samples])

        def loss(outputs: Tensor, targets: Tensor, seen: list[int] = seen) -> Tensor:
            seen += [int(one) for one in targets.flatten()]
            return nn.functional.mse_loss(outputs, targets / 20)

        torch.manual_seed(0)
        recipe = Recipe(model=Mean(), train_data=Sentences(), eval_data=Sentences(), loss=loss, collate_fn=padded)
        training = trained(
            tmp_path / f"run-{num_workers}", recipe, data__num_workers=num_workers, train__max_steps=5, train__lr=0.001
        )
        ends.append(weights(training))
        orders.append(seen)

    assert orders[0] == orders[1]
    epoch, evaluation = orders[0][-40:-20], orders[0][-20:]
    assert sorted(epoch) == list(range(20)), "after the trial, an epoch has each sample once"
    assert epoch != list(range(20))
    assert sorted(evaluation) == list(range(20)), "and so has the evaluation"
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_weights_below_the_home_of_nobody_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"init_from` is '~nosuchuser/w\.pt', but neither the file"):
        trained(tmp_path / "run", a_recipe(network(2)), train__init_from="~nosuchuser/w.pt")
