"""Runs a function on rank zero first, so that data is downloaded once, not by every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_hpc.base.errors import ConfigError

T = TypeVar("T")


def rank_zero_first(make: Callable[[bool], T]) -> T:
    """Call `make(True)` on rank zero of the run and, when that is done, `make(False)` on every other rank.

    True means: this is the one that may download, unpack and write. Without a process group this process is it.
    The others wait for as long as the process group's timeout allows: `restart.hang_timeout_s`, on CPUs a minute more.

    Raises:
        ConfigError: on every rank, with the same message, if the call on rank zero raised.
    """
    if not dist.is_initialized():
        return make(True)
    if dist.get_rank() != 0:
        if (failure := _broadcast(None)) is not None:
            raise ConfigError(failure)
        return make(False)
    try:
        made = make(True)
    except Exception as error:
        failure = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        _broadcast(failure)  # otherwise the others would wait until they time out
        raise ConfigError(failure) from error
    _broadcast(None)
    return made


def _broadcast(failure: str | None) -> str | None:
    """Return rank zero's argument on every rank."""
    # As JSON in a tensor: PyTorch's own broadcast of objects unpickles what it receives, which may run code:
    # https://pytorch.org/docs/stable/distributed.html#collective-functions
    text = json.dumps(failure).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    body = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        body = torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(body, src=0)
    received: str | None = json.loads(bytes(body.tolist()))
    return received
