"""The copy of the user's code that a job runs (`launch/submission/snapshot` makes it), as its own list describes it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddp_hpc.base.durable import read_json

LIST = ".ddp_hpc-snapshot.json"
"""The file in a copy that lists what was copied, and from where."""
NO_OUTPUT = frozenset({"__pycache__", LIST})


def read_list(copy: Path) -> tuple[Path, list[str]]:
    """Return the directory that was copied, and the files below it, by the list in a copy.

    Raises:
        OSError: where there is none, or the file system does not answer.
    """
    listed = read_json(copy / LIST)
    if listed is None:
        raise FileNotFoundError(errno.ENOENT, "There is no list of what was copied", str(copy / LIST))
    return Path(listed["source"]), [file["name"] for file in listed["files"]]


def folders_of(names: Iterable[str]) -> set[str]:
    """Return the directories that hold these files, the top (`.`) included."""
    return {".", *(str(parent) for name in names for parent in Path(name).parents)}


def written_into(copy: Path) -> Iterator[str]:
    """Yield what jobs have written into a copy, beside the files of the code, also where an older copy holds it.

    Raises:
        OSError: where the copy has no list, or the file system does not answer.
    """
    _, names = read_list(copy)
    folders = folders_of(names)
    known = {*names, *folders}
    for folder in sorted(folders):
        for entry in os.scandir(copy / folder) if (copy / folder).is_dir() else ():
            name = os.path.normpath(Path(folder, entry.name))
            is_of_work_tree = entry.is_symlink() and Path(entry).readlink().is_absolute()
            if not (name in known or entry.name in NO_OUTPUT or is_of_work_tree):
                yield name
