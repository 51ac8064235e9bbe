"""A node that has computed something wrong is left out of the run's next job; one that was outvoted and was right is not any more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.differences import read_difference
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from tests.slurm.cluster import USER
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import SMALL, TRIAL_RECIPE, LoginNode, world

FLIPPING_RECIPE = ROOT / "tests" / "distributed" / "flipping_recipe.py"
STEP = 8
EVERY = 4


def trained_with_flips(login: LoginNode, name: str, ranks: tuple[int, ...]) -> list[Attempt]:
    """Train on three of the four nodes, where a bit flips once on each of these ranks; return the attempts."""
    login.add_recipe(TRIAL_RECIPE)
    login.add_recipe(FLIPPING_RECIPE)
    folder = Path(login.folder, f"{name}-flips")
    folder.mkdir()
    shutil.chown(folder, USER, USER)
    flips = ",".join(f"[{STEP},{rank},weight,once]" for rank in ranks)
    recipe = ("recipe.target=flipping_recipe:build", "recipe.args={}", f"recipe.args.folder={folder}")
    asked = (f"recipe.args.flips=[{flips}]", "train.global_batch_size=6", f"integrity.every_steps={EVERY}")
    login.submit(name, *recipe, *SMALL, *asked, *world(3, 1), "--wait")
    return list(Ledger.read(login.run(name)).attempts)


@pytest.mark.long
def test_the_next_job_lacks_the_node_on_which_a_bit_flipped_and_ends_with_the_same_bits(login: LoginNode) -> None:
    (unbroken,) = trained_with_flips(login, "sound", ())

    first, second = trained_with_flips(login, "flipped", (1,))

    assert unbroken.cause == second.cause == "finished"
    assert (first.cause, first.next, first.failed_nodes) == ("ranks differ", "requeue", (first.nodes[1],))
    assert first.nodes[1] not in second.nodes
    assert len(second.nodes) == 3
    assert login.digest("flipped") == login.digest("sound")


@pytest.mark.long
def test_of_two_nodes_that_are_wrong_alike_the_outvoted_third_is_readmitted(login: LoginNode) -> None:
    first, second = trained_with_flips(login, "alike", (1, 2))

    found = read_difference(login.run("alike"), first.attempt)
    assert found is not None
    assert (found.step, found.odd_ranks, found.told_by, found.told_in) == (STEP, (1, 2), "repetition", second.attempt)
    assert (first.cause, first.next, second.cause) == ("ranks differ", "requeue", "finished")
    assert first.nodes[0] not in second.nodes, "the vote had excluded it"
    assert first.failed_nodes == first.nodes[1:], "the record is corrected"
