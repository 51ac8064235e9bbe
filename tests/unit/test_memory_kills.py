"""The count of what the kernel has killed in a cgroup, of version 1 and of version 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_hpc.base.memory_kills import has_killed, num_memory_kills
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, report_killed
from ddp_hpc.watch.why.verdict import verdict_of
from tests.unit.test_why_verdict import facts

V1 = "12:pids:/job_7\n4:cpu,memory:/slurm/job_7/step_1\n0::/\n"
V2 = "0::/system.slice/job_7/step_1/user/task_0\n"


def made(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("member", "path", "text", "num"),
    [
        (V1, "memory/slurm/job_7/step_1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        (V2, "system.slice/job_7/step_1/user/task_0/memory.events", "low 0\nhigh 9\noom 2\noom_kill 1\noom_group_kill 0\n", 1),
        (V2, "elsewhere/memory.events", "oom_kill 1\n", None),
        (V1, "memory/slurm/job_7/step_1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", None),
        ("", "memory.events", "oom_kill 1\n", None),
    ],
)  # fmt: skip
def test_the_kernels_count_of_this_cgroup_is_read(
    tmp_path: Path, member: str, path: str, text: str, num: int | None
) -> None:
    (tmp_path / "member").write_text(member)
    made(tmp_path / "cgroup", path, text)

    assert num_memory_kills(tmp_path / "cgroup", tmp_path / "member") == num


def test_a_count_that_is_not_known_proves_nothing() -> None:
    assert not has_killed(None)


@pytest.mark.parametrize(("memory_ran_out", "failure"), [(True, "host-memory"), (False, "killed")])
def test_a_rank_that_sigkill_ended_when_the_kernel_counted_a_kill_died_of_memory(
    tmp_path: Path, memory_ran_out: bool, failure: str
) -> None:
    report_killed(tmp_path / "errors" / "rank-1.json", 9, rank=1, log=tmp_path / "log", memory_ran_out=memory_ran_out)
    record = WorkerFailure(**json.loads((tmp_path / "errors" / "rank-1.json").read_text()))

    found = verdict_of(facts(record))

    assert (found.failure, found.basis, found.rank) == (failure, "record", 1)
