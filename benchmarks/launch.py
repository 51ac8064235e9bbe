"""From a command to the first all-reduce of eight workers: torchrun, one process a worker, and one import for all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.rounds import Benchmark, Row, Samples, Verdict, compared, judge, run_rounds, shown

WORKERS = 8
TARGET = 5.0
SUBMIT_TARGET = 4.0
STAMP = "DDP_HPC_BENCH_STAMP"
ROOT = Path(__file__).resolve().parent.parent
WORKER = "benchmarks.launch_worker"
SCRIPT = str(ROOT / "benchmarks" / "launch_worker.py")
ALONE, OURS, SUBMIT = "limit: one process, one import", "ddp_hpc, agent", "ddp_hpc, submit"
SUBMIT_SCRIPT, SUBMIT_TRAINING = "ddp_hpc, submit -- python", "ddp_hpc, submit -- python, training"
PLAIN, TORCHRUN = "one process a worker", "torchrun --standalone"
TORCHRUN_TRAINING = "torchrun --standalone, training"
TRAIN = "--train"
FIRST, GONE = "first_all_reduce_s", "all_gone_s"
CONFIG = f"""\
recipe: {{target: "{WORKER}:build"}}
resources: {{workers_per_node: {WORKERS}}}
train: {{max_steps: 1, global_batch_size: {WORKERS}}}
"""


def _time_until_stamp(
    commands: Sequence[Sequence[str]],
    environs: Sequence[Mapping[str, str]] = ({},),
    *,
    cwd: Path = ROOT,
    wait: Callable[[subprocess.Popen[bytes]], int] = subprocess.Popen.wait,
) -> Mapping[str, float]:
    """Start all commands at once; return the time until rank zero's first all-reduce, and until all are gone."""
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder) / "stamp"
        common = {**os.environ, "OMP_NUM_THREADS": "1", STAMP: str(stamp), "PYTHONPATH": str(ROOT)}
        said = Path(folder) / "said"
        with said.open("wb") as output:
            began = time.time()
            running = [
                _start(argv, {**common, **environ}, cwd, output, is_on_line=wait is _lead)
                for argv, environ in zip(commands, environs, strict=True)
            ]
            codes = [wait(process) for process in running]
        gone = time.time()
        assert not any(codes), f"{commands[0]} ended with {codes}:\n{said.read_text()[-2000:]}"
        return {FIRST: float(stamp.read_text()) - began, GONE: gone - began}


def _start(
    argv: Sequence[str], environ: Mapping[str, str], cwd: Path, output: IO[bytes], *, is_on_line: bool
) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE if is_on_line else None
    return subprocess.Popen(argv, env=environ, cwd=cwd, stdin=pipe, stdout=pipe or output, stderr=output)


def _lead(agent: subprocess.Popen[bytes]) -> int:
    """Order an agent to begin, hear how its workers ended, hang up; return that."""
    with agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(b'{"do": "start", "attempt": 0}\n')
        agent.stdin.flush()
        report = next((line for line in agent.stdout if line.strip()), b"")  # the agent begins on a new line
    return int(json.loads(report)["code"]) if report else agent.returncode or 1


def torchrun(*words: str) -> Mapping[str, float]:
    """Measure `torchrun --standalone`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return _time_until_stamp([[*torchrun, "--nproc-per-node", str(WORKERS), SCRIPT, *words]])


def plain_processes(count: int = WORKERS) -> Mapping[str, float]:
    """Measure one process a worker, as srun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environs = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return _time_until_stamp([[sys.executable, SCRIPT]] * count, environs)


def agent() -> Mapping[str, float]:
    """Measure our agent with a worker that only joins, as the peers' does."""
    with tempfile.TemporaryDirectory() as run:
        argv = [sys.executable, "-m", "ddp_hpc.job.node.agent", run, "--worker", WORKER]
        return _time_until_stamp([[*argv, "--num-workers", str(WORKERS)]], wait=_lead)


def submit() -> Mapping[str, float]:
    """Measure a user's command: configuration, run directory, supervisor, agent, the real worker, one step, a commit."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "launch.yaml").write_text(CONFIG)
        return _time_until_stamp(
            [[sys.executable, "-m", "ddp_hpc", "submit", "launch.yaml", "--wait"]], cwd=Path(folder)
        )


def submit_script(*words: str) -> Mapping[str, float]:
    """Measure the command of a user with a script: the same file as torchrun's, unchanged."""
    argv = [
        sys.executable,
        "-m",
        "ddp_hpc",
        "submit",
        f"resources.workers_per_node={WORKERS}",
        "--cluster",
        "local",
        "--wait",
    ]
    with tempfile.TemporaryDirectory() as folder:
        return _time_until_stamp([[*argv, "--", "python", SCRIPT, *words]], cwd=Path(folder))


def measure(rounds: int) -> Samples:
    """Measure all ways to start, and the limit: one process that imports and joins alone."""
    rows = [
        Row(ALONE, lambda: plain_processes(1)),
        Row(OURS, agent),
        Row(SUBMIT, submit),
        Row(SUBMIT_SCRIPT, submit_script),
        Row(PLAIN, plain_processes),
        Row(TORCHRUN, torchrun),
        Row(SUBMIT_TRAINING, lambda: submit_script(TRAIN)),
        Row(TORCHRUN_TRAINING, lambda: torchrun(TRAIN)),
    ]
    plain_processes(1)  # brings the files into memory
    return run_rounds("launch", rows, rounds=rounds, warm_up=0)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold ours against torchrun, and against the limit."""
    return [
        judge("time of torchrun, by our agent's", samples.ratios(FIRST, over=TORCHRUN, under=OURS), limit=TARGET),
        judge(
            "time of torchrun, by `ddp-hpc submit`'s",
            samples.ratios(FIRST, over=TORCHRUN, under=SUBMIT),
            limit=SUBMIT_TARGET,
        ),
        judge(
            "time of torchrun, by `ddp-hpc submit -- python`'s",
            samples.ratios(FIRST, over=TORCHRUN, under=SUBMIT_SCRIPT),
        ),
        judge(
            "time of torchrun, by `ddp-hpc submit -- python`'s, of a training",
            samples.ratios(FIRST, over=TORCHRUN_TRAINING, under=SUBMIT_TRAINING),
            limit=SUBMIT_TARGET,
        ),
        judge("time of our agent, by one import's", samples.ratios(FIRST, over=OURS, under=ALONE)),
    ]


BENCHMARK = Benchmark(
    name="launch",
    title=f"From a command to the first all-reduce of {WORKERS} workers",
    rounds=5,
    measure=measure,
    columns=[
        shown("first all-reduce after, s", FIRST),
        compared("by the limit's", FIRST, under=ALONE),
        compared("torchrun's by this", FIRST, under=TORCHRUN, is_inverse=True, digits=1),
        shown("all gone after, s", GONE),
    ],
    verdicts=verdicts,
)
