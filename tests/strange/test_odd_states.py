"""Models whose state is not a few plain tensors come back to the bit, in every world, from what ranks exchange."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.data.sample_order import Position
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.sealed_store import SealedStore
from ddp_hpc.train.state import round_trip, training_state
from ddp_hpc.train.state.checkpoint import Checkpointer
from ddp_hpc.train.state.training_state import TrainingState
from tests.distributed.processes import in_group
from tests.made_run import make_run
from tests.unit.made_state import CPU, SEED, alone


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


class MadeLate(nn.Module):
    """Has no buffer before it is used, and makes one as large as what it loads."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("cache", torch.randn(size))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.cache = torch.empty_like(state_dict[f"{prefix}cache"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ResetFirst(nn.Module):
    """Clears its own weight before it reads the saved one, and takes that transposed and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.zero_()
            self.weight.copy_(state_dict[f"{prefix}weight"].t())
            self.weight.copy_(self.weight.t().clone())


class Renamed(nn.Module):
    """Is saved under an older name, which a hook turns into the newer one."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_state_dict_post_hook(_to_old)  # type: ignore[no-untyped-call]  # torch's
        self.register_load_state_dict_pre_hook(_to_new)  # type: ignore[no-untyped-call]  # torch's


def _to_old(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for key in ("weight", "bias"):
        state[f"{prefix}old.{key}"] = state.pop(f"{prefix}new.{key}")


def _to_new(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for key in ("weight", "bias"):
        state[f"{prefix}new.{key}"] = state.pop(f"{prefix}old.{key}")


class Doubled(nn.Module):
    """Is saved as twice its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # torch's
        destination[f"{prefix}weight"] = 2 * self.weight.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}weight"] / 2)


class Reassigning(nn.Module):
    """Replaces a buffer by another tensor at every use, and when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("seen", torch.randn(2))
        self.register_load_state_dict_post_hook(_replace)  # type: ignore[no-untyped-call]  # torch's


def _replace(module: nn.Module, _keys: Any) -> None:
    module.seen = module.get_buffer("seen").clone()


class OfManyTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("one", torch.randn(()))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("small", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("flags", torch.randn(7) > 0)
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.register_buffer("every_second", torch.randn(8)[::2])


class SharedStorage(nn.Module):
    """Has two buffers in one piece of memory, one within the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("all", torch.randn(6))
        self.register_buffer("middle", self.get_buffer("all")[1:4])


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)


class Many(nn.Module):
    def __init__(self, count: int = 300) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(3) for _ in range(count))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "tied weights": Tied,
    "a buffer that loading makes": partial(MadeLate, 4),
    "loading that resets first": ResetFirst,
    "a hook that renames": Renamed,
    "loading that computes": Doubled,
    "a buffer that is replaced": Reassigning,
    "all kinds of tensors": OfManyTypes,
    "shared storage": SharedStorage,
    "channels_last": channels_last,
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "many tensors": Many,
}
EMPTY: Mapping[str, Callable[[], nn.Module]] = {**MODELS, "a buffer that loading makes": MadeLate}
"""The same as a process that resumes makes them."""


def made_state(model: nn.Module, rank: int, world_size: int, *, is_trained: bool) -> TrainingState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if is_trained:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1)
        optimizer.step()
        optimizer.zero_grad()
    return TrainingState(
        model=model, optimizer=optimizer, device=CPU, rank=rank, world_size=world_size, loss_meter=torch.zeros(())
    )


def held(state: TrainingState) -> dict[str, Any]:
    shared = {item.name: item.tensor.detach().clone() for item in training_state.tensors(state)}
    return {name: one.contiguous().reshape(-1).view(torch.uint8).tolist() for name, one in shared.items()}


def save_and_restore(group: Group, path: Path, name: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Save a state and restore it into objects made anew; return both, and the layouts of the optimizer's tensors."""
    rank, world_size = group.rank_info.rank, group.rank_info.world_size
    run = make_run(path) if rank == 0 else None
    if run is not None:
        ownership.claim_run(run, 0)
    run_path = group.broadcast_through_store("run", None if run is None else str(run.path))

    run = RunDir(Path(run_path))
    torch.manual_seed(3)
    state = made_state(MODELS[name](), rank, world_size, is_trained=True)
    checkpointer = Checkpointer(run, group, attempt=0, keep=CheckpointSpec())
    checkpointer.check(state)
    before = held(state)
    checkpointer.save_and_wait(state)
    torch.manual_seed(100 + rank)
    back = made_state(EMPTY[name](), rank, world_size, is_trained=False)
    Checkpointer(run, group, attempt=0, keep=CheckpointSpec()).restore_newest(back, seed=SEED)
    strides = [value.stride() for entry in back.optimizer.state.values() for value in entry.values()]
    return before, held(back), strides


@pytest.mark.parametrize("name", MODELS)
def test_an_odd_state_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:

    before, after, _ = save_and_restore(alone(), tmp_path, name)

    assert after == before


def save_and_restore_all(group: Group, path: Path) -> dict[str, bool]:
    found = {}
    for number, name in enumerate(MODELS):
        stores = [torch.distributed.PrefixStore(str(number), one._store) for one in (group.store, group.side_store)]
        own = Group(group.rank_info, group.device, *(SealedStore(one, "") for one in stores))
        before, after, _ = save_and_restore(own, path / str(number), name)
        found[name] = before == after
    return found


def test_so_they_do_in_a_world_of_three(tmp_path: Path) -> None:
    ranks = in_group(3, partial(save_and_restore_all, path=tmp_path), tmp_path / "ours")

    assert ranks == [dict.fromkeys(MODELS, True)] * 3


class Ignored(nn.Module):
    """Has a buffer of each rank's own, and one that is saved by code of its own, which each rank has otherwise, too."""

    _ddp_params_and_buffers_to_ignore = ("own",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("own", torch.randn(3))
        self.extra = torch.randn(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state.clone()


def save_and_restore_each_ranks(group: Group, path: Path) -> bool:
    rank, world_size = group.rank_info.rank, group.rank_info.world_size
    run_path = group.broadcast_through_store("run", str(make_run(path).path) if rank == 0 else None)
    run = RunDir(Path(run_path))
    if rank == 0:
        ownership.claim_run(run, 0)
    group.barrier_through_store("claimed", silence_s=60)
    torch.manual_seed(rank)
    state = made_state(Ignored(), rank, world_size, is_trained=False)
    with torch.no_grad():
        next(state.model.parameters()).fill_(1)
    before = held(state)
    Checkpointer(run, group, attempt=0, keep=CheckpointSpec()).save_and_wait(state)
    torch.manual_seed(100 + rank)
    back = made_state(Ignored(), rank, world_size, is_trained=False)
    Checkpointer(run, group, attempt=0, keep=CheckpointSpec()).restore_newest(back, seed=SEED)
    return held(back) == before


def test_what_ddp_does_not_keep_equal_comes_back_on_each_rank(tmp_path: Path) -> None:
    assert in_group(2, partial(save_and_restore_each_ranks, path=tmp_path), tmp_path / "ours") == [True, True]


class Partial(nn.Module):
    """Leaves `without` out of its state, as adapters leave their base out."""

    def __init__(self, without: str = "base", *, is_frozen: bool = True, strict: bool = True) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(2, 2).requires_grad_(not is_frozen), nn.Linear(2, 2)
        self.without, self.strict = without, strict

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: one for name, one in super().state_dict(*args, **options).items() if self.without not in name}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if not state.keys() >= {"head.weight"}:
            raise KeyError("head.weight")
        return super().load_state_dict(state, strict and self.strict, assign)


def trained_only(model: nn.Module) -> TrainingState:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    return TrainingState(model=model, optimizer=optimizer, device=CPU, rank=0, world_size=1, loss_meter=torch.zeros(()))


def test_a_model_that_saves_its_adapter_alone_keeps_its_base_as_made(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    ownership.claim_run(run, 0)
    state, back = trained_only(Partial()), trained_only(Partial())
    checkpointer = Checkpointer(run, alone(), attempt=0, keep=CheckpointSpec())
    base = back.model.get_parameter("base.weight").clone()

    checkpointer.check(state)
    checkpointer.save_and_wait(state)
    Checkpointer(run, alone(), attempt=0, keep=CheckpointSpec()).restore_newest(back, seed=SEED)

    assert held(back) == held(state)
    assert torch.equal(back.model.get_parameter("base.weight"), base)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (partial(Partial, is_frozen=False, strict=False), "The weight 'base.weight' and 1 more is trained, but"),
        (partial(Partial, "head", strict=False), "`Recipe.model` cannot load what its own `state_dict` gives"),
    ],
)
def test_a_model_that_loses_what_is_trained_is_refused_at_the_start_and_left_as_it_is(
    model: Callable[[], nn.Module], told: str
) -> None:
    state = trained_only(model())
    before = {name: one.detach().clone() for name, one in state.model.named_parameters()}

    with pytest.raises(ConfigError, match=re.escape(told)):
        round_trip.check_loading(state)

    assert all(torch.equal(one, before[name]) for name, one in state.model.named_parameters())


def test_older_checkpoints_stay_where_the_newest_does_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    ownership.claim_run(run, 0)
    state, results = trained_only(nn.Linear(2, 2)), list[tuple[int, float, str | None]]()
    checkpointer = Checkpointer(
        run, alone(), attempt=0, keep=CheckpointSpec(keep_last=1), on_result=lambda *one: results.append(one)
    )

    for step in (1, 2):
        state.position = Position(step=step)
        checkpointer.save(state)
        checkpointer.wait()
        monkeypatch.setattr(checkpoint_store, "stored_tensors", _damaged)

    assert checkpoint_names.committed_steps(run) == [1, 2]
    assert results[0][2] is None
    assert "cannot be read back, so older checkpoints are kept" in str(results[1][2])


def _damaged(*_: object) -> None:
    raise CorruptCheckpointError("the header has a name twice")
