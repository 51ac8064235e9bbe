"""The bytes of a shard come in parts, each checked before it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import DivergedError
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import CHUNK_BYTES
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.state.save_buffers import NotFiniteError, SaveBuffers
from ddp_hpc.train.state.training_state import NamedTensor, TrainingState
from tests.unit.made_state import CPU, make_checkpointers

NUM_FLOATS = CHUNK_BYTES // 4


def filled(tensors: Sequence[Tensor]) -> tuple[SaveBuffers, bytes]:
    """Return buffers that hold `tensors`, named by their number, and the bytes that a shard has for them."""
    buffers = SaveBuffers(CPU)
    buffers.fill([NamedTensor(str(number), tensor, owner=None) for number, tensor in enumerate(tensors)])
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return buffers, torch.cat(flat).numpy().tobytes()


@pytest.mark.parametrize(
    "made",
    [
        lambda: [torch.tensor(3.0)],
        lambda: [torch.empty(0, 4), torch.ones(3)],
        lambda: [torch.randn(NUM_FLOATS)],
        lambda: [torch.randn(NUM_FLOATS - 1), torch.randn(2)],
        lambda: [torch.randn(2 * NUM_FLOATS + 1), torch.randn(3, 5, dtype=torch.bfloat16)],
        lambda: [torch.randn(NUM_FLOATS // 2, 7).t(), torch.randint(9, (11,), dtype=torch.uint8)],
    ],
    ids=["a number", "an empty one", "one chunk", "two that end near a chunk", "more than two chunks", "a view"],
)
def test_parts_are_the_header_and_then_all_bytes_in_order(made: Callable[[], list[Tensor]]) -> None:
    tensors = made()
    buffers, expected = filled(tensors)

    header, *parts = buffers.shard_parts({str(number) for number in range(len(tensors))})

    assert b"".join(parts) == expected
    assert buffers.size == len(header) + len(expected)
    assert all(len(part) >= CHUNK_BYTES for part in parts[:-1])
    assert all(parts)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_in_the_last_part_is_found_there(value: float) -> None:
    spoilt = torch.randn(3 * NUM_FLOATS)
    spoilt[-1] = value
    buffers, _ = filled([torch.tensor(torch.inf), spoilt])
    parts = buffers.shard_parts({"1"})

    given = [next(parts) for _ in range(3)]

    assert sum(map(len, given[1:])) < spoilt.nbytes
    with pytest.raises(NotFiniteError, match=r"\A1\Z"):
        next(parts)


def test_nothing_of_a_checkpoint_stays_whose_last_part_is_not_finite(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    model = nn.ParameterList([nn.Parameter(torch.randn(2 * NUM_FLOATS)), nn.Parameter(torch.randn(NUM_FLOATS))])
    (checkpointer,) = make_checkpointers(run)
    state = TrainingState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        device=CPU,
        rank=0,
        world_size=1,
        loss_meter=torch.zeros(()),
    )
    checkpointer.refuse_nonfinite(model)
    with torch.no_grad():
        model[1][-1] = torch.nan

    with pytest.raises(DivergedError, match="model/1"):
        checkpointer.save_and_wait(state)

    assert committed_steps(run) == []
    assert [path for path in run.checkpoints.rglob("*") if path.is_file() and path.suffix == ".safetensors"] == []
