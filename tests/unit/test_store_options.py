"""The store's options by the version of PyTorch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from ddp_hpc.cluster.rendezvous.store_options import listening_options


@pytest.mark.parametrize("version", ["2.6.0", "2.7.1+cu126", torch.__version__])
def test_a_store_listens_on_a_socket_by_the_options_of_any_version(version: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, options = server.getsockname()[1], listening_options(os.dup(server.fileno()), version)

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, **options)
    other = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
    other.set("key", "value")

    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("version", "is_told"),
    [("2.6.0", True), ("2.7.1+cu126", True), ("2.8.0", False), ("2.10.0a0+b4e4ee81d3.nv25.12", False), ("3.0", False)],
)
def test_only_before_2_8_the_other_store_is_asked_for(version: str, *, is_told: bool) -> None:
    assert ("use_libuv" in listening_options(3, version)) == is_told
