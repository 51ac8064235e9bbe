"""From samples to lines: processes, costs, intervals, warnings."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddp_hpc.cluster.machine.cgroups import Cgroups
from ddp_hpc.cluster.machine.gpus import GIB, GpuReader
from ddp_hpc.cluster.machine.processes import SCAN_SHARE, ProcessTree
from ddp_hpc.cluster.machine.sampler import COST_SHARE, MOST_LINE_S, SAMPLE_S, Sampler, line_s, pause_s
from ddp_hpc.run.run_dir.machine_use import GpuUse
from tests.machine.test_cgroups import cgroups

BUSY = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"


def busy(seconds: float) -> list[str]:
    return [sys.executable, "-c", BUSY.format(seconds=seconds)]


PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
print("ended", flush=True)
sys.stdin.read()
"""


def test_the_time_of_processes_that_have_ended_counts_once() -> None:
    """It moves into their parent's count when the parent has waited for them."""
    argv = [sys.executable, "-c", PARENT, BUSY.format(seconds=0.5)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        tree = ProcessTree(parent.pid)
        tree.used_s()
        used = 0.0
        while not select.select([parent.stdout], [], [], 0.05)[0]:
            used += _seen(tree)
        used += _seen(tree)

        whole = sum(psutil.Process(parent.pid).cpu_times()[:4])
        assert whole >= 0.5
        assert used == pytest.approx(whole, abs=0.15), "but for what the parent took before the first look"


def _seen(tree: ProcessTree) -> float:
    tree._pause_s = 0.0
    used = tree.used_s()
    assert used is not None
    return used


def test_this_process_is_not_counted_as_one_of_the_workers() -> None:
    tree = ProcessTree(os.getpid())

    assert tree.used_s() is None
    assert tree.cpus == frozenset()


def test_of_a_root_that_is_gone_nothing_is_known() -> None:
    child = subprocess.Popen(busy(0))
    child.wait()

    assert ProcessTree(child.pid).used_s() is None


LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
sys.stdin.readline()
"""
ROOT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
print("left", flush=True)
sys.stdin.read()
"""


def test_a_process_whose_parent_has_ended_counts_on_and_nothing_is_taken_back() -> None:
    """A helper of a script that was forked twice, or whose parent was killed."""
    argv = [sys.executable, "-c", ROOT, LEAVES_A_CHILD, BUSY.format(seconds=3600)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin is not None
        assert root.stdout is not None
        helper = psutil.Process(int(root.stdout.readline()))
        try:
            tree = ProcessTree(root.pid)
            before = sum(helper.cpu_times()[:2])
            _seen(tree)
            began = sum(helper.cpu_times()[:2])
            _await(lambda: sum(helper.cpu_times()[:2]) > began + 0.3)
            used = _seen(tree)
            root.stdin.write(b"\n")
            root.stdin.flush()
            assert root.stdout.readline() == b"left\n"
            used += _seen(tree)
            _await(lambda: sum(helper.cpu_times()[:2]) > began + 0.6)
            least = sum(helper.cpu_times()[:2]) - began
            used += _seen(tree)
            most = sum(helper.cpu_times()[:2]) - before
        finally:
            helper.kill()

        assert least - 0.1 < used < most + 0.1


IGNORES = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.stdin.readline()
end = __import__("time").process_time() + 0.5
while __import__("time").process_time() < end: pass
print("worked", flush=True)
sys.stdin.read()
"""


def test_what_a_child_used_stays_counted_where_its_parent_does_not_wait_for_it() -> None:
    argv = [sys.executable, "-c", IGNORES, BUSY.format(seconds=0.5)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        tree, of_parent = ProcessTree(parent.pid), psutil.Process(parent.pid)
        used, has_run = _seen(tree), False
        deadline = time.monotonic() + 60
        while not has_run or of_parent.children():
            assert time.monotonic() < deadline
            has_run = has_run or bool(of_parent.children())
            used += _seen(tree)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"worked\n"
        used += _seen(tree)

        assert used > 0.8, "half a second of each"


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_cpus_are_those_of_the_workers_and_not_of_the_process_that_has_started_them() -> None:
    """An agent is not bound, and its workers are."""
    code = "import os, subprocess, sys, time\n{}\nprint('begun', flush=True)\nsys.stdin.read()"
    child = code.format("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])")
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        root.stdout.readline()
        tree = ProcessTree(root.pid)
        tree.used_s()

        assert tree.cpus == {min(os.sched_getaffinity(root.pid))}


STEPD = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(15, b"slurmstepd", 0, 0, 0)
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""
TASK = """
import os, sys
from pathlib import Path
from ddp_hpc.job.node.machine_use import MachineSampler, Node
from ddp_hpc.run.run_dir.paths import RunDir
run = RunDir(Path(sys.argv[1]))
sampler = MachineSampler(Node(run=run, attempt=0, node_rank=0, num_nodes=1, num_gpus=0, is_of_step=True), os.environ)
[argv] = [one for one in map(lambda path: path.read_bytes().split(b"\\0"), Path("/proc").glob("[0-9]*/cmdline"))
          if f"--parent={os.getpid()}".encode() in one]
print(os.getppid(), *(one.decode() for one in argv if one.startswith(b"--root")))
sampler.close()
"""


def test_of_sruns_tasks_side_by_side_the_process_of_their_step_is_found(tmp_path: Path) -> None:
    """It is not an ancestor of the process that samples, which must be no child of a task."""
    done = subprocess.run(
        [sys.executable, "-c", STEPD, TASK, str(tmp_path)], capture_output=True, text=True, check=True
    )

    step, root = done.stdout.split()
    assert root == f"--root={step}"


def test_processes_are_searched_for_less_often_where_that_costs_much() -> None:
    tree = ProcessTree(os.getpid())
    begin = time.thread_time()
    tree.used_s()

    assert tree._pause_s <= (time.thread_time() - begin) / SCAN_SHARE
    assert tree._pause_s > 0


@pytest.mark.parametrize(
    ("age_s", "num_nodes", "seconds"),
    [(0, 1, 15.0), (3600, 1, 18.0), (86400, 4, 432.0), (10**6, 4, MOST_LINE_S), (0, 512, 80.0), (10**6, 6400, 1000.0)],
)
def test_lines_become_rarer_with_the_attempts_age_and_with_the_nodes(
    age_s: float, num_nodes: int, seconds: float
) -> None:
    assert line_s(age_s, num_nodes) == pytest.approx(seconds)


def test_the_lines_of_a_week_are_few() -> None:
    age, count = 0.0, 0
    while age < 7 * 86400:
        age += line_s(age, 1)
        count += 1

    assert count < 2000


def test_samples_that_cost_much_are_rarer() -> None:
    assert pause_s(0.001) == SAMPLE_S
    assert pause_s(0.05) == pytest.approx(62.5) == 0.05 / COST_SHARE


class Given(GpuReader):
    """A reader that has read this."""

    def __init__(self, *answers: tuple[list[GpuUse], str]) -> None:
        super().__init__(["0"])
        self._answers = iter(answers)

    def take(self) -> tuple[list[GpuUse], str]:
        return next(self._answers)


def sampler(found: Cgroups, gpus: GpuReader, clock: list[float]) -> Sampler:
    return Sampler(
        node_rank=1,
        node="n1",
        num_gpus=1,
        gpus=gpus,
        processes=None,
        cgroups=found,
        clock=lambda: clock[0],
    )


def test_a_line_has_the_mean_of_the_utilisation_and_the_most_memory_and_rates_of_what_the_kernel_counts(
    tmp_path: Path,
) -> None:
    stat = {"cpu.max": "200000 100000\n", "cpu.stat": "throttled_usec 0\n", "cpu.pressure": "some total=0\n"}
    found, now = cgroups(tmp_path, "0::/\n", stat), [0.0]
    gpus = [([GpuUse(name="0", busy=one, memory_gib=10 * one, total_gib=80.0)], "") for one in (0.2, 0.6)]
    one = sampler(found, Given(([], ""), *gpus), now)

    one.sample()
    (tmp_path / "cgroup/cpu.stat").write_text("throttled_usec 5000000\n")
    (tmp_path / "cgroup/cpu.pressure").write_text("some total=2500000\n")
    for now[0] in (5.0, 10.0):
        one.sample()
    line = one.line()

    assert line is not None
    assert line.gpus == (GpuUse(name="0", busy=0.4, memory_gib=6.0, total_gib=80.0),)
    assert (line.seconds, line.throttled, line.waiting) == (10.0, 0.5, 0.25)
    assert (line.cpus_used, line.num_cpus, line.cpu_busy) == (None, None, None), "their processes are not to be seen"
    assert line.is_memory_of_node


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_wall_clock_that_is_set_changes_no_length_of_time(step: float, tmp_path: Path) -> None:
    now, wall = [100.0], [1e9]
    one = sampler(cgroups(tmp_path, "0::/\n", {}), Given(*[([], "")] * 3), now)
    one.wall_clock = lambda: wall[0]

    one.sample()
    now[0], wall[0] = 115.0, 1e9 + 15.0 + step
    one.sample()
    line = one.line()

    assert line is not None
    assert (line.seconds, line.at) == (15.0, 1e9 + 15.0 + step)


def test_an_interval_in_which_no_gpu_answered_is_not_one_of_idle_gpus(tmp_path: Path) -> None:
    now = [0.0]
    one = sampler(cgroups(tmp_path, "0::/\n", {}), Given(([], ""), ([], "it says nothing")), now)

    one.sample()
    now[0] = 5.0
    one.sample()
    line = one.line()

    assert line is not None
    assert (line.gpus, line.gpu_busy, line.gpu_problem) == ((), None, "it says nothing")


def test_memory_that_is_about_to_run_out_is_said_once(tmp_path: Path) -> None:
    files = {"memory.max": f"{10 * GIB}\n", "memory.current": f"{8 * GIB}\n", "memory.stat": ""}
    one = sampler(cgroups(tmp_path, "0::/\n", files), Given(*[([], "")] * 3), [0.0])

    assert one.sample() == ""
    (tmp_path / "cgroup/memory.current").write_text(f"{int(9.5 * GIB)}\n")
    warning = one.sample()

    assert "9.5 of the 10.0 GiB of memory that it may use on n1" in warning
    assert "resources.mem_gb" in warning
    assert one.sample() == ""
