"""How many threads may still be started: by the limits of the user, the kernel, and cgroups of version 1 and of version 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.thread_room import ThreadRoom, thread_room


def made(root: Path, member: str, files: dict[str, str]) -> ThreadRoom | None:
    """Return the room on a node on which 300 threads run."""
    fixed = {"proc/loadavg": "0.5 0.5 0.5 2/300 4711\n", "proc/sys/kernel/threads-max": "90300\n"}
    for name, text in {**fixed, "proc/sys/kernel/pid_max": "80300\n", "proc/self/cgroup": member, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return thread_room(root / "proc", root / "cgroup", num_limit=70300)


V1, V2 = "12:pids:/job_7/step_1\n4:memory:/other\n0::/\n", "0::/slurm/job_7/task_0\n"
ROOT_V1, ROOT_V2 = {"cgroup/pids/release_agent": "", "cgroup/pids/cgroup.procs": ""}, {"cgroup/cgroup.procs": ""}


@pytest.mark.parametrize(
    ("member", "files", "num", "limit"),
    [
        (V2, ROOT_V2, 70000, "`ulimit -u` (70300)"),
        (V1, ROOT_V1, 70000, "`ulimit -u` (70300)"),
        ("", {}, 70000, "`ulimit -u` (70300)"),
        (V2, {**ROOT_V2, "proc/sys/kernel/pid_max": "32768"}, 32468, "kernel.pid_max (32768)"),
        (V2, {**ROOT_V2, "cgroup/slurm/job_7/task_0/pids.max": "max\n", "cgroup/slurm/pids.max": "500\n", "cgroup/slurm/pids.current": "90\n"}, 410, "the cgroup's pids.max (500)"),
        (V1, {**ROOT_V1, "cgroup/pids/job_7/pids.max": "64\n", "cgroup/pids/job_7/pids.current": "60\n"}, 4, "the cgroup's pids.max (64)"),
        # A container with a cgroup namespace, and one that sees its host's path, and not its host's folders.
        ("0::/\n", {**ROOT_V2, "cgroup/cgroup.type": "domain\n", "cgroup/pids.max": "max\n", "cgroup/pids.current": "24\n"}, 1000, "above this container"),
        ("5:pids:/docker/4f\n", {"cgroup/pids/cgroup.procs": "", "cgroup/pids/pids.current": "24\n"}, 1000, "above this container"),
        ("0::/../other\n", {**ROOT_V2, "cgroup/cgroup.type": "domain\n", "cgroup/pids.max": "100", "cgroup/pids.current": "24\n"}, 76, "the cgroup's pids.max (100)"),
        # Nothing is mounted; a file is not what it should be.
        (V2, {}, 0, "pids.max is not readable"),
        (V2, {**ROOT_V2, "proc/loadavg": "hidden"}, 0, "cannot be read"),
    ],
)  # fmt: skip
def test_the_strictest_limit_counts_and_one_that_is_not_known_leaves_no_room(
    tmp_path: Path, member: str, files: dict[str, str], num: int, limit: str
) -> None:
    found = made(tmp_path, member, files)

    assert found is not None
    assert found[0] == num
    is_known = "read" not in limit
    assert found[1].startswith("it is not known how many threads") is not is_known
    assert limit in found[1]
    assert f"leaves room for {num} threads" in found[1] or not is_known
