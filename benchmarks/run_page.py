"""Measure how long a report on 10 attempts with 64 ranks takes, how large it is, and the same for a million log lines and a sweep of 1,000 points.

.venv/bin/python -m benchmarks.run_page docs/results/report.json
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.report.made import Plan, large_run, large_sweep, line_of, made_run

REPEATS = 3


def cpu_seconds_of(run: Path, output: Path) -> list[float]:
    """Return the CPU time of the whole command, the start of Python included: other programs do not change it much."""
    found = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        argv = [sys.executable, "-m", "ddp_hpc", "report", str(run), "-o", str(output)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return sorted(found)


def main() -> None:
    """Measure both runs, and write the result."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        large = large_run(Path(folder, "large"))
        long = made_run(Path(folder, "long"), [Plan(first=0, reached=100, ending="finished")])
        with long.metrics.open("a") as file:
            file.writelines(
                line_of(kind="train", step=step, loss=1e5 / step, samples_per_s=5e3, at=step)
                for step in range(200, 1_000_200)
            )
        sweep = large_sweep(Path(folder, "sweep"))
        for name, path in {
            "10 attempts x 64 ranks": large.path,
            "a million log lines": long.path,
            "a sweep of 1,000 points": sweep,
        }.items():
            output = Path(folder, "page.html")
            times = cpu_seconds_of(path, output)
            results[name] = {
                "median_cpu_s": round(statistics.median(times), 2),
                "worst_cpu_s": round(times[-1], 2),
                "bytes": output.stat().st_size,
            }
    Path(sys.argv[1]).write_text(json.dumps({"repeats": REPEATS, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
