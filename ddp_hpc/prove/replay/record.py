"""What a run's directory says that its steps computed: losses, samples, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import read_digests, read_trace
from ddp_hpc.watch.samples import read_steps_taken

_NUMBERS = ("position", "loss_steps", "optimizer", "scaler", "ema_updates", "ema_warms_up")
"""What a checkpoint holds besides tensors."""


@dataclass(frozen=True)
class State:
    """The training state after a step: a hash of each tensor, by its name in a checkpoint, and the numbers."""

    tensors: Mapping[str, str]
    numbers: Mapping[str, Any]


@dataclass
class Record:
    """What is known of some steps, by step."""

    losses: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """The numbers of a log line: the mean loss since the line before, and the learning rate; None for one that is not finite."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """The ids of a step's samples, over all ranks, sorted."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of what all ranks have equal after a step."""
    states: dict[int, State] = field(default_factory=dict)


def record_of(run: RunDir, start: int, end: int) -> Record:
    """Return the losses and samples that a run has recorded of the steps after `start` up to `end`."""
    record = Record()
    for line in read_json_lines(run.metrics):
        step = line.get("step")
        if line.get("kind") == "train" and isinstance(step, int) and start < step <= end:
            record.losses[step] = {
                key: math.nan if line[key] is None else line[key] for key in ("loss", "lr") if key in line
            }
    for step, taken in read_steps_taken(run).steps.items():
        if start < step <= end:
            record.samples[step] = list(taken.samples)
    record.digests = {step: one.digest for step, one in read_digests(run).items() if start < step <= end}
    return record


def state_of_checkpoint(run: RunDir, step: int) -> State:
    """Read and verify a checkpoint; return the state that it holds. A damaged one raises CorruptCheckpointError."""
    path = checkpoint_path(run, step)
    manifest = checkpoint_store.read_manifest(path)
    tensors = checkpoint_store.read_tensors(path, manifest)
    hashes = {name: xxhash.xxh3_64_hexdigest(one.data) for name, one in tensors.items()}
    return State(hashes, {key: manifest.state[key] for key in _NUMBERS if key in manifest.state})


def digests_of_replay(run: RunDir) -> dict[int, str]:
    """Return the digests that rank zero of a replay has written down."""
    return {line["step"]: line["digest"] for line in read_trace(run, 0) if "digest" in line}


def states_of_replay(run: RunDir, num_ranks: int) -> dict[int, State]:
    """Return the states that the ranks of a replay have written down; rank zero's, and of the others what is their own."""
    found: dict[int, State] = {}
    for rank in range(num_ranks):
        for line in read_trace(run, rank):
            if "tensors" not in line:
                continue
            own = {name: one for name, one in line["tensors"].items() if rank == 0 or name.startswith("rank.")}
            known = found.get(line["step"])
            numbers = {key: line["numbers"][key] for key in _NUMBERS if key in line["numbers"]}
            found[line["step"]] = State({**known.tensors, **own} if known else own, known.numbers if known else numbers)
    return found
