"""A sweep on Slurm: what is written and sent, what a task makes of its number, and what is sent later. sbatch is a shell script here."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError, RunBusyError, SlurmUnavailableError
from ddp_hpc.cli import main
from ddp_hpc.cli.sweeps import print_jobs
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.hostlist import ranges_text
from ddp_hpc.cluster.slurm.queries import QueuedEntry
from ddp_hpc.launch.submission import slurm as slurm_backend
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.sweep.array import array_script, send_points
from ddp_hpc.launch.sweep.chain import sweep_dependency
from ddp_hpc.launch.sweep.manage_sweep import SweepStart, cancel_sweep, continue_sweep, delete_sweep, submit_sweep
from ddp_hpc.launch.sweep.point_states import PointReader
from ddp_hpc.launch.sweep.points import make_points, parse_axis
from ddp_hpc.launch.sweep.sweep_dir import (
    SentArray,
    Sweep,
    SweepDir,
    append_record,
    lock_sending,
    parse_ranges,
    points_in_queue,
    read_sweep,
    record_continued,
)
from ddp_hpc.launch.sweep.task import main as task_main
from ddp_hpc.launch.sweep.task import prepare_task
from ddp_hpc.run.config.resolve import load_resolved, resolve
from ddp_hpc.run.run_dir.ledger import End, Ending, Next, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from ddp_hpc.watch.queue import asker, queue_now
from tests.full_disk import no_file_larger_than
from tests.unit.fake_slurm import FakeSlurm

ACCEPTS = """
n=$(wc -l < {counter} 2>/dev/null || echo 0)
if [ "$1" = --test-only ]; then exit 0; fi
spec=${{2#--array=}}; spec=${{spec%%%*}}
total=0
for part in ${{spec//,/ }}; do total=$((total + 1 + ${{part#*-}} - ${{part%-*}})); done
sent=$(cat {sent} 2>/dev/null || echo 0)
if [ $((sent + total)) -gt $(cat {limit}) ]; then
  echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
  echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)" >&2
  exit 1
fi
echo $((sent + total)) > {sent}
echo x >> {counter}
echo $((14 + n))
"""

KNOWS_NO_JOB = (
    'case "$*" in *"show job "*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;; esac; true'
)


class Lab(FakeSlurm):
    """A cluster with a limit of submitted jobs and with small arrays."""

    def __init__(self, folder: Path, *, limit: int = 10**6, max_array_size: int = 1001) -> None:
        super().__init__(folder)
        self._sent, self._limit = folder / "sent", folder / "limit"
        self.raise_limit(limit)
        counter = folder / "counter"
        counter.touch()
        self.has("sbatch", ACCEPTS.format(counter=counter, sent=self._sent, limit=self._limit))
        self.has("scontrol", f'[ "$2" = config ] && echo "MaxArraySize = {max_array_size}"; {KNOWS_NO_JOB}')

    def raise_limit(self, limit: int) -> None:
        self._limit.write_text(f"{limit}\n")

    @property
    def arrays(self) -> list[str]:
        """Return what was asked of sbatch, accepted or not, without the script's path."""
        orders = [line.split() for line in self.orders("sbatch --parsable")]
        return [" ".join([*words[2:-2], words[-1]]) for words in orders]

    def lists(
        self, *arrays: SentArray, state: str = "PENDING", commands: str = "", alone: str = "", why: str = "Priority"
    ) -> None:
        """Have squeue list the tasks of arrays and a job outside of them, and, where it is asked for commands, that text."""
        listed = "".join(_listed(one, state, why) for one in arrays)
        if alone:
            listed += _listed(SentArray(job_id=alone, numbers=()), state).replace("99", alone, 1)
        self.has(
            "squeue",
            f"case \"$*\" in *Command*) printf '%s' {shlex.quote(commands)};; *) printf '%s' {shlex.quote(listed)};; esac",
        )


@pytest.fixture(autouse=True)
def _here(_users_part_unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_hpc.launch.submission.submit_checks.capacity.NODE_LOCAL_DIRS", ())


def start(
    lab: Lab, tmp_path: Path, *words: str, at_most: int | None = None, command: str = "python train.py"
) -> SweepStart:
    (tmp_path / "train.py").write_text("print('trained')\n")
    base = resolve(None, ["name=grid", f"runs_dir={tmp_path}/runs"], lab.environ, command=command.split())
    points = make_points([parse_axis(word) for word in words])
    sweep = Sweep(dir=SweepDir(base.spec.path), points=points, at_most=at_most)
    request = SubmitRequest(resolved=base, import_paths=[tmp_path], environ=lab.environ)
    return submit_sweep(request, sweep, slurm_backend)


def test_a_thousand_points_are_three_files_and_one_array(tmp_path: Path) -> None:
    lab = Lab(tmp_path)

    started = start(lab, tmp_path, "seed=0..999", at_most=20)

    assert lab.arrays == ["--array=0-999%20 0"]
    files = sorted(path.name for path in started.sweep_dir.path.iterdir() if path.is_file())
    assert files == ["base.yaml", "job.sbatch", "sweep.jsonl"]
    assert not list(started.sweep_dir.path.glob("[0-9]*"))
    sweep = read_sweep(started.sweep_dir)
    assert len(sweep.points) == 1000
    (array,) = sweep.arrays
    assert (array.job_id, array.numbers, array.offset) == ("14", tuple(range(1000)), 0)
    assert not sweep.never_sent


def test_a_submission_asks_slurm_each_question_once_and_its_ledger_is_read_by_later_commands_only(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)

    start(lab, tmp_path, "seed=0..999")

    asked = (tmp_path / "called").read_text().splitlines()
    kinds = sorted(" ".join(line.split()[: 3 if line.startswith("scontrol") else 2]) for line in asked)
    assert kinds == ["sbatch --parsable", "sbatch --test-only", "scontrol --all --oneliner", "scontrol show config"]


def test_ctrl_c_amid_the_submission_of_a_sweep_says_what_slurm_may_have_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    lab = Lab(tmp_path, max_array_size=10)
    lab.has(
        "sbatch",
        '[ "$1" = --test-only ] && exit 0; [ -e sent ] || { touch sent; echo 14; exit; }; kill -INT $PPID; exit 1',
    )
    monkeypatch.setenv("PATH", lab.environ["PATH"])

    code = main(["submit", "name=grid", "--cluster", "slurm", "--sweep", "seed=0..24", "--", "python", "train.py"])

    said = capsys.readouterr().err
    assert code == 130
    assert "job 14 (10 points) submitted, 10 points may have been submitted, 5 points not submitted" in said
    assert "ddp-hpc sweep continue grid" in said
    assert "ddp-hpc sweep cancel grid" in said


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # it may come between `open` and its `with`
def test_ctrl_c_before_a_sweep_has_its_directory_says_that_nothing_was_submitted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    lab = Lab(tmp_path)
    lab.has("sbatch", "kill -INT $PPID; exit 1")
    monkeypatch.setenv("PATH", lab.environ["PATH"])

    code = main(["submit", "name=grid", "--cluster", "slurm", "--sweep", "seed=0..24", "--", "python", "train.py"])

    assert code == 130
    assert "grid: nothing was submitted" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


def test_a_script_that_slurm_would_refuse_is_named_before_the_sweeps_directory_has_its_name(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.has("sbatch", "sleep 0.2; echo 'sbatch: error: invalid partition specified: gpus' >&2; exit 1")

    with pytest.raises(ConfigError, match="gpus"):
        start(lab, tmp_path, "seed=0..3")

    assert not list((tmp_path / "runs").iterdir())


def test_a_disk_that_is_full_before_anything_is_sent_leaves_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "train.py").touch()
    once = start(Lab(tmp_path / "once"), tmp_path / "once", "seed=0..999").sweep_dir.ledger.read_text()
    shutil.rmtree(tmp_path / "once")  # else it is copied as code
    num_bytes = len(once[: once.index('{"sending"')])
    lab = Lab(tmp_path)

    with no_file_larger_than(num_bytes + 20), pytest.raises(OSError, match=r"File too large: .*sweep\.jsonl"):
        start(lab, tmp_path, "seed=0..999")

    assert not lab.arrays
    assert not list((tmp_path / "runs").iterdir())


def test_more_points_than_an_array_may_have_are_several_arrays_of_one_script(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path, max_array_size=10)

    start(lab, tmp_path, "seed=0..24", at_most=6)

    waits = "--dependency=afterany"
    assert lab.arrays == ["--array=0-9%6 0", f"--array=0-9%6 {waits}:14 10", f"--array=0-4%6 {waits}:15 20"]


def test_points_beyond_a_limit_stay_not_submitted_until_continue_sends_them(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=20)

    started = start(lab, tmp_path, "seed=0..29")

    assert (sum(started.jobs.values()), started.num_not_submitted) == (20, 10)
    assert "QOSMaxSubmitJobPerUserLimit" in started.refusal
    assert read_sweep(started.sweep_dir).never_sent == list(range(20, 30))

    lab.raise_limit(100)
    lab.lists(*read_sweep(started.sweep_dir).arrays)
    again = continue_sweep(started.sweep_dir, lab.environ, limits={})

    assert (len(again.numbers), lab.arrays[-1]) == (10, "--array=20-29 0")
    assert read_sweep(started.sweep_dir).never_sent == []


def test_a_limit_is_recognised_behind_the_lines_that_a_site_has_sbatch_print_first(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=4)
    prints = 'echo "sbatch: Welcome to Frontier" >&2; echo "sbatch: error: Your default account is used" >&2\n'
    script = ACCEPTS.format(counter=tmp_path / "counter", sent=tmp_path / "sent", limit=tmp_path / "limit")
    lab.has("sbatch", prints + script.replace('echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2', ""))

    started = start(lab, tmp_path, "seed=0..5")

    assert (sum(started.jobs.values()), started.num_not_submitted) == (4, 2)
    assert "Your default account is used" not in started.refusal
    assert "job submit limit" in started.refusal


FULL = """
if [ "$1" = --test-only ]; then exit 0; fi
spec=${{2#--array=0}}
if [ "$spec" = -1 ]; then echo 14; exit 0; fi
echo "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying" >&2
sleep 300
"""


def test_a_controller_that_is_full_and_lets_sbatch_wait_gets_fewer_points_and_the_others_are_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 3.0)
    lab = Lab(tmp_path)
    lab.has("sbatch", FULL.format())

    started = start(lab, tmp_path, "seed=0..15")

    assert lab.arrays[:2] == ["--array=0-15 0", "--array=0-1 0"]
    assert (started.jobs, started.num_not_submitted) == ({"14": 2}, 14)
    assert "sleeping and retrying" in started.refusal
    sweep = read_sweep(started.sweep_dir)
    assert (sweep.never_sent, sweep.unanswered) == (list(range(2, 16)), None)


def test_an_array_that_a_full_controller_has_accepted_after_all_is_found_by_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 3.0)
    lab = Lab(tmp_path)
    lab.has("sbatch", FULL.format())
    lab.has("squeue", f"printf '77\\x1f{tmp_path}/runs/grid/job.sbatch 0\\x1e\\n'")

    started = start(lab, tmp_path, "seed=0..15")

    assert (started.jobs, started.num_not_submitted) == ({"77": 16}, 0)
    assert [one.job_id for one in read_sweep(started.sweep_dir).arrays] == ["77"]


def _listed(array: SentArray, state: str, why: str = "Priority") -> str:
    """Return an array as squeue prints it."""
    tasks = ranges_text(number - array.offset for number in array.numbers) or "N/A"
    fields = [
        "99",
        array.job_id,
        tasks,
        state,
        why,
        "N/A",
    ]
    return "\x1f".join(fields) + "\x1e\n"


@pytest.mark.parametrize("arguments", [" 0", ""], ids=["before Slurm 26.05", "Slurm 26.05"])
def test_an_array_whose_answer_was_lost_is_found_in_the_queue_and_its_points_are_not_sent_again(
    tmp_path: Path, arguments: str
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = lose_answer(lab, tmp_path)
    pending = SentArray(job_id="77", numbers=(0, 1, 2, 3))
    others = "".join(f"{job}\x1f/other/runs/{name}/job.sbatch 0\x1e\n" for job, name in (("78", "grid"), ("79", "x")))
    lab.lists(pending, commands=f"{others}77\x1f{sweep_dir.job_script}{arguments}\x1e\n")
    accepts(lab, tmp_path)

    again = continue_sweep(sweep_dir, lab.environ, limits={})

    (array,) = read_sweep(sweep_dir).arrays
    assert (array.job_id, array.numbers) == ("77", (0, 1, 2, 3))
    assert not again.numbers


def test_a_lost_answer_is_said_with_the_name_of_the_jobs_to_look_for(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.has("sbatch", LOSES_ANSWER)

    with pytest.raises(SlurmUnavailableError, match=r"may have accepted 4 points of grid.*`squeue --me --name=grid`"):
        start(lab, tmp_path, "seed=0..3")


def test_nothing_is_sent_while_slurm_does_not_say_whether_it_has_an_array_whose_answer_was_lost(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    sweep_dir = lose_answer(lab, tmp_path)
    lab.has("squeue", DOWN)
    accepts(lab, tmp_path)
    num_orders = len(lab.arrays)

    with pytest.raises(SlurmUnavailableError, match="Nothing was submitted now"):
        continue_sweep(sweep_dir, lab.environ, limits={})

    assert len(lab.arrays) == num_orders
    assert words_of(sweep_dir, lab) == ["unknown"] * 4


def test_a_task_of_an_array_that_came_late_does_not_start_a_point_that_has_finished_or_that_another_job_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = lose_answer(lab, tmp_path)
    lab.lists()
    accepts(lab, tmp_path)
    again = continue_sweep(sweep_dir, lab.environ, limits={})
    assert (len(again.numbers), lab.arrays[-1]) == (4, "--array=0-3 0")

    run = prepare_task(sweep_dir, 0, task(lab, array="14", number=2, job="20"))
    assert run is not None
    running = "JobId=20 ArrayJobId=14 ArrayTaskId=2 JobName=x UserId=ada(1) JobState=RUNNING Reason=None Command=x"
    lab.has("scontrol", f'[ "$2" = config ] || echo "{running}"')
    assert prepare_task(sweep_dir, 0, task(lab, array="77", number=2, job="80")) is None
    assert "job 14_2 has the point already" in capsys.readouterr().err
    record_start(run, attempt=0, job_id="14_2")
    record_end(run, 0, End(ending=Ending.FINISHED, exit_code=0))
    lab.has("scontrol", KNOWS_NO_JOB)
    assert prepare_task(sweep_dir, 0, task(lab, array="77", number=2, job="80")) is None
    assert "the run has finished" in capsys.readouterr().err


def words_of(sweep_dir: SweepDir, lab: Lab) -> list[str]:
    """Return the points' states as `list` shows them."""
    sweep = read_sweep(sweep_dir)
    states = PointReader(asker(lab.environ, clock=time.time)).read(sweep, queue_now(lab.environ, time.time()))
    return [str(states[point.number].word) for point in sweep.points]


LOSES_ANSWER = (
    '[ "$1" = --test-only ] || { echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1; }'
)
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def lose_answer(lab: Lab, tmp_path: Path) -> SweepDir:
    """Send four points to a Slurm whose answer does not come."""
    lab.has("sbatch", LOSES_ANSWER)
    with pytest.raises(SlurmUnavailableError, match=r"ddp-hpc sweep continue \S+grid"):
        start(lab, tmp_path, "seed=0..3")
    return SweepDir(tmp_path / "runs" / "grid")


def accepts(lab: Lab, tmp_path: Path) -> None:
    """Have sbatch answer again."""
    lab.has("sbatch", ACCEPTS.format(counter=tmp_path / "counter", sent=tmp_path / "sent", limit=tmp_path / "limit"))


def test_a_limit_of_points_at_once_holds_over_all_arrays_since_each_waits_for_those_before_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=12)
    started = start(lab, tmp_path, "seed=0..19", at_most=4)
    (first,) = read_sweep(started.sweep_dir).arrays  # one of two more points would hold back those after it
    assert lab.arrays[:2] == ["--array=0-19%4 0", "--array=0-9%4 0"]
    assert started.num_not_submitted == 10

    lab.raise_limit(100)
    lab.lists(first)
    continue_sweep(started.sweep_dir, lab.environ, limits={"at_most": 3})

    assert lab.arrays[-1] == "--array=10-19%3 --dependency=afterany:14 0"
    assert "scontrol update JobId=14 ArrayTaskThrottle=3" in lab.orders("scontrol")


def test_a_task_makes_its_points_run_once_and_finds_it_after_a_requeue(tmp_path: Path) -> None:
    lab = Lab(tmp_path, max_array_size=10)
    started = start(lab, tmp_path, "lr=0.1,0.2", "seed=0..9", command="python train.py --lr {lr} --out {point}")
    environ = task(lab, array="15", number=3, job="31")

    run = prepare_task(started.sweep_dir, 10, environ)

    assert run is not None
    assert run.name == "013-lr-0.2-seed-3"
    spec = load_resolved(run.config)
    assert spec.path == run.path
    assert spec.seed == 3
    assert spec.script.command[-4:] == ("--lr", "0.2", "--out", run.name)
    queued = read_queued_job(run)
    assert queued is not None
    assert (queued.job_id, queued.attempt) == ("15_3", 0)
    script = run.job_script.read_text()
    assert f"ddp_hpc.job.supervisor {run.path}" in script
    assert "--array" not in script
    run.stop_request.touch()
    assert prepare_task(started.sweep_dir, 10, {**environ, "SLURM_RESTART_COUNT": "1"}) == run
    assert read_queued_job(run) == queued
    assert run.stop_request.exists(), "a requeue forgets no request"


def test_a_task_waits_while_the_file_system_does_not_answer_and_says_so_where_it_does_not_answer_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    environ = task(lab, array="14", number=0, job="20")
    whole = sweep_dir.ledger.rename(tmp_path / "whole")
    sweep_dir.ledger.symlink_to("/proc/self/mem")  # reading that is an I/O error

    def restore(_seconds: float) -> None:
        with suppress(FileNotFoundError):  # a thread of an earlier test may sleep meanwhile
            whole.replace(sweep_dir.ledger)

    with monkeypatch.context() as patched:
        patched.setattr("ddp_hpc.base.patience.time.sleep", restore)
        run = prepare_task(sweep_dir, 0, environ)

    assert run is not None
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ddp_hpc.base.patience.PATIENCE_S", 0.0)
    run.submission.unlink()
    run.submission.symlink_to("/proc/self/mem")
    assert task_main([str(sweep_dir.path)]) == 1
    assert "Input/output error" in capsys.readouterr().err
    run.submission.unlink()
    run.job_script.unlink()
    run.job_script.mkdir()
    assert task_main([str(sweep_dir.path)]) == 1
    assert f"then `ddp-hpc sweep continue {sweep_dir.path}` starts the point" in capsys.readouterr().err


def task(lab: Lab, *, array: str, number: int, job: str) -> dict[str, str]:
    """Return the environment of a task of an array."""
    own = {"SLURM_JOB_ID": job, "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": str(number)}
    return {**lab.environ, **own, "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}


def test_no_other_point_starts_once_as_many_have_failed_as_the_sweep_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    started = start(lab, tmp_path, "seed=0..3")
    sweep_dir = started.sweep_dir
    continue_sweep(sweep_dir, lab.environ, is_failed=True, limits={"stop_after_failures": 1})
    first = prepare_task(sweep_dir, 0, task(lab, array="14", number=0, job="20"))
    assert first is not None
    record_start(first, attempt=0, job_id="14_0")
    record_end(first, 0, End(ending=Ending.FAILED, exit_code=1))

    assert prepare_task(sweep_dir, 0, task(lab, array="14", number=1, job="21")) is None

    assert "1 points have failed" in capsys.readouterr().err
    assert not sweep_dir.run(read_sweep(sweep_dir).points[1]).path.exists()
    lab.has("squeue", "true")
    again = continue_sweep(sweep_dir, lab.environ, is_failed=True, limits={})
    assert (len(again.numbers), lab.arrays[-1]) == (1, "--array=0 0")


def test_a_task_of_a_cancelled_sweep_starts_nothing_also_after_a_requeue_until_the_sweep_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    first = task(lab, array="14", number=0, job="20")
    run = prepare_task(sweep_dir, 0, first)
    assert run is not None
    append_record(sweep_dir, cancelled=True)

    assert prepare_task(sweep_dir, 0, {**first, "SLURM_RESTART_COUNT": "1"}) is None
    assert prepare_task(sweep_dir, 0, task(lab, array="14", number=1, job="21")) is None

    assert capsys.readouterr().err.count("the sweep was cancelled") == 2
    assert not sweep_dir.run(read_sweep(sweep_dir).points[1]).path.exists()
    queued = read_queued_job(run)
    assert queued is not None
    assert queued.cancelled_at is not None
    lab.lists()
    continue_sweep(sweep_dir, lab.environ, limits={})
    assert prepare_task(sweep_dir, 0, task(lab, array="15", number=1, job="31")) is not None


def test_failures_are_counted_since_the_sweep_was_continued_so_that_a_retry_is_not_held_back_by_its_own_failure(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..3").sweep_dir
    points = read_sweep(sweep_dir).points
    record_continued(sweep_dir, is_cancelled=False, forgiven={}, limits={"stop_after_failures": 1})
    finish(sweep_dir.run(points[0]), Ending.FAILED)
    lab.lists()
    assert prepare_task(sweep_dir, 0, task(lab, array="14", number=1, job="21")) is None

    again = continue_sweep(sweep_dir, lab.environ, is_failed=True, limits={})

    assert len(again.numbers) == 1
    run = prepare_task(sweep_dir, 0, task(lab, array="15", number=0, job="30"))
    assert run is not None
    record_start(run, attempt=1, job_id="15_0")
    record_end(run, 1, End(ending=Ending.FAILED, exit_code=1))
    assert prepare_task(sweep_dir, 0, task(lab, array="14", number=1, job="21")) is None, "the retry has failed, too"
    continue_sweep(sweep_dir, lab.environ, limits={})
    assert prepare_task(sweep_dir, 0, task(lab, array="16", number=1, job="40")) is not None


def test_a_continue_that_is_refused_changes_no_limit_and_leaves_the_sweep_cancelled(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..3").sweep_dir
    append_record(sweep_dir, cancelled=True)
    lab.lists()
    before = read_sweep(sweep_dir)
    with lock_sending(sweep_dir, "busy"), pytest.raises(RunBusyError):
        continue_sweep(sweep_dir, lab.environ, limits={"at_most": 3})
    assert read_sweep(sweep_dir) == before

    lab.has("sbatch", '[ "$1" = --test-only ] || { echo "sbatch: error: Invalid partition" >&2; exit 1; }')
    with pytest.raises(ConfigError, match="Invalid partition"):
        continue_sweep(sweep_dir, lab.environ, limits={"at_most": 3})

    after = read_sweep(sweep_dir)
    assert (after.at_most, after.is_cancelled) == (None, True)


def test_failed_points_of_a_cancelled_sweep_run_again_and_no_other(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=3)
    sweep_dir = start(lab, tmp_path, "seed=0..3").sweep_dir
    finish(sweep_dir.run(read_sweep(sweep_dir).points[0]), Ending.FAILED)
    append_record(sweep_dir, cancelled=True)
    lab.lists()
    lab.raise_limit(100)

    assert continue_sweep(sweep_dir, lab.environ, is_failed=True, limits={}).numbers == [0]

    assert prepare_task(sweep_dir, 0, task(lab, array="15", number=0, job="30")) is not None
    assert prepare_task(sweep_dir, 0, task(lab, array="14", number=1, job="21")) is None


OLD = [
    {"sending": "1a2b3c4d", "at": 1.0, "points": "0-2", "offset": 0},
    {"refused": "1a2b3c4d", "is_certain": True, "at": 1.0},
    {"sending": "5e6f7a8b", "at": 2.0, "points": "0-1", "offset": 0},
    {"array": "14", "of": "5e6f7a8b", "at": 3.0},
    {"cancelled": True, "at": 4.0},
    {"sending": "9c0d1e2f", "at": 5.0, "points": "2-3", "offset": 0},
]


def test_the_list_of_points_that_an_older_version_wrote_is_read(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..4").sweep_dir
    lines = [
        line for line in sweep_dir.ledger.read_text().splitlines() if "sending" not in line and "array" not in line
    ]
    sweep_dir.ledger.write_text("".join(f"{line}\n" for line in [*lines, *map(json.dumps, OLD)]))

    sweep = read_sweep(sweep_dir)

    assert [(one.job_id, one.numbers) for one in sweep.arrays] == [("14", (0, 1))]
    assert sweep.unanswered == SentArray(numbers=(2, 3))
    assert (sweep.never_sent, sweep.cancelled_numbers) == ([4], {0, 1, 4})


def test_a_task_whose_script_an_older_version_wrote_starts_its_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..4").sweep_dir
    for name, value in task(lab, array="14", number=3, job="20").items():
        monkeypatch.setenv(name, value)

    assert task_main([str(sweep_dir.path), "--offset", "0", "--sending", "1a2b3c4d"]) == 0

    assert capsys.readouterr().out == f"{sweep_dir.path}/003-seed-3\n"


def test_continue_starts_what_has_begun_and_lost_its_job_but_nothing_that_slurm_may_still_have(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..7").sweep_dir
    unrecorded, unsubmitted, died, alone, runs, follows, failed, finished = (
        sweep_dir.run(point) for point in read_sweep(sweep_dir).points
    )
    for number in (0, 2, 3, 4, 5):
        assert prepare_task(sweep_dir, 0, task(lab, array="14", number=number, job=str(20 + number))) is not None
    unrecorded.attempts.unlink(missing_ok=True)
    unsubmitted.path.mkdir()
    unsubmitted.config.write_text("name: x\n")
    for number, run in ((2, died), (3, alone), (4, runs), (5, follows)):
        record_start(run, attempt=0, job_id=f"14_{number}")
    record_end(alone, 0, End(ending=Ending.CANCELLED, exit_code=-9))
    write_queued_job(alone, QueuedJob(job_id="14_3", attempt=0, at=1.0, cancelled_at=2.0))
    record_end(follows, 0, End(ending=Ending.STOPPED, exit_code=0, next=Next.SUCCESSOR))
    write_queued_job(follows, QueuedJob(job_id="88", attempt=1, at=1.0))
    finish(failed, Ending.FAILED)
    finish(finished, Ending.FINISHED)
    lab.lists(SentArray(job_id="14", numbers=(4,)), alone="88")

    assert continue_sweep(sweep_dir, lab.environ, is_failed=True, limits={}).numbers == [6]
    assert continue_sweep(sweep_dir, lab.environ, limits={}).numbers == [0, 1, 2]
    assert lab.arrays[-2:] == ["--array=6 0", "--array=0-2 0"]

    cancel_sweep(sweep_dir, lab.environ)
    lab.lists()
    continue_sweep(sweep_dir, lab.environ, limits={})
    assert lab.arrays[-1] == "--array=0-5 0", "the whole sweep goes on, also the point that was cancelled alone"


def test_the_exit_code_is_1_where_slurm_accepts_no_point_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, limit=0)
    started = start(lab, tmp_path, "seed=0..1")
    lab.lists()
    monkeypatch.setenv("PATH", lab.environ["PATH"])

    assert print_jobs(started, {}, is_json=False) == print_jobs(started, {}, is_json=True) == 1
    assert main(["sweep", "continue", str(started.sweep_dir.path)]) == 1
    lab.raise_limit(1)
    assert main(["sweep", "continue", str(started.sweep_dir.path)]) == 0


def test_the_arrays_script_is_bash_and_runs_the_points_own_script_with_the_log_of_its_run(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    started = start(lab, tmp_path, "seed=0..1")
    script, run = started.sweep_dir.job_script, started.sweep_dir.path / "000-seed-0"
    words = ["name=grid", f"runs_dir={tmp_path}/runs", "slurm.setup=['echo a line of setup', 'export SITE=here']"]
    loaded = resolve(None, [*words, "slurm.modules=[cuda/12]"], lab.environ, command=["python", "train.py"]).spec
    script.write_text(array_script(loaded, started.sweep_dir))  # checked by shellcheck, too
    assert "module load cuda/12" in script.read_text()
    assert f"#SBATCH --output={started.sweep_dir.logs}/%A_%a.log\n" in script.read_text()
    shellcheck = Path(sys.executable).parent / "shellcheck"
    checked = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")
    spec = resolve(None, words, lab.environ, command=["python", "train.py"]).spec
    script.write_text(array_script(spec, started.sweep_dir))

    before = prepare_task(started.sweep_dir, 0, task(lab, array="14", number=0, job="20"))
    assert before is not None
    before.job_script.write_text('echo "here with $# arguments"; exit 7\n')
    done = subprocess.run(
        ["bash", str(script), "0"],
        env=task(lab, array="14", number=0, job="20"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert (run / "logs" / "console.log").read_text() == "here with 0 arguments\n"


def test_a_submission_that_is_killed_before_its_files_are_complete_leaves_no_sweep_and_can_be_given_again(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    lab.has("sbatch", "kill -KILL $(cat submitting); exit 1")  # while Slurm is asked whether it would refuse the script
    words = ["--cluster", "slurm", "name=grid", f"runs_dir={tmp_path}/runs", "--sweep", "seed=0..1"]
    (tmp_path / "train.py").touch()
    code = (
        "import os, sys; from pathlib import Path; Path('submitting').write_text(str(os.getpid()));"
        "from ddp_hpc.launch.submission.submit_checks import capacity; capacity.NODE_LOCAL_DIRS = ();"
        "from ddp_hpc.cli import main; main(sys.argv[1:])"
    )
    argv = [sys.executable, "-c", code, "submit", *words, "--", "python", "train.py"]
    killed = subprocess.run(argv, env=lab.environ, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "runs" / "grid").exists()

    accepts(lab, tmp_path)
    started = start(lab, tmp_path, "seed=0..1")

    sweep = read_sweep(started.sweep_dir)
    assert len(sweep.arrays) == 1
    assert started.sweep_dir.job_script.exists()
    (path,) = sweep.import_paths
    assert (path / "train.py").exists()
    assert path.is_relative_to(started.sweep_dir.path)


def test_a_sweep_is_refused_where_a_run_or_sweep_of_that_name_exists_and_its_script_cannot_be_the_users_own(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    start(lab, tmp_path, "seed=0..1")
    with pytest.raises(ConfigError, match=r"ddp-hpc sweep continue \S+grid"):
        start(lab, tmp_path, "seed=0..1")
    spec = resolve(None, ["slurm.template=mine.j2"], lab.environ, command=["python", "train.py"]).spec
    with pytest.raises(ConfigError, match=r"slurm\.template"):
        array_script(spec, SweepDir(spec.path))


def test_sbatchs_refusal_for_another_reason_is_an_error(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    lab.has("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1")

    with pytest.raises(ConfigError, match="Invalid partition"):
        send_points(read_sweep(sweep_dir), [0], client.config(lab.environ), lab.environ)

    shutil.rmtree(sweep_dir.path)
    lab.has(
        "sbatch", '[ "$1" = --test-only ] || { echo "sbatch: error: Batch job submission failed: no" >&2; exit 1; }'
    )
    with pytest.raises(ConfigError, match="no"):
        start(lab, tmp_path, "seed=0..1")
    assert not sweep_dir.path.exists(), "a sweep that no job knows leaves nothing"


def test_arrays_are_as_small_as_slurm_asks_for_and_where_it_takes_none_its_words_are_told(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    no = "echo 'sbatch: error: Batch job submission failed: Invalid job array specification' >&2; exit 1"
    few = 'case "$*" in *--test-only*) ;; *--array=0-1\\ *|*--array=2-3\\ *) echo 1$(wc -l < called);; *)'  # max_array_tasks=2
    lab.has("sbatch", f"{few} {no};; esac")
    assert list(start(lab, tmp_path, "seed=0..3").jobs.values()) == [2, 2]

    shutil.rmtree(tmp_path / "runs")
    lab.has("sbatch", f'[ "$1" = --test-only ] || {{ {no}; }}')
    refused = start(lab, tmp_path, "seed=0..3")
    assert not refused.jobs
    assert "Invalid job array specification" in refused.refusal


def test_what_is_sent_after_a_point_has_begun_does_not_wait_again_for_the_jobs_that_the_first_array_waited_for(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path, limit=2)
    (tmp_path / "train.py").touch()
    words = ["name=grid", f"runs_dir={tmp_path}/runs", "slurm.dependency=afterok:123"]
    base = resolve(None, words, lab.environ, command=["python", "train.py"])
    sweep = Sweep(dir=SweepDir(base.spec.path), points=make_points([parse_axis("seed=0..3")]))
    request = SubmitRequest(resolved=base, import_paths=[tmp_path], environ=lab.environ)
    started = submit_sweep(request, sweep, slurm_backend)
    assert lab.arrays[1] == "--array=0-1 --dependency=afterok:123 0"
    assert "dependency" not in started.sweep_dir.job_script.read_text()
    lab.lists(*read_sweep(started.sweep_dir).arrays)
    lab.raise_limit(3)
    continue_sweep(started.sweep_dir, lab.environ, limits={})
    assert "--array=2 --dependency=afterok:123 0" in lab.arrays[-2:]

    assert prepare_task(started.sweep_dir, 0, task(lab, array="14", number=0, job="20")) is not None
    lab.raise_limit(100)
    continue_sweep(started.sweep_dir, lab.environ, limits={})

    assert lab.arrays[-1] == "--array=2-3 0"  # squeue does not list the array of point 2


def finish(run: RunDir, ending: Ending) -> None:
    """Make a run that has ended."""
    run.path.mkdir(exist_ok=True)
    run.config.write_text(f"name: {run.name}\n")
    record_start(run, attempt=0, job_id="14_0")
    record_end(run, 0, End(ending=ending, exit_code=0))


def test_a_job_after_a_sweep_waits_for_its_arrays_and_is_refused_while_points_have_no_job(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=3)
    sweep_dir = start(lab, tmp_path, "seed=0..3").sweep_dir
    lab.lists(*read_sweep(sweep_dir).arrays)
    with pytest.raises(ConfigError, match="1 of 4 points have none"):
        sweep_dependency(sweep_dir, "any", lab.environ)

    lab.raise_limit(100)
    continue_sweep(sweep_dir, lab.environ, limits={})
    arrays = read_sweep(sweep_dir).arrays
    jobs = ":".join(array.job_id for array in arrays)
    lab.lists(*arrays)
    assert [sweep_dependency(sweep_dir, when, lab.environ) for when in ("ok", "notok", "any")] == [
        f"afterok:{jobs}",
        f"afternotok:{jobs}",
        f"afterany:{jobs}",
    ]

    for point in read_sweep(sweep_dir).points:
        finish(sweep_dir.run(point), Ending.FAILED if point.number == 1 else Ending.FINISHED)
    lab.lists()
    assert sweep_dependency(sweep_dir, "any", lab.environ) == sweep_dependency(sweep_dir, "notok", lab.environ) == ""
    with pytest.raises(ConfigError, match=r"ended otherwise .the first: 001-seed-1"):
        sweep_dependency(sweep_dir, "ok", lab.environ)


def test_a_job_after_a_sweep_does_not_wait_for_a_task_that_has_failed_and_whose_point_has_finished_since(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    run = sweep_dir.run(read_sweep(sweep_dir).points[0])
    finish(run, Ending.FAILED)
    lives = SentArray(numbers=(1,), job_id="14")
    lab.lists(lives)
    continue_sweep(sweep_dir, lab.environ, is_failed=True, limits={})
    assert [array.numbers for array in read_sweep(sweep_dir).arrays] == [(0, 1), (0,)]
    record_start(run, attempt=1, job_id="15_0")
    record_end(run, 1, End(ending=Ending.FINISHED, exit_code=0))
    lab.lists(lives)

    assert sweep_dependency(sweep_dir, "ok", lab.environ) == "afterok:14_1"


def test_submit_puts_the_arrays_of_a_sweep_into_the_dependency_of_a_later_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    lab.lists(*read_sweep(start(lab, tmp_path, "seed=0..1").sweep_dir).arrays)
    monkeypatch.setenv("PATH", lab.environ["PATH"])
    words = ["submit", "name=report", f"runs_dir={tmp_path}/runs", "--cluster", "slurm", "--after", "grid", "--dry-run"]

    assert main([*words, "--", "python", "train.py"]) == 0

    assert "#SBATCH --dependency=afterok:14\n" in capsys.readouterr().out


def test_a_sweep_of_which_points_wait_is_not_deleted_and_one_that_is_over_is_deleted_with_its_runs(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    lab.lists(*read_sweep(sweep_dir).arrays)
    with pytest.raises(RunBusyError, match="job 14 waits or runs"):
        delete_sweep(sweep_dir, lab.environ)
    lab.has("squeue", DOWN)
    with pytest.raises(SlurmUnavailableError):
        delete_sweep(sweep_dir, lab.environ)
    assert sweep_dir.ledger.exists()

    lab.lists()
    delete_sweep(sweep_dir, lab.environ)

    assert list(sweep_dir.path.parent.iterdir()) == []


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1, 2, 7), (3, 5, 6)])
def test_ranges_are_read_back(numbers: tuple[int, ...]) -> None:
    assert parse_ranges(ranges_text(numbers)) == numbers


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("14_[0-2%1]", {10, 11, 12}),
        ("14_4", {14}),
        ("15_[0-2]", set()),
        ("14_[0,2,...]", {*range(10, 20)}),
        ("14_[1-9:4%2]", {11, 15, 19}),
    ],
)
def test_squeue_says_which_points_of_an_array_wait(listed: str, found: set[int]) -> None:
    entry = QueuedEntry(job_id=listed, number="9", state="PENDING", reason="", starts_at=None)

    assert points_in_queue(SentArray(job_id="14", numbers=tuple(range(10, 20)), offset=10), [entry]) == found
