"""Joins and leaves the process group; exchanges small values between ranks through its store."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.cluster.rendezvous.store_options import listening_options
from ddp_hpc.cluster.rendezvous.worker_env import SHARED_GPU
from ddp_hpc.train.sealed_store import SealedStore, token_prefix

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long to wait for the last rank to join."""
PARTING_WAIT_S = 30.0
"""How long rank zero waits until the others have read its last message."""
_GLOO_LAG_S = 60.0
FIRST_MISSING_CHECK_S = 25.0
"""How long rank zero waits before it looks who is missing: nodes rarely start in the same second."""
MISSING_CHECK_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank, world and rendezvous address of this process, with the names that PyTorch uses."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    is_store_hosted: bool = False
    """Whether torchrun's agent serves the store at that address."""
    restart: int = 0
    """How often torchrun has restarted the workers; its store still has the keys of those before."""
    shares_gpu: bool = False
    """Test-only: see `SHARED_GPU`."""

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)


def rank_info_from_environ(environ: Mapping[str, str]) -> RankInfo:
    """Read the variables that every PyTorch launcher sets."""
    try:
        numbers = {
            name.lower(): int(environ[name])
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
        }
        return RankInfo(
            master_addr=environ["MASTER_ADDR"],
            is_store_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            shares_gpu=SHARED_GPU in environ,
            **numbers,
        )
    except (KeyError, ValueError) as error:
        found = (
            f"{error.args[0]} is not set" if isinstance(error, KeyError) else f"one of them is not a number ({error})"
        )
        raise ConfigError(
            "A worker needs RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in its "
            f"environment, but {found}. Start it with `ddp-hpc submit`, or with a launcher that sets them, such as torchrun."
        ) from error


def choose_device(
    rank_info: RankInfo, gpus_per_node: int, *, visible: str | None = None, may_be_alone: bool = False
) -> torch.device:
    """Return this worker's device. `visible` is CUDA_VISIBLE_DEVICES, for `may_be_alone` see `device_index`."""
    if gpus_per_node == 0:
        return torch.device("cpu")
    if rank_info.shares_gpu:
        return torch.device("cuda", 0)
    count = torch.cuda.device_count()
    return torch.device("cuda", device_index(rank_info, count, visible=visible, may_be_alone=may_be_alone))


def set_cuda_device(device: torch.device) -> None:
    """Make a GPU that of the calling thread; each thread begins on GPU 0, and would open a second context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_index(rank_info: RankInfo, count: int, *, visible: str | None, may_be_alone: bool) -> int:
    """Return the index of this worker's GPU among those that it sees.

    With `may_be_alone`, Slurm started this worker as a task of its own and may show it only its own GPU. Otherwise all
    workers of a node see the same GPUs, and there must be one for each.
    """
    if count >= rank_info.local_world_size or (may_be_alone and count == 1):
        return rank_info.local_rank if rank_info.local_rank < count else 0
    if count == 0:
        raise ConfigError(
            f"This worker needs a GPU, but PyTorch {torch.__version__} sees none here (CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}). "
            "If `nvidia-smi` shows one, PyTorch's CUDA may be too new for the driver: `ddp-hpc doctor` compares them. Or set `resources.gpus_per_node=0` to train on CPUs."
        )
    num_mig = sum(name.strip().startswith("MIG-") for name in (visible or "").split(","))
    advice = (
        f"{num_mig} of these are MIG devices, each of which is one GPU, but CUDA shows a process only one of them. Give "
        "each worker its own: `launcher=srun` with `slurm.srun_args=[--gpus-per-task=1]`. Or train with one worker."
        if num_mig
        else "Ask for no more workers than there are GPUs, or for `resources.gpus_per_node=0` to train on CPUs."
    )
    raise ConfigError(
        f"This node has {rank_info.local_world_size} workers that need a GPU each, but PyTorch {torch.__version__} sees {count} GPUs "
        f"here (CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}). {advice}"
    )


@dataclass(frozen=True)
class Group:
    """The process group of the run, as one rank sees it."""

    rank_info: RankInfo
    device: torch.device
    store: SealedStore
    """For the main thread."""
    side_store: SealedStore
    """For the checkpoint writer's thread: a request that waits blocks all other requests on its connection."""

    def broadcast_through_store(
        self, key: str, value: Any = None, *, on_heartbeat: Callable[[], object] = lambda: None
    ) -> Any:
        """Return rank zero's value on every rank; `value` is JSON, and each key is used once.

        The others wait while rank zero sends heartbeats for the key (`SealedStore.heartbeat`), and call `on_heartbeat` for each.
        """
        if self.rank_info.is_rank_zero:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key, on_heartbeat=on_heartbeat))

    def gather_on_rank_zero(self, own: Any) -> list[Any]:
        """Return what all ranks pass as JSON, by rank, on rank zero; nothing on the others."""
        text = json.dumps(own).encode()
        length = torch.tensor([len(text)])
        dist.all_reduce(length, dist.ReduceOp.MAX)
        padded = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
        num_received = self.rank_info.world_size if self.rank_info.is_rank_zero else 0
        into = [torch.empty_like(padded) for _ in range(num_received)]
        dist.gather(padded, into or None)
        return [json.loads(one.numpy().tobytes()) for one in into]

    def gather_digests(self, own: str) -> list[str]:
        """Return the digest of each rank, by rank: 16 hex digits, which are exchanged as a signed number of 64 bits."""
        slots = torch.zeros(self.rank_info.world_size, dtype=torch.int64)
        slots[self.rank_info.rank] = int.from_bytes(bytes.fromhex(own), "big", signed=True)
        return [number.to_bytes(8, "big", signed=True).hex() for number in self.sum(slots).tolist()]

    def broadcast_last_word(self, key: str, text: str | None) -> str:
        """Return rank zero's text on every rank, when all have it: rank zero serves the store, so it must not leave before."""
        received = str(self.broadcast_through_store(key, text))
        self.sum(torch.zeros(1))
        return received

    def barrier_through_store(
        self,
        key: str,
        own: Any = None,
        *,
        on_heartbeat: Callable[[], object] = lambda: None,
        silence_s: float | None = None,
    ) -> list[Any]:
        """Wait until every rank has called this with the same key; return what all of them pass as JSON, by rank.

        It waits while the missing ranks send heartbeats for `barrier_key(key)`; without a heartbeat, for `silence_s` (default:
        the store's own).
        """
        if not self.rank_info.is_rank_zero:
            self.store.set(self.barrier_key(key), json.dumps(own))
            found: list[Any] = json.loads(self.store.get(key, on_heartbeat=on_heartbeat, silence_s=silence_s))
            return found

        # Rank zero waits for the others one after the other. Those that have arrived wait for rank zero alone, so it
        # passes the heartbeats of the missing ranks on to them.
        def pass_heartbeat_on() -> None:
            self.store.heartbeat(key)
            on_heartbeat()

        others = [
            self.store.get(f"{key}/{rank}", on_heartbeat=pass_heartbeat_on, silence_s=silence_s)
            for rank in range(1, self.rank_info.world_size)
        ]
        found = [own, *map(json.loads, others)]
        self.store.set(key, json.dumps(found))
        return found

    def barrier_key(self, key: str) -> str:
        """Return the key that this rank sets when it arrives, and sends heartbeats for until then."""
        return key if self.rank_info.is_rank_zero else f"{key}/{self.rank_info.rank}"

    def wait_until_all_read(self, key: str, *, store: SealedStore | None = None) -> None:
        """Call this on every rank that has read rank zero's last message. Rank zero waits for the others, and exits next."""
        # Rank zero's process serves the store: a rank that had not yet read the message would find no store.
        store = store or self.store
        if not self.rank_info.is_rank_zero:
            with suppress(RuntimeError):  # rank zero has exited: nothing is lost, this rank has read the message
                store.set(f"{key}/{self.rank_info.rank}", "")
            return
        deadline = time.monotonic() + PARTING_WAIT_S
        for rank in range(1, self.rank_info.world_size):
            with suppress(RuntimeError, WorkerError):  # that rank has died: its agent reports it
                store.get(f"{key}/{rank}", silence_s=max(deadline - time.monotonic(), 0.0))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks, in place, and return it."""
        if self.rank_info.world_size > 1:
            dist.all_reduce(values)
        return values


def join(  # noqa: PLR0913  a rank, and what it needs to join the others
    rank_info: RankInfo,
    device: torch.device,
    *,
    token: str = "",
    listen_fd: int | None = None,
    timeout_s: float = 1800.0,
    report_missing: Callable[[Sequence[int]], object] | None = None,
) -> Group:
    """Join the process group; a world of one is normal.

    All keys in the store begin with a prefix that only owners of the attempt's `token` can compute. `listen_fd` is a
    listening socket for rank zero's store: the launcher that chose the port keeps it, so that no other process takes it. On rank zero,
    `report_missing` is called with the ranks that the others wait for, if that takes long.
    """
    set_cuda_device(device)
    prefix = f"{token_prefix(token)}/start-{rank_info.restart}"
    store, side_store = (dist.PrefixStore(prefix, one) for one in _make_stores(rank_info, listen_fd))
    store.set(f"here/{rank_info.rank}", "")
    waiting: AbstractContextManager[None] = nullcontext()
    if report_missing is not None and rank_info.is_rank_zero and rank_info.world_size > 1:
        waiting = report_missing_ranks(
            lambda: dist.PrefixStore(prefix, _tcp_store(rank_info)), rank_info.world_size, report_missing
        )
    with waiting:
        dist.init_process_group(
            store=dist.PrefixStore("group", store),
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            **group_options(device, timeout_s, shares_gpu=rank_info.shares_gpu),
        )
    return Group(
        rank_info,
        device,
        SealedStore(dist.PrefixStore("main", store), token, silence_s=timeout_s),
        SealedStore(dist.PrefixStore("side", side_store), token, silence_s=timeout_s),
    )


def group_options(device: torch.device, timeout_s: float, *, shares_gpu: bool = False) -> dict[str, Any]:
    """Return the options of `init_process_group` for a rank's device.

    After `timeout_s` in a collective, NCCL aborts and dumps its flight recorder. gloo waits a minute longer, so that the watchdog of the
    hanging rank fires first and names the cause. With `device_id`, NCCL connects the ranks here rather than in the first collective of
    the training, so that a network that does not carry shows while they join. gloo comes first: it waits for all ranks, with a timeout.
    """
    if device.type == "cuda" and not shares_gpu:
        return {"backend": "cpu:gloo,cuda:nccl", "timeout": timedelta(seconds=timeout_s), "device_id": device}
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:gloo"
    return {"backend": backend, "timeout": timedelta(seconds=timeout_s + _GLOO_LAG_S)}


def _make_stores(rank_info: RankInfo, listen_fd: int | None) -> tuple[dist.Store, dist.Store]:
    if rank_info.world_size == 1:
        alone = dist.HashStore()
        return alone, alone
    is_host = rank_info.is_rank_zero and not rank_info.is_store_hosted
    listening = {} if listen_fd is None else listening_options(listen_fd, torch.__version__)
    # Two connections: a TCPStore client holds a lock while it waits for a key, which would block the other thread.
    return _tcp_store(rank_info, is_master=is_host, **listening), _tcp_store(rank_info)


def _tcp_store(rank_info: RankInfo, *, is_master: bool = False, **listening: Any) -> dist.TCPStore:
    place = rank_info.master_addr, rank_info.master_port, rank_info.world_size
    return dist.TCPStore(*place, is_master=is_master, timeout=JOIN_TIMEOUT, wait_for_workers=False, **listening)


@contextmanager
def report_missing_ranks(
    connect: Callable[[], dist.Store],
    world_size: int,
    report: Callable[[Sequence[int]], object],
    *,
    first_look_s: float = FIRST_MISSING_CHECK_S,
) -> Iterator[None]:
    """While the `with` block takes long, report which ranks have not reached the store, by their keys (`here/0`): none where all have, and still wait.

    `connect` opens another connection: a request that waits blocks all others on its own.
    """
    is_over = threading.Event()

    def look() -> None:
        if is_over.wait(first_look_s):
            return
        try:
            store = connect()
            before: list[int] | None = None
            while not is_over.is_set():
                missing = [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
                if missing != before:
                    report(missing)
                before = missing
                is_over.wait(MISSING_CHECK_S)
        except (RuntimeError, OSError):  # the store is gone, or the disk is full: joining itself says what is wrong
            return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(MISSING_CHECK_S)


def leave_process_group() -> None:
    """Leave the process group; call it when nothing refers to the DDP model any more."""
    # DDP's reducer uses the process group: collect it first, or torch may abort at exit.
    gc.collect()
    if dist.is_initialized():
        if torch.__version__ < "2.8":
            _groups_kept_alive.append(dist.group.WORLD)
        dist.destroy_process_group()


_groups_kept_alive: list[object] = []
"""Groups of an older PyTorch. When one is freed there, this thread holds the interpreter (GIL) and waits for gloo's threads, one of
which may wait for the interpreter to free a tensor: neither goes on. So they stay until the process ends."""
