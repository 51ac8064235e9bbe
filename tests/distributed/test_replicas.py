"""A rank whose weights are not those of the others is found, named and left behind; the run ends with the same bits."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import TensorDataset

from ddp_hpc.base.errors import RanksDifferError
from ddp_hpc.run.run_dir.differences import read_difference
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train import compare_replicas
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.distributed.bit_flips import BEFORE_A_COMPARISON, CASE, EVERY, Flip, Outcome, try_flips
from tests.distributed.processes import in_group
from tests.strange.walks import Case, begin, close

FLIPS = [
    Flip(step=13, rank=1, where="weight", place=3, bit=0),
    Flip(step=20, rank=0, where="moment", place=500, bit=22),
    Flip(step=27, rank=1, where="gradient", place=100, bit=30),
]


def outcomes(world_size: int, folder: Path, flips: list[Flip], case: Case = CASE) -> list[Outcome]:
    by_rank = in_group(world_size, partial(try_flips, path=folder / "runs", flips=flips, case=case), folder / "ranks")
    assert all(one == by_rank[0] for one in by_rank), "the ranks do not tell the same story"
    return by_rank[0]


@pytest.mark.parametrize(
    ("world_size", "told_by"),
    [
        (3, ["vote", "repetition", "repetition"]),
        pytest.param(2, ["undecided", "repetition", "repetition"], marks=pytest.mark.long),
    ],
)
def test_a_flipped_bit_is_found_its_rank_is_named_if_clear_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, world_size: int, told_by: list[str]
) -> None:
    found = outcomes(world_size, tmp_path, FLIPS)

    assert [one.told_by for one in found] == told_by
    for one in found:
        assert (one.end, one.end_after, one.is_same) == ("ranks differ", "finished", True)
        assert one.found_at is not None
        assert one.found_at - one.flip.step <= EVERY
        assert one.named == (() if one.told_by == "undecided" else (one.flip.rank,))


ALIKE = [replace(FLIPS[0], step=EVERY, num_alike=2), replace(FLIPS[2], num_alike=2)]


@pytest.mark.long
def test_two_of_three_ranks_that_are_wrong_alike_are_found_out_by_the_next_attempt(tmp_path: Path) -> None:
    for one in outcomes(3, tmp_path, ALIKE):
        assert (one.end, one.end_after, one.is_same) == ("ranks differ", "finished", True)
        assert (one.told_by, one.named) == ("repetition", one.flip.ranks(3))


NOT_FINITE = [
    Flip(step=7, rank=1, where="weight", place=3, bit=30),
    Flip(step=26, rank=0, where="gradient", place=500, bit=30),
]


@pytest.mark.long
def test_a_bit_that_makes_the_loss_nan_before_a_comparison_is_undone_and_its_rank_is_named(tmp_path: Path) -> None:
    for one in outcomes(2, tmp_path, NOT_FINITE, BEFORE_A_COMPARISON):
        assert (one.end, one.end_after, one.is_same) == ("ranks differ", "finished", True)
        assert (one.told_by, one.named) == ("repetition", (one.flip.rank,))
        assert one.found_at is not None
        assert one.found_at - one.flip.step <= 5


# --- models and optimizers that are unlike most ----------------------------------------------------------------------


class Renamed(nn.Module):
    """A model whose `state_dict` has other names than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.register_state_dict_post_hook(_to_backbone)  # type: ignore[no-untyped-call]  # torch's
        self.register_load_state_dict_pre_hook(_to_net)  # type: ignore[no-untyped-call]  # torch's

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows)  # type: ignore[no-any-return]  # a Tensor


def _to_backbone(_module: nn.Module, found: dict[str, torch.Tensor], *_: object) -> None:
    _rename(found, "net.", "backbone.")


def _to_net(_module: nn.Module, found: dict[str, torch.Tensor], *_: object) -> None:
    _rename(found, "backbone.", "net.")


def _rename(found: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [one for one in found if one.startswith(old)]:
        found[new + name.removeprefix(old)] = found.pop(name)


def recipe_of(model: nn.Module) -> Recipe:
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    return Recipe(
        model=model,
        train_data=TensorDataset(rows, rows[:, :2]),
        loss=nn.MSELoss(),
        optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
    )


def test_the_average_of_first_weights_that_differ_by_rank_begins_with_those_of_rank_zero(tmp_path: Path) -> None:
    def walk(group: Group) -> bool:
        def built() -> Recipe:
            torch.manual_seed(1000 + group.rank_info.rank)
            return recipe_of(nn.Linear(4, 2))

        t = begin(Case(recipe=built, train={"ema_decay": 0.9}, compare_every=2), group, tmp_path / "run")
        return train(t)

    assert in_group(2, walk, tmp_path / "ranks") == [True, True]


def test_weights_that_the_state_dict_renames_are_compared(tmp_path: Path) -> None:
    def walk(group: Group) -> str:
        t = begin(Case(recipe=lambda: recipe_of(Renamed()), compare_every=2), group, tmp_path / "run")

        def disturb(*_: object) -> None:
            t.state.model.get_parameter("net.weight").data.view(-1)[3].add_(group.rank_info.rank)

        t.state.optimizer.register_step_post_hook(disturb)
        with pytest.raises(RanksDifferError, match=r"after step 2: `model/net\.weight`") as raised:
            train(t)
        close(t)
        return str(raised.value)

    assert len(set(in_group(2, walk, tmp_path / "ranks"))) == 1


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({0: 4}, "is torch.float32 of shape [4] on rank 0; `optimizer/weight/norms` is missing on rank 1"),
        ({1: 4}, "is missing on rank 0; `optimizer/weight/norms` is torch.float32 of shape [4] on rank 1"),
        ({0: 4, 1: 5}, "on rank 0; `optimizer/weight/norms` is torch.float32 of shape [5] on rank 1"),
    ],
)
def test_a_tensor_that_not_all_ranks_have_alike_is_told_as_the_codes_difference(
    tmp_path: Path, shapes: dict[int, int], told: str
) -> None:
    def walk(group: Group) -> str:
        t = begin(Case(recipe=lambda: recipe_of(nn.Linear(4, 2)), compare_every=2), group, tmp_path / "run")

        def keep_norms(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if group.rank_info.rank in shapes:
                weight = optimizer.param_groups[0]["params"][0]
                optimizer.state[weight]["norms"] = torch.zeros(shapes[group.rank_info.rank])

        t.state.optimizer.register_step_post_hook(keep_norms)
        with pytest.raises(RanksDifferError, match="the ranks differ after step 2: `optimizer/weight/norms`") as raised:
            train(t)
        close(t)
        return str(raised.value)

    said = in_group(2, walk, tmp_path / "ranks")

    assert said[0] == said[1]
    assert told in said[0]
    assert "the code does not do the same on each rank" in said[0]


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.15 will remove them some day
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


KINDS = {
    "complex of 16 bytes": torch.ones(3, dtype=torch.complex128),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "without elements": torch.ones(0, dtype=torch.complex128),
    "expanded": torch.ones(1).expand(5),
    **{
        name: torch.zeros(3, dtype=torch.uint8).view(getattr(torch, name))
        for name in ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "int4")
        if hasattr(torch, name)  # newer versions of PyTorch have more of them
    },
}
LEFT_OUT = {
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "quantised": quantised(),
    "two": TwoTensor(torch.ones(3), torch.ones(3)),
}


def test_tensors_of_any_kind_are_compared_or_named_in_the_log_as_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer keeps them after the first step; one of its parameters is in no model."""

    def walk(group: Group) -> tuple[str, str]:
        t = begin(
            Case(recipe=lambda: recipe_of(nn.Linear(4, 2)), compare_every=2, save_every=99), group, tmp_path / "run"
        )

        def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if t.state.position.step == 0:  # after the first step, all is looked at that a checkpoint holds
                return
            weight = t.state.model.get_parameter("weight")
            if not optimizer.state[weight]:
                optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(7)))
            optimizer.state[weight] = {**KINDS, **LEFT_OUT}
            if group.rank_info.rank == 1 and t.state.position.step == 5:
                optimizer.state[weight]["complex of 16 bytes"] = torch.tensor([1, 1 + 1e-9j, 1], dtype=torch.complex128)

        t.state.optimizer.register_step_post_hook(keep)
        with pytest.raises(RanksDifferError, match="after step 6: `optimizer/weight/complex of 16 bytes` is") as raised:
            train(t)
        close(t)
        return str(raised.value), caplog.text

    said = in_group(2, walk, tmp_path / "ranks")

    assert said[0][0] == said[1][0]
    for name in ["optimizer/parameter 2 of shape [7]", *(f"optimizer/weight/{one}" for one in LEFT_OUT)]:
        assert said[0][1].count(f"`{name}` is not compared between the ranks") == 1
    found = read_difference(RunDir(tmp_path / "run"), 0)
    assert found is not None
    assert [one.places for one in found.samples] == [(1,)]


@pytest.mark.parametrize("tensor", KINDS.values(), ids=KINDS)
def test_elements_of_any_kind_are_sampled(tensor: torch.Tensor) -> None:
    flat = tensor.reshape(-1).resolve_conj()

    assert (
        len(compare_replicas._floats(flat, range(flat.numel())))
        == len(compare_replicas._bits_as_integers(flat))
        == flat.numel()
    )
