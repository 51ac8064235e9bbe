"""Nodes compare their clocks through the store."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_hpc.cluster.slow_ranks import clocks
from ddp_hpc.cluster.slow_ranks.clocks import ClockComparison
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_rendezvous_token


def environ(store: dist.TCPStore, *, rank: int, num_nodes: int = 2) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 2),
        "NODE_RANK": str(rank // 2),
        "WORLD_SIZE": str(2 * num_nodes),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }


_kept: list[dist.TCPStore] = []
"""The stores of all tests, which threads still ask when a test has ended."""


@pytest.fixture
def store() -> dist.TCPStore:
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    _kept.append(made)
    return made


def test_a_clock_that_is_a_minute_ahead_is_found_within_the_error_that_is_given(store: dist.TCPStore) -> None:
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    answerer = threading.Thread(target=clocks.answer_questions, args=(client,), daemon=True)
    answerer.start()
    asker = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)

    for _ in range(3):
        found = clocks.ask_offset(asker, lambda: time.time() + 60)
        assert abs(found.ahead_s - 60) <= found.error_s
        assert found.error_s > 0


def test_one_rank_of_each_other_node_asks_and_rank_zero_answers(store: dist.TCPStore, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_rendezvous_token(run.rendezvous_token(0))
    first, *others = (ClockComparison(run=run, attempt=0, environ=environ(store, rank=rank)) for rank in range(4))

    first.start()

    assert first.compare() is None
    assert others[0].compare() is None
    found = others[1].compare()
    assert found is not None
    assert abs(found.ahead_s) <= found.error_s
    assert others[2].compare() is None


def test_where_no_rank_answers_the_clock_is_unknown_and_nobody_waits_twice(
    store: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "ANSWER_S", 0.2)
    run = RunDir(tmp_path)
    write_rendezvous_token(run.rendezvous_token(0))
    alone = ClockComparison(run=run, attempt=0, environ=environ(store, rank=2))
    assert alone.compare() is None
    store.set(f"{os.getpid()}", "")
    assert alone.compare() is None
    on_one_node = ClockComparison(run=run, attempt=0, environ=environ(store, rank=0, num_nodes=1))
    on_one_node.start()
    assert on_one_node.compare() is None
