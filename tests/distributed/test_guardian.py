"""A supervisor that is killed ends no run: its guardian starts another, and nobody has to help."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.launch.submission import local
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from tests.distributed.kill_trials import CONFIG
from tests.distributed.whole_runs import Workplace, live_processes, make_workplace

PATIENCE_S = 120.0
WORDS = ("train.epochs=1", "resources.workers_per_node=2", "train.micro_batch_size=12", "recipe.args.load_s=0.005")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("guarded"), CONFIG)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def killed(workplace: Workplace) -> RunDir:
    """Return a run whose supervisor was killed amid training, at its end."""
    assert workplace.submit("killed", *WORDS).returncode == 0
    run = workplace.run("killed")
    until(lambda: len(committed_steps(run)) >= 2)
    (first,) = Ledger.read(run).attempts
    before = [process for group in live_processes(run).values() for process in group]

    os.kill(first.pid, signal.SIGKILL)
    last = local.wait(run, 0, os.environ)  # what `submit --wait` does: it follows to the attempt after

    assert (last.attempt, last.ending) == (1, "finished")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before)
    until(lambda: not processes.is_locked(run.lock))
    return run


def test_a_run_whose_supervisor_is_killed_amid_training_goes_on_by_itself_and_finishes(killed: RunDir) -> None:
    first, second = Ledger.read(killed).attempts

    assert (first.cause, first.next, first.ending) == ("supervisor died", "in place", "failed")
    assert first.reason == "ddp-hpc's supervisor process was killed by signal 9 (SIGKILL)"
    assert (second.ending, second.first_step) == ("finished", first.last_step)


@pytest.mark.long
def test_it_ends_with_the_bits_of_the_undisturbed_run(workplace: Workplace, killed: RunDir) -> None:
    assert workplace.digest(killed.name) == workplace.finish("unbroken", *WORDS)


@pytest.mark.long
def test_a_run_goes_on_without_its_guardian(workplace: Workplace) -> None:
    assert workplace.submit("alone", *WORDS).returncode == 0
    run = workplace.run("alone")
    guardian = psutil.Process(Ledger.read(run).attempts[0].pid).parent()
    assert guardian is not None
    assert "ddp_hpc.job.guardian" in guardian.cmdline()

    guardian.kill()

    assert local.wait(run, 0, os.environ).ending == "finished"


@pytest.mark.long
def test_a_supervisor_that_always_dies_ends_the_run_with_the_reason(workplace: Workplace) -> None:
    slow = ("recipe.args.load_s=0.05", "checkpoint.every_steps=1000", "restart.max_no_progress=2")
    assert workplace.submit("mortal", *WORDS, *slow).returncode == 0
    run = workplace.run("mortal")

    for attempt in range(2):
        until(lambda: Ledger.read(run).attempts[-1].attempt == attempt)  # noqa: B023
        os.kill(Ledger.read(run).attempts[-1].pid, signal.SIGKILL)
    last = local.wait(run, 0, os.environ)

    assert [one.next for one in Ledger.read(run).attempts] == ["in place", ""]
    assert last.reason.startswith(
        "ddp-hpc's supervisor process was killed by signal 9 (SIGKILL); 2 attempts in a row ended without a new"
    )
    assert last.exit_code == exit_codes.FAILED
    until(lambda: not processes.is_locked(run.lock))


@pytest.mark.long
def test_a_run_that_was_asked_to_stop_stops_though_its_supervisor_dies(workplace: Workplace) -> None:
    slow = ("recipe.args.load_s=0.05",)
    assert workplace.submit("asked", *WORDS, *slow).returncode == 0
    run = workplace.run("asked")
    guardian = psutil.Process(Ledger.read(run).attempts[0].pid).parent()
    assert guardian is not None

    os.kill(Ledger.read(run).attempts[0].pid, signal.SIGKILL)
    until(lambda: Ledger.read(run).attempts[0].ending is not None)
    guardian.terminate()  # it passes the signal on

    assert local.wait(run, 0, os.environ).ending == "stopped"
    progress = read_progress(run)
    assert progress is None or progress.step < (progress.total_steps or 0)


@pytest.mark.long
def test_a_cancelled_run_is_not_started_again(workplace: Workplace, tmp_path: Path) -> None:
    assert workplace.submit("cancelled", *WORDS, "recipe.args.load_s=0.05").returncode == 0
    run = workplace.run("cancelled")

    assert workplace.command("cancel", "cancelled").returncode == 0

    until(lambda: not processes.is_locked(run.lock))
    assert [one.ending for one in Ledger.read(run).attempts] == ["cancelled"]


@pytest.mark.long
def test_a_run_that_is_suspended_for_longer_than_a_hang_and_woken_goes_on_and_has_not_hung(
    workplace: Workplace,
) -> None:
    words = (*WORDS, "recipe.args.load_s=0.02", "restart.hang_timeout_s=15")
    assert workplace.submit("suspended", *words).returncode == 0
    run = workplace.run("suspended")
    until(lambda: committed_steps(run))
    everybody = [process for group in live_processes(run).values() for process in group]

    for process in everybody:
        process.suspend()
    time.sleep(20.0)
    for process in everybody:
        process.resume()
    last = local.wait(run, 0, os.environ)

    assert last.ending == "finished"
    assert {one.cause for one in Ledger.read(run).attempts} <= {"suspended", "finished"}
    assert workplace.digest("suspended") == workplace.finish("awake", *WORDS)
