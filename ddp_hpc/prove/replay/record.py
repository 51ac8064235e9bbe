"""What a run's directory says that its steps computed (losses, samples, checkpoints), and how two such records differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import xxhash

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.names import shorten_names
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import read_digests
from ddp_hpc.watch.samples import read_steps_taken

T = TypeVar("T")
_MOST_NAMES = 3
_NUMBER_KEYS = ("position", "loss_steps", "optimizer", "scaler", "ema_updates", "ema_warms_up")
"""What a checkpoint holds besides tensors."""
StateHashes = Mapping[str, Any]
"""The training state after a step: a hash of each tensor, by its name in a checkpoint, and these numbers."""


@dataclass
class StepRecords:
    """What is known of some steps, by step."""

    losses: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """The numbers of a log line: the mean loss since the line before, and the learning rate; None for one that is not finite."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """The ids of a step's samples, over all ranks, sorted."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of what all ranks have equal after a step."""
    states: dict[int, StateHashes] = field(default_factory=dict)


def recorded_steps(run: RunDir, start: int, end: int) -> StepRecords:
    """Return the losses and samples that a run has recorded of the steps after `start` up to `end`."""
    record = StepRecords()
    for line in read_json_lines(run.metrics):
        step = line.get("step")
        if line.get("kind") == "train" and isinstance(step, int) and start < step <= end:
            numbers = {key: line[key] for key in ("loss", "lr") if key in line}
            record.losses[step] = {key: math.nan if one is None else one for key, one in numbers.items()}
    for step, (_, samples) in read_steps_taken(run).steps.items():
        if start < step <= end:
            record.samples[step] = list(samples)
    record.digests = {step: one.digest for step, one in read_digests(run).items() if start < step <= end}
    return record


def read_state_hashes(run: RunDir, step: int) -> StateHashes:
    """Read and verify a checkpoint; return the state that it holds. A damaged one raises CorruptCheckpointError."""
    path = checkpoint_path(run, step)
    manifest = checkpoint_store.read_manifest(path)
    tensors = checkpoint_store.read_tensors(path, manifest)
    hashes = {name: xxhash.xxh3_64_hexdigest(one.data) for name, one in tensors.items()}
    return {**hashes, **_numbers(manifest.state)}


def _numbers(state: Mapping[str, Any]) -> StateHashes:
    return {key: state[key] for key in _NUMBER_KEYS if key in state}


def replay_step_records(run: RunDir, num_ranks: int, start: int, end: int) -> StepRecords:
    """Return what a replay has recorded of its steps: rank zero's digests and states, and of the others what is their own."""
    record = recorded_steps(run, start, end)
    record.digests = {line["step"]: line["digest"] for line in read_json_lines(run.rank_trace(0)) if "digest" in line}
    for rank in range(num_ranks):
        for line in (line for line in read_json_lines(run.rank_trace(rank)) if "tensors" in line):
            own = {name: one for name, one in line["tensors"].items() if rank == 0 or name.startswith("rank.")}
            record.states[line["step"]] = {**record.states.get(line["step"], _numbers(line["numbers"])), **own}
    return record


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Something that was recorded in one way and computed in another; the fields are keys of `replay --json`."""

    step: int
    what: str
    """`samples`, `loss`, `lr`, `digest` (of what all ranks have equal), or `checkpoint`."""
    recorded: Any
    computed: Any
    names: tuple[str, ...] = ()
    """Of a checkpoint, the tensors and numbers that differ."""

    def __str__(self) -> str:
        """Return it as a part of a sentence."""
        if self.what == "checkpoint":
            return f"the checkpoint differs in {shorten_names(self.names, _MOST_NAMES)}"
        return f"{self.what}: {self.recorded} recorded, {self.computed} computed again"


@dataclass(kw_only=True)
class Comparison:
    """What was compared, and what differs."""

    num_losses: int = 0
    num_steps_with_samples: int = 0
    num_digests: int = 0
    checkpoints: list[int] = field(default_factory=list)
    largest_error: float = 0.0
    """The largest relative difference of a loss."""
    same_state_at: int | None = None
    """The newest step before the first difference whose digest or checkpoint is the same; None: no state is known to be."""
    first: Deviation | None = None
    differences: list[Deviation] = field(default_factory=list)


_ORDER = ("samples", "loss", "lr", "digest", "checkpoint")


def compare(recorded: StepRecords, computed: StepRecords, *, tolerance: float = 0.0) -> Comparison:
    """Compare what both know; with a tolerance, losses may differ by so much of their size, and states are not compared."""
    samples, all_losses = _step_pairs(recorded.samples, computed.samples), _step_pairs(recorded.losses, computed.losses)
    digests = [] if tolerance else _step_pairs(recorded.digests, computed.digests)
    states = [] if tolerance else _step_pairs(recorded.states, computed.states)
    differing: list[tuple[str, int, Any, Any]] = [("samples", *one) for one in samples if one[1] != one[2]]
    errors = [0.0]
    for step, before, after in all_losses:
        for what, value in before.items():
            error = _relative_error(value, after.get(what))
            errors += [error] if what == "loss" else []
            differing += [(what, step, value, after.get(what))] if error > tolerance else []
    differing += [("digest", *one) for one in digests if one[1] != one[2]]
    found = [Deviation(step=step, what=what, recorded=one, computed=other) for what, step, one, other in differing]
    for step, state, again in states:
        if names := tuple(differing_names(state, again)):
            found.append(Deviation(step=step, what="checkpoint", recorded=None, computed=None, names=names))
    first = min(found, key=lambda one: (one.step, _ORDER.index(one.what)), default=None)
    same = [step for step, one, other in digests if one == other] + [step for step, *_ in states]
    return Comparison(
        num_losses=len(all_losses),
        num_steps_with_samples=len(samples),
        num_digests=len(digests),
        checkpoints=[step for step, *_ in states],
        largest_error=max(errors),
        same_state_at=max((step for step in same if first is None or step < first.step), default=None),
        first=first,
        differences=found,
    )


def _step_pairs(one: Mapping[int, T], other: Mapping[int, T]) -> list[tuple[int, T, T]]:
    """Return the steps that both have, with their values."""
    return [(step, one[step], other[step]) for step in sorted(one.keys() & other.keys())]


def _relative_error(before: float | None, after: float | None) -> float:
    """Return the relative difference; 0 for two values that are not finite in the same way.

    None is what a log line has for a number that is not finite.
    """
    if before is None or after is None:
        return 0.0 if before is after else math.inf
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0.0
    error = abs(before - after) / max(abs(before), abs(after))
    return error if math.isfinite(error) else math.inf


def differing_names(one: StateHashes, other: StateHashes) -> list[str]:
    """Return the names of tensors, then of numbers, that two states do not share; a number that only one has does not count."""
    differing = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    tensors = [name for name in differing if name not in _NUMBER_KEYS]
    return tensors + [name for name in differing if name in _NUMBER_KEYS and name in one and name in other]
