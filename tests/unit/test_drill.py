"""A drill's verdict, whom it hits, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.launch.submission.backend import Submission
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.prove.drill import faults, scenario
from ddp_hpc.prove.drill.faults import FAULTS
from ddp_hpc.prove.drill.injector import NodeProcess, pids_by_kind
from ddp_hpc.prove.drill.scenario import check
from ddp_hpc.run.config.resolve import Resolved
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Mark, as_line
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.watch.samples import StepsTaken, read_steps_taken
from tests.unit.fake_slurm import FakeSlurm

RUN = "/share/runs/drill"
STEPS = {1: (1, [0, 1]), 2: (1, [2, 3]), 3: (2, [0, 2])}
KILL = FAULTS["kill-worker"]
UNBROKEN = StepsTaken(STEPS, 0)
SURVIVED: dict[str, Any] = {
    "fault": KILL,
    "every_steps": 10,
    "more_attempts": 1,
    "digests": ("aa", "aa"),
    "taken": (StepsTaken(STEPS, 10), UNBROKEN),
}


def test_a_run_that_came_back_with_the_same_bits_and_lost_no_more_than_it_may_has_survived() -> None:
    assert [one.name for one in check(**SURVIVED) if not one.is_good] == []


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"digests": ("bb", "aa")}, "same bits"),
        ({"more_attempts": 0}, "starts again"),
        ({"fault": replace(KILL, restarts=False), "taken": (UNBROKEN, UNBROKEN)}, "goes on"),
        ({"taken": (StepsTaken(STEPS, 21), UNBROKEN)}, "lost steps"),
        ({"fault": replace(KILL, is_graceful=True), "taken": (StepsTaken(STEPS, 1), UNBROKEN)}, "lost steps"),
        ({"taken": (StepsTaken({**STEPS, 3: (2, [0, 3])}, 0), UNBROKEN)}, "each sample once"),
        ({"taken": (StepsTaken({1: STEPS[1]}, 0), UNBROKEN)}, "each sample once"),
        ({"taken": (StepsTaken({1: STEPS[1], 2: STEPS[1]}, 0),) * 2}, "each sample once"),
        ({"taken": (StepsTaken({}, 0),) * 2}, "each sample once"),
    ],
)
def test_each_check_can_fail(changed: dict[str, Any], broken: str) -> None:
    assert [one.name for one in check(**{**SURVIVED, **changed}) if not one.is_good] == [broken]


def python(pid: int, parent: int, module: str, *words: str) -> NodeProcess:
    return NodeProcess(pid, parent, ["/usr/bin/python3", "-u", "-m", module, *words])


SRUN = [NodeProcess(10, 9, ["srun", "-N2", "python", RUN]), NodeProcess(11, 10, ["srun", "-N2", "python", RUN])]
AGENT = [
    python(20, 2, "ddp_hpc.job.node.agent", RUN),
    *(python(pid, 20, "ddp_hpc.job.node.agent", RUN) for pid in (21, 22)),
    python(23, 21, "ddp_hpc.job.node.agent", RUN),  # a loader
]
TORCHRUN = [
    python(30, 2, "ddp_hpc.train.torchrun", "-m", "ddp_hpc.job.node.task", RUN),
    *(python(pid, 30, "ddp_hpc.job.node.task", RUN) for pid in (31, 32)),
    python(33, 32, "ddp_hpc.job.node.task", RUN),
]
TASKS = [python(41, 2, "ddp_hpc.job.node.task", RUN), python(42, 3, "ddp_hpc.job.node.task", RUN)]
OTHERS = [
    python(50, 2, "ddp_hpc.job.node.agent", "/share/runs/other"),
    python(51, 2, "ddp_hpc.prove.drill.injector", RUN),
    python(52, 2, "ddp_hpc.job.supervisor", RUN),
    NodeProcess(53, 2, ["bash", "-c", RUN]),
    NodeProcess(54, 2, []),
]


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (AGENT, {"agent": [20], "worker": [21, 22], "srun": []}),
        (TORCHRUN, {"agent": [30], "worker": [31, 32], "srun": []}),
        ([*SRUN, *TASKS], {"agent": [], "worker": [41, 42], "srun": [10]}),
        (OTHERS, {"agent": [], "worker": [], "srun": []}),
    ],
    ids=["agent", "torchrun", "srun", "others"],
)
def test_processes_of_a_run_are_told_apart(seen: list[NodeProcess], found: dict[str, list[int]]) -> None:
    assert pids_by_kind([*seen, *OTHERS], RUN) == found


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if fault.inject is None])
def test_what_takes_an_administrator_says_so(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["drill", fault])

    assert code == 2
    assert "Only an administrator can cause the fault" in capsys.readouterr().err


def test_a_step_taken_again_counts_by_its_newest_attempt(tmp_path: Any) -> None:
    run = RunDir(tmp_path)
    for attempt, steps in ((0, (1, 2, 3)), (1, (3, 4))):
        for rank in (0, 1):
            path = run.rank_samples(attempt, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            ids = [f'{{"step": {step}, "epoch": 1, "samples": [{10 * step + attempt + 2 * rank}]}}' for step in steps]
            path.write_text("\n".join(ids))

    taken = read_steps_taken(run)

    assert taken.num_repeated == 1
    assert {step: samples for step, (_, samples) in taken.steps.items()} == {
        1: [10, 12],
        2: [20, 22],
        3: [31, 33],
        4: [41, 43],
    }


class OneRunIsThere:
    """A back end in which the second run that a drill submits exists already."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.cancelled: list[str] = []

    def submit(self, request: SubmitRequest) -> Submission:
        self.submitted.append(request.run.name)
        is_new = len(self.submitted) == 1
        return Submission(request.run, "slurm", "queued", 0, is_new=is_new, job_id=str(len(self.submitted)))

    def cancel(self, run: RunDir, _environ: Any) -> str:
        self.cancelled.append(run.name)
        return ""


def test_a_drill_that_meets_a_run_of_its_name_cancels_only_what_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = OneRunIsThere()
    monkeypatch.setattr(scenario, "_slurm", lambda: backend)
    faulty, unbroken = (
        SubmitRequest(resolved=Resolved(RunSpec(name=name, runs_dir=str(tmp_path)), {}), import_paths=[], environ={})
        for name in ("mine", "mine-unbroken")
    )
    drill = scenario.Drill(fault="preempt", faulty=faulty, unbroken=unbroken, say=print)

    with pytest.raises(ConfigError, match="mine exists already"):
        drill.run_drill()

    assert backend.submitted == ["mine-unbroken", "mine"]
    assert backend.cancelled == ["mine-unbroken"]


class OneWaits(OneRunIsThere):
    """A back end in which both runs are new, and their jobs wait."""

    def submit(self, request: SubmitRequest) -> Submission:
        return replace(super().submit(request), is_new=True)

    def find_job(self, run: RunDir, _environ: Any) -> Submission:
        return Submission(run, "slurm", "waiting", 0, job_id="7")


def test_a_drill_whose_job_will_not_start_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.knows(state="PENDING", reason="PartitionTimeLimit")
    backend = OneWaits()
    monkeypatch.setattr(scenario, "_slurm", lambda: backend)
    monkeypatch.setattr(scenario, "SLURM_POLL_S", 0.0)
    faulty, unbroken = (
        SubmitRequest(
            resolved=Resolved(RunSpec(name=name, runs_dir=str(tmp_path)), {}), import_paths=[], environ=slurm.environ
        )
        for name in ("mine", "mine-unbroken")
    )

    report = scenario.Drill(fault="preempt", faulty=faulty, unbroken=unbroken, say=print).run_drill()

    assert report.verdict == "FAIL"
    assert report.reason.startswith("Job 7 of mine never starts: the job's time limit is longer than its partition")
    assert backend.cancelled == ["mine-unbroken", "mine"]


def test_a_run_that_chooses_its_interval_may_lose_by_the_one_that_was_in_force_at_the_fault(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    chosen = [(0, 2400.0), (0, 216.0), (1, 5000.0)]  # a guess, the choice by what was measured, and one after the fault
    marks = [
        Mark(kind="interval", attempt=one, at=1.0, step=1, interval={"every_steps": steps}) for one, steps in chosen
    ]
    run.timeline.write_bytes(b"".join(map(as_line, marks)))

    assert scenario._save_interval_steps(run, "auto", 1) == 216
    assert scenario._save_interval_steps(run, "auto", 0) == 0
    assert scenario._save_interval_steps(run, 50, 1) == 50


def test_a_run_that_ends_before_a_save_can_fail_is_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    seen = []

    def finish(_: RunDir) -> None:
        seen.append(run.checkpoints.stat().st_mode & 0o777)
        run.done.touch()

    monkeypatch.setattr(faults, "read_progress", finish)
    request: Any = SimpleNamespace(run=run)
    inject: Any = FAULTS["disk-full"].inject

    with pytest.raises(ConfigError, match="no save failed within"):
        inject(request, None, "", "")

    assert (seen, run.checkpoints.stat().st_mode & 0o200) == ([0o500], 0o200)  # and it is writable again
