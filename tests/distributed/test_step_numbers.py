"""Norm of the gradients, loss scale, skipped updates and tokens in the metrics; and that to write them changes no bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.spec import LogSpec, ResourcesSpec, RunSpec, TrainSpec
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.training import Training, assemble_training
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.stop import StopFlag
from tests.distributed.processes import in_group
from tests.strange.one_process import trained


def recipe(**more: Any) -> Recipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    data = TensorDataset(torch.randn(41, 5), torch.arange(41) % 3)
    return Recipe(model=model, train_data=data, loss=nn.CrossEntropyLoss(), **more)


def lines_of(training: Training) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(training.run.metrics) if line["kind"] == "train"]


def weights(training: Training) -> list[Tensor]:
    return [one.detach() for one in training.state.model.parameters()]


def noted(training: Training, norms: list[float]) -> None:
    """Have each update note the norm of the gradients that it uses, computed in the plainest way."""

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        squares = [one.grad.double().square().sum() for group in optimizer.param_groups for one in group["params"]]
        norms.append(math.sqrt(sum(squares)))

    training.state.optimizer.register_step_pre_hook(note)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_norm_is_that_of_the_gradients_which_the_optimizer_uses_and_costs_no_bit(
    precision: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {
        "train__precision": precision,
        "train__micro_batch_size": 2,
        "log__every_steps": 3,
        "train__max_steps": 10,
    }
    norms: list[float] = []

    without = trained(tmp_path / "without", recipe(), **keys)
    run = trained(tmp_path / "with", recipe(), change=lambda t: noted(t, norms), log__grad_norm=True, **keys)

    assert [line["step"] for line in lines_of(run)] == [3, 6, 9, 10]
    assert [line["grad_norm"] for line in lines_of(run)] == pytest.approx([norms[at] for at in (2, 5, 8, 9)], rel=1e-5)
    assert all(map(torch.equal, weights(run), weights(without)))
    assert "grad_norm" not in lines_of(without)[0]
    assert [line["loss"] for line in lines_of(run)] == [line["loss"] for line in lines_of(without)]


def test_with_clipping_the_norm_before_it_is_written_unasked(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", recipe(), log__grad_norm=True, train__max_steps=1)
    clipped = trained(tmp_path / "clipped", recipe(), train__grad_clip_norm=1e-3, train__max_steps=1)
    scaled = trained(
        tmp_path / "scaled", recipe(), train__grad_clip_norm=1e-3, train__max_steps=1, train__precision="fp16"
    )

    (norm,) = (line["grad_norm"] for line in lines_of(plain))
    assert [line["grad_norm"] for line in lines_of(clipped)] == pytest.approx([norm])
    assert [line["grad_norm"] for line in lines_of(scaled)] == pytest.approx([norm], rel=1e-2)


def test_fp16_writes_its_loss_scale_and_how_many_updates_it_skipped_since_the_line_before(tmp_path: Path) -> None:
    def overflow(training: Training) -> None:
        training.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    run = trained(
        tmp_path / "run", recipe(), change=overflow, train__precision="fp16", train__max_steps=12, log__every_steps=4,
        log__grad_norm=True,
    )  # fmt: skip

    scales = [line["loss_scale"] for line in lines_of(run)]
    skipped = [line["skipped_updates"] for line in lines_of(run)]
    assert skipped[0] == 4
    assert [2.0 ** (127 - sum(skipped[: number + 1])) for number in range(3)] == scales
    assert all(math.isfinite(one) for weight in weights(run) for one in weight.flatten().tolist())


class Poisoned(Dataset[Any]):
    """Samples of which one is NaN."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((5,), math.nan if index == 7 else 1.0), index % 3


def test_updates_that_the_loop_itself_skips_are_counted(tmp_path: Path) -> None:
    made = Recipe(model=nn.Linear(5, 3), train_data=Poisoned(), loss=nn.CrossEntropyLoss())

    run = trained(tmp_path / "run", made, train__on_nonfinite="skip", train__max_steps=10, log__every_steps=5)

    assert sum(line["skipped_updates"] for line in lines_of(run)) == 1


def test_what_was_skipped_before_a_resume_between_two_lines_is_null_not_zero(tmp_path: Path) -> None:
    made = Recipe(model=nn.Linear(5, 3), train_data=Poisoned(), loss=nn.CrossEntropyLoss())
    keys: dict[str, Any] = {"train__on_nonfinite": "skip", "log__every_steps": 5}

    trained(tmp_path / "run", made, train__max_steps=5, **keys)
    trained(tmp_path / "run", made, train__max_steps=7, **keys)
    run = trained(tmp_path / "run", made, train__max_steps=15, **keys)

    assert [line["step"] for line in lines_of(run)] == [5, 7, 10, 15]
    assert [line["skipped_updates"] is None for line in lines_of(run)] == [False, False, True, False]


def test_without_fp16_clipping_and_skipping_a_line_has_what_it_always_had(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", recipe(), train__max_steps=1)

    assert [*lines_of(run)[0]] == ["kind", "step", "epoch", "loss", "lr", "samples_per_s", "at"]


def counted(group: Group, folder: Path, tokens: Any) -> list[int | None]:
    """Train three windows and a short one on two ranks; return the tokens of each line."""
    run = RunDir(folder / "run")
    if group.rank_info.is_rank_zero:
        run.path.mkdir()
        run.config.write_text("name: run\n")
        ownership.claim_run(run, 0)
    group.barrier_through_store("made")
    spec = RunSpec(
        name="run",
        runs_dir=str(folder),
        resources=ResourcesSpec(workers_per_node=2),
        train=TrainSpec(epochs=1, global_batch_size=12, micro_batch_size=3, lr=0.1),
        log=LogSpec(every_steps=2),
    )
    training = assemble_training(spec, recipe(tokens=tokens), run, group, attempt=0, stop=StopFlag(run.stop_request))
    found: list[int | None] = []
    take = training.numbers.take_num_tokens

    def take_noted(*given: Any) -> int | None:
        found.append(take(*given))
        return found[-1]

    training.numbers.take_num_tokens = take_noted  # type: ignore[assignment,method-assign]
    train(training)
    training.recorder.close()
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(512, [24 * 512, 17 * 512], id="of a sample", marks=pytest.mark.long),
        pytest.param(lambda batch: batch[0].numel(), [24 * 5, 17 * 5], id="of a batch"),
        pytest.param(None, [None, None], id="not said", marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_all_ranks_and_micro_batches(
    tokens: Any, expected: list[int | None], tmp_path: Path
) -> None:
    for found in in_group(2, lambda group: counted(group, tmp_path, tokens), tmp_path / "ranks"):
        assert found == expected


def test_tokens_a_second_are_in_the_metrics_and_in_the_progress(tmp_path: Path) -> None:
    def set_clock(training: Training) -> None:
        training.recorder._clock = lambda: float(training.state.position.step)

    run = trained(tmp_path / "run", recipe(tokens=10), change=set_clock, train__max_steps=5)

    progress = read_progress(run.run)
    assert [line["tokens_per_s"] for line in lines_of(run)[1:]] == pytest.approx([4 * 10.0] * 4)
    assert progress is not None
    assert progress.tokens_per_s == pytest.approx(40.0)


@pytest.mark.parametrize("wrong", [0, -5, True, 2.5, "many"])
def test_tokens_that_are_neither_a_number_nor_a_function_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"`Recipe.tokens` is .*, but it must be a number of tokens above zero"):
        recipe(tokens=wrong)
