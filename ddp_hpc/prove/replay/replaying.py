"""Computes some steps of a run again, and holds them against its record."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.prove.replay.history import History, environment_of
from ddp_hpc.prove.replay.private_run import Replayed, compute_again, private_folder, wanted_of
from ddp_hpc.prove.replay.record import Comparison, Record, compare, record_of, state_of_checkpoint
from ddp_hpc.run.run_dir.environment import capture, differences
from ddp_hpc.run.run_dir.replays import ReplayRequest

_MOST_CHANGES = 5
OTHER_WORLD_TOLERANCE = 1e-3
"""How much of its size a loss may differ by where the sums are taken in another order."""


@dataclass(frozen=True, kw_only=True)
class ReplayOrder:
    """What a user wants computed again."""

    history: History
    start: int
    end: int
    world_size: int | None = None
    code: Path | None = None
    trace: bool = False
    tolerance: float = OTHER_WORLD_TOLERANCE
    """Where sums are taken in another order."""


@dataclass(kw_only=True)
class ReplayReport(Comparison):
    """The result; the fields but `differences` are the keys of `replay --json`."""

    run: str
    verdict: Literal["the same", "different", "not compared"]
    from_step: int
    to_step: int
    started_at: int
    """The step of the checkpoint from which it was computed; 0: the beginning."""
    world_sizes: list[int]
    """Ranks of each part."""
    tolerance: float
    """0: none, equal to the bit. With a tolerance, only losses are compared."""
    notes: list[str] = field(default_factory=list)
    directory: str | None = None
    """The private run, with the traces in `trace/`; None if it was deleted."""


def check_range(history: History, start: int, end: int) -> None:
    """Refuse steps that the run has not taken."""
    if not 0 <= start < end:
        raise ConfigError(
            f"`--from {start} --to {end}` selects no step: a replay begins after step `--from` and ends with step `--to`. {history.run.name} has taken steps 1 to {history.last_step}. Give a `--from` of 0 or more and a `--to` above it."
        )
    if end > history.last_step:
        raise ConfigError(
            f"Steps up to {end} were asked for, but the newest step on record of {history.run.name} is {history.last_step}. Give `--to` {history.last_step} or less."
        )


def replay(
    asked: ReplayOrder, environ: Mapping[str, str], *, say: Callable[[str], object] = lambda _: None
) -> ReplayReport:
    """Compute the steps again, and compare.

    Raises:
        ConfigError: if the run cannot be computed again here.
        NotComputedError: if its workers fail.
        UnreadableError: if the checkpoint that it begins with has gone.
    """
    history = asked.history
    check_range(history, asked.start, asked.end)
    recorded = record_of(history.run, asked.start, asked.end)
    states = [step for step in history.committed if asked.start < step <= asked.end]
    recorded.states = {step: state_of_checkpoint(history.run, step) for step in states}
    request = ReplayRequest(end_step=asked.end, trace_from=asked.start + 1 if asked.trace else None)
    wanted = wanted_of(history, asked.start, asked.end, request, code=asked.code, world_size=asked.world_size)
    with private_folder() as folder:
        begin = f"the checkpoint of step {wanted.start}" if wanted.start else "the beginning"
        say(f"{history.run.name}: from {begin} to step {asked.end}, in {folder}")
        replayed = compute_again(wanted, environ, folder=folder, say=say)
        report = _report(asked, recorded, replayed)
        report.notes = [*history.notes, *replayed.notes, *_what_differs_here(asked, environ), *report.notes]
    if not asked.trace:
        shutil.rmtree(folder, ignore_errors=True)
        report.directory = None
    return report


def _report(asked: ReplayOrder, recorded: Record, replayed: Replayed) -> ReplayReport:
    """Hold what was computed against the record."""
    own_worlds, worlds = [one.inputs.world_size for one in replayed.wanted.stretches], replayed.world_sizes
    is_other = replayed.is_on_other_device or worlds != own_worlds
    tolerance = asked.tolerance if is_other else 0.0
    found = compare(recorded, replayed.record(asked.start, asked.end), tolerance=tolerance)
    was_compared, notes = found.num_losses or found.num_digests or found.checkpoints, []
    if worlds != own_worlds:
        theirs, ours = (", ".join(map(str, sizes)) for sizes in (own_worlds, worlds))
        notes.append(
            f"the run had {theirs} ranks and the replay {ours}: so sums have another order and ranks other random numbers (dropout); only losses are compared, with a tolerance"
        )
    return ReplayReport(
        **vars(found),
        run=str(asked.history.run.path),
        verdict="different" if found.differences else "the same" if was_compared else "not compared",
        from_step=asked.start,
        to_step=asked.end,
        started_at=replayed.wanted.start,
        world_sizes=worlds,
        tolerance=tolerance,
        notes=notes,
        directory=str(replayed.run.path),
    )


def _what_differs_here(asked: ReplayOrder, environ: Mapping[str, str]) -> list[str]:
    """Return what this machine has in other versions than the run had."""
    recorded = environment_of(asked.history.run, asked.history.inputs_at(asked.end))
    if recorded is None:
        return ["the run has no record of its environment, so whether this environment is the same is not known"]
    here = capture(environ)
    variables = {*recorded.variables, *here.variables}
    changed = [text for text in differences(recorded, here) if text.partition(" ")[0] not in variables]
    if not changed:
        return []
    more = f"; and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
    return [f"this environment differs from the run's: {'; '.join(changed[:_MOST_CHANGES])}{more}"]
