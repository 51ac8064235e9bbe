"""The process that samples: where the kernel or this Python lacks something, and when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.machine_use import read_uses
from ddp_hpc.run.run_dir.paths import RunDir

NODE = """
import errno, os, sys
def refuse(*_):
    raise OSError(getattr(errno, sys.argv[1]), "refused")
if sys.argv[1] == "ABSENT":
    if hasattr(os, "pidfd_open"):
        del os.pidfd_open
else:
    os.pidfd_open = refuse
from ddp_hpc.cluster.machine import sampler
sampler.SAMPLE_S = 0.05
raise SystemExit(sampler.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("missing", ["ABSENT", "ENOSYS", "EPERM"])
def test_without_pidfd_open_a_node_is_sampled_and_the_parents_end_is_seen(missing: str, tmp_path: Path) -> None:
    """Conda's Python lacks the call, old kernels do, and some sandboxes refuse it."""
    run = RunDir(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    parent = subprocess.Popen(["sleep", "3600"])
    try:
        argv = [sys.executable, "-c", NODE, missing, *arguments(run, parent.pid)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as sampler:
            while not read_uses(run, 0):
                assert sampler.poll() is None, "it samples while its parent lives"
                time.sleep(0.05)
            parent.kill()
            parent.wait()
            sampler.wait(60)
    finally:
        parent.kill()
        parent.wait()


def test_an_error_of_the_process_that_samples_is_seen(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ddp_hpc.cluster.machine.sampler", *arguments(RunDir(tmp_path), os.getpid())]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    (tmp_path / "sitecustomize.py").write_text(
        "from ddp_hpc.cluster.slurm import allocation\ndel allocation.granted_cpus\n"
    )

    done = subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "granted_cpus" in done.stderr


def arguments(run: RunDir, parent: int) -> list[str]:
    numbers = ["--attempt=0", "--node-rank=0", "--gpus=0", "--num-nodes=1"]  # the last one by an older agent
    return [str(run.path), *numbers, f"--parent={parent}", f"--root={parent}"]
