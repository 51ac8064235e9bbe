"""What launching promises to every workload: training by a recipe, and one that only these tests know.

The supervisor, the agent and the workers are real; Slurm is a folder of shell scripts, whose srun starts the agent here.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.launch.submission.run_dir_setup import is_finished
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import is_done, write_done
from ddp_hpc.run.spec import RecipeSpec, RunSpec, ScriptSpec, TrainSpec
from ddp_hpc.run.workload.protocol import Workload, load_worker
from ddp_hpc.run.workload.recipe import RecipeWorkload
from ddp_hpc.run.workload.table import WORKLOADS, workload_of
from tests.contract.supervise import add_counting
from tests.made_run import add_checkpoint, make_run
from tests.unit.fake_slurm import FakeSlurm
from tests.unit.made_network import batch

PATIENCE_S = 180.0
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "tests" / "distributed"
COUNTING_SCRIPT = Path(__file__).parent / "counting_script.py"
SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1 SLURM_NODEID=0
exec "$@"
"""
"""What srun does for a step of one task on this node."""


@pytest.fixture(autouse=True)
def _workloads() -> Iterator[None]:
    """Have the workload of these tests in this process, too."""
    before = dict(WORKLOADS)
    add_counting()
    yield
    WORKLOADS.clear()
    WORKLOADS.update(before)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this should have come about by now"
        time.sleep(0.01)


@dataclass(frozen=True)
class Case:
    """A workload, and how to have it do what a test needs."""

    config: str
    """The run's configuration; `{more}` are keys of one test."""
    disturbed: str
    """Keys with which a test finds it at work at `held_at`."""
    broken: str
    """Keys with which no worker ever gets anywhere."""
    held_at: int = 3
    """Progress that an attempt has made when it is disturbed."""


CASES = {
    "counting": Case(
        config="name: run\nrecipe: {{target: 'counting:count', args: {{{more}}}}}\nresources: {{workers_per_node: 2}}\n",
        disturbed="to: 6, holds_at: 3",
        broken="to: 5, raises: true",
    ),
    "recipe": Case(
        config=(
            "name: run\nrecipe: {{target: 'trial_recipe:build', args: {{{more}}}}}\nresources: {{workers_per_node: 2}}\n"
            "train: {{epochs: 2, global_batch_size: 24, micro_batch_size: 12}}\ncheckpoint: {{every_steps: 1}}\n"
        ),
        disturbed="load_s: 0.05",
        broken="load_s: -1.0",
    ),
    "script": Case(
        config=(
            "name: run\nresources:\n  workers_per_node: 2\nscript:\n  start: exec\n  progress: saved/*\n"
            f"  command: [{sys.executable}, {COUNTING_SCRIPT}, "
            "'{more}']\n"
        ),
        disturbed="holds",
        broken="raises",
        held_at=1,  # it counts how often a look found new files, not how many
    ),
}


SPECS = {
    "counting": RunSpec(name="run", recipe=RecipeSpec(target="counting:count", args={"to": 6})),
    "recipe": RunSpec(name="run", train=TrainSpec(epochs=3)),
    "script": RunSpec(name="run", script=ScriptSpec(command=("python", "train.py"))),
}
MORE = {
    "counting": replace(SPECS["counting"], recipe=RecipeSpec(target="counting:count", args={"to": 7})),
    "recipe": replace(SPECS["recipe"], train=TrainSpec(epochs=3, max_steps=2)),
    "script": RunSpec(name="run", script=ScriptSpec(command=("python", "train.py", "--more"))),
}
"""The same runs, asked for something else."""


@dataclass
class Job:
    """A Slurm job of one node whose supervisor these tests start."""

    run: RunDir
    case: Case
    slurm: FakeSlurm

    def asks_for(self, more: str) -> None:
        self.run.config.write_text(self.case.config.format(more=more))

    @property
    def workload(self) -> Workload:
        return workload_of(load_resolved(self.run.config))

    @property
    def progress(self) -> int:
        return self.workload.progress(self.run, Ledger.read(self.run))

    @property
    def attempts(self) -> list[Attempt]:
        return list(Ledger.read(self.run).attempts)

    def start(self) -> subprocess.Popen[bytes]:
        environ = {
            **batch("node1", "2"),
            "SLURM_CPUS_PER_TASK": "1",
            "PATH": self.slurm.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.run.path),
        }
        words = [str(self.run.path), "--cluster", "slurm", "--import-path", str(RECIPE)]
        self.run.console.parent.mkdir(parents=True, exist_ok=True)
        with self.run.console.open("ab") as log:
            argv = [sys.executable, "-m", "tests.contract.supervise", *words]
            return subprocess.Popen(
                argv, env=environ, cwd=self.run.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def finish(self) -> int:
        """Run it to its end; return the exit code."""
        return self.start().wait(PATIENCE_S)

    def a_worker_of(self, supervisor: subprocess.Popen[bytes]) -> psutil.Process:
        """Return a worker that the agent has started."""
        (agent,) = psutil.Process(supervisor.pid).children()
        return agent.children()[-1]


@pytest.fixture(params=["counting", *(pytest.param(name, marks=pytest.mark.long) for name in ("recipe", "script"))])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    slurm = FakeSlurm(tmp_path)
    slurm.knows()
    slurm.knows_nodes(node1="mixed")
    slurm.has("srun", SRUN)
    run = make_run(tmp_path, "run")
    monkeypatch.chdir(run.path)  # the supervisor's working directory, where a script saves its files
    return Job(run, CASES[request.param], slurm)


def test_a_run_whose_worker_is_killed_goes_on_in_place_from_what_it_had_achieved_until_it_is_done(job: Job) -> None:
    job.asks_for(job.case.disturbed)
    supervisor = job.start()
    until(lambda: job.progress >= job.case.held_at)

    job.a_worker_of(supervisor).kill()
    until(lambda: len(job.attempts) == 2)
    (job.run.path / "go").touch()
    code = supervisor.wait(PATIENCE_S)

    first, second = job.attempts
    assert (first.cause, first.next) == ("worker crashed", "in place")
    assert (second.cause, second.ending) == ("finished", "finished")
    assert second.first_step == first.last_step
    assert job.case.held_at <= second.first_step < (second.last_step or 0)
    assert code == exit_codes.FINISHED
    assert is_done(job.run, job.workload.goal)
    assert job.finish() == exit_codes.FINISHED  # nothing is left to do, so no attempt begins
    assert len(job.attempts) == 2


def test_failures_without_progress_end_the_run(job: Job) -> None:
    job.asks_for(job.case.broken)

    code = job.finish()

    assert code == exit_codes.FAILED
    assert [(one.cause, one.next) for one in job.attempts] == [
        ("worker crashed", "in place"),
        ("worker crashed", "in place"),
        ("worker crashed", ""),
    ]
    assert "3 attempts in a row ended without" in job.attempts[-1].reason
    assert not is_done(job.run, job.workload.goal)


def test_workers_are_asked_to_stop_by_their_own_signal_and_the_job_goes_back_into_the_queue(job: Job) -> None:
    job.asks_for(job.case.disturbed)
    supervisor = job.start()
    until(lambda: job.progress >= job.case.held_at)

    supervisor.send_signal(signal.SIGUSR2)  # as Slurm does before the time limit
    code = supervisor.wait(PATIENCE_S)

    (only,) = job.attempts
    assert (code, only.exit_code, only.ending, only.next) == (99, 99, "stopped", "requeue")
    assert job.slurm.orders("scontrol requeue") == ["scontrol requeue 7"]
    assert not is_done(job.run, job.workload.goal)
    said = [path.read_text() for path in job.run.path.glob("stopped-*")]
    assert said == ([] if isinstance(job.workload, RecipeWorkload) else ["SIGTERM"] * 2)


# --- in one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES])
def test_every_workload_has_the_members_of_the_protocol_and_a_worker_to_run(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    run.config.write_text(CASES[name].config.format(more=CASES[name].disturbed))

    workload = workload_of(load_resolved(run.config))
    worker = load_worker(workload.worker)

    assert workload.progress(run, Ledger.read(run)) == 0
    assert workload.cpus_per_worker >= 1
    assert json.loads(json.dumps(workload.goal)) == workload.goal
    assert all(path.is_absolute() for path in workload.input_paths(tmp_path))
    assert workload.users_code([]) is None
    inspect.signature(worker.main).bind(str(run.path), os.environ, attempt=0, listen_fd=None)  # raises TypeError
    inspect.signature(worker.preload).bind(str(run.path))


@pytest.mark.parametrize("name", [*CASES])
def test_a_run_is_done_until_it_is_asked_for_another_goal(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    spec = SPECS[name]
    assert not is_finished(run, spec)

    write_done(run, workload_of(spec).goal)

    assert is_finished(run, spec)
    others = [one for other, one in MORE.items() if other == name] + [
        one for other, one in SPECS.items() if other != name
    ]
    assert [is_finished(run, one) for one in others] == [False] * 3


@pytest.mark.parametrize("max_steps", [None, 40])
def test_what_older_versions_wrote_of_a_finished_training_counts_and_they_read_what_this_one_writes(
    max_steps: int | None, tmp_path: Path
) -> None:
    run, spec = make_run(tmp_path, "run"), RunSpec(name="run", train=TrainSpec(epochs=3, max_steps=max_steps))

    run.done.write_text(json.dumps({"epochs": 3, "max_steps": max_steps, "at": 1.5}))  # by version 0.1.0
    assert is_finished(run, spec)
    write_done(run, workload_of(spec).goal)

    done = json.loads(run.done.read_text())
    assert (done.get("epochs"), done.get("max_steps")) == (3, max_steps)  # the question that 0.1.0 asks
    assert done.keys() == {"epochs", "max_steps", "at"}


def test_progress_of_training_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    add_checkpoint(run, 4)
    add_checkpoint(run, 8)

    assert workload_of(SPECS["recipe"]).progress(run, Ledger.read(run)) == 8
