"""The count of what the kernel has killed in a cgroup, of version 1 and of version 2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddp_hpc.cluster.machine.cgroups import memory_kills, whose_memory_ran_out
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, report_killed
from ddp_hpc.watch.why.verdict import verdict_of
from tests.machine.test_cgroups import cgroups
from tests.unit.test_why_verdict import facts

V1 = "12:pids:/job_7\n4:cpu,memory:/slurm/job_7/step_1\n0::/\n"
V2 = "0::/system.slice/job_7/step_1/user/task_0\n"
STEP = "system.slice/job_7/step_1"


@pytest.mark.parametrize(
    ("member", "path", "text", "num"),
    [
        (V1, "memory/slurm/job_7/step_1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        (V2, f"{STEP}/user/task_0/memory.events", "low 0\nhigh 9\noom 2\noom_kill 1\noom_group_kill 0\n", 1),
        (V2, f"{STEP}/memory.events", "oom_kill 1\n", None),  # its own is not shown
        (V1, "memory/slurm/job_7/step_1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", None),
        ("", "memory.events", "oom_kill 1\n", None),
    ],
)  # fmt: skip
def test_the_kernels_count_of_this_cgroup_is_read(
    tmp_path: Path, member: str, path: str, text: str, num: int | None
) -> None:
    found = memory_kills(cgroups(tmp_path, member, {path: text}))

    assert (None if found is None else found.num) == num


@pytest.mark.parametrize(
    ("files", "whose"),
    [
        ({f"{STEP}/memory.events.local": "oom 1\noom_kill 0\n"}, "of the job or of the container, up to its limit"),
        ({}, "of the machine"),
        ({"memory.events.local": "oom 0\n"}, "not known which"),  # a container, whose root has a limit as any cgroup
        ({f"{STEP}/user/task_0/memory.events": "oom_kill 0\n"}, "$"),
    ],
)
def test_a_limit_that_was_not_reached_leaves_the_machine(tmp_path: Path, files: Mapping[str, str], whose: str) -> None:
    before = {f"{STEP}/memory.events.local": "oom 0\n", f"{STEP}/user/task_0/memory.events": "oom_kill 0\n"}
    kept = {name: text for name, text in files.items() if name == "memory.events.local"}
    after = {**before, f"{STEP}/user/task_0/memory.events": "oom_kill 1\n", **files}
    old = memory_kills(cgroups(tmp_path / "before", V2, {**before, **kept}))

    told = whose_memory_ran_out(old, cgroups(tmp_path / "after", V2, after))

    assert re.search(whose, told)
    assert bool(told) == (whose != "$")


def test_where_the_kernel_keeps_no_local_counts_it_is_not_known_whose_memory_it_was(tmp_path: Path) -> None:
    name = "memory/slurm/job_7/step_1/memory.oom_control"
    old = memory_kills(cgroups(tmp_path / "before", V1, {name: "oom_kill 0\n"}))

    assert "not known which" in whose_memory_ran_out(old, cgroups(tmp_path / "after", V1, {name: "oom_kill 1\n"}))
    assert whose_memory_ran_out(None) == ""


@pytest.mark.parametrize(("memory_ran_out", "failure"), [("of the machine", "host-memory"), ("", "killed")])
def test_a_rank_that_sigkill_ended_when_the_kernel_counted_a_kill_died_of_memory(
    tmp_path: Path, memory_ran_out: str, failure: str
) -> None:
    report_killed(tmp_path / "errors" / "rank-1.json", 9, rank=1, log=tmp_path / "log", memory_ran_out=memory_ran_out)
    record = WorkerFailure(**json.loads((tmp_path / "errors" / "rank-1.json").read_text()))

    found = verdict_of(facts(record))

    assert (found.failure, found.basis, found.rank) == (failure, "record", 1)
    assert ("the memory of the machine ran out" in found.detail) == bool(memory_ran_out)
