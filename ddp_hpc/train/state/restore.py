"""Restores the newest checkpoint that is not damaged: each rank reads and verifies all of it, and then all say what they found.

Rank zero offers a checkpoint through the store. Each rank reads its files, which the page cache of a node keeps for all its ranks, a
chunk at a time into one small buffer. Once a chunk is verified, its bytes are written into the objects that need them, so no rank
holds the state twice. Then each reports through the store, and only when every rank has verified all of it is it taken over. A
rank that makes progress sends heartbeats there, so the others wait for it, however long a disk takes.

If a rank is asked to stop meanwhile, it ends its reading with a report of that, and all ranks stop.
"""

from __future__ import annotations

import gc
import itertools
import logging
import socket
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, StopAskedError, UnreadableError
from ddp_hpc.base.patience import await_answer, is_there
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store, shards
from ddp_hpc.run.checkpoints.checkpoint_store import ChunkReader, Manifest
from ddp_hpc.run.checkpoints.shards import RawTensor, StoredTensor
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import newest_committed_step
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state.optimizer_state import SavedTensor
from ddp_hpc.train.state.training_state import DTYPE_NAMES, Restoration, TrainingState
from ddp_hpc.train.stop import EarlyStop

log = logging.getLogger(__name__)

_DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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


@dataclass
class Restorer:
    """Restores the state of one rank; made once in an attempt."""

    run: RunDir
    group: Group
    _: KW_ONLY
    attempt: int
    on_progress: Callable[[], object]
    """Called while this rank, or one that it waits for, makes progress."""
    stop: EarlyStop

    @without_garbage_collection()
    def restore_newest(self, state: TrainingState, *, seed: int) -> int | None:
        """Restore the newest checkpoint that is not damaged, the same on all ranks; return its step, or None."""
        damaged: tuple[int, str] | None = None
        for number in itertools.count():
            key = f"resume/{number}"
            decided: list[Any] = []
            if self.group.rank_info.is_rank_zero:
                with suppress(StopAskedError):
                    decided = [self._choose_checkpoint(key, damaged)]
            decided = self.group.broadcast_through_store(key, decided, on_heartbeat=self._report_progress)
            if not decided:
                raise StopAskedError("The ranks were asked to stop while they restored a checkpoint.")
            (offered,) = decided
            if offered is None:
                return None
            try:
                self._restore_step(f"{key}/read", state, seed=seed, **offered)
            except CorruptCheckpointError as error:
                damaged = offered["step"], str(error)  # not the error, which would keep what was read in memory
                continue
            return int(offered["step"])
        raise AssertionError  # the loop ends only by a return

    # --- which checkpoint: rank zero decides ---

    def _choose_checkpoint(self, key: str, damaged: tuple[int, str] | None) -> dict[str, Any] | None:
        """Return the step of the newest checkpoint and its manifest's checksum, or None if the run never had one; set aside a damaged one."""
        if damaged:
            self._set_aside(*damaged, key)
        with suppress(OSError):  # leftovers cost only space
            for name in ownership.remove_leftovers(self.run):
                log.info(
                    "removed %s, which a killed process left half-written; committed checkpoints are not affected", name
                )
        moved = partial(self._send_heartbeat, key)
        return await_answer(str(self.run.checkpoints), partial(self._newest, key, damaged), on_wait=moved)

    def _newest(self, key: str, damaged: tuple[int, str] | None) -> dict[str, Any] | None:
        for step in reversed(checkpoint_names.committed_steps(self.run)):
            path = checkpoint_names.checkpoint_path(self.run, step)
            try:
                manifest = checkpoint_store.read_manifest(path)
                checkpoint_store.check_sizes(path, manifest, on_progress=partial(self._send_heartbeat, key))
            except CorruptCheckpointError as error:
                self._set_aside(step, str(error), key)
                continue
            return {"step": step, "checksum": checkpoint_store.manifest_checksum(manifest)}
        self._refuse_to_begin_anew(damaged)
        return None

    def _set_aside(self, step: int, found: str, key: str) -> None:
        """Rename a damaged checkpoint, while the others wait for `key`."""
        ownership.refuse_fenced(self.run, self.attempt)  # by now, the directory may be a newer attempt's
        path, moved = checkpoint_names.checkpoint_path(self.run, step), partial(self._send_heartbeat, key)
        with suppress(FileNotFoundError):  # renamed already: NFS may repeat a rename whose answer was lost
            aside = await_answer(str(path), partial(checkpoint_store.set_checkpoint_aside, path), on_wait=moved)
            log.warning(
                "%s So the checkpoint was renamed to %s, and ddp-hpc looks for an older one to continue from.",
                found,
                aside.name,
            )

    def _refuse_to_begin_anew(self, damaged: tuple[int, str] | None) -> None:
        """Refuse where the run had a checkpoint: with ConfigError if it is surely gone or damaged, UnreadableError if it may come back."""
        run, folder = self.run, self.run.checkpoints
        known_step = newest_committed_step(run) or (damaged and damaged[0])
        aside = checkpoint_names.steps_set_aside(run)
        if not is_there(run.config):
            raise UnreadableError(f"{run.path} does not exist; perhaps its file system is not mounted.")
        if not known_step and not aside:
            return
        if not aside and not ownership.has_claim(run, self.attempt):
            raise UnreadableError(
                f"{folder} has no checkpoint, but one of step {known_step} was committed: perhaps the file system does not show it "
                "now. If you deleted it, start over with `ddp-hpc submit --fresh`."
            )
        had = f"one of step {known_step} was committed" if known_step else "the run had some"
        lost = f", and those of step {', '.join(map(str, aside))} are damaged (`step-*.corrupt-*`)" if aside else ""
        raise ConfigError(
            f"{folder} has no checkpoint that can be used, but {had}{lost}. The run does not start over on its own. If you have "
            f"a backup of a directory `step-*`, copy it there and check it with `ddp-hpc checkpoints {run.word} --verify`. Or start "
            "over from step 0 with `ddp-hpc submit --fresh`."
        )

    # --- reading ---

    def _send_heartbeat(self, key: str) -> None:
        """Tell the ranks that wait for this one under `key` that it makes progress."""
        self.group.store.heartbeat(key)
        self.on_progress()
        if self.stop.share_stop_request():
            raise StopAskedError("The ranks were asked to stop before the first step.")

    def _report_progress(self) -> None:
        """Report progress of a rank that this one waits for; let rank zero know if this rank is asked to stop."""
        self.on_progress()
        self.stop.share_stop_request()

    def _restore_step(self, key: str, state: TrainingState, *, seed: int, step: int, checksum: str) -> None:
        """Restore the state from the checkpoint of a step, whose manifest has this `checksum`, once every rank has verified all of it.

        Raises:
            ConfigError: on every rank, if the checkpoint is of another model or optimizer.
            CorruptCheckpointError: on every rank, if all of them found it damaged; weights may then have values of it.
            StopAskedError: on every rank, if one of them was asked to stop.
            UnreadableError: on every rank, if only some found it damaged; or on the rank whose file system does not answer, while the
                others wait until the attempt ends.
        """
        moved = partial(self._send_heartbeat, self.group.barrier_key(key))
        path = checkpoint_names.checkpoint_path(self.run, step)
        report = {"host": socket.gethostname()}
        restoration: Restoration | None = None
        refused: ConfigError | None = None
        try:
            manifest = await_answer(str(path), partial(_read_manifest, path, checksum), on_wait=moved)
            reader = ShardReader(path, manifest, self.group, moved)
            stored = shards.stored_tensors(path, manifest.shards, reader.headers())
            saved = {
                name: SavedTensor(torch.Size(one.shape), _DTYPE_BY_NAME[one.dtype]) for name, one in stored.items()
            }
            restoration = Restoration(state, saved, manifest.state, seed=seed, about=manifest.made)
            reader.read_into(stored, restoration.into)
        except CorruptCheckpointError as error:
            report["corrupt"] = str(error)
        except StopAskedError:
            report["stopped"] = ""
        except ConfigError as error:
            refused = error
        # The slowest reader may take as long as it sends heartbeats; a stop comes as the report of a rank that reads.
        reports = self.group.barrier_through_store(key, report, on_heartbeat=self._report_progress)
        self.group.sum(torch.zeros(1))  # all have read these: rank zero serves the store, so it must not leave before
        _judge(reports)
        if refused is not None:
            raise refused
        if restoration is not None:  # as it is, or `_judge` has raised
            restoration.finish()


def _read_manifest(path: Path, checksum: str) -> Manifest:
    """Read the manifest that rank zero has read."""
    try:
        manifest = checkpoint_store.read_manifest(path)
    except CorruptCheckpointError as error:
        raise UnreadableError(str(error)) from error
    if checkpoint_store.manifest_checksum(manifest) != checksum:
        raise UnreadableError(f"{path / checkpoint_names.MANIFEST_NAME} is not the one that rank 0 has read.")
    return manifest


def _judge(reports: Sequence[Mapping[str, Any]]) -> None:
    """Return if all ranks have verified the checkpoint.

    The memory, network card or stale cache of one node may change bytes. Then the files are sound, and must not be renamed.
    """
    if any("stopped" in one for one in reports):
        raise StopAskedError("The ranks were asked to stop while they restored a checkpoint.")
    damaged = [rank for rank, one in enumerate(reports) if "corrupt" in one]
    if not damaged:
        return
    rank, one = damaged[0], reports[damaged[0]]
    if len(damaged) == len(reports):
        raise CorruptCheckpointError(one["corrupt"])
    other = min(set(range(len(reports))) - set(damaged))
    raise UnreadableError(
        f"Rank {rank} on {one['host']} found damage that rank {other} does not find: {one['corrupt']} The files are sound, "
        f"so the memory, the network or the file system's cache of {one['host']} changes bytes. Exclude that node with "
        "`slurm.exclude`, and inform your cluster's support."
    )


class ShardReader:
    """Reads the shards of a checkpoint, chunk by chunk, into one buffer, and verifies each before it is used."""

    def __init__(self, path: Path, manifest: Manifest, group: Group, on_progress: Callable[[], object]) -> None:
        self._path = path
        self._shards = manifest.shards
        self._rank_info = group.rank_info
        self._on_progress = on_progress
        size = max(min(shard.size, shard.chunk_bytes) for shard in self._shards)
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=group.device.type == "cuda")

    def headers(self) -> list[bytes]:
        """Return the headers of all shards; each node begins elsewhere, as it reads much of every file for them."""
        numbers = [*range(len(self._shards))]
        first = len(numbers) * self._rank_info.node_rank // self._rank_info.num_nodes
        found = {number: self._header(number) for number in numbers[first:] + numbers[:first]}
        return [found[number] for number in numbers]

    def _header(self, shard: int) -> bytes:
        header, length = b"", 8
        for begin, content in self._read(shard, range(len(self._shards[shard].chunks))):
            if begin == 0:
                length += int.from_bytes(content[:8].numpy(), "little")
            header += content.numpy().data[: length - len(header)]
            if len(header) == length:
                break
        return header

    def read_into(self, stored: Mapping[str, StoredTensor], into: Mapping[str, Tensor], *, whole: bool = True) -> None:
        """Read all shards, or only what of them has tensors of `into`, and copy into these what belongs there."""
        targets, segments = _Targets(into), _segments(stored, into)
        for shard, chunks in self._chunks_in_order():
            size = self._shards[shard].chunk_bytes
            wanted = (
                one for one in chunks if whole or any(_segments_within(segments[shard], one * size, (one + 1) * size))
            )
            for begin, content in self._read(shard, wanted):
                for low, high, name, at in _segments_within(segments[shard], begin, begin + len(content)):
                    targets.put(name, at, content[low - begin : high - begin])

    def _chunks_in_order(self) -> Iterator[tuple[int, Iterator[int]]]:
        """Yield all shards and their chunks; each rank begins elsewhere, so those of a node find in its cache what another has read."""
        chunks = [(shard, chunk) for shard, one in enumerate(self._shards) for chunk in range(len(one.chunks))]
        rank, num_local, num_all = self._rank_info, self._rank_info.local_world_size, self._rank_info.world_size
        first = len(chunks) * (rank.local_rank * num_all + rank.node_rank * num_local) // (num_local * num_all)
        for shard, some in itertools.groupby(chunks[first:] + chunks[:first], key=itemgetter(0)):
            yield shard, map(itemgetter(1), some)

    def _read(self, shard: int, chunks: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield where each chunk begins in the file, and its bytes, until the next one is asked for."""
        record = self._shards[shard]
        file = self._path / record.file
        with closing(ChunkReader(file, record, self._on_progress)) as reader:
            for number in chunks:
                begin = number * record.chunk_bytes
                content = self._buffer[: min(record.chunk_bytes, record.size - begin)]
                await_answer(str(file), partial(reader.read, number, content.numpy().data), on_wait=self._on_progress)
                yield begin, content


def read_with_prefix(prefix: str, path: Path, group: Group, on_progress: Callable[[], object]) -> dict[str, Tensor]:
    """Read and verify the tensors of a checkpoint whose names begin with `prefix`, by the rest of their names, and nothing else but headers."""
    manifest = checkpoint_store.read_manifest(path)
    reader = ShardReader(path, manifest, group, on_progress)
    stored = shards.select_by_prefix(prefix, shards.stored_tensors(path, manifest.shards, reader.headers()))
    into = {name: torch.empty(one.shape, dtype=_DTYPE_BY_NAME[one.dtype]) for name, one in stored.items()}
    reader.read_into(stored, into, whole=False)
    return into


_Segment = tuple[int, int, str, int]
"""Bytes of a shard (from, to) that belong into a tensor: its name, and where in it."""


def _segments(stored: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[int, list[_Segment]]:
    """Return for each shard, in order, which of its bytes belong into which tensor."""
    found: dict[int, list[_Segment]] = defaultdict(list)
    for name in wanted:
        for shard, piece in stored[name].pieces:
            for begin, at, length in stored[name].contiguous_parts(piece):
                found[shard].append((begin, begin + length, name, at))
    for segments in found.values():
        segments.sort()
    return found


def _segments_within(segments: Sequence[_Segment], begin: int, end: int) -> Iterator[_Segment]:
    """Yield what of the segments lies between two bytes."""
    first = bisect_right(segments, begin, key=itemgetter(1))
    for low, high, name, at in itertools.islice(segments, first, None):
        if low >= end:
            return
        yield max(low, begin), min(high, end), name, at + max(begin - low, 0)


class _Targets:
    """The tensors that are filled with bytes; the parts of one may come in any order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._collected: dict[str, tuple[Tensor, int]] = {}
        """For a strided tensor, such as weights in channels_last: what came so far, and how many bytes are missing."""

    def put(self, name: str, at: int, some: Tensor) -> None:
        """Write some bytes of a tensor, from byte `at` on, counted as if it were contiguous."""
        tensor = self._tensors[name].detach()
        # `view` needs the bytes at a multiple of the item's size.
        if len(some) == tensor.nbytes and not some.storage_offset() % tensor.itemsize:
            tensor.copy_(some.view(tensor.dtype).view(tensor.shape))
        elif tensor.is_contiguous():
            _as_bytes(tensor)[at : at + len(some)].copy_(some)
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


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def to_torch(raw: RawTensor) -> Tensor:
    """Return a tensor that shares the memory of the bytes as read."""
    dtype = _DTYPE_BY_NAME[raw.dtype]
    if not len(raw.data):
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(raw.data, dtype=dtype).view(raw.shape)
