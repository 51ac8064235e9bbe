"""Rank zero holds three connections to each rank: the limit of open files is raised for it, or the run is refused before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEET = """
import resource, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("limit", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""
FEW = 40
"""Ranks need 44 where they are eight."""


def submit(folder: Path, ulimit: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "meet.py").write_text(MEET)
    command = f'ulimit {ulimit} {FEW}; exec "$@" resources.workers_per_node=8 restart.hang_timeout_s=20 --wait -- python meet.py'
    argv = [
        "bash",
        "-c",
        command,
        "bash",
        sys.executable,
        "-m",
        "ddp_hpc",
        "submit",
        "--cluster=local",
        "name=few",
        *words,
    ]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", "torchrun"])
def test_ranks_may_open_as_many_files_as_the_hard_limit_allows(launcher: str, tmp_path: Path) -> None:
    done = submit(tmp_path, "-Sn", f"launcher={launcher}")

    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "runs/few/logs/attempt-0/rank-0.log").read_text()
    assert int(log.split("limit ")[1].split()[0]) > FEW


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", pytest.param("torchrun", marks=pytest.mark.long)])
def test_a_world_that_needs_more_files_than_the_hard_limit_is_refused_before_it_starts(
    launcher: str, tmp_path: Path
) -> None:
    done = submit(tmp_path, "-n", f"launcher={launcher}")

    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{FEW} files" in done.stderr
    assert "44" in done.stderr
    assert "ulimit -Hn" in done.stderr
    assert not list(tmp_path.glob("runs/few/logs/attempt-*/rank-*.log")), "no rank has started"
