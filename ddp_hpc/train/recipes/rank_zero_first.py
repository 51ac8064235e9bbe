"""Runs a function on rank zero first, so that data is downloaded once, not by every rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_hpc.base.errors import ConfigError

T = TypeVar("T")
_MOST_BYTES = 1 << 16


def rank_zero_first(make: Callable[[bool], T]) -> T:
    """Call `make(True)` on rank zero of the run and, when that is done, `make(False)` on every other rank.

    True means: this is the one that may download, unpack and write. Without a process group this process is it.
    The others wait for as long as the recipe may take to build (`RestartSpec.build_timeout_s`).

    Raises:
        ConfigError: on every rank, with the same message, if the call on rank zero raised.
    """
    if not dist.is_initialized():
        return make(True)
    group = dist.new_group(backend="gloo", timeout=timedelta(days=2))  # the watchdog ends a wait that lasts too long
    if dist.get_rank() != 0:
        if failure := _share_failure("", group):
            raise ConfigError(failure)
        return make(False)
    try:
        made = make(True)
    except Exception as error:
        failure = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        _share_failure(failure, group)  # otherwise the others would wait until they time out
        raise ConfigError(failure) from error
    _share_failure("", group)
    return made


def _share_failure(failure: str, group: Any) -> str:
    """Return what rank zero passes on every rank of a group, which ends then; empty: it has not failed."""
    # As bytes: PyTorch's own broadcast of objects unpickles what it receives, which may run code:
    # https://pytorch.org/docs/stable/distributed.html#collective-functions
    text = failure.encode(errors="backslashreplace")[:_MOST_BYTES].ljust(_MOST_BYTES)
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(sent, src=0, group=group)
    dist.destroy_process_group(group)
    return bytes(sent.tolist()).decode(errors="ignore").rstrip()
