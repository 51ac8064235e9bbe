"""`attach` in one process: commits of a script's own files, the stop flag, the report and the data order."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_hpc import attach
from ddp_hpc.base.errors import ConfigError, FencedError
from ddp_hpc.base.processes import STOP_SIGNALS
from ddp_hpc.cli.status_text import progress_line
from ddp_hpc.cluster.rendezvous.worker_env import attach_variables
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Ledger, record_start
from ddp_hpc.run.run_dir.ownership import claim_run
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, ask_to_stop, read_progress, with_script_report, write_progress
from ddp_hpc.run.spec import RunSpec, ScriptSpec
from ddp_hpc.run.workload.script import ScriptWorkload
from ddp_hpc.train.attached import run as attached_run
from ddp_hpc.train.attached.run import AttachedRun
from ddp_hpc.train.attached.step_sampler import StepSampler
from ddp_hpc.train.data.sample_order import Position, SampleOrder
from ddp_hpc.watch.status import read_status


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attached_run, "_pid_and_run", None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def managed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return the run that `attach` finds, with its first attempt begun."""
    run = RunDir(tmp_path / "runs" / "train")
    run.path.mkdir(parents=True)
    record_start(run, attempt=0, job_id="local-1")
    claim_run(run, 0)
    facts = attach_variables(run.path, attempt=0, stop_signal="USR1", stop_exit_code=42)
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    return run


def save(run: AttachedRun, step: int, text: str = "weights", **options: Any) -> Path:
    folder = run.checkpoint_dir / f"step-{step}.tmp"
    (folder / "inner").mkdir(parents=True)
    (folder / "model.pt").write_text(f"{text} {step}")
    (folder / "inner" / "empty").touch()
    return run.commit(folder, **options)


# --- commits -----------------------------------------------------------------------------------------------------------


def test_what_a_plain_python_commits_is_the_latest_with_all_of_its_files(tmp_path: Path) -> None:
    run = attach()
    assert run.latest() is None

    committed = save(run, 120)

    assert committed == run.latest() == tmp_path / "checkpoints" / "step-00000120"
    assert (committed / "model.pt").read_text() == "weights 120"
    assert (committed / "inner" / "empty").exists()
    assert [path.name for path in run.checkpoint_dir.iterdir()] == ["step-00000120"]
    assert (run.attempt, run.stop_exit_code, attach()) == (0, 99, run)


def test_a_half_written_checkpoint_is_never_the_latest() -> None:
    run = attach()
    save(run, 1)
    for name in ("step-2.tmp", "step-00000003", "attempt-7.writing/step-00000004"):
        (run.checkpoint_dir / name).mkdir(parents=True)
        (run.checkpoint_dir / name / "model.pt").write_text("half")

    latest = run.latest()

    assert latest is not None
    assert latest.name == "step-00000001"


@pytest.mark.parametrize("damage", [b"weights 3", b"weightz 2", None])
def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_the_latest(damage: bytes | None) -> None:
    run = attach()
    save(run, 1)
    newest = save(run, 2) / "model.pt"
    newest.unlink()
    if damage:
        newest.write_bytes(damage)

    latest = run.latest()

    assert latest is not None
    assert latest.name == "step-00000001"
    assert (run.checkpoint_dir / "step-00000002.corrupt-0").is_dir()


def test_the_newest_commit_of_a_step_counts() -> None:
    run = attach()
    save(run, 5, "old")

    committed = save(run, 5, "new")

    assert (committed / "model.pt").read_text() == "new 5"
    assert run.latest() == committed


def test_a_librarys_own_directory_stays_where_it_is_and_its_deletion_takes_nothing_from_the_checkpoint() -> None:
    run = attach()
    folder = Path("output") / "checkpoint-500"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "model.safetensors").write_text("weights")

    committed = run.commit(folder, keeps_folder=True)
    (folder / "inner" / "model.safetensors").unlink()

    assert committed.name == "step-00000500"
    assert (committed / "inner" / "model.safetensors").read_text() == "weights"
    assert run.latest() == committed


def test_only_the_newest_checkpoints_are_kept_where_that_is_asked_for(managed: RunDir) -> None:
    run = attach()

    for step in (1, 2, 3):
        save(run, step, keep_last=2)

    assert committed_steps(managed) == [2, 3]


def test_outside_of_ddp_hpc_older_checkpoints_are_deleted_too(tmp_path: Path) -> None:
    run = attach("saved here")

    for step in (1, 2, 3):
        save(run, step, keep_last=1)

    assert [path.name for path in (tmp_path / "saved here").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("newest", "does not end with a step"),
        ("step-1.tmp", "there is no such directory"),
        ("empty-1", "it holds no file"),
    ],
)
def test_a_commit_of_nothing_is_refused_in_words(folder: str, expected: str) -> None:
    run = attach()
    Path("empty-1").mkdir()

    with pytest.raises(ConfigError, match=expected):
        run.commit(folder)


def test_the_directory_of_all_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    run = attach()
    save(run, 1)

    for folder in (run.checkpoint_dir, tmp_path):
        with pytest.raises(ConfigError, match="in which the committed checkpoints are"):
            run.commit(folder, step=2, keeps_folder=True)


def test_an_attempt_that_a_newer_one_has_replaced_commits_nothing(managed: RunDir) -> None:
    run = attach()
    save(run, 1)
    claim_run(managed, 1)

    with pytest.raises(FencedError, match="newer attempt"):
        save(run, 2)

    assert committed_steps(managed) == [1]


def test_an_attempt_that_a_newer_one_has_replaced_ends_with_the_code_for_it(managed: RunDir) -> None:
    run = attach()
    claim_run(managed, 1)

    with pytest.raises(SystemExit) as end:
        run.should_stop(1)

    assert end.value.code == 97


def test_a_commit_counts_as_the_scripts_progress_and_tools_read_it(managed: RunDir) -> None:
    workload = ScriptWorkload(RunSpec(name="train", script=ScriptSpec(command=("python", "train.py"))))
    ledger = Ledger.read(managed)
    before = workload.progress(managed, ledger)

    path = save(attach(), 7)

    assert (before, workload.progress(managed, ledger)) == (0, 7)
    assert checkpoint_store.verify_checkpoint(path).step == 7
    assert checkpoint_store.checkpoint_digest(path) == checkpoint_store.checkpoint_digest(path)
    with pytest.raises(ConfigError, match="holds files that a script wrote"):
        checkpoint_store.export_weights(path, Path("out.safetensors"))


# --- stopping ----------------------------------------------------------------------------------------------------------


def stopped_after(run: AttachedRun) -> int:
    return next(step for step in range(1, 100_000) if run.should_stop(step))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_stops_the_loop_and_none_does_not(number: signal.Signals) -> None:
    run = attach(stop_signals=["USR1"])
    assert not any(run.should_stop(step) for step in range(100))

    os.kill(os.getpid(), number)

    assert stopped_after(run)
    assert run.should_stop(3)


def test_steps_that_begin_anew_in_each_epoch_do_not_put_the_stop_off() -> None:
    run = attach()
    for step in [*range(1000), *range(3)]:
        assert not run.should_stop(step)

    os.kill(os.getpid(), signal.SIGTERM)

    assert any(run.should_stop(step % 5) for step in range(100_000))


def test_the_users_request_and_the_runs_own_signal_and_exit_code_count(managed: RunDir) -> None:
    run = attach()
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL

    ask_to_stop(managed)

    assert stopped_after(run)
    with pytest.raises(SystemExit) as end:
        run.exit_for_requeue()
    assert end.value.code == 42


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: attach(stop_signals=["HUPP"]), "none of that name"),
        (lambda: in_thread(attach), "only the main thread"),
    ],
)
def test_attach_says_what_it_cannot_do(call: Callable[[], object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        call()


def in_thread(function: Callable[[], object]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise raised[0]


def test_ranks_without_a_process_group_are_told_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    with pytest.raises(ConfigError, match="init_process_group"):
        attach().should_stop(1)


# --- reporting ---------------------------------------------------------------------------------------------------------


def test_status_shows_what_the_script_reports_and_a_call_between_two_writes_reads_no_tensor(managed: RunDir) -> None:
    run = attach()
    run.report(1, loss=torch.tensor(0.5, requires_grad=True) * 2, samples=8)
    first = managed.script_report.read_text()

    run.report(2, loss=torch.empty((), device="meta"), samples=8)  # its value cannot be read
    run.report(3, loss=0.25, samples=8, accuracy=0.75)
    assert managed.script_report.read_text() == first
    save(run, 3)

    said = json.loads(managed.script_report.read_text())
    assert (said["step"], said["loss"], said["metrics"], said["last_checkpoint"]) == (3, 0.25, {"accuracy": 0.75}, 3)
    assert said["samples_per_s"] > 0
    write_progress(managed, with_script_report(managed, Progress(attempt=0, saves=0, at=5.0)))
    status = read_status(managed, now=6.0)
    assert (status.step, status.loss, status.metrics) == (3, 0.25, {"accuracy": 0.75})
    assert "step 3  loss 0.25" in progress_line(status)


@pytest.mark.parametrize("step", [np.int64(181), torch.tensor(181)])
def test_a_step_may_be_a_number_of_numpy_or_pytorch(step: Any, managed: RunDir) -> None:
    run = attach()
    run.report(step)
    write_progress(managed, with_script_report(managed, Progress(attempt=0)))
    reported = read_progress(managed)
    ask_to_stop(managed)
    while not run.should_stop(step + 1):
        pass

    write_progress(managed, with_script_report(managed, Progress(attempt=0)))
    stopped = read_progress(managed)
    assert reported is not None
    assert stopped is not None
    assert (reported.step, stopped.step) == (181, 182)


def test_numbers_of_an_evaluation_stay_while_steps_report_others(managed: RunDir) -> None:
    run = attach()
    run.report(1, accuracy=0.5, lr=0.3)
    run.report(2, accuracy=0.75)

    last = torch.tensor(0.5)
    run.report(3, lr=0.1, is_best=True, last=last)
    last.fill_(9.0)  # as CUDA graphs do with what a pass has returned
    save(run, 3)

    found = with_script_report(managed, Progress(attempt=0)).metrics
    assert found == {"accuracy": 0.75, "lr": 0.1, "is_best": 1.0, "last": 0.5}


def test_a_new_attempt_has_only_the_checkpoint_of_the_old_one(managed: RunDir) -> None:
    run = attach()
    run.report(7, loss=0.5, samples=8, accuracy=0.5)
    save(run, 7)

    new = with_script_report(managed, Progress(attempt=1, at=5.0))

    at = with_script_report(managed, Progress(attempt=0)).last_checkpoint_at
    assert new == Progress(attempt=1, at=5.0, last_checkpoint=7, last_checkpoint_at=at)


def test_a_report_outside_of_ddp_hpc_writes_nothing(tmp_path: Path) -> None:
    attach().report(1, loss=0.5)

    assert list(tmp_path.iterdir()) == []


# --- data --------------------------------------------------------------------------------------------------------------


def sampler(rank: int = 0, *, num_samples: int = 22, world_size: int = 2, drop_last: bool = False) -> StepSampler:
    order = SampleOrder(
        num_samples=num_samples,
        seed=3,
        global_batch_size=3 * world_size,
        micro_batch_size=3,
        world_size=world_size,
        drop_last=drop_last,
    )
    return StepSampler(order, rank)


def test_the_ranks_share_each_epoch_and_epochs_differ() -> None:
    ranks = [sampler(rank) for rank in range(2)]

    epochs = [[list(rank) for rank in ranks] for _ in range(2)]

    for both in epochs:
        assert sorted(index for rank in both for batch in rank for index in batch) == list(range(22))
    assert epochs[0] != epochs[1]
    assert [rank.epoch for rank in ranks] == [2, 2]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 5, 9])
def test_an_order_goes_on_at_any_step_with_the_samples_that_come_next(step: int, drop_last: bool) -> None:
    whole = sampler(drop_last=drop_last)
    batches = [batch for _ in range(4) for batch in whole]
    state = json.loads(json.dumps(sampler(drop_last=drop_last).state_dict(step)))

    resumed = sampler(drop_last=drop_last)
    resumed.load_state_dict(state)
    first = list(resumed)
    again = resumed.state_dict(step + 2)

    rest = first + [batch for _ in range(resumed.epoch, 4) for batch in resumed]
    assert rest == batches[step:]
    assert again == sampler(drop_last=drop_last).state_dict(step + 2)


def test_the_position_after_steps_is_what_the_steps_give() -> None:
    order = sampler(num_samples=17).order
    for begin in (Position(), Position(step=4, epoch=1, samples_in_epoch=5)):
        assert [order.position_after(begin, steps).step for steps in range(5)] == [begin.step + n for n in range(5)]
        assert order.position_after(begin, 0) == begin


def test_a_loader_takes_the_order_and_a_call_of_set_epoch_keeps_its_place() -> None:
    data = TensorDataset(torch.arange(20))
    order = attach().order(data, batch_size=4, seed=1)
    loader = DataLoader(data, batch_sampler=order)
    whole = [batch.tolist() for (batch,) in loader]
    order = attach().order(20, batch_size=4, seed=1)
    order.load_state_dict(order.state_dict(3))

    for _ in range(2):  # libraries make an iterator before they say which epoch they begin
        order.set_epoch(0)

        assert [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=order)] == whole[3:]
    order.set_epoch(1)
    assert sorted(index for batch in order for index in batch) == list(range(20))
    assert len(order) == len(whole)


def test_an_order_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="an epoch has no step"):
        attach().order(3, batch_size=4, drop_last=True)


LOADERS = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]


@pytest.mark.parametrize("options", LOADERS, ids=["no worker", "a worker", "a worker that stays"])
@pytest.mark.parametrize("num_samples", [8, 1])
def test_a_loader_gives_each_epoch_and_its_state_at_each_step_brings_the_rest(
    num_samples: int, options: dict[str, Any]
) -> None:
    """Of one sample, a rank of two gets none; it trains on the first a second time."""

    def of_epochs(order: StepSampler, epochs: int) -> list[list[int]]:
        loader = DataLoader(TensorDataset(torch.arange(num_samples)), batch_sampler=order, **options)
        step, seen = order.step, []
        for _ in range(order.epoch, epochs):
            for (batch,) in loader:
                step += 1
                seen.append(batch.tolist())
                states.append(order.state_dict(step))
                list(sampler())  # a validation
        return seen

    def rank_one() -> StepSampler:
        return sampler(1, num_samples=num_samples)

    whole, states = [batch for order in [rank_one()] for _ in range(3) for batch in order], [rank_one().state_dict(0)]

    assert of_epochs(rank_one(), 3) == whole

    for step, state in enumerate(states[:]):
        if not options or step in (0, len(whole) - 1):
            resumed = rank_one()
            resumed.load_state_dict(state)
            assert of_epochs(resumed, 3) == whole[step:]


@pytest.mark.parametrize(
    "how",
    [
        "a peek",
        "a peek at all",
        "epochs that end early",
        "an end that is early once",
        "epochs from 1",
        "more steps than batches",
    ],
)
def test_an_order_whose_epochs_are_not_those_that_were_trained_is_refused_at_a_save(how: str) -> None:
    order = sampler()  # four steps an epoch
    if how.startswith("a peek"):
        list(islice(order, 4 if how.endswith("all") else 1))
    num_read = {"epochs that end early": (1, 1), "an end that is early once": (2, 4)}.get(how, (4, 4))
    for epoch in range(2):
        if how == "epochs from 1":
            order.set_epoch(epoch + 1)
        list(islice(order, num_read[epoch]))
    next(iter(order))

    with pytest.raises(ConfigError, match="Iterate over it once for each epoch"):
        order.state_dict(18 if how == "more steps than batches" else sum(num_read) + 1)


def test_an_order_whose_epoch_has_ended_one_batch_early_is_refused_at_the_next_save() -> None:
    order = sampler()  # four steps an epoch
    list(islice(order, 3))
    assert order.state_dict(3) == sampler().state_dict(3)

    next(iter(order))

    with pytest.raises(ConfigError, match="read 4 batches and not all of some epoch"):
        order.state_dict(4)


def test_an_order_may_be_read_ahead_into_the_next_epoch() -> None:
    order = sampler()  # four steps an epoch

    list(islice(chain(order, order), 6))

    assert order.state_dict(3) == sampler().state_dict(3)
