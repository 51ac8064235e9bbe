"""A full disk costs checkpoints, not the training; the last checkpoint alone must be made."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.processes import host_name
from ddp_hpc.launch.submission import local
from ddp_hpc.launch.submission.run_dir_setup import make_run_dir
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, read_progress
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.data.sample_order import Position, SampleOrder
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.recording.run_recorder import RunRecorder
from tests.distributed.whole_runs import Workplace, make_workplace
from tests.made_run import make_run
from tests.unit.made_state import alone

DISK = "8m"
LEFT_FREE = 128 << 10
"""Bytes: enough for logs and records, too few for a checkpoint of about 400 KiB."""
NUM_STEPS = 16
ORDER = SampleOrder(num_samples=4, seed=0, global_batch_size=1, micro_batch_size=1, world_size=1)
FULL = "No space left on device"
CONFIG = f"""
recipe: {{target: "trial_recipe:build", args: {{num_samples: 48, width: 256}}}}
train: {{epochs: 99, max_steps: {NUM_STEPS}, global_batch_size: 8, lr: 0.01}}
resources: {{workers_per_node: 2}}
checkpoint: {{every_steps: 2}}
log: {{every_steps: 1}}
"""
LOUD = """
import trial_recipe

def build(**args):
    print("a recipe that talks")
    return trial_recipe.build(**args)
"""
SLOW = ["recipe.args.load_s=0.2"]
"""Some 13 s: `progress.json` is written a few times on the way, and a command of ours is over long before."""


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path, CONFIG)


@pytest.fixture
def on_small_disk(workplace: Workplace) -> Iterator[Workplace]:
    """The workplace, with a small disk of its own for `runs/`."""
    disk = workplace.path / "runs"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no `mount` here to make a small disk with")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield workplace
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(workplace: Workplace, left_free: int = LEFT_FREE) -> Path:
    """Leave little free; return the file that takes the rest."""
    ballast = workplace.path / "runs" / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(ballast.parent).free - left_free))
    return ballast


def await_progress(run: RunDir, condition: Callable[[Progress], bool]) -> Progress:
    deadline = time.monotonic() + 60
    while True:
        progress = read_progress(run)
        if progress is not None and condition(progress):
            return progress
        assert time.monotonic() < deadline, progress
        time.sleep(0.02)


def half_made(run: RunDir) -> list[str]:
    return [path.name for path in run.path.rglob("*") if path.suffix in {".tmp", ".writing"}]


def test_periodic_saves_that_fail_are_reported_and_the_training_goes_on(on_small_disk: Workplace) -> None:
    run = on_small_disk.run("recovering")
    ballast = fill(on_small_disk)

    begun = on_small_disk.submit(run.name, *SLOW)
    while_full = await_progress(run, lambda progress: progress.save_error is not None)
    status = on_small_disk.command("status", run.name, "--json")
    ballast.unlink()
    ended = local.wait(run, 0, os.environ)

    assert begun.returncode == 0, begun.stdout + begun.stderr
    assert FULL in str(while_full.save_error)
    assert while_full.last_checkpoint is None
    assert FULL in status.stdout
    told = [line for line in run.rank_log(0, 0).read_text().splitlines() if "could not be written" in line]
    assert "WARNING the checkpoint of step 2 could not be written: rank" in told[0]
    assert FULL in told[0]
    assert (ended.ending, ended.exit_code) == ("finished", 0)
    after = read_progress(run)
    assert after is not None
    assert (after.save_error, after.last_checkpoint) == (None, NUM_STEPS)
    assert committed_steps(run)[-1] == NUM_STEPS
    assert half_made(run) == []


@pytest.mark.long
def test_saves_that_fail_for_too_long_end_the_run_and_are_told_at_once(on_small_disk: Workplace) -> None:
    run, told = on_small_disk.run("lasting"), on_small_disk.path / "told"
    on_small_disk.finish(run.name, "train.max_steps=2")
    ballast = fill(on_small_disk)
    tell = f"notify.command=[bash, -c, 'echo $DDP_HPC_EVENT >> {told}']"

    words = ("train.max_steps=500", "checkpoint.max_failing_s=2", tell, "--wait", *SLOW)
    ended = on_small_disk.submit(run.name, *words)
    attempt = Ledger.read(run).attempts[-1]
    why = on_small_disk.command("why", run.name)
    ballast.unlink()

    assert ended.returncode == 1, ended.stdout + ended.stderr
    (warning,) = [line for line in ended.stderr.splitlines() if line.startswith("warning: lasting: ")]
    assert FULL in warning
    assert sorted(told.read_text().split()) == ["failure", "save_failed", "start"]  # the commands run beside each other
    assert (attempt.attempt, attempt.ending, attempt.cause, attempt.next) == (1, "failed", "not saved", "")
    assert "None has been committed since 2" in attempt.reason
    assert "so the run ends (`checkpoint.max_failing_s`)" in attempt.reason
    assert FULL in attempt.reason
    assert "disk-full" in why.stdout
    assert committed_steps(run) == [2]


@pytest.mark.long
def test_a_last_save_that_fails_fails_the_run_and_names_the_cause(on_small_disk: Workplace) -> None:
    run = on_small_disk.run("failing")
    ballast = fill(on_small_disk)

    failed = on_small_disk.submit(run.name, "--wait")
    (attempt,) = Ledger.read(run).attempts
    failure = first_failure(run, 0)
    left = [path.name for path in run.checkpoints.iterdir()]
    ballast.unlink()
    again = on_small_disk.submit(run.name, "--wait")

    assert failed.returncode == 1
    cause = f"The checkpoint of step {NUM_STEPS} could not be committed: rank"
    assert cause in failed.stderr
    assert FULL in failed.stderr
    assert (attempt.ending, attempt.exit_code) == ("failed", 1)
    assert cause in attempt.reason
    assert failure is not None
    assert (failure.step, cause in failure.exception) == (NUM_STEPS, True)
    assert left == []
    assert half_made(run) == []
    assert again.returncode == 0, again.stderr
    assert committed_steps(run)[-1] == NUM_STEPS


OVER_QUOTA = """
import errno, os
import trial_recipe

WRITE = os.write

def refuse(fd, data):
    if ".safetensors" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    return WRITE(fd, data)

def build(**args):
    if os.environ["RANK"] == "1":
        os.write = refuse
    return trial_recipe.build(**args)
"""


@pytest.mark.long
@pytest.mark.parametrize("left_free", [LEFT_FREE, 16 << 10], ids=["reports fit", "no report fits"])
def test_a_full_disk_is_named_with_what_to_do_and_the_run_goes_on_once_there_is_space(
    left_free: int, on_small_disk: Workplace
) -> None:
    run = on_small_disk.run("full")
    digest = on_small_disk.finish("full", "train.max_steps=4")
    ballast = fill(on_small_disk, left_free)

    failed = on_small_disk.submit("full", f"train.max_steps={NUM_STEPS}", "--wait")
    why = json.loads(on_small_disk.command("why", "full", "--json").stdout)
    status = on_small_disk.command("status", "full").stdout
    kept = on_small_disk.digest("full")
    verified = on_small_disk.command("checkpoints", "full", "--verify")
    ballast.unlink()
    again = on_small_disk.submit("full", f"train.max_steps={NUM_STEPS}", "--wait")

    assert failed.returncode == 1
    assert why["failure"] == "disk-full", why
    assert "Free space" in why["to_do"]
    assert "submit the run again: it continues from step 4." in why["to_do"]
    assert FULL in status.partition("reason")[2].partition("\n")[0]
    assert kept == digest
    assert "damaged" not in verified.stdout
    assert verified.returncode == 0
    assert again.returncode == 0, again.stderr
    assert Ledger.read(run).attempts[-1].first_step == 4
    assert committed_steps(run)[-1] == NUM_STEPS


@pytest.mark.long
def test_a_quota_that_is_used_up_is_named_with_the_rank_that_met_it(workplace: Workplace) -> None:
    digest = workplace.finish("quota", "train.max_steps=4")
    (workplace.path / "over_quota.py").write_text(OVER_QUOTA)

    failed = workplace.submit("quota", f"train.max_steps={NUM_STEPS}", "recipe.target=over_quota:build", "--wait")
    why = json.loads(workplace.command("why", "quota", "--json").stdout)

    assert failed.returncode == 1
    assert (why["failure"], why["rank"], why["host"]) == ("quota", 1, host_name())
    assert "shard-00001-of-00002" in why["detail"]
    assert "submit the run again: it continues from step 4." in why["to_do"]
    assert workplace.digest("quota") == digest
    assert (
        workplace.submit(
            "quota", f"train.max_steps={NUM_STEPS}", "recipe.target=trial_recipe:build", "--wait"
        ).returncode
        == 0
    )


def test_a_run_that_exists_is_sent_to_no_other_directory_where_it_would_begin_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    with no_room_beyond(0), pytest.raises(ConfigError) as of_existing:
        make_run_dir(run, "name: digits", is_new=False)
    with no_room_beyond(0), pytest.raises(ConfigError) as of_new:
        make_run_dir(RunDir(tmp_path / "new"), "name: new", is_new=True)

    assert str(of_existing.value).endswith("File too large. Free space there, or make it writable; then submit again.")
    assert "or choose another directory with `runs_dir=...`" in str(of_new.value)


@pytest.mark.long
def test_a_log_that_cannot_be_written_costs_nothing(workplace: Workplace) -> None:
    # With PYTHONUNBUFFERED, it would be the recipe's own `print` that fails.
    buffered = {name: value for name, value in workplace.environ.items() if name != "PYTHONUNBUFFERED"}
    workplace = replace(workplace, environ=buffered)
    workplace.finish("full-log", "train.max_steps=2")
    run = workplace.run("full-log")
    run.attempt_logs(1).mkdir()
    for rank in range(2):
        run.rank_log(1, rank).symlink_to("/dev/full")
    (workplace.path / "loud_recipe.py").write_text(LOUD)

    done = workplace.submit(run.name, "train.max_steps=4", "recipe.target=loud_recipe:build", "--wait")

    assert done.returncode == 0, done.stdout + done.stderr
    assert committed_steps(run)[-1] == 4


@contextmanager
def no_room_beyond(num_bytes: int) -> Iterator[None]:
    """Let this process make no file longer than that (setrlimit(2)); it then meets an `OSError`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_records_that_cannot_be_written_are_told_of_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    journal = RunRecorder(run, RunSpec(name="full"), alone(), PhaseTimes(), attempt=0, total_steps=4, order=ORDER)
    journal.open(Position())

    with no_room_beyond(0):
        for step in (1, 2):
            journal.record_training(Position(step=step), loss=1.0, lr=0.1)
            journal.record_progress(Position(step=step), now=True)
    meanwhile = read_progress(run)
    journal.record_training(Position(step=3), loss=1.0, lr=0.1)
    journal.record_progress(Position(step=3), now=True)
    journal.close()

    assert meanwhile is not None
    assert meanwhile.step == 0
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2, 3]
    after = read_progress(run)
    assert after is not None
    assert after.step == 3
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(" cannot")[0] for text in told] == ["the metrics of the run", "the progress of the run"]
    assert all("File too large" in text for text in told)
    assert half_made(run) == []


def test_a_line_torn_by_a_full_disk_is_completed_later(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    journal = RunRecorder(run, RunSpec(name="torn"), alone(), PhaseTimes(), attempt=0, total_steps=4, order=ORDER)
    journal.open(Position())
    journal.record_training(Position(step=1), loss=1.0, lr=0.1)

    with no_room_beyond(run.metrics.stat().st_size + 10):
        journal.record_training(Position(step=2), loss=1.0, lr=0.1)
    torn = run.metrics.read_text(encoding="utf-8")
    journal.record_training(Position(step=3), loss=1.0, lr=0.1)
    journal.close()

    assert not torn.endswith("\n")
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2, 3]
