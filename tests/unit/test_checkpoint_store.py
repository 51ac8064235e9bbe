"""Checkpoints on disk: committed or not there, and never loaded when they are not what was written."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import HashStore

from ddp_hpc.base.errors import CheckpointError, ConfigError, CorruptCheckpointError
from ddp_hpc.base.processes import host_name
from ddp_hpc.run.checkpoints import checkpoint_store, shards
from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME, checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import (
    Manifest,
    checkpoint_digest,
    commit_checkpoint,
    export_weights,
    prune_checkpoints,
    read_manifest,
    read_tensors,
    set_checkpoint_aside,
    shard_name,
    uncommitted_path,
    verify_checkpoint,
    write_shard,
)
from ddp_hpc.run.checkpoints.shards import TensorEntry, shard_header
from ddp_hpc.run.run_dir.ownership import claim_run, remove_leftovers
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train import sealed_store
from ddp_hpc.train.state import rng
from tests.made_run import add_checkpoint, make_run
from tests.unit import made_state
from tests.unit.made_state import SEED, Net, make_checkpointers, make_state, save, take_step

OLDER, NEWEST = 2, 4
FILES = [MANIFEST_NAME, shard_name(0, 2), shard_name(1, 2)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two ranks with two checkpoints, written as in training; not to be changed."""
    run = make_run(tmp_path_factory.mktemp("pristine"))
    save(run, OLDER, NEWEST, world_size=2)
    return run


@pytest.fixture
def run(pristine: RunDir, tmp_path: Path) -> RunDir:
    """A copy, to be damaged."""
    return RunDir(Path(shutil.copytree(pristine.path, tmp_path / "run")))


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: Mapping[str, Callable[[Path], object]] = {
    "a bit flipped at the beginning": lambda path: flip(path, 0),
    "a bit flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "a bit flipped at the end": lambda path: flip(path, -1, bit=7),
    "the last byte missing": lambda path: cut(path, -1),
    "the second half missing": lambda path: cut(path, path.stat().st_size // 2),
    "emptied": lambda path: cut(path, 0),
    "a byte too many": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "filled with zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": Path.unlink,
    "a directory": make_directory,
    "a pipe": make_pipe,
    "that of an older checkpoint": lambda path: shutil.copy(
        path.parent.with_name(f"step-{OLDER:08d}") / path.name, path
    ),
}
"""Name -> what is done to one file of the newest checkpoint."""


def is_loadable(path: Path) -> bool:
    """Tell whether any way of reading a checkpoint takes it for sound."""
    readers: list[Callable[[], object]] = [
        lambda: verify_checkpoint(path),
        lambda: read_tensors(path, read_manifest(path)),
        lambda: checkpoint_digest(path),
    ]
    sound = 0
    for read in readers:
        try:
            read()
        except CorruptCheckpointError:
            continue
        sound += 1
    return sound > 0


def test_what_was_written_is_sound(pristine: RunDir) -> None:
    path = checkpoint_path(pristine, NEWEST)

    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert verify_checkpoint(path).step == NEWEST
    assert is_loadable(path)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_found_out_and_the_older_checkpoint_used(file: str, damage: str, run: RunDir) -> None:
    path = checkpoint_path(run, NEWEST)
    DAMAGE[damage](path / file)

    is_taken = is_loadable(path)
    state = make_state()
    (checkpointer,) = make_checkpointers(run, attempt=1)
    restored = checkpointer.restore_newest(state, seed=SEED)

    assert not is_taken
    assert restored == state.position.step == OLDER
    assert committed_steps(run) == [OLDER]


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_found_out(file: str, run: RunDir) -> None:
    """All of the first bytes, where a header is, and many positions at random."""
    path = checkpoint_path(run, NEWEST)
    size = (path / file).stat().st_size
    chance = random.Random(file)
    offsets = [*range(min(size, 400)), *(chance.randrange(size) for _ in range(400))]

    missed = []
    for offset in offsets:
        bit = chance.randrange(8)
        flip(path / file, offset, bit)
        if is_loadable(path):
            missed.append((offset, bit))
        flip(path / file, offset, bit)

    assert missed == []
    assert is_loadable(path)


@pytest.mark.parametrize("file", FILES)
def test_every_truncation_is_found_out(file: str, run: RunDir) -> None:
    path = checkpoint_path(run, NEWEST)
    content = (path / file).read_bytes()
    chance = random.Random(file)

    missed = []
    for size in sorted({0, 1, 7, 8, 9, len(content) - 1, *(chance.randrange(len(content)) for _ in range(100))}):
        (path / file).write_bytes(content[:size])
        if is_loadable(path):
            missed.append(size)

    assert missed == []


def test_a_checkpoint_under_another_steps_name_is_found_out(run: RunDir) -> None:
    path = Path(shutil.copytree(checkpoint_path(run, OLDER), checkpoint_path(run, NEWEST + 1)))

    assert not is_loadable(path)


def test_bit_flips_pass_a_reader_that_looks_at_sizes_alone(run: RunDir) -> None:
    """The guard of the tests above: what they find, they find by checksums."""
    path = checkpoint_path(run, NEWEST) / shard_name(0, 2)
    before = path.stat().st_size

    flip(path, -1)

    assert path.stat().st_size == before
    assert load_file(path)


def test_what_does_not_hold_is_set_aside_and_told(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    flip(checkpoint_path(run, NEWEST) / shard_name(1, 2), 100)
    (checkpointer,) = make_checkpointers(run)

    checkpointer.restore_newest(make_state(), seed=SEED)

    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == ["step-00000002", "step-00000004.corrupt-0"]
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "shard-00001-of-00002.safetensors is damaged: it does not match its checksum" in told
    assert "renamed to step-00000004.corrupt-0, and ddp-hpc looks for an older one to continue from" in told


def test_setting_aside_never_overwrites(run: RunDir) -> None:
    first = set_checkpoint_aside(checkpoint_path(run, NEWEST))
    shutil.copytree(first, checkpoint_path(run, NEWEST))

    second = set_checkpoint_aside(checkpoint_path(run, NEWEST))

    assert (first.name, second.name) == ("step-00000004.corrupt-0", "step-00000004.corrupt-1")


# --- commit ----------------------------------------------------------------------------------------------------------


def test_a_directory_without_its_manifest_does_not_exist(run: RunDir) -> None:
    (checkpoint_path(run, NEWEST) / MANIFEST_NAME).unlink()

    assert committed_steps(run) == [OLDER]


def test_a_step_that_was_half_there_is_committed_again(run: RunDir) -> None:
    (checkpoint_path(run, NEWEST) / MANIFEST_NAME).unlink()

    save(run, NEWEST, world_size=2, attempt=1)

    assert committed_steps(run) == [OLDER, NEWEST]
    assert verify_checkpoint(checkpoint_path(run, NEWEST)).made["attempt"] == 1


STAGES: Mapping[str, Callable[[Path], object]] = {
    "an empty directory": lambda _: None,
    "half a shard": lambda uncommitted: (uncommitted / FILES[1]).write_bytes(b"half"),
    "all shards": lambda uncommitted: [(uncommitted / name).write_bytes(b"whole") for name in FILES[1:]],
    "all files": lambda uncommitted: [(uncommitted / name).write_bytes(b"whole") for name in FILES],
}
"""How far a writer may have come when it was killed."""


@pytest.mark.parametrize("stage", STAGES)
def test_before_the_rename_nothing_is_there_and_what_is_left_is_removed(stage: str, run: RunDir) -> None:
    uncommitted = uncommitted_path(run, NEWEST + 1, 0)
    uncommitted.mkdir()
    STAGES[stage](uncommitted)
    before = committed_steps(run)
    (checkpointer,) = make_checkpointers(run, attempt=1)

    restored = checkpointer.restore_newest(make_state(), seed=SEED)

    assert before == [OLDER, NEWEST]
    assert restored == NEWEST
    assert not uncommitted.exists()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("attempt", [0, 1], ids=["same attempt", "another attempt"])
def test_leftovers_never_block_the_next_writer(stage: str, attempt: int, run: RunDir) -> None:
    uncommitted = uncommitted_path(run, NEWEST + 1, 0)
    uncommitted.mkdir()
    STAGES[stage](uncommitted)

    save(run, NEWEST + 1, world_size=2, attempt=attempt)

    assert verify_checkpoint(checkpoint_path(run, NEWEST + 1)).step == NEWEST + 1


def test_leftovers_are_told_by_name_and_nothing_else_is_touched(run: RunDir) -> None:
    deleted = ["attempt-3.writing.deleted.tmp", "step-00000001.deleted.tmp"]
    for name in (*deleted, "step-00000007.corrupt-0", "mine"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "notes.tmp").write_text("a user's")

    removed = remove_leftovers(run)

    assert removed == deleted
    assert {path.name for path in run.checkpoints.iterdir()} == {
        "step-00000002", "step-00000004", "step-00000007.corrupt-0", "attempt-0.writing", "mine", "notes.tmp",
    }  # fmt: skip


def test_a_run_without_checkpoints_has_no_steps_and_no_leftovers(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    assert committed_steps(run) == []
    assert remove_leftovers(run) == []


# --- what is kept ----------------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "keep", "kept"),
    [
        ([3, 2, 1], {"keep_last": 2}, [2, 3]),
        ([3, 2, 1], {"keep_last": 9}, [1, 2, 3]),
        ([1, 2, 3], {"keep_last": 1, "keep_best": 1}, [1, 3]),
        ([1, 2, 3], {"keep_last": 1, "keep_best": 1, "best_is": "highest"}, [3]),
        ([2, 1, 3, 4], {"keep_last": 1, "keep_best": 2}, [1, 2, 4]),
        ([1, 1, 3], {"keep_last": 1, "keep_best": 1}, [2, 3]),
        ([1, None, None], {"keep_last": 1, "keep_best": 1}, [1, 3]),
        ([1, 2, 3], {"keep_last": 1, "keep_best": 1, "best_metric": "accuracy", "best_is": "lowest"}, [3]),
        ([NAN, 1, 2, NAN], {"keep_last": 1, "keep_best": 1}, [2, 4]),
        ([2, NAN, 1, 3], {"keep_last": 1, "keep_best": 1, "best_is": "highest"}, [4]),
        ([2, NAN, 1, 0], {"keep_last": 1, "keep_best": 1, "best_is": "highest"}, [1, 4]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    losses: list[float | None], keep: dict[str, Any], kept: list[int], tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    for step, loss in enumerate(losses, start=1):
        add_checkpoint(run, step, **({} if loss is None else {"loss": loss}))

    claim_run(run, 1)
    doomed = prune_checkpoints(run, attempt=1, keep=CheckpointSpec(**keep))

    assert committed_steps(run) == kept
    assert sorted([*kept, *doomed]) == list(range(1, len(losses) + 1))
    assert len(list(run.checkpoints.iterdir())) == len(kept) + 1  # the claim


def test_a_best_one_that_cannot_be_read_is_not_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (1, 2, 3):
        add_checkpoint(run, step, loss=float(step))
    flip(checkpoint_path(run, 1) / MANIFEST_NAME, 30)

    claim_run(run, 1)
    prune_checkpoints(run, attempt=1, keep=CheckpointSpec(keep_last=1, keep_best=1))

    assert committed_steps(run) == [2, 3]


def test_a_writer_keeps_what_the_configuration_says(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (checkpointer,) = make_checkpointers(run, keep_last=2, keep_best=1)
    state = make_state()

    for loss in (3.0, 1.0, 2.0, 4.0, 5.0):
        take_step(state)
        checkpointer.save_and_wait(state, metrics={"loss": loss})

    assert committed_steps(run) == [2, 4, 5]


# --- the digest ------------------------------------------------------------------------------------------------------

TENSORS = {"model/weight": b"\1\2\3\4", "model/bias": b"\5\6", "rank.0/rng.torch": b"\7"}
STATE = {"position": {"step": 3, "epoch": 0}, "scaler": None, "optimizer": {"groups": [{"lr": 0.1}]}}


def digest_of(
    folder: Path,
    tensors: Mapping[str, bytes] = TENSORS,
    *,
    num_shards: int = 1,
    dtype: str = "U8",
    leading_dims: tuple[int, ...] = (),
    **manifest: Any,
) -> str:
    """Commit a checkpoint of these tensors, dealt out to so many shards, and return its digest."""
    run = RunDir(folder)
    uncommitted = uncommitted_path(run, 3, 0)
    uncommitted.mkdir(parents=True)
    shards = []
    for rank in range(num_shards):
        mine = dict(list(tensors.items())[rank::num_shards])
        entries, offset = [], 0
        for name, data in mine.items():
            entries.append(TensorEntry(name, dtype, (*leading_dims, len(data)), offset, offset + len(data)))
            offset += len(data)
        header = shard_header(entries)
        path = uncommitted / shard_name(rank, num_shards)
        shards.append(write_shard(path, [header, *mine.values()], size=len(header) + offset))
    plain = Manifest(step=3, world_size=num_shards, shards=tuple(shards), state=STATE)
    return checkpoint_digest(commit_checkpoint(run, uncommitted, replace(plain, **manifest)))


@pytest.mark.parametrize(
    "change",
    [
        {"num_shards": 2},
        {"num_shards": 3},
        {"tensors": dict(reversed(TENSORS.items()))},
        {"metrics": {"loss": 0.5}},
        {"made": {"at": 17.0, "attempt": 4}},
        {"state": dict(reversed(STATE.items()))},
    ],
    ids=str,
)
def test_the_digest_does_not_depend_on_how_and_when_a_state_was_written(change: dict[str, Any], tmp_path: Path) -> None:
    assert digest_of(tmp_path / "changed", **change) == digest_of(tmp_path / "plain")


@pytest.mark.parametrize(
    "change",
    [
        *({"tensors": {**TENSORS, name: bytes([data[0] ^ 1]) + data[1:]}} for name, data in TENSORS.items()),
        *({"tensors": {key: data for key, data in TENSORS.items() if key != name}} for name in TENSORS),
        {"tensors": {("model/other" if name == "model/bias" else name): data for name, data in TENSORS.items()}},
        {"tensors": {**TENSORS, "model/weight": TENSORS["model/bias"], "model/bias": TENSORS["model/weight"]}},
        {"dtype": "I8"},
        {"leading_dims": (1,)},
        {"state": {**STATE, "position": {"step": 4, "epoch": 0}}},
        {"state": {**STATE, "scaler": {"scale": 2.0}}},
        {"state": {**STATE, "optimizer": {"groups": [{"lr": 0.1 + 1e-17}, {}]}}},
        {"state": {**STATE, "more": 0}},
    ],
    ids=str,
)
def test_the_digest_depends_on_every_tensor_and_every_number(change: dict[str, Any], tmp_path: Path) -> None:
    assert digest_of(tmp_path / "changed", **change) != digest_of(tmp_path / "plain")


def test_equal_trainings_have_equal_digests(pristine: RunDir, tmp_path: Path) -> None:
    again = make_run(tmp_path)
    save(again, OLDER, NEWEST, world_size=2, attempt=5)

    expected = checkpoint_digest(checkpoint_path(pristine, NEWEST))

    assert checkpoint_digest(checkpoint_path(again, NEWEST)) == expected
    assert checkpoint_digest(checkpoint_path(again, OLDER)) != expected


# --- formats ---------------------------------------------------------------------------------------------------------


def test_shards_are_safetensors_files_that_hold_each_tensor_once(pristine: RunDir) -> None:
    path = checkpoint_path(pristine, NEWEST)
    raw = read_tensors(path, read_manifest(path))

    shards = [load_file(path / name) for name in FILES[1:]]

    assert all(shards)
    assert sorted(name for shard in shards for name in shard) == sorted(raw)
    for shard in shards:
        for name, tensor in shard.items():
            assert (tuple(tensor.shape), tensor.numpy().tobytes()) == (raw[name].shape, bytes(raw[name].data))


@pytest.mark.parametrize("ema", [False, True, None])
def test_exported_weights_are_the_models_own_and_by_default_those_that_were_evaluated(
    ema: bool | None, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    (checkpointer,) = make_checkpointers(run)
    state = make_state(steps=3, ema=True)
    checkpointer.save_and_wait(state)
    module = state.model if ema is False else state.ema.module

    count, is_average = export_weights(checkpoint_path(run, 3), tmp_path / "weights.safetensors", ema=ema)

    exported = load_file(tmp_path / "weights.safetensors")
    assert count == len(exported)
    assert is_average is (ema is not False)
    assert exported.keys() == module.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in module.state_dict().items())
    assert not any(name.startswith("module.") for name in exported)
    Net().load_state_dict(exported)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
        torch.bool,
    ],
    ids=str,
)  # fmt: skip
def test_tensors_of_every_type_and_shape_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    values = {"scalar": torch.tensor(1), "empty": torch.zeros(0, 3), "odd": torch.arange(3) % 2, "plane": torch.eye(2)}
    state, back = make_state(), make_state()
    for name, value in values.items():
        state.model.register_buffer(name, value.to(dtype))
        back.model.register_buffer(name, torch.zeros_like(value).to(dtype))
    make_checkpointers(run)[0].save_and_wait(state)

    make_checkpointers(run, attempt=1)[0].restore_newest(back, seed=SEED)

    for name, value in values.items():
        restored = back.model.get_buffer(name)
        assert restored.dtype == dtype
        assert restored.double().tolist() == value.double().tolist()
    with safe_open(checkpoint_path(run, 0) / shard_name(0, 1), framework="pt") as file:
        assert file.get_tensor("model/odd").dtype == dtype


def test_an_export_that_fails_leaves_nothing_behind(pristine: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no 'ema' weights; it has model, optimizer, rank\.0, rank\.1"):
        export_weights(checkpoint_path(pristine, NEWEST), tmp_path / "weights.safetensors", ema=True)

    assert list(tmp_path.iterdir()) == []


def test_a_manifest_says_what_the_checkpoint_is(pristine: RunDir) -> None:
    manifest = read_manifest(checkpoint_path(pristine, NEWEST))

    assert (manifest.step, manifest.world_size, manifest.format) == (NEWEST, 2, shards.FORMAT_VERSION)
    assert manifest.state["position"] == {"step": NEWEST, "epoch": 0, "samples_in_epoch": 5 * NEWEST}
    assert (
        json.loads((checkpoint_path(pristine, NEWEST) / MANIFEST_NAME).read_text())["content"]["made"]["attempt"] == 0
    )


# --- writers that fail ------------------------------------------------------------------------------------------------


def block_shard(run: RunDir, step: int, rank: int) -> None:
    """Put something in the way of the shard that a rank of attempt 0, which has begun, writes next."""
    (uncommitted_path(run, step, 0) / shard_name(rank, 2)).mkdir(parents=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_is_reported_and_leaves_nothing(rank: int, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    results: list[tuple[int, float, str | None]] = []
    checkpointers = make_checkpointers(run, world_size=2, on_result=lambda *one: results.append(one))
    states = [make_state(rank=rank, world_size=2, steps=3) for rank in range(2)]
    block_shard(run, 3, rank)

    for checkpointer, state in zip(checkpointers, states, strict=True):
        checkpointer.save(state)
    for checkpointer in checkpointers:
        checkpointer.wait()

    ((_, _, error),) = results
    assert str(error).startswith(f"rank {rank} on {host_name()}: IsADirectoryError")
    assert [path.name for path in run.checkpoints.rglob("*")] == ["attempt-0.writing"]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_a_save_that_fails_is_told_on_every_rank(rank: int, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    checkpointers = make_checkpointers(run, world_size=2)
    states = [make_state(rank=rank, world_size=2, steps=3) for rank in range(2)]
    block_shard(run, 3, rank)

    with ThreadPoolExecutor(2) as ranks:
        ends = [ranks.submit(one.save_and_wait, state) for one, state in zip(checkpointers, states, strict=True)]

    for end in ends:
        with pytest.raises(
            CheckpointError, match=f"The checkpoint of step 3 could not be committed: rank {rank} on [^:]+: Is"
        ):
            end.result()


def test_the_save_after_one_that_failed_is_made(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    results: list[tuple[int, float, str | None]] = []
    checkpointers = make_checkpointers(run, world_size=2, on_result=lambda *one: results.append(one))
    states = [make_state(rank=rank, world_size=2) for rank in range(2)]
    block_shard(run, 1, 1)

    for _ in range(2):
        for state in states:
            take_step(state)
        for checkpointer, state in zip(checkpointers, states, strict=True):
            checkpointer.save(state)
    for checkpointer in checkpointers:
        checkpointer.wait()

    assert [(step, error is None) for step, _, error in results] == [(1, False), (2, True)]
    assert committed_steps(run) == [2]


def test_all_ranks_wait_at_the_next_save_while_the_writer_of_one_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those whose own shard is written would wait in the next collective, unheard, and end as hung; rank 2 writes until rank 1 has heard of it."""
    monkeypatch.setattr(sealed_store, "HEARTBEAT_INTERVAL_S", 0.02)
    run = make_run(tmp_path)
    checkpointers = make_checkpointers(run, world_size=3)
    states = [make_state(rank=rank, world_size=3, steps=1) for rank in range(3)]
    is_waited_for = threading.Semaphore(0)
    write = checkpoint_store.write_shard

    def slow_write(path: Path, *given: Any, on_progress: Callable[[], object], **more: Any) -> Any:
        if path.name == shard_name(2, 3):
            while not is_waited_for.acquire(timeout=0.01):
                on_progress()
        return write(path, *given, on_progress=on_progress, **more)

    monkeypatch.setattr(checkpoint_store, "write_shard", slow_write)
    checkpointers[1].on_progress = is_waited_for.release
    for checkpointer, state in zip(checkpointers, states, strict=True):
        checkpointer.save(state)
        take_step(state)

    checkpointers[1].save(states[1])

    assert committed_steps(run) == [1]
    for rank in (0, 2):
        is_waited_for.release()
        checkpointers[rank].save(states[rank])
    for checkpointer in checkpointers:
        checkpointer.wait()
    assert committed_steps(run) == [1, 2]


def test_rank_zeros_store_keeps_no_report_of_a_save_once_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report has a checksum for each 8 MiB, and rank zero serves the store: it would grow with each save."""
    monkeypatch.setattr(sealed_store, "HEARTBEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr(checkpoint_store, "CHUNK_BYTES", 64)  # for heartbeats
    store = HashStore()
    monkeypatch.setattr(made_state, "HashStore", lambda: store)
    run = make_run(tmp_path)

    save(run, 1, world_size=3)

    assert committed_steps(run) == [1]
    kept = ["outcome", "outcome/heartbeat", "read/1", "read/2"]
    assert store.num_keys() == len(kept)


class Awaited(torch.Tensor):
    """A tensor that says when the host asks for its value, and so waits for the device."""

    asked: ClassVar[list[torch.Size]] = []

    def item(self) -> Any:
        self.asked.append(self.shape)
        return super().item()


@pytest.mark.parametrize(
    ("losses", "is_committed"),
    [
        ([], True),
        ([torch.tensor(1.0), torch.ones(1, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.float64)], True),
        ([torch.tensor(1.0), torch.tensor(torch.inf, dtype=torch.float16), torch.tensor(2.0)], False),
    ],
    ids=["none", "of many dtypes", "one not finite"],
)
def test_the_losses_of_all_micro_batches_are_checked_with_one_wait_for_the_device(
    losses: list[torch.Tensor], is_committed: bool, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    (checkpointer,) = make_checkpointers(run)
    checkpointer.newest_losses = lambda: [one.as_subclass(Awaited) for one in losses]
    Awaited.asked.clear()

    checkpointer.save(make_state(steps=1))
    checkpointer.wait()

    assert committed_steps(run) == ([1] if is_committed else [])
    assert len(Awaited.asked) <= 1


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    results: list[tuple[int, float, str | None]] = []
    (checkpointer,) = make_checkpointers(run, on_result=lambda *one: results.append(one))
    state = make_state(steps=1)

    for _ in range(3):
        checkpointer.save_and_wait(state)

    assert [step for step, _, _ in results] == [1]


def test_what_the_training_does_next_does_not_reach_a_save_under_way(tmp_path: Path) -> None:
    run, expected = make_run(tmp_path / "racing"), make_run(tmp_path / "waiting")
    rng.seed_everything("made", 0)
    state = make_state(steps=1)
    make_checkpointers(expected)[0].save_and_wait(state)
    (checkpointer,) = make_checkpointers(run)

    checkpointer.save(state)
    for _ in range(20):
        take_step(state)
    checkpointer.wait()

    assert checkpoint_digest(checkpoint_path(run, 1)) == checkpoint_digest(checkpoint_path(expected, 1))


def test_the_order_of_ddps_buckets_is_kept_with_the_checkpoint_and_not_in_its_digest(tmp_path: Path) -> None:
    digests = set()
    for name, order in (("with", [1, 0]), ("without", None)):
        run = make_run(tmp_path, name)
        saved, restored = make_state(steps=1), make_state()
        saved.gradient_order = order
        make_checkpointers(run)[0].save_and_wait(saved)
        make_checkpointers(run)[0].restore_newest(restored, seed=0)
        digests.add(checkpoint_digest(checkpoint_path(run, 1)))
        assert restored.gradient_order == order
    assert len(digests) == 1
