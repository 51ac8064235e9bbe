"""`train.compile` compiles what the loop calls, in DDP, too; or says that it does not.

Each training is in a process of its own: after one that was compiled, PyTorch refuses a backward pass in what this process forks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.distributed.processes import in_group
from tests.strange.walks import Case, differences, walk, walk_in_parts

NUM_SAMPLES = 28
BATCH = 8
"""The last step of an epoch has four samples."""


@pytest.fixture
def compiled_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the batch sizes for which a graph is compiled; forked ranks have lists of their own."""
    sizes: list[int] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        sizes.append(next(one.shape[0] for one in inputs if one.dim() == 2 and not isinstance(one, nn.Parameter)))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    yield sizes
    torch._dynamo.reset()


def built_in() -> nn.Module:
    """Return a model whose forward is PyTorch's own."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = built_in()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs).tanh()  # type: ignore[no-any-return]  # a module's


class NotCompiled(Own):
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch has no types for it
    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)  # type: ignore[no-any-return]  # a module's


def case(model: Callable[[], nn.Module], **train: Any) -> Case:
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 6, generator=generator), torch.arange(NUM_SAMPLES) % 3)
    return Case(
        recipe=lambda: Recipe(model=model(), train_data=data, eval_data=data, loss=nn.CrossEntropyLoss()),
        train={"global_batch_size": BATCH, "compile": True, **train},
    )


def _walked(
    group: Group, *, model: Callable[[], nn.Module], folder: Path, sizes: list[int]
) -> tuple[Any, Any, set[int]]:
    plain = walk(group, case(model, compile=False), folder / "plain")
    compiled = walk(group, case(model), folder / "compiled")
    return plain, compiled, {*sizes}


@pytest.mark.long
@pytest.mark.parametrize("model", [built_in, Own])
def test_in_ddp_the_training_runs_compiled_on_full_batches_alone(
    model: Callable[[], nn.Module], compiled_sizes: list[int], tmp_path: Path
) -> None:
    ranks = in_group(2, partial(_walked, model=model, folder=tmp_path / "ours", sizes=compiled_sizes), tmp_path)

    for plain, compiled, sizes in ranks:
        assert sizes == {BATCH // 2}
        assert differences(plain, compiled) == []  # the graph is run as it was written


def _stopped(group: Group, *, folder: Path, sizes: list[int]) -> tuple[Any, Any, set[int]]:
    unbroken = walk(group, case(Own), folder / "unbroken")
    return unbroken, walk_in_parts(group, case(Own), folder / "resumed"), {*sizes}


@pytest.mark.long
def test_a_compiled_run_that_was_stopped_ends_in_the_same_bits(compiled_sizes: list[int], tmp_path: Path) -> None:
    stopped = partial(_stopped, folder=tmp_path / "ours", sizes=compiled_sizes)

    [(unbroken, resumed, sizes)] = in_group(1, stopped, tmp_path)

    assert differences(unbroken, resumed) == []
    assert sizes == {BATCH}


def _said(
    group: Group, *, model: Callable[[], nn.Module], folder: Path, sizes: list[int], caplog: pytest.LogCaptureFixture
) -> tuple[str, list[int]]:
    walk(group, case(model), folder)
    return caplog.text, sizes


@pytest.mark.long
def test_the_log_says_what_was_compiled(
    compiled_sizes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    [(said, _)] = in_group(1, partial(_said, model=Own, folder=tmp_path, sizes=compiled_sizes, caplog=caplog), tmp_path)

    assert "(graphs: 1) for micro batches of 8 samples" in said
    assert "compiled nothing" not in said


def test_the_log_warns_where_nothing_was_compiled(
    compiled_sizes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = partial(_said, model=NotCompiled, folder=tmp_path, sizes=compiled_sizes, caplog=caplog)

    [(said, sizes)] = in_group(1, one, tmp_path)

    assert sizes == []
    assert said.count("PyTorch has compiled nothing of the model") == 1
