"""Each rank reads and verifies a checkpoint; all of them restore the same one, or none."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed import HashStore

from ddp_hpc.base import patience
from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, NewerFormatError, StopAskedError, UnreadableError
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME, checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import ChunkReader, Manifest, shard_name
from ddp_hpc.run.checkpoints.shards import RawTensor, TensorEntry, header_length, shard_header
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state import restore
from ddp_hpc.train.state.checkpoint import Checkpointer
from ddp_hpc.train.stop import StopFlag
from tests.distributed.processes import in_group
from tests.made_run import make_run
from tests.unit.made_state import SEED, make_checkpointers, make_group, make_state, save, take_step

OLDER, NEWEST = 2, 4


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of four ranks with two checkpoints; not to be changed."""
    run = make_run(tmp_path_factory.mktemp("pristine"))
    save(run, OLDER, NEWEST, world_size=4)
    make_checkpointers(run)[0].restore_newest(make_state(), seed=SEED)  # imports what ranks would read from the disk
    return run


@pytest.fixture
def run(pristine: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(pristine.path, tmp_path / "run")))


def restored(group: Group, run: RunDir) -> dict[str, Any]:
    """Restore the newest checkpoint; return what came of it on this rank, and how much of files it read."""
    state = make_state(rank=group.rank_info.rank, world_size=group.rank_info.world_size)
    checkpointer = Checkpointer(run, group, attempt=0, keep=CheckpointSpec())
    checkpointer.check(state)  # imports what takes part
    before = num_read()
    try:
        step = checkpointer.restore_newest(state, seed=SEED)
    except ConfigError as error:
        return {"refused": str(error)}
    weights = {name: one.tolist() for name, one in state.model.state_dict().items()}
    optimizer = [{key: value.tolist() for key, value in entry.items()} for entry in state.optimizer.state.values()]
    return {"step": step, "weights": weights, "optimizer": optimizer, "num_read": num_read() - before}


def num_read() -> int:
    """Return how many bytes this thread has got from reads; gloo's and the store's sockets count in other threads."""
    (line,) = (line for line in Path("/proc/thread-self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_world_restores_the_same_state_from_four_shards(
    world_size: int, pristine: RunDir, tmp_path: Path
) -> None:
    ranks = in_group(world_size, partial(restored, run=pristine), tmp_path / "ours")

    expected = make_state()
    (alone,) = make_checkpointers(pristine)
    alone.restore_newest(expected, seed=SEED)
    weights = {name: one.tolist() for name, one in expected.model.state_dict().items()}
    assert [one["step"] for one in ranks] == [NEWEST] * world_size
    assert all(one["weights"] == weights for one in ranks)
    assert all(one["optimizer"] == ranks[0]["optimizer"] for one in ranks)
    size = sum(path.stat().st_size for path in checkpoint_path(pristine, NEWEST).glob("shard-*"))
    # The first chunk of each file twice, as it has the header; the manifest; the ledger and the like, on rank zero.
    assert all(size <= one["num_read"] < 2 * size + 20_000 for one in ranks)


def test_damage_that_any_rank_finds_sets_the_checkpoint_aside_once_for_all(run: RunDir, tmp_path: Path) -> None:
    flip(checkpoint_path(run, NEWEST) / shard_name(2, 4))

    ranks = in_group(3, partial(restored, run=run), tmp_path / "ours")

    assert [one["step"] for one in ranks] == [OLDER] * 3
    assert committed_steps(run) == [OLDER]
    assert [path.name for path in run.checkpoints.glob("*.corrupt-*")] == [f"step-{NEWEST:08d}.corrupt-0"]


def test_damage_behind_what_was_copied_leaves_nothing_of_that_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "CHUNK_BYTES", 512)
    run = make_run(tmp_path)
    save(run, OLDER, NEWEST)
    path = checkpoint_path(run, NEWEST) / shard_name(0, 1)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    shutil.copytree(run.path, tmp_path / "undamaged")
    shutil.rmtree(checkpoint_path(RunDir(tmp_path / "undamaged"), NEWEST))

    ranks = in_group(2, partial(restored, run=run), tmp_path / "ours")

    (expected,) = in_group(1, partial(restored, run=RunDir(tmp_path / "undamaged")), tmp_path / "alone")
    assert [one["step"] for one in ranks] == [OLDER] * 2
    assert all((one["weights"], one["optimizer"]) == (expected["weights"], expected["optimizer"]) for one in ranks)


def misread_by_one(group: Group, run: RunDir, reader: int) -> str:
    """Restore where the memory of one rank changes what it reads; return what each rank raises."""
    if group.rank_info.rank == reader:
        checkpoint_store.ChunkReader.read = _misread  # type: ignore[assignment, method-assign]  # in this process alone
    try:
        Checkpointer(run, group, attempt=0, keep=CheckpointSpec()).restore_newest(
            make_state(rank=group.rank_info.rank, world_size=group.rank_info.world_size), seed=SEED
        )
    except UnreadableError as error:
        return str(error)
    return "restored"


def _misread(*_: object) -> None:
    raise CorruptCheckpointError("shard-00001 does not match its checksum.")


@pytest.mark.parametrize(("reader", "other"), [(1, 0), (0, 1)])
def test_damage_that_one_rank_alone_sees_renames_nothing_and_names_its_host(
    reader: int, other: int, run: RunDir, tmp_path: Path
) -> None:
    ranks = in_group(2, partial(misread_by_one, run=run, reader=reader), tmp_path / "ours")

    told = f"Rank {reader} on {socket.gethostname()} found damage that rank {other} does not find"
    assert all(one.startswith(told) for one in ranks)
    assert committed_steps(run) == [OLDER, NEWEST]


def restored_where_rank_one_sees_files_late(group: Group, run: RunDir, seen_first: Path) -> dict[str, Any]:
    """Restore where rank one's file system shows `seen_first` in the place of a checkpoint for the first two reads."""
    read, first = checkpoint_store.read_manifest, [seen_first] * 2 * (group.rank_info.rank == 1)
    checkpoint_store.read_manifest = lambda path: read(first.pop() if first else path)  # in this process alone
    patience._FIRST_PAUSE_S = 0.01
    return restored(group, run)


@pytest.mark.parametrize("seen_first", ["nothing", "one of that step before"])
def test_a_rank_waits_until_its_file_system_shows_the_checkpoint_that_rank_zero_has_read(
    seen_first: str, run: RunDir, tmp_path: Path
) -> None:
    before = tmp_path / "step-before"
    if seen_first != "nothing":
        shutil.copytree(checkpoint_path(run, OLDER), before)

    ranks = in_group(2, partial(restored_where_rank_one_sees_files_late, run=run, seen_first=before), tmp_path / "ours")

    assert [one["step"] for one in ranks] == [NEWEST] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert committed_steps(run) == [OLDER, NEWEST]


def test_a_rank_whose_file_system_does_not_answer_for_a_while_keeps_the_others_waiting(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_path(run, NEWEST) / shard_name(1, 2)
    shutil.rmtree(checkpoint_path(run, NEWEST))
    save(run, NEWEST, world_size=2)
    away = path.rename(tmp_path / "away")
    path.symlink_to(path.name)  # "Too many levels of symbolic links" says nothing of the file
    sleep = time.sleep

    def mend(seconds: float) -> None:
        if path.is_symlink() and "cannot be read" in "".join(seen):
            path.unlink()
            away.rename(path)
        sleep(min(seconds, 0.05))

    seen: list[str] = []
    monkeypatch.setattr(logging.getLogger(patience.__name__), "warning", lambda text, *words: seen.append(text % words))
    monkeypatch.setattr("time.sleep", mend)

    ranks = in_group(2, partial(restored, run=run), tmp_path / "ours")

    assert [one["step"] for one in ranks] == [NEWEST] * 2
    assert list(run.checkpoints.glob("*.corrupt-*")) == []


# --- a stop amid a restore --------------------------------------------------------------------------------------------


def restored_or_stopped(group: Group, run: RunDir) -> str:
    """Restore as workers do, which may be asked to stop; return how it ended on this rank."""
    rank_info = group.rank_info
    flag = StopFlag(run.stop_request)
    flag.listen()
    checkpointer = Checkpointer(
        run,
        group,
        attempt=0,
        keep=CheckpointSpec(),
        is_stop_asked=partial(flag.is_set, look_at_file=rank_info.is_rank_zero),
    )
    try:
        step = checkpointer.restore_newest(make_state(rank=rank_info.rank, world_size=rank_info.world_size), seed=SEED)
    except StopAskedError:
        group.wait_until_all_read("stopped")
        return "stopped"
    return f"restored step {step}"


@pytest.mark.parametrize(
    ("file", "asked_by"),
    [
        (MANIFEST_NAME, "SIGTERM"),
        (shard_name(0, 2), "SIGUSR2"),
        (shard_name(1, 2), "SIGTERM"),
        (shard_name(1, 2), "STOP"),
    ],
)
def test_a_stop_ends_the_wait_of_all_ranks_for_a_checkpoint_and_damages_nothing(
    file: str, asked_by: str, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rank that waits is asked: rank zero for the manifest and the first shard, rank one for the other."""
    shutil.rmtree(checkpoint_path(run, NEWEST))
    save(run, NEWEST, world_size=2)
    path = checkpoint_path(run, NEWEST) / file
    away = path.rename(tmp_path / "away")
    path.symlink_to(path.name)  # "Too many levels of symbolic links" says nothing of the file

    def ask(*_: object) -> None:
        if asked_by == "STOP":
            run.stop_request.touch()
        else:
            os.kill(os.getpid(), signal.Signals[asked_by])

    monkeypatch.setattr(logging.getLogger(patience.__name__), "warning", ask)  # as soon as a rank waits

    ranks = in_group(2, partial(restored_or_stopped, run=run), tmp_path / "ours")

    assert ranks == ["stopped"] * 2
    path.unlink()
    away.rename(path)
    run.stop_request.unlink(missing_ok=True)
    assert committed_steps(run) == [OLDER, NEWEST]
    assert in_group(1, partial(restored_or_stopped, run=run), tmp_path / "next") == [f"restored step {NEWEST}"]


def test_all_ranks_refuse_where_all_checkpoints_are_damaged_and_none_begins_anew(run: RunDir, tmp_path: Path) -> None:
    for step in (OLDER, NEWEST):
        flip(checkpoint_path(run, step) / shard_name(3, 4))

    (alone,) = in_group(1, partial(restored, run=run), tmp_path / "ours")

    assert f"those of step {OLDER}, {NEWEST} are damaged" in alone["refused"]


# --- one file, many readers -------------------------------------------------------------------------------------------


def write_by_hand(
    run: RunDir, step: int, shards: list[list[tuple[TensorEntry, torch.Tensor]]], manifest: Manifest
) -> Path:
    """Commit a checkpoint of which each tensor, or piece of one, lies where it is said."""
    uncommitted = checkpoint_store.make_uncommitted_dir(run, step, 0)
    records = []
    for number, entries in enumerate(shards):
        placed, begin = [], 0
        for entry, tensor in entries:
            placed.append(entry._replace(begin=begin, end=begin + tensor.nbytes))
            begin += tensor.nbytes
        body = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in entries]
        path = uncommitted / shard_name(number, len(shards))
        header = shard_header(placed)
        records.append(checkpoint_store.write_shard(path, [header, *body], size=len(header) + begin))
    return checkpoint_store.commit_checkpoint(run, uncommitted, replace(manifest, step=step, shards=tuple(records)))


def cut(name: str, tensor: torch.Tensor, *slices: slice) -> tuple[TensorEntry, torch.Tensor]:
    """Return a piece of a tensor as a shard holds it."""
    piece = tensor[slices]
    offset = tuple(one.start or 0 for one in slices)
    return TensorEntry(name, "F32", tuple(piece.shape), 0, 0, tuple(tensor.shape), offset), piece


def whole_file(tensors: dict[str, RawTensor]) -> list[tuple[TensorEntry, torch.Tensor]]:
    return [
        (TensorEntry(name, raw.dtype, raw.shape, 0, 0), torch.frombuffer(bytearray(raw.data), dtype=torch.uint8))
        for name, raw in tensors.items()
        if len(raw.data)
    ]


def in_pieces(run: RunDir) -> tuple[list[list[tuple[TensorEntry, torch.Tensor]]], Manifest]:
    """Return the newest checkpoint with its weight of 4 x 3 in three pieces: two of two rows, cut apart by columns, and a half."""
    path = checkpoint_path(run, NEWEST)
    manifest = checkpoint_store.read_manifest(path)
    raw = checkpoint_store.read_tensors(path, manifest)
    name = "model/linear.weight"
    weight = restore.to_torch(raw.pop(name)).clone()
    rest = whole_file(raw)
    half = len(rest) // 2
    return [
        [cut(name, weight, slice(0, 2), slice(0, 1)), *rest[:half]],
        [cut(name, weight, slice(2, 4), slice(0, 3)), *rest[half:]],
        [cut(name, weight, slice(0, 2), slice(1, 3))],
    ], manifest


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tensor_in_pieces_is_put_together_by_their_offsets(world_size: int, run: RunDir, tmp_path: Path) -> None:
    shards, manifest = in_pieces(run)
    expected = checkpoint_store.checkpoint_digest(checkpoint_path(run, NEWEST))
    before = in_group(1, partial(restored, run=run), tmp_path / "whole")[0]
    shutil.rmtree(checkpoint_path(run, NEWEST))
    path = write_by_hand(run, NEWEST, shards, manifest)

    ranks = in_group(world_size, partial(restored, run=run), tmp_path / "ours")

    assert checkpoint_store.checkpoint_digest(path) == expected
    assert all((one["weights"], one["optimizer"]) == (before["weights"], before["optimizer"]) for one in ranks)
    checkpoint_store.export_weights(path, tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as file:
        assert file.get_tensor("linear.weight").tolist() == before["weights"]["linear.weight"]


DAMAGE: dict[str, Callable[[list[Any]], Any]] = {
    "one is missing": lambda shards: shards[:2],
    "two overlap": lambda shards: [
        shards[0],
        shards[1],
        [(shards[2][0][0]._replace(offset=(0, 0)), shards[2][0][1])],
    ],
    "one lies outside": lambda shards: [
        shards[0],
        shards[1],
        [(shards[2][0][0]._replace(offset=(0, 2)), shards[2][0][1])],
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_pieces_that_do_not_make_up_a_tensor_are_damage(damage: str, run: RunDir) -> None:
    shards, manifest = in_pieces(run)
    shutil.rmtree(checkpoint_path(run, NEWEST))
    path = write_by_hand(run, NEWEST, DAMAGE[damage](shards), manifest)

    with pytest.raises(
        CorruptCheckpointError, match=r"the pieces of 'model/linear.weight' in its shards do not make up the tensor"
    ):
        checkpoint_store.read_tensors(path, checkpoint_store.read_manifest(path))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_begin_at_different_chunks_restore_the_same(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "CHUNK_BYTES", 512)
    run = make_run(tmp_path)
    save(run, NEWEST)
    before = in_group(1, partial(restored, run=run), tmp_path / "alone")[0]

    ranks = in_group(world_size, partial(restored, run=run), tmp_path / "ours")

    assert [one["weights"] for one in ranks] == [before["weights"]] * world_size
    assert [one["optimizer"] for one in ranks] == [before["optimizer"]] * world_size


@pytest.mark.parametrize(("node_rank", "order"), [(0, [0, 1, 2, 3]), (1, [2, 3, 0, 1])])
def test_each_node_begins_with_the_header_of_another_shard_and_all_find_the_same(
    node_rank: int, order: list[int], pristine: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_path(pristine, NEWEST)
    opened: list[str] = []

    def opens(file: Path, *more: Any) -> ChunkReader:
        opened.append(file.name)
        return ChunkReader(file, *more)

    monkeypatch.setattr(restore, "ChunkReader", opens)
    group = make_group(HashStore(), rank=2 * node_rank, world_size=4)
    group = replace(group, rank_info=replace(group.rank_info, local_rank=0, local_world_size=2, node_rank=node_rank))

    found = restore.ShardReader(path, checkpoint_store.read_manifest(path), group, lambda: None).headers()

    assert opened == [shard_name(number, 4) for number in order]
    contents = [(path / shard_name(number, 4)).read_bytes() for number in range(4)]
    assert found == [content[: header_length(content)] for content in contents]


# --- formats ----------------------------------------------------------------------------------------------------------


def test_every_tensor_says_its_global_shape_and_offset(pristine: RunDir) -> None:
    with safe_open(checkpoint_path(pristine, NEWEST) / shard_name(0, 4), framework="pt") as file:
        places = file.metadata()
        names = list(file.keys())

    assert places.pop("ddp_hpc.format") == "2"
    assert sorted(places) == sorted(names)
    assert '{"shape":[' in places[names[0]]


def test_a_checkpoint_of_a_newer_format_is_refused_and_left_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "FORMAT_VERSION", 1)
    (checkpointer,) = make_checkpointers(run)

    with pytest.raises(
        NewerFormatError, match=r"of format 2, but this ddp_hpc .* up to 1\. Nothing was changed\. Update"
    ):
        checkpointer.restore_newest(make_state(), seed=SEED)

    assert committed_steps(run) == [OLDER, NEWEST]
    assert (checkpoint_path(run, NEWEST) / MANIFEST_NAME).exists()
    assert ownership.has_claim(run, 0)


def test_a_checkpoint_of_another_model_changes_no_weight(run: RunDir) -> None:
    (checkpointer,) = make_checkpointers(run)
    state = make_state()
    state.model.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    before = {name: one.clone() for name, one in state.model.state_dict().items()}

    with pytest.raises(ConfigError, match=r"of another model: missing: more\. Undo"):
        checkpointer.restore_newest(state, seed=SEED)

    assert all(torch.equal(one, before[name]) for name, one in state.model.state_dict().items())


# --- what is found before anything is read ----------------------------------------------------------------------------


def test_a_truncated_shard_is_found_before_anything_is_read(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    flip(checkpoint_path(run, NEWEST) / shard_name(0, 4))  # is read first
    truncated = checkpoint_path(run, NEWEST) / shard_name(3, 4)
    truncated.write_bytes(truncated.read_bytes()[:-1])
    (checkpointer,) = make_checkpointers(run)

    assert checkpointer.restore_newest(make_state(), seed=SEED) == OLDER

    assert f"{truncated} is damaged: it has " in caplog.text
    assert "checksum" not in caplog.text


@pytest.fixture
def collections() -> Iterator[list[object]]:
    """The garbage collections that Python makes; it makes many."""
    seen: list[object] = []
    threshold = gc.get_threshold()
    gc.set_threshold(10)
    gc.callbacks.append(lambda phase, info: seen.append((phase, info)))
    yield seen
    gc.callbacks.pop()
    gc.set_threshold(*threshold)


def test_python_does_not_search_for_garbage_among_the_tables_of_a_checkpoint(
    pristine: RunDir, collections: list[object]
) -> None:
    state = make_state()
    (checkpointer,) = make_checkpointers(pristine)
    collections.clear()

    checkpointer.restore_newest(state, seed=SEED)

    num_during = len(collections)
    assert gc.isenabled()
    assert num_during < 20, "only around a restore: within it, Python would make some hundred"


def test_a_save_does_not_search_for_garbage_while_the_loop_waits_for_its_copy(tmp_path: Path) -> None:
    """With many tensors, the search took more than half of the time that the loop waits."""
    state = make_state(steps=1)
    (checkpointer,) = make_checkpointers(make_run(tmp_path))
    checkpointer.save_and_wait(state)
    take_step(state)
    searches: list[int] = []

    def note(phase: str, _: object) -> None:
        if phase == "start" and threading.current_thread() is threading.main_thread():
            searches.append(1)

    threshold = gc.get_threshold()
    gc.set_threshold(3)
    gc.callbacks.append(note)
    try:
        checkpointer.save(state)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*threshold)
    checkpointer.wait()

    assert gc.isenabled()
    assert len(searches) < 20, "some before and after the copy"
