"""Which checkpoints there are, and whether they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.numpy
from safetensors import safe_open

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError
from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME
from ddp_hpc.watch.checkpoints import choose_step, digest, export, list_checkpoints
from tests.made_run import add_checkpoint, make_run


def test_checkpoints_are_listed_with_what_they_say_of_themselves(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = add_checkpoint(run, 40, accuracy=0.9)
    add_checkpoint(run, 8)

    first, second = list_checkpoints(run, verify=True)

    assert (first.step, second.step, second.metrics, second.world_size) == (8, 40, {"accuracy": 0.9}, 1)
    assert second.num_bytes == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert (first.problem, second.problem) == (None, None)


def test_a_flipped_bit_is_seen_by_who_reads_every_byte(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    shard = next(add_checkpoint(run, 8).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    (quick,) = list_checkpoints(run, verify=False)
    (thorough,) = list_checkpoints(run, verify=True)

    assert quick.problem is None
    assert "does not match its checksum" in str(thorough.problem)
    assert str(thorough.problem).endswith("ddp-hpc continues no run from this checkpoint.")
    with pytest.raises(CorruptCheckpointError, match=f"`ddp-hpc checkpoints {run.word} --verify` says which"):
        digest(run, 8)
    with pytest.raises(CorruptCheckpointError, match=f"`ddp-hpc checkpoints {run.word} --verify` says which"):
        export(run, 8, tmp_path / "weights.safetensors", ema=False)


def test_a_manifest_that_cannot_be_read_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (add_checkpoint(run, 8) / MANIFEST_NAME).write_text("{")

    (info,) = list_checkpoints(run, verify=False)

    assert info.num_bytes is None
    assert MANIFEST_NAME in str(info.problem)


def test_the_newest_step_is_chosen_unless_one_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_checkpoint(run, 8)
    add_checkpoint(run, 40)

    assert (choose_step(run, None), choose_step(run, 8)) == (40, 8)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 9\. Steps with a checkpoint: 8, 40"):
        choose_step(run, 9)


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        choose_step(make_run(tmp_path), None)


def test_equal_states_have_equal_digests(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name) for name in ("a", "b", "c")]
    for run, step in zip(runs, (8, 8, 9), strict=True):
        add_checkpoint(run, step)

    assert digest(runs[0], 8) == digest(runs[1], 8) != digest(runs[2], 9)


def test_weights_are_exported_by_the_models_own_names(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_checkpoint(run, 8)

    written = export(run, 8, tmp_path / "out.safetensors", ema=None)

    assert written == (1, False)
    with safe_open(tmp_path / "out.safetensors", framework="numpy") as file:
        assert file.get_tensor("weight").tolist() == [8, 0, 0, 0]


def test_weights_go_through_a_pipe_that_stays_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    add_checkpoint(run, 8)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # open for both, so that nobody waits for anybody

    export(run, 8, pipe, ema=False)

    weights = safetensors.numpy.load(os.read(reader, 10_000))
    assert weights["weight"].tolist() == [8, 0, 0, 0]
    assert pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize(
    ("output", "ema", "told"),
    [
        ("nowhere/out", False, "does not exist"),
        (".", False, "is a directory"),
        ("out", True, "no 'ema' weights; it has model"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing_behind(output: str, ema: bool, told: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    add_checkpoint(run, 8)

    with pytest.raises(ConfigError, match=told):
        export(run, 8, tmp_path / output, ema=ema)

    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
