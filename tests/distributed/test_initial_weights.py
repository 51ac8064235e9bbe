"""`train.init_from` on several ranks: rank zero alone reads, and all begin with its weights or refuse them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_hpc.base.errors import ConfigError, UnreadableError
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from ddp_hpc.run.checkpoints.checkpoint_store import ChunkReader
from ddp_hpc.run.checkpoints.shards import select_by_prefix
from ddp_hpc.run.spec import RunSpec, TrainSpec
from ddp_hpc.train import sealed_store
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state.initial_weights import take_initial_weights
from tests.distributed.processes import in_group
from tests.made_run import make_run
from tests.unit.made_state import alone, make_group, make_state, save

ODD = {
    "halves": torch.arange(5).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "nothing": torch.empty(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "complexes": torch.tensor([1 + 2j]),
}


class Odd(nn.Module):
    """Has buffers of many dtypes, and shapes."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in ODD.items():
            self.register_buffer(name, torch.zeros_like(value))


def taken(group: Group, runs: Path) -> dict[str, Any] | str:
    """Return the weights that this rank begins with; only rank zero sees the file."""
    here = runs if group.rank_info.is_rank_zero else runs / "not mounted"
    spec = RunSpec(name="run", runs_dir=str(runs), train=TrainSpec(init_from=str(here / "weights.pt")))
    state = replace(make_state(rank=group.rank_info.rank, world_size=group.rank_info.world_size), model=Odd())
    try:
        take_initial_weights(spec, state, group, lambda: None)
    except (ConfigError, UnreadableError) as error:
        return str(error)
    return dict(state.model.state_dict())


def test_rank_zero_reads_the_file_and_all_ranks_get_its_tensors_of_all_dtypes(tmp_path: Path) -> None:
    torch.save(ODD, tmp_path / "weights.pt")

    for weights in in_group(3, partial(taken, runs=tmp_path), tmp_path / "ours"):
        assert isinstance(weights, dict)
        assert {name: one.dtype for name, one in weights.items()} == {name: one.dtype for name, one in ODD.items()}
        assert all(torch.equal(weights[name], one) for name, one in ODD.items())


def test_all_ranks_refuse_weights_that_do_not_fit_with_the_same_words(tmp_path: Path) -> None:
    torch.save({**ODD, "halves": torch.zeros(6)}, tmp_path / "weights.pt")

    first, second = in_group(2, partial(taken, runs=tmp_path), tmp_path / "ours")

    assert isinstance(first, str)
    assert "halves (6,) instead of (5,)" in first
    assert second == first


def test_complex_weights_that_are_conjugated_or_negated_by_a_mark_arrive(tmp_path: Path) -> None:
    marked = {"complexes": torch.tensor([1 + 2j]).conj(), "turned": torch.full((3, 2), 4j).conj().imag}
    torch.save({**ODD, **marked}, tmp_path / "weights.pt")

    for weights in in_group(2, partial(taken, runs=tmp_path), tmp_path / "ours"):
        assert isinstance(weights, dict), weights
        assert weights["complexes"].tolist() == [1 - 2j]
        assert weights["turned"].tolist() == [[-4.0, -4.0]] * 3


# --- a checkpoint of another run --------------------------------------------------------------------------------------


def taken_from_run(group: Group, runs: Path, on_progress: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
    """Return the weights that this rank begins with, which are those of the run `other`."""
    spec = RunSpec(name="run", runs_dir=str(runs), train=TrainSpec(init_from="other"))
    state = make_state(rank=group.rank_info.rank, world_size=group.rank_info.world_size)
    take_initial_weights(spec, state, group, on_progress)
    return dict(state.model.state_dict())


def test_of_a_checkpoint_only_the_weights_are_read_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "CHUNK_BYTES", 64)
    run = make_run(tmp_path, "other")
    save(run, 3, world_size=2)
    path = checkpoint_path(run, 3)
    manifest = checkpoint_store.read_manifest(path)
    expected = select_by_prefix("model/", checkpoint_store.read_tensors(path, manifest))
    read: set[tuple[str, int]] = set()
    read_chunk = ChunkReader.read

    def noted(reader: ChunkReader, number: int, into: memoryview) -> None:
        read.add((reader._path.name, number))
        read_chunk(reader, number, into)

    monkeypatch.setattr(ChunkReader, "read", noted)

    found = taken_from_run(alone(), tmp_path)

    assert {name: bytes(one.numpy().tobytes()) for name, one in found.items()} == {
        name: bytes(raw.data) for name, raw in expected.items()
    }
    num_bytes = sum(shard.header_bytes for shard in manifest.shards) + sum(len(raw.data) for raw in expected.values())
    most_at_borders = 2 * (len(manifest.shards) + len(expected))
    assert len(read) <= num_bytes / 64 + most_at_borders
    assert len(read) < sum(len(shard.chunks) for shard in manifest.shards)


def taken_slowly(group: Group, runs: Path, told: Path) -> dict[str, Tensor]:
    """Return the weights that this rank begins with, of which rank zero reads none before rank one has heard that it reads."""
    rank, read_chunk, until = group.rank_info.rank, ChunkReader.read, time.monotonic() + 30

    def slow(reader: ChunkReader, number: int, into: memoryview) -> None:
        while not told.exists() and time.monotonic() < until:
            reader._on_progress()
        read_chunk(reader, number, into)

    ChunkReader.read = slow  # type: ignore[assignment]  # in this process alone
    return taken_from_run(group, runs, told.touch if rank == 1 else lambda: None)


def test_while_rank_zero_reads_the_watchdogs_of_the_others_are_fed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_store, "HEARTBEAT_INTERVAL_S", 0.02)
    save(make_run(tmp_path, "other"), 3)

    first, second = in_group(2, partial(taken_slowly, runs=tmp_path, told=tmp_path / "told"), tmp_path / "ours")

    assert (tmp_path / "told").exists()
    assert all(torch.equal(first[name], one) for name, one in second.items())


# --- weights that cannot be sent --------------------------------------------------------------------------------------


UNPLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "quantised": lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
    "without values": lambda values: values.to("meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch deprecates what makes and reads such tensors
@pytest.mark.parametrize("made_of", UNPLAIN.values(), ids=UNPLAIN)
def test_a_weight_that_cannot_be_sent_is_refused_before_anything_is_sent(
    made_of: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    torch.save({**ODD, "halves": made_of(torch.ones(5))}, tmp_path / "weights.pt")

    refused = taken(alone(), tmp_path)

    assert isinstance(refused, str)
    assert "its weight 'halves' is sparse, nested, quantised, distributed or without values" in refused


@pytest.mark.parametrize(
    "text", ["train: 1\n", "seed: 3\n", "Job 7 wrote this\n", "Good weights\n", "U\x05abc\xff\xff\n"]
)
def test_a_text_file_is_refused_whatever_it_begins_with(text: str, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text(text, encoding="latin-1")

    refused = taken(alone(), tmp_path)

    assert isinstance(refused, str)
    assert "PyTorch cannot read weights from it" in refused


def test_a_name_that_the_file_system_does_not_answer_for_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").symlink_to("weights.pt")

    refused = taken(alone(), tmp_path)

    assert isinstance(refused, str)
    assert "but that cannot be read: [Errno 40] Too many levels of symbolic links" in refused


def test_a_name_that_no_path_can_have_is_refused(tmp_path: Path) -> None:
    refused = taken(alone(), tmp_path / "zero\0byte")

    assert isinstance(refused, str)
    assert "but that cannot be read: embedded null byte" in refused


@pytest.mark.skipif(
    torch.__version__ < "2.10", reason="PyTorch's stand-in for a group takes nothing on the device meta"
)
def test_rank_zero_does_not_hold_a_second_copy_of_what_it_has_read(tmp_path: Path) -> None:
    torch.save(ODD, tmp_path / "weights.pt")
    # What is on the device "meta" cannot come back from there, so this shows that rank zero asks for nothing back.
    rank_zero = make_group(HashStore(), rank=0, world_size=2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        weights = taken(replace(rank_zero, device=torch.device("meta")), tmp_path)
    finally:
        dist.destroy_process_group()

    assert isinstance(weights, dict)
    assert all(torch.equal(weights[name], one) for name, one in ODD.items())
