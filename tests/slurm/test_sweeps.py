"""Sweeps on the cluster: many points in one array, each with resume and requeue, a limit of submitted jobs, a rerun of what failed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddp_hpc.launch.sweep.sweep_dir import SweepDir, read_sweep
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress, read_queued_job
from tests.slurm.cluster import Cluster
from tests.slurm.runs import LoginNode

pytestmark = pytest.mark.long

SCRIPT = """
import pathlib, signal, sys, time

number, point = int(sys.argv[1]), sys.argv[2]
tries = pathlib.Path("tries", point)
tries.mkdir(parents=True, exist_ok=True)
(tries / str(time.time_ns())).touch()
if number == 3 and not pathlib.Path("mended").exists():
    sys.exit("this point fails")
if number == 1 and len(list(tries.iterdir())) == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))
    time.sleep(300)
print("trained", number)
"""


def test_points_run_as_one_array_one_comes_back_by_requeue_and_one_that_failed_runs_again_alone(
    login: LoginNode, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    login.add_recipe(tmp_path / "train.py")
    script = ("--", "python", "train.py", "{number}", "{point}")
    one = ("name=grid", "restart.max_no_progress=1", "resources.workers_per_node=1", "--cluster", "slurm", "--json")
    done = login.type("submit", *one, "--sweep", "number=0..5", *script)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["jobs"]) == 1
    sweep_dir = SweepDir(login.folder / "runs" / "grid")
    runs = [sweep_dir.run(point) for point in read_sweep(sweep_dir).points]
    login.cluster.wait_for(lambda: list((login.folder / "tries").glob("001-*/*")), 120)

    job = read_queued_job(runs[1])
    assert job is not None
    (array,) = said["jobs"]
    assert job.job_id == f"{array}_1"
    asked = login.type("requeue", str(runs[1].path))
    assert asked.returncode == 0, asked.stderr
    login.cluster.wait_for(lambda: all(_is_over(run) for run in runs), 240)

    ends = [Ledger.read(run).attempts[-1].ending for run in runs]
    assert ends == ["finished", "finished", "finished", "failed", "finished", "finished"]
    assert [attempt.restart for attempt in Ledger.read(runs[1]).attempts] == [0, 1]
    assert "trained 1" in runs[1].console.read_text()

    (login.folder / "mended").touch()
    again = login.type("sweep", "continue", "grid", "--failed", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["points"] == 1
    login.cluster.wait_for(lambda: Ledger.read(runs[3]).attempts[-1].ending == "finished", 120)
    assert len(Ledger.read(runs[0]).attempts) == 1


def test_a_cancelled_sweep_ends_what_runs_and_starts_no_other_point(login: LoginNode, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(300)\n")
    login.add_recipe(tmp_path / "train.py")
    one = ("name=grid", "resources.workers_per_node=1", "--cluster", "slurm", "--json")
    done = login.type(
        "submit", *one, "--sweep", "number=0..3", "--at-most", "1", "--", "python", "train.py", "{number}"
    )
    assert done.returncode == 0, done.stderr
    sweep_dir = SweepDir(login.folder / "runs" / "grid")
    first = sweep_dir.run(read_sweep(sweep_dir).points[0])
    login.cluster.wait_for(lambda: Ledger.read(first).newest is not None, 120)

    ended = login.type("sweep", "cancel", "grid")

    assert ended.returncode == 0, ended.stderr
    login.cluster.wait_for(lambda: _is_over(first), 60)
    newest = Ledger.read(first).newest
    assert newest is not None
    assert newest.ending == "cancelled"
    login.cluster.wait_for(lambda: not login.cluster.run("squeue", "--noheader").stdout.strip(), 60)
    assert "3 not submitted" in login.type("list", "grid").stdout


def _is_over(run: RunDir) -> bool:
    newest = Ledger.read(run).newest
    return newest is not None and newest.is_last


@contextmanager
def limit_of_jobs(cluster: Cluster, number: int) -> Iterator[None]:
    """Have the QOS of all users allow so many submitted jobs, once those of the tests before have left the queue."""
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 120)
    words = ("sacctmgr", "--immediate", "modify", "qos", "normal", "set")
    cluster.run(*words, f"MaxSubmitJobsPerUser={number}", user="root")
    try:
        yield
    finally:
        cluster.run(*words, "MaxSubmitJobsPerUser=-1", user="root")


def continue_until_all_are_sent(login: LoginNode, name: str) -> None:
    """Do what the documentation says on a limit of submitted jobs: say `sweep continue` again while points are not submitted."""
    for _ in range(100):
        if "not submitted" not in login.type("list", name).stdout:
            return
        login.type("sweep", "continue", name)
        time.sleep(2)
    raise AssertionError(login.type("list", name).stdout)


def test_points_that_scancel_has_ended_go_on_by_continue(login: LoginNode, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import pathlib, time\nwhile pathlib.Path('slow').exists(): time.sleep(0.1)\nprint('trained')\n"
    )
    login.add_recipe(tmp_path / "train.py")
    slow = login.folder / "slow"
    slow.touch()
    one = ("name=grid", "resources.workers_per_node=1", "--cluster", "slurm", "--sweep", "seed=0..1", "--at-most", "1")
    done = login.type("submit", *one, "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    sweep_dir = SweepDir(login.folder / "runs" / "grid")
    begun, waiting = (sweep_dir.run(point) for point in read_sweep(sweep_dir).points)
    login.cluster.wait_for(lambda: Ledger.read(begun).newest, 120)
    assert not waiting.path.exists()

    login.cluster.cancel_all()
    slow.unlink()
    asked = login.type("sweep", "continue", "grid")

    assert "(2 points) submitted" in asked.stdout, asked.stdout + asked.stderr
    followed = login.type("sweep", "follow", "grid")
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert [attempt.ending for attempt in Ledger.read(begun).attempts] == ["cancelled", "finished"]


def test_points_beyond_a_limit_of_twenty_submitted_jobs_are_sent_by_continue(login: LoginNode, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('trained', sys.argv[1])\n")
    login.add_recipe(tmp_path / "train.py")
    with limit_of_jobs(login.cluster, 20):
        one = ("name=grid", "resources.workers_per_node=1", "--cluster", "slurm", "--json")
        done = login.type("submit", *one, "--sweep", "number=0..29", "--", "python", "train.py", "{number}")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert sum(said["jobs"].values()) + said["not_submitted"] == 30
        assert said["not_submitted"] >= 10
        again = login.type("sweep", "continue", "grid", "--json")
        more = json.loads(again.stdout)
        assert again.returncode == (0 if more["jobs"] else 1), again.stderr
        assert more["points"] <= 29

        continue_until_all_are_sent(login, "grid")

    followed = login.type("sweep", "follow", "grid", timeout=400)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "30 points: 30 finished" in followed.stdout.splitlines()
    sweep_dir = SweepDir(login.folder / "runs" / "grid")
    points = read_sweep(sweep_dir).points
    newest = [Ledger.read(sweep_dir.run(point)).attempts for point in points]
    assert [attempts[-1].ending for attempts in newest] == ["finished"] * 30
    assert {len(attempts) for attempts in newest} == {1}


STAMPS = """
import sys, time
begun = time.time()
time.sleep(3)
open(f"stamps-{sys.argv[1]}", "w").write(f"{begun} {time.time()}")
"""


def test_no_more_points_than_asked_for_run_at_once_over_several_arrays(login: LoginNode, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STAMPS)
    login.add_recipe(tmp_path / "train.py")
    with limit_of_jobs(login.cluster, 4):
        one = ("name=grid", "resources.workers_per_node=1", "--cluster", "slurm", "--at-most", "2")
        done = login.type("submit", *one, "--sweep", "number=0..5", "--", "python", "train.py", "{number}")
        assert done.returncode == 0, done.stdout + done.stderr
        continue_until_all_are_sent(login, "grid")

    followed = login.type("sweep", "follow", "grid", timeout=400)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert len(read_sweep(SweepDir(login.folder / "runs" / "grid")).arrays) > 1
    spans = [tuple(map(float, path.read_text().split())) for path in login.folder.glob("stamps-*")]
    assert len(spans) == 6
    at_once = [sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans]
    assert max(at_once) <= 2


def test_an_array_whose_record_was_lost_is_found_in_the_queue_of_the_real_slurm(
    login: LoginNode, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    login.add_recipe(tmp_path / "train.py")
    one = ("name=lost", "slurm.extra.hold=true", "--cluster", "slurm", "--json")
    done = login.type("submit", *one, "--sweep", "lr=1..4", "--", "python", "train.py", "{lr}")
    assert done.returncode == 0, done.stderr
    ledger = SweepDir(login.folder / "runs" / "lost").ledger
    *kept, last = ledger.read_text().splitlines(keepends=True)
    assert "array" in json.loads(last)
    with ledger.open("w") as file:
        file.writelines(kept)

    again = login.type("sweep", "continue", "lost", "--json")

    try:
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["points"] == 0
        assert "4 points: 4 waiting" in login.type("list", "lost").stdout
        (array,) = read_sweep(SweepDir(login.folder / "runs" / "lost")).arrays
        assert {array.job_id: 4} == json.loads(done.stdout)["jobs"]
    finally:
        login.cluster.cancel_all()


def test_a_thousand_points_are_one_array_of_the_real_slurm(login: LoginNode, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    login.add_recipe(tmp_path / "train.py")
    words = ("name=large", "slurm.extra.hold=true", "--cluster", "slurm", "--json")

    done = login.type(
        "submit", *words, "--sweep", "lr=1..500", "--sweep", "seed=0..1", "--", "python", "train.py", "{lr}"
    )
    try:
        assert done.returncode == 0, done.stderr
        (job,) = json.loads(done.stdout)["jobs"]
        folder = login.folder / "runs" / "large"
        assert sum(path.is_file() for path in folder.iterdir()) == 3
        listed = login.type("list", "large")
        assert "1,000 points: 1,000 waiting" in listed.stdout, listed.stderr
        ended = login.type("sweep", "cancel", "large")
        assert ended.returncode == 0, ended.stderr
    finally:
        login.cluster.cancel_all()
    again = login.type("sweep", "continue", "large", "--json")
    assert json.loads(again.stdout)["points"] == 1000, "a cancelled array leaves its points not submitted"
    assert json.loads(again.stdout)["jobs"].keys() != {job}


def test_a_preempted_point_comes_back_alone_and_resumes_from_its_checkpoint(login: LoginNode) -> None:
    here = ("slurm.partition=low", "slurm.nodelist=node1", "resources.workers_per_node=1")
    steps = ("train.max_steps=400", "train.epochs=100", "checkpoint.every_steps=20", "log.every_steps=20")
    words = (
        "submit",
        "digits.yaml",
        "name=grid",
        "--cluster",
        "slurm",
        *here,
        *steps,
        "--sweep",
        "seed=1..2",
        "--json",
    )
    done = login.type(*words)
    assert done.returncode == 0, done.stderr
    sweep_dir = SweepDir(login.folder / "runs" / "grid")
    runs = [sweep_dir.run(point) for point in read_sweep(sweep_dir).points]
    login.cluster.wait_for(lambda: all(_is_training(run) for run in runs), 120)

    urgent = (
        "sbatch",
        "--partition=high",
        "--nodelist=node1",
        "--exclusive",
        "--output=/dev/null",
        "--wrap",
        "sleep 3",
    )
    login.cluster.run(*urgent, cwd=login.folder)
    login.cluster.wait_for(lambda: all(_is_over(run) for run in runs), 240)

    for run in runs:
        first, *_, last = Ledger.read(run).attempts
        assert (first.cause, last.ending) == ("preempted", "finished")
        assert last.first_step > 0
        assert last.job_id == first.job_id
    assert {run.path.parent for run in runs} == {sweep_dir.path}


def _is_training(run: RunDir) -> bool:
    progress = read_progress(run)
    return progress is not None and progress.step >= 40
