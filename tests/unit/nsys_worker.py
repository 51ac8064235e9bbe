"""A worker that does what $TRIAL says, to be run under a stand-in for nsys."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.nsys import Capture, capture_from


def preload(run_path: str) -> str:
    """Import nothing."""
    del run_path
    return ""


def main(run_path: str, environ: Mapping[str, str], *, attempt: int, listen_fd: int | None = None) -> int:
    """Follow $TRIAL: `exit N`, `signal N`, `await` a stop signal, `record` and end with 0."""
    del attempt, listen_fd
    capture = capture_from(environ)
    what, _, number = environ["TRIAL"].partition(" ")
    said = capture if isinstance(capture, str) else "under nsys"
    if what == "record" and isinstance(capture, Capture):
        said = capture.begin() or "begun"
        capture.end()
        capture.close()
    sys.stdout.write(f"worker: {said}\n")
    sys.stdout.flush()
    Path(run_path, "worker.pid").write_text(str(os.getpid()), encoding="utf-8")
    if what == "signal":
        os.kill(os.getpid(), int(number))
    if what == "await":
        got = signal.sigwait({signal.SIGUSR2, signal.SIGTERM})
        sys.stdout.write(f"worker got {signal.Signals(got).name}\n")
        return 99
    if what == "sleep":
        time.sleep(60)
    return int(number or 0)
