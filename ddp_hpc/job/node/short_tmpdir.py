"""A short path to the directory for temporary files, in which processes of a node open Unix sockets."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import MutableMapping

from ddp_hpc.cluster.rank_probe.folder import LINK, ProbeFolder
from ddp_hpc.cluster.rendezvous.worker_env import giving

_LONGEST = 107 - 40
"""Bytes (unix(7)); Python's `multiprocessing` adds 32 (`/pymp-12345678/listener-12345678`), PyTorch's `torch_shm_manager` 34."""


def shorten_tmpdir(folder: ProbeFolder | None, environ: MutableMapping[str, str], *, says: bool) -> None:
    """Give this process, and those that it starts, a link to the directory for temporary files where its path is too long for sockets."""
    users = tempfile.gettempdir()
    if folder is None or len(os.fsencode(users)) <= _LONGEST:
        return
    link = folder.path / LINK
    link.symlink_to(users)
    tempfile.tempdir = str(link)
    environ.update(giving({"TMPDIR": tempfile.tempdir}, environ))
    if says:
        sys.stderr.write(
            f"note: TMPDIR is {link} in the workers, a link to {users}, whose path is too long for Unix sockets\n"
        )
