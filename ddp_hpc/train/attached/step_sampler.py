"""Our exact data order as a sampler for PyTorch's DataLoader: which samples each step has follows from the step alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from torch.utils.data import Sampler

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.data.sample_order import Position, RankSampler, SampleOrder


class StepSampler(Sampler[list[int]]):
    """A `batch_sampler` for a DataLoader: yields this rank's samples of each step, an epoch at each iteration.

    It keeps no count of what the loader has read ahead. The script says from which step to go on (`load_state_dict`), and the
    first iteration then begins there, in the middle of the epoch.
    """

    def __init__(self, order: SampleOrder, rank: int) -> None:
        self.order = order
        self._rank = rank
        self._origin = self._next = Position()
        # Batches since then; whether the iteration has not come to its end, and whether one did not before another began.
        self._num_read, self._is_in_epoch, self._has_left_epoch = 0, False, False

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is of, counted from 0."""
        return self._next.epoch

    @property
    def step(self) -> int:
        """The number of steps before the next iteration."""
        return self._next.step

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, also where the first one begins in its middle."""
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        # Begun when the first batch is asked for: a loader with workers makes two iterators, and uses the second one.
        begin = self._next
        # `_next` is set now: a loader may read ahead, or not to the end.
        end = self._next = self.order.position_after(begin, self.order.steps_left(begin))
        self._has_left_epoch |= self._is_in_epoch
        for batch in RankSampler(order=self.order, start=begin, total_steps=end.step, rank=self._rank):
            self._num_read += 1
            self._is_in_epoch = batch.after.step < end.step  # no loader need ask for more than the last one
            yield [index for one in batch.micro_batches for index in one.indices]

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be of this epoch, as `DistributedSampler` has it; of the first one, what is left of it."""
        begin = Position(step=epoch * self.order.steps_per_epoch, epoch=epoch)
        self._next = self._origin if epoch == self._origin.epoch else begin

    def state_dict(self, step: int) -> dict[str, int]:
        """Return the position after `step` steps, each of one batch of the loader; save it with the model."""
        if step < self._origin.step:
            raise ConfigError(
                f"The state of step {step} was asked for, but the order goes on from step {self._origin.step}."
            )
        num = int(step) - self._origin.step
        position, read = (self.order.position_after(self._origin, one) for one in (num, self._num_read))
        # A loader reads some batches ahead, also of the next epoch.
        is_apart = self._next.epoch < position.epoch or (num and self._num_read - num >= self.order.steps_per_epoch)
        if self._num_read and (self._has_left_epoch or self._next.epoch - read.epoch not in {0, 1} or is_apart):
            raise ConfigError(
                f"The state of step {step} is of epoch {position.epoch}, but the loader has started {self._next.epoch} epochs, and read "
                f"{self._num_read} batches{' and not all of some epoch' if self._has_left_epoch else ''}, so a resumed run would get other samples. Count each batch "
                "as a step. Iterate over it once for each epoch, counted from 0, to its end; to inspect samples, make another `run.order`."
            )
        return asdict(position)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the step of a saved state."""
        self._num_read, self._is_in_epoch, self._has_left_epoch = 0, False, False
        self._origin = self._next = Position(**{key: int(value) for key, value in state.items()})
