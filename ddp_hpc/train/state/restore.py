"""Bringing back the newest checkpoint that holds: each rank reads and verifies a share, then all exchange what they read.

Rank zero offers a checkpoint through the store, with its manifest. Each rank reads its share of the bytes and reports;
these reports go through the store as well, where a rank that gets on keeps the others patient, however long a disk
takes. Only when all shares hold do the ranks meet in collectives, which have a fixed patience. There each tensor is
written into the object that needs it, a few megabytes at a time, so that no rank holds the state twice.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hpc import checkpoint_names, checkpoint_store, ownership, shards
from ddp_hpc.checkpoint_store import ChunkReader, Manifest
from ddp_hpc.errors import ConfigError, CorruptCheckpointError, FencedError, UnreadableError
from ddp_hpc.patience import is_there, patiently
from ddp_hpc.records import newest_committed
from ddp_hpc.run_dir import RunDir
from ddp_hpc.shards import RawTensor, StoredTensor, Stretch
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state.training_state import Restoration, SavedTensor, TrainingState

log = logging.getLogger(__name__)

EXCHANGE_BYTES = 32 << 20
"""How much the ranks exchange at a time, all together: the memory that an exchange needs on each."""

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
    """Brings back the state of one rank; made once an attempt."""

    def __init__(self, run: RunDir, group: Group, *, attempt: int, on_progress: Callable[[], object]) -> None:
        self._run = run
        self._group = group
        self._attempt = attempt
        self._on_progress = on_progress
        """Called while this rank, or one that it waits for, gets on."""

    def restore_newest(self, state: TrainingState, *, seed: int) -> int | None:
        """Restore the newest checkpoint that verifies, the same on all ranks; return its step, or None.

        Raises:
            ConfigError: where the run had checkpoints, and none can be used; or the newest is of another model.
            UnreadableError: where the file system does not say.
        """
        is_rank_zero = self._group.rank_info.is_rank_zero
        share: Share | None
        for number in itertools.count():
            key, share = f"resume/{number}", None  # what was read of a damaged checkpoint is released first
            offered = self._offer(key) if is_rank_zero else None
            offered = self._group.broadcast_through_store(key, offered, on_heartbeat=self._on_progress)
            if offered is None:
                return None
            path = checkpoint_names.checkpoint_path(self._run, offered["step"])
            manifest = checkpoint_store.parse_manifest(offered["manifest"].encode(), path)
            try:
                share = Share(self._group, manifest)
                headers = self._read(share, f"{key}/read")
                stored = shards.stored_tensors(path, manifest.shards, headers)
            except CorruptCheckpointError as error:
                if is_rank_zero:
                    self._set_aside(manifest.step, error, f"resume/{number + 1}")
                continue
            saved = {name: _saved_tensor(one) for name, one in stored.items()}
            restoration = Restoration(state, saved, manifest.state, seed=seed)
            share.pass_on(stored, restoration.into, on_progress=self._on_progress)
            restoration.finish()
            return manifest.step
        raise AssertionError

    # --- which checkpoint: rank zero's task ---

    def _offer(self, key: str) -> dict[str, Any] | None:
        """Return the step and manifest of the newest checkpoint, or None where the run never had one."""
        with suppress(OSError):  # what is left over costs no more than space
            for name in ownership.remove_leftovers(self._run):
                log.info("removed %s, which a killed writer left", name)
        return patiently(str(self._run.checkpoints), partial(self._newest, key), on_wait=partial(self._get_on, key))

    def _newest(self, key: str) -> dict[str, Any] | None:
        for step in reversed(checkpoint_names.committed_steps(self._run)):
            try:
                manifest = checkpoint_store.read_manifest(checkpoint_names.checkpoint_path(self._run, step))
            except CorruptCheckpointError as error:
                self._set_aside(step, error, key)
                continue
            return {"step": step, "manifest": checkpoint_store.manifest_bytes(manifest).decode()}
        self._refuse_to_begin_anew()
        return None

    def _set_aside(self, step: int, error: CorruptCheckpointError, key: str) -> None:
        """Rename a damaged checkpoint, while the others wait for `key`; one that cannot be read stays.

        Raises:
            FencedError: where a newer attempt has begun, whose checkpoint of that step this may be by now.
        """
        if ownership.is_fenced(self._run, self._attempt):
            raise FencedError(f"A newer attempt of {self._run.name} has begun, so attempt {self._attempt} stops.")
        path = checkpoint_names.checkpoint_path(self._run, step)
        with suppress(FileNotFoundError):  # renamed already: NFS may repeat a rename whose answer was lost
            aside = patiently(str(path), partial(checkpoint_store.set_aside, path), on_wait=partial(self._get_on, key))
            log.warning("%s The run does not use it (%s) and tries an older one.", error, aside.name)

    def _refuse_to_begin_anew(self) -> None:
        """Return where the run never had a checkpoint.

        Raises:
            ConfigError: where it had some, and they are surely gone or damaged.
            UnreadableError: where they cannot be seen: perhaps a mount is away.
        """
        run, folder = self._run, self._run.checkpoints
        known_step, aside = newest_committed(run), checkpoint_names.steps_set_aside(run)
        if not is_there(run.config):
            raise UnreadableError(f"{run.path} is not there; perhaps its file system is away.")
        if not known_step and not aside:
            return
        if not aside and not ownership.has_claim(run, self._attempt):
            raise UnreadableError(f"{folder} has no checkpoint, but one of step {known_step} was committed.")
        told = f"one of step {known_step} was committed" if known_step else "it had some"
        damaged = f", and those of step {', '.join(map(str, aside))} are damaged (`step-*.corrupt-*`)" if aside else ""
        raise ConfigError(
            f"{folder} has no checkpoint that can be used, but {told}{damaged}. The run does not begin anew by itself. Bring "
            f"the files back and look with `ddp-hpc checkpoints {run.name} --verify`, or start over from step 0 with "
            "`ddp-hpc submit --fresh`."
        )

    # --- reading ---

    def _get_on(self, key: str) -> None:
        """Say that this rank, which others wait for under `key`, gets on."""
        self._group.store.heartbeat(key)
        self._on_progress()

    def _read(self, share: Share, key: str) -> list[bytes]:
        """Read this rank's share; return the headers of all shards once every rank's share holds.

        Raises:
            CorruptCheckpointError: on every rank, where one of them found its share damaged.
            UnreadableError: on the rank whose file system does not say; the others wait until the attempt ends.
        """
        path = checkpoint_names.checkpoint_path(self._run, share.manifest.step)
        moved = partial(self._get_on, self._group.barrier_key(key))
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
        reports = self._exchange_reports(key, report)
        for rank, one in enumerate(reports):
            if "corrupt" in one:
                self._confirm(path, rank, one, key)
        lengths = {name: length for one in reports for name, length in one["headers"].items()}
        return [share.header(number, lengths[str(number)]) for number in range(len(share.manifest.shards))]

    def _confirm(self, path: Path, rank: int, report: Mapping[str, str], key: str) -> NoReturn:
        """Have rank zero read the checkpoint that `rank` found damaged; all ranks call this together.

        The memory, network card or stale cache of one node may change bytes: then the files hold, and must not be renamed.

        Raises:
            CorruptCheckpointError: where rank zero finds damage, too.
            UnreadableError: where it finds none.
        """
        key = f"{key}/confirmed"
        is_damaged: bool | None = None
        if self._group.rank_info.is_rank_zero:
            is_damaged = rank == 0 or self._is_damaged(path, key)
        if self._group.broadcast_through_store(key, is_damaged, on_heartbeat=self._on_progress):
            raise CorruptCheckpointError(report["corrupt"])
        raise UnreadableError(
            f"Rank {rank} on {report['host']} found damage that rank 0 does not find: {report['corrupt']} The files are in order, "
            f"so the memory, the network or the file system's cache of {report['host']} changes bytes. Exclude that node with "
            "`slurm.exclude`, and tell your cluster's support."
        )

    def _is_damaged(self, path: Path, key: str) -> bool:
        moved = partial(self._get_on, key)
        try:
            patiently(str(path), partial(checkpoint_store.verify, path, moved), on_wait=moved)
        except CorruptCheckpointError:
            return True
        return False

    def _exchange_reports(self, key: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the reports of all ranks, however long the slowest reads."""
        group = self._group
        if not group.rank_info.is_rank_zero:
            group.store.set(group.barrier_key(key), json.dumps(report))
            return list(group.broadcast_through_store(key, on_heartbeat=self._on_progress))
        get_on = partial(self._get_on, key)
        others = [
            group.store.get(f"{key}/{rank}", on_heartbeat=get_on) for rank in range(1, group.rank_info.world_size)
        ]
        return list(group.broadcast_through_store(key, [report, *map(json.loads, others)]))


class Share:
    """What one rank reads of a checkpoint, and how it comes to the others."""

    def __init__(self, group: Group, manifest: Manifest) -> None:
        self.manifest = manifest
        self.rank = group.rank_info.rank
        self._group = group
        self._dealt = shards.deal_stretches(manifest.shards, group.rank_info.world_size)
        self.starts = [_starts(stretches) for stretches in self._dealt]
        """Where each stretch of each rank begins in what that rank reads."""
        self._lengths = [sum(one.end - one.begin for one in stretches) for stretches in self._dealt]
        self._content = torch.empty(self._lengths[self.rank], dtype=torch.uint8)
        self._view = memoryview(self._content.numpy())  # type: ignore[arg-type]  # numpy says so only from Python 3.12 on

    @property
    def mine(self) -> list[Stretch]:
        """What this rank reads."""
        return self._dealt[self.rank]

    def chunk(self, stretch: Stretch, begin: int, number: int) -> memoryview:
        """Return the place for a chunk of a stretch whose place begins at `begin`."""
        size = self.manifest.shards[stretch.shard].chunk_bytes
        first = begin + (number - stretch.chunks.start) * size
        return self._view[first : min(first + size, begin + stretch.end - stretch.begin)]

    def header_lengths(self) -> dict[str, int]:
        """Return the lengths of the headers that this rank has read, by the shard's number."""
        return {
            str(stretch.shard): shards.header_length(self._view[begin : begin + stretch.end])
            for stretch, begin in zip(self.mine, self.starts[self.rank], strict=True)
            if stretch.begin == 0
        }

    def header(self, shard: int, length: int) -> bytes:
        """Return the header of a shard from the rank that has read it; all ranks call this together."""
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
        self, stored: dict[str, StoredTensor], into: dict[str, Tensor], *, on_progress: Callable[[], object]
    ) -> None:
        """Put what all ranks have read into the tensors of `into`; all ranks call this together."""
        targets = {name: _Target(tensor, stored[name].num_bytes) for name, tensor in into.items()}
        segments = [_Segments(targets, one) for one in self._segments(stored, into)]
        for rank, begin, content in self._exchanged():
            segments[rank].put(begin, content)
            on_progress()

    def _segments(self, stored: dict[str, StoredTensor], wanted: dict[str, Tensor]) -> list[list[_Segment]]:
        """Return for each rank which of its bytes belong where, in order."""
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

    def _exchanged(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield what each rank has read, some at a time: its rank, where that begins in its share, and the bytes.

        As long as most ranks have something left, all give some at once: a ring over all networks. Few large files of
        format 1 leave most ranks without; then one after another sends.
        """
        world_size, lengths = self._group.rank_info.world_size, self._lengths
        if world_size == 1:
            yield 0, 0, self._content
            return
        width = min(-(-EXCHANGE_BYTES // world_size), max(lengths))
        given = torch.zeros(width, dtype=torch.uint8, device=self._group.device)
        taken = torch.empty(width * world_size, dtype=torch.uint8, device=self._group.device)
        for begin in range(0, max(lengths), width):
            have_some = [rank for rank in range(world_size) if lengths[rank] > begin]
            own = self._content[begin : begin + width]
            given[: len(own)].copy_(own)
            if 2 * len(have_some) > world_size:
                dist.all_gather_into_tensor(taken, given)
            for rank in have_some:
                some = taken[rank * width : (rank + 1) * width]
                if 2 * len(have_some) <= world_size:
                    some = given if rank == self.rank else some
                    dist.broadcast(some, rank)
                yield rank, begin, some[: lengths[rank] - begin]


_Segment = tuple[int, int, str, int]
"""Bytes of a rank's share (from, to) that belong into a tensor: its name, and where in it."""


class _Target:
    """A tensor that is filled with bytes, in any order."""

    def __init__(self, tensor: Tensor, num_bytes: int) -> None:
        self._tensor = tensor.detach()
        self._num_left = num_bytes
        self._bytes = _as_bytes(self._tensor) if tensor.is_contiguous() else None
        self._beside: Tensor | None = None

    def put(self, at: int, some: Tensor) -> None:
        """Write some bytes of the tensor, counted as if it were contiguous."""
        if self._bytes is not None:
            self._bytes[at : at + len(some)].copy_(some)
            return
        if self._beside is None:  # as for weights in channels_last: put together beside, and copied when complete
            self._beside = torch.empty(self._tensor.shape, dtype=self._tensor.dtype)
        _as_bytes(self._beside)[at : at + len(some)].copy_(some)
        self._num_left -= len(some)
        if not self._num_left:
            self._tensor.copy_(self._beside)
            self._beside = None


class _Segments:
    """What comes from one rank, in order."""

    def __init__(self, targets: dict[str, _Target], segments: Sequence[_Segment]) -> None:
        self._targets = targets
        self._segments = segments
        self._next = 0

    def put(self, begin: int, content: Tensor) -> None:
        """Put the bytes of the rank's share from `begin` on where they belong."""
        end = begin + len(content)
        while self._next < len(self._segments):
            first, last, name, at = self._segments[self._next]
            low, high = max(first, begin), min(last, end)
            if low < high:
                self._targets[name].put(at + low - first, content[low - begin : high - begin])
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
    """Return a tensor that shares the bytes as read."""
    dtype = _TORCH_DTYPES[raw.dtype]
    if not len(raw.data):
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(raw.data, dtype=dtype).view(raw.shape)
