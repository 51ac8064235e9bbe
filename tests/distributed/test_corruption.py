"""A run whose newest checkpoints are damaged goes on from one that holds, and ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME, checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import shard_name, verify_checkpoint
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.whole_runs import Workplace, make_workplace

SOUND = 2
"""The only checkpoint that is left alone."""
NUM_STEPS = 20
CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 100, width: 8}}
train: {epochs: 9, global_batch_size: 12, micro_batch_size: 3, lr: 0.01}
optimizer: {name: adamw}
lr_schedule: {name: constant}
resources: {workers_per_node: 2}
checkpoint: {every_steps: 2, keep_last: 20}
"""


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@dataclass(frozen=True)
class Damage:
    """What is done to which file, and the words that tell of it; none, where it makes the checkpoint vanish."""

    file: str
    do: Callable[[Path], object]
    told: str


DAMAGE: Mapping[int, Damage] = {
    14: Damage(MANIFEST_NAME, flip, "manifest.json"),
    12: Damage(shard_name(0, 2), flip, "shard-00000-of-00002.safetensors is damaged: it does not match its checksum"),
    10: Damage(shard_name(1, 2), lambda path: path.write_bytes(path.read_bytes()[:-1]), "were written"),
    8: Damage(shard_name(1, 2), lambda path: path.write_bytes(b""), "has 0 bytes"),
    6: Damage(shard_name(0, 2), Path.unlink, "shard-00000-of-00002.safetensors cannot be read"),
    4: Damage(MANIFEST_NAME, Path.unlink, ""),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("corruption"), CONFIG)


@pytest.fixture(scope="module")
def damaged(workplace: Workplace) -> RunDir:
    """A run that was damaged at step 14, once in each way, and went on to step 20."""
    run = workplace.run("damaged")
    workplace.finish(run.name, f"train.max_steps={max(DAMAGE)}")
    for step, damage in DAMAGE.items():
        damage.do(checkpoint_path(run, step) / damage.file)
    workplace.finish(run.name, f"train.max_steps={NUM_STEPS}")
    return run


@pytest.mark.long
def test_it_ends_with_the_bits_of_the_unbroken_run(workplace: Workplace, damaged: RunDir) -> None:
    unbroken = workplace.finish("unbroken", f"train.max_steps={NUM_STEPS}")

    assert workplace.digest(damaged.name) == unbroken


def test_it_goes_on_from_the_newest_that_holds_and_says_so(damaged: RunDir) -> None:
    for log in (damaged.rank_log(1, 0), damaged.console):
        assert f"resumed at step {SOUND} of {NUM_STEPS}" in log.read_text()


@pytest.mark.parametrize("step", [step for step, damage in DAMAGE.items() if damage.told])
def test_what_is_wrong_is_told_in_log_and_console(damaged: RunDir, step: int) -> None:
    for log in (damaged.rank_log(1, 0), damaged.console):
        lines = [line for line in log.read_text().splitlines() if f"step-{step:08d}" in line and "WARNING" in line]
        assert len(lines) == 1, lines
        assert DAMAGE[step].told in lines[0]
        assert f"renamed to step-{step:08d}.corrupt-0, and ddp-hpc looks for an older one to continue from." in lines[0]


@pytest.mark.parametrize("step", DAMAGE)
def test_what_is_damaged_lies_aside_and_its_step_is_committed_anew(damaged: RunDir, step: int) -> None:
    path = checkpoint_path(damaged, step)

    assert path.with_name(f"{path.name}.corrupt-0").is_dir()
    assert verify_checkpoint(path).made["attempt"] == 1


def test_everything_that_is_committed_in_the_end_holds(workplace: Workplace, damaged: RunDir) -> None:
    done = workplace.command("checkpoints", damaged.name, "--verify")

    assert done.returncode == 0, done.stdout + done.stderr
    assert committed_steps(damaged) == list(range(2, NUM_STEPS + 1, 2))
    assert {path.suffix for path in damaged.checkpoints.iterdir()} == {"", ".corrupt-0"}
