"""Computes some steps of a run again, and holds them against its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.prove.replay.history import History
from ddp_hpc.prove.replay.private_run import WantedSteps, compute_again, private_folder
from ddp_hpc.prove.replay.record import Comparison, compare, read_state_hashes, recorded_steps
from ddp_hpc.run.run_dir.software_versions import change_texts, environment_here, read_environment

_MOST_CHANGES = 5
OTHER_WORLD_TOLERANCE = 1e-3
"""How much of its size a loss may differ by where the sums are taken in another order."""


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
    wanted: WantedSteps,
    environ: Mapping[str, str],
    *,
    tolerance: float = OTHER_WORLD_TOLERANCE,
    say: Callable[[str], object] = lambda _: None,
) -> ReplayReport:
    """Compute the steps again, and compare; the private run stays where each tensor was asked for.

    Raises:
        ConfigError: if the run cannot be computed again here.
        NotReplayedError: if its workers fail.
        UnreadableError: if the checkpoint that it begins with has gone.
    """
    history, start, end = wanted.history, wanted.start, wanted.request.end_step
    check_range(history, start, end)
    recorded = recorded_steps(history.run, start, end)
    states = [step for step in history.committed if start < step <= end]
    recorded.states = {step: read_state_hashes(history.run, step) for step in states}
    is_kept = wanted.request.trace_from is not None
    with private_folder(is_kept=is_kept) as folder:
        replayed = compute_again(wanted, environ, folder=folder, say=say)
        worlds, own_worlds = replayed.world_sizes, [inputs.world_size for *_, inputs in replayed.stretches]
        if not replayed.is_on_other_device and worlds == own_worlds:
            tolerance = 0.0
        found = compare(recorded, replayed.record(start, end), tolerance=tolerance)
        notes = [*history.notes, *replayed.notes, *_environment_notes(history, end, environ)]
    if worlds != own_worlds:
        theirs, ours = (", ".join(map(str, sizes)) for sizes in (own_worlds, worlds))
        notes.append(
            f"the run had {theirs} ranks and the replay {ours}: so sums have another order and ranks other random numbers (dropout); only losses are compared, with a tolerance"
        )
    was_compared = found.num_losses or found.num_digests or found.checkpoints
    return ReplayReport(
        **vars(found),
        run=str(history.run.path),
        verdict="different" if found.differences else "the same" if was_compared else "not compared",
        from_step=start,
        to_step=end,
        started_at=replayed.started_at,
        world_sizes=worlds,
        tolerance=tolerance,
        notes=notes,
        directory=str(replayed.run.path) if is_kept else None,
    )


def _environment_notes(history: History, step: int, environ: Mapping[str, str]) -> list[str]:
    """Return what this machine has in other versions than the run had."""
    recorded = read_environment(history.run, history.inputs_at(step).attempt)
    if recorded is None:
        return ["the run has no record of its environment, so whether this environment is the same is not known"]
    here = environment_here(environ)
    variables = {*recorded.variables, *here.variables}
    changed = [text for text in change_texts(recorded, here) if text.partition(" ")[0] not in variables]
    if not changed:
        return []
    return [f"this environment differs from the run's: {shorten_names(changed, _MOST_CHANGES, between='; ')}"]
