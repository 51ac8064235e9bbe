"""Computes some steps of a run again, and holds them against its record."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddp_hpc.base.errors import ConfigError, NotComputedError
from ddp_hpc.prove.replay.comparison import Comparison, Deviation, compare
from ddp_hpc.prove.replay.history import History, environment_of
from ddp_hpc.prove.replay.private_run import Replayed, Wanted, compute_again
from ddp_hpc.prove.replay.record import Record, digests_of_replay, record_of, state_of_checkpoint, states_of_replay
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
    folder: Path | None = None
    """Keep the private run here; None: in a temporary directory, which is deleted unless there is a trace."""


@dataclass(kw_only=True)
class ReplayReport:
    """The result; the fields are the keys of `replay --json`."""

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
    same_state_at: int | None
    """The newest step before the first difference whose digest or checkpoint is the same; None: no state is known to be."""
    first: Deviation | None
    num_losses: int
    num_steps_with_samples: int
    num_digests: int
    checkpoints: list[int]
    largest_error: float
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
) -> tuple[ReplayReport, Replayed]:
    """Compute the steps again, and compare.

    Raises:
        ConfigError: if the run cannot be computed again here.
        NotComputedError: if its workers fail.
    """
    history = asked.history
    check_range(history, asked.start, asked.end)
    begin, damage = history.sound_checkpoint(asked.start)
    stretches = history.stretches(begin, asked.end)
    states = tuple(step for step in history.committed if asked.start < step <= asked.end)
    recorded = record_of(history.run, asked.start, asked.end)
    recorded.states = {step: state_of_checkpoint(history.run, step) for step in states}
    wanted = Wanted(
        run=history.run,
        start=begin,
        stretches=stretches,
        request=ReplayRequest(
            end_step=asked.end,
            state_steps=states,
            digest_steps=tuple(recorded.digests),
            trace_from=asked.start + 1 if asked.trace else None,
        ),
        world_size=asked.world_size,
        code=asked.code,
    )
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="ddp-hpc-replay-"))
    say(
        f"{history.run.name}: from {f'the checkpoint of step {begin}' if begin else 'the beginning'} to step {asked.end}, in {folder}"
    )
    try:
        replayed = compute_again(wanted, environ, folder=folder, say=say)
    except NotComputedError:  # its message names the log there
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    report = _report(asked, recorded, replayed, begin, [one.inputs.world_size for one in stretches])
    report.notes = [*history.notes, *damage, *replayed.notes, *_what_differs_here(asked, environ), *report.notes]
    if asked.folder is None and not asked.trace:
        shutil.rmtree(folder, ignore_errors=True)
        report.directory = None
    return report, replayed


def _report(
    asked: ReplayOrder, recorded: Record, replayed: Replayed, begin: int, own_worlds: list[int]
) -> ReplayReport:
    """Hold what was computed against the record."""
    is_other = replayed.is_on_other_device or replayed.world_sizes != own_worlds
    tolerance = asked.tolerance if is_other else 0.0
    found = compare(recorded, computed_record(replayed, asked.start, asked.end), tolerance=tolerance)
    return ReplayReport(
        run=str(asked.history.run.path),
        verdict=_verdict(found),
        from_step=asked.start,
        to_step=asked.end,
        started_at=begin,
        world_sizes=replayed.world_sizes,
        tolerance=tolerance,
        same_state_at=found.same_state_at,
        first=found.first,
        num_losses=found.num_losses,
        num_steps_with_samples=found.num_steps_with_samples,
        num_digests=found.num_digests,
        checkpoints=found.checkpoints,
        largest_error=found.largest_error,
        notes=_of_order(replayed, own_worlds),
        directory=str(replayed.run.path),
    )


def computed_record(replayed: Replayed, start: int, end: int) -> Record:
    """Return what a replay has recorded of its steps."""
    computed = record_of(replayed.run, start, end)
    computed.digests = digests_of_replay(replayed.run)
    computed.states = states_of_replay(replayed.run, max(replayed.world_sizes))
    return computed


def _verdict(found: Comparison) -> Literal["the same", "different", "not compared"]:
    if found.differences:
        return "different"
    return "not compared" if found.is_empty else "the same"


def _of_order(replayed: Replayed, own_worlds: list[int]) -> list[str]:
    if replayed.world_sizes == own_worlds:
        return []
    theirs, ours = (", ".join(map(str, worlds)) for worlds in (own_worlds, replayed.world_sizes))
    return [
        f"the run had {theirs} ranks and the replay {ours}: so sums have another order and ranks other random numbers (dropout); only losses are compared, with a tolerance"
    ]


def _what_differs_here(asked: ReplayOrder, environ: Mapping[str, str]) -> list[str]:
    """Return what this machine has in other versions than the run had."""
    recorded = environment_of(asked.history.run, asked.history.inputs_at(asked.end))
    if recorded is None:
        return ["the run has no record of its environment, so whether this environment is the same is not known"]
    here = capture(environ)
    changed = [
        text
        for text in differences(recorded, here)
        if text.partition(" ")[0] not in recorded.variables and text.partition(" ")[0] not in here.variables
    ]
    if not changed:
        return []
    more = f"; and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
    return [f"this environment differs from the run's: {'; '.join(changed[:_MOST_CHANGES])}{more}"]
