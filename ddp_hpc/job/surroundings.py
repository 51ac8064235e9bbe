"""What surrounds a worker, whoever starts it: variables that libraries read when they are loaded, and the way out."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


def torch_defaults(num_threads: int) -> dict[str, str]:
    """Return what PyTorch and its libraries should read unless the user says otherwise."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what `train.deterministic` needs of cuBLAS, read when it is loaded
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for GPUs must not initialise CUDA before the fork
    }


def import_by_pythonpath_alone() -> None:
    """Drop the working directory that `python -m` puts first: what lies there may be newer than the job's copy of it.

    Whoever wants it imported from has it in PYTHONPATH. (From Python 3.11 on, the option -P does the same.)
    """
    if not getattr(sys.flags, "safe_path", False) and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  # as Python has it
        del sys.path[0]


@contextmanager
def imports_for_good() -> Iterator[None]:
    """Keep the garbage collector from what is imported, now and later: modules stay until the process ends.

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
