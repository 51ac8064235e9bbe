"""Runs on a file system that at times does not answer: nothing is lost, and nothing begins anew."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_hpc.base import patience
from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, UnreadableError
from ddp_hpc.job.ending import takeover
from ddp_hpc.job.monitor import Monitor
from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME, checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import prune_checkpoints, shard_name, verify_checkpoint
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.failure_reports import read_failures
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger, Next, record_end, record_start
from ddp_hpc.run.run_dir.ownership import claim_path, claim_run, has_claim, is_fenced
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_stop_request
from ddp_hpc.run.spec import CheckpointSpec, RunSpec
from ddp_hpc.run.workload import recipe
from ddp_hpc.run.workload.table import workload_of
from ddp_hpc.train.data.sample_order import Position, SampleOrder
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.recording.run_recorder import RunRecorder
from ddp_hpc.train.stop import StopFlag
from tests.distributed.whole_runs import make_workplace
from tests.made_run import add_metrics, add_progress, make_run
from tests.pauses import in_pauses_of
from tests.strange.one_process import prepared, trained
from tests.unit.made_state import SEED, alone, make_checkpointers, make_state, save

STEPS = (2, 4)
CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 100, width: 8}}
train: {epochs: 9, global_batch_size: 10, micro_batch_size: 10, lr: 0.01}
resources: {workers_per_node: 1}
checkpoint: {every_steps: 2, keep_last: 20}
log: {every_steps: 1}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of one rank with two checkpoints."""
    run = make_run(tmp_path)
    save(run, *STEPS)
    return run


@pytest.fixture
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)


def make_unreadable(path: Path) -> None:
    """Have every look at a file end with an error that does not say what is there: a link that leads to itself."""
    path.unlink()
    path.symlink_to(path.name)


def restore(run: RunDir, attempt: int = 1) -> int | None:
    (checkpointer,) = make_checkpointers(run, attempt=attempt)
    return checkpointer.restore_newest(make_state(), seed=SEED)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: it makes the errors")
def test_a_run_whose_reads_fail_now_and_then_goes_on_where_it_was(tmp_path: Path) -> None:
    place = make_workplace(tmp_path, CONFIG)
    place.finish("flaky", f"train.max_steps={STEPS[-1]}")
    run = place.run("flaky")
    shards = [checkpoint_path(run, step) / shard_name(0, 1) for step in STEPS]

    watched = [*shards, run.stop_request, claim_path(run, 1)]
    strace = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-o",
        str(tmp_path / "strace.txt"),
        *(f"-P{path}" for path in watched),
    ]
    strace += ["-e", "trace=openat,newfstatat", "-e", "inject=openat:error=EIO:when=1..2"]
    strace += ["-e", "inject=newfstatat:error=ESTALE:when=1+3"]
    submit = [
        sys.executable,
        "-m",
        "ddp_hpc",
        "submit",
        str(place.config),
        "name=flaky",
        "--wait",
        "train.max_steps=40",
    ]
    done = subprocess.run(
        [*strace, *submit], cwd=place.path, env=place.environ, capture_output=True, text=True, check=False
    )

    said = run.console.read_text()
    assert done.returncode == 0, done.stdout + done.stderr + said
    assert "(INJECTED)" in (tmp_path / "strace.txt").read_text()
    assert f"resumed at step {STEPS[-1]} of 40" in said
    assert re.search(r"Input/output error: '.*shard-00000-of-00001.safetensors'\)\. Trying again for 60 s", said)
    assert list(run.checkpoints.glob("*.corrupt-*")) == []
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines() if '"train"' in line]
    assert steps == list(range(1, 41))


# --- stops before the first step --------------------------------------------------------------------------------------


def test_a_run_that_is_asked_to_stop_before_its_first_step_takes_none_and_saves_nothing(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(24, 3), torch.arange(24) % 2)
    recipe = Recipe(model=torch.nn.Linear(3, 2), train_data=data, loss=torch.nn.functional.cross_entropy)
    first = trained(tmp_path / "run", recipe, train__max_steps=2)
    first.run.stop_request.touch()

    stopped = prepared(tmp_path / "run", recipe, train__max_steps=4)

    assert not train(stopped)
    assert stopped.state.position.step < 4
    assert committed_steps(first.run) == [2]
    first.run.stop_request.unlink()
    assert trained(tmp_path / "run", recipe, train__max_steps=4).state.position.step == 4


# --- what cannot be read is left alone -------------------------------------------------------------------------------


@pytest.mark.usefixtures("_little_patience")
@pytest.mark.parametrize("file", [shard_name(0, 1), MANIFEST_NAME])
def test_a_checkpoint_that_cannot_be_read_fails_the_attempt_and_is_not_set_aside(file: str, run: RunDir) -> None:
    path = checkpoint_path(run, STEPS[-1]) / file
    original = path.read_bytes()
    make_unreadable(path)

    with pytest.raises(UnreadableError, match=r"Too many levels of symbolic links.*changed nothing"):
        restore(run)

    path.unlink()
    path.write_bytes(original)
    assert restore(run) == STEPS[-1]


def test_what_cannot_be_read_for_a_while_is_read_then(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_path(run, STEPS[-1]) / MANIFEST_NAME
    original = path.read_bytes()
    make_unreadable(path)

    def mend(_: float) -> None:
        path.unlink()
        path.write_bytes(original)

    in_pauses_of("ddp_hpc.base.patience", mend, monkeypatch)

    assert restore(run) == STEPS[-1]


@pytest.mark.usefixtures("_little_patience")
def test_a_file_is_missing_only_where_its_directory_says_so(run: RunDir) -> None:
    path = checkpoint_path(run, STEPS[-1])
    (path / shard_name(0, 1)).unlink()
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        verify_checkpoint(path)

    shutil.rmtree(path)

    with pytest.raises(UnreadableError):
        verify_checkpoint(path)


def test_a_process_of_a_run_waits_for_its_configuration_and_refuses_nothing_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    away = run.config.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="does not exist"):
        load_resolved(run.config)

    in_pauses_of("ddp_hpc.base.patience", lambda _: away.rename(run.config), monkeypatch)

    assert load_resolved(run.config, is_patient=True).name == run.name


@pytest.mark.usefixtures("_little_patience")
def test_a_configuration_that_cannot_be_read_is_no_input_that_cannot_be(tmp_path: Path) -> None:
    """A refusal would end the run for good; this fails the attempt."""
    run = make_run(tmp_path)
    make_unreadable(run.config)

    with pytest.raises(UnreadableError, match="changed nothing"):
        load_resolved(run.config, is_patient=True)


# --- nothing begins anew by itself -----------------------------------------------------------------------------------


def note_commit(run: RunDir, how: str) -> None:
    """Have the run's records say that step 4 was committed."""
    if how == "progress":
        add_progress(run, last_checkpoint=4)
        return
    record_start(run, attempt=0, job_id="1")
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, last_step=4))


@pytest.mark.usefixtures("_little_patience")
@pytest.mark.parametrize("how", ["progress", "ledger"])
def test_a_directory_of_checkpoints_that_is_not_there_is_waited_for(how: str, run: RunDir) -> None:
    note_commit(run, how)
    (checkpointer,) = make_checkpointers(run, attempt=1)
    away = run.checkpoints.rename(run.path / "away")

    with pytest.raises(UnreadableError, match="has no checkpoint, but one of step 4 was committed"):
        checkpointer.restore_newest(make_state(), seed=SEED)

    assert not run.checkpoints.exists()
    away.rename(run.checkpoints)
    assert checkpointer.restore_newest(make_state(), seed=SEED) == STEPS[-1]


@pytest.mark.usefixtures("_little_patience")
def test_a_run_directory_that_is_not_there_is_no_new_run(run: RunDir) -> None:
    (checkpointer,) = make_checkpointers(run, attempt=1)
    away = run.path.rename(run.path.with_name("away"))

    with pytest.raises(UnreadableError, match="perhaps its file system is not mounted"):
        checkpointer.restore_newest(make_state(), seed=SEED)
    with pytest.raises(FileNotFoundError):
        claim_run(run, 2)

    assert not run.path.exists()
    assert away.exists()


def test_a_run_whose_checkpoints_are_surely_gone_is_refused_with_what_to_do(run: RunDir) -> None:
    note_commit(run, "ledger")
    shutil.rmtree(run.checkpoints)

    with pytest.raises(
        ConfigError, match=r"one of step 4 was committed.*checkpoints \S*digits --verify.*submit --fresh"
    ):
        restore(run)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_each_time(run: RunDir) -> None:
    for step in STEPS:
        path = checkpoint_path(run, step) / shard_name(0, 1)
        path.write_bytes(path.read_bytes()[:-1])

    for attempt in (1, 2):
        with pytest.raises(ConfigError, match=r"those of step 2, 4 are damaged"):
            restore(run, attempt)

    assert committed_steps(run) == []


def test_a_run_that_never_had_a_checkpoint_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="1")

    assert restore(run) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_user_who_may_not_read_for_a_while_is_told_which_file_it_is(run: RunDir) -> None:
    """As with a ticket that has run out."""
    path = checkpoint_path(run, STEPS[-1])
    run.path.parent.parent.chmod(0o755)
    run.path.parent.chmod(0o755)
    path.chmod(0o700)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setegid(65534)
            os.seteuid(65534)
            verify_checkpoint(path)
        except BaseException as error:  # noqa: BLE001  a forked child must never return into pytest
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)

    with os.fdopen(read) as told:
        said = told.read()
    assert said.startswith("UnreadableError")
    assert str(path) in said


# --- looks that come again -------------------------------------------------------------------------------------------

UNKNOWABLE = RunDir(Path("n" * 300) / "run")
"""A run of which nothing can be known: each look ends with "File name too long", which is no "no such file"."""


def test_a_look_without_an_answer_asks_nobody_to_stop_and_ousts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    flag = StopFlag(UNKNOWABLE.stop_request)

    asked = [flag.is_set(look_at_file=True) for _ in range(3)]

    assert asked == [False] * 3
    assert read_stop_request(UNKNOWABLE) is None
    assert not is_fenced(UNKNOWABLE, 0)
    assert not has_claim(UNKNOWABLE, 0)
    assert read_failures(UNKNOWABLE, 0) == []
    told = [record.getMessage() for record in caplog.records if str(UNKNOWABLE.stop_request) in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("ddp-hpc tries again; you need do nothing unless this lasts.")


def test_a_supervisor_goes_on_where_the_first_sign_of_the_workers_cannot_be_looked_at() -> None:
    monitor = Monitor(
        ends_at=None,
        lead_s=60,
        hang_timeout_s=60,
        signs_of_life=(UNKNOWABLE.progress,),
        first_sign=UNKNOWABLE.rank_log(0, 0),
    )

    assert monitor.next_action(None, 0.0) == ""


def test_a_supervisor_takes_what_the_records_say_of_checkpoints_that_cannot_be_listed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "LISTING_PATIENCE_S", 0.0)
    note_commit(run, "ledger")
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(run.checkpoints.name)

    assert workload_of(RunSpec(name="digits")).progress(run, Ledger.read(run)) == 4


def test_a_supervisor_that_can_read_neither_checkpoints_nor_records_does_not_know_the_progress(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "LISTING_PATIENCE_S", 0.0)
    shutil.rmtree(run.checkpoints)
    for path in (run.checkpoints, run.progress):
        path.symlink_to(path.name)

    with pytest.raises(UnreadableError, match=re.escape(str(run.progress))):
        workload_of(RunSpec(name="digits")).progress(run, Ledger.read(run))


def begin_thrice(run: RunDir) -> Ledger:
    """Record three attempts of which each but the first began with a newer checkpoint; the last is without an end."""
    for attempt, first_step in enumerate((0, 2, 2)):
        record_start(run, attempt=attempt, job_id="", first_step=first_step)
        if attempt < 2:
            end = End(
                ending=Ending.FAILED,
                exit_code=1,
                reason="killed",
                cause=Cause.SUPERVISOR_DIED,
                last_step=2,
                next=Next.IN_PLACE,
            )
            record_end(run, attempt, end)
    return Ledger.read(run)


def test_a_supervisors_death_is_judged_by_the_checkpoints_where_the_configuration_cannot_be_read(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "CONFIG_PATIENCE_S", 0.0)
    ledger = begin_thrice(run)
    make_unreadable(run.config)

    end = takeover.record_death(run, ledger, None, "killed")

    newest = Ledger.read(run).newest
    assert newest is not None
    assert (end.next, newest.next, newest.last_step) == ("in place", "in place", 4)


def test_a_supervisors_death_is_judged_by_the_configuration_though_that_cannot_be_read_at_first(run: RunDir) -> None:
    run.config.write_text("name: digits\nrestart: {max_no_progress: 2}\n")
    shutil.rmtree(run.checkpoints)
    ledger = begin_thrice(run)
    kept = run.config.rename(run.config.with_suffix(".kept"))
    run.config.symlink_to(run.config.name)
    server = threading.Timer(0.3, lambda: kept.replace(run.config))
    server.start()

    end = takeover.record_death(run, ledger, None, "killed")

    server.join()
    assert end.next == ""


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_of_steps_that_are_taken_again_are_kept_beside(run: RunDir) -> None:
    add_metrics(run, [{"kind": "train", "step": step, "loss": 1.0} for step in range(1, 7)])
    order = SampleOrder(num_samples=8, seed=0, global_batch_size=1, micro_batch_size=1, world_size=1)
    journal = RunRecorder(run, RunSpec(name="digits"), alone(), PhaseTimes(), attempt=1, total_steps=8, order=order)

    journal.open(Position(step=4))
    journal.close()

    steps = [[json.loads(line)["step"] for line in path.read_text().splitlines()] for path in (
        run.metrics, run.superseded_metrics,
    )]  # fmt: skip
    assert steps == [[1, 2, 3, 4], [5, 6]]


# --- pruning ---------------------------------------------------------------------------------------------------------


def test_who_has_lost_the_claim_deletes_nothing(run: RunDir) -> None:
    """A stale rank zero that was suspended between its commit and its clearing up."""
    claim_run(run, 1)
    claim_run(run, 2)

    deleted = prune_checkpoints(run, attempt=1, keep=CheckpointSpec(keep_last=1))

    assert deleted == []
    assert committed_steps(run) == list(STEPS)
