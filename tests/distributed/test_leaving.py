"""How runs end: together when one dies, with a checkpoint when told to stop, and where they go on afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import processes
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.ownership import claim_run, claiming_attempts
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.watch.status import read_status
from tests.distributed.whole_runs import Workplace, cases_of, live_processes, make_workplace

CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 96, load_s: 0.002}}
train: {epochs: 3, global_batch_size: 24, lr: 0.01}
checkpoint: {every_steps: 2}
log: {every_steps: 3}
"""
LONG = ("train.epochs=1000", "recipe.args.load_s=0.004")
SLOW = "recipe.args.load_s=0.04"
"""Half a second a step of two workers, so that a slow machine interrupts in time."""
SLOWER = "recipe.args.load_s=0.25"
"""Three seconds, where there are few steps."""
PATIENCE_S = 90.0


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path, CONFIG)


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that must come about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this should have come about by now"
        time.sleep(0.01)


def begin(workplace: Workplace, name: str, *words: str) -> RunDir:
    """Start a long run and return it once it has taken some steps."""
    begun = workplace.submit(name, *LONG, *words)
    assert begun.returncode == 0, begun.stderr
    run = workplace.run(name)
    until(lambda: len(committed_steps(run)) >= 2)
    return run


@pytest.mark.parametrize(
    ("kind", "index", "state"),
    [
        ("worker", 0, "failed"),
        pytest.param("worker", 2, "failed", marks=pytest.mark.long),
        pytest.param("agent", 0, "failed", marks=pytest.mark.long),
        pytest.param("supervisor", 0, "interrupted", marks=pytest.mark.long),
    ],
)
def test_when_one_process_dies_all_are_gone(workplace: Workplace, kind: str, index: int, state: str) -> None:
    run = begin(workplace, "dies", "resources.workers_per_node=3", "data.num_workers=1", "train.micro_batch_size=8")
    before = [process for group in live_processes(run).values() for process in group]

    if kind == "supervisor":  # with its guardian, who would start another
        psutil.Process(live_processes(run)[kind][index].ppid()).kill()
    live_processes(run)[kind][index].kill()

    _, alive = psutil.wait_procs(before, timeout=PATIENCE_S)
    assert alive == []
    assert len(before) == 1 + 1 + 3 + 3 * 2  # supervisor, agent, workers, their loaders for training and evaluation
    assert read_status(run, now=time.time()).state == state


@pytest.mark.long
def test_the_error_names_the_killed_worker_and_its_log(workplace: Workplace) -> None:
    run = begin(workplace, "named", "resources.workers_per_node=3")

    live_processes(run)["worker"][1].kill()

    until(lambda: not processes.is_locked(run.lock))
    failure = first_failure(run, 0)
    assert failure is not None
    assert (failure.rank, failure.log) == (1, str(run.rank_log(0, 1)))
    assert failure.exception.startswith("killed by SIGKILL")
    assert f"rank 1 on {socket.gethostname()}: killed by SIGKILL" in workplace.command("status", "named").stdout


@pytest.mark.parametrize(
    "door", [*(pytest.param(one, marks=pytest.mark.long) for one in ("file", "supervisor")), "every process"]
)
def test_told_to_stop_by_any_door_a_run_commits_and_leaves(workplace: Workplace, door: str) -> None:
    run = begin(workplace, "stops", "resources.workers_per_node=2", "data.num_workers=1")
    everybody = live_processes(run)

    if door == "file":
        assert workplace.command("stop", "stops").returncode == 0
    elif door == "supervisor":
        everybody["supervisor"][0].send_signal(signal.SIGTERM)
    else:  # as Slurm does it
        for process in [process for group in everybody.values() for process in group]:
            process.send_signal(signal.SIGUSR2)

    until(lambda: not processes.is_locked(run.lock))
    (attempt,) = Ledger.read(run).attempts
    progress = read_progress(run)
    assert (attempt.ending, attempt.exit_code) == ("stopped", 99)
    assert progress is not None
    assert committed_steps(run)[-1] == progress.step


@pytest.mark.long
def test_a_cancelled_run_is_gone_at_once_and_goes_on_when_submitted_again(workplace: Workplace) -> None:
    run = begin(workplace, "cancelled")

    done = workplace.command("cancel", "cancelled")

    until(lambda: not processes.is_locked(run.lock))
    assert done.returncode == 0
    assert read_status(run, now=time.time()).state == "cancelled"
    assert workplace.submit("cancelled", "train.epochs=1", "train.max_steps=1", "--wait").returncode == 0


@pytest.mark.long
def test_a_finished_run_goes_on_when_more_epochs_are_asked_for(workplace: Workplace) -> None:
    workplace.finish("longer")

    workplace.finish("longer", "train.epochs=4")

    assert [attempt.ending for attempt in Ledger.read(workplace.run("longer")).attempts] == ["finished", "finished"]
    assert committed_steps(workplace.run("longer"))[-1] == 4 * 4


@pytest.mark.long
def test_metrics_of_a_resumed_run_are_those_of_the_unbroken_one_also_in_tensorboard(workplace: Workplace) -> None:
    words = ("resources.workers_per_node=2", "checkpoint.every_steps=5", "log.recorders=[tensorboard]")
    workplace.finish("whole", *words)
    run = workplace.run("broken")
    assert workplace.submit("broken", *words, SLOW).returncode == 0
    until(lambda: len(run.metrics.read_text().splitlines()) >= 3)
    live_processes(run)["agent"][0].kill()
    until(lambda: not processes.is_locked(run.lock))

    workplace.finish("broken", *words)

    assert _numbers(run) == _numbers(workplace.run("whole"))
    assert len(Ledger.read(run).attempts) == 2
    assert _board(run) == _board(workplace.run("whole")) != []


def _numbers(run: RunDir) -> list[dict[str, object]]:
    """Return what the metrics say, but for what depends on the clock."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in {"at", "samples_per_s"}} for line in lines]


def _board(run: RunDir) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard / "ddp_hpc"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


@pytest.mark.long
def test_tensorboard_gets_the_same_numbers(workplace: Workplace) -> None:
    workplace.finish("board", "log.recorders=[tensorboard]")

    lines = [line for line in _numbers(workplace.run("board")) if line["kind"] == "train"]
    written = _board(workplace.run("board"))
    assert [step for step, _ in written] == [line["step"] for line in lines]
    assert [loss for _, loss in written] == pytest.approx([line["loss"] for line in lines])


FP16 = ("train.precision=fp16", "train.grad_clip_norm=1.0")
STEP = ("optimizer.name=sgd", "optimizer.nesterov=true", "lr_schedule.name=step", "lr_schedule.milestones=[4, 8]")
EMA = ("train.ema_decay=0.5", "optimizer.name=adamw", "data.drop_last=true", "recipe.args.num_samples=100")
UNUSED = ("train.find_unused_parameters=true", "train.channels_last=true", "lr_schedule.warmup_steps=5")
OPTIONS = {
    "fp16-step": (*FP16, *STEP),
    "ema-unused": (*EMA, *UNUSED),
    "deterministic": ("train.deterministic=true", "checkpoint.every_steps=null", "train.max_steps=7"),
}


@dataclass(frozen=True)
class Resumed:
    """A run that was stopped and submitted again, beside one that was not."""

    unbroken: str
    digest: str
    endings: list[str | None]


def stop_and_resume(workplace: Workplace, option: str) -> Resumed:
    words = ("resources.workers_per_node=2", *OPTIONS[option])
    unbroken = workplace.finish(f"{option}-whole", *words)
    stopped = f"{option}-stopped"
    assert workplace.submit(stopped, *words, SLOWER).returncode == 0
    told = workplace.command("stop", stopped)
    assert told.returncode == 0, told.stderr
    digest = workplace.finish(stopped, *words)
    return Resumed(unbroken, digest, [attempt.ending for attempt in Ledger.read(workplace.run(stopped)).attempts])


@pytest.fixture(scope="module")
def resumed(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Resumed]]]:
    """Begin what the tests of options wait for."""
    workplace = make_workplace(tmp_path_factory.mktemp("options"), CONFIG)
    options: list[str] = cases_of(test_every_option_trains_and_resumes_with_the_same_bits, "option", request)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield {option: pool.submit(stop_and_resume, workplace, option) for option in options}
        pool.shutdown(cancel_futures=True)


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_and_resumes_with_the_same_bits(resumed: dict[str, Future[Resumed]], option: str) -> None:
    run = resumed[option].result()

    assert run.digest == run.unbroken
    assert run.endings == ["stopped", "finished"]


@pytest.mark.long
def test_an_attempt_that_was_killed_before_it_wrote_into_the_ledger_blocks_nobody(workplace: Workplace) -> None:
    run = workplace.run("claimed")
    workplace.finish("claimed", "train.max_steps=2")
    claim_run(run, 1)

    workplace.finish("claimed", "train.max_steps=4")

    assert [attempt.attempt for attempt in Ledger.read(run).attempts] == [0, 2]
    assert committed_steps(run)[-1] == 4
    assert claiming_attempts(run) == []
