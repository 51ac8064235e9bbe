"""Each example, on two ranks: stopped once and killed once, it takes two more attempts and gives the losses of an undisturbed run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.test_scripts import TWO, Place, until

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES_OF_RANKS = {
    "lightning": [],
    "transformers": ["rng_state_0.pth", "rng_state_1.pth"],
    "accelerate": ["random_states_0.pkl", "random_states_1.pkl"],
}
"""What each rank adds to a checkpoint. If both were rank zero of a world of their own, one would be missing."""
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for script in EXAMPLES.glob("with_*.py"):
        shutil.copy(script, tmp_path)
    return Place(tmp_path)


def committed(run: RunDir) -> list[int]:
    """Return the steps that have a checkpoint, oldest first."""
    return sorted(int(path.name[5:]) for path in run.checkpoints.glob("step-" + "[0-9]" * 8))


def losses(place: Place, name: str, rank: int) -> dict[int, str]:
    """Return a rank's loss at each step; of a step that several attempts took, the newest one's."""
    found: dict[int, str] = {}
    for attempt in place.attempts(name):
        found.update({int(step): loss for step, loss in LOSS.findall(place.log(name, rank, attempt.attempt))})
    return found


@pytest.mark.parametrize("library", FILES_OF_RANKS)
def test_an_example_that_is_stopped_and_killed_comes_back_once_each_with_the_losses_of_an_undisturbed_run(
    library: str, place: Place
) -> None:
    script = f"with_{library}.py"
    (place.path / "undisturbed").mkdir()
    shutil.copy(place.path / script, place.path / "undisturbed")
    calm = Place(place.path / "undisturbed")
    undisturbed = calm.submit((*TWO, "name=calm"), "python", script)
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    submission = ((*TWO, "name=it", "restart.in_place=false"), "python", script)
    run = place.run("it")

    assert place.submit(*submission, wait=False).returncode == 0
    until(lambda: committed(run))
    late = place.script_processes("it")[1]
    late.suspend()  # the other one gets the signal first
    assert place.ddp_hpc("stop", "it").returncode == 0
    late.resume()
    until(lambda: place.attempts("it")[-1].ending is not None)
    stopped_at = committed(run)[-1]
    assert place.submit(*submission, wait=False).returncode == 0
    until(lambda: committed(run)[-1] > stopped_at)
    place.script_processes("it")[0].kill()
    until(lambda: place.attempts("it")[1].ending is not None)
    killed = first_failure(run, 1)
    last = place.submit(*submission)

    assert last.returncode == 0, last.stdout + last.stderr
    assert [attempt.cause for attempt in place.attempts("it")] == ["stop asked", "worker crashed", "finished"]
    assert f"all of them stop after step {stopped_at}" in place.console("it")
    assert place.attempts("it")[0].last_step == stopped_at
    assert killed is not None
    assert killed.signal == 9
    for rank in range(2):
        assert losses(place, "it", rank) == losses(calm, "calm", rank)
    assert len(losses(calm, "calm", 0)) >= 150
    newest = run.checkpoints / f"step-{committed(run)[-1]:08d}"
    assert [name for name in FILES_OF_RANKS[library] if not (newest / name).exists()] == []
    assert committed(run)[-1] == committed(calm.run("calm"))[-1] == max(losses(calm, "calm", 0))
