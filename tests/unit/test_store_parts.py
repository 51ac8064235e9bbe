"""Texts longer than PyTorch's store takes as one value."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from ddp_hpc.train.sealed_store import SealedStore


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_a_manifest_of_many_megabytes_comes_whole_through_the_store(store: dist.Store) -> None:
    text = "".join(f"{number:08d}," for number in range(1_100_000))
    SealedStore(store, "token").set("resume/0", text)

    assert SealedStore(store, "token").get("resume/0") == text
    assert SealedStore(store, "another").try_get("resume/0") is None


def test_a_part_that_somebody_else_has_written_is_not_taken(store: dist.Store) -> None:
    SealedStore(store, "token").set("resume/0", "x" * (9 << 20))
    store.set("resume/0/part-1", "forged")

    assert SealedStore(store, "token").try_get("resume/0") is None
