"""Consoles that the documents show: their commands, and whether what is printed is what they show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_BLOCK = re.compile(r"^ *```console\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_VARIES = re.compile(r"\b[0-9a-f]{32}\b|\d[\d.,:]*|\b(?:waiting|starting|running)(?=: step)")
"""Digests, numbers, and how far a job has come when its submission returns: they are others each time."""


@dataclass(frozen=True)
class Shown:
    """A command after a `$`, and the lines below it."""

    command: str
    lines: tuple[str, ...]


def shown_in(text: str) -> list[Shown]:
    """Return the commands of all consoles of a document."""
    blocks = _BLOCK.findall(text)
    return [shown for block in blocks for shown in _commands(re.sub(r"^ +", "", block, flags=re.MULTILINE))]


def _commands(block: str) -> Iterable[Shown]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        first, *lines = part.rstrip("\n").split("\n")
        yield Shown(re.sub(r" {2,}#.*", "", first), tuple(lines))


def not_printed(shown: Shown, printed: str, folders: dict[str, str]) -> list[str]:
    """Return what is shown, and was not printed in that order; numbers may differ, `...` stands for any lines.

    `folders` says by which name the document calls each folder.
    """
    for folder, name in folders.items():
        printed = printed.replace(folder, name)
    rest = [_plain(line) for line in printed.splitlines()]
    missing = []
    for line in shown.lines:
        if line == "...":
            continue
        if _plain(line) not in rest:
            missing.append(line)
            continue
        del rest[: rest.index(_plain(line)) + 1]
    return missing


def _plain(line: str) -> str:
    return " ".join(_VARIES.sub("#", line).split())
