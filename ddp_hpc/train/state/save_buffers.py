"""Copies of the tensors that a rank saves, in buffers that are made once: the loop fills them, the writer's thread reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from ddp_hpc.checkpoints import shards
from ddp_hpc.checkpoints.checkpoint_store import CHUNK_BYTES
from ddp_hpc.checkpoints.shards import TensorEntry
from ddp_hpc.train.state.restore import DTYPES
from ddp_hpc.train.state.training_state import NamedTensor

_ALONE = 32767
"""The most elements for which PyTorch starts no threads of its own (at::internal::GRAIN_SIZE)."""


class NotFiniteError(Exception):
    """A tensor that must be finite is not; the message is its name."""


class SaveBuffers:
    """The buffers that a rank's part of the state is copied into; made once, and again only if the layout changes."""

    def __init__(self, device: torch.device) -> None:
        # Only from a GPU: a copy is asynchronous only into page-locked ("pinned") memory, and that is taken away from all other
        # programs on the node (https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers).
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._views: list[Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None
        self._header = b""

    @property
    def size(self) -> int:
        """How many bytes `parts` have in all."""
        return len(self._header) + self._buffer.nbytes

    def fill(self, named: Sequence[NamedTensor]) -> None:
        """Copy `named` into the buffers. From a GPU, the copy runs while the loop continues."""
        layout = [(item.name, item.tensor.dtype, item.tensor.shape) for item in named]
        if layout != self._layout:
            self._lay_out(named)
            self._layout = layout
        sources = [item.tensor.detach() for item in named]
        if self._stream is None:
            torch._foreach_copy_(self._views, sources)
            return
        self._copy_beside(named, sources)

    def _copy_beside(self, named: Sequence[NamedTensor], sources: list[Tensor]) -> None:
        """Copy from a GPU: what the next forward pass may change at once, the rest on a stream of its own."""
        assert self._stream is not None  # noqa: S101  `fill` has checked
        # A rank's own tensors (buffers such as batch norm's averages, generators, the meter) change as soon as the next forward
        # pass runs, so they are copied on its stream, before it. Weights change only in the optimizer step (`wait_for_copy`).
        for item, view, source in zip(named, self._views, sources, strict=True):
            if item.owner is not None:
                view.copy_(source, non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for item, view, source in zip(named, self._views, sources, strict=True):
                if item.owner is None:
                    view.copy_(source, non_blocking=True)
            self._copied = self._stream.record_event()

    def wait_for_copy(self) -> None:
        """Make the device copy the weights before it changes them; call this before each optimizer step."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def parts(self, watched: AbstractSet[str] = frozenset()) -> Iterator[memoryview | bytes]:
        """Wait until the copy is complete, and return the shard to write: its header, then all bytes in parts; for the writer's thread.

        A part is checked just before it is returned, so that the disk has work while the next one is checked.

        Raises:
            NotFiniteError: if a tensor of `watched` is not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        yield self._header
        content = memoryview(self._buffer.numpy())  # type: ignore[arg-type]  # numpy says so only from Python 3.12 on
        begin = end = 0
        for (name, *_), view in zip(self._layout, self._views, strict=True):
            for some in view.reshape(-1).split(CHUNK_BYTES // view.element_size()):
                if name in watched and not _is_finite(some):
                    raise NotFiniteError(name)
                end += some.nbytes
                if end - begin >= CHUNK_BYTES:
                    yield content[begin:end]
                    begin = end
        if end > begin:
            yield content[begin:end]

    def _lay_out(self, named: Sequence[NamedTensor]) -> None:
        entries, offset = [], 0
        for item in named:
            end = offset + item.tensor.nbytes
            entries.append(_whole_entry(item, offset, end))
            offset = end
        self._buffer = torch.zeros(offset, dtype=torch.uint8, pin_memory=self._pinned)
        self._views = [
            self._buffer[entry.begin : entry.end].view(item.tensor.dtype).view(item.tensor.shape)
            for entry, item in zip(entries, named, strict=True)
        ]
        self._header = shards.shard_header(entries)


def _whole_entry(item: NamedTensor, begin: int, end: int) -> TensorEntry:
    """Return the entry of a tensor that is written whole: one piece, as large as the tensor."""
    shape = tuple(item.tensor.shape)
    return TensorEntry(item.name, DTYPES[item.tensor.dtype], shape, begin, end, shape, (0,) * len(shape))


def _is_finite(tensor: Tensor) -> bool:
    # In small parts, so that PyTorch does not start its threads beside those that train on the same CPUs.
    extremes = [one for some in tensor.split(_ALONE) if some.numel() for one in some.aminmax()]
    return not extremes or all(map(math.isfinite, torch.stack(extremes).tolist()))
