"""What campaigns write down: when, of which commit, and where."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ddp_hpc.base.durable import replace_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
UNDER_TEST = ("ddp_hpc", "sbatch_templates", "containers", "envs")


def stamp() -> dict[str, str]:
    """Return today's date and the commit of the code under test, with a `+` where that was changed since."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    is_changed = bool(git("status", "--porcelain", "--", *UNDER_TEST))
    return {
        "commit": git("rev-parse", "HEAD") + ("+" if is_changed else ""),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def add_row(path: Path, row: Mapping[str, Any], *, key: str, order: Callable[[Any], Any] = str) -> None:
    """Put the newest row of a key's value in the place of its older one."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    others = [one for one in known if one[key] != row[key]]
    path.parent.mkdir(exist_ok=True)
    rows = sorted([*others, dict(row)], key=lambda one: order(one[key]))
    replace_text(path, json.dumps(rows, indent=1) + "\n")
