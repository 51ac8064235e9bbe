"""Messages and docstrings are in plain English: this reads the source and finds phrases that a reader would have to guess at.

A room that is edited gets a line in `PLAIN`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_doors import PACKAGE

PLAIN = (".", "../sbatch_templates", "../envs/sites")
"""Files and directories whose texts are edited, from the package's directory on."""
TO_EDIT: tuple[str, ...] = ()
"""Files in those directories that are still to be edited; one need not exist."""

BANNED = (
    # From the list that replaced the house's own language by the field's.
    r"\btold\b",
    r"\btells? (?:it |them |us )?of\b",
    r"\bwhoever\b",
    r"\bnobody else\b",
    r"\bsomebody\b",
    r"\bour words\b",
    r"\bwords we\b",
    r"\bin words\b",
    r"\b(?:breathes?|bites?|bitten|barks?)\b",
    r"\bthe dog\b",
    r"\bout of luck\b",
    r"\bstands? still\b",
    r"\blets? (?:it |them )?in again\b",
    r"\blets? it go on\b",
    r"\bits way back\b",
    r"\bwhat cannot be\b",
    r"\bcannot be(?=[,.;:)])",
    r"\b(?:dies?|died) of\b",
    r"\bwithout a word\b",
    r"\bgets? nowhere\b",
    r"\bgets? on\b",
    r"\blook(?:s|ed)? at\b",
    r"\bby (?:itself|themselves)\b",
    r"\bha(?:s|d) a say\b",
    r"\bas (?:often|much) as it must\b",
    r"\bof which that\b",
    r"\bunseen\b",
    r"\bcheckpoint and leave\b",
    r"(?<!there )\bis none\b",
    r"(?<!there )\bis no (?!longer\b|more\b)",
)
"""Phrases that make a reader guess: who acts, or what is meant."""
_BANNED = re.compile("|".join(BANNED), re.IGNORECASE)


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string in Python source: messages, help texts, docstrings; names in code have no space."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, " ".join(node.value.split())


def riddles(path: Path) -> list[str]:
    """Return `line: phrase (text)` for each banned phrase in a file; in shell and YAML every line counts."""
    source = path.read_text(encoding="utf-8")
    texts = texts_of(source) if path.suffix == ".py" else enumerate(source.splitlines(), 1)
    return [f"{line}: {found[0]!r} ({text})" for line, text in texts for found in _BANNED.finditer(text)]


def files_of(room: str) -> list[Path]:
    """Return the files of a room."""
    path = PACKAGE / room
    return (
        sorted(
            file
            for file in path.rglob("*")
            if file.suffix in {".py", ".j2", ".yaml"} and file not in {PACKAGE / one for one in TO_EDIT}
        )
        if path.is_dir()
        else [path]
    )


@pytest.mark.parametrize("room", PLAIN)
def test_an_edited_room_has_no_banned_phrase(room: str) -> None:
    files = files_of(room)

    assert files
    assert {str(path): found for path in files if (found := riddles(path))} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""The run is told to leave."""', ["told"]),
        ('raise ConfigError(f"{node} dies without a word")', ["without a word"]),
        ('x: int = 0\n"""What cannot be is one error."""', ["What cannot be"]),
        ('print("held; `scontrol release` lets it go on")', ["lets it go on"]),
        ('print(f"Slurm asks {told} for it")', []),
        ('told = {"told": 1}', []),
        ('"""The job no longer runs; look up its state."""', []),
    ],
)
def test_a_banned_phrase_is_found_in_messages_and_docstrings_and_not_in_code(
    source: str, found: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "room.py"
    path.write_text(source)

    assert [line.split("'")[1] for line in riddles(path)] == found


def test_a_banned_phrase_is_found_in_a_comment_of_a_template(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch.j2"
    path.write_text("#!/bin/bash\n# the shell is told\n")

    assert riddles(path) == ["2: 'told' (# the shell is told)"]
