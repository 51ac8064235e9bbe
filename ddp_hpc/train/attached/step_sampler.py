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
        self._origin = Position()
        self._next = self._origin

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
        for batch in RankSampler(order=self.order, start=begin, total_steps=end.step, rank=self._rank):
            yield [index for one in batch.micro_batches for index in one.indices]

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be of this epoch, as `DistributedSampler` has it; of the first one, what is left of it."""
        begin = Position(step=epoch * self.order.steps_per_epoch, epoch=epoch)
        self._next = self._origin if epoch == self._origin.epoch else begin

    def state_dict(self, step: int) -> dict[str, int]:
        """Return the position after `step` steps; save it with the model."""
        if step < self._origin.step:
            raise ConfigError(
                f"The state of step {step} was asked for, but the order goes on from step {self._origin.step}."
            )
        position = self.order.position_after(self._origin, int(step) - self._origin.step)
        if self._next != self._origin and self._next.epoch - position.epoch not in {0, 1}:
            raise ConfigError(
                f"The state of step {step} is of epoch {position.epoch}, but the loader has started {self._next.epoch} epochs, so a resumed "
                "run would get other samples. Iterate over it once for each epoch, counted from 0, to its end; to inspect samples, "
                "make another `run.order`."
            )
        return asdict(position)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the step of a saved state."""
        self._origin = self._next = Position(**{key: int(value) for key, value in state.items()})
