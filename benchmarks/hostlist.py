"""Expanding a host list of 10,000 nodes: ours, and `scontrol show hostnames`.

python benchmarks/hostlist.py   # a few seconds; scontrol comes with Debian's slurm-client
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

from benchmarks import report
from benchmarks.rounds import Benchmark, Row, Samples, Verdict, compared, judge, run_rounds, shown, surroundings
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist

NODES = 10_000
TARGET_MS = 2.0
OURS, SCONTROL = "ddp_hpc", "scontrol show hostnames"
LISTS = {
    "one range": "node[00001-10000]",
    "racks": ",".join(f"rack{rack}n[01-32]" for rack in range(312)) + ",rack312n[01-16]",
    "numbers": f"node[{','.join(str(number) for number in range(1, 2 * NODES, 2))}]",
}
CONF = "ClusterName=x\nSlurmctldHost=localhost\nNodeName=n0\nPartitionName=p Nodes=n0\n"


def timed(expand: Callable[[str], list[str]]) -> Mapping[str, float]:
    """Return how long each list takes."""
    figures = {}
    for name, text in LISTS.items():
        began = time.perf_counter()
        hosts = expand(text)
        figures[name] = time.perf_counter() - began
        assert len(hosts) == NODES, f"{name}: {len(hosts)} hosts"
    return figures


def by_scontrol(conf: Path, text: str) -> list[str]:
    """Have Slurm's own command expand a list: a process, which wants a configuration but no cluster."""
    argv = ["scontrol", "show", "hostnames", text]
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout.split()


def measure(rounds: int) -> Samples:
    """Measure both, list by list."""
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder) / "slurm.conf"
        conf.write_text(CONF)
        assert all(by_scontrol(conf, text) == expand_hostlist(text) for text in LISTS.values())
        rows = [
            Row(OURS, partial(timed, expand_hostlist)),
            Row(SCONTROL, partial(timed, partial(by_scontrol, conf))),
        ]
        return run_rounds("hostlist", rows, rounds=rounds)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold the plainest list against the target."""
    values = [seconds * 1e3 for seconds in samples.by_row[OURS]["one range"]]
    ratios = samples.ratios("one range", over=SCONTROL, under=OURS)
    return [
        judge("time of ours, one range", values, unit="ms", limit=TARGET_MS, wanted="at most"),
        judge("time of scontrol, by ours", ratios),
    ]


BENCHMARK = Benchmark(
    name="hostlist",
    title=f"Expanding a host list of {NODES:,} nodes",
    rounds=30,
    measure=measure,
    columns=[
        *(shown(f"{name}, ms", name, scale=1e3) for name in LISTS),
        compared("one range, by ours", "one range", under=OURS, digits=1),
    ],
    verdicts=verdicts,
)


def main() -> int:
    """Measure both and print the table."""
    if shutil.which("scontrol") is None:
        print("error: there is no `scontrol` on PATH (Debian: slurm-client).", file=sys.stderr)
        return 2
    before, began = surroundings(), time.monotonic()
    samples = measure(BENCHMARK.rounds)
    content = report.content_of(
        BENCHMARK,
        samples,
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        rounds=BENCHMARK.rounds,
        seconds=time.monotonic() - began,
        load_average_after=round(os.getloadavg()[0], 2),
        **before,
    )
    print(f"\n{BENCHMARK.title}\n\n{report.text_of(content)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
