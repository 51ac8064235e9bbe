"""The death of a rank, and a stop, while a run restores its checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.exit_codes import STOPPED
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import shard_name
from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.ledger import Ledger
from tests.distributed.test_leaving import CONFIG, until
from tests.distributed.whole_runs import live_processes, make_workplace

TWO = "resources.workers_per_node=2"
STEPS = [2, 4]


@pytest.mark.long
def test_a_rank_that_dies_while_a_checkpoint_is_restored_ends_the_attempt_and_the_next_one_restores(
    tmp_path: Path,
) -> None:
    place = make_workplace(tmp_path, CONFIG)
    run = place.run("run")
    place.finish("run", TWO, f"train.max_steps={STEPS[-1]}")
    shard = checkpoint_path(run, STEPS[-1]) / shard_name(1, 2)
    away = shard.rename(tmp_path / "away")
    shard.symlink_to(
        shard.name
    )  # "Too many levels of symbolic links" says nothing of the file, so the ranks wait for it

    with ThreadPoolExecutor() as pool:  # `submit` returns once the run trains, or has ended
        submitted = pool.submit(place.submit, "run", TWO, "train.max_steps=6", "restart.in_place=false")
        log = run.rank_log(1, 0)
        until(lambda: log.exists() and "Trying again for 60 s" in log.read_text())
        live_processes(run)["worker"][1].kill()
        submitted.result()
        until(lambda: not processes.is_locked(run.lock))

    failure = first_failure(run, 1)
    assert failure is not None
    assert (failure.rank, failure.exception[:17]) == (1, "killed by SIGKILL")  # before rank zero's patience had ended
    assert Ledger.read(run).attempts[1].ending == "failed"
    assert committed_steps(run) == STEPS
    assert list(run.checkpoints.glob("*.corrupt-*")) == []

    shard.unlink()
    away.rename(shard)
    place.finish("run", TWO, "train.max_steps=6")
    assert "resumed at step 4 of 6" in run.console.read_text()


@pytest.mark.long
def test_workers_that_are_asked_to_stop_while_they_wait_for_a_checkpoint_exit_as_stopped_and_the_next_attempt_restores_it(
    tmp_path: Path,
) -> None:
    place = make_workplace(tmp_path, CONFIG)
    run = place.run("run")
    place.finish("run", TWO, f"train.max_steps={STEPS[-1]}")
    shard = checkpoint_path(run, STEPS[-1]) / shard_name(0, 2)
    away = shard.rename(tmp_path / "away")
    shard.symlink_to(shard.name)

    with ThreadPoolExecutor() as pool:
        submitted = pool.submit(place.submit, "run", TWO, "train.max_steps=6")
        log = run.rank_log(1, 0)
        until(lambda: log.exists() and "Trying again for 60 s" in log.read_text())
        for worker in live_processes(run)["worker"]:
            worker.terminate()
        submitted.result()
        until(lambda: not processes.is_locked(run.lock))

    attempt = Ledger.read(run).attempts[1]
    assert (attempt.ending, attempt.exit_code) == ("stopped", STOPPED)
    assert first_failure(run, 1) is None
    assert committed_steps(run) == STEPS
    assert list(run.checkpoints.glob("*.corrupt-*")) == []

    shard.unlink()
    away.rename(shard)
    place.finish("run", TWO, "train.max_steps=6")
    assert "resumed at step 4 of 6" in run.console.read_text()
