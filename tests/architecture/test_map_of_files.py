"""ARCHITECTURE.md names every file once, in the row of its folder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTRANCES = {"__init__", "__main__", "moved"}


def files_in(text: str) -> list[str]:
    """Return what the table of files names, as paths below the package without their ending."""
    table = text.partition("## The files")[2].partition("\n\nA new key")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE)
    return [
        _path(re.findall(r"`([\w/]+)/`", folders), name)
        for folders, cell in rows
        for name in re.findall(r"(?:^|\. |, )`([a-z_0-9/]+)`", cell)
    ]


def _path(folders: list[str], name: str) -> str:
    """Return the file that a name means: in the first of the row's folders that has it."""
    around = [*folders, *(folder.rpartition("/")[0] for folder in folders)]
    paths = [f"{folder}/{name}".lstrip("/") for folder in around]
    return next((path for path in paths if (ROOT / "ddp_hpc" / f"{path}.py").is_file()), paths[0])


def files_of_package() -> list[str]:
    paths = sorted((ROOT / "ddp_hpc").rglob("*.py"))
    names = [path.relative_to(ROOT / "ddp_hpc").with_suffix("").as_posix() for path in paths]
    return [name for name in names if Path(name).name not in ENTRANCES and not name.startswith("cli/verbs/")]


def test_each_file_is_named_once_in_the_row_of_its_folder() -> None:
    assert sorted(files_in((ROOT / "ARCHITECTURE.md").read_text())) == files_of_package()


def test_a_file_without_a_place_and_a_name_without_a_file_are_seen() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    loop = "train/engine/loop"

    assert loop in files_in(text)
    assert loop not in files_in(text.replace("`loop`: the step. ", ""))
    assert "train/engine/spool" in files_in(text.replace("`loop`", "`spool`"))
