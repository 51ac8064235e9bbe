"""What `replay`, `bisect` and `audit` print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from textwrap import shorten

from ddp_hpc.cli.formatting import table
from ddp_hpc.prove.replay.auditing import AuditReport
from ddp_hpc.prove.replay.bisecting import BisectReport
from ddp_hpc.prove.replay.circumstances import Circumstances
from ddp_hpc.prove.replay.first_difference import DifferingValue, Divergence
from ddp_hpc.prove.replay.replaying import ReplayReport

_MOST_LETTERS = 100
"""Of an option, or of the ids of a batch."""

_POSSIBLE_CAUSES = "Possible causes: the run's code, data or environment has changed since, the training is not deterministic, it keeps state that no checkpoint holds, or a rank of the run computed something wrong."

_OTHER_WORLD_HINT = "The replay had another number of ranks or another device than the run, where dropout and batch normalisation give other losses, so this proves nothing. Repeat it without `--world`, on a machine like the run's."


def replay_text(report: ReplayReport) -> str:
    """Return the result of a replay as text."""
    compared = f"{report.num_losses} losses, {report.num_steps_with_samples} steps' samples, {report.num_digests} digests, {len(report.checkpoints)} checkpoints"
    steps = f"steps {report.from_step + 1} to {report.to_step}"
    notes = [f"note: {note}" for note in report.notes]
    kept = [f"kept in {report.directory}"] if report.directory else []
    if report.verdict == "different":
        assert report.first is not None  # noqa: S101  else nothing differs
        causes = _OTHER_WORLD_HINT if report.tolerance else _POSSIBLE_CAUSES
        said = f"DIFFERENT: {steps} differ from the run's from step {report.first.step} on: {report.first}\n{causes}"
    elif report.verdict == "not compared":
        said = f"NOT COMPARED: {steps} were computed again, but the run has no record of them to compare with: no logged loss (`log.every_steps`) and no checkpoint lies in them."
    elif report.tolerance:
        said = f"the losses are the same within {report.tolerance:g} of their size: {steps} ({report.num_losses} losses; the largest difference is {report.largest_error:.1e})"
    elif report.same_state_at is None:
        said = f"the losses are the same; no state was compared: {steps} ({compared})"
    elif report.same_state_at < report.to_step:
        said = f"the same to the bit up to step {report.same_state_at}, and after it the losses are the same: {steps} ({compared})"
    else:
        said = f"the same to the bit: {steps} ({compared})"
    return "\n".join([*notes, said, *kept])


def bisect_text(report: BisectReport) -> str:
    """Return the result of a bisection as text."""
    one, other = (PurePath(run).name for run in report.runs)
    told = [f"note: {note}" for note in report.notes]
    if report.verdict == "the same":
        told.append(
            f"the same to the bit at step {report.same_up_to}, the newest that both {one} and {other} have taken, and at all earlier steps that both have recorded"
        )
    elif report.verdict == "not reproduced":
        told.append(
            f"NOT REPRODUCED: the records of {one} and {other} differ, but computed again, their steps are the same. Possible causes: one of them ran with other code, data or environment, is not deterministic, or a rank computed something wrong."
        )
    elif report.parting is not None:
        told += _divergence_lines(report.parting, one, other)
    if report.circumstances is not None:
        told += ["before that step:", *(f"  {line}" for line in _circumstance_lines(report.circumstances))]
    return "\n".join([*told, f"bisect made {report.num_replays} replays to search {report.num_steps} steps"])


def _divergence_lines(parting: Divergence, one: str, other: str) -> Iterator[str]:
    first, tensor = parting.first, parting.tensor
    rank = f", rank {first.rank}" if first.rank or len(parting.ranks) > 1 else ""
    yield f"DIFFERENT from step {first.step} on{rank}; first: {differing_value_text(first)}"
    if tensor is not None and tensor != first:
        yield f"the first tensor that differs: {differing_value_text(tensor)} (step {tensor.step}, rank {tensor.rank})"
    shown = tensor or first
    yield f"  {one}: {shown.one or 'has none'}"
    yield f"  {other}: {shown.other or 'has none'}"


def differing_value_text(value: DifferingValue) -> str:
    """Return a value that differs as text: its kind and name, and an option's two values."""
    ids = shorten(", ".join(map(str, value.samples)), _MOST_LETTERS, placeholder=" ...")
    samples = f", sample {ids}" if ids else ""
    one, other = (shorten(text, _MOST_LETTERS, placeholder=" ...") for text in (value.one, value.other))
    change = f": {one} -> {other}" if value.kind in {"option", "samples"} else ""
    how = "" if value.how == "differs" else f", {value.how} run"
    return f"{value.kind} {value.name}{samples}{change}{how}"


def _circumstance_lines(found: Circumstances) -> Iterator[str]:
    yield from (f"configuration: {change}" for change in found.configuration)
    for change in found.code:
        yield f"code: {change.file} {change.how}"
        yield from (f"    {line}" for line in change.lines)
    yield from (f"environment: {change}" for change in found.environment)
    if found.world:
        yield f"world: {found.world}"
    if not (found.configuration or found.code or found.environment or found.world):
        yield "configuration, code, environment and world are the same"


def audit_text(report: AuditReport) -> str:
    """Return the result of an audit as text."""
    rows = [
        (
            f"{one.start + 1} to {one.end}",
            one.verdict,
            " ".join(one.problem.split()) or (f"step {one.first.step}: {one.first}" if one.first else ""),
        )
        for one in report.segments
    ]
    share = f"{len(report.segments)} of {report.num_segments} segments computed again, --seed {report.seed}"
    result = f"{report.verdict}: {report.num_steps} of {report.last_step} steps come out the same ({share})"
    causes = [_POSSIBLE_CAUSES] if any(one.verdict == "different" for one in report.segments) else []
    notes = [f"note: {note}" for note in report.notes]
    return "\n".join([*notes, table(("STEPS", "COME OUT", ""), rows), result, *causes])
