"""Measure ours and its peers side by side, write benchmarks/results/, and bring docs/performance.md up to date.

make bench                          # commands, launch, loop, checkpoint and restore, about seven minutes
make bench ARGS=survival            # on a Slurm cluster of its own, as root, a quarter of an hour
make bench ARGS=sweep               # on a Slurm cluster of its own, as root, two minutes
make bench ARGS=growth              # no peer: how costs grow with runs, attempts, nodes, lines, samples, ten minutes
make bench ARGS="loop checkpoint"   # these
make bench ARGS="loop --rounds 30"  # longer
make bench ARGS=--tables            # only the tables of docs/performance.md, from the results there are
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

from benchmarks import report
from benchmarks.rounds import Benchmark, surroundings

QUICK = ("commands", "launch", "loop", "checkpoint", "restore")
NAMES = (*QUICK, "growth", "integrity", "loader", "stragglers", "survival", "sweep")


def measure(name: str, rounds: int | None) -> None:
    """Measure one of them in this process; write its file and print its tables."""
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    rounds = rounds or benchmark.rounds
    before, began = surroundings(), time.monotonic()
    samples = benchmark.measure(rounds)
    content = report.content_of(
        benchmark,
        samples,
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        rounds=rounds,
        seconds=time.monotonic() - began,
        load_average_after=round(os.getloadavg()[0], 2),
        remarks=None if benchmark.remarks is None else {benchmark.remarks[0]: benchmark.remarks[1]()},
        **before,
    )
    path = report.write(content)
    print(
        f"\n{benchmark.title}\n\n{report.text_of(content)}\n\nWritten to {path.relative_to(report.ROOT)}.\n", flush=True
    )


def measure_apart(name: str, rounds: int | None) -> bool:
    """Measure one of them in a process of its own, so that none inherits another's threads; return whether it went."""
    argv = [sys.executable, __file__, "--here", name, *(["--rounds", str(rounds)] if rounds else [])]
    return subprocess.run(argv, check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for; return 1 if one could not be measured. A missed target is a result, no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to measure: {', '.join(NAMES)}; default: {', '.join(QUICK)}"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each, instead of its own number")
    parser.add_argument("--tables", action="store_true", help="measure nothing, only fill docs/performance.md")
    parser.add_argument("--here", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        measure(args.here, args.rounds)
        return 0
    unknown = [name for name in args.names if name not in NAMES]
    if unknown:
        parser.error(f"NAME is {unknown[0]!r}, but it must be one of {', '.join(NAMES)}")
    wanted = [] if args.tables else args.names or QUICK
    failed = [name for name in wanted if not measure_apart(name, args.rounds)]
    report.update()
    print("docs/performance.md shows the results.")
    if failed:
        print(f"error: {', '.join(failed)} could not be measured; see above.", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
