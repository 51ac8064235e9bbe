"""Checkpoints on disk: their layout, how one is committed, and how a reader knows that it holds.

A checkpoint is a directory `step-00001234` with one safetensors file a writing rank and a `manifest.json` that has every
file's size and checksums, and its own. It is written beside, flushed, and published by one rename, so that it is either
committed or does not exist; and where the attempt that owns the run may write, and nobody else (`ownership`). Nothing
here knows of tensors as anything but bytes, so readers need no torch.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

import ddp_hpc
from ddp_hpc.checkpoint_names import COMMITTED, MANIFEST, checkpoint_path, committed_steps
from ddp_hpc.durable import delete_directory, fsync_path, make_directory, open_private, output_at, private_mode
from ddp_hpc.errors import ConfigError, CorruptCheckpointError, FencedError, NewerFormatError, UnreadableError
from ddp_hpc.ownership import claim_again, claim_path, has_claim
from ddp_hpc.patience import is_answer
from ddp_hpc.run_dir import RunDir
from ddp_hpc.shards import (
    FORMAT,
    RawTensor,
    ShardRecord,
    TensorEntry,
    header_length,
    item_bytes,
    parse_header,
    raw_tensor,
    read_record,
    shard_header,
    stored_tensors,
)

CHUNK_BYTES = 8 << 20
"""How much of a file has a checksum of its own, so that several ranks can share in reading one file."""
_READ_BYTES = 1 << 20
"""How much is read, and then hashed, at a time: it stays in the processor's cache in between."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    world_size: int
    shards: tuple[ShardRecord, ...]
    state: Mapping[str, Any]
    """The training state that is not tensors: progress, optimizer groups, scaler."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The evaluation made at this step, where there was one."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """When and by what; no part of the training state."""
    format: int = FORMAT


def staging_path(run: RunDir, step: int, attempt: int) -> Path:
    """Where a checkpoint is written before it is committed."""
    return claim_path(run, attempt) / f"step-{step:08d}"


def shard_name(rank: int, world_size: int) -> str:
    """Name the file that `rank` writes."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(
    path: Path, parts: Sequence[memoryview | bytes], *, on_progress: Callable[[], object] = lambda: None
) -> ShardRecord:
    """Write a shard's header and what follows it, flush them to the disk, and return what a reader must find."""
    checksums: list[str] = []
    checksum = xxhash.xxh3_128()
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, private_mode(path))
    try:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                some = rest[: CHUNK_BYTES - size % CHUNK_BYTES]
                rest, size = rest[len(some) :], size + len(some)
                checksum.update(some)
                _write_all(fd, some)
                if size % CHUNK_BYTES == 0:
                    checksums.append(checksum.hexdigest())
                    checksum.reset()
                    _begin_flushing(fd)
                    on_progress()
        if size % CHUNK_BYTES:
            checksums.append(checksum.hexdigest())
        if stat.S_ISREG(os.fstat(fd).st_mode):  # weights may go to a pipe
            os.fsync(fd)
    finally:
        os.close(fd)
    return ShardRecord(path.name, size, len(parts[0]), CHUNK_BYTES, tuple(checksums))


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _begin_flushing(fd: int) -> None:
    """Have the kernel begin with what is written so far, so that the disk works beside us and fsync has little left.

    It takes this advice as: write what is dirty now, then forget what is clean. Those who cannot, leave it to fsync.
    """
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def open_staging(run: RunDir, step: int, attempt: int) -> Path:
    """Make the directory that a checkpoint is written to, and return it.

    Raises:
        FencedError: where a newer attempt has claimed the run.
    """
    staging = staging_path(run, step, attempt)
    try:
        _make_staging(staging)
    except FileNotFoundError:
        claim_again(run, attempt)
        _make_staging(staging)
    return staging


def _make_staging(staging: Path) -> None:
    with suppress(FileExistsError):
        make_directory(staging)


def commit(run: RunDir, staging: Path, manifest: Manifest) -> Path:
    """Publish the shards in `staging` as a checkpoint; call once all of them are on the disk.

    A directory of the same step can only be one that did not verify: it is set aside first.

    Raises:
        FencedError: where another attempt has claimed the run.
    """
    try:
        return _commit(run, staging, manifest)
    except FileNotFoundError as error:
        if staging.parent.is_dir():
            raise
        raise FencedError(
            f"{run.name} was taken over by another attempt; step {manifest.step} is not committed."
        ) from error


def _commit(run: RunDir, staging: Path, manifest: Manifest) -> Path:
    with open_private(staging / MANIFEST, "wb") as file:
        file.write(manifest_bytes(manifest))
        file.flush()
        os.fsync(file.fileno())
    fsync_path(staging)
    target = checkpoint_path(run, manifest.step)
    if target.exists():
        set_aside(target)
    staging.rename(target)
    fsync_path(target.parent)
    return target


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that does not verify, so that nothing reads it again but a person can."""
    for count in range(1000):
        aside = path.with_name(f"{path.name}.corrupt-{count}")
        if not aside.exists():
            path.rename(aside)
            return aside
    raise CorruptCheckpointError(f"{path} does not verify and cannot be set aside. Remove its `.corrupt-*` siblings.")


def prune(  # noqa: PLR0913  # what is kept, and for whom
    run: RunDir, *, attempt: int, keep_last: int, keep_best: int, metric: str, lowest_is_best: bool
) -> list[int]:
    """Delete all but the newest `keep_last` and the best `keep_best` checkpoints; return the deleted steps.

    The newest one always stays. A deletion begins with a rename, so that a half-deleted directory is no checkpoint. Each
    begins only while `attempt` has its claim: a newer attempt may be reading what an older one takes for old.
    """
    steps = committed_steps(run)
    kept = set(steps[-max(keep_last, 1) :])
    if keep_best:
        kept |= set(_best_steps(run, steps, metric=metric, lowest_is_best=lowest_is_best)[:keep_best])
    deleted = []
    for step in steps:
        if step in kept:
            continue
        if not has_claim(run, attempt):
            break
        delete_directory(checkpoint_path(run, step))
        deleted.append(step)
    return deleted


def _best_steps(run: RunDir, steps: Iterable[int], *, metric: str, lowest_is_best: bool) -> list[int]:
    scored = []
    for step in steps:
        try:
            value = read_manifest(checkpoint_path(run, step)).metrics.get(metric)
        except (CorruptCheckpointError, NewerFormatError):
            continue
        if value is not None and not math.isnan(value):  # a diverged training is never the best
            scored.append((value if lowest_is_best else -value, -step))
    return [-negative for _, negative in sorted(scored)]


# --- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`.

    Raises:
        CorruptCheckpointError: where it is not, to the byte, what was written.
        UnreadableError: where the file system does not say.
    """
    try:
        raw = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise _why_unread(path / MANIFEST, error) from error
    manifest = parse_manifest(raw, path)
    if COMMITTED.fullmatch(path.name) and int(path.name.removeprefix("step-")) != manifest.step:
        raise CorruptCheckpointError(f"{path}: {MANIFEST} is of step {manifest.step}.")
    return manifest


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Return what the bytes of a manifest say; `path` is the checkpoint's, for messages.

    Raises:
        CorruptCheckpointError: where they are not what was written.
        NewerFormatError: where they are, by a newer ddp_hpc.
    """
    try:
        content = dict(json.loads(raw)["content"])
        is_sound = _sealed(content) == raw
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptCheckpointError(f"{path}: {MANIFEST} cannot be read ({type(error).__name__}: {error}).") from error
    if not is_sound:
        raise CorruptCheckpointError(f"{path}: {MANIFEST} does not match its checksum.")
    if content["format"] > FORMAT:
        raise NewerFormatError(
            f"{path} is a checkpoint of format {content['format']}, but this ddp_hpc {ddp_hpc.__version__} reads formats up "
            f"to {FORMAT}. Nothing was changed. Update ddp_hpc, or start over from step 0 with `ddp-hpc submit --fresh`."
        )
    return Manifest(**{**content, "shards": tuple(map(read_record, content["shards"]))})


def read_tensors(
    path: Path, manifest: Manifest, *, on_progress: Callable[[], object] = lambda: None
) -> dict[str, RawTensor]:
    """Read and verify all shards of the checkpoint at `path`.

    Raises:
        CorruptCheckpointError: where a shard is missing, truncated, or not what was written.
        UnreadableError: where the file system does not say.
    """
    contents = [_read_shard(path, shard, on_progress) for shard in manifest.shards]
    headers = [shard_content[: header_length(shard_content)] for shard_content in contents]
    return {
        name: raw_tensor(stored, contents) for name, stored in stored_tensors(path, manifest.shards, headers).items()
    }


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Read a safetensors file of anybody's.

    Raises:
        CorruptCheckpointError: where it is none.
    """
    content = memoryview(bytearray(path.read_bytes()))  # writable, for torch
    entries = parse_header(path, content[: header_length(content)], len(content))
    return {entry.name: RawTensor(entry.dtype, entry.shape, content[entry.begin : entry.end]) for entry in entries}


def verify(path: Path, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Read every byte of the checkpoint at `path`; return its manifest if it holds. Calls `on_progress` for each chunk.

    Raises:
        CorruptCheckpointError: where it does not.
        UnreadableError: where the file system does not say.
    """
    manifest = read_manifest(path)
    for shard in manifest.shards:
        _read_shard(path, shard, on_progress)
    return manifest


def digest(path: Path) -> str:
    """Return one hex digest of the whole training state in the (verified) checkpoint at `path`.

    It covers weights, buffers, optimizer, scaler, averages, random generators and data position; it does not depend on
    how the tensors are spread over shards, nor on when and by which attempt they were written.
    """
    manifest = read_manifest(path)
    seal = xxhash.xxh3_128()
    for name, tensor in sorted(read_tensors(path, manifest).items()):
        described = [name, tensor.dtype, list(tensor.shape), xxhash.xxh3_128_hexdigest(tensor.data)]
        seal.update(_canonical(described))
    seal.update(_canonical(manifest.state))
    return seal.hexdigest()


def export_weights(path: Path, output: Path, *, prefix: str = "model") -> int:
    """Write the weights in the checkpoint at `path` to one safetensors file; return how many tensors.

    `prefix` is `model`, or `ema` for their moving average. Names are the model's own, without `module.`.

    Raises:
        ConfigError: where the checkpoint has no such weights, or there can be no such file.
    """
    with output_at(output) as file:
        entries, parts = _weights(path, prefix)
        write_shard(file, [shard_header(entries), *parts])
    return len(entries)


def _weights(path: Path, prefix: str) -> tuple[list[TensorEntry], list[memoryview]]:
    """Return the weights as a shard has them: entries, and each one's bytes."""
    found = read_tensors(path, read_manifest(path))
    chosen = {name.removeprefix(f"{prefix}/"): raw for name, raw in found.items() if name.startswith(f"{prefix}/")}
    if not chosen:
        present = sorted({name.partition("/")[0] for name in found})
        raise ConfigError(f"{path} has no {prefix!r} weights; it has {', '.join(present)}.")
    ordered = sorted(chosen.items(), key=lambda item: (-item_bytes(item[1].dtype), item[0]))
    entries, offset = [], 0
    for name, raw in ordered:
        entries.append(TensorEntry(name, raw.dtype, raw.shape, offset, offset + len(raw.data)))
        offset += len(raw.data)
    return entries, [raw.data for _, raw in ordered]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return a manifest as it is written."""
    return _sealed(asdict(manifest))


def _sealed(content: Mapping[str, Any]) -> bytes:
    seal = xxhash.xxh3_128_hexdigest(_canonical(content))
    return (json.dumps({"content": content, "xxh3_128": seal}, indent=1, sort_keys=True) + "\n").encode()


class ChunkReader:
    """Reads a shard's chunks, one by one, each verified; after an error the file is opened anew."""

    def __init__(self, path: Path, record: ShardRecord, on_progress: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._record = record
        self._on_progress = on_progress
        self._file: FileIO | None = None

    def read(self, number: int, into: memoryview) -> None:
        """Read a chunk into a buffer of its size.

        Raises:
            CorruptCheckpointError: where it is not what was written.
            UnreadableError: where the file system does not say.
        """
        try:
            checksum = self._fill(number * self._record.chunk_bytes, into)
        except OSError as error:
            self.close()
            raise _why_unread(self._path, error) from error
        if checksum != self._record.chunks[number]:
            raise CorruptCheckpointError(f"{self._path} does not match its checksum.")

    def _fill(self, begin: int, rest: memoryview) -> str:
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
            size = os.fstat(self._file.fileno()).st_size
            if size != self._record.size:
                raise CorruptCheckpointError(f"{self._path} has {size} bytes, but {self._record.size} were written.")
        self._file.seek(begin)
        checksum = xxhash.xxh3_128()
        while rest:
            count = self._file.readinto(rest[:_READ_BYTES])
            if not count:
                raise CorruptCheckpointError(f"{self._path} became shorter while it was read.")
            checksum.update(rest[:count])
            rest = rest[count:]
            self._on_progress()
        return checksum.hexdigest()

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def _read_shard(path: Path, record: ShardRecord, on_progress: Callable[[], object] = lambda: None) -> memoryview:
    content = memoryview(bytearray(record.size))
    with closing(ChunkReader(path / record.file, record, on_progress)) as reader:
        for number in range(len(record.chunks) or 1):  # an empty file, too, is looked at
            begin = number * record.chunk_bytes
            reader.read(number, content[begin : begin + record.chunk_bytes])
    return content


def _why_unread(path: Path, error: OSError) -> CorruptCheckpointError | UnreadableError:
    """Return what an error means: that a file is surely missing or none, or that nothing can be known now.

    A file is surely missing where its directory can be listed and does not have it: a mount that is away takes the
    directory with it.
    """
    told = f"{path} cannot be read ({type(error).__name__}: {error})."
    if not is_answer(error):
        return UnreadableError(told)
    if isinstance(error, FileNotFoundError):
        try:
            is_listed = path in path.parent.iterdir()
        except OSError:
            is_listed = True
        if is_listed:
            return UnreadableError(told)
    return CorruptCheckpointError(told)
