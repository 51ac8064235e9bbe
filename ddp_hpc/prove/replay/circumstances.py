"""What two runs were given that differs: configuration, code, environment, world."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from ddp_hpc.prove.replay.history import History, unchanged_content
from ddp_hpc.run.config.resolve import changed_keys, load_resolved
from ddp_hpc.run.run_dir.replays import NUMERICALLY_NEUTRAL_KEYS, AttemptInputs
from ddp_hpc.run.run_dir.software_versions import change_texts, read_environment
from ddp_hpc.run.spec import RunSpec

_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class CodeChange:
    """A file of the user's code that the two runs do not share; the fields are keys of `bisect --json`."""

    file: str
    how: str
    """`changed`, `only in the first`, `only in the second`."""
    lines: list[str] = field(default_factory=list)
    """The lines that were removed (`-`) and added (`+`); empty where a run keeps no copy, and the file was changed since."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What differs between two runs before their first step differs; the fields are keys of `bisect --json`."""

    configuration: list[str]
    code: list[CodeChange]
    environment: list[str]
    world: str
    """Empty where both had as many ranks."""


def changed_circumstances(one: History, other: History, step: int) -> Circumstances:
    """Return what differed between the attempts that took this step."""
    mine, others = one.inputs_at(step), other.inputs_at(step)
    environments = read_environment(one.run, mine.attempt), read_environment(other.run, others.attempt)
    changed = changed_keys(_spec(mine), _spec(others))
    known = environments[0] is not None and environments[1] is not None
    return Circumstances(
        configuration=[text for key, text in changed.items() if key.partition(".")[0] not in NUMERICALLY_NEUTRAL_KEYS],
        code=[*_changed_code(mine, others)],
        environment=[*change_texts(*environments)] if known else ["one of the runs has no record of it"],  # type: ignore[arg-type]  # `known`
        world="" if mine.world_size == others.world_size else f"{mine.world_size} ranks -> {others.world_size}",
    )


def _spec(inputs: AttemptInputs) -> RunSpec:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(inputs.config, encoding="utf-8")
        return load_resolved(path)


def _changed_code(mine: AttemptInputs, others: AttemptInputs) -> Iterator[CodeChange]:
    before, after = (_code_by_name(inputs) for inputs in (mine, others))
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            yield CodeChange(file=name, how="only in the second" if one is None else "only in the first")
        elif one[1] != other[1]:
            yield CodeChange(file=name, how="changed", lines=_diff(one, other))


def _code_by_name(inputs: AttemptInputs) -> Mapping[str, tuple[Path, str]]:
    """Return the files of the user's code by their names below an import path, with their hashes."""
    found = {}
    for text, seal in inputs.code.items():
        folders = [folder for folder in inputs.import_paths if PurePath(text).is_relative_to(folder)]
        nearest = max(folders, key=len, default="")
        found[str(PurePath(text).relative_to(nearest)) if nearest else text] = Path(text), seal
    return found


def _diff(before: tuple[Path, str], after: tuple[Path, str]) -> list[str]:
    """Return the changed lines, if both files are still what they were."""
    contents = [unchanged_content(*one) for one in (before, after)]
    one, other = ([] if content is None else content.decode(errors="replace").splitlines() for content in contents)
    if None in contents:
        return []
    lines = difflib.unified_diff(one, other, n=0, lineterm="")
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return changed[:_MOST_LINES]
