"""`benchmarks/gpu_check.py`: no check passes by doing nothing, and each of its claims fails on a result that is bad in that."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu_check
from benchmarks.gpu.table import CHECKS, Check, judge
from ddp_hpc.cluster.rendezvous.worker_env import SHARED_GPU
from ddp_hpc.train.process_group import choose_device, rank_info_from_environ

Change = dict[str, Any]
BY_NAME = {check.name: check for check in CHECKS}
AGENT, SPAWNED = "python -m ddp_hpc.job.node.agent", "python -m ddp_hpc.job.node.spawned_worker"
LOSSES = [2.3, 1.5, 0.9]
TRAINED: Change = {"losses": LOSSES}
EXACT: Change = {
    "killed_at": [10, 20],
    "steps": 120,
    "resumed": ["10", "20"],
    "digests": ["a1", "a1"],
    "same_metrics": True,
}
NOT_EXACT: list[Change] = [
    {"killed_at": []},
    {"killed_at": [10, 120]},
    {"resumed": ["10"]},
    {"digests": ["a1", "b2"]},
    {"digests": ["", ""]},
    {"same_metrics": False},
]
NO_TRAINING: list[Change] = [{"losses": [2.3, 2.3]}, {"losses": [2.3, float("nan")]}, {"losses": []}]
SCRIPT: Change = {"rc": 0, "saved": 20}
LOST: list[Change] = [{"rc": 1}, {"saved": 0}]
WORKER = {"process": AGENT, "all_reduced": [2.0], "backend": "gloo"}
LEFT = {
    "kill_to_end_s": 0.2,
    "kill_to_memory_free_s": 0.1,
    "stop_to_end_s": 0.8,
    "stop_to_memory_free_s": 0.8,
    "state": "stopped",
    "step": 101,
    "saved": 101,
}
FUSED = {"losses": {"fused": LOSSES, "stock": LOSSES}, "skipped": {"fused": 3, "stock": 3}}
FLAGS = {"matmul": "highest", "convolutions": True}
ROWS: Change = {"rates": {"by hand": {"low": 10.0}, "ours": {"low": 9.0}}}
NO_ROWS: list[Change] = [{"rates": {}}, {"rates": {"by hand": {"low": 10.0}, "ours": {"low": 0.0}}}]
SAVED = {"bytes": 10, "stall_ms": 1.0, "durable_ms": 2.0, "dcp_stall_ms": 3.0}

RESULTS: dict[str, tuple[Change, list[Change]]] = {
    "forked worker": (WORKER, [{"process": SPAWNED}, {"all_reduced": [1.0]}, {"backend": "cpu:gloo,cuda:nccl"}]),
    "CUDA or threads at import": (
        {**WORKER, "process": SPAWNED, "said": "the import left threads running"},
        [{"process": AGENT}, {"all_reduced": []}, {"said": ""}],
    ),
    "kill and stop": (
        LEFT,
        [
            {"kill_to_end_s": 30.0},
            {"kill_to_memory_free_s": 9.0},
            {"stop_to_end_s": 16.0},
            {"stop_to_memory_free_s": 9.0},
            {"state": "failed"},
            {"saved": 100},
        ],
    ),
    **dict.fromkeys(("fp32", "bf16", "fp16, SGD", "fp16, AdamW"), (TRAINED, NO_TRAINING)),
    "fp16, a recipe's fused SGD": (
        FUSED,
        [
            {"skipped": {"fused": 0, "stock": 3}},
            {"losses": {"fused": [2.3, float("nan"), float("nan")], "stock": LOSSES}},
            {"losses": {"fused": [2.3, 0.5, 0.4], "stock": LOSSES}},
        ],
    ),
    "fp32 as PyTorch has it": (
        {"ours": {**FLAGS, "device": "cpu"}, "pytorch": FLAGS},
        [
            {"ours": {**FLAGS, "device": "cuda"}},
            {"ours": {**FLAGS, "device": "cpu", "matmul": "high"}},
            {"ours": {**FLAGS, "device": "cpu", "convolutions": False}},
        ],
    ),
    "no old rate": (
        {"rates_in_lines": [None, 5.0, 5.0, 6.0]},
        [{"rates_in_lines": [644.0] * 8}, {"rates_in_lines": [None, None]}],
    ),
    **{name: (EXACT, NOT_EXACT) for name in BY_NAME if name.startswith("resume, ")},
    "replay and audit": (
        {"replay_rc": 0, "replay": "the same to the bit", "audit_rc": 0, "audit": "no difference"},
        [{"replay_rc": 1}, {"replay": ""}, {"audit_rc": 1}, {"audit": ""}],
    ),
    "certify": ({"rc": 0, "said": "resumes exactly"}, [{"rc": 1}, {"said": ""}]),
    "a rank that hangs": (
        {"said": "other ranks wait for rank 1, which is in recipes.py:55, others wait in all_reduce"},
        [
            {"said": "other ranks wait for rank 0, which is in recipes.py:55, others wait in all_reduce"},
            {"said": "no rank made progress"},
        ],
    ),
    "a rank whose host is slow": (
        {"said": "rank 1 on vm is slow: cause: forward"},
        [{"said": "rank 1 on vm is slow: cause: data"}, {"said": ""}],
    ),
    "a rank whose samples are slow": (
        {"said": "rank 1 on vm is slow: cause: data"},
        [{"said": "rank 0 on vm is slow: cause: data"}, {"said": ""}],
    ),
    "a flipped bit": ({"said": "`layers.0.weight` differs"}, [{"said": "finished"}, {"said": ""}]),
    "a bad label": (
        {"rc": 1, "said": "IndexError: Target 77 is out of bounds."},
        [{"rc": 0}, {"said": "an exception"}, {"device": "cuda", "said": "a label is out of range"}],
    ),
    "a bad index": (
        {"rc": 1, "said": "index out of range"},
        [{"rc": 0}, {"said": "an exception"}, {"device": "cuda", "said": "index out of range"}],
    ),
    "out of memory": (
        {"rc": 1, "said": "out of memory: this process has 70 GiB"},
        [{"rc": 0}, {"said": "out of memory"}],
    ),
    "data on the device": ({"rc": 0, **TRAINED}, [{"rc": 1}, *NO_TRAINING]),
    "too few GPUs": (
        {"rcs": [2, 2], "said": "CUDA_VISIBLE_DEVICES is '', so there is no GPU"},
        [{"rcs": [0, 2]}, {"rcs": []}, {"said": "failed"}],
    ),
    "GPUs by default": ({"rc": 0, "device_of_run": "cuda"}, [{"rc": 1}, {"device_of_run": "cpu"}]),
    "memory by NVML": ({"idle": 0.5, "shown": 2.0, "total": 80.0}, [{"shown": 0.4}, {"shown": 81.0}]),
    "profile": ({"shares": [60.0, 2.5], "report_rc": 0}, [{"shares": [14558.0]}, {"shares": []}, {"report_rc": 1}]),
    "preflight": ({"rc": 0, "said": "node vm: ok"}, [{"rc": 1}, {"said": ""}]),
    **dict.fromkeys(("plain script", "Lightning", "Accelerate", "Transformers"), (SCRIPT, LOST)),
    "compiled Sequential, two ranks": (
        {"graphs": [1, 1], "said": "trained"},
        [{"graphs": [1, 0]}, {"graphs": []}],
    ),
    "compiled, uneven batches": ({"rc": 0, **TRAINED}, [{"rc": 1}, *NO_TRAINING]),
    "waits": (
        {"waits": {"plain, sgd": "", "EMA, sgd": ""}},
        [{"waits": {}}, {"waits": {"plain, sgd": "", "EMA, sgd": "training.py:311"}}],
    ),
    "bytes of a save": (
        {"changed": [True, True], "equal": [True, True]},
        [{"changed": [True, False]}, {"equal": [True, False]}, {"changed": []}, {"equal": []}],
    ),
    **{name: (ROWS, NO_ROWS) for name in BY_NAME if name.startswith("rates, ")},
    "loader": ({"over_pytorch": {"a": 1.0, "b": 0.9}}, [{"over_pytorch": {}}, {"over_pytorch": {"a": 1.0, "b": 0.0}}]),
    "save": (SAVED, [{"stall_ms": 0.0}, {"bytes": 0}]),
    "launch": (
        {"seconds": {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0}},
        [{"seconds": {}}, {"seconds": {"a": 0.0, "b": 1.0, "c": 2.0, "d": 2.0}}],
    ),
}
"""For each check, figures that are right, and what makes each of its claims wrong."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_claim_of_a_check_fails_on_a_result_that_is_bad_in_that(check: Check) -> None:
    good, bad = RESULTS[check.name]

    assert judge(check, {"device": "cpu", **good}).outcome == "ok"
    verdicts = [judge(check, {"device": "cpu", **good, **change}) for change in bad]
    assert [one.outcome for one in verdicts] == ["failed"] * len(bad)
    blamed = " ".join(one.reason for one in verdicts)
    assert [says for says in check.claims if says not in blamed] == [], "no bad result is made up for these claims"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_without_figures_fails(check: Check) -> None:
    assert judge(check, {"device": "cpu"}).outcome == "failed"
    assert gpu_check.verdict_of(check, None, "cpu")[0].outcome == "failed"
    assert gpu_check.verdict_of(check, {"error": "RuntimeError: died"}, "cpu")[0].reason == "RuntimeError: died"


def test_a_missed_goal_is_said_and_fails_nothing() -> None:
    slow = judge(BY_NAME["save"], {**SAVED, "stall_ms_a_gb": 60.0, "hidden_share": 0.97, "pinned_bytes": None})

    assert slow.outcome == "ok"
    assert [*slow.goals.values()] == [False, True, False]


def test_names_are_unique_and_each_family_has_one_check_for_make_test() -> None:
    assert len(BY_NAME) == len(CHECKS)
    on_cpus = {check.family for check in CHECKS if check.on == "both"}
    assert {check.family for check in CHECKS if check.is_sample} >= on_cpus - {"compile"}


def test_workers_that_share_a_gpu_by_the_switch_of_tests_take_the_first() -> None:
    numbers = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 0, "MASTER_PORT": 1}
    environ = {"MASTER_ADDR": "localhost", SHARED_GPU: "1", **{name: str(number) for name, number in numbers.items()}}

    assert str(choose_device(rank_info_from_environ(environ), 2)) == "cuda:0"


SLEEPS = """\
import subprocess, sys, time
from benchmarks import gpu_check
from benchmarks.gpu import table

def sleeps(place):
    subprocess.Popen(["setsid", "--fork", "sh", "-c", f"echo $$ > {__file__}.pid; exec sleep 600"])
    time.sleep(600)

check = table.Check("sleeps", "a family", sleeps, {"it wakes up": lambda f: True}, limit_s=2.0)
gpu_check.CHECKS = (check,)
gpu_check.__file__ = __file__
sys.exit(gpu_check.main())
"""


def test_a_check_that_is_over_its_time_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    script, output = tmp_path / "sleeps.py", tmp_path / "out" / "results.json"
    script.write_text(SLEEPS)
    root = str(Path(gpu_check.__file__).parent.parent)
    argv = [sys.executable, str(script), "--device=cpu", "--tiny", f"--output={output}"]

    done = subprocess.run(
        argv, env={"PYTHONPATH": root, "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=False, timeout=60
    )

    assert done.returncode == 1
    (record,) = json.loads(output.read_text())["checks"]
    assert (record["outcome"], record["reason"]) == ("failed", "it ended without figures: see its log")
    assert "ended after 2 s" in (output.parent / "results.sleeps.log").read_text()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(Path(f"{script}.pid").read_text())).wait(10)
