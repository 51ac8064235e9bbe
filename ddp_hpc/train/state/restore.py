"""Restores the newest checkpoint that is not damaged: each rank reads and verifies a share, then all exchange what they read.

Rank zero offers a checkpoint through the store, with its manifest. Each rank reads its share of the bytes and reports through
the store. There a rank that makes progress sends heartbeats, so the others wait for it, however long a disk takes. Only after
all shares are verified do the ranks call collectives, which have a fixed timeout. A few megabytes at a time, each tensor is
written into the object that needs it, so no rank holds the state twice.

If a rank is asked to stop meanwhile, all ranks stop at the same point. A rank that reads ends its share with a report of it, and
rank zero's next message says so. In the exchange each part carries a byte that says so.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import socket
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, StopAskedError, UnreadableError
from ddp_hpc.base.patience import is_there, patiently
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store, shards
from ddp_hpc.run.checkpoints.checkpoint_store import ChunkReader, Manifest
from ddp_hpc.run.checkpoints.shards import RawTensor, StoredTensor, Stretch
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import newest_committed
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state.optimizer_state import SavedTensor
from ddp_hpc.train.state.training_state import Restoration, TrainingState
from ddp_hpc.train.stop import EarlyStop

log = logging.getLogger(__name__)

EXCHANGE_BYTES = 32 << 20
"""How many bytes all ranks together exchange at a time: the memory that an exchange needs on each."""

_TRAILER_BYTES = 16
"""Bytes that follow each part in an exchange: the first says whether its sender was asked to stop. As many as keep the parts
of all ranks at a multiple of any item's size."""

# The names must be those of `shards.ITEM_BYTES`, which knows the same dtypes without torch.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""PyTorch's dtypes by safetensors' names (https://github.com/huggingface/safetensors#format)."""
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Restorer:
    """Restores the state of one rank; made once in an attempt."""

    def __init__(
        self,
        run: RunDir,
        group: Group,
        *,
        attempt: int,
        on_progress: Callable[[], object],
        is_stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self._group = group
        self._attempt = attempt
        self._stop = EarlyStop(group, is_stop_asked)
        self._on_progress = on_progress
        """Called while this rank, or one that it waits for, makes progress."""

    def restore_newest(self, state: TrainingState, *, seed: int) -> int | None:
        """Restore the newest checkpoint that is not damaged, the same on all ranks; return its step, or None.

        Raises:
            ConfigError: if the run had checkpoints, and none can be used; or if the newest is of another model.
            StopAskedError: on all ranks, if one was asked to stop.
            UnreadableError: if the file system does not answer.
        """
        with without_garbage_collection():
            return self._restore_newest(state, seed=seed)

    def _restore_newest(self, state: TrainingState, *, seed: int) -> int | None:
        share: Share | None
        damaged: tuple[int, CorruptCheckpointError] | None = None
        for number in itertools.count():
            key, share = f"resume/{number}", None  # frees what was read of a damaged checkpoint before more is read
            offered = self._decide(key, partial(self._offer, key, damaged))
            if offered is None:
                return None
            path = checkpoint_names.checkpoint_path(self._run, offered["step"])
            manifest = checkpoint_store.parse_manifest(offered["manifest"].encode(), path)
            try:
                share = Share(self._group, manifest)
                headers = self._read(share, f"{key}/read")
                stored = shards.stored_tensors(path, manifest.shards, headers)
            except CorruptCheckpointError as error:
                damaged = manifest.step, error
                continue
            saved = {name: _saved_tensor(one) for name, one in stored.items()}
            restoration = Restoration(state, saved, manifest.state, seed=seed)
            share.pass_on(stored, restoration.into, on_progress=self._on_progress, is_stop_asked=self._stop.is_asked)
            restoration.finish()
            state.gradient_order = manifest.made.get("gradient_order")
            state.plan = dict(manifest.made.get("plan", {}))
            return manifest.step
        raise AssertionError  # the loop ends only by a return

    # --- which checkpoint: rank zero decides ---

    def _decide(self, key: str, decide: Callable[[], Any]) -> Any:
        """Return on all ranks what `decide` returns on rank zero.

        Raises:
            StopAskedError: on all ranks, if rank zero raised it.
        """
        decided: list[Any] = []
        if self._group.rank_info.is_rank_zero:
            with suppress(StopAskedError):
                decided = [decide()]
        decided = self._group.broadcast_through_store(key, decided, on_heartbeat=self._move)
        if not decided:
            raise StopAskedError("The ranks were asked to stop while they restored a checkpoint.")
        return decided[0]

    def _offer(self, key: str, damaged: tuple[int, CorruptCheckpointError] | None) -> dict[str, Any] | None:
        """Return the step and manifest of the newest checkpoint, or None if the run never had one; set aside a damaged one."""
        if damaged:
            self._set_aside(*damaged, key)
        with suppress(OSError):  # leftovers cost only space
            for name in ownership.remove_leftovers(self._run):
                log.info(
                    "removed %s, which a killed process left half-written; committed checkpoints are not affected", name
                )
        return patiently(
            str(self._run.checkpoints), partial(self._newest, key), on_wait=partial(self._send_heartbeat, key)
        )

    def _newest(self, key: str) -> dict[str, Any] | None:
        for step in reversed(checkpoint_names.committed_steps(self._run)):
            path = checkpoint_names.checkpoint_path(self._run, step)
            try:
                manifest = checkpoint_store.read_manifest(path)
                checkpoint_store.check_sizes(path, manifest, on_progress=partial(self._send_heartbeat, key))
            except CorruptCheckpointError as error:
                self._set_aside(step, error, key)
                continue
            return {"step": step, "manifest": checkpoint_store.manifest_bytes(manifest).decode()}
        self._refuse_to_begin_anew()
        return None

    def _set_aside(self, step: int, error: CorruptCheckpointError, key: str) -> None:
        """Rename a damaged checkpoint, while the others wait for `key`.

        Raises:
            FencedError: if a newer attempt has begun: by now, the directory may be its checkpoint of that step.
        """
        ownership.refuse_fenced(self._run, self._attempt)
        path = checkpoint_names.checkpoint_path(self._run, step)
        with suppress(FileNotFoundError):  # renamed already: NFS may repeat a rename whose answer was lost
            aside = patiently(
                str(path), partial(checkpoint_store.set_aside, path), on_wait=partial(self._send_heartbeat, key)
            )
            log.warning(
                "%s So the checkpoint was renamed to %s, and ddp-hpc looks for an older one to continue from.",
                error,
                aside.name,
            )

    def _refuse_to_begin_anew(self) -> None:
        """Return if the run never had a checkpoint.

        Raises:
            ConfigError: if it had some, and they are surely gone or damaged.
            UnreadableError: if nobody can know now: perhaps a file system is not mounted.
        """
        run, folder = self._run, self._run.checkpoints
        known_step, aside = newest_committed(run), checkpoint_names.steps_set_aside(run)
        if not is_there(run.config):
            raise UnreadableError(f"{run.path} does not exist; perhaps its file system is not mounted.")
        if not known_step and not aside:
            return
        if not aside and not ownership.has_claim(run, self._attempt):
            raise UnreadableError(
                f"{folder} has no checkpoint, but one of step {known_step} was committed: perhaps the file system does not show it "
                "now. If you deleted it, start over with `ddp-hpc submit --fresh`."
            )
        had = f"one of step {known_step} was committed" if known_step else "the run had some"
        damaged = f", and those of step {', '.join(map(str, aside))} are damaged (`step-*.corrupt-*`)" if aside else ""
        raise ConfigError(
            f"{folder} has no checkpoint that can be used, but {had}{damaged}. The run does not start over on its own. If you have "
            f"a backup of a directory `step-*`, copy it there and check it with `ddp-hpc checkpoints {run.word} --verify`. Or start "
            "over from step 0 with `ddp-hpc submit --fresh`."
        )

    # --- reading ---

    def _send_heartbeat(self, key: str) -> None:
        """Tell the ranks that wait for this one under `key` that it makes progress.

        Raises:
            StopAskedError: if a rank was asked to stop.
        """
        self._group.store.heartbeat(key)
        self._on_progress()
        self._stop.check()

    def _move(self) -> None:
        """Report progress of a rank that this one waits for; let rank zero know if this rank is asked to stop."""
        self._on_progress()
        self._stop.is_asked()

    def _read(self, share: Share, key: str) -> list[bytes]:
        """Read this rank's share; return the headers of all shards once every rank has verified its share.

        Raises:
            CorruptCheckpointError: on every rank, if one of them found its share damaged.
            StopAskedError: on every rank, if one of them was asked to stop.
            UnreadableError: on the rank whose file system does not answer; the others wait until the attempt ends.
        """
        path = checkpoint_names.checkpoint_path(self._run, share.manifest.step)
        moved = partial(self._send_heartbeat, self._group.barrier_key(key))
        report: dict[str, Any]
        try:
            for stretch, begin in zip(share.mine, share.starts[share.rank], strict=True):
                shard = share.manifest.shards[stretch.shard]
                with closing(ChunkReader(path / shard.file, shard, moved)) as reader:
                    for number in stretch.chunks:
                        some = share.chunk(stretch, begin, number)
                        patiently(str(path / shard.file), partial(reader.read, number, some), on_wait=moved)
            report = {"headers": share.header_lengths()}
        except CorruptCheckpointError as error:
            report = {"corrupt": str(error), "host": socket.gethostname()}
        except StopAskedError:
            report = {"stopped": True}
        reports = self._exchange_reports(key, report)
        if any("stopped" in one for one in reports):
            raise StopAskedError("The ranks were asked to stop while they read a checkpoint.")
        for rank, one in enumerate(reports):
            if "corrupt" in one:
                self._confirm(path, rank, one, key)
        lengths = {name: length for one in reports for name, length in one["headers"].items()}
        return [share.header(number, lengths[str(number)]) for number in range(len(share.manifest.shards))]

    def _confirm(self, path: Path, rank: int, report: Mapping[str, str], key: str) -> NoReturn:
        """Let rank zero read the checkpoint that `rank` found damaged; all ranks call this together.

        The memory, network card or stale cache of one node may change bytes. Then the files are sound, and must not be renamed.

        Raises:
            CorruptCheckpointError: if rank zero finds damage, too.
            UnreadableError: if it finds none.
        """
        key = f"{key}/confirmed"
        if self._decide(key, lambda: rank == 0 or self._is_damaged(path, key)):
            raise CorruptCheckpointError(report["corrupt"])
        raise UnreadableError(
            f"Rank {rank} on {report['host']} found damage that rank 0 does not find: {report['corrupt']} The files are sound, "
            f"so the memory, the network or the file system's cache of {report['host']} changes bytes. Exclude that node with "
            "`slurm.exclude`, and inform your cluster's support."
        )

    def _is_damaged(self, path: Path, key: str) -> bool:
        moved = partial(self._send_heartbeat, key)
        try:
            patiently(str(path), partial(checkpoint_store.verify, path, moved), on_wait=moved)
        except CorruptCheckpointError:
            return True
        return False

    def _exchange_reports(self, key: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the reports of all ranks; wait for the slowest reader as long as it sends heartbeats."""
        group = self._group
        if not group.rank_info.is_rank_zero:
            group.store.set(group.barrier_key(key), json.dumps(report))
            return list(group.broadcast_through_store(key, on_heartbeat=self._move))

        def pass_heartbeat_on() -> None:  # a stop comes as the report of a rank that reads
            group.store.heartbeat(key)
            self._move()

        others = [
            group.store.get(f"{key}/{rank}", on_heartbeat=pass_heartbeat_on)
            for rank in range(1, group.rank_info.world_size)
        ]
        return list(group.broadcast_through_store(key, [report, *map(json.loads, others)]))


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let Python search for no garbage in the `with` block; for the moments in which the table of a state is made."""
    # The table of 60,000 tensors is some hundred thousand small objects, which all stay until the end. Python would walk
    # all of them again and again, as their number grows, and find no garbage: half of a restore's time, and of what a save takes from the loop
    # (https://docs.python.org/3/library/gc.html#gc.set_threshold).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Share:
    """The part of a checkpoint that one rank reads, and how the others get it."""

    def __init__(self, group: Group, manifest: Manifest) -> None:
        self.manifest = manifest
        self.rank = group.rank_info.rank
        self._group = group
        self._dealt = shards.deal_stretches(manifest.shards, group.rank_info.world_size)
        self.starts = [_starts(stretches) for stretches in self._dealt]
        """Where each stretch begins in the buffer of the rank that reads it, for each rank."""
        self._lengths = [sum(one.end - one.begin for one in stretches) for stretches in self._dealt]
        self._content = torch.empty(self._lengths[self.rank], dtype=torch.uint8)
        self._view = memoryview(self._content.numpy())  # type: ignore[arg-type]  # numpy says so only from Python 3.12 on

    @property
    def mine(self) -> list[Stretch]:
        """The stretches that this rank reads."""
        return self._dealt[self.rank]

    def chunk(self, stretch: Stretch, begin: int, number: int) -> memoryview:
        """Return the part of the buffer for a chunk of a stretch; the stretch begins at `begin` in the buffer."""
        size = self.manifest.shards[stretch.shard].chunk_bytes
        first = begin + (number - stretch.chunks.start) * size
        return self._view[first : min(first + size, begin + stretch.end - stretch.begin)]

    def header_lengths(self) -> dict[str, int]:
        """Return the lengths of the headers that this rank has read, by the number of the shard."""
        return {
            str(stretch.shard): shards.header_length(self._view[begin : begin + stretch.end])
            for stretch, begin in zip(self.mine, self.starts[self.rank], strict=True)
            if stretch.begin == 0
        }

    def header(self, shard: int, length: int) -> bytes:
        """Return the header of a shard, which the rank that has read it sends; all ranks call this together."""
        owner, begin = next(
            (rank, begin)
            for rank, stretches in enumerate(self._dealt)
            for stretch, begin in zip(stretches, self.starts[rank], strict=True)
            if stretch.shard == shard and stretch.begin == 0
        )
        if self._group.rank_info.world_size == 1:
            return bytes(self._view[begin : begin + length])
        header = torch.empty(length, dtype=torch.uint8)
        if owner == self.rank:
            header.copy_(self._content[begin : begin + length])
        dist.broadcast(header, owner)
        return header.numpy().tobytes()

    def pass_on(
        self,
        stored: dict[str, StoredTensor],
        into: dict[str, Tensor],
        *,
        on_progress: Callable[[], object],
        is_stop_asked: Callable[[], bool],
    ) -> None:
        """Copy what all ranks have read into the tensors of `into`; all ranks call this together.

        Raises:
            StopAskedError: on all ranks, if one was asked to stop; some of the tensors are then copied.
        """
        targets = _Targets(into)
        segments = [_Segments(targets, one) for one in self._segments(stored, into)]
        for rank, begin, content in self._exchanged(is_stop_asked):
            segments[rank].put(begin, content)
            on_progress()

    def _segments(self, stored: dict[str, StoredTensor], wanted: dict[str, Tensor]) -> list[list[_Segment]]:
        """Return for each rank, in order, which bytes of its buffer belong into which tensor."""
        held: list[list[tuple[int, int, int, int]]] = [[] for _ in self.manifest.shards]
        for rank, stretches in enumerate(self._dealt):
            for stretch, start in zip(stretches, self.starts[rank], strict=True):
                held[stretch.shard].append((stretch.begin, stretch.end, rank, start))
        found: list[list[_Segment]] = [[] for _ in self._dealt]
        for name in wanted:
            for piece in stored[name].pieces:
                stretches_of_shard = held[piece.shard]
                for begin, at, length in stored[name].runs(piece):
                    first = bisect_right(stretches_of_shard, begin, key=lambda one: one[0]) - 1
                    for low, high, rank, start in stretches_of_shard[first:]:
                        if low >= begin + length:
                            break
                        low_cut, high_cut = max(low, begin), min(high, begin + length)
                        found[rank].append((start + low_cut - low, start + high_cut - low, name, at + low_cut - begin))
        return [sorted(segments) for segments in found]

    def _exchanged(self, is_stop_asked: Callable[[], bool]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield what each rank has read, in parts: the rank, where the part begins in its buffer, and the bytes.

        While most ranks have bytes left, each sends some at the same time: a ring over all networks. Few large files of format 1
        leave most ranks without any; then one rank after another sends, and may use all of `EXCHANGE_BYTES` at a time.
        """
        world_size, lengths = self._group.rank_info.world_size, self._lengths
        if world_size == 1:
            yield 0, 0, self._content
            return
        width = min(-(-EXCHANGE_BYTES // world_size), max(lengths))
        slot = -(-width // _TRAILER_BYTES) * _TRAILER_BYTES + _TRAILER_BYTES
        given = torch.zeros(slot, dtype=torch.uint8, device=self._group.device)
        taken = torch.empty(slot * world_size, dtype=torch.uint8, device=self._group.device)
        begin = 0
        while 2 * sum(length > begin for length in lengths) > world_size:
            own = self._content[begin : begin + width]
            given[: len(own)].copy_(own)
            given[-_TRAILER_BYTES] = is_stop_asked()
            dist.all_gather_into_tensor(taken, given)
            _stop_if_any(taken.view(world_size, slot)[:, -_TRAILER_BYTES])
            for rank, length in enumerate(lengths):
                if length > begin:
                    yield rank, begin, taken[rank * slot : rank * slot + min(width, length - begin)]
            begin += width
        for rank, length in enumerate(lengths):
            for first in range(begin, length, len(taken) - _TRAILER_BYTES):
                some = taken[: length - first + _TRAILER_BYTES]
                part = some[:-_TRAILER_BYTES]
                is_asked = is_stop_asked()  # on all ranks: the one that sends learns of a request from the store
                if rank == self.rank:
                    part.copy_(self._content[first : first + len(part)])
                    some[-_TRAILER_BYTES] = is_asked
                dist.broadcast(some, rank)
                _stop_if_any(some[-_TRAILER_BYTES])
                yield rank, first, part


def _stop_if_any(asked: Tensor) -> None:
    if asked.any():
        raise StopAskedError("The ranks were asked to stop while they exchanged a checkpoint.")


_Segment = tuple[int, int, str, int]
"""Bytes of a rank's buffer (from, to) that belong into a tensor: its name, and where in it."""


class _Targets:
    """The tensors that are filled with bytes; the parts of one may come in any order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._collected: dict[str, tuple[Tensor, int]] = {}
        """For a strided tensor, such as weights in channels_last: what came so far, and how many bytes are missing."""

    def put(self, name: str, at: int, some: Tensor, num_bytes: int) -> None:
        """Write `num_bytes` bytes of a tensor, from byte `at` on, counted as if it were contiguous."""
        tensor = self._tensors[name].detach()
        is_whole = num_bytes == tensor.nbytes
        if (
            is_whole and not some.storage_offset() % tensor.itemsize
        ):  # `view` needs the bytes at a multiple of the item's size
            tensor.copy_(some.view(tensor.dtype).view(tensor.shape))
        elif tensor.is_contiguous():
            _as_bytes(tensor)[at : at + num_bytes].copy_(some)
        else:
            self._collect(name, tensor, at, some)

    def _collect(self, name: str, tensor: Tensor, at: int, some: Tensor) -> None:
        known = self._collected.get(name)
        whole, num_left = known or (torch.empty(tensor.shape, dtype=tensor.dtype), tensor.nbytes)
        _as_bytes(whole)[at : at + len(some)].copy_(some)
        self._collected[name] = whole, num_left - len(some)
        if num_left == len(some):
            tensor.copy_(whole)
            del self._collected[name]


class _Segments:
    """Copies the bytes that come from one rank, in order, into the tensors."""

    def __init__(self, targets: _Targets, segments: Sequence[_Segment]) -> None:
        self._targets = targets
        self._segments = segments
        self._next = 0

    def put(self, begin: int, content: Tensor) -> None:
        """Copy `content`, the bytes of the rank's buffer from `begin` on, to where they belong."""
        end = begin + len(content)
        while self._next < len(self._segments):
            first, last, name, at = self._segments[self._next]
            low, high = max(first, begin), min(last, end)
            if low < high:
                self._targets.put(name, at + low - first, content[low - begin : high - begin], high - low)
            if last > end:
                return
            self._next += 1


def _starts(stretches: Sequence[Stretch]) -> list[int]:
    return [0, *itertools.accumulate(one.end - one.begin for one in stretches)][: len(stretches)]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _saved_tensor(stored: StoredTensor) -> SavedTensor:
    return SavedTensor(torch.Size(stored.shape), _TORCH_DTYPES[stored.dtype])


def to_torch(raw: RawTensor) -> Tensor:
    """Return a tensor that shares the memory of the bytes as read."""
    dtype = _TORCH_DTYPES[raw.dtype]
    if not len(raw.data):
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(raw.data, dtype=dtype).view(raw.shape)
