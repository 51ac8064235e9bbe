"""The directories of the runs: each has its own copy of the working directory, so that their outputs are kept apart."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter, deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.prove.certify.outside import saved_state_at_risk

MOST_BYTES = 2 << 30
"""Of all files of one copy."""
MOST_FILES = 20_000
LEFT_OUT = frozenset({"__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
"""Directories that no script reads as data."""
_MOST_SEEN = 10 * MOST_FILES
"""So many entries are counted, to say which directories are the largest."""
_VENV_MARKER_NAMES = ("pyvenv.cfg", "conda-meta")
"""A directory that has one is a virtual environment."""


def copy_work_dir(work_dir: Path, target: Path, *, left_out: Collection[Path] = ()) -> list[Path]:
    """Copy a working directory; return the paths outside of it that the copy has links to.

    What a link leads to is copied, too. Only what is too large for that stays a link, and repositories and virtual environments.
    """
    # Nothing is written before all is known: a refusal leaves no half of a copy.
    skipped = {form for path in left_out for form in (path.absolute(), path.resolve())}
    copy = _Copy(work_dir, target, {path for path in skipped if not work_dir.is_relative_to(path)})
    copy.plan_copy()
    copy.make()
    return copy.outside


@dataclass
class _Tree:
    """What is in a directory: how to make its copy."""

    root: Path
    target: Path
    folders: list[Path] = field(default_factory=list)
    """To be made in the copy."""
    files: list[tuple[Path, Path]] = field(default_factory=list)
    """Each file, and the place of its copy."""
    links: list[tuple[Path, str]] = field(default_factory=list)
    """Each place, and where its link leads."""
    elsewhere: list[tuple[Path, Path]] = field(default_factory=list)
    """Each place, and a file or directory outside of the root to which a link leads."""
    num_bytes: int = 0

    @property
    def num_entries(self) -> int:
        return len(self.folders) + len(self.files) + len(self.links) + len(self.elsewhere)

    def is_within_limits(self, num_files: int, num_bytes: float) -> bool:
        return self.num_entries <= num_files and self.num_bytes <= num_bytes


@dataclass
class _Copy:
    work_dir: Path
    target: Path
    skipped: Collection[Path]
    trees: list[_Tree] = field(default_factory=list)
    links: list[tuple[Path, Path]] = field(default_factory=list)
    outside: list[Path] = field(default_factory=list)

    def plan_copy(self) -> None:
        """Find all that there is to copy, and decide what stays a link."""
        tree = self._read_tree(self.work_dir, self.target, _MOST_SEEN, math.inf)
        if not tree.is_within_limits(MOST_FILES, MOST_BYTES):
            raise ConfigError(_too_large_message(tree))
        self.trees.append(tree)
        waiting = deque(tree.elsewhere)
        while waiting:
            place, source = waiting.popleft()
            there = next((one for one in self.trees if source.is_relative_to(one.root)), None)
            if there is not None:  # another link leads there, too
                text = os.path.relpath(there.target / source.relative_to(there.root), place.parent)
                self.links.append((place, Path(text)))
                continue
            found = self._copy_of_link(place, source)
            if found is None:
                self._add_link(place, source)
            else:
                self.trees.append(found)
                waiting.extend(found.elsewhere)

    def make(self) -> None:
        self.target.mkdir(parents=True, exist_ok=True)
        for tree in self.trees:
            for folder in tree.folders:
                folder.mkdir(exist_ok=True)
            for source, place in tree.files:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    shutil.copy2(source, place)
            for place, text in tree.links:
                place.symlink_to(text)
        for place, source in self.links:
            place.symlink_to(source)

    def _copy_of_link(self, place: Path, source: Path) -> _Tree | None:
        """Return how to copy what a link leads to; None where it is too large, or what scripts do not write to."""
        if _is_only_linked(source) or self.work_dir.is_relative_to(source):
            return None
        num_files = MOST_FILES - sum(tree.num_entries for tree in self.trees)
        num_bytes = MOST_BYTES - sum(tree.num_bytes for tree in self.trees)
        if source.is_dir():
            tree = self._read_tree(source, place, num_files, num_bytes)
            tree.folders.insert(0, place)
        else:
            tree = _Tree(source, place, files=[(source, place)], num_bytes=_size(source))
        return tree if tree.is_within_limits(num_files, num_bytes) else None

    def _add_link(self, place: Path, source: Path) -> None:
        self.links.append((place, source))
        if _is_only_linked(source):
            return
        state = saved_state_at_risk(source, apart_from=self.skipped)
        if state is not None:
            raise ConfigError(
                f"{place.relative_to(self.target)} in the working directory is a link to {source}, which is too large to be copied, and "
                f"{state} is there: a saved state, which the runs could overwrite or resume from. Certify the script in a directory "
                f"without that link; or, if the script only reads there, make it read-only during the test: "
                f"`chmod -R a-w {source}`."
            )
        self.outside.append(source)

    def _read_tree(self, root: Path, target: Path, most_entries: int, most_bytes: float) -> _Tree:
        tree = _Tree(root, target)
        waiting = deque([(root, target)])
        while waiting:
            folder, copy = waiting.popleft()
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            for entry in entries:
                source, place = folder / entry.name, copy / entry.name
                if entry.name in LEFT_OUT or source in self.skipped:
                    continue
                if entry.is_symlink():
                    self._sort_link(tree, source, place)
                elif entry.is_dir() and _is_only_linked(source):
                    tree.links.append((place, str(source)))
                elif entry.is_dir():
                    tree.folders.append(place)
                    waiting.append((source, place))
                elif entry.is_file():  # no socket, and no pipe
                    tree.files.append((source, place))
                    tree.num_bytes += _size(source)
                if not tree.is_within_limits(most_entries, most_bytes):
                    return tree
        return tree

    def _sort_link(self, tree: _Tree, source: Path, place: Path) -> None:
        try:
            end = source.resolve(strict=True)
        except (OSError, RuntimeError):  # it leads nowhere, or in a circle
            return
        if any(end.is_relative_to(one) for one in self.skipped):
            return
        inner = end.relative_to(root) if end.is_relative_to(root := tree.root.resolve()) else None
        if inner is not None and not any(_is_only_linked(one) for one in (end, *end.parents) if one != root):
            # A link to the original would have the runs write there.
            tree.links.append((place, os.path.relpath(tree.target / inner, place.parent)))
        else:
            tree.elsewhere.append((place, end))


def _is_only_linked(path: Path) -> bool:
    """Tell whether a directory is one that scripts use and do not write to: a repository's, or a virtual environment."""
    return path.name == ".git" or any((path / name).exists() for name in _VENV_MARKER_NAMES)


def _too_large_message(tree: _Tree) -> str:
    counts, sizes = Counter[Path](), Counter[Path]()
    for source, _ in tree.files:
        top = tree.root / source.relative_to(tree.root).parts[0]
        counts[top] += 1
        sizes[top] += _size(source)
    is_long = tree.num_entries > MOST_FILES
    largest = (counts if is_long else sizes).most_common(3)
    named = ", ".join(f"{path.name} ({counts[path]} files, {_gb(sizes[path])})" for path, _ in largest)
    return (
        f"Each run gets a copy of the working directory, of {_gb(MOST_BYTES)} and {MOST_FILES} files at most, but {tree.root} has "
        f"{'more than ' if tree.num_entries > _MOST_SEEN else ''}{tree.num_entries} files and {_gb(tree.num_bytes)}. The largest: {named}. "
        "Move data to another directory and leave a link to it in its place; what is large behind a link is not copied. Or certify the "
        "script in a directory that has only what it needs."
    )


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def file_stats(root: Path) -> dict[str, tuple[int, int]]:
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
