"""The directories of the runs: each has its own copy of the working directory, so that their outputs are kept apart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

LARGEST_COPY_BYTES = 10 << 20
"""Larger files are not copied; the copy has a link to them."""
MOST_COPIES = 20_000
LEFT_OUT = frozenset({"__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
"""Directories that no script reads as data."""


def copy_of(work_dir: Path, target: Path, *, left_out: Collection[Path] = ()) -> list[str]:
    """Copy a working directory; return the paths of large files, which are links in the copy.

    Links stay links, made absolute, so that `data -> /data/imagenet` is not copied.
    """
    skipped, linked = {path.absolute() for path in left_out}, []
    for number, (source, place) in enumerate(_entries(work_dir, target, skipped)):
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() or _is_only_linked(source):
            place.symlink_to(source.resolve())
        elif source.is_dir():
            place.mkdir(exist_ok=True)
        elif source.stat().st_size > LARGEST_COPY_BYTES or number > MOST_COPIES:
            place.symlink_to(source.absolute())
            linked.append(str(source.relative_to(work_dir)))
        else:
            shutil.copy2(source, place)
    return linked


def _entries(folder: Path, target: Path, skipped: Collection[Path]) -> Iterator[tuple[Path, Path]]:
    for entry in sorted(folder.iterdir()):
        if entry.name in LEFT_OUT or entry.absolute() in skipped:
            continue
        is_kind = entry.is_symlink() or entry.is_dir() or entry.is_file()
        if not is_kind:  # a socket or a pipe
            continue
        yield entry, target / entry.name
        if entry.is_dir() and not entry.is_symlink() and not _is_only_linked(entry):
            yield from _entries(entry, target / entry.name, skipped)


def _is_only_linked(folder: Path) -> bool:
    """Tell whether a directory is one that scripts use and do not write to: a repository's, or a virtual environment."""
    return folder.name == ".git" or (folder / "pyvenv.cfg").is_file()


def files_in(root: Path) -> dict[str, tuple[int, int]]:
    """Return each file below a directory: its path -> size and modification time in ns. Links are left out."""
    found: dict[str, tuple[int, int]] = {}
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT]
        for name in files:
            path = Path(folder, name)
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink() and path.suffix != ".pyc":
                    status = path.stat()
                    found[path.relative_to(root).as_posix()] = (status.st_size, status.st_mtime_ns)
    return found
