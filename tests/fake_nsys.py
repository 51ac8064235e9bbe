#!/usr/bin/env python3
"""A stand-in for nsys, which forks as nsys does: the command, an agent that outlives it, and the worker in a session of its own.

$FAKE_NSYS says how it misbehaves; see MISBEHAVIOURS. Its calls are noted in `calls` in the directory $FAKE_NSYS_FOLDER.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MISBEHAVIOURS = ("", "fails", "hangs", "other_code", "dies", "never_ends", "start_fails", "start_hangs", "no_report")


def main() -> int:
    """Be nsys."""
    how, folder = os.environ.get("FAKE_NSYS", ""), Path(os.environ["FAKE_NSYS_FOLDER"])
    verb, words = sys.argv[1], sys.argv[2:]
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    if verb == "start":
        if how == "start_hangs":
            forever()
        if how == "start_fails":
            sys.stdout.write("The timer was not found.\n")
            return 1
        (folder / "recording").write_text(next(one for one in words if one.startswith("--output=")).partition("=")[2])
        return 0
    if verb == "stop":
        return write_report(folder, how)
    return launch(folder, how)


def launch(folder: Path, how: str) -> int:
    """Start the command below an agent, as nsys does."""
    if how == "fails":
        sys.stdout.write("nsys: Failed to create '/tmp/nvidia/nsight_systems': Permission denied\n")
        return 1
    if how == "hangs":
        forever()
    command = sys.argv[sys.argv.index("/bin/sh") :]
    if os.fork() == 0:  # the agent, which no command is the parent of
        os.setsid()
        if how == "never_ends":
            forever()
        time.sleep(0.2)
        os._exit(0)
    # nsys hands on its open files, and reads what the command prints.
    worker = subprocess.Popen(
        command, start_new_session=True, close_fds=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    (folder / "nsys.pid").write_text(str(os.getpid()))
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    code = worker.wait()
    write_report(folder, how)
    if how == "never_ends":
        forever()
    return 1 if how == "other_code" else code


def write_report(folder: Path, how: str) -> int:
    """Write what is recorded."""
    recording = folder / "recording"
    if recording.exists() and how != "no_report":
        Path(recording.read_text().replace("%%", "%")).write_text("a report")
        recording.unlink()
    return 0


def forever() -> None:
    """Wait, whatever signal comes."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
