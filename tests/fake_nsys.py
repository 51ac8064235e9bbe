#!/usr/bin/env python3
"""A stand-in for nsys: it notes its arguments in $FAKE_NSYS_CALLS and becomes the command that it is to record.

With $FAKE_NSYS=between it stays, as nsys does: the command runs in a session of its own, and gets no signal of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Be nsys."""
    with Path(os.environ["FAKE_NSYS_CALLS"]).open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    command = sys.argv[sys.argv.index("-o") + 2 :]
    if os.environ.get("FAKE_NSYS") != "between":
        os.execv(command[0], command)  # noqa: S606  no shell
    code = subprocess.run(command, start_new_session=True, close_fds=False, check=False).returncode
    return 128 - code if code < 0 else code


def on_path(folder: Path) -> str:
    """Return a PATH whose `nsys` is this file; `folder` gets a link to it."""
    (folder / "nsys").symlink_to(__file__)
    return f"{folder}:{os.environ['PATH']}"


if __name__ == "__main__":
    sys.exit(main())
