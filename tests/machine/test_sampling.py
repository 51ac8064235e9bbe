"""What is seen of a node at each look."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_hpc.cluster.machine.cgroups import own_cgroups
from ddp_hpc.cluster.machine.gpus import GIB, Gpu, GpuReader
from ddp_hpc.cluster.machine.sampler import Sampler, cpu_s_and_cpus, memory_warning
from tests.machine.test_cgroups import cgroups

BUSY = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"
PARENT = """
import subprocess, sys
sys.stdin.readline()
subprocess.run([sys.executable, "-c", sys.argv[1]])
print("ended", flush=True)
sys.stdin.read()
"""


def sampler(root: int | None, found: list[Path] | None = None, gpus: GpuReader | None = None) -> Sampler:
    return Sampler(
        node_rank=1,
        node="n1",
        gpus=gpus,
        root=None if root is None else psutil.Process(root),
        granted=None,
        cgroups=own_cgroups() if found is None else found,
    )


def test_the_time_of_processes_that_have_ended_counts_once() -> None:
    """It moves into their parent's count when the parent has waited for them."""
    argv = [sys.executable, "-c", PARENT, BUSY.format(seconds=0.5)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        one = sampler(parent.pid)
        parent.stdin.write(b"\n")
        looks = [one.look()]
        parent.stdout.readline()
        looks.append(one.look())

        used = sum((use.cpu_busy or 0.0) * (use.num_cpus or 0.0) * use.seconds for use in looks)
        assert 0.4 < used < sum(psutil.Process(parent.pid).cpu_times()[:4]) + 0.1


def test_this_process_is_not_counted_as_one_of_the_workers() -> None:
    assert [one.pid for one in sampler(os.getppid()).process_tree()].count(os.getpid()) == 0


def test_of_a_root_that_is_gone_or_not_to_be_seen_nothing_is_known() -> None:
    child = subprocess.Popen(["sleep", "3600"])
    gone = sampler(child.pid)
    child.kill()
    child.wait()

    for one in (gone.look(), sampler(None).look()):
        assert (one.num_cpus, one.cpu_busy) == (None, None)


def test_the_cpus_are_those_of_the_workers_and_not_of_the_process_that_has_started_them() -> None:
    """An agent is not bound, and its workers are."""
    code = "import os, subprocess, sys, time\n{}\nprint('begun', flush=True)\nsys.stdin.read()"
    child = code.format("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])")
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        root.stdout.readline()

        assert cpu_s_and_cpus(sampler(root.pid).process_tree())[1] == {min(os.sched_getaffinity(root.pid))}


STEPD = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(15, b"slurmstepd", 0, 0, 0)
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""
TASK = """
import os, sys
from pathlib import Path
from ddp_hpc.job.node.start_sampler import end_sampling, start_sampling
from ddp_hpc.run.run_dir.paths import RunDir
run = RunDir(Path(sys.argv[1]))
sampler = start_sampling(run, os.environ, attempt=0, node_rank=0, num_gpus=0, is_of_step=True)
[argv] = [one for one in map(lambda path: path.read_bytes().split(b"\\0"), Path("/proc").glob("[0-9]*/cmdline"))
          if f"--parent={os.getpid()}".encode() in one]
print(os.getppid(), *(one.decode() for one in argv if one.startswith(b"--root")))
end_sampling(sampler)
"""


def test_of_sruns_tasks_side_by_side_the_process_of_their_step_is_found(tmp_path: Path) -> None:
    """It is not an ancestor of the process that samples, which must be no child of a task."""
    done = subprocess.run(
        [sys.executable, "-c", STEPD, TASK, str(tmp_path)], capture_output=True, text=True, check=True
    )

    step, root = done.stdout.split()
    assert root == f"--root={step}"


class Given(GpuReader):
    """A reader that has read this."""

    def read(self, *, patience_s: float) -> tuple[list[Gpu] | None, str]:
        assert patience_s < 5.0
        if self.visible is None:
            return None, "it says nothing"
        gpus = [(0.2, 10.0), (0.6, 30.0), (None, 20.0)]
        return [Gpu(name="0", busy=busy, memory_gib=used, total_gib=80.0) for busy, used in gpus], ""


def test_of_several_gpus_the_mean_is_kept_and_the_memory_of_the_fullest() -> None:
    use = sampler(None, gpus=Given("0")).look()

    assert use.gpu_busy == pytest.approx(0.4)
    assert (use.gpu_memory_gib, use.gpu_memory_total_gib) == (30.0, 80.0)


def test_a_look_at_which_no_gpu_answers_is_not_one_of_idle_gpus() -> None:
    use = sampler(None, gpus=Given(None)).look()

    assert (use.gpu_busy, use.gpu_memory_gib, use.gpu_problem) == (None, None, "it says nothing")


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_wall_clock_that_is_set_changes_no_length_of_time(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time() + step
    one = sampler(None)
    monkeypatch.setattr(time, "time", lambda: now)

    use = one.look()

    assert 0 < use.seconds < 60
    assert use.at == now


def test_without_a_limit_the_memory_is_that_of_the_node(tmp_path: Path) -> None:
    use = sampler(None, cgroups(tmp_path, "0::/\n", {})).look()

    assert use.memory_limit_gib == pytest.approx(psutil.virtual_memory().total / GIB)


def test_memory_that_is_about_to_run_out_is_said(tmp_path: Path) -> None:
    files = {"memory.max": f"{10 * GIB}\n", "memory.current": f"{8 * GIB}\n", "memory.stat": ""}
    one = sampler(None, cgroups(tmp_path, "0::/\n", files))

    assert memory_warning(one.look()) == ""
    (tmp_path / "cgroup/memory.current").write_text(f"{int(9.5 * GIB)}\n")
    warning = memory_warning(one.look())

    assert "9.5 of the 10.0 GiB of memory that the job may use on n1" in warning
    assert "resources.mem_gb" in warning
