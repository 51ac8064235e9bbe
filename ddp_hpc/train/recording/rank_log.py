"""One log file per rank; rank zero also logs to the console."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path

from ddp_hpc.base.durable import make_directories, new_file_mode

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def redirect_output(path: Path, *, is_rank_zero: bool) -> None:
    """Redirect all output of this process to `path`; rank zero's log lines also go to the old standard output."""
    make_directories(path.parent)
    handlers: list[logging.Handler] = []
    if is_rank_zero:
        console = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        handlers.append(logging.StreamHandler(console))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, new_file_mode(path))
    # Replace the descriptors, not only Python's objects: C++ (NCCL, gloo, faulthandler) and child processes write to them. What
    # Python still buffers belongs to the old output, so flush it first.
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # with a C locale on a node, printing non-ASCII text would raise
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    handlers.append(logging.StreamHandler(sys.stderr))
    logging.basicConfig(level=logging.INFO, format=_FORMAT, handlers=handlers, force=True)
    logging.captureWarnings(capture=True)
