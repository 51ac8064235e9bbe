"""Whether workers may be forked from a process that has imported the user's recipe."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_hpc.base import processes


@contextmanager
def no_openmp_pool() -> Iterator[None]:
    """Keep OpenMP from starting threads, whatever number of threads is set meanwhile."""
    # No active parallel regions are allowed, so every region runs in the calling thread. The number of threads stays as it
    # is, so that `torch.set_num_threads` in a recipe takes effect in its workers.
    # https://gcc.gnu.org/onlinedocs/libgomp/omp_005fset_005fmax_005factive_005flevels.html
    openmp = ctypes.CDLL(None)
    try:
        before = openmp.omp_get_max_active_levels()
        openmp.omp_set_max_active_levels(0)
    except AttributeError:  # PyTorch uses no OpenMP library, or a hidden one: `why_not_fork` reports its threads
        yield
        return
    try:
        yield
    finally:
        openmp.omp_set_max_active_levels(before)


def why_not_fork(target: str) -> str:
    """Return why workers must not be forked from this process, for the job's log; empty if they may."""
    # https://pytorch.org/docs/stable/notes/multiprocessing.html#cuda-in-multiprocessing
    if torch.cuda.is_initialized():
        return (
            f"importing `recipe.target` {target!r} initialised CUDA, which a forked process cannot use. To have workers "
            "start faster, move what touches the GPU into the function"
        )
    # fork copies only the calling thread (https://man7.org/linux/man-pages/man2/fork.2.html). In the child, a lock that
    # another thread held is never released, and libgomp's OpenMP pool waits for ever for threads that do not exist.
    names = Counter(processes.threads_lost_by_fork())
    if not names:
        return ""
    threads = ", ".join(name if number == 1 else f"{number} of {name}" for name, number in sorted(names.items()))
    return (
        f"importing `recipe.target` {target!r} left threads running, which a forked process would not have ({threads}). To have "
        "workers start faster, move what starts them into the function"
    )
