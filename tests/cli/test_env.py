"""`env`: every value derived from the allocation, and why."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from ddp_hpc.cli import main
from ddp_hpc.cluster.rendezvous.worker_env import TABLE_VARIABLE
from tests.unit.made_network import task

NAMES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "RES_OPTIONS",
]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in task(3, 0, 1, on="node1", SLURM_DISTRIBUTION="cyclic").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(["env", *words]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_each_value_is_told_with_its_source_and_why(capsys: pytest.CaptureFixture[str], in_a_task: None) -> None:
    out, err = printed(capsys)

    lines = out.splitlines()
    assert lines[0] == "task 3 of 6 in step 7.0, on node 0 of 3"
    assert lines[2].split() == ["NAME", "VALUE", "SOURCE", "WHY"]
    assert [line.split()[0] for line in lines[3:17]] == NAMES
    assert lines[3].split()[:4] == ["RANK", "3", "Slurm", "(SLURM_PROCID)"]
    assert "not consecutive" in lines[3]
    assert lines[8].split()[:3] == ["MASTER_ADDR", "127.0.0.1", "environment"]
    assert err == ""


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str], in_a_task: None) -> None:
    out, _ = printed(capsys, "--json")

    found = json.loads(out)
    assert [one["name"] for one in found["variables"]] == NAMES
    assert set(found["variables"][0]) == {"name", "value", "source", "rule", "refused"}


def test_only_what_is_not_set_is_exported(capsys: pytest.CaptureFixture[str], in_a_task: None) -> None:
    out, err = printed(capsys, "--export")

    assert "export RANK='3'" in out.splitlines()
    assert "export NCCL_SOCKET_IFNAME='=lo'" in out.splitlines()
    assert "MASTER_ADDR" not in out
    assert err == ""


def test_a_shell_reads_what_is_exported() -> None:
    script = f'eval "$({shlex.join([sys.executable, "-m", "ddp_hpc", "env", "--export"])})"; env'

    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env={"RANK": "it's mine", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "RANK=it's mine" in done.stdout.splitlines()
    assert "RES_OPTIONS=timeout:1 attempts:3" in done.stdout.splitlines()


def test_what_nobody_can_do_without_is_missed_aloud(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile = task(1, 0, 0, on="node1", nodes="node[1,3]", tasks="1,2", SLURM_DISTRIBUTION="arbitrary")
    for name, value in hostfile.items():
        monkeypatch.setenv(name, value)

    out, err = printed(capsys, "--export")

    assert "MASTER_ADDR" not in out
    assert err.startswith("note: MASTER_ADDR is not exported, as ddp-hpc cannot find its value: a hostfile")


def test_broken_variables_are_an_error_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    assert main(["env"]) == 2
    assert capsys.readouterr().err.startswith("error: SLURM_JOB_NODELIST is not set")
