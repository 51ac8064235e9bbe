"""Joining the process group, and leaving it: who this process is, which device it has, how ranks talk on the side."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_hpc.errors import ConfigError
from ddp_hpc.train.sealed_store import SealedStore, prefix_of

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long to wait for the last rank to appear."""


_GLOO_LAG_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among the others, in PyTorch's words."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    is_store_hosted: bool = False
    """Whether somebody else holds the store at that address: torchrun's agent."""
    restart: int = 0
    """How often torchrun has started the workers again; its store remembers what the ones before said."""

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


def place_from_environ(environ: Mapping[str, str]) -> Place:
    """Read the variables every PyTorch launcher sets.

    Raises:
        ConfigError: where one is missing or no number.
    """
    try:
        numbers = {
            name.lower(): int(environ[name])
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
        }
        return Place(
            master_addr=environ["MASTER_ADDR"],
            is_store_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            **numbers,
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"A worker needs RANK, WORLD_SIZE and their kin in its environment, but {error!r}."
        ) from error


def choose_device(
    place: Place, gpus_per_node: int, *, visible: str | None = None, may_be_alone: bool = False
) -> torch.device:
    """Return this worker's device. `visible` is CUDA_VISIBLE_DEVICES, for `may_be_alone` see `device_index`.

    Raises:
        ConfigError: where GPUs are asked for and PyTorch sees too few.
    """
    if gpus_per_node == 0:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    return torch.device("cuda", device_index(place, count, visible=visible, may_be_alone=may_be_alone))


def device_index(place: Place, count: int, *, visible: str | None, may_be_alone: bool) -> int:
    """Return which of the GPUs that this process sees is its own.

    With `may_be_alone`, Slurm has started this worker by itself and may show it just its own GPU. Else all workers of a
    node see the same ones, and one GPU for several is too few.

    Raises:
        ConfigError: where there are too few for the workers of this node.
    """
    if count >= place.local_world_size or (may_be_alone and count == 1):
        return place.local_rank if place.local_rank < count else 0
    num_mig = sum(name.strip().startswith("MIG-") for name in (visible or "").split(","))
    advice = (
        f"{num_mig} of these are MIG devices, each of which is one GPU, but CUDA shows a process only one of them. Give "
        "each worker one of its own: `launcher=srun` with `slurm.srun_args=[--gpus-per-task=1]`. Or train with one worker."
        if num_mig
        else "Ask for no more workers than there are GPUs, or for `resources.gpus_per_node=0`."
    )
    raise ConfigError(
        f"This node has {place.local_world_size} workers with a GPU each, but PyTorch {torch.__version__} sees {count} GPUs "
        f"here (CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}). {advice}"
    )


@dataclass(frozen=True)
class Group:
    """The ranks of the run, joined."""

    place: Place
    device: torch.device
    store: SealedStore
    """Small texts between ranks, for the main thread."""
    side_store: SealedStore
    """The same for the checkpoint writer's thread: a waiting client blocks all users of its connection."""

    def share(self, key: str, value: Any = None, *, on_sign: Callable[[], object] = lambda: None) -> Any:
        """Return, on every rank, the JSON value that rank zero gave under a key used once.

        The others wait as long as rank zero signs the key (`SealedStore.sign`), and call `on_sign` each time.
        """
        if self.place.is_rank_zero:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key, on_sign=on_sign))

    def meet(self, key: str, *, on_sign: Callable[[], object] = lambda: None, silence_s: float | None = None) -> None:
        """Wait until every rank has come here, as long as those who have not yet sign `arrival_key(key)`.

        Without their signs it waits for `silence_s`, or the store's own patience.
        """
        if not self.place.is_rank_zero:
            self.store.set(self.arrival_key(key), "")
            self.store.get(key, on_sign=on_sign, silence_s=silence_s)
            return

        def go_on() -> None:
            on_sign()
            self.store.sign(key)

        for rank in range(1, self.place.world_size):
            self.store.get(f"{key}/{rank}", on_sign=go_on, silence_s=silence_s)
        self.store.set(key, "")

    def arrival_key(self, key: str) -> str:
        """Return what this rank sets, and signs before, when it comes to a meeting."""
        return key if self.place.is_rank_zero else f"{key}/{self.place.rank}"

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks, in place, and return it."""
        if self.place.world_size > 1:
            dist.all_reduce(values)
        return values


def join(
    place: Place, device: torch.device, *, token: str = "", listen_fd: int | None = None, timeout_s: float = 1800.0
) -> Group:
    """Meet the other ranks; a world of one is normal. All keys begin with what only who has the attempt's `token` knows.

    `listen_fd` is rank zero's socket, bound and listening by whoever chose the port, so that nobody can take it. After
    `timeout_s` in a collective, NCCL writes down what it waits for (its flight recorder); gloo fails a minute later, so
    that the watchdog of the rank it waits for comes first.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    prefix = f"{prefix_of(token)}/start-{place.restart}"
    store, side_store = (dist.PrefixStore(prefix, one) for one in _connect(place, listen_fd))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s + (0 if device.type == "cuda" else _GLOO_LAG_S)),
    )
    return Group(
        place,
        device,
        SealedStore(dist.PrefixStore("main", store), token, silence_s=timeout_s),
        SealedStore(dist.PrefixStore("side", side_store), token, silence_s=timeout_s),
    )


def _connect(place: Place, listen_fd: int | None) -> tuple[dist.Store, dist.Store]:
    if place.world_size == 1:
        alone = dist.HashStore()
        return alone, alone
    options: dict[str, Any] = {
        "host_name": place.master_addr,
        "port": place.master_port,
        "world_size": place.world_size,
        "timeout": JOIN_TIMEOUT,
        "wait_for_workers": False,
    }
    listening: dict[str, Any] = {} if listen_fd is None else {"master_listen_fd": listen_fd}
    store = dist.TCPStore(is_master=place.is_rank_zero and not place.is_store_hosted, **options, **listening)
    return store, dist.TCPStore(is_master=False, **options)


def leave() -> None:
    """Leave the group. Call when nothing holds the model any more: torch can abort at exit otherwise."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
