"""Each example, on two nodes: preempted once and killed once, one requeue and one new attempt, and the losses of an undisturbed run."""

from __future__ import annotations

import pytest

from ddp_hpc.run.run_dir.paths import RunDir
from tests.adapters.test_examples import EXAMPLES, FILES_OF_RANKS, LOSS, committed
from tests.slurm.disturbed_scripts import SCRIPTS, Script, assert_came_back_once_each, preempt_and_kill
from tests.slurm.faulty_runs import attempts
from tests.slurm.runs import LoginNode

SAVED = {"lightning": "saved/last.ckpt", "transformers": "saved/*/*", "accelerate": "saved/*/*"}
"""What the scripts without our lines save."""


def losses(place: LoginNode, name: str, rank: int) -> dict[int, str]:
    """Return a rank's loss at each step; of a step that several attempts took, the newest one's."""
    found: dict[int, str] = {}
    for attempt in attempts(place, name):
        log = place.run(name).rank_log(attempt.attempt, rank).read_text()
        found.update({int(step): loss for step, loss in LOSS.findall(log)})
    return found


def newest_files(run: RunDir) -> set[str]:
    return {path.name for path in (run.checkpoints / f"step-{committed(run)[-1]:08d}").iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("library", FILES_OF_RANKS)
def test_an_example_that_a_higher_partition_preempts_is_requeued_once_and_gives_the_losses_of_an_undisturbed_one(
    library: str, login: LoginNode
) -> None:
    file = EXAMPLES / f"with_{library}.py"

    place, calm = preempt_and_kill(login, Script(files=file, command=("python", file.name)))

    first, second, third = assert_came_back_once_each(place)
    assert f"all of them stop after step {first.last_step}" in place.console("it")
    assert (
        0 == first.first_step < (first.last_step or 0) == second.first_step < third.first_step < (third.last_step or 0)
    )
    for rank in range(2):
        assert losses(place, "it", rank) == losses(calm, "calm", rank)
    assert committed(place.run("it"))[-1] == committed(calm.run("calm"))[-1] == max(losses(calm, "calm", 0)) >= 150
    assert set(FILES_OF_RANKS[library]) <= newest_files(place.run("it"))


@pytest.mark.long
@pytest.mark.parametrize("library", FILES_OF_RANKS)
def test_a_librarys_own_way_to_resume_brings_a_script_without_our_lines_back_once_each(
    library: str, login: LoginNode
) -> None:
    """They save at the end of an epoch, and go on from there."""
    file = SCRIPTS / f"{library}_alone.py"
    script = Script(files=file, command=("python", file.name), saved=SAVED[library], settle_s=0.3)

    place, calm = preempt_and_kill(login, script)

    # Lightning may wait for the other rank within its handler of SIGTERM, until Slurm ends the job and requeues it.
    assert_came_back_once_each(place, requeued=("requeue", "slurm") if library == "lightning" else ("requeue",))
    for rank in range(2):
        assert losses(place, "it", rank) == losses(calm, "calm", rank)
    assert len(losses(calm, "calm", 0)) >= 1000
