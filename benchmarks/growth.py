"""How CPU time and memory grow with runs, attempts, nodes, points, logged lines, tensors and samples; a slope above 1.2 grows faster than the work.

Each figure is of a process of its own. The slope is that of the CPU time between the two sizes, without what a size of one takes:
1 for ten times the time at ten times the size, 2 for a hundred times.
"""

from __future__ import annotations

import io
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import Benchmark, Column, Row, Samples, Verdict, judge, run_rounds

SMALL, LARGE = "small", "large"
MOST = 1.2
"""The steepest slope that needs no reason: sorting and larger tables cost a little more than the work."""
_PARTS = ("cpu_s", "peak_mb")


@dataclass(frozen=True)
class Part:
    """One thing that grows."""

    sizes: tuple[int, int]
    make: Callable[[Path, int], None]
    """Writes what it reads; not measured."""
    run: Callable[[Path, int], object]
    work: Callable[[int], int] = int
    """From a size to that of its work, where that grows faster."""


def _run_at(folder: Path) -> Path:
    path = folder / "runs" / "digits"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("name: digits\ntrain: {epochs: 1}\n")
    return path


def _ended(number: int) -> str:
    at, began = 1000.0 * number, {"attempt": number, "job_id": "local-1", "host": "elsewhere", "pid": 1}
    start = {**began, "started_at": at}
    end = {
        "attempt": number,
        "ending": "failed",
        "ended_at": at + 900,
        "exit_code": 1,
        "last_step": number,
        "reason": "",
    }
    return f"{json.dumps(start)}\n{json.dumps(end)}\n"


def make_runs(folder: Path, size: int) -> None:
    """Write runs, each with an attempt and its progress."""
    for number in range(size):
        path = folder / "runs" / f"run-{number:05}"
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(f"name: {path.name}\ntrain: {{lr: 0.{number + 1}}}\n")
        (path / "attempts.jsonl").write_text(_ended(0))
        (path / "progress.json").write_text(
            json.dumps({"attempt": 0, "step": number, "loss": 1.0 / (number + 1), "at": 900.0})
        )


def make_attempts(folder: Path, size: int) -> None:
    """Write a run of many attempts, with what rank zero notes of each."""
    path = _run_at(folder)
    (path / "attempts.jsonl").write_text("".join(map(_ended, range(size))))
    begins = ({"kind": "begin", "attempt": one, "at": 1000.0 * one + 20, "step": one} for one in range(size))
    (path / "timeline.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in begins))


def make_lines(folder: Path, size: int) -> None:
    """Write a run of many logged steps, and an evaluation every thousand."""
    with (_run_at(folder) / "metrics.jsonl").open("w") as file:
        for step in range(size):
            numbers = {"accuracy": 0.5} if step % 1000 == 0 else {"loss": 0.5, "lr": 0.1, "samples_per_s": 640.5}
            line = {
                "kind": "eval" if step % 1000 == 0 else "train",
                "step": step,
                "epoch": 1,
                **numbers,
                "at": 1e9 + step,
            }
            file.write(json.dumps(line) + "\n")


def make_nothing(_folder: Path, _size: int) -> None:
    """Write nothing."""


def import_torch(_folder: Path, _size: int) -> None:
    """Import what takes as long at each size."""
    from ddp_hpc.train.state import checkpoint  # noqa: F401  for `plan_save` and `walk_samples`


def make_points(folder: Path, size: int) -> None:
    """Write a configuration, and a file of points."""
    (folder / "digits.yaml").write_text("train: {epochs: 1}\n")
    (folder / "points.yaml").write_text("".join(f"- {{seed: {number}}}\n" for number in range(size)))


def command(*words: str) -> Callable[[Path, int], None]:
    """Return what runs a command as the console script does."""

    def run(_folder: Path, _size: int) -> None:
        from ddp_hpc.cli import main

        code = main(list(words))
        if code != 0:
            raise RuntimeError(f"`ddp-hpc {' '.join(words)}` exited with {code}")

    return run


def pairs_of(num_nodes: int) -> list[tuple[int, int]]:
    """Return the pairs of nodes whose links are probed."""
    from ddp_hpc.cluster.rendezvous.links.rounds import rounds_of

    return [pair for pairs in rounds_of(num_nodes) for pair in pairs]


def judge_network(_folder: Path, size: int) -> None:
    """Judge what all nodes have seen of their partners, and name all nodes to srun."""
    from ddp_hpc.cluster.rendezvous.links.findings import NodeLinkReport, findings_of
    from ddp_hpc.cluster.rendezvous.links.probe import NUM_DATAGRAMS
    from ddp_hpc.cluster.slurm.hostlist import compress_hostlist, expand_hostlist

    others: dict[int, list[int]] = {node: [] for node in range(size)}
    for low, high in pairs_of(size):
        others[low].append(high)
        others[high].append(low)
    answers = {
        node: NodeLinkReport(
            address=f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}",
            tcp={one: "connect" if 7 in (node, one) else "good" for one in partners},
            heard=dict.fromkeys(partners, (NUM_DATAGRAMS, NUM_DATAGRAMS)),
            is_whole=True,
        )
        for node, partners in others.items()
    }
    names = [f"node{number}" for number in range(size)]
    findings_of(names, answers, address="10.0.0.1", at=0.0, seconds=1.0)
    expand_hostlist(compress_hostlist(names))


def judge_nodes(_folder: Path, size: int) -> None:
    """Judge what all nodes say before a training."""
    from ddp_hpc.cluster.node_checks.answers import NodeAnswers
    from ddp_hpc.cluster.node_checks.checks import findings_of
    from ddp_hpc.cluster.node_checks.facts import NodeFacts, SharedDir, neighbours
    from ddp_hpc.run.run_dir.network import LinkMetrics, NetworkFindings

    names = [f"node{number}" for number in range(size)]
    ways = [way for low, high in pairs_of(size) for way in ((low, high), (high, low))]
    paces = [
        LinkMetrics(sender=names[one], receiver=names[to], mb_per_s=1e3, ahead_s=0.0, trip_s=1e-4) for one, to in ways
    ]
    network = NetworkFindings(
        at=0.0, seconds=1.0, address="10.0.0.1", num_nodes=size, num_pairs=len(ways) // 2, paces=tuple(paces)
    )
    near = {node: neighbours(number, names) for number, node in enumerate(names)}
    facts = {
        node: NodeFacts(names=dict.fromkeys(others, ("10.0.0.1",)), shared=SharedDir(seen=(node, *others)))
        for node, others in near.items()
    }
    findings_of(NodeAnswers(nodes=names, facts=facts, network=network))


def plan_save(_folder: Path, size: int) -> None:
    """Divide many tensors among 1,024 ranks, as each of them does at a save."""
    import torch

    from ddp_hpc.train.state.checkpoint import partition_tensors
    from ddp_hpc.train.state.restore import without_garbage_collection
    from ddp_hpc.train.state.training_state import NamedTensor

    one = torch.zeros(1)
    with without_garbage_collection():  # as a save does
        named = [NamedTensor(f"layer.{number}", one, None) for number in range(size)]
        partition_tensors(named, rank=0, world_size=1024)


def walk_samples(_folder: Path, size: int) -> None:
    """Take the end of an epoch, and the first step of the next one."""
    from ddp_hpc.train.data.sample_order import Position, RankSampler, SampleOrder

    order = SampleOrder(num_samples=size, seed=0, global_batch_size=1 << 16, micro_batch_size=1 << 13, world_size=8)
    start = Position(samples_in_epoch=size - size // 16)
    for _ in RankSampler(order=order, start=start, total_steps=order.steps_left(start) + 1, rank=0):
        pass


def resume_metrics(folder: Path, size: int) -> None:
    """Open the metrics as rank zero does at a resume, ten steps back."""
    from ddp_hpc.run.run_dir.paths import RunDir
    from ddp_hpc.train.recording.metrics_file import MetricsFile

    file = MetricsFile(RunDir(folder / "runs" / "digits"), 0)
    file.open(size - 10)
    file.close()


def send_metrics(folder: Path, _size: int) -> None:
    """Send all metrics to a recorder, as it is at a resume; the recorder does nothing with them."""
    from unittest.mock import Mock

    from ddp_hpc.run.run_dir.paths import RunDir
    from ddp_hpc.train.recording.follower import follow

    recorder = Mock(record=lambda _: None)
    follow(RunDir(folder / "runs" / "digits"), lambda: recorder, await_ending=lambda _: "finished")


def chart_metrics(folder: Path, _size: int) -> None:
    """Read the metrics for a report's charts."""
    from ddp_hpc.run.run_dir.paths import RunDir
    from ddp_hpc.watch.report.series import read_series

    read_series(RunDir(folder / "runs" / "digits"))


TEN_THOUSAND, A_MILLION = (1000, 10_000), (100_000, 1_000_000)
PARTS: Mapping[str, Part] = {
    "list, by runs": Part(TEN_THOUSAND, make_runs, command("list")),
    "list --sort loss, by runs": Part(TEN_THOUSAND, make_runs, command("list", "--sort", "loss")),
    "list --sort train.lr, by runs": Part(TEN_THOUSAND, make_runs, command("list", "--sort", "train.lr")),
    "status, by attempts": Part(TEN_THOUSAND, make_attempts, command("status", "digits")),
    "verdict on the network, by pairs of nodes": Part(
        TEN_THOUSAND, make_nothing, judge_network, lambda size: len(pairs_of(size))
    ),
    "verdict on the checks of nodes, by pairs": Part(
        TEN_THOUSAND, make_nothing, judge_nodes, lambda size: len(pairs_of(size))
    ),
    "division of a save among ranks, by tensors": Part((10_000, 100_000), import_torch, plan_save),
    "order of samples, by samples": Part((10_000_000, 100_000_000), import_torch, walk_samples),
    "resume, by lines of metrics": Part(A_MILLION, make_lines, resume_metrics),
    "a recorder after a resume, by lines of metrics": Part(A_MILLION, make_lines, send_metrics),
    "charts of a report, by lines of metrics": Part(A_MILLION, make_lines, chart_metrics),
    "submit --points --dry-run, by points": Part(
        TEN_THOUSAND,
        make_points,
        command("submit", "digits.yaml", "--points", "points.yaml", "--dry-run", "--cluster=local"),
    ),
}


def once(name: str, size: int) -> None:
    """Measure one part at one size in this process; print its figures."""
    part = PARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        part.make(Path(folder), size)
        with redirect_stdout(io.StringIO()):
            began = time.process_time()
            part.run(Path(folder), size)
            cpu_s = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.chdir("/")
    print(json.dumps({"cpu_s": cpu_s, "peak_mb": peak / 1024}))


def both(name: str) -> Mapping[str, float]:
    """Measure one part at size one, and at both sizes, each in a process of its own."""
    found: dict[str, float] = {}
    for label, size in (
        ("one", 1 if "nodes" not in name else 20),
        *zip((SMALL, LARGE), PARTS[name].sizes, strict=True),
    ):
        argv = [sys.executable, __file__, name, str(size)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
        found |= {f"{label}_{part}": json.loads(done.stdout.splitlines()[-1])[part] for part in _PARTS}
    return found


def measure(rounds: int) -> Samples:
    """Measure all parts."""
    return run_rounds("growth", [Row(name, partial(both, name)) for name in PARTS], rounds=rounds, warm_up=0)


def slope(samples: Samples, row: str) -> float:
    """Return the exponent by which the CPU time grows between the two sizes."""
    base, small, large = (min(samples.by_row[row][f"{label}_cpu_s"]) for label in ("one", SMALL, LARGE))
    smaller, larger = map(PARTS[row].work, PARTS[row].sizes)
    return math.log(max(large - base, 1e-3) / max(small - base, 1e-3)) / math.log(larger / smaller)


def _least(figure: str) -> Callable[[Samples, str], float]:
    return lambda samples, row: min(samples.by_row[row][figure])


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold each slope against the most that needs no reason."""
    return [judge(f"slope of {row}", [slope(samples, row)], limit=MOST, wanted="at most", unit="") for row in PARTS]


BENCHMARK = Benchmark(
    name="growth",
    title="Growth",
    rounds=2,
    measure=measure,
    columns=[
        Column("largest size", lambda _, row: PARTS[row].sizes[1], 0),
        Column("CPU time at a tenth, s", _least(f"{SMALL}_cpu_s")),
        Column("CPU time, s", _least(f"{LARGE}_cpu_s")),
        Column("peak memory, MB", _least(f"{LARGE}_peak_mb"), 0),
        Column("slope", slope),
    ],
    verdicts=verdicts,
)

if __name__ == "__main__":
    once(sys.argv[1], int(sys.argv[2]))
