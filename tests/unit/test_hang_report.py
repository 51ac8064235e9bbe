"""What is written of workers that hung, and which node it counts against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_hpc import exit_codes
from ddp_hpc.job.ending.attempt_end import conclude
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.run_dir.paths import RunDir
from tests.unit.made_job import CRASHED, Make


def test_a_job_that_was_suspended_begins_again_without_blame(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "stand_still")

    concluded = conclude(one.context, attempt, replace(CRASHED, was_suspended=True))

    assert (concluded.cause, one.last.next, one.last.failed_nodes) == ("suspended", "in place", ())
    assert "suspended for longer than `restart.hang_timeout_s`" in one.last.reason


@pytest.mark.parametrize("is_built", [True, False])
def test_a_recipe_that_is_never_built_is_named_and_blames_no_node(supervised: Make, *, is_built: bool) -> None:
    one = supervised()
    attempt = one.begin()
    add_stacks(one.run, attempt, "build_recipe", rank=1)  # rank 0 says nothing; a user's function may bear that name
    if not is_built:
        one.run.allowance(attempt).write_text("building")

    concluded = conclude(one.context, attempt, CRASHED)

    assert concluded.cause == "hang"
    assert one.last.reason.startswith(
        "no rank made progress for 900 s"
        if is_built
        else "the recipe did not return within 1800 s; if it needs longer, raise `restart.hang_timeout_s` above 1800;"
    )
    assert "; other ranks wait for rank 0" in one.last.reason  # it printed no stack
    assert bool(one.last.failed_nodes) is is_built


def add_stacks(run: RunDir, attempt: int, function: str, *, rank: int = 0) -> None:
    """Write what a rank's watchdog leaves in its log."""
    log = run.rank_log(attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    frame = f'  File "/x/y.py", line 7 in {function}\n'
    log.write_text(f"Timeout (0:15:00)!\nThread 0x00007f (most recent call first):\n{frame}")


def test_a_hang_that_cannot_be_written_down_is_a_hang_all_the_same(supervised: Make) -> None:
    one = supervised()
    (one.run.path / "errors").write_text("a file in the way")

    concluded = one.ends(Outcome(code=exit_codes.FAILED, is_unresponsive=True))

    assert (concluded.cause, one.last.cause) == ("hang", "hang")
    assert "no rank made progress" in one.last.reason
