"""Digests of the tensors that all ranks must have equal: one number for each tensor, and one text for all of them.

A tensor's bytes, in the order of its elements, are 64-bit words. Of every 512 whole words the digest takes the sum (a row), and of
all words at the same place in their row the sum, too (a column). So one flipped bit changes one row and one column, and two
exchanged elements change two of either. Rows, columns and the words that fill no row are mixed with their places, and added
up. All is done modulo 2**64, so the device, the number of threads and the memory format do not matter.

No tensor is copied, except for one that is not contiguous. The device is waited for once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ddp_hpc.train.state import training_state
from ddp_hpc.train.state.training_state import TrainingState

_ROW = 512
"""Words in a row."""
_WORD_BYTES = 8
# The multipliers of splitmix64 (https://prng.di.unimi.it/splitmix64.c), as signed numbers.
_STRIDE, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def of_state(state: TrainingState) -> dict[str, int]:
    """Return the digest of each tensor that all ranks must have equal: weights, their averages, the optimizer's state.

    Buffers are left out, as in DDP they are rank zero's. So are random generators and the loss meter, which are each rank's own.
    """
    return of_tensors({item.name: item.tensor for item in training_state.tensors_of_all(state)})


def of_all(digests: Mapping[str, int]) -> str:
    """Return one digest of all tensors, 16 hex digits: of their names and digests, in the order of the names.

    The order of a mapping does not count: after a restore, the optimizer has its tensors in another one.
    """
    names = sorted(digests)
    text = "\0".join(names).encode() + b"\0" + struct.pack(f"<{len(names)}q", *(digests[name] for name in names))
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of each tensor, a signed 64-bit number, by its name.

    A digest does not depend on the other tensors. The tensors are strided, of any dtype, on any devices.
    """
    found: dict[str, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        there = [name for name, tensor in tensors.items() if tensor.device == device]
        found |= zip(there, _on_one_device([tensors[name] for name in there], device), strict=True)
    return {name: found[name] for name in tensors}


@torch.no_grad()
def _on_one_device(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    parts = [_parts(tensor) for tensor in tensors]
    places, ends = _layout(tuple(sum(one.numel() for one in some) for some in parts), device)
    mixed = _mixed(torch.cat([one for some in parts for one in some]) + places)
    totals: list[int] = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])[ends].tolist()
    return [_signed(end - begin) for begin, end in zip([0, *totals], totals, strict=False)]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the numbers that stand for a tensor: sums of rows and of columns, then the words and the bytes that are left."""
    flat = (tensor.resolve_conj() if tensor.is_complex() else tensor).contiguous().view(-1)
    if flat.stride() != (1,) or flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone(memory_format=torch.contiguous_format)  # else PyTorch cannot view it as words
    num_left = flat.nbytes % _WORD_BYTES
    if num_left:
        as_bytes = flat.view(torch.int8)
        return [*_of_words(as_bytes[:-num_left].view(torch.int64)), as_bytes[-num_left:]]
    return _of_words(flat.view(torch.int64))


def _of_words(words: Tensor) -> list[Tensor]:
    in_rows = words.numel() - words.numel() % _ROW
    if not in_rows:
        return [words]
    rows = words[:in_rows].view(-1, _ROW)
    return [rows.sum(1), rows.sum(0), words[in_rows:]]


@lru_cache(maxsize=8)
def _layout(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a number for each place within each tensor's part of a vector, and where the parts end."""
    places = [torch.arange(1, length + 1, device=device) for length in lengths]
    ends = torch.tensor(lengths, device=device).cumsum(0)
    return torch.cat(places) * _STRIDE, ends


def _mixed(values: Tensor) -> Tensor:
    """Change each value to another one, in place: similar values become unlike each other, and no two become equal."""
    for factor, shift in ((_FIRST, 30), (_SECOND, 27), (1, 31)):
        # PyTorch's shift to the right fills with the sign, so the bits that it fills are cleared.
        values.bitwise_xor_((values >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return values


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def as_number(digest: str) -> int:
    """Return a digest of all tensors as a signed 64-bit number, as ranks exchange it."""
    return int.from_bytes(bytes.fromhex(digest), "big", signed=True)


def from_number(number: int) -> str:
    """Return the digest that `as_number` made this number of."""
    return number.to_bytes(8, "big", signed=True).hex()


def differing(reports: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of the tensors of which the ranks do not report the same, in the order of the first rank that has them."""
    names = dict.fromkeys(name for one in reports for name in one)
    return [name for name in names if any(one.get(name) != reports[0].get(name) for one in reports)]
