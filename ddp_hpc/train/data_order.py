"""The order of samples: a pure function of (seed, epoch, position), dealt out by rank.

An epoch is one permutation of the training set. A window is the samples of one optimizer step: the next
`global_batch_size` positions of the permutation, fewer at the epoch's end. A micro step is what all ranks take through
the model at once; its positions are dealt out in turn, rank r taking every world_size-th. So the sets of samples a
window holds do not depend on the world, and a run continues at a position, not at a count of batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

_SEED_BITS = 63


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**63 that follows from `parts` alone, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the training stands in its data; part of every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs completed."""
    samples_in_epoch: int = 0
    """Samples of the current epoch already used."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The rule that gives every step of a run its samples."""

    num_samples: int
    """Size of the training set."""
    seed: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    drop_last: bool = False

    @property
    def samples_per_epoch(self) -> int:
        short = self.num_samples % self.global_batch_size
        return self.num_samples - (short if self.drop_last else 0)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.global_batch_size)

    def samples_left(self, position: Position) -> int:
        """Return how many samples of its epoch are still to be used.

        The position may come from a run with another batch size, `drop_last` or data, so it is no multiple of anything.
        """
        left = max(self.num_samples - position.samples_in_epoch, 0)
        return left - (left % self.global_batch_size if self.drop_last else 0)

    def last_step(self, position: Position, *, epochs: int) -> int:
        """Return the step at which so many epochs are over, seen from `position`."""
        in_this_epoch = -(-self.samples_left(position) // self.global_batch_size)
        return position.step + in_this_epoch + (epochs - position.epoch - 1) * self.steps_per_epoch


@dataclass(frozen=True)
class MicroBatch:
    """One rank's samples of one micro step."""

    epoch: int
    indices: tuple[int, ...]
    """Which samples; where the rank has none left, one of the window's, with no weight."""
    num_real: int
    """How many of them count: all, or none."""


@dataclass(frozen=True)
class Window:
    """The samples of one optimizer step, as one rank sees them."""

    num_samples: int
    """Over all ranks."""
    micro_batches: tuple[MicroBatch, ...]
    after: Position
    """Where the training stands once this step is done."""


@lru_cache(maxsize=2)
def permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch's samples, int64 of shape (num_samples,)."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def window_at(order: Order, position: Position, rank: int) -> Window:
    """Return the window that begins at `position`, as `rank` sees it; never an empty one.

    Where the batch size or `drop_last` was changed amid an epoch, too few of its samples may be left for a window.
    """
    if not order.samples_left(position):
        position = Position(step=position.step, epoch=position.epoch + 1)
    start, end_of_epoch = position.samples_in_epoch, position.samples_in_epoch + order.samples_left(position)
    end = min(start + order.global_batch_size, end_of_epoch)
    samples = permutation(order.num_samples, order.seed, position.epoch)[start:end].tolist()
    per_micro_step = order.micro_batch_size * order.world_size
    micro_batches = tuple(
        _deal(samples[first : first + per_micro_step], position.epoch, rank, order.world_size, spare=samples[0])
        for first in range(0, len(samples), per_micro_step)
    )
    after = replace(position, step=position.step + 1, samples_in_epoch=end)
    if end == end_of_epoch:
        after = Position(step=position.step + 1, epoch=position.epoch + 1)
    return Window(len(samples), micro_batches, after)


def _deal(samples: list[int], epoch: int, rank: int, world_size: int, *, spare: int) -> MicroBatch:
    mine = tuple(samples[rank::world_size])
    return MicroBatch(epoch, mine or (spare,), len(mine))


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One rank's windows from a position to the last step; can be walked more than once."""

    order: Order
    start: Position
    total_steps: int
    rank: int

    def __iter__(self) -> Iterator[Window]:
        return windows(self.order, self.start, total_steps=self.total_steps, rank=self.rank)


def windows(order: Order, start: Position, *, total_steps: int, rank: int) -> Iterator[Window]:
    """Yield every window from `start` up to `total_steps`, over the ends of epochs."""
    position = start
    while position.step < total_steps:
        window = window_at(order, position, rank)
        yield window
        position = window.after
