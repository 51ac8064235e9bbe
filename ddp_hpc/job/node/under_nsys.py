"""Starts a rank's process anew under Nsight Systems, which records it from `torch.cuda.profiler.start` to `stop`.

The process becomes `nsys profile`, and nsys starts its command again. So signals, exit code and process id of the rank are those of nsys.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.base.durable import make_directories
from ddp_hpc.run.run_dir.paths import RunDir

TRACE = "cuda,nvtx,osrt"
"""CUDA, NVTX ranges, and calls of the operating system's libraries: none needs rights on the kernel's counters (perf_event_paranoid)."""


def parse_ranks(text: str) -> frozenset[int]:
    """Return the ranks of `--nsys=0,3`; raise ValueError for any other text."""
    return frozenset(int(rank) for rank in text.split(","))


def profile_argv(program: str, report: Path, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` under nsys (https://docs.nvidia.com/nsight-systems/UserGuide/)."""
    record = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    what = [f"--trace={TRACE}", "--sample=none", "--cpuctxsw=none"]
    output = str(report).replace("%", "%%")  # nsys replaces %h, %p, %q{...} in a path
    return [program, "profile", *record, *what, "--wait=primary", "--force-overwrite=true", "-o", output, *command]


def start_under_nsys(module: str, argv: Sequence[str], *, run: RunDir, attempt: int, rank: int) -> None:
    """Have nsys start this process's module anew, with `--under-nsys=` and the process id of nsys. Return where no `nsys` is on the PATH."""
    program = shutil.which("nsys")
    if program is None:
        return
    report = run.nsys_report(attempt, rank).absolute()
    make_directories(report.parent)
    command = [sys.executable, "-m", module, *argv, f"--under-nsys={os.getpid()}"]
    # Stop signals stay blocked across exec: nsys does not die of one that Slurm sends to all processes of a step.
    processes.block_no_news()
    os.execv(program, profile_argv(program, report, command))  # noqa: S606  no shell
