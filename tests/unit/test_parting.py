"""After the last checkpoint, rank zero stays until the others know of it: its process holds the store they read from."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from ddp_hpc.train import process_group
from tests.unit.made_state import make_group


def let_all_read(rank: int, store: HashStore) -> None:
    make_group(store, rank=rank, world_size=3).wait_until_all_read("read")


def test_rank_zero_leaves_when_the_last_of_the_others_has_read() -> None:
    store = HashStore()
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
    monkeypatch.setattr(process_group, "PARTING_WAIT_S", 0.1)

    let_all_read(0, HashStore())  # returns
