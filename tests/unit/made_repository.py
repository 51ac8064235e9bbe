"""Git repositories for tests, which no setting of this machine's user reaches."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path


def git(folder: Path, *words: str) -> None:
    """Run git as somebody whose settings do not matter."""
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "protocol.file.allow=always"]
    with tempfile.NamedTemporaryFile() as empty:
        environ = {**os.environ, "GIT_CONFIG_GLOBAL": empty.name, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            ["git", "-C", folder, *who, *words], env=environ, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
