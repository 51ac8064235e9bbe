"""Scripts of other people under `ddp-hpc certify`: one leaves a process behind, one prints from its last rank, one asks for input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ddp_hpc.prove.certify.certificate import hint_on, time_estimate_text

DASHBOARD = """
import os, subprocess, time, torch
subprocess.Popen(["sleep", "54321"], start_new_session=True)
step = torch.load("last.pt")["step"] if os.path.exists("last.pt") else 0
while step < 6:
    step += 1
    time.sleep(0.2)
    print("step", step, flush=True)
    torch.save({"step": step}, "new.pt")
    os.replace("new.pt", "last.pt")
"""


def dashboards() -> set[int]:
    return {one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "54321"]}


@pytest.mark.long
def test_what_a_script_leaves_behind_is_ended_as_slurm_would_and_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DASHBOARD)
    words = ["resources.workers_per_node=1", "--faults=kill-after-save", "--", "python", "train.py"]
    before = dashboards()

    done = subprocess.run(
        [sys.executable, "-m", "ddp_hpc", "certify", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )

    left = dashboards() - before
    for pid in left:
        psutil.Process(pid).kill()
    assert left == set()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the script left processes running when it ended, and certify killed them: sleep 54321" in done.stdout


PRINTS_FROM_THE_LAST_RANK = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
step = torch.load("last.pt")["step"] if os.path.exists("last.pt") else 0
dist.barrier()
while step < 6:
    step += 1
    dist.barrier()
    time.sleep(0.2)
    if dist.get_rank() == dist.get_world_size() - 1:
        print("step", step, "loss", 1 / step, flush=True)
        torch.save({"step": step}, "new.pt")
        os.replace("new.pt", "last.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_steps_of_a_script_that_prints_from_its_last_rank_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS_FROM_THE_LAST_RANK)

    done = subprocess.run(
        [sys.executable, "-m", "ddp_hpc", "certify", "--json", "--faults=kill-after-save", "--", "python", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["unit"], found["num_positions"]) == ("step", 6)
    assert found["findings"][0]["verdict"] in {"exact", "loses"}
    assert "rank 1 prints the training's step, and rank zero does not" in found["notes"][0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("EOFError: EOF when reading a line", "The script asks for input"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '../data'", "nothing that lies beside it"),
        ("ValueError: odd", ""),
    ],
)
def test_a_failure_that_only_certify_causes_gets_a_hint(error: str, expected: str) -> None:
    hint = hint_on(error, Path("/home/ada/code"))

    assert expected in hint
    assert bool(hint) == bool(expected)


@pytest.mark.parametrize(
    ("seconds", "num_faults", "expected"),
    [(1200, 8, "3.3 h"), (30, 8, "5 min"), (3, 2, "1 min")],
)
def test_how_long_the_faults_take_is_said_before_they_begin(seconds: float, num_faults: int, expected: str) -> None:
    assert expected in time_estimate_text(seconds, num_faults)
