"""Finds the first step and tensor in which two runs differ: by their records first, then by replays of both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import CorruptCheckpointError, UnreadableError
from ddp_hpc.prove.replay.circumstances import Circumstances, changed_circumstances
from ddp_hpc.prove.replay.first_difference import Divergence, EntriesByStep, TraceEntry, first_difference
from ddp_hpc.prove.replay.history import History
from ddp_hpc.prove.replay.private_run import Replayed, WantedSteps, compute_again, private_folder
from ddp_hpc.prove.replay.record import compare, differing_names, read_state_hashes, recorded_steps
from ddp_hpc.run.run_dir.replays import ReplayRequest

MOST_TRACED = 64
"""Of how many steps each tensor is written down at once; of more, first one hash a step."""


def narrow_range(equal: Iterable[int], unequal: Iterable[int]) -> tuple[int | None, int | None]:
    """Return the newest step after which the states are known to be equal, and the first after which they are known to differ.

    None where there is no such step: not even the beginning is known to be equal. Runs that differ may look equal again later,
    so only a step before the first known difference counts as equal.
    """
    first = min(unequal, default=None)
    return max((step for step in equal if first is None or step < first), default=None), first


def read_known_range(one: History, other: History, end: int) -> tuple[int | None, int | None, list[str]]:
    """Read what two runs have recorded of the same steps: states in checkpoints, losses, samples. Return `narrow_range`, and notes."""
    equal: list[int] = []
    unequal: list[int] = []
    notes: list[str] = []
    for step in sorted({*one.committed} & {*other.committed}):
        try:
            states = read_state_hashes(one.run, step), read_state_hashes(other.run, step)
        except (CorruptCheckpointError, UnreadableError, OSError) as error:
            notes.append(f"the checkpoints of step {step} cannot be compared: {error}")
            continue
        # These say only what the next log line will show, which depends on `log.every_steps`.
        of_log = ("loss_steps", "/loss_meter")
        differing = [name for name in differing_names(*states) if not name.endswith(of_log)]
        (unequal if differing else equal).append(step)
    mine, others = (recorded_steps(history.run, 0, end) for history in (one, other))
    # A loss is a mean over the steps since the line before, which is another one where `log.every_steps` is.
    alike = {*pairwise([0, *sorted(mine.losses)])} & {*pairwise([0, *sorted(others.losses)])}
    mine.losses = {step: mine.losses[step] for _, step in alike}
    # Equal losses, samples and digests prove nothing of the whole state.
    unequal += [difference.step for difference in compare(mine, others).differences]
    return *narrow_range(equal, unequal), notes


@dataclass(kw_only=True)
class BisectReport:
    """The result; the fields are the keys of `bisect --json`."""

    runs: list[str]
    same_up_to: int | None
    """The newest step after which the states are known to be the same to the bit; None where that is not even the beginning."""
    num_steps: int
    """Steps that both runs have taken."""
    verdict: Literal["the same", "different", "not reproduced"] = "the same"
    parting: Divergence | None = None
    circumstances: Circumstances | None = None
    num_replays: int = 0
    notes: list[str] = field(default_factory=list)


ReplayedPair = tuple[Replayed, Replayed]
Compute = Callable[[int, ReplayRequest], ReplayedPair]
"""Computes the steps of both runs again, after the first argument up to the end of the request."""


def bisect(
    histories: tuple[History, History],
    environ: Mapping[str, str],
    *,
    codes: tuple[Path | None, Path | None] = (None, None),
    say: Callable[[str], object] = lambda _: None,
) -> BisectReport:
    """Find where two runs begin to differ; the errors are those of `replay`."""
    newest = min(history.last_step for history in histories)
    equal_at, unequal_at, notes = read_known_range(*histories, newest)
    report = BisectReport(
        runs=[str(history.run.path) for history in histories],
        same_up_to=equal_at,
        num_steps=newest,
        notes=[*notes, *(note for history in histories for note in history.notes)],
    )
    if unequal_at is None and equal_at == newest:
        return report
    end = unequal_at or newest
    with private_folder() as folder:

        def compute(start: int, request: ReplayRequest) -> ReplayedPair:
            report.num_replays += 2
            ended = threading.Event()

            def one(history: History, code: Path | None, which: int) -> Replayed:
                wanted = WantedSteps(history=history, start=start, request=request, code=code, ended=ended)
                return compute_again(wanted, environ, folder=folder / f"{report.num_replays - which}", say=say)

            # Two at a time, unless they would share GPUs.
            with ThreadPoolExecutor(1 if any(history.uses_gpus for history in histories) else 2) as pool:
                try:
                    mine, others = pool.map(one, histories, codes, (1, 0))
                except BaseException:
                    ended.set()
                    raise
            return mine, others

        report.parting, last = _search(compute, equal_at or 0, end)
        report.notes += [note for replayed in last for note in replayed.notes]
        for history, replayed in zip(histories, last, strict=True):
            report.notes += _record_mismatch_notes(history, replayed, end)
    if report.parting is not None:
        step = report.parting.first.step
        report.verdict = "different"
        report.same_up_to = step - 1 if step > (equal_at or 0) else None
        report.circumstances = changed_circumstances(*histories, max(step, 1))
    elif unequal_at is None:
        report.same_up_to = end
    else:
        report.verdict = "not reproduced"
        report.circumstances = changed_circumstances(*histories, end)
    return report


def _search(compute: Compute, start: int, end: int) -> tuple[Divergence | None, ReplayedPair]:
    """Compute the steps of both again, once or twice; return where they differ, and the replays that went over all steps."""
    if end - start <= MOST_TRACED:
        both = compute(start, ReplayRequest(end_step=end, trace_from=start + 1))
        return first_difference(*map(_rank_traces, both)), both
    both = compute(start, ReplayRequest(end_step=end, every_state=True))
    mine, others = map(_hashes, both)
    step = min((step for step in mine.keys() & others.keys() if mine[step] != others[step]), default=None)
    if step is None:
        return None, both
    # One step more before it, so that the state that the step begins with is compared, too.
    traced = compute(start, ReplayRequest(end_step=step, trace_from=max(step - 1, 1), trace_to=step))
    return first_difference(*map(_rank_traces, traced)), both


def _rank_traces(replayed: Replayed) -> list[EntriesByStep]:
    """Return what each rank of a replay has written down of its steps."""
    return [trace_by_step(read_json_lines(replayed.run.rank_trace(rank))) for rank in range(max(replayed.world_sizes))]


def trace_by_step(trace: Iterable[Mapping[str, Any]]) -> EntriesByStep:
    """Return what a rank computed, by step.

    Each part of a replay is a process of its own, and begins with a line of the state only. After the first part, the step
    before it has a whole line already, and that one counts.
    """
    found: dict[int, Sequence[TraceEntry]] = {}
    for line in trace:
        if "entries" in line:
            found.setdefault(line["step"], line["entries"])
    return found


def _hashes(replayed: Replayed) -> dict[int, list[str]]:
    """Return the hash of the whole state of each rank, by step."""
    found: dict[int, list[str]] = {}
    for rank in range(max(replayed.world_sizes)):
        for line in read_json_lines(replayed.run.rank_trace(rank)):
            if "state" in line:
                found.setdefault(line["step"], []).append(line["state"])
    return found


def _record_mismatch_notes(history: History, replayed: Replayed, end: int) -> list[str]:
    """Return a note if what was computed again is not what the run has recorded: then it is not exactly that run."""
    recorded, computed = recorded_steps(history.run, 0, end), replayed.record(0, end)
    for step in computed.states:
        with suppress(CorruptCheckpointError, UnreadableError, OSError):  # `read_known_range` has said so
            recorded.states[step] = read_state_hashes(history.run, step)
    first = compare(recorded, computed).first
    if first is None:
        return []
    whose = f"{history.run.name} computed again differs from its record from step {first.step} on ({first})"
    return [
        f"{whose}: its code, data or environment has changed since, the training is not deterministic, or a rank of the run computed something wrong"
    ]
