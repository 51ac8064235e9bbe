"""What each process with a worker needs, however it is started: its import path, its garbage collector, its exit."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ddp_hpc.cluster.rendezvous.worker_env import USERS_CODE, giving

IMPORT_PATH = "_DDP_HPC_IMPORT_PATH"
"""Name of a variable with the import paths of the user's code, for workers only, in the format of PYTHONPATH."""
SAFE_PATH = {"PYTHONSAFEPATH": "ddp_hpc"}
"""Keeps Python 3.11 and newer from importing what lies in the working directory; the value tells it from one that the user has set."""


def python_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide where a worker's Python imports from, before `make_users_code_importable`."""
    return {name: environ.get(name, "") for name in (IMPORT_PATH, "PYTHONSAFEPATH", "PYTHONPATH")}  # "" is as unset


def make_users_code_importable(environ: MutableMapping[str, str]) -> list[str]:
    """Have this process import the user's code after Python's own modules, before all others, those of PYTHONPATH too.

    In PYTHONPATH itself, a `socket.py` of the user would be imported instead of Python's. Processes that this one starts are
    the user's, so they get the paths in PYTHONPATH. Returns the paths of the user's code.
    """
    if environ.get("PYTHONSAFEPATH") == SAFE_PATH["PYTHONSAFEPATH"]:
        del environ["PYTHONSAFEPATH"]
    paths = [path for path in environ.pop(IMPORT_PATH, "").split(os.pathsep) if path]
    if paths:
        pythons = [path for path in sys.path if _is_pythons(path)]
        sys.path[:] = [*pythons, *paths, *(path for path in sys.path if path not in pythons)]
        environ[USERS_CODE] = os.pathsep.join(paths)
        path = os.pathsep.join([*paths, *filter(None, [environ.get("PYTHONPATH")])])
        environ.update(giving({"PYTHONPATH": path}, environ))
    return paths


def _is_pythons(path: str) -> bool:
    """Tell whether a path is of the standard library: its directory, its extensions, its archive."""
    library = Path(sysconfig.get_path("stdlib"))
    return Path(path) in {library, Path(sysconfig.get_path("platstdlib"))} or (
        Path(path).parent in {library, library.parent} and Path(path).name.endswith(("lib-dynload", ".zip"))
    )


@contextmanager
def imports_for_good() -> Iterator[None]:
    """Exclude what is imported from garbage collection, now and later: modules stay until the process ends.

    Going through them takes a sixth of PyTorch's import and finds 8 MB of 710, and in a forked process it copies their pages
    (https://docs.python.org/3/library/gc.html#gc.freeze).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_at_once(code: int) -> NoReturn:
    """End this process without Python's shutdown, in which torch can abort after all went well."""
    with suppress(OSError):  # the disk of the log may be full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
