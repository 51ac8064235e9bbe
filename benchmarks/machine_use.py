"""What it costs to sample how busy a node is: the CPU time of the process beside the workers.

    python benchmarks/machine_use.py --seconds 120 --processes 72

It starts as many processes as a node of 8 workers with 8 loader processes each has, and the sampler beside them, with a stand-in for
NVIDIA's library (tests/machine/fake_nvml.c): what a driver's own calls take is not in the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

from ddp_hpc.run.run_dir.paths import RunDir
from tests.machine.fake_nvml import build


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=72)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder, "run"))
        run.attempt_logs(0).mkdir(parents=True)
        fake = build(Path(folder, "driver"), "gpu GPU-x 50 1000 81920\n" * 8)
        idle = [subprocess.Popen(["sleep", "3600"]) for _ in range(arguments.processes)]
        where = [
            "--attempt=0",
            "--node-rank=0",
            "--gpus=8",
            f"--parent={os.getpid()}",
            f"--root={os.getpid()}",
        ]
        command = [sys.executable, "-m", "ddp_hpc.cluster.machine.sampler", str(run.path), *where]
        sampler = subprocess.Popen(command, env={**os.environ, **fake}, stdin=subprocess.PIPE)
        try:
            process = psutil.Process(sampler.pid)
            time.sleep(12.0)  # imports, and the first look
            begun, memory = sum(process.cpu_times()[:2]), process.memory_info().rss
            time.sleep(arguments.seconds)
            used = sum(process.cpu_times()[:2]) - begun
        finally:
            assert sampler.stdin is not None
            sampler.stdin.close()
            sampler.wait()
            for one in idle:
                one.kill()
        lines = run.machine_use(0, 0).read_bytes().split()
    figures = {
        "processes_sampled": arguments.processes,
        "processes_of_the_machine": len(psutil.pids()),
        "seconds": arguments.seconds,
        "cpu_s_to_start": round(begun, 2),
        "cpu_share": round(used / arguments.seconds, 6),
        "memory_mib": round(memory / 2**20),
        "lines": len(lines),
        "bytes_a_line": round(sum(map(len, lines)) / max(1, len(lines))),
    }
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
