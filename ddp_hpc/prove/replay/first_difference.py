"""Finds the first value in which two traces of steps differ, in the order in which values follow from each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

TraceEntry = Mapping[str, Any]
EntriesByStep = Mapping[int, Sequence[TraceEntry]]
"""Step -> what a rank computed in it, in its order; the line of the start has the state before the first step."""

NON_TENSOR_KINDS = frozenset({"samples", "option", "random generator"})
"""Kinds of entries that are causes, and no value that the training computes."""


@dataclass(frozen=True, kw_only=True)
class DifferingValue:
    """One value that differs; the fields are keys of `bisect --json`."""

    step: int
    """After which step, or in which; the step of the start for the state that the steps begin with."""
    rank: int
    kind: str
    """`samples`, `batch`, `output`, `loss`, `gradient`, `option`, `moment`, `weight` and so on."""
    name: str
    how: Literal["differs", "only in the first", "only in the second"]
    one: str = ""
    """The value in the first run: an option itself, a tensor's type and norm."""
    other: str = ""
    samples: list[int] = field(default_factory=list)
    """Of a batch, the ids of the samples whose content differs."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two computations begin to differ."""

    first: DifferingValue
    """Whatever differs first; it may be an option or a sample's id."""
    tensor: DifferingValue | None
    """The first tensor that differs, the same as `first` if that is one."""
    ranks: list[int]
    """On which ranks something differs in that step."""


def first_difference(one: Sequence[EntriesByStep], other: Sequence[EntriesByStep]) -> Divergence | None:
    """Return where the traces of two runs begin to differ, or None; each has one item a rank.

    With several ranks, the value counts that is computed first; of equal ones, the lowest rank's.
    """
    for step in sorted({step for lines in (*one, *other) for step in lines}):
        found = []
        for rank, (mine, others) in enumerate(zip(one, other, strict=False)):
            if step in mine and step in others and (differing := _differing(step, rank, mine[step], others[step])):
                found.append(differing)
        if found:
            found.sort(key=lambda differing: differing[0][0])
            values = [value for differing in found for _, value in differing]
            tensor = next((value for value in values if value.kind not in NON_TENSOR_KINDS), None)
            return Divergence(first=values[0], tensor=tensor, ranks=[differing[0][1].rank for differing in found])
    return None


def _differing(
    step: int, rank: int, one: Sequence[TraceEntry], other: Sequence[TraceEntry]
) -> list[tuple[int, DifferingValue]]:
    """Return what differs in a step of a rank, in its order, with its place."""
    if one == other:
        return []
    mine, others = _entries_by_key(one), _entries_by_key(other)
    values = []
    for place, key in enumerate(_merged_keys([*mine], [*others])):
        a, b = mine.get(key), others.get(key)
        if a is not None and b is not None and (a["hash"], a.get("type")) == (b["hash"], b.get("type")):
            continue
        kind, name, number = key
        value = DifferingValue(
            step=step,
            rank=rank,
            kind=kind,
            name=name if number == 0 else f"{name} (call {number + 1})",
            how="only in the second" if a is None else "only in the first" if b is None else "differs",
            one=_entry_text(a),
            other=_entry_text(b),
            samples=_samples(mine, key, a, b),
        )
        values.append((place, value))
    return values


Key = tuple[str, str, int]
"""Kind, name, and how many of that name came before: a module may be called twice."""


def _entries_by_key(entries: Sequence[TraceEntry]) -> dict[Key, TraceEntry]:
    keyed: dict[Key, TraceEntry] = {}
    seen: dict[tuple[str, str], int] = {}
    for entry in entries:
        word = entry["kind"], entry["name"]
        number = seen[word] = seen.get(word, -1) + 1
        keyed[(entry["kind"], entry["name"], number)] = entry
    return keyed


def _merged_keys(one: Sequence[Key], other: Sequence[Key]) -> list[Key]:
    """Return the keys of both, each list in its own order; what only one of them has stands where it has it."""
    places = {key: place for place, key in enumerate(other)}
    merged: list[Key] = []
    begin = 0
    for key in one:
        if (place := places.get(key, -1)) >= begin:
            merged += other[begin:place]
            begin = place + 1
        merged.append(key)
    return [*dict.fromkeys([*merged, *other[begin:]])]


def _entry_text(entry: TraceEntry | None) -> str:
    if entry is None:
        return ""
    if "type" not in entry:
        return str(entry["hash"])
    norm = entry.get("norm")
    if norm is None:
        return str(entry["type"])
    return f"{entry['type']}, {'value' if entry['type'].endswith('[]') else 'norm'} {norm!r}"


def _samples(
    entries: Mapping[Key, TraceEntry], key: Key, one: TraceEntry | None, other: TraceEntry | None
) -> list[int]:
    """Return the ids of the samples whose content differs in a batch; empty where that cannot be said."""
    if one is None or other is None or key[0] != "batch" or len(one["rows"]) != len(other["rows"]):
        return []
    ids: list[int] = entries.get(("samples", f"micro batch {key[2]}", 0), {}).get("ids", [])
    return [sample for sample, a, b in zip(ids, one["rows"], other["rows"], strict=False) if a != b]
