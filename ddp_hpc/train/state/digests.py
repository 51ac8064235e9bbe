"""Digests of the tensors that all ranks must have equal: one number for each tensor, and one text for all of them.

A tensor's bytes, in the order of its elements, are 64-bit words. Of every 512 whole words the digest takes the sum (a row), and of
all words at the same place in their row the sum, too (a column). So one flipped bit changes one row and one column, and two
exchanged elements change two of either. Rows, columns and the words that fill no row are mixed with their places, and added
up. All is done modulo 2**64, so the device, the number of threads and the memory format do not matter.

No tensor is copied, except for small ones, and for one at a time that is not contiguous. The memory that this takes is bounded, however many tensors there
are. The device is waited for once.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ROW = 512
"""Words in a row."""
_WORD_BYTES = 8
_MIN_GROUP_SIZE = 64
"""From how many small tensors that are alike on they are taken together: it takes a few operations for each such kind."""
_MOST_BYTES = 1 << 23
"""Of the numbers of one group; a few times as much is in use meanwhile."""
# The multipliers of splitmix64 (https://prng.di.unimi.it/splitmix64.c), as signed numbers.
_STRIDE, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def combined_digest(digests: Mapping[str, int]) -> str:
    """Return one digest of all tensors, 16 hex digits: of their names and digests, in the order of the names.

    The order of a mapping does not count: after a restore, the optimizer has its tensors in another one.
    """
    names = sorted(digests)
    text = "\0".join(names).encode() + b"\0" + struct.pack(f"<{len(names)}q", *(digests[name] for name in names))
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@torch.no_grad()
def digests_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of each tensor, a signed 64-bit number, by its name.

    A digest does not depend on the other tensors. The tensors are strided, of any dtype, on any devices.
    """
    found: dict[str, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        there = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        names, alone = [*there], [*there.values()]
        groups = [*_group_places(alone)]
        sums = [
            (_digests_of_alike if is_alike else _digests_of_mixed)([alone[place] for place in places])
            for places, is_alike in groups
        ]
        places = (names[place] for places, _ in groups for place in places)
        found |= zip(places, torch.cat(sums).tolist(), strict=True)
    return {name: found[name] for name in tensors}


def _group_places(tensors: Sequence[Tensor]) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the places of tensors to take at a time, and whether these are many small ones that are alike.

    A group has a bounded number of bytes, or one tensor.
    """
    by_kind: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if 0 < tensor.nbytes < _ROW * _WORD_BYTES:
            by_kind[tensor.dtype, tensor.numel()].append(place)
    small = {kind: places for kind, places in by_kind.items() if len(places) >= _MIN_GROUP_SIZE}
    for (dtype, numel), places in small.items():
        at_once = _MOST_BYTES // (dtype.itemsize * numel)
        yield from ((places[begin : begin + at_once], True) for begin in range(0, len(places), at_once))
    taken = {place for places in small.values() for place in places}
    group, num_bytes = list[int](), 0
    for place in (place for place in range(len(tensors)) if place not in taken):
        # Of a large tensor, only the sums of its rows and columns are kept, and what fills no row.
        kept = tensors[place].nbytes // _ROW + 3 * _ROW * _WORD_BYTES
        if group and num_bytes + kept > _MOST_BYTES:
            yield group, False
            group, num_bytes = [], 0
        group.append(place)
        num_bytes += kept
    if group:
        yield group, False


def _digests_of_alike(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests of small tensors of the same dtype and number of elements."""
    flat = torch.cat([tensor.resolve_conj().resolve_neg().reshape(-1) for tensor in tensors])
    rows = flat.view(torch.int8).view(len(tensors), -1)
    num_whole = rows.shape[1] - rows.shape[1] % _WORD_BYTES
    words = rows[:, :num_whole].reshape(-1).view(torch.int64).view(len(tensors), num_whole // _WORD_BYTES)
    values = torch.cat([words, rows[:, num_whole:].long()], dim=1)
    return _mix_in_place(values + torch.arange(1, values.shape[1] + 1, device=values.device) * _STRIDE).sum(1)


def _digests_of_mixed(tensors: Sequence[Tensor]) -> Tensor:
    parts = [_row_column_sums(tensor) for tensor in tensors]
    # Few operations: beside a small model, each takes microseconds, whatever it computes.
    lengths = [sum(one.numel() for one in some) for some in parts]
    device = tensors[0].device
    of_places = torch.arange(1, max(lengths) + 1, device=device).mul_(_STRIDE)
    places = torch.cat([of_places[:length] for length in lengths])
    mixed = _mix_in_place(places.add_(torch.cat([one for some in parts for one in some])))
    ends = torch.tensor([0, *accumulate(lengths)], device=device)
    return torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])[ends].diff()


def _row_column_sums(tensor: Tensor) -> list[Tensor]:
    """Return the numbers that stand for a tensor: sums of rows and of columns, then the words and the bytes that are left."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride() != (1,) or flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone(memory_format=torch.contiguous_format)  # else PyTorch cannot view it as words
    is_copy = flat.data_ptr() != tensor.data_ptr()
    num_left = flat.nbytes % _WORD_BYTES
    if num_left:
        as_bytes = flat.view(torch.int8)
        left = as_bytes[-num_left:].clone() if is_copy else as_bytes[-num_left:]
        return [*_sums_of_words(as_bytes[:-num_left].view(torch.int64), is_copy=is_copy), left]
    return _sums_of_words(flat.view(torch.int64), is_copy=is_copy)


def _sums_of_words(words: Tensor, *, is_copy: bool) -> list[Tensor]:
    in_rows = words.numel() - words.numel() % _ROW
    if not in_rows:
        return [words]
    rows, left = words[:in_rows].view(-1, _ROW), words[in_rows:]
    return [rows.sum(1), rows.sum(0), left.clone() if is_copy else left]  # a view would keep the copy in memory


def _mix_in_place(values: Tensor) -> Tensor:
    """Change each value to another one, in place: similar values become unlike each other, and no two become equal."""
    for factor, shift in ((_FIRST, 30), (_SECOND, 27), (1, 31)):
        # PyTorch's shift to the right fills with the sign, so the bits that it fills are cleared.
        values.bitwise_xor_((values >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return values


def differing_tensors(reports: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of the tensors of which the ranks do not report the same, in the order of the first rank that has them."""
    names = dict.fromkeys(name for one in reports for name in one)
    return [name for name in names if any(one.get(name) != reports[0].get(name) for one in reports)]
