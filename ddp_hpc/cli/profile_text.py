"""What became of the profiles that a run was asked for, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.run.run_dir.profile_notes import RankProfile


def as_line(profiles: Sequence[RankProfile], *, word: str) -> str:
    """Return one line, with what to do where a profile is missing; empty where none was asked for. `word` names the run on the command line."""
    if not profiles:
        return ""
    newest = max(profiles, key=lambda one: one.attempt)
    first, last = newest.steps
    return f"{newest.kind}, steps {first} to {last}: {'; '.join(_of_rank(one, word) for one in profiles)}"


def _of_rank(one: RankProfile, word: str) -> str:
    if one.state == "found":
        return f"rank {one.rank} is in {one.file}"
    if one.state == "awaited":
        return f"rank {one.rank} is not written yet"
    why = one.why or f"attempt {one.attempt} ended before it was written"
    log = f"`ddp-hpc logs {word} --attempt {one.attempt} --rank {one.rank}`"
    return f"rank {one.rank} is missing: {why}. Its log: {log}"
