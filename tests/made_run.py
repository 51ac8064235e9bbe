"""Run directories made by hand, for the tests of whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from ddp_hpc.base import exit_codes
from ddp_hpc.base.durable import append_json_line
from ddp_hpc.run.checkpoints import checkpoint_store, shards
from ddp_hpc.run.checkpoints.checkpoint_store import Manifest
from ddp_hpc.run.checkpoints.shards import TensorEntry
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Attempt, End, Ending, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, write_progress

CONFIG = "name: {name}\n"


def make_run(runs_dir: Path, name: str = "digits") -> RunDir:
    """Make the directory of a run that nothing has happened to yet."""
    run = RunDir(runs_dir / name)
    run.path.mkdir(parents=True)
    run.config.write_text(CONFIG.format(name=name))
    return run


def add_attempt(run: RunDir, attempt: int = 0, *, ending: Any = None, reason: str = "") -> None:
    """Write an attempt's start to the ledger, and its end where it has one."""
    record_start(run, attempt=attempt, job_id=f"job-{attempt}")
    if ending is not None:
        record_end(run, attempt, End(ending=ending, exit_code=0, reason=reason))


def made_attempt(number: int = 0, **more: Any) -> Attempt:
    """Return an attempt, with a failed end where anything of an end is given."""
    return changed(Attempt(attempt=number, job_id="7", host="node1", pid=1, started_at=0.0), **more)


def changed(attempt: Attempt, **more: Any) -> Attempt:
    """Return an attempt with other values, also of its end."""
    if "ending" in more and more["ending"] is None:
        begun = {
            name: getattr(attempt, name)
            for name in Attempt.__dataclass_fields__
            if name not in End.__dataclass_fields__
        }
        return Attempt(**{**begun, **{name: value for name, value in more.items() if name in begun}})
    if attempt.ending is None and more.keys() & End.__dataclass_fields__.keys():
        more = {"ending": Ending.FAILED, "exit_code": exit_codes.FAILED, **more}
    return replace(attempt, **more)


def progress(attempt: int = 0, step: int = 20, **more: Any) -> Progress:
    """Return the progress of a run of 100 steps in 10 epochs, two seconds to go."""
    known = {"loss": 0.5, "samples_per_s": 640.0, "eta_s": 2.0, "at": 1000.0, **more}
    return Progress(attempt=attempt, step=step, total_steps=100, epoch=1 + step // 10, epochs=10, **known)


def add_progress(run: RunDir, attempt: int = 0, step: int = 20, **more: Any) -> None:
    """Write progress.json."""
    write_progress(run, progress(attempt, step, **more))


def add_metrics(run: RunDir, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to metrics.jsonl."""
    for line in lines:
        append_json_line(run.metrics, line)


def add_failure(run: RunDir, attempt: int = 0, *, rank: int = 0, at: float = 1.0, **more: Any) -> WorkerFailure:
    """Write what a worker said of its death."""
    failure = msgspec.convert(
        {
            "rank": rank,
            "host": "node1",
            "at": at,
            "step": 7,
            "exception": f"ValueError: rank {rank} is out of luck",
            "log": str(run.rank_log(attempt, rank)),
            **more,
        },
        WorkerFailure,
    )
    path = run.rank_error(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(failure)))
    return failure


def add_log(run: RunDir, text: str, *, attempt: int = 0, rank: int = 0) -> Path:
    """Add text to a rank's log."""
    path = run.rank_log(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


def add_checkpoint(run: RunDir, step: int, **metrics: float) -> Path:
    """Commit a checkpoint of one tensor, four bytes that hold the step, by an attempt that then ends."""
    ownership.claim_run(run, 0)
    uncommitted = checkpoint_store.uncommitted_path(run, step, 0)
    uncommitted.mkdir()
    body = step.to_bytes(4, "little")
    header = shards.shard_header([TensorEntry("model/weight", "U8", (4,), 0, 4)])
    file = uncommitted / checkpoint_store.shard_name(0, 1)
    shard = checkpoint_store.write_shard(file, [header, body], size=len(header) + len(body))
    manifest = Manifest(step=step, world_size=1, shards=(shard,), state={"step": step}, metrics=metrics)
    path = checkpoint_store.commit_checkpoint(run, uncommitted, manifest)
    ownership.release_claim(run, 0)
    return path
