"""Git repositories for tests, which no setting of this machine's user reaches."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from ddp_hpc.launch.submission.snapshot import LIST_FILE_NAME, Snapshot, _file_entry


def git(folder: Path, *words: str) -> None:
    """Run git as somebody whose settings do not matter."""
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "protocol.file.allow=always"]
    with tempfile.NamedTemporaryFile() as empty:
        environ = {**os.environ, "GIT_CONFIG_GLOBAL": empty.name, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            ["git", "-C", folder, *who, *words], env=environ, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr


def names(taken: Snapshot) -> set[str]:
    """Return the files in a copy, and links, but for those to what was not copied."""
    files = [path for path in taken.path.rglob("*") if not path.is_dir() or path.is_symlink()]
    copied = [path for path in files if not (path.is_symlink() and path.readlink().is_relative_to(taken.source))]
    return {str(path.relative_to(taken.path)) for path in copied} - {LIST_FILE_NAME}


def changed(copy: Path) -> list[str]:
    """Return the files of a copy that are not as its list has them."""
    listed = json.loads((copy / LIST_FILE_NAME).read_text())["files"]
    return [one["name"] for one in listed if _file_entry(copy, one["name"]) != one]
