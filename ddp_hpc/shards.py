"""A shard's header, and what all headers of a checkpoint say together: which tensors it holds, in which pieces, and where.

A shard is a safetensors file (https://github.com/huggingface/safetensors#format). Nothing here reads a disk, or knows of a
tensor as anything but bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddp_hpc.errors import CorruptCheckpointError

FORMAT = 2
"""What is written. Format 1 had one checksum a file, and no word on where a tensor belongs in a larger one."""
_METADATA, _MARK = "__metadata__", "ddp_hpc.format"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor, or a piece of one, lies in a shard's body; dtype by safetensors' name (`F32`), offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    global_shape: tuple[int, ...] | None = None
    """Shape of the tensor that this is a piece of; None: nothing is said, so it is all of it."""
    offset: tuple[int, ...] = ()
    """Index of the piece's first element in that tensor."""


@dataclass(frozen=True)
class ShardRecord:
    """A shard as it was written: what a reader must find."""

    file: str
    size: int
    header_bytes: int
    """How much of the file says which tensors follow. A reader who has less of it knows nothing of the file."""
    chunk_bytes: int
    chunks: tuple[str, ...]
    """xxh3_128 of every `chunk_bytes` of the file; in format 1 of the whole file."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor's bytes, as read and verified."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def read_record(content: Mapping[str, Any]) -> ShardRecord:
    """Return a shard's record from its JSON in a manifest of either format."""
    if "xxh3_128" in content:  # format 1
        size = int(content["size"])
        return ShardRecord(content["file"], size, header_bytes=size, chunk_bytes=size, chunks=(content["xxh3_128"],))
    return ShardRecord(**{**content, "chunks": tuple(content["chunks"])})


def shard_header(entries: Sequence[TensorEntry]) -> bytes:
    """Return the head of a safetensors file: an 8-byte length, then JSON padded to 8 bytes.

    The entries must follow one another without gaps (https://github.com/huggingface/safetensors#format). Where each belongs
    in its whole tensor stands in the part that the format leaves to its users, as text.
    """
    table: dict[str, Any] = {}
    metadata = {
        entry.name: _place_text(entry.global_shape, entry.offset) for entry in entries if entry.global_shape is not None
    }
    if metadata:
        table[_METADATA] = {_MARK: str(FORMAT), **metadata}
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@lru_cache  # many tensors are of the same shape
def _place_text(shape: tuple[int, ...], offset: tuple[int, ...]) -> str:
    return json.dumps({"shape": shape, "offset": offset}, separators=(",", ":"))


@lru_cache
def _read_place(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    known = json.loads(text)
    return tuple(map(int, known["shape"])), tuple(map(int, known["offset"]))


# --- which tensors a checkpoint holds ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Where a part of a tensor lies: in which shard, at which bytes of the file."""

    shard: int
    begin: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a checkpoint holds, in one piece or several."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)

    def runs(self, piece: Piece) -> Iterator[tuple[int, int, int]]:
        """Yield what of a piece is contiguous in the file and in the tensor: where in either, and how many bytes."""
        item = item_bytes(self.dtype)
        strides = [item * math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        cut = [dim for dim, size in enumerate(piece.shape) if size != self.shape[dim]]
        split = cut[-1] if cut else 0  # all of the tensor lies in the piece from the next dimension on
        length = item * math.prod(piece.shape[split:])
        first = sum(map(operator.mul, piece.offset, strides))
        begin = piece.begin
        for index in itertools.product(*map(range, piece.shape[:split])):
            if length:
                yield begin, first + sum(map(operator.mul, index, strides)), length
            begin += length


def header_length(content: memoryview | bytes) -> int:
    """Return how many of a safetensors file's bytes come before its tensors'."""
    return min(8 + int.from_bytes(content[:8], "little"), len(content))


def parse_header(path: Path, header: memoryview | bytes, size: int) -> list[TensorEntry]:
    """Return what the header of a safetensors file of `size` bytes says; offsets count from the file's beginning.

    Raises:
        CorruptCheckpointError: where it is none.
    """
    try:
        table = json.loads(bytes(header[8:]))
        metadata = table.pop(_METADATA, None) or {}
        places = metadata if _MARK in metadata else {}
        entries = [_parse_entry(name, told, places.get(name), len(header)) for name, told in table.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is no safetensors file ({type(error).__name__}: {error}).") from error
    for entry in entries:
        if not len(header) <= entry.begin <= entry.end <= size:
            raise CorruptCheckpointError(f"{path} is no safetensors file: {entry.name!r} lies outside of it.")
    return entries


def _parse_entry(name: str, told: Mapping[str, Any], place: str | None, first: int) -> TensorEntry:
    begin, end = told["data_offsets"]
    shape = tuple(map(int, told["shape"]))
    whole, offset = _read_place(place) if place else (shape, (0,) * len(shape))
    return TensorEntry(name, told["dtype"], shape, first + begin, first + end, whole, offset)


def stored_tensors(
    path: Path, shards: Sequence[ShardRecord], headers: Sequence[memoryview | bytes]
) -> dict[str, StoredTensor]:
    """Return the tensors that the checkpoint at `path` holds, by name, from the headers of its shards.

    Raises:
        CorruptCheckpointError: where the pieces of a tensor do not make it up.
    """
    found: dict[str, StoredTensor] = {}
    for number, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        for entry in parse_header(path / shard.file, header, shard.size):
            assert entry.global_shape is not None  # noqa: S101  `parse_header` fills it in
            piece = Piece(number, entry.begin, entry.shape, entry.offset)
            known = found.get(entry.name)
            if known is not None and (known.dtype, known.shape) != (entry.dtype, entry.global_shape):
                raise CorruptCheckpointError(f"{path}: the pieces of {entry.name!r} are not of one tensor.")
            if entry.end - entry.begin != math.prod(entry.shape) * item_bytes(entry.dtype):
                raise CorruptCheckpointError(f"{path}: {entry.name!r} has not the bytes that its shape needs.")
            pieces = (*known.pieces, piece) if known else (piece,)
            found[entry.name] = StoredTensor(entry.dtype, entry.global_shape, pieces)
    for name, stored in found.items():
        if not _is_whole(stored):
            raise CorruptCheckpointError(f"{path}: the pieces of {name!r} do not make up the tensor.")
    return found


def _is_whole(stored: StoredTensor) -> bool:
    """Tell whether the pieces lie in the tensor, are as large together, and no two of them overlap."""
    if len(stored.pieces) == 1:
        piece = stored.pieces[0]
        return piece.shape == stored.shape and not any(piece.offset)
    boxes = sorted(list(zip(piece.offset, piece.shape, strict=True)) for piece in stored.pieces if all(piece.shape))
    is_within = all(
        start >= 0 and start + size <= whole
        for box in boxes
        for (start, size), whole in zip(box, stored.shape, strict=True)
    )
    num_elements = sum(math.prod(piece.shape) for piece in stored.pieces)
    return is_within and num_elements == math.prod(stored.shape) and not any(_overlaps(boxes))


def _overlaps(boxes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[bool]:
    """Yield of each two boxes that share an index of the first dimension, by which they are sorted, if they overlap."""
    for number, box in enumerate(boxes):
        for other in itertools.islice(boxes, number + 1, None):
            if box and other[0][0] >= box[0][0] + box[0][1]:
                break
            yield all(a < b + length and b < a + size for (a, size), (b, length) in zip(box, other, strict=True))


def raw_tensor(stored: StoredTensor, contents: Sequence[memoryview]) -> RawTensor:
    """Return a tensor's bytes: as they lie in the one shard, or put together."""
    if len(stored.pieces) == 1:
        (piece,) = stored.pieces
        return RawTensor(
            stored.dtype, stored.shape, contents[piece.shard][piece.begin : piece.begin + stored.num_bytes]
        )
    whole = memoryview(bytearray(stored.num_bytes))
    for piece in stored.pieces:
        for begin, at, length in stored.runs(piece):
            whole[at : at + length] = contents[piece.shard][begin : begin + length]
    return RawTensor(stored.dtype, stored.shape, whole)


@lru_cache
def item_bytes(dtype: str) -> int:
    """Return the bytes of one element, which safetensors' names of types say in bits."""
    found = re.match(r"[A-Z]+(\d+)", dtype)
    if dtype == "BOOL":
        return 1
    if not found or int(found[1]) % 8:
        raise CorruptCheckpointError(f"A tensor is of type {dtype!r}, which is none that a checkpoint holds.")
    return int(found[1]) // 8


# --- who reads what ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """Chunks of one shard that follow one another, for one reader."""

    shard: int
    chunks: range
    begin: int
    end: int
    """In bytes of the file."""


def deal_stretches(shards: Sequence[ShardRecord], num_readers: int) -> list[list[Stretch]]:
    """Deal all chunks of all shards to so many readers, in order and evenly by bytes; return what each one reads.

    Who gets a file's beginning gets all of its header.
    """
    dealt: list[list[Stretch]] = [[] for _ in range(num_readers)]
    total = max(sum(shard.size for shard in shards), 1)
    before = 0
    for number, shard in enumerate(shards):
        for chunks in _units(shard):
            begin, end = chunks.start * shard.chunk_bytes, min(chunks.stop * shard.chunk_bytes, shard.size)
            reader = dealt[min((2 * before + begin + end) * num_readers // (2 * total), num_readers - 1)]
            if reader and reader[-1].shard == number:
                last = reader.pop()
                chunks, begin = range(last.chunks.start, chunks.stop), last.begin  # noqa: PLW2901
            reader.append(Stretch(number, chunks, begin, end))
        before += shard.size
    return dealt


def _units(shard: ShardRecord) -> Iterator[range]:
    """Yield the chunks that one reader must have together."""
    num_first = max(-(-shard.header_bytes // max(shard.chunk_bytes, 1)), 1)
    yield range(num_first)
    for number in range(num_first, len(shard.chunks)):
        yield range(number, number + 1)
