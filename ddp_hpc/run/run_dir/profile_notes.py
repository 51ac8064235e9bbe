"""What became of the profiles that a run was asked for (`profile.kind`): a note of each rank that was to record one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ddp_hpc.base.durable import read_json
from ddp_hpc.base.record import record_of, write_record
from ddp_hpc.run.run_dir.paths import RunDir

_NAME = re.compile(r"attempt-(?P<attempt>\d+)\.rank-(?P<rank>\d+)\.asked\.json")


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """The profile of one rank; the fields are the keys of `status --json`."""

    rank: int
    attempt: int
    """The newest in which the rank was to record it, or the one whose profile is there."""
    kind: str
    steps: tuple[int, int]
    """The first and the last step that were asked for."""
    state: Literal["found", "missing", "awaited"]
    """`awaited`: the run is alive, and has not come to the last of these steps, or its report is being written."""
    file: str | None
    why: str
    """Why it is missing, where the rank has said so."""


def note_profile(  # noqa: PLR0913  the fields of a note
    run: RunDir, attempt: int, rank: int, *, kind: str, steps: tuple[int, int], why_not: str = ""
) -> None:
    """Note that a rank is to record these steps, or why it does not. On a full disk nothing is noted; the rank's log says why, too."""
    with suppress(OSError):
        write_record(run.profile_note(attempt, rank), {"kind": kind, "steps": steps, "why_not": why_not}, durable=False)


def read_profiles(run: RunDir, *, is_alive: bool) -> list[RankProfile]:
    """Return the profile of each rank that was to record one, by rank; none where no rank was."""
    newest: dict[int, RankProfile] = {}
    try:
        names = sorted(path.name for path in run.profile.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    attempts = sorted((int(match["attempt"]), int(match["rank"])) for match in map(_NAME.fullmatch, names) if match)
    for attempt, rank in attempts:
        one = _profile(run, attempt, rank, names, is_alive=is_alive)
        # Once the steps are recorded, a later attempt begins behind them, and records nothing.
        if one is not None and (one.state == "found" or newest.get(rank, one).state != "found"):
            newest[rank] = one
    return [newest[rank] for rank in sorted(newest)]


def _profile(run: RunDir, attempt: int, rank: int, names: Sequence[str], *, is_alive: bool) -> RankProfile | None:
    note = read_json(run.profile_note(attempt, rank)) or {}
    why_not = note.get("why_not", "")
    trace = run.profile_trace(attempt, rank)
    file = str(trace) if trace.name in names else None
    state = "found" if file else "awaited" if is_alive and not why_not else "missing"
    of_file = {"state": state, "file": file, "why": "" if file else why_not}
    return record_of({**note, "rank": rank, "attempt": attempt, **of_file}, RankProfile)
