"""Whether workers may be forked from a process that has imported the user's recipe.

A fork takes over one thread alone. OpenMP's pool (libgomp) then waits for ever for threads that are not there, a lock
that another thread holds is never released, and CUDA does not work at all. So nothing may start them before.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_hpc import processes


@contextmanager
def no_openmp_pool() -> Iterator[None]:
    """Have OpenMP compute with the calling thread alone, whatever number of threads is asked for meanwhile.

    The numbers stay as they are, so that what a recipe sets by `torch.set_num_threads` holds in its workers. Where
    PyTorch's OpenMP is not to be found, nothing changes: `why_not_fork` finds the threads.
    """
    openmp = ctypes.CDLL(None)
    try:
        before = openmp.omp_get_max_active_levels()
        openmp.omp_set_max_active_levels(0)
    except AttributeError:
        yield
        return
    try:
        yield
    finally:
        openmp.omp_set_max_active_levels(before)


def why_not_fork(target: str) -> str:
    """Return why workers must not be forked from this process, in words for the job's log; nothing where they may."""
    if torch.cuda.is_initialized():
        return (
            f"importing `recipe.target` {target!r} initialised CUDA, which a forked process cannot use. To have workers "
            "start faster, move what touches the GPU into the function"
        )
    names = Counter(processes.lasting_threads())
    if not names:
        return ""
    told = ", ".join(name if number == 1 else f"{number} of {name}" for name, number in sorted(names.items()))
    return (
        f"importing `recipe.target` {target!r} left threads running, which a forked process would not have ({told}). To have "
        "workers start faster, move what starts them into the function"
    )
