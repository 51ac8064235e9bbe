"""What the final files of a run say beside those of the undisturbed one. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_hpc.prove.certify.baseline import Baseline
from ddp_hpc.prove.certify.file_differences import NO_FILE, aligned, differences, doubled_line
from ddp_hpc.prove.certify.records import RunRecord
from ddp_hpc.prove.certify.saved_files import Contents, is_saved_state


def facts_of_files(record: RunRecord, baseline: Baseline) -> dict[str, Any]:
    """Return the fields of the evidence that compare the final files; none where the run did not finish."""
    if record.outcome not in {"finished", "untouched"}:
        return {}
    volatile, other = baseline.volatile, baseline.record.final
    changing_texts = {file for file, path in volatile if path.startswith("line ")}
    mine = aligned(record.final, other, {one.path for one in record.attempts[-1].saves})
    # A stop makes one more file, and a directory of the newest files then has other ones: the last file counts.
    earlier = {one.path for one in baseline.attempt.saves} - {one.path for one in baseline.attempt.saves[-1:]}
    left_out = {*changing_texts, *_saved_for_the_stop(record)}
    found = [
        one
        for one in differences(mine, other)
        if (one.file, one.path) not in volatile
        and one.file not in left_out
        and one.undisturbed != NO_FILE
        and not (one.here == NO_FILE and one.file in earlier)
    ]
    compared = [
        file for file in other if file in mine and file not in left_out and _is_comparable(file, other[file], volatile)
    ]
    has_weights = any(_has_tensors(file, other[file], volatile) for file in compared)
    return {
        "differences": tuple(found),
        "doubled": doubled_line(record.final, other),
        "num_compared": len(compared),
        "has_same_weights": has_weights and all(one.is_of_log for one in found),
    }


def _is_comparable(file: str, contents: Contents, volatile: frozenset[tuple[str, str]]) -> bool:
    """Tell whether a file has anything that is the same in two undisturbed runs."""
    if contents.kind == "values":
        return any((file, path) not in volatile for path in contents.values)
    return (file, "") not in volatile and bool(contents.digest if contents.kind == "bytes" else contents.lines)


def _has_tensors(file: str, contents: Contents, volatile: frozenset[tuple[str, str]]) -> bool:
    if contents.kind == "bytes":
        return is_saved_state(Path(file))
    return any(text.startswith("tensor") and (file, path) not in volatile for path, text in contents.values.items())


def _saved_for_the_stop(record: RunRecord) -> set[str]:
    """Return saved states of the middle of an epoch, which have the name of one that the undisturbed run saved at its end."""
    strike = record.strike
    if strike is None:
        return set()
    there = {one.path for one in record.attempts[strike.attempt].saves if one.at >= strike.at}
    again = {one.path for attempt in record.attempts[strike.attempt + 1 :] for one in attempt.saves}
    return there - again
