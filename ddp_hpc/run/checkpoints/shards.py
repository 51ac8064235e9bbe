"""Headers of a checkpoint's shards: which tensors the checkpoint holds, in which pieces, and at which bytes.

A shard is a safetensors file (https://github.com/huggingface/safetensors#format). This module reads no disk, and a tensor is
only bytes to it. A header that is damaged raises a CorruptCheckpointError.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ddp_hpc.base.errors import CorruptCheckpointError

T = TypeVar("T")
FORMAT_VERSION = 2
"""The format that is written. Format 1 had one checksum for each file, and did not say which part of a larger tensor it held."""
_METADATA, _MARK = "__metadata__", "ddp_hpc.format"

_DTYPES_BY_ITEM_BYTES = {8: "F64 I64 U64 C64", 4: "F32 I32 U32", 2: "F16 BF16 I16 U16", 1: "F8_E4M3 F8_E5M2 I8 U8 BOOL"}
ITEM_BYTES_BY_DTYPE = {name: size for size, names in _DTYPES_BY_ITEM_BYTES.items() for name in names.split()}
"""Bytes of one element, by the name that safetensors has for its dtype: all dtypes that a checkpoint may hold."""


class TensorEntry(NamedTuple):
    """Where one tensor, or a piece of one, lies in a shard's body; dtype by safetensors' name (`F32`), offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    global_shape: tuple[int, ...] | None = None
    """Shape of the tensor that this is a piece of; None: the file does not say, so it is the whole tensor."""
    offset: tuple[int, ...] = ()
    """Index of the piece's first element in that tensor."""


@dataclass(frozen=True)
class ShardRecord:
    """A shard as it was written, to compare with what is read."""

    file: str
    size: int
    header_bytes: int
    """Length of the header. One reader must read all of it, since half a header says nothing."""
    chunk_bytes: int
    chunks: tuple[str, ...]
    """xxh3_128 of each `chunk_bytes` of the file; in format 1 of the whole file."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor's bytes, as read and verified."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def parse_shard_record(content: Mapping[str, Any]) -> ShardRecord:
    """Return a shard's record from its JSON in a manifest of either format."""
    if "xxh3_128" in content:  # format 1
        size = int(content["size"])
        return ShardRecord(content["file"], size, header_bytes=size, chunk_bytes=size, chunks=(content["xxh3_128"],))
    return ShardRecord(**{**content, "chunks": tuple(content["chunks"])})


def shard_header(entries: Sequence[TensorEntry]) -> bytes:
    """Return the header of a safetensors file: an 8-byte length, then JSON padded to 8 bytes.

    The entries must follow one another without gaps (https://github.com/huggingface/safetensors#format). The place of each
    piece in its whole tensor is written as text into `__metadata__`, which the format leaves to its users.
    """
    table: dict[str, Any] = {}
    metadata = {
        entry.name: _place_json(entry.global_shape, entry.offset) for entry in entries if entry.global_shape is not None
    }
    if metadata:
        table[_METADATA] = {_MARK: str(FORMAT_VERSION), **metadata}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@lru_cache  # many tensors are of the same shape
def _place_json(shape: tuple[int, ...], offset: tuple[int, ...]) -> str:
    return json.dumps({"shape": shape, "offset": offset}, separators=(",", ":"))


@lru_cache
def _parse_piece_place(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    known = json.loads(text)
    return tuple(map(int, known["shape"])), tuple(map(int, known["offset"]))


# --- which tensors a checkpoint holds ---------------------------------------------------------------------------------


# Named tuples: a checkpoint of 60,000 tensors has one of each for every tensor, and a frozen dataclass takes three times as long
# to make.


class StoredTensor(NamedTuple):
    """A tensor that a checkpoint holds, in one piece or several."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, TensorEntry], ...]
    """Each with the number of its shard."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES_BY_DTYPE[self.dtype]

    def contiguous_parts(self, piece: TensorEntry) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a piece that are contiguous in the file and in the tensor: begin in either, and length in bytes."""
        if piece.shape == self.shape:  # a whole tensor, as almost all are
            if length := self.num_bytes:
                yield piece.begin, 0, length
            return
        item = ITEM_BYTES_BY_DTYPE[self.dtype]
        strides = [item * math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        cut = [dim for dim, size in enumerate(piece.shape) if size != self.shape[dim]]
        split = cut[-1]  # in the dimensions after this one, the piece has all of the tensor
        length = item * math.prod(piece.shape[split:])
        first = sum(map(operator.mul, piece.offset, strides))
        begin = piece.begin
        for index in itertools.product(*map(range, piece.shape[:split])):
            if length:
                yield begin, first + sum(map(operator.mul, index, strides)), length
            begin += length


def header_length(content: memoryview | bytes) -> int:
    """Return how many bytes of a safetensors file come before its tensors, at most the length of `content`.

    `parse_header` refuses a header that is cut off.
    """
    return min(8 + int.from_bytes(content[:8], "little"), len(content))


def parse_header(path: Path, header: memoryview | bytes, size: int) -> list[TensorEntry]:
    """Return the entries in the header of a safetensors file of `size` bytes; offsets count from the file's beginning.

    Every entry is safe to use: its dtype is known, and its bytes are in the file and as many as its shape needs.
    """
    length = 8 + int.from_bytes(header[:8], "little")
    if size < 8 or length > size:  # bytes that are not a header say some absurd length
        raise CorruptCheckpointError(
            f"{path} is not a safetensors file: its first 8 bytes say that its header ends at byte {length}, but the file has {size} bytes."
        )
    try:
        table = json.loads(bytes(header[8:]))
        metadata = table.pop(_METADATA, None) or {}
        places = metadata if _MARK in metadata else {}
        entries = [_parse_entry(name, fields, places.get(name), len(header)) for name, fields in table.items()]
    # Whatever bytes may stand there: a list in place of an object, a number in place of text, nesting without end.
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path} is not a safetensors file: its header cannot be read ({type(error).__name__}: {error})."
        ) from error
    for entry in entries:
        item = ITEM_BYTES_BY_DTYPE.get(entry.dtype)
        if item is None:
            raise CorruptCheckpointError(
                f"{path} has the tensor {entry.name!r} of dtype {entry.dtype!r}, but ddp-hpc reads only {', '.join(ITEM_BYTES_BY_DTYPE)}."
            )
        if not len(header) <= entry.begin <= entry.end <= size or min(entry.shape, default=0) < 0:
            raise CorruptCheckpointError(
                f"{path} is not a safetensors file: its header gives {entry.name!r} the shape {list(entry.shape)} and the "
                f"bytes {entry.begin} to {entry.end}, but its tensors are in bytes {len(header)} to {size}."
            )
        if entry.end - entry.begin != math.prod(entry.shape) * item:
            raise CorruptCheckpointError(
                f"{path} is not a safetensors file: {entry.name!r} has {entry.end - entry.begin} bytes, but {entry.dtype} of "
                f"shape {list(entry.shape)} needs {math.prod(entry.shape) * item}."
            )
    return entries


def _parse_entry(name: str, fields: Mapping[str, Any], place: str | None, first: int) -> TensorEntry:
    begin, end = fields["data_offsets"]
    shape = tuple(map(operator.index, fields["shape"]))  # refuses 1.5 and "1", which `int` takes
    whole, offset = _parse_piece_place(place) if place else (shape, (0,) * len(shape))
    dtype = sys.intern(fields["dtype"])
    return TensorEntry(name, dtype, shape, first + operator.index(begin), first + operator.index(end), whole, offset)


def stored_tensors(
    path: Path, shards: Sequence[ShardRecord], headers: Sequence[memoryview | bytes]
) -> dict[str, StoredTensor]:
    """Return the tensors that the checkpoint at `path` holds, by name, from the headers of its shards."""
    found: dict[str, StoredTensor] = {}
    for number, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        for entry in parse_header(path / shard.file, header, shard.size):
            assert entry.global_shape is not None  # noqa: S101  `parse_header` fills it in
            known = found.get(entry.name)
            if known is not None and (known.dtype, known.shape) != (entry.dtype, entry.global_shape):
                raise CorruptCheckpointError(
                    f"{path} is damaged: the pieces of {entry.name!r} belong to different tensors: {known.dtype} of shape "
                    f"{list(known.shape)}, and {entry.dtype} of shape {list(entry.global_shape)}."
                )
            pieces = (*(known.pieces if known else ()), (number, entry))
            found[entry.name] = StoredTensor(entry.dtype, entry.global_shape, pieces)
    for name, stored in found.items():
        if not _is_whole(stored):
            raise CorruptCheckpointError(
                f"{path} is damaged: the pieces of {name!r} in its shards do not make up the tensor."
            )
    return found


def _is_whole(stored: StoredTensor) -> bool:
    """Return whether all pieces lie in the tensor, no two overlap, and together they have as many elements as it has."""
    pieces = [piece for _, piece in stored.pieces]
    if len(pieces) == 1:
        [piece] = pieces
        return piece.shape == stored.shape and not any(piece.offset)
    boxes = sorted(list(zip(piece.offset, piece.shape, strict=True)) for piece in pieces if all(piece.shape))
    is_within = all(
        start >= 0 and start + size <= whole
        for box in boxes
        for (start, size), whole in zip(box, stored.shape, strict=True)
    )
    num_elements = sum(math.prod(piece.shape) for piece in pieces)
    return is_within and num_elements == math.prod(stored.shape) and not any(_overlap_flags(boxes))


def _overlap_flags(boxes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[bool]:
    """Yield whether two boxes overlap, for each two that share an index of the first dimension; boxes are sorted by it."""
    for number, box in enumerate(boxes):
        for other in itertools.islice(boxes, number + 1, None):
            if box and other[0][0] >= box[0][0] + box[0][1]:
                break
            yield all(a < b + length and b < a + size for (a, size), (b, length) in zip(box, other, strict=True))


def select_by_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return what has a name that begins with a prefix, by the rest of its name."""
    return {name.removeprefix(prefix): one for name, one in named.items() if name.startswith(prefix)}


def assemble_tensor(stored: StoredTensor, contents: Sequence[memoryview]) -> RawTensor:
    """Return a tensor's bytes: a view of its shard, or a copy put together from several pieces."""
    if len(stored.pieces) == 1:
        [(shard, piece)] = stored.pieces
        return RawTensor(stored.dtype, stored.shape, contents[shard][piece.begin : piece.end])
    whole = memoryview(bytearray(stored.num_bytes))
    for shard, piece in stored.pieces:
        for begin, at, length in stored.contiguous_parts(piece):
            whole[at : at + length] = contents[shard][begin : begin + length]
    return RawTensor(stored.dtype, stored.shape, whole)
