"""What each process with a worker needs, however it is started: import path, TMPDIR, garbage collector, exit."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import DdpHpcError, exit_code_of
from ddp_hpc.cluster.rank_probe.folder import LINK, ProbeFolder
from ddp_hpc.cluster.rendezvous.worker_env import USERS_CODE, with_undo_record
from ddp_hpc.run.run_dir.failure_reports import report_failed_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.workload.protocol import load_worker

IMPORT_PATH_NAME = "_DDP_HPC_IMPORT_PATH"
"""Name of a variable with the import paths of the user's code, for workers only, in the format of PYTHONPATH."""
SAFE_PATH_ENVIRON = {"PYTHONSAFEPATH": "ddp_hpc"}
"""Keeps Python 3.11 and newer from importing what lies in the working directory; the value tells it from one that the user has set."""
_MAX_TMPDIR_BYTES = 107 - 40
"""Bytes (unix(7)); Python's `multiprocessing` adds 32 (`/pymp-12345678/listener-12345678`), PyTorch's `torch_shm_manager` 34."""


def import_path_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide where a worker's Python imports from, before `make_users_code_importable`."""
    return {name: environ.get(name, "") for name in (IMPORT_PATH_NAME, "PYTHONSAFEPATH", "PYTHONPATH")}  # "" is unset


def make_users_code_importable(environ: MutableMapping[str, str]) -> list[str]:
    """Have this process import the user's code after Python's own modules, before all others, those of PYTHONPATH too.

    In PYTHONPATH itself, a `socket.py` of the user would be imported instead of Python's. Processes that this one starts are
    the user's, so they get the paths in PYTHONPATH. Returns the paths of the user's code.
    """
    if environ.get("PYTHONSAFEPATH") == SAFE_PATH_ENVIRON["PYTHONSAFEPATH"]:
        del environ["PYTHONSAFEPATH"]
    paths = [path for path in environ.pop(IMPORT_PATH_NAME, "").split(os.pathsep) if path]
    if paths:
        library, extensions = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platstdlib"))
        pythons = [
            path
            for path in sys.path
            if Path(path) in {library, extensions}
            or (Path(path).parent in {library, library.parent} and path.endswith(("lib-dynload", ".zip")))
        ]
        sys.path[:] = [*pythons, *paths, *(path for path in sys.path if path not in pythons)]
        environ[USERS_CODE] = os.pathsep.join(paths)
        path = os.pathsep.join([*paths, *filter(None, [environ.get("PYTHONPATH")])])
        environ.update(with_undo_record({"PYTHONPATH": path}, environ))
    return paths


def shorten_tmpdir(folder: ProbeFolder | None, environ: MutableMapping[str, str], *, says: bool) -> None:
    """Give this process, and those that it starts, a link to the directory for temporary files where its path is too long for sockets."""
    users = tempfile.gettempdir()
    if folder is None or len(os.fsencode(users)) <= _MAX_TMPDIR_BYTES:
        return
    link = folder.path / LINK
    link.symlink_to(users)
    tempfile.tempdir = str(link)
    environ.update(with_undo_record({"TMPDIR": tempfile.tempdir}, environ))
    if says:
        sys.stderr.write(
            f"note: TMPDIR is {link} in the workers, a link to {users}, whose path is too long for Unix sockets\n"
        )


@contextmanager
def exclude_imports_from_gc() -> Iterator[None]:
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


def run_worker(
    run: RunDir, name: str, environ: MutableMapping[str, str], *, attempt: int, listen_fd: int | None = None
) -> int:
    """Import the workers' module of this name, and run this rank to its end; return its exit code. Whatever ends it is reported."""
    rank = int(environ["RANK"])
    try:
        with exclude_imports_from_gc():
            worker = load_worker(name)
            worker.preload(str(run.path))
        return worker.main(str(run.path), environ, attempt=attempt, listen_fd=listen_fd)
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
        report_failed_start(run.rank_error(attempt, rank), error, rank=rank, log=run.console)
        return exit_code_of(error)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a process of a node, and end it without Python's shutdown, which prints what torch leaks."""
    code = exit_codes.FAILED
    try:
        code = main()
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    except BaseException:  # noqa: BLE001  the way out is the same for all
        traceback.print_exc()
    exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """End this process without Python's shutdown, in which torch can abort after all went well."""
    with suppress(Exception):  # the disk of the log may be full, and a script may put anything there
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
