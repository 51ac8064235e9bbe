"""What the final files of a run say beside those of the undisturbed one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_hpc.prove.certify.baseline import Baseline, masked
from ddp_hpc.prove.certify.file_differences import NO_FILE, differences, doubled_files, is_of_log
from ddp_hpc.prove.certify.records import RunRecord
from ddp_hpc.prove.certify.saved_files import Contents, is_saved_state


def facts_of_files(record: RunRecord, baseline: Baseline) -> dict[str, Any]:
    """Return the fields of the evidence that compare the final files; none where the run did not finish."""
    if record.outcome not in {"finished", "untouched"}:
        return {}
    volatile = baseline.volatile
    changing_texts = {file for file, path in volatile if path.startswith("line ")}
    written = frozenset(one.path for one in record.attempts[-1].saves)
    mine, other = baseline.lasting_names(record.final, written), baseline.lasting_names(baseline.record.final)
    doubled = doubled_files(mine, other)
    mine = _with_next_folders(mine, other, frozenset(map(baseline.lasting_name, written)))
    # A stop makes one more file, and a directory of the newest files then has other ones: the last file counts.
    saves = [baseline.lasting_name(one.path) for one in baseline.attempt.saves]
    earlier = {*saves} - {*saves[-1:]}
    for_stop = _saved_for_the_stop(record, baseline)
    found = [
        one
        for one in differences(mine, other)
        if (one.file, one.path) not in volatile
        and one.file not in changing_texts
        and one.file not in doubled
        and one.undisturbed != NO_FILE
        and not (one.here == NO_FILE and one.file in earlier)
        and one.file not in for_stop
    ]
    compared = [
        file
        for file in other
        if file in mine and file not in {*changing_texts, *for_stop} and _is_comparable(file, other[file], volatile)
    ]
    differing = {one.file for one in found if not is_of_log(one)}
    has_weights = any(_has_tensors(file, other[file], volatile) for file in compared)
    has_same_weights = has_weights and not differing
    return {
        "differences": () if has_same_weights else tuple(found),
        "doubled": tuple(doubled),
        "num_compared": len(compared),
        "has_same_weights": has_same_weights,
        "logged_otherwise": found[0] if has_same_weights and found else None,
    }


def _with_next_folders(
    mine: Mapping[str, Contents], other: Mapping[str, Contents], newest: frozenset[str]
) -> dict[str, Contents]:
    """Return the files with those that the undisturbed run has in a directory of an earlier number, as `version_0`.

    Loggers make such a directory for each attempt: a log whose first lines stand in the old one goes on in the new one.
    """
    found = dict(mine)
    extra = [path for path in mine if path not in other]
    for path, contents in other.items():
        here = mine.get(path)
        if here is not None and (contents.kind != "text" or len(here.lines) >= len(contents.lines)):
            continue
        name = PurePosixPath(path).name
        alike = [one for one in extra if PurePosixPath(one).name == name and masked(one) == masked(path)]
        if not alike:
            continue
        there = mine[max(alike, key=lambda one: (one in newest, one))]
        found[path] = there if here is None else replace(there, lines=(*here.lines, *there.lines))
    return found


def _is_comparable(file: str, contents: Contents, volatile: frozenset[tuple[str, str]]) -> bool:
    """Tell whether a file has anything that is the same in two undisturbed runs."""
    if contents.kind == "values":
        return any((file, path) not in volatile for path in contents.values)
    return (file, "") not in volatile and bool(contents.digest if contents.kind == "bytes" else contents.lines)


def _has_tensors(file: str, contents: Contents, volatile: frozenset[tuple[str, str]]) -> bool:
    if contents.kind == "bytes":
        return is_saved_state(Path(file))
    return any(text.startswith("tensor") and (file, path) not in volatile for path, text in contents.values.items())


def _saved_for_the_stop(record: RunRecord, baseline: Baseline) -> set[str]:
    """Return saved states of the middle of an epoch, which have the name of one that the undisturbed run saved at its end."""
    strike = record.strike
    if strike is None:
        return set()
    there = {one.path for one in record.attempts[strike.attempt].saves if one.at >= strike.at}
    again = {one.path for attempt in record.attempts[strike.attempt + 1 :] for one in attempt.saves}
    return set(map(baseline.lasting_name, there - again))
