"""Keys that are easy to offer and easy to ignore: each changes what is trained with, and what cannot be is refused."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_hpc.base.errors import CheckpointError, ConfigError, NotSavedError
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.run.checkpoints.shards import ShardRecord
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import DataSpec, EvalSpec, ResourcesSpec, RunSpec, TrainSpec
from ddp_hpc.train.data.loader import make_loader
from ddp_hpc.train.data.sample_order import Position, RankSampler, SampleOrder
from ddp_hpc.train.engine.training import configure_torch
from ddp_hpc.train.process_group import Group, RankInfo, choose_device
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state.checkpoint import Checkpointer
from ddp_hpc.train.state.training_state import TrainingState
from tests.distributed.processes import in_group
from tests.strange.one_process import trained
from tests.strange.walks import Case, begin, close, in_plain_torch, sample_ids, walk, weights
from tests.unit.made_state import alone, make_checkpointers, make_state


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


class SeesOrder(nn.Module):
    """A convolution that notes in which order its inputs come."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(16, 2)
        self.seen: set[bool] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.seen.add(images.is_contiguous(memory_format=torch.channels_last))
        return self.last(self.conv(images).flatten(1))  # type: ignore[no-any-return]  # a Tensor


def a_recipe(
    model: nn.Module | None = None, *, optimizer: Callable[..., torch.optim.Optimizer] | None = None
) -> Recipe:
    data = TensorDataset(torch.randn(8, 3, 4, 4), torch.arange(8) % 2)
    return Recipe(
        model=model or SeesOrder(), train_data=data, eval_data=data, loss=nn.CrossEntropyLoss(), optimizer=optimizer
    )


@pytest.mark.parametrize("is_asked", [False, True])
def test_channels_last_orders_weights_and_inputs(is_asked: bool, tmp_path: Path) -> None:
    model = SeesOrder()

    walk(alone(), Case(recipe=lambda: a_recipe(model), train={"channels_last": is_asked, "epochs": 1}), tmp_path)

    assert model.seen == {is_asked}
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last) is is_asked


@pytest.mark.long
@pytest.mark.parametrize("is_asked", [False, True])
def test_compile_wraps_what_the_loop_calls_and_not_what_is_saved(is_asked: bool, tmp_path: Path) -> None:
    t = begin(Case(recipe=a_recipe, train={"compile": is_asked}), alone(), tmp_path)
    close(t)

    assert hasattr(t.model, "_orig_mod") is is_asked
    assert type(t.state.model) is SeesOrder


@pytest.mark.long
def test_a_compiled_model_is_trained_as_the_plain_one(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 2))

    case = Case(recipe=lambda: a_recipe(model(), optimizer=lambda it, lr: torch.optim.SGD(it.parameters(), lr=lr)))

    compiled = walk(alone(), replace(case, train={"compile": True, "epochs": 1}), tmp_path)

    plain = in_plain_torch(case, sample_ids(tmp_path, 1)).state_dict()
    assert weights(compiled).keys() == plain.keys()
    for name, value in weights(compiled).items():
        torch.testing.assert_close(value, plain[name])


@pytest.mark.parametrize("is_asked", [False, True])
def test_deterministic_allows_only_deterministic_algorithms(is_asked: bool) -> None:
    configure_torch(RunSpec(name="settings", train=TrainSpec(deterministic=is_asked)))

    assert torch.are_deterministic_algorithms_enabled() is is_asked
    assert torch.backends.cudnn.benchmark is not is_asked


@pytest.mark.parametrize(
    ("asked", "precision", "in_convolutions", "words"),
    [
        (None, "highest", True, "matrix products at precision 'highest' (TF32 off), TF32 on in convolutions"),
        ("highest", "highest", False, "at precision 'highest' (TF32 off), TF32 off in convolutions"),
        ("high", "high", True, "at precision 'high' (TF32 on), TF32 on in convolutions"),
        ("medium", "medium", True, "at precision 'medium' (TF32 on), TF32 on in convolutions"),
    ],
)
def test_tf32_is_as_pytorch_has_it_unless_asked_otherwise_and_the_log_says_which_holds(
    asked: str | None,
    precision: str,
    in_convolutions: bool,
    *,
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    case = Case(recipe=a_recipe, train={"matmul_precision": asked, "deterministic": True})

    configure_torch(case.spec())
    close(begin(case, alone(), tmp_path))

    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.allow_tf32 is in_convolutions
    assert f"{words}; `train.matmul_precision` changes both" in caplog.text


class Unused(nn.Linear):
    def __init__(self) -> None:
        super().__init__(48, 2)
        self.never = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1))


def _walk_with_unused(group: Group, folder: Path, *, is_asked: bool) -> str:
    keys = {"find_unused_parameters": is_asked, "epochs": 1, "global_batch_size": 4}
    try:
        walk(group, Case(recipe=lambda: a_recipe(Unused()), train=keys), folder)
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("is_asked", [False, True])
def test_unused_parameters_are_looked_for_where_asked(is_asked: bool, tmp_path: Path) -> None:
    said = in_group(2, lambda group: _walk_with_unused(group, tmp_path, is_asked=is_asked), tmp_path / "ranks")

    if is_asked:
        assert said == ["trained"] * 2
    else:
        assert all("`train.find_unused_parameters=true`" in text for text in said)


def test_batch_norm_is_not_synchronised_on_cpus_and_the_error_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"`train\.sync_batch_norm` is true, but .* GPUs only"):
        RunSpec(name="settings", train=TrainSpec(sync_batch_norm=True), resources=ResourcesSpec(workers_per_node=2))


def test_evaluations_come_after_so_many_epochs_and_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class EveryTwo(Case):
        def spec(self, world_size: int = 1) -> RunSpec:
            return replace(super().spec(world_size), eval=EvalSpec(every_epochs=2, batch_size=8))

    caplog.set_level(logging.INFO)
    walk(alone(), EveryTwo(recipe=a_recipe, train={"epochs": 5}), tmp_path)

    told = [text for text in caplog.messages if text.startswith("evaluation at step")]
    assert [text.split()[3] for text in told] == ["4", "8", "10"]


@pytest.mark.parametrize("number", [1, 3])
def test_loaders_prepare_so_many_micro_batches_ahead(number: int) -> None:
    order = SampleOrder(num_samples=8, seed=0, global_batch_size=4, micro_batch_size=4, world_size=1)
    walk_of_data = RankSampler(order=order, start=Position(), total_steps=2, rank=0)

    loader = make_loader(
        TensorDataset(torch.zeros(8)),
        walk_of_data,
        data=DataSpec(num_workers=1, prefetch_factor=number),
        pin_memory=False,
    )

    assert loader.prefetch_factor == number


@pytest.mark.parametrize(
    ("place", "asked", "visible", "device"),
    [
        ((1, 2), 0, 8, "cpu"),
        ((0, 1), 1, 1, "cuda:0"),
        ((3, 4), 4, 4, "cuda:3"),
        ((3, 4), 4, 8, "cuda:3"),
        ((3, 4), 4, 1, "cuda:0"),  # Slurm shows each task its own GPU, as number 0
    ],
)
def test_a_worker_takes_the_gpu_of_its_local_rank_or_the_only_one_it_sees(
    place: tuple[int, int], asked: int, visible: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)

    assert choose_device(a_place(*place), asked, may_be_alone=True) == torch.device(device)


@pytest.mark.parametrize(("visible", "found"), [(0, "sees none here"), (2, "sees 2 GPUs here")])
def test_too_few_gpus_are_refused(visible: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)

    with pytest.raises(ConfigError, match=f"PyTorch .* {found}"):
        choose_device(a_place(0, 4), 4)


def a_place(local_rank: int, local_world_size: int) -> RankInfo:
    return RankInfo(
        rank=local_rank,
        local_rank=local_rank,
        world_size=local_world_size,
        local_world_size=local_world_size,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
    )


class WithLoss(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Odd(SeesOrder):
    """Holds a tensor that a checkpoint could not bring back."""

    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.register_buffer("odd", odd)


def _optimizer_of_more(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 2))], lr=lr)


REFUSED: dict[str, tuple[Callable[[], Recipe], str]] = {
    "an optimizer parameter outside the model": (
        lambda: a_recipe(optimizer=_optimizer_of_more),
        r"a parameter of shape \(3, 2\) \(in its group 0\) that is not in `Recipe\.model`",
    ),
    "a loss parameter outside the model": (
        lambda: replace(a_recipe(), loss=WithLoss()),
        r"`Recipe\.loss` has the parameter 'scale', which is not in `Recipe\.model`",
    ),
    "complex128": (
        lambda: a_recipe(Odd(torch.zeros(2, dtype=torch.complex128))),
        r"`model/odd` is a tensor of torch\.complex128",
    ),
    "sparse": (lambda: a_recipe(Odd(torch.eye(2).to_sparse())), r"`model/odd` is a tensor .* torch\.sparse_coo"),
    "expanded": (lambda: a_recipe(Odd(torch.zeros(1).expand(4))), r"`model/odd` was made by `expand`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_saved_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    recipe, words = REFUSED[name]

    with pytest.raises(ConfigError, match=words):
        begin(Case(recipe=recipe), alone(), tmp_path)


def test_a_save_that_failed_is_tried_again_when_the_run_is_told_to_stop_there(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (checkpointer,) = make_checkpointers(run)
    state = make_state(steps=3)
    aside = run.checkpoints.with_name("aside")
    run.checkpoints.rename(aside)
    run.checkpoints.touch()  # a file in the place of the directory: nothing can be written

    checkpointer.save(state)
    checkpointer.wait()
    run.checkpoints.unlink()
    aside.rename(run.checkpoints)
    before = checkpoint_names.committed_steps(run)
    checkpointer.save_and_wait(state)

    assert before == []
    assert checkpoint_names.committed_steps(run) == [3]


class Slow(TensorDataset):
    """Samples that take a moment."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)  # type: ignore[no-untyped-call]  # PyTorch's


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_run_whose_saves_fail_for_too_long_makes_one_more_before_it_ends(
    is_mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, last_tries = RunDir(tmp_path / "run"), list[int]()
    save_and_wait, write_shard = Checkpointer.save_and_wait, checkpoint_store.write_shard

    def write(*args: Any, **more: Any) -> ShardRecord:
        if is_mended and last_tries:
            return write_shard(*args, **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    def noted(one: Checkpointer, state: TrainingState, **more: Any) -> None:
        last_tries.append(state.position.step)
        save_and_wait(one, state, **more)

    monkeypatch.setattr(Checkpointer, "save_and_wait", noted)
    monkeypatch.setattr(checkpoint_store, "write_shard", write)
    recipe = replace(a_recipe(), train_data=Slow(torch.randn(8, 3, 4, 4), torch.arange(8) % 2))
    keys: dict[str, Any] = {"checkpoint__max_failing_s": 1, "checkpoint__every_steps": 20, "train__max_steps": 90}
    if is_mended:
        trained(run.path, recipe, **keys)
        assert len(last_tries) == 2
        assert checkpoint_names.committed_steps(run)[-1] == last_tries[-1] == 90
        return
    ends = r"No space left on device. None has been committed since .*, so the run ends \(`checkpoint.max_failing_s`\)"
    with pytest.raises(NotSavedError, match=ends):
        trained(run.path, recipe, **keys)
    assert len(last_tries) == 1


def test_a_save_that_fails_again_fails_the_stop(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (checkpointer,) = make_checkpointers(run)
    state = make_state(steps=3)
    run.checkpoints.rename(run.checkpoints.with_name("aside"))
    run.checkpoints.touch()

    checkpointer.save(state)

    with pytest.raises(CheckpointError, match="step 3 could not be committed"):
        checkpointer.save_and_wait(state)
