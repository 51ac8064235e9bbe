"""Scripts that use `attach`, run as they are: stopped in the middle of an epoch, resumed, and under torchrun."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.test_scripts import ENVIRON, TWO, Place, until

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
EXAMPLE = ("plain_torch.py", "--epochs", "5", "--batch-size", "1")
"""Few and long epochs, so that a stop comes in the middle of one."""
LAST = "step-00000640"

ONE_IS_ASKED = """
import os, signal
import torch.distributed as dist
from ddp_hpc import attach

dist.init_process_group("gloo")
run = attach()
rank = dist.get_rank()
for step in range(1, 1_000_000):
    if rank == 1 and step == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    if run.should_stop(step):
        break
(run.checkpoint_dir / "step-9.tmp").mkdir(exist_ok=True)
(run.checkpoint_dir / "step-9.tmp" / f"rank-{rank}").write_text(str(step))
path = run.commit(run.checkpoint_dir / "step-9.tmp")
assert path == run.latest() and len(list(path.glob("rank-*"))) == 2
run.exit_for_requeue()
"""
ONE_WRITES_LATE = """
import time
import numpy as np
import torch.distributed as dist
from ddp_hpc import attach

dist.init_process_group("gloo")
run = attach()
folder = run.checkpoint_dir / "last.tmp"
folder.mkdir(exist_ok=True)
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(1.0)
    (folder / "state").write_text("weights")
assert (run.commit(folder, step=np.int64(3)) / "state").read_text() == "weights"
"""
ATTACHES_FIRST = """
import os, time
from pathlib import Path
import torch.distributed as dist
from ddp_hpc import attach

if os.environ["RANK"] == "1":
    while not Path("go").exists():
        time.sleep(0.05)
run = attach()
print("attached", flush=True)
dist.init_process_group("gloo")
step = 0
while not run.should_stop(step := step + 1):
    print("steps", flush=True)
    time.sleep(0.05)
print("stops", flush=True)
run.exit_for_requeue()
"""
BEFORE_A_GROUP = """
import os
from ddp_hpc import attach

run = attach()
found = run.latest()
assert found is not None and found.name == "step-00000009", found
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    shutil.copy(EXAMPLES / "plain_torch.py", tmp_path)
    return Place(tmp_path)


def are_equal(one: Path, other: Path) -> bool:
    """Tell whether two saves of the example are equal to the bit: model, optimizer, data position."""
    first, second = torch.load(one / "state.pt"), torch.load(other / "state.pt")
    tensors = zip(*(torch.utils._pytree.tree_leaves(state) for state in (first, second)), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in tensors)


@pytest.mark.long
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stop_ends_ranks_that_wait_for_others_to_start_and_is_heard_once_all_have_met(
    has_begun: bool, place: Place
) -> None:
    (place.path / "early.py").write_text(ATTACHES_FIRST)
    assert place.submit(TWO, "python", "early.py", wait=False).returncode == 0
    until(lambda: "attached" in place.log("early"))
    if has_begun:
        (place.path / "go").touch()
        until(lambda: all("steps" in place.log("early", rank) for rank in range(2)))

    done = place.ddp_hpc("stop", "early")

    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: place.attempts("early")[-1].ending is not None)
    (attempt,) = place.attempts("early")
    assert (attempt.ending, attempt.cause) == ("stopped", "stop asked")
    assert ("stops" in place.log("early")) == has_begun


@pytest.mark.long
def test_the_example_stopped_with_a_rank_that_hears_late_ends_in_the_bits_that_torchrun_gives_undisturbed(
    place: Place,
) -> None:
    subprocess.run([*TORCHRUN, *EXAMPLE], cwd=place.path, env=ENVIRON, check=True, capture_output=True)
    undisturbed = place.path / "checkpoints" / LAST
    submission = ((*TWO, "name=ours"), "python", *EXAMPLE)
    checkpoints = place.run("ours").checkpoints
    assert place.submit(*submission, wait=False).returncode == 0
    until(lambda: list(checkpoints.glob("step-????????")))
    late = place.script_processes("ours")[1]
    late.suspend()  # it gets the signal when it goes on, long after the other

    assert place.ddp_hpc("stop", "ours").returncode == 0
    time.sleep(1.0)
    late.resume()
    until(lambda: place.attempts("ours")[-1].ending is not None)
    (first,) = place.attempts("ours")
    shown = place.ddp_hpc("status", "ours").stdout
    again = place.submit(*submission)

    assert (first.ending, first.cause, first.exit_code) == ("stopped", "stop asked", 99)
    said = re.search(r"all of them stop after step (\d+)", place.console("ours"))
    assert said is not None
    step = int(said[1])
    assert first.last_step == step
    assert re.search(rf"^step +{step}$", shown, re.MULTILINE), shown
    assert re.search(rf"^checkpoint +step {step}, ", shown, re.MULTILINE), shown
    assert again.returncode == 0, again.stdout + again.stderr
    assert [attempt.cause for attempt in place.attempts("ours")] == ["stop asked", "finished"]
    assert are_equal(checkpoints / LAST, undisturbed)


@pytest.mark.long
def test_a_commit_waits_for_the_rank_that_writes(tmp_path: Path) -> None:
    """The one with local rank 0 flushes for its host, also where another rank writes all; the step may be NumPy's."""
    (tmp_path / "late.py").write_text(ONE_WRITES_LATE)

    done = subprocess.run(
        [*TORCHRUN, "late.py"], cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, check=False, timeout=90
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_under_torchrun_all_ranks_stop_after_one_step_where_one_is_asked_and_find_the_checkpoint_before_they_have_a_group(
    tmp_path: Path,
) -> None:
    (tmp_path / "asked.py").write_text(ONE_IS_ASKED)
    (tmp_path / "before.py").write_text(BEFORE_A_GROUP)

    asked, before = (
        subprocess.run(
            [*TORCHRUN, script], cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, check=False, timeout=90
        )
        for script in ("asked.py", "before.py")
    )

    steps = {path.read_text() for path in (tmp_path / "checkpoints" / "step-00000009").glob("rank-*")}
    assert len(steps) == 1, asked.stderr
    assert "exitcode  : 99" in asked.stderr
    assert before.returncode == 0, before.stderr
