"""Checkpoints on disk: their layout, how one is committed, and how a reader verifies it.

A checkpoint is a directory `step-00001234` with one safetensors file for each rank that wrote, and a `manifest.json` with the
size and the checksums of every file, and a checksum of its own. It is written in a directory that only the attempt that owns
the run may use (`ownership`), flushed, and published by one rename. So it is either committed or does not exist. A tensor is
only bytes here, so readers need no torch.

What reads raises a CorruptCheckpointError where a file is surely missing, or not what was written; an UnreadableError where the file
system does not answer.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

import ddp_hpc
from ddp_hpc.base.durable import (
    atomic_output,
    delete_directory,
    fsync_path,
    make_directory,
    name_errors,
    new_file_mode,
    open_private,
    open_record,
    record_bytes,
)
from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, FencedError, NewerFormatError, UnreadableError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.base.patience import is_final_error
from ddp_hpc.run.checkpoints.checkpoint_names import COMMITTED_PATTERN, MANIFEST_NAME, checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.shards import (
    FORMAT_VERSION,
    ITEM_BYTES_BY_DTYPE,
    RawTensor,
    ShardRecord,
    TensorEntry,
    assemble_tensor,
    header_length,
    parse_header,
    parse_shard_record,
    select_by_prefix,
    shard_header,
    stored_tensors,
)
from ddp_hpc.run.run_dir.ownership import claim_path, has_claim, renew_claim
from ddp_hpc.run.run_dir.paths import RunDir

if TYPE_CHECKING:  # `checkpoints` reads and verifies without it
    from ddp_hpc.run.spec import CheckpointSpec

CHUNK_BYTES = 8 << 20
"""Each of these parts of a file has a checksum of its own, so that several ranks can share in reading one file."""
FOREIGN_FILES_KEY = "foreign_files"
"""The key in a manifest's state that says that a script wrote the files, of which nothing is known but the bytes."""
_READ_BYTES = 1 << 20
"""How much is read before it is hashed: little enough to be still in the processor's cache then."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    world_size: int
    shards: tuple[ShardRecord, ...]
    state: Mapping[str, Any]
    """The part of the training state that is not tensors: progress, optimizer groups, scaler."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The evaluation made at this step, if there was one."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """When and by which versions it was written, and the order of DDP's buckets; not part of the digest."""
    format: int = FORMAT_VERSION


def uncommitted_path(run: RunDir, step: int, attempt: int) -> Path:
    """Return the directory that a checkpoint is written to before it is committed."""
    return claim_path(run, attempt) / f"step-{step:08d}"


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of the file that `rank` writes."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(
    path: Path, parts: Iterable[memoryview | bytes], *, size: int, on_progress: Callable[[], object] = lambda: None
) -> ShardRecord:
    """Write and flush a shard's header, the first of `parts`, and its tensors, `size` bytes in all; return what a reader compares with."""
    checksums: list[str] = []
    checksum = xxhash.xxh3_128()
    header_size = num_written = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, new_file_mode(path))
    with name_errors(path), os.fdopen(fd, "wb", buffering=0):
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)  # `export` may write to a pipe
        if is_file:
            _preallocate_file(fd, size)
        for part in parts:
            rest = memoryview(part).cast("B")
            header_size = header_size or len(rest)
            while rest:
                some = rest[: CHUNK_BYTES - num_written % CHUNK_BYTES]
                rest, num_written = rest[len(some) :], num_written + len(some)
                checksum.update(some)
                while some:  # write(2) may write less than it was given: at a signal, on a disk that is almost full
                    some = some[os.write(fd, some) :]
                if num_written % CHUNK_BYTES == 0:
                    checksums.append(checksum.hexdigest())
                    checksum.reset()
                    _begin_flushing(fd)
                    on_progress()
        if num_written % CHUNK_BYTES:
            checksums.append(checksum.hexdigest())
        if is_file:
            os.fsync(fd)
    return ShardRecord(path.name, num_written, header_size, CHUNK_BYTES, tuple(checksums))


def _preallocate_file(fd: int, size: int) -> None:
    """Reserve the space of a file, if the file system can; then each write has less to do."""
    # Not `os.posix_fallocate`: on a file system that cannot reserve space (NFS before 4.2), the C library would write a byte
    # into each block of the file instead (https://man7.org/linux/man-pages/man3/posix_fallocate.3.html). No error counts here, not even
    # that of a full disk: file systems that compress may still have room, and if they have not, write(2) says so.
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size))


def _begin_flushing(fd: int) -> None:
    """Ask the kernel to start writing the file to the disk now, so that fsync finds little left to do."""
    # The kernel takes this advice as: start writing the pages that are dirty, and drop those that are clean. So a large checkpoint does not
    # push the data set out of the page cache, either. It makes nothing durable; the fsync at the end does
    # (https://man7.org/linux/man-pages/man2/posix_fadvise.2.html). A file system that cannot do it leaves the work to fsync.
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_uncommitted_dir(run: RunDir, step: int, attempt: int) -> Path:
    """Make the directory that a checkpoint is written to, and return it.

    Raises:
        FencedError: if a newer attempt has claimed the run.
    """
    uncommitted = uncommitted_path(run, step, attempt)
    with suppress(FileExistsError):  # every rank calls this, and the first one makes it
        try:
            make_directory(uncommitted)
        except FileNotFoundError:  # the attempt's claim is gone: a newer attempt removed it, or a person did
            renew_claim(run, attempt)
            make_directory(uncommitted)
    return uncommitted


def commit_checkpoint(run: RunDir, uncommitted: Path, manifest: Manifest, *, keeps_replaced: bool = True) -> Path:
    """Publish the directory `uncommitted` as a checkpoint; call it after all of them are on the disk.

    If the step has a directory already, it is renamed first. It can only be a checkpoint that did not verify, unless a script saves a step
    again: then the newest save counts, as with `os.replace`, and the other one is not kept.

    Raises:
        FencedError: if another attempt has claimed the run.
    """
    with explain_if_fenced(uncommitted):
        # The order is what survives a power cut: the shards' bytes (`write_shard`), the manifest's, the names of both in their
        # directory, and only then the rename. rename(2) is atomic, but reaches the disk with the directory that holds the new name,
        # so that one is flushed last (https://man7.org/linux/man-pages/man2/fsync.2.html, on directories).
        with open_private(uncommitted / MANIFEST_NAME, "wb") as file:
            file.write(manifest_bytes(manifest))
            file.flush()
            os.fsync(file.fileno())
        fsync_path(uncommitted)
        target = checkpoint_path(run, manifest.step)
        # Rename at once, not after a look at the target: an attempt that waited long for its disk may be fenced by now, and what is
        # at the target is then the newer attempt's. Such a rename fails because its source is gone, and has touched nothing.
        try:
            uncommitted.rename(target)
        except OSError as error:
            if error.errno not in _TAKEN_ERRNOS:
                raise
            aside = set_checkpoint_aside(target)
            try:
                uncommitted.rename(target)
            except FileNotFoundError:  # fenced between the two
                with suppress(OSError):
                    aside.rename(target)
                raise
            if not keeps_replaced:
                delete_directory(aside)
        fsync_path(target.parent)
        return target


@contextmanager
def explain_if_fenced(uncommitted: Path) -> Iterator[None]:
    """Raise a FencedError where the directory `uncommitted` is gone because another attempt has claimed the run."""
    try:
        yield
    except FileNotFoundError as error:
        if uncommitted.parent.is_dir():
            raise
        step = int(uncommitted.name.removeprefix("step-"))
        raise FencedError(
            f"A newer attempt has taken over the run, so this one does not commit its checkpoint of step {step}. Nothing needs "
            "to be done: the newer attempt goes on from the checkpoint before."
        ) from error


_TAKEN_ERRNOS = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""What rename(2) answers where something is at the new name; ENOTDIR: it is a file."""


def set_checkpoint_aside(path: Path) -> Path:
    """Rename a checkpoint that does not verify: no command reads it again, but a person can."""
    for count in range(1000):
        aside = path.with_name(f"{path.name}.corrupt-{count}")
        if not aside.exists():
            path.rename(aside)
            return aside
    raise CorruptCheckpointError(
        f"{path} is damaged and cannot be renamed, because `{path.name}.corrupt-0` to `-999` all exist. Delete them, and submit again."
    )


def prune_checkpoints(run: RunDir, *, attempt: int, keep: CheckpointSpec) -> list[int]:
    """Delete all but the newest `keep.keep_last` and the best `keep.keep_best` checkpoints; return the deleted steps.

    A deletion begins with a rename, so a half-deleted directory is not a checkpoint. Each
    begins only while `attempt` has its claim: a newer attempt may be reading a checkpoint that this one would delete.
    """
    steps = committed_steps(run)
    kept = set(steps[-keep.keep_last :])
    if keep.keep_best:
        kept |= set(_steps_best_first(run, steps, keep)[: keep.keep_best])
    deleted = []
    for step in steps:
        if step in kept:
            continue
        if not has_claim(run, attempt):
            break
        delete_directory(checkpoint_path(run, step))
        deleted.append(step)
    return deleted


def _steps_best_first(run: RunDir, steps: Iterable[int], keep: CheckpointSpec) -> list[int]:
    scored = []
    for step in steps:
        try:
            value = read_manifest(checkpoint_path(run, step)).metrics.get(keep.best_metric)
        except (CorruptCheckpointError, NewerFormatError):
            continue
        if value is not None and not math.isnan(value):  # NaN is neither less nor more, so it would spoil the order
            scored.append((-value if keep.best_is == "highest" else value, -step))
    return [-negative for _, negative in sorted(scored)]


# --- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`."""
    with _explain_os_errors(path / MANIFEST_NAME):
        raw = record_bytes(path / MANIFEST_NAME)
    manifest = parse_manifest(raw, path)
    if COMMITTED_PATTERN.fullmatch(path.name) and int(path.name.removeprefix("step-")) != manifest.step:
        raise CorruptCheckpointError(
            f"{path} is damaged: its {MANIFEST_NAME} is that of another checkpoint, of step {manifest.step}."
        )
    return manifest


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Return the manifest that `raw` holds; `path` is the checkpoint's, for messages. Of a newer format, it is a NewerFormatError."""
    try:
        content = dict(json.loads(raw)["content"])
        is_sound = _sealed_json(content) == raw
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptCheckpointError(f"{path / MANIFEST_NAME} is damaged ({type(error).__name__}: {error}).") from error
    if not is_sound:
        raise CorruptCheckpointError(f"{path / MANIFEST_NAME} is damaged: it does not match its checksum.")
    if content["format"] > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} is a checkpoint of format {content['format']}, but this ddp_hpc {ddp_hpc.__version__} reads formats up "
            f"to {FORMAT_VERSION}. Nothing was changed. Update ddp_hpc, or start over from step 0 with `ddp-hpc submit --fresh`."
        )
    return Manifest(**{**content, "shards": tuple(map(parse_shard_record, content["shards"]))})


def read_tensors(path: Path, manifest: Manifest) -> dict[str, RawTensor]:
    """Read and verify all shards of the checkpoint at `path`."""
    contents = [memoryview(bytearray(shard.size)) for shard in manifest.shards]
    for shard, content in zip(manifest.shards, contents, strict=True):
        with closing(ChunkReader(path / shard.file, shard)) as reader:
            for number in range(len(shard.chunks)):
                begin = number * shard.chunk_bytes
                reader.read(number, content[begin : begin + shard.chunk_bytes])
    headers = [content[: header_length(content)] for content in contents]
    return {
        name: assemble_tensor(stored, contents)
        for name, stored in stored_tensors(path, manifest.shards, headers).items()
    }


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Read a safetensors file that any program may have written; raise the OSError where it cannot be read."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = memoryview(bytearray(size))  # writable, as torch wants it
        _read_into(file, content[:8], path)
        head = content[: header_length(content)]
        _read_into(file, head[8:], path)
        entries = parse_header(path, head, size)  # before the rest is read: other files may be large, too
        _read_into(file, content[len(head) :], path)
    return {entry.name: RawTensor(entry.dtype, entry.shape, content[entry.begin : entry.end]) for entry in entries}


def _read_into(
    file: RawIOBase, rest: memoryview, path: Path, on_read: Callable[[memoryview], object] = lambda _: None
) -> None:
    """Fill `rest` from a file; `on_read` is called with each part, in order."""
    while rest:
        count = file.readinto(rest[:_READ_BYTES])
        if not count:
            raise CorruptCheckpointError(
                f"{path} is damaged: it became shorter while ddp-hpc read it. Perhaps another process writes to it."
            )
        on_read(rest[:count])
        rest = rest[count:]


def check_sizes(path: Path, manifest: Manifest, on_progress: Callable[[], object] = lambda: None) -> None:
    """Compare the size of each shard with the manifest, so that a truncated one is found before anything is read."""
    for shard in manifest.shards:
        with _explain_os_errors(path / shard.file):
            _open_shard(path / shard.file, shard).close()
        on_progress()


def check_headers(path: Path, on_progress: Callable[[], object] = lambda: None) -> None:
    """Read back which tensors a checkpoint has, as a restore would, but not the tensors; call it before older ones are deleted."""
    manifest, headers = read_manifest(path), []
    for shard in manifest.shards:
        with _explain_os_errors(path / shard.file), closing(_open_shard(path / shard.file, shard)) as file:
            headers.append(memoryview(bytearray(shard.header_bytes)))
            _read_into(file, headers[-1], path / shard.file)
        on_progress()
    stored_tensors(path, manifest.shards, headers)


def _open_shard(path: Path, record: ShardRecord) -> RawIOBase:
    # Open it and ask the open file, not `stat`: NFS may answer `stat` from a cache, but asks the server at each open
    # ("close-to-open consistency", https://man7.org/linux/man-pages/man5/nfs.5.html).
    file = open_record(path).detach()
    if (size := os.fstat(file.fileno()).st_size) != record.size:
        file.close()
        raise CorruptCheckpointError(f"{path} is damaged: it has {size} bytes, but {record.size} were written.")
    return file


def verify_checkpoint(path: Path, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Read every byte of the checkpoint at `path`; return its manifest if all is as written. Calls `on_progress` as it reads."""
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    for shard in manifest.shards:
        chunk = memoryview(bytearray(min(shard.size, shard.chunk_bytes)))  # a file may be larger than memory
        with closing(ChunkReader(path / shard.file, shard, on_progress)) as reader:
            for number in range(len(shard.chunks)):
                reader.read(number, chunk[: shard.size - number * shard.chunk_bytes])
    return manifest


def checkpoint_digest(path: Path) -> str:
    """Return one hex digest of the whole training state in the (verified) checkpoint at `path`.

    It covers weights, buffers, optimizer, scaler, averages, random generators and data position. It does not depend on which
    shards hold the tensors, nor on when and by which attempt they were written. Of a script's own files, it covers the bytes.
    """
    manifest = read_manifest(path)
    seal = xxhash.xxh3_128()
    if FOREIGN_FILES_KEY in manifest.state:
        seal.update(_canonical_json([[shard.file, shard.size, shard.chunks] for shard in manifest.shards]))
        return seal.hexdigest()
    for name, tensor in sorted(read_tensors(path, manifest).items()):
        described = [name, tensor.dtype, list(tensor.shape), xxhash.xxh3_128_hexdigest(tensor.data)]
        seal.update(_canonical_json(described))
    seal.update(_canonical_json(manifest.state))
    return seal.hexdigest()


def export_weights(path: Path, output: Path, *, ema: bool | None = None) -> tuple[int, bool]:
    """Write the weights in the checkpoint at `path` to one safetensors file; return how many tensors, and whether they are the average.

    `ema`: whether to write their moving average; unset: where there is one, since that was evaluated. Names are the model's own,
    without `module.`.
    """
    with atomic_output(output) as file:
        entries, parts, is_average = _read_weights(path, ema)
        header = shard_header(entries)
        write_shard(file, [header, *parts], size=len(header) + sum(part.nbytes for part in parts))
    return len(entries), is_average


def _read_weights(path: Path, ema: bool | None) -> tuple[list[TensorEntry], list[memoryview], bool]:
    """Return the weights as a shard holds them: the entries, and the bytes of each; and whether they are the average."""
    manifest = read_manifest(path)
    if FOREIGN_FILES_KEY in manifest.state:
        files = shorten_names([shard.file for shard in manifest.shards], 3)
        raise ConfigError(
            f"{path} holds files that a script wrote ({files}), so ddp-hpc cannot export weights. Read them as the script does."
        )
    found = read_tensors(path, manifest)
    present = sorted({name.partition("/")[0] for name in found})
    prefix = "ema" if ema or (ema is None and "ema" in present) else "model"
    chosen = select_by_prefix(f"{prefix}/", found)
    if not chosen:
        hint = " Export without `--ema`, or from a run with `train.ema_decay`." if prefix == "ema" else ""
        raise ConfigError(f"{path} has no {prefix!r} weights; it has {', '.join(present)}.{hint}")
    ordered = sorted(chosen.items(), key=lambda item: (-ITEM_BYTES_BY_DTYPE[item[1].dtype], item[0]))
    entries, offset = [], 0
    for name, raw in ordered:
        entries.append(TensorEntry(name, raw.dtype, raw.shape, offset, offset + len(raw.data)))
        offset += len(raw.data)
    return entries, [raw.data for _, raw in ordered], prefix == "ema"


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the text of `manifest.json`."""
    return _sealed_json(asdict(manifest))


def manifest_checksum(manifest: Manifest) -> str:
    """Return a number that no other manifest has."""
    return xxhash.xxh3_128_hexdigest(_canonical_json(asdict(manifest)))


def _sealed_json(content: Mapping[str, Any]) -> bytes:
    seal = xxhash.xxh3_128_hexdigest(_canonical_json(content))
    return (json.dumps({"content": content, "xxh3_128": seal}, indent=1, sort_keys=True) + "\n").encode()


class ChunkReader:
    """Reads the chunks of a shard, one by one, and verifies each; after an error it opens the file again."""

    def __init__(self, path: Path, record: ShardRecord, on_progress: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._record = record
        self._on_progress = on_progress
        self._file: RawIOBase | None = None

    def read(self, number: int, into: memoryview) -> None:
        """Read a chunk into a buffer of its size."""
        checksum = xxhash.xxh3_128()

        def take(some: memoryview) -> None:
            checksum.update(some)
            self._on_progress()

        # On NFS, an open file may stay stale (ESTALE) for ever; the next try opens it again.
        with _explain_os_errors(self._path, self.close):
            if self._file is None:
                self._file = _open_shard(self._path, self._record)
            self._file.seek(number * self._record.chunk_bytes)
            _read_into(self._file, into, self._path, take)
        if checksum.hexdigest() != self._record.chunks[number]:
            raise CorruptCheckpointError(f"{self._path} is damaged: it does not match its checksum.")

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


@contextmanager
def _explain_os_errors(path: Path, on_error: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise what an OSError means: the file is surely missing or not a file, or nothing can be known now.

    A file is surely missing if its directory can be listed and does not have it. If the whole mount is away, the directory
    cannot be listed either.
    """
    try:
        yield
    except OSError as error:
        on_error()
        is_known = is_final_error(error)
        if isinstance(error, FileNotFoundError):
            try:
                is_known = path not in path.parent.iterdir()
            except OSError:
                is_known = False
        kind = CorruptCheckpointError if is_known else UnreadableError
        raise kind(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
