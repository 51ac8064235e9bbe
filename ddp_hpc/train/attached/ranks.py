"""The ranks of a user's script, which makes its own process group: how they agree without touching that group's traffic."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.process_group import RankInfo
from ddp_hpc.train.sealed_store import SealedStore, token_prefix

_STORE_TIMEOUT = timedelta(minutes=10)
_GROUP_TIMEOUT = timedelta(days=2)
"""How long ranks wait for each other in our group: longer than any evaluation or checksum of one rank alone. PyTorch's default for
gloo is 30 minutes, whatever timeout the script gives its own group. Real hangs end by `restart.hang_timeout_s`."""

_Reference = Callable[[], Any]


def rank_info_of_script(environ: Mapping[str, str]) -> RankInfo:
    """Return what the environment says of this rank; a process that no launcher started is a world of its own."""

    def number(name: str, default: int) -> int:
        return int(environ.get(name) or default)

    world_size = number("WORLD_SIZE", 1)
    return RankInfo(
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        node_rank=number("NODE_RANK", number("GROUP_RANK", 0)),
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=number("MASTER_PORT", 0),
        is_store_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=number("TORCHELASTIC_RESTART_COUNT", 0),
    )


class ScriptRanks:
    """All ranks of a script, as one of them sees them; `train.stop.Ranks`."""

    def __init__(self, rank_info: RankInfo, token: str = "", *, is_managed: bool = False) -> None:
        self._launched = rank_info
        self._is_managed = is_managed
        self._token = token
        self._info = rank_info
        # By weak references: what `destroy_process_group` lets go of must end there, with its threads, not with the process.
        self._info_of: _Reference = lambda: None
        self._world: _Reference = lambda: None
        self._group: _Reference = lambda: None
        self._store: SealedStore | None = None
        self._num_shared = 0

    @property
    def rank_info(self) -> RankInfo:
        """This rank; the script's process group counts where it has one, as with `torch.multiprocessing.spawn`."""
        if not has_group():
            return self._launched
        world = dist.group.WORLD
        if self._info_of() is not world:  # asked at each step
            num_ranks, num_launched = dist.get_world_size(), self._launched.world_size
            if self._is_managed and num_ranks > num_launched:
                raise ConfigError(
                    f"The script's process group has {num_ranks} ranks, but ddp-hpc has started {num_launched}: the script starts its "
                    "own ranks, which a stop would kill without a save. Have ddp-hpc start them: "
                    f"`resources.workers_per_node={num_ranks // self._launched.num_nodes}`."
                )
            self._info = replace(self._launched, rank=dist.get_rank(), world_size=num_ranks)
            self._info_of = weakref.ref(world)
        return self._info

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks, in place, and return it; all ranks call this in the same order."""
        if self.rank_info.world_size > 1:
            dist.all_reduce(values, group=self._own_group())
        return values

    def _own_group(self) -> Any:
        # A group beside the script's: what the ranks exchange here never mixes with what the script has in flight on its own,
        # and needs no GPU.
        if not has_group():
            raise ConfigError(
                f"This is rank {self._launched.rank} of {self._launched.world_size}, but the script has not called "
                "`torch.distributed.init_process_group` yet, so its ranks cannot agree. Call it first."
            )
        group = self._group()
        if group is None or self._world() is not dist.group.WORLD:
            group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
            self._world, self._group = weakref.ref(dist.group.WORLD), weakref.ref(group)
        return group

    def broadcast_from_rank_zero(self, value: int) -> int:
        """Return rank zero's number on every rank; all ranks call this in the same order.

        Before the script has made its process group, it goes through the store that the launcher hosts.
        """
        info = self.rank_info
        if info.world_size == 1:
            return value
        if has_group() or not info.is_store_hosted:
            return int(self.sum(torch.tensor([value if info.is_rank_zero else 0], dtype=torch.int64)).item())
        key, store = self._next_key, self._own_store()
        self._num_shared += 1
        if info.is_rank_zero:
            store.set(key, json.dumps(value))
            return value
        return int(json.loads(store.get(key)))

    @property
    def _next_key(self) -> str:
        return f"from-rank-zero-{self._num_shared + 1}"

    def send_heartbeat(self) -> None:
        """On rank zero: keep the others waiting in `broadcast_from_rank_zero`, as it still works on its number; nearly free if called often."""
        if self.rank_info.world_size > 1 and self.rank_info.is_store_hosted and not has_group():
            self._own_store().heartbeat(self._next_key)

    def _own_store(self) -> SealedStore:
        if self._store is None:
            info = self._launched
            store = dist.TCPStore(
                info.master_addr, info.master_port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
            )
            prefix = f"{token_prefix(self._token)}/attach-{info.restart}"
            self._store = SealedStore(dist.PrefixStore(prefix, store), self._token)
        return self._store


def has_group() -> bool:
    """Tell whether the script has made its process group."""
    return dist.is_available() and dist.is_initialized()
