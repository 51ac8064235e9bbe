"""What the ranks of a script tell each other before the script has made its process group."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.train import sealed_store
from ddp_hpc.train.attached.ranks import ScriptRanks, rank_info_of_script
from ddp_hpc.train.process_group import RankInfo
from ddp_hpc.train.sealed_store import SealedStore


def two_ranks(*, silence_s: float) -> list[ScriptRanks]:
    store = dist.HashStore()
    ranks = [
        ScriptRanks(
            RankInfo(
                rank=rank,
                local_rank=rank,
                world_size=2,
                local_world_size=2,
                node_rank=0,
                master_addr="127.0.0.1",
                master_port=1,
                is_store_hosted=True,
            )
        )
        for rank in range(2)
    ]
    for one in ranks:
        one._store = SealedStore(store, "token", silence_s=silence_s)
    return ranks


@pytest.mark.parametrize("is_reported", [True, False])
def test_ranks_wait_for_rank_zero_as_long_as_it_reports_that_it_works(
    is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_store, "HEARTBEAT_INTERVAL_S", 0.05)
    zero, other = two_ranks(silence_s=1.0)

    def reads_a_large_checkpoint() -> None:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            if is_reported:
                zero.send_heartbeat()
            time.sleep(0.02)
        zero.broadcast_from_rank_zero(7)

    reader = threading.Thread(target=reads_a_large_checkpoint)
    reader.start()
    if is_reported:
        assert other.broadcast_from_rank_zero(0) == 7
    else:
        with pytest.raises(WorkerError):
            other.broadcast_from_rank_zero(0)
    reader.join()


def test_a_script_that_starts_its_own_ranks_is_refused_in_a_run_of_ours_alone() -> None:
    alone = rank_info_of_script({})
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        assert ScriptRanks(alone).rank_info.world_size == 2
        assert ScriptRanks(rank_info_of_script({"WORLD_SIZE": "2"}), is_managed=True).rank_info.rank == 1
        with pytest.raises(ConfigError, match=r"2 ranks, .* started 1.*resources\.workers_per_node=2"):
            _ = ScriptRanks(alone, is_managed=True).rank_info
    finally:
        dist.destroy_process_group()
