"""Copies of a GPU's tensors to the host, through a staging block on the GPU.

1. What lies on the CPU is copied there.
2. On a stream of our own: a few kernels gather the other tensors in the block, in the shard's order and layout. The training waits
   for them (`hold_training`), as a forward may change a weight, too.
3. On that stream, too: one copy of the block to page-locked memory of the host, beside the next steps.
4. In the writer's thread: what lay on the CPU is put in its place. PyTorch's cache gets the block's memory until the next save;
   if the training needs it meanwhile, PyTorch takes it from there before it reports that the memory is out.

Where the GPU has no room for all, 2 and 3 alternate, for as many tensors at a time as the block holds (the training waits for all but
the last copy); a larger tensor is copied from where it lies. The stream keeps the order: no part is used again before it has been copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ddp_hpc.train.state.training_state import NamedTensor

ByteRange = tuple[int, int]
"""Where a tensor's bytes begin and end in the shard, behind the header."""
SendToHost = Callable[[int, Tensor], object]
"""Copies bytes to the host, to where the shard has them: from this one on."""
_WINDOW_BYTES = 256 << 20
"""The size of the staging block where the GPU has no room for all tensors."""
_CopyMethod = Literal["at once", "flat", "one by one"]
_FOREACH_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""The dtypes of which a GPU's `_foreach_copy_` copies many tensors with one kernel."""


class SideStream:
    """A stream beside the one that trains, and the memory that it copies between."""

    largest_block = 1 << 30
    """Of the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in this GPU's memory."""
        return tensor.device == self._device

    def free_bytes(self) -> int:
        """Return how much of the GPU's memory no process has taken."""
        return torch.cuda.mem_get_info(self._device)[0]

    def staging_block(self, num_bytes: int) -> Tensor:
        """Return memory of the GPU, from the part of PyTorch's cache that is our stream's."""
        with self.use_stream():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def take_again(self, block: Tensor) -> None:
        """Give a staging block memory again, the same as before unless the training has needed it."""
        with self.use_stream():
            block.untyped_storage().resize_(block.nbytes)

    def host_block(self, num_bytes: int) -> Tensor:
        """Return memory of the host that the GPU can write to."""
        # A copy is asynchronous only into page-locked ("pinned") memory, and that is taken away from all other programs on the
        # node (https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers).
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def use_stream(self) -> AbstractContextManager[object]:
        """Have what follows run on this stream."""
        return torch.cuda.stream(self._stream)

    def wait_for_training(self) -> None:
        """Have this stream wait for what the training has enqueued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def record_event(self) -> torch.cuda.Event:
        """Return an event: all that this stream has to do so far has ended."""
        # `blocking`: the thread that waits for it sleeps. Else it would keep a CPU busy, and a worker may have only one.
        event = torch.cuda.Event(blocking=True)
        self._stream.record_event(event)
        return event

    def hold_training(self, event: torch.cuda.Event) -> None:
        """Have the device wait for an event before it goes on with the training; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)


class _Copies(NamedTuple):
    """Copies that are made together: the tensors' numbers, and where to."""

    how: _CopyMethod
    numbers: list[int]
    targets: list[Tensor]

    def make(self, tensors: Sequence[Tensor]) -> None:
        sources = [tensors[number] for number in self.numbers]
        if self.how == "one by one":
            for source, target in zip(sources, self.targets, strict=True):
                target.copy_(source, non_blocking=True)
            return
        torch._foreach_copy_(self.targets, [one.view(-1) for one in sources] if self.how == "flat" else sources)


class _Window(NamedTuple):
    """A part of the shard that is sent to the host at once, after `gather` has copied it to the staging block."""

    begin: int
    end: int
    gather: Sequence[_Copies] = ()
    large: int | None = None
    """The number of a tensor for which the block is too small: it is sent from where it lies."""


class Staging:
    """The staging block, and what goes through it."""

    def __init__(self, side: SideStream) -> None:
        self.side = side
        self._block = torch.empty(0, dtype=torch.uint8)
        self._first: list[_Copies] = []
        """What lies on the CPU."""
        self._aside: list[tuple[int, Tensor]] = []
        """Its bytes, and where in the shard they begin."""
        self._windows: list[_Window] = []
        self._tensors: Sequence[Tensor] = ()
        """What our stream reads. Kept until it has, so that PyTorch does not give the memory of one to another tensor."""
        self._copied: torch.cuda.Event | None = None

    @property
    def memory(self) -> dict[str, int]:
        """How many bytes it takes: of the host's memory always, of the GPU's until the copy has ended."""
        return {"host": sum(one.nbytes for _, one in self._aside), "gpu": self._block.nbytes}

    def plan(self, named: Sequence[NamedTensor], places: Sequence[ByteRange], free: int | None = None) -> None:
        """Make the block, as far as the GPU has room for it, and decide what is copied when."""
        free = self.side.free_bytes() + self._block.nbytes if free is None else free
        tensors = [item.tensor for item in named]
        here = [number for number, one in enumerate(tensors) if self.side.holds(one) and one.numel()]
        whole = places[here[-1]][1] - places[here[0]][0] if here else 0
        room = staging_bytes(whole, free)
        self._windows, self._first, self._block = [], [], torch.empty(0, dtype=torch.uint8)  # before a new one is made
        try:
            self._block = self.side.staging_block(room)
        except torch.OutOfMemoryError:
            self.plan(named, places, free=0)
            return
        for numbers in tensor_windows(here, places, room):
            begin, end = places[numbers[0]][0], places[numbers[-1]][1]
            if end - begin > room:
                self._windows.append(_Window(begin, end, large=numbers[0]))
                continue
            views = {number: view_of(self._block, places[number], tensors[number], begin) for number in numbers}
            self._windows.append(_Window(begin, end, _group_copies(tensors, views)))
        rest = sorted({*range(len(named))}.difference(here))
        packed = dict(zip(rest, packed_ranges(tensors[number] for number in rest), strict=True))
        block = self.side.host_block(sum(tensors[number].nbytes for number in rest))
        first = {number: view_of(block, place, tensors[number]) for number, place in packed.items()}
        self._aside = [(places[number][0], block[slice(*place)]) for number, place in packed.items()]
        self._first = _group_copies(tensors, first)

    def copy(self, named: Sequence[NamedTensor], places: Sequence[ByteRange], send: SendToHost) -> None:
        """Enqueue the copy of `named`, for which `plan` was called; `finish` ends it."""
        side = self.side
        self.give_back()  # else `resize_` would take memory a second time, and copy what the block held before
        try:
            side.take_again(self._block)
        except torch.OutOfMemoryError:
            self.plan(named, places, free=side.free_bytes())
        self._tensors = tensors = [item.tensor for item in named]
        for copies in self._first:
            copies.make(tensors)
        side.wait_for_training()
        with side.use_stream():
            gathered = side.record_event()
            for window in self._windows:
                for copies in window.gather:
                    copies.make(tensors)
                if window.large is None:
                    gathered = side.record_event()
                    send(window.begin, self._block[: window.end - window.begin])
                else:
                    large = tensors[window.large].resolve_conj().resolve_neg()
                    send(window.begin, large.reshape(-1).view(torch.uint8))
                    gathered = side.record_event()
            self._copied = side.record_event()
        side.hold_training(gathered)

    def finish(self, send: SendToHost) -> None:
        """Wait until all is in the host's memory; for the writer's thread."""
        if self._copied is not None:
            self._copied.synchronize()
        self._tensors = ()
        self.give_back()
        for begin, content in self._aside:
            send(begin, content)

    def give_back(self) -> None:
        """Give the block's memory to PyTorch's cache, until the next copy."""
        self._block.untyped_storage().resize_(0)


def staging_bytes(whole: int, free: int) -> int:
    """Return how large the block is on a GPU with so much `free` memory: large enough for all tensors, or a small part of `free`."""
    return whole if whole <= free // 2 else min(_WINDOW_BYTES, free // 8)


def tensor_windows(numbers: Sequence[int], places: Sequence[ByteRange], room: int) -> list[list[int]]:
    """Group tensors that follow one another and fit into `room` together; one that does not fit is alone."""
    found: list[list[int]] = []
    for number in numbers:
        if found and places[number][1] - places[found[-1][0]][0] <= room:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def packed_ranges(tensors: Iterable[Tensor]) -> list[ByteRange]:
    """Return the place of each tensor where one follows the other."""
    return list(pairwise([0, *accumulate(one.nbytes for one in tensors)]))


def view_of(block: Tensor, place: ByteRange, like: Tensor, begin: int = 0) -> Tensor:
    """Return a place of `block`, which begins at `begin`, as a contiguous tensor of the shape and dtype of another."""
    return block[place[0] - begin : place[1] - begin].view(like.dtype).view(like.shape)


def _group_copies(tensors: Sequence[Tensor], targets: Mapping[int, Tensor]) -> list[_Copies]:
    """Group the copies that one call makes with few kernels: of one dtype, where both tensors have their elements in one order."""
    groups: dict[tuple[_CopyMethod, torch.dtype, torch.device], dict[int, Tensor]] = defaultdict(dict)
    for number, target in targets.items():
        one = tensors[number]
        how: _CopyMethod = "one by one"
        if one.dtype in _FOREACH_DTYPES and one.device == target.device and one.is_contiguous():
            # Strides of a dimension of one element may be any.
            how = "at once" if one.stride() == target.stride() else "flat"
        groups[how, one.dtype, one.device][number] = target.view(-1) if how == "flat" else target
    return [_Copies(how, [*group], [*group.values()]) for (how, *_), group in groups.items()]
