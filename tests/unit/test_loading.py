"""`ddp_hpc.load_checkpoint`: what a run has saved, in the user's own Python."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import ddp_hpc
from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.foreign_files import commit_files
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.state import loading
from tests.made_run import make_run
from tests.unit.made_state import Net, make_checkpointers, make_state, take_step

STEPS = 2


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run with checkpoints of steps 1 and 2, and a moving average."""
    run = make_run(tmp_path)
    state = make_state(ema=True)
    (checkpointer,) = make_checkpointers(run)
    for _ in range(STEPS):
        take_step(state)
        checkpointer.save_and_wait(state, metrics={"accuracy": 0.5})
    return run


def damage(path: Path) -> None:
    (shard,) = path.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(content)


def test_the_newest_checkpoint_of_a_run_has_the_models_weights_and_their_average(run: RunDir) -> None:
    trained = make_state(ema=True, steps=STEPS)

    saved = ddp_hpc.load_checkpoint(str(run.path))

    assert (saved.step, saved.metrics) == (committed_steps(run)[-1], {"accuracy": 0.5})
    assert saved.path == checkpoint_path(run, saved.step)
    assert saved.weights.keys() == trained.model.state_dict().keys()
    assert all(torch.equal(saved.weights[name], one) for name, one in trained.model.state_dict().items())
    assert saved.ema
    Net().load_state_dict(dict(saved.weights))


def test_a_step_and_a_checkpoints_own_directory_can_be_asked_for(run: RunDir) -> None:
    first, newest = committed_steps(run)

    assert ddp_hpc.load_checkpoint(run.path, step=first).step == first
    assert ddp_hpc.load_checkpoint(checkpoint_path(run, first)).step == first
    with pytest.raises(ConfigError, match=f"no checkpoint of step 9 in .*: {first}, {newest}"):
        ddp_hpc.load_checkpoint(run.path, step=9)
    with pytest.raises(ConfigError, match="Name the directory of a run"):
        ddp_hpc.load_checkpoint(run.path / "logs")


def test_a_damaged_checkpoint_is_never_returned_and_an_older_one_is_with_a_warning(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    first, newest = committed_steps(run)
    damage(checkpoint_path(run, newest))

    with caplog.at_level(logging.WARNING):
        saved = ddp_hpc.load_checkpoint(run.path)

    assert saved.step == first
    assert f"step {newest} is damaged" in caplog.text
    with pytest.raises(CorruptCheckpointError):
        ddp_hpc.load_checkpoint(run.path, step=newest)
    damage(checkpoint_path(run, first))
    with pytest.raises(CorruptCheckpointError):
        ddp_hpc.load_checkpoint(run.path)


def test_a_checkpoint_that_the_run_deletes_while_it_is_read_gives_way_to_the_newer_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, newest = committed_steps(run)
    listed = iter([[first], [newest], [newest]])
    monkeypatch.setattr(loading, "committed_steps", lambda _: next(listed))
    shutil.rmtree(checkpoint_path(run, first))

    assert ddp_hpc.load_checkpoint(run.path).step == newest


def test_weights_keep_no_more_in_memory_than_themselves(run: RunDir) -> None:
    saved = ddp_hpc.load_checkpoint(run.path)

    assert all(one.untyped_storage().nbytes() == one.nbytes for one in saved.weights.values())


def test_files_that_a_script_has_saved_are_verified_and_left_to_the_library_that_wrote_them(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path), tmp_path / "step-5"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"of a script")
    commit_files(run, folder, 5, attempt=0, world_size=1)

    saved = ddp_hpc.load_checkpoint(run.path)

    assert (saved.step, saved.weights, saved.ema) == (5, {}, {})
    assert (saved.path / "model.pt").read_bytes() == b"of a script"
    (saved.path / "model.pt").chmod(0o600)
    (saved.path / "model.pt").write_bytes(b"of a Script")
    with pytest.raises(CorruptCheckpointError):
        ddp_hpc.load_checkpoint(run.path)
