"""Copies of the tensors that a rank saves, in buffers that are made once: the loop fills them, the writer's thread reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from ddp_hpc.run.checkpoints import shards
from ddp_hpc.run.checkpoints.checkpoint_store import CHUNK_BYTES
from ddp_hpc.run.checkpoints.shards import TensorEntry
from ddp_hpc.train.state.gpu_staging import ByteRange, SideStream, Staging, packed_ranges, view_of
from ddp_hpc.train.state.training_state import DTYPE_NAMES, NamedTensor

_MAX_UNTHREADED = 32767
"""The most elements for which PyTorch starts no threads of its own (at::internal::GRAIN_SIZE)."""
_PAGE_BYTES = 4096


class NotFiniteError(Exception):
    """A tensor that must be finite is not; the message is its name."""


class SaveBuffers:
    """The buffers that a rank's part of the state is copied into; made once, and again only if they become too small."""

    def __init__(self, device: torch.device, staging: Staging | None = None) -> None:
        """Tensors of a GPU go through a staging block; a test may have one on the CPU."""
        self._staging = Staging(SideStream(device)) if staging is None and device.type == "cuda" else staging
        self._layout: Sequence[tuple[object, ...]] = ()
        self._header = b""
        self._places: list[ByteRange] = []
        self._blocks: list[Tensor] = []
        """The host's memory for the shard, without its header: one block after the other."""
        self._spans: list[list[tuple[str, Tensor]]] = []
        """For each block the tensors in it, flat, with their names; a tensor may begin in one and end in another."""
        self._views: list[Tensor] = []
        """Without a staging block, where each tensor is copied to."""

    @property
    def size(self) -> int:
        """How many bytes `parts` have in all."""
        return len(self._header) + (self._places[-1][1] if self._places else 0)

    @property
    def memory(self) -> dict[str, int]:
        """How many bytes a save takes of the `host`'s memory, and of the `gpu`'s while it copies."""
        taken = {"host": 0} if self._staging is None else self._staging.memory
        return {**taken, "host": taken["host"] + sum(block.nbytes for block in self._blocks)}

    def prepare(self, named: Sequence[NamedTensor]) -> None:
        """Make the buffers for tensors like these, and copy nothing yet; the writer's thread does this beside the first steps."""
        self._lay_out(named)
        if self._staging is not None:
            self._staging.give_back()
        # The kernel gives memory when it is first written to, and that takes longer than a copy. So write one byte of each page.
        for block in self._blocks:
            for some in block[::_PAGE_BYTES].split(_MAX_UNTHREADED):
                some.zero_()

    @torch.no_grad()
    def fill(self, named: Sequence[NamedTensor]) -> None:
        """Copy `named` into the buffers. From a GPU, the copy runs while the loop continues."""
        self._lay_out(named)
        if self._staging is not None:
            self._staging.copy(named, self._places, self._send)
        elif named:
            torch._foreach_copy_(self._views, [item.tensor for item in named])

    def shard_parts(self, watched: AbstractSet[str] = frozenset()) -> Iterator[memoryview | bytes]:
        """Wait until the copy is complete, and return the shard to write: its header, then all bytes in parts; for the writer's thread.

        A part is checked just before it is returned, so that the disk has work while the next one is checked.

        Raises:
            NotFiniteError: if a tensor of `watched` is not finite.
        """
        if self._staging is not None:
            self._staging.finish(self._send)
        yield self._header
        for block, spans in zip(self._blocks, self._spans, strict=True):
            content = memoryview(block.numpy())  # type: ignore[arg-type]  # numpy says so only from Python 3.12 on
            begin = end = 0
            for name, span in spans:
                for some in span.split(CHUNK_BYTES // span.element_size()):
                    if name in watched and not _is_finite(some):
                        raise NotFiniteError(name)
                    end += some.nbytes
                    if end - begin >= CHUNK_BYTES:
                        yield content[begin:end]
                        begin = end
            if end > begin:
                yield content[begin:end]

    def _lay_out(self, named: Sequence[NamedTensor]) -> None:
        layout = [(name, owner, one.dtype, one.shape, one.stride(), one.device) for name, one, owner in named]
        if layout == self._layout:
            return
        self._layout = ()  # should one of the next lines fail
        tensors = [item.tensor for item in named]
        self._places = packed_ranges(tensors)
        self._header = shards.shard_header(
            [  # each tensor is written whole: one piece, as large as the tensor
                TensorEntry(item.name, DTYPE_NAMES[item.tensor.dtype], shape, *place, shape, (0,) * len(shape))
                for item, place in zip(named, self._places, strict=True)
                for shape in [tuple(item.tensor.shape)]
            ]
        )
        num_bytes = sum(one.nbytes for one in tensors)
        if not self._blocks or num_bytes > sum(block.nbytes for block in self._blocks):
            self._blocks, self._spans, self._views = [], [], []  # before new ones are made
            if self._staging is None:
                self._blocks = [torch.empty(num_bytes, dtype=torch.uint8)]
            else:
                side = self._staging.side
                self._blocks = [side.host_block(size) for size in block_sizes(num_bytes, largest=side.largest_block)]
        self._spans = [[] for _ in self._blocks]
        for item, place in zip(named, self._places, strict=True):
            for number, _, part in self._block_parts(place):
                self._spans[number].append((item.name, part.view(item.tensor.dtype)))
        if self._staging is not None:
            self._staging.plan(named, self._places)
        else:
            self._views = [view_of(self._blocks[0], *both) for both in zip(self._places, tensors, strict=True)]
        self._layout = layout

    def _send(self, begin: int, content: Tensor) -> None:
        """Copy bytes to their place in the blocks."""
        for _, skipped, part in self._block_parts((begin, begin + content.numel())):
            part.copy_(content[skipped : skipped + part.numel()], non_blocking=True)

    def _block_parts(self, place: ByteRange) -> Iterator[tuple[int, int, Tensor]]:
        """Yield what the blocks have of a place: a block's number, how many of the bytes come before it, and its part."""
        start = 0
        for number, block in enumerate(self._blocks):
            first, last = max(place[0], start), min(place[1], start + block.numel())
            if first < last:
                yield number, first - place[0], block[first - start : last - start]
            start += block.numel()


def block_sizes(num_bytes: int, *, largest: int) -> list[int]:
    """Divide page-locked memory into powers of two: for another size, PyTorch takes the next one, up to twice what was asked for."""
    sizes: list[int] = []
    while num_bytes > 0:
        size = min(largest, 1 << (num_bytes.bit_length() - 1))
        sizes.append(max(size, min(num_bytes, largest // 64)))
        num_bytes -= sizes[-1]
    return sizes


def _is_finite(tensor: Tensor) -> bool:
    # In small parts, so that PyTorch does not start its threads beside those that train on the same CPUs.
    extremes = [one for some in tensor.split(_MAX_UNTHREADED) if some.numel() for one in some.aminmax()]
    return not extremes or all(map(math.isfinite, torch.stack(extremes).tolist()))
