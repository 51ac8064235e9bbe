"""What the storms came to, on disk and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.written import RESULTS, add_row


def add_result(result: Mapping[str, Any], path: Path = RESULTS / "storm-campaign.json") -> None:
    """Put a seed's newest result in the place of its older one."""
    add_row(path, result, key="seed", order=int)


def as_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the seeds, and below it what was wrong."""
    lines = [f"{'seed':>6} {'minutes':>8} {'faults':>7} {'verdict':>8}  run        attempts  steps again  state"]
    for result in results:
        faults = sum(result["faults"].values())
        head = f"{result['seed']:6d} {result['minutes']:8.1f} {faults:7d} {result['verdict']:>8}"
        for name, run in result["runs"].items():
            lines.append(f"{head}  {name:10} {run['attempts']:8d} {run['steps_taken_again']:12d}  {run['state']}")
            head = " " * len(head)
    for result in results:
        for name, run in result["runs"].items():
            lines += [f"seed {result['seed']}, {name}: {problem}" for problem in run["problems"]]
    return "\n".join(lines)
