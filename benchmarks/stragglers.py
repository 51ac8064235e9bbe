"""What the search for slow ranks costs a rank: the timers of the loop's phases, and the reports of its collectives.

python benchmarks/run.py stragglers   # half a minute
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

import torch
import torch.distributed as dist

from benchmarks import counters
from benchmarks.rounds import Benchmark, Row, Samples, Verdict, judge, run_rounds, shown
from ddp_hpc.cluster.rank_probe.client import RankProbe
from ddp_hpc.cluster.rank_probe.server import serve
from ddp_hpc.cluster.slow_ranks.reporter import Reporter, pause_s
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.recording.phase_times import PHASES, PhaseTimes

STEP_S = 0.005
LIMIT_PERCENT = 0.1
CALLS, LOOKS = 10_000, 5
TIMERS, SHORT, FULL = "timers of the phases", "reports, record of 250 entries", "reports, full record of 2,000"
PER_STEP = 7
"""How often the loop enters a phase in a step."""


def cpu_s(work: Callable[[], object], event: counters.Event = counters.TASK_CLOCK) -> float:
    """Return the CPU time of this process, with all its threads."""
    before = counters.count(event)
    work()
    after = counters.count(event)
    assert before is not None
    assert after is not None
    return (after - before) / 1e9


def timers() -> Mapping[str, float]:
    """Return what the timers of one step take."""
    phases = PhaseTimes()

    def work() -> None:
        for number in range(CALLS):
            phases.enter(PHASES[number % PER_STEP])

    seconds = cpu_s(work) / CALLS * PER_STEP
    return {"once": seconds, "share": seconds / STEP_S}


def reports(reporter: Reporter, num_entries: int) -> Mapping[str, float]:
    """Return what a report takes: PyTorch's answer, what is read of it, and the file."""
    entries = json.loads(reporter.probe.flight_record_text()).get("entries", [])
    for _ in range(num_entries - len(entries)):
        dist.all_reduce(torch.zeros(1))

    def work() -> None:
        for number in range(LOOKS):
            reporter.report(number)

    work()
    seconds = cpu_s(work) / LOOKS
    return {"once": seconds, "share": seconds / pause_s(num_entries, 8, is_early=False)}


def measure(rounds: int) -> Samples:
    """Measure all; the short record comes first, as it only grows."""
    counters.count(counters.TASK_CLOCK)  # threads count from here on
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        assert serve(Path(folder) / "rank") == ""
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
        at_end.callback(dist.destroy_process_group)
        reporter = Reporter(
            run=RunDir(Path(folder)),
            attempt=0,
            rank=0,
            world_size=8,
            node="node1",
            probe=RankProbe(path=Path(folder) / "rank", answer_s=60),
        )
        short = run_rounds(
            "stragglers",
            [Row(TIMERS, timers), Row(SHORT, partial(reports, reporter, 250))],
            rounds=rounds,
        )
        full = run_rounds("stragglers", [Row(FULL, partial(reports, reporter, 2000))], rounds=rounds)
        return Samples({**short.by_row, **full.by_row})


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold the timers against the step, and each report, after the first minute, against the time until the next."""
    return [
        judge(
            f"{row}, of a step of {STEP_S * 1e3:g} ms"
            if row == TIMERS
            else f"{row}, of a CPU until the next report, after the first minute",
            [100 * share for share in samples.by_row[row]["share"]],
            unit="%",
            limit=LIMIT_PERCENT,
            wanted="at most",
        )
        for row in samples.by_row
    ]


BENCHMARK = Benchmark(
    name="stragglers",
    title="What the search for slow ranks costs a rank (CPU time)",
    rounds=9,
    measure=measure,
    columns=[shown("once, ms of a CPU", "once", scale=1e3, digits=4), shown("share, %", "share", scale=100, digits=3)],
    verdicts=verdicts,
)
