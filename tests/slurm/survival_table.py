"""The campaign's rows on disk, and the table of them in docs/survival.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "slurm-campaign.json"
DOCUMENT = ROOT / "docs" / "survival.md"
BEGIN, END = "<!-- campaign: begin -->\n", "<!-- campaign: end -->\n"
LAUNCHERS = ("agent", "srun", "torchrun")

Row = Mapping[str, Any]


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Return all that the campaign has written: `cells`, in the order of the table, and `in_a_row`."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"cells": [], **found}


def add_row(row: Row, *, order: Sequence[tuple[str, str, str]]) -> None:
    """Put a cell's newest result in the place of its older one, in the file and in the document."""
    key = _key(row)
    rows = [other for other in read_results()["cells"] if _key(other) != key and _key(other) in order]
    rows = sorted([*rows, row], key=lambda one: order.index(_key(one)))
    write_results({**read_results(), "cells": rows})
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    _replace(DOCUMENT, f"{before}{BEGIN}{as_markdown(rows)}{END}{after}")


def write_results(results: Mapping[str, Any]) -> None:
    """Replace the file."""
    RESULTS.parent.mkdir(exist_ok=True)
    _replace(RESULTS, json.dumps(results, indent=1) + "\n")


def _key(row: Row) -> tuple[str, str, str]:
    return row["fault"], row["how"], row["launcher"]


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the table: a line a fault and how it came, a column a launcher."""
    if not rows:
        return ""
    lines = ["| fault | how it came | " + " | ".join(LAUNCHERS) + " |", "| --- | --- |" + " --- |" * len(LAUNCHERS)]
    for fault, how in dict.fromkeys((row["fault"], row["how"]) for row in rows):
        found = {row["launcher"]: row for row in rows if (row["fault"], row["how"]) == (fault, how)}
        cells = [_cell(found[launcher]) if launcher in found else "" for launcher in LAUNCHERS]
        lines.append(f"| {fault} | {how} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    if row["verdict"] != "PASS":
        return "**FAIL**"
    seconds = row["seconds_to_running"]
    return f"{row['lost_steps']} lost" + ("" if seconds is None else f", {seconds:.0f} s")
