"""Whether `ddp-hpc bisect` names the exact step and tensor of planted one-line differences, and with how many replays.

    python -m tests.campaigns.bisect FOLDER

Writes docs/results/bisect.json and docs/results/bisect.md. Answers that FOLDER holds already are not asked for again.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_hpc.base.durable import replace_text
from tests.campaigns.command_line import folder_to_fill, parser_of
from tests.campaigns.written import RESULTS, stamp
from tests.distributed.planted import NUM_STEPS, PLANTED, Planted, bisected, is_right, train

MOST_REPLAYS = math.floor(math.log2(NUM_STEPS)) + 2


def row_of(planted: Planted, folder: Path) -> dict[str, Any]:
    """Train with one difference, bisect, and return what was to be named and what was."""
    name = "".join(letter if letter.isalnum() else "-" for letter in planted.name)
    kept = folder / "answers" / f"{name}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    base = folder / "runs" / f"base-{planted.ranks}"
    if not (base / "DONE").exists():
        train(folder / base.name, base.name, None, ranks=planted.ranks)
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)  # of a campaign that was ended amid it
    began = time.monotonic()
    answer = bisected(base, train(folder / name, name, planted, ranks=planted.ranks))
    parting = answer["parting"] or {}
    circumstances = answer["circumstances"] or {}
    row = {
        "name": planted.name,
        "ranks": planted.ranks,
        "step": planted.step,
        "value": " ".join(planted.first),
        "tensor": " ".join(planted.tensor or planted.first),
        "named_step": parting and parting["first"]["step"],
        "named_rank": parting and parting["first"]["rank"],
        "named_value": parting and f"{parting['first']['kind']} {parting['first']['name']}",
        "named_tensor": parting and f"{parting['tensor']['kind']} {parting['tensor']['name']}",
        "named_samples": parting and parting["first"]["samples"],
        "is_right": is_right(planted, answer),
        "replays": answer["num_replays"],
        "configuration": circumstances.get("configuration", []),
        "code": [line for change in circumstances.get("code", []) for line in change["lines"]],
        "notes": answer["notes"],
        "seconds": round(time.monotonic() - began, 1),
    }
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(row))
    return row


def as_page(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """Return the table for readers."""
    right = sum(row["is_right"] for row in rows)
    most = max(row["replays"] for row in rows)
    said = (
        f"Two trainings of {NUM_STEPS} steps differ in one line; {right} of {len(rows)} times, exactly the step and the tensor are named in which the difference "
        f"shows first, with at most {most} replays ({MOST_REPLAYS} are allowed: log2({NUM_STEPS}) + 2). Step 0 is the state before the first step."
    )
    lines = [
        "# Planted differences that `bisect` finds",
        "",
        f"{about['date']}, commit {about['commit'][:12]}. {said} `python -m tests.campaigns.bisect FOLDER` makes this table.",
        "",
        "| difference | ranks | step | first value | first tensor | replays | right | what differed before it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        before = (
            "; ".join([*row["configuration"], *(f"`{line}`" for line in row["code"])])
            or "nothing but the data's content"
        )
        rank = f", rank {row['named_rank']}" if row["ranks"] > 1 else ""
        samples = f", sample {row['named_samples'][0]}" if len(row["named_samples"]) == 1 else ""
        lines.append(
            f"| {row['name']} | {row['ranks']} | {row['named_step']} | {row['named_value']}{samples}{rank} | {row['named_tensor']} | {row['replays']} "
            f"| {'yes' if row['is_right'] else 'NO'} | {before.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all of them, one after the other."""
    parser = parser_of("tests.campaigns.bisect", __doc__)
    parser.add_argument(
        "folder", metavar="FOLDER", type=folder_to_fill, help="where the trainings and answers are kept"
    )
    folder, rows = parser.parse_args(argv).folder, []
    for planted in PLANTED:
        rows.append(row_of(planted, folder))
        print(json.dumps(rows[-1]), flush=True)  # noqa: T201  a campaign prints
    about = stamp()
    replace_text(
        RESULTS / "bisect.json", json.dumps({**about, "most_replays": MOST_REPLAYS, "cases": rows}, indent=1) + "\n"
    )
    replace_text(RESULTS / "bisect.md", as_page(rows, about))
    return 0 if all(row["is_right"] and row["replays"] <= MOST_REPLAYS for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
