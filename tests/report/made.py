"""Runs made by hand, with all records that a report shows: many attempts, many ranks, saves, waits, losses."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_hpc.run.run_dir.joined_ranks import write_rendezvous
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, write_progress
from ddp_hpc.run.run_dir.timeline import Mark, RankComparison, as_line

BEGIN = 1_750_000_000.0
"""15 June 2025."""
PHASES = {"data": 0.004, "host to device": 0.001, "forward": 0.07, "backward": 0.12, "optimizer": 0.005, "other": 0.002}
"""Seconds a step."""
STEP_S = sum(PHASES.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One attempt."""

    first: int
    reached: int
    ending: str | None = "failed"
    cause: str | None = "worker crashed"
    next: str = "in place"
    queued_s: float = 0.0
    reason: str = "rank 3 on node01: killed by SIGKILL"


def line_of(**record: Any) -> str:
    return json.dumps(record) + "\n"


@dataclass
class _Files:
    """The lines of the files of a run."""

    ledger: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    looks: list[RankComparison] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    superseded: list[str] = field(default_factory=list)

    def write(self, run: RunDir) -> None:
        run.attempts.write_text("".join(self.ledger))
        run.timeline.write_bytes(b"".join(map(as_line, self.marks)))
        run.waits.write_bytes(b"".join(map(as_line, self.looks)))
        run.metrics.write_text("".join(self.metrics))
        run.superseded_metrics.write_text("".join(self.superseded))


def made_run(folder: Path, plans: Sequence[Plan], *, ranks: int = 2, nodes: int = 1, every: int = 100) -> RunDir:
    """Write a run directory; each attempt starts for 40 s, trains, and ends 5 s after its last step."""
    run = RunDir(folder)
    run.path.mkdir(parents=True)
    run.config.write_text(f"name: {run.name}\ncheckpoint:\n  every_steps: {every}\nresources:\n  nodes: {nodes}\n")
    names = [f"node{number:02}" for number in range(nodes)]
    files, at, source = _Files(), BEGIN, random.Random(1)
    for number, plan in enumerate(plans):
        queued_at, at = at, at + plan.queued_s
        start = {"attempt": number, "job_id": "4711", "host": names[0], "pid": 7, "started_at": at, "nodes": names}
        queued = {"queued_at": queued_at} if plan.queued_s else {}
        files.ledger.append(line_of(**start, **queued, cluster="slurm", first_step=plan.first))
        kept = plans[number + 1].first if number + 1 < len(plans) else plan.reached
        at = _train(files, number, at + 40.0, [plan.first, plan.reached, kept, every, ranks], source) + 5.0
        if plan.ending is not None:
            end = {
                "ending": plan.ending,
                "cause": plan.cause,
                "next": plan.next if number + 1 < len(plans) else "",
                "exit_code": 1,
                "reason": plan.reason,
            }
            files.ledger.append(line_of(attempt=number, **end, last_step=kept, failed_nodes=[], ended_at=at))
        write_rendezvous(run, number, "10.0.0.1:29500", "ib0, the fastest network that all nodes share: InfiniBand")
    files.write(run)
    last = plans[-1].reached
    write_progress(
        run, Progress(attempt=len(plans) - 1, step=last, total_steps=last, loss=0.2, samples_per_s=320.0, at=at)
    )
    return run


def _train(files: _Files, attempt: int, at: float, numbers: Sequence[int], source: random.Random) -> float:
    """Add the lines of an attempt's training; return when its last step ends."""
    first, reached, kept, every, ranks = numbers
    files.marks.append(Mark(kind="begin", attempt=attempt, at=at, step=first, world_size=ranks, num_gpus=ranks))
    for step in range(first + 1, reached + 1):
        at += STEP_S
        if step % 10 == 0:
            loss = 2.5 * math.exp(-step / 900) + 0.1 + source.gauss(0, 0.02)
            rate = ranks * 64 / STEP_S
            text = line_of(kind="train", step=step, epoch=1, loss=loss, lr=0.1, samples_per_s=rate, at=at)
            (files.metrics if step <= kept else files.superseded).append(text)
        if step % every == 0:
            at += 0.5
            files.marks.append(Mark(kind="save", attempt=attempt, at=at + 1, step=step, seconds=1.5))
        if step % 50 == 0 or step == reached:
            done, saves = step - first, step // every - first // every
            seconds = {name: one * done for name, one in PHASES.items()} | {"checkpoint": 0.5 * saves}
            files.marks.append(Mark(kind="phases", attempt=attempt, at=at, step=step, num_steps=done, phases=seconds))
            look = RankComparison(attempt=attempt, at=at, step=step, step_s=STEP_S, lost_s={})
            files.looks.append(look_of(look, ranks, source))
    return at


def look_of(look: RankComparison, ranks: int, source: random.Random) -> RankComparison:
    """Return a comparison with its values: rank 5 is slow from step 400 to 900."""
    is_slow = look.step is not None and 400 < look.step <= 900
    lost = {rank: source.gauss(0, 0.004) + (0.05 if rank == 5 and is_slow else 0.0) for rank in range(ranks)}
    return replace(
        look,
        lost_s={rank: round(one, 5) for rank, one in lost.items()},
    )


def large_run(folder: Path) -> RunDir:
    """Return a run of 10 attempts with 64 ranks each, on 8 nodes."""
    endings = ["worker crashed", "node failed", "preempted", "time limit", "hang"]
    plans = [
        Plan(
            first=500 * number,
            reached=500 * (number + 1) + (0 if number == 9 else 40 if number % 2 else 0),
            ending="finished" if number == 9 else "failed" if number % 2 else "stopped",
            cause="finished" if number == 9 else endings[number % 5],
            next="" if number == 9 else "requeue",
            queued_s=120.0 + 30 * number,
            reason="" if number % 2 == 0 or number == 9 else "rank 3 on node01: killed by SIGKILL",
        )
        for number in range(10)
    ]
    return made_run(folder, plans, ranks=64, nodes=8)


def large_sweep(folder: Path, *, num_points: int = 1000, reached: int = 2000) -> Path:
    """Write a sweep of two keys: of eight points five finish at once, two after a failure, and one fails for good."""
    finished = Plan(first=0, reached=reached, ending="finished", cause="finished")
    broken = Plan(first=0, reached=reached // 2 + 50, reason="rank 1 on node00: OutOfMemoryError: out of GPU memory")
    again = replace(finished, first=reached // 2)
    plans = [[finished]] * 5 + [[broken, again]] * 2 + [[replace(broken, next="")]]
    every = max(1, reached // 10)
    models = [made_run(folder / f"made-{number}", one, every=every).path for number, one in enumerate(plans)]
    points = []
    for number in range(num_points):
        name = f"{number:04}-point"
        shutil.copytree(models[number % 8], folder / name, copy_function=os.link)
        lr, seed = 0.1 / 2 ** (number % 20), number // 20
        progress = RunDir(folder / name).progress
        progress.unlink()
        loss = 0.2 + (number % 20 - 7) ** 2 / 50 + seed % 7 / 100
        progress.write_text(_progress_with(models[number % 8], loss))
        points.append({"point": number, "name": name, "set": {"train.lr": lr, "seed": seed}})
    for path in models:
        shutil.rmtree(path)
    header = {"sweep": folder.name, "num_points": num_points, "backend": "local", "import_paths": [], "work_dir": "."}
    lines = [{**header, "at_most": None, "stop_after_failures": None}, *points]
    (folder / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _progress_with(model: Path, loss: float) -> str:
    """Return a run's progress, with another loss and an accuracy that follows it."""
    progress = json.loads(RunDir(model).progress.read_text())
    return json.dumps({**progress, "loss": loss, "metrics": {"loss": loss * 1.1, "accuracy": 1 - loss / 3}})
