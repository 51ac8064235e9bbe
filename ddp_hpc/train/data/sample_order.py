"""The order of samples: a pure function of (seed, epoch, position), distributed over the ranks.

An epoch is one permutation of the training set. A global batch holds the samples of one optimizer step: the next
`global_batch_size` positions of the permutation, fewer at the end of the epoch. In a micro step each rank takes one micro
batch through the model: rank r gets positions r, r + world_size, r + 2 * world_size and so on. So the samples of a global
batch do not depend on the number of ranks, and a run can resume at any position with another world size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

_SEED_BITS = 63
NEAR_END_DIVISOR = 8
"""The next order is made when this part of an epoch is left: an eighth."""
MIN_SAMPLES_FOR_THREAD = 1 << 20
"""The order of fewer samples takes less than 20 ms."""


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**63 that follows from `parts` alone, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far the training has got in its data; part of every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs completed."""
    samples_in_epoch: int = 0
    """Samples of the current epoch already used."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The rule that assigns samples to every step of a run."""

    num_samples: int
    """Size of the training set."""
    seed: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    drop_last: bool = False

    @property
    def samples_per_epoch(self) -> int:
        return self.samples_left(Position())

    @property
    def steps_per_epoch(self) -> int:
        return self.steps_left(Position())

    def samples_left(self, position: Position) -> int:
        """Return how many samples of the epoch are left.

        The position may come from an attempt with another batch size, `drop_last` or data set, so it need not be a multiple
        of the batch size.
        """
        left = max(self.num_samples - position.samples_in_epoch, 0)
        return left - (left % self.global_batch_size if self.drop_last else 0)

    def steps_left(self, position: Position) -> int:
        """Return how many steps of the epoch are left."""
        return -(-self.samples_left(position) // self.global_batch_size)

    def position_after(self, position: Position, num_steps: int) -> Position:
        """Return the position `num_steps` after another one, as taking them one by one gives it."""
        in_this_epoch = self.steps_left(position)
        step = position.step + num_steps
        if num_steps < in_this_epoch:
            done = position.samples_in_epoch + num_steps * self.global_batch_size
            return Position(step=step, epoch=position.epoch, samples_in_epoch=done)
        epochs, steps = divmod(num_steps - in_this_epoch, self.steps_per_epoch)
        return Position(step=step, epoch=position.epoch + 1 + epochs, samples_in_epoch=steps * self.global_batch_size)

    def samples_between(self, begin: Position, end: Position) -> int:
        """Return how many samples the steps from one position to a later one use."""
        if begin.epoch == end.epoch:
            return end.samples_in_epoch - begin.samples_in_epoch
        whole_epochs = end.epoch - begin.epoch - 1
        return self.samples_left(begin) + whole_epochs * self.samples_per_epoch + end.samples_in_epoch

    def last_step(self, position: Position, *, epochs: int) -> int:
        """Return the last step of `epochs` epochs for a run that is at `position`."""
        return position.step + self.steps_left(position) + (epochs - position.epoch - 1) * self.steps_per_epoch


class MicroBatch(NamedTuple):
    """One rank's samples of one micro step."""

    epoch: int
    indices: tuple[int, ...]
    """Which samples; if none is left for this rank, one sample of the global batch, with weight zero."""
    num_real: int
    """How many of them count: all or none."""


class GlobalBatch(NamedTuple):
    """The samples of one optimizer step, as one rank sees them."""

    num_samples: int
    """Over all ranks."""
    micro_batches: tuple[MicroBatch, ...]
    after: Position
    """The position after this step."""


def permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch's samples, in 32 bits where they suffice: the order is the same."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    dtype = torch.int32 if num_samples <= torch.iinfo(torch.int32).max else torch.int64
    return torch.randperm(num_samples, generator=generator, dtype=dtype)


def _global_batch(
    order: SampleOrder, position: Position, samples: list[int], rank: int, *, is_last: bool
) -> GlobalBatch:
    """Divide the samples of a global batch that begins at `position`, the last of its epoch or not, as `rank` sees it."""
    per_micro_step = order.micro_batch_size * order.world_size
    micro_batches = []
    for first in range(0, len(samples), per_micro_step):
        mine = tuple(samples[first + rank : first + per_micro_step : order.world_size])
        # A rank without a sample takes the first one, with weight zero: DDP's all-reduce needs every rank to go backward.
        micro_batches.append(MicroBatch(position.epoch, mine or (samples[0],), len(mine)))
    done = 0 if is_last else position.samples_in_epoch + len(samples)
    after = Position(step=position.step + 1, epoch=position.epoch + is_last, samples_in_epoch=done)
    return GlobalBatch(len(samples), tuple(micro_batches), after)


@dataclass(frozen=True, kw_only=True)
class RankSampler:
    """The global batches of one rank, from a position to the last step; can be iterated more than once."""

    order: SampleOrder
    start: Position
    total_steps: int
    rank: int

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Yield every global batch, over as many epochs as that takes.

        The order of one epoch is kept. Near the epoch's end only what is left of it is, and a thread makes the next one.
        """
        position, order, total_steps = self.start, self.order, self.total_steps
        shuffled = partial(permutation, order.num_samples, order.seed)
        ending = order.num_samples // NEAR_END_DIVISOR if order.num_samples >= MIN_SAMPLES_FOR_THREAD else 0
        coming: Future[torch.Tensor] | None = None
        with ThreadPoolExecutor(1, "order of samples") as beside:
            while position.step < total_steps:
                # None are left if the user changed the batch size or `drop_last` in the middle of the epoch: take the next epoch.
                if not order.samples_left(position):
                    position = Position(step=position.step, epoch=position.epoch + 1)
                left = (coming.result() if coming else shuffled(position.epoch))[position.samples_in_epoch :]
                left, coming = left[: order.samples_left(position)], None
                while len(left) and position.step < total_steps:
                    if len(left) <= ending and not coming and position.step + order.steps_left(position) < total_steps:
                        left = left.clone()  # a view would keep the whole order
                        coming = beside.submit(shuffled, position.epoch + 1)
                    samples, left = left[: order.global_batch_size].tolist(), left[order.global_batch_size :]
                    batch = _global_batch(order, position, samples, self.rank, is_last=not len(left))
                    yield batch
                    position = batch.after
