"""Print a constraints file: the newest of everything we need that goes together, for each Python named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

HEADER = "# Tested versions of everything ddp_hpc and its tests need; made by envs/pin.py, see envs/README.md."

Pins = dict[str, str]
"""Package to version."""


def resolve(python: str, requirements: Sequence[str]) -> Pins:
    """Ask this interpreter's pip what it would install into an empty environment; nothing is installed."""
    argv = [python, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--report", "-"]
    report = json.loads(subprocess.run([*argv, *requirements], check=True, stdout=subprocess.PIPE).stdout)
    found = [item["metadata"] for item in report["install"]]
    return {each["name"]: each["version"] for each in found if each["name"] != "ddp_hpc"}


def minor_version(python: str) -> str:
    """Return an interpreter's version as markers write it, `3.11`."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def merge(older: Pins, newer: Pins, split: str) -> list[str]:
    """Return the lines for both: a marker tells apart what differs at Python version `split`."""
    lines = []
    for name in sorted(older | newer, key=str.lower):
        old, new = older.get(name), newer.get(name)
        if old == new:
            lines.append(f"{name}=={new}")
            continue
        lines += [f'{name}=={old} ; python_version < "{split}"'] if old else []
        lines += [f'{name}=={new} ; python_version >= "{split}"'] if new else []
    return lines


def main(argv: Sequence[str]) -> None:
    """Read `OLDER NEWER REQUIREMENT ...`: two interpreters and what to resolve, as pip takes it."""
    older, newer, *requirements = argv
    lines = merge(resolve(older, requirements), resolve(newer, requirements), split=minor_version(newer))
    print("\n".join([HEADER, *lines]))


if __name__ == "__main__":
    main(sys.argv[1:])
