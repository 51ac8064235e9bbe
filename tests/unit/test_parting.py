"""After the last checkpoint, rank zero stays until the others know of it: its process holds the store they read from."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddp_hpc.train.sealed_store import SealedStore
from ddp_hpc.train.state import checkpoint
from ddp_hpc.train.state.checkpoint import Checkpointer


def rank_of_three(rank: int, store: dist.Store) -> Any:
    place = SimpleNamespace(rank=rank, world_size=3, is_rank_zero=rank == 0)
    group = SimpleNamespace(rank_info=place, side_store=SealedStore(store, ""))
    return SimpleNamespace(_group=group, _key=lambda step, name: f"{step}/{name}")


def let_all_read(rank: int, store: dist.Store) -> None:
    Checkpointer._let_all_read(rank_of_three(rank, store), 7)


def test_rank_zero_leaves_when_the_last_of_the_others_has_read() -> None:
    store = dist.HashStore()
    leaving = threading.Thread(target=let_all_read, args=(0, store))
    leaving.start()

    let_all_read(1, store)
    leaving.join(0.3)
    stayed = leaving.is_alive()
    let_all_read(2, store)
    leaving.join(20)

    assert stayed
    assert not leaving.is_alive()


def test_rank_zero_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PARTING_S", 0.1)

    let_all_read(0, dist.HashStore())  # returns
