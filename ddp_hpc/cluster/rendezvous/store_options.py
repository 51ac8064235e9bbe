"""How PyTorch's store is asked to listen, by the version of PyTorch."""

from __future__ import annotations

from typing import Any

SOCKET_TORCH_VERSION = (2, 8)
"""The first PyTorch whose usual store (libuv) takes a socket that listens already. Before, only its older one does, which all clients can talk to."""


def listening_options(fd: int, torch_version: str) -> dict[str, Any]:
    """Return the options for the host of a store, so that it listens on the socket `fd`."""
    release = tuple(map(int, torch_version.split(".")[:2]))
    return {"master_listen_fd": fd} | ({} if release >= SOCKET_TORCH_VERSION else {"use_libuv": False})
