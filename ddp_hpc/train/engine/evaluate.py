"""Evaluation: uses every held-out sample exactly once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _sync_params_and_buffers
from torch.utils.data import DataLoader

from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.data.loader import SeededDataset, make_loader, raise_if_error, start_loader, to_device
from ddp_hpc.train.data.sample_order import MicroBatch
from ddp_hpc.train.engine.modes import evaluation_mode
from ddp_hpc.train.engine.precision import Precision
from ddp_hpc.train.engine.set_aside import undo_trial
from ddp_hpc.train.engine.weighted_loss import compute_loss, num_parts_of, warn_of_no_mean
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state import rng
from ddp_hpc.train.state.training_state import per_rank_predicate

_BROADCAST_BYTES = 32 << 20
"""Buffers are sent together up to about this size: a message takes this much memory on each rank."""


class _HeldOutSampler:
    """This rank's part of the held-out set: every world_size-th sample, without padding.

    Until `is_wanted`, it is only one batch, for the trial.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, world_size: int) -> None:
        self._mine = range(rank, num_samples, world_size)
        self._batch_size = batch_size
        self.is_wanted = False
        extremes = (range(one, num_samples, world_size) for one in (0, world_size - 1))
        self.num_batches = [-(-len(samples) // batch_size) for samples in extremes]
        """How many batches the ranks evaluate: the one with most samples, and the one with fewest."""

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        wanted = self._mine if self.is_wanted else self._mine[: self._batch_size]
        for first in range(0, len(wanted), self._batch_size):
            indices = tuple(wanted[first : first + self._batch_size])
            yield [MicroBatch(-1, indices, len(indices))]


class Evaluator:
    """Evaluates a model on the recipe's held-out samples, over all ranks."""

    def __init__(
        self,
        recipe: Recipe,
        spec: RunSpec,
        group: Group,
        precision: Precision,
        *,
        on_batch: Callable[[], object] = lambda: None,
    ) -> None:
        self._recipe = recipe
        self._on_batch = on_batch
        self._group = group
        self._precision = precision
        self._channels_last = spec.train.channels_last
        self._loader: DataLoader[Any] | None = None
        self._num_parts = 0
        if recipe.eval_data is not None:
            rank_info, train, at_once = group.rank_info, spec.train, spec.eval.batch_size
            num_samples = len(recipe.eval_data)  # type: ignore[arg-type]  # map-style data has a length
            fewest = min(at_once, num_samples // rank_info.world_size)
            if train.micro_batch_size_in(rank_info.world_size) in (1, train.global_batch_size):
                self._num_parts = num_parts_of(fewest)  # `batches_after_warmup` checks the loss of other batches
            self._held_out = _HeldOutSampler(num_samples, at_once, rank=rank_info.rank, world_size=rank_info.world_size)
            self._loader = make_loader(
                SeededDataset(recipe.eval_data, spec.seed, recipe.collate_fn),
                self._held_out,
                data=spec.data,
                pin_memory=group.device.type == "cuda",
                is_kept=True,
            )

    def start(self, model: nn.Module) -> None:
        """Start the loader's processes, and evaluate one batch as a trial that changes nothing.

        So a metric with a wrong shape fails before the training, not after its first epoch.
        """
        if self._loader is None:
            return
        # The processes are forked now and kept. Later this process has threads (the checkpoint writer's, pin_memory's), and
        # a fork beside threads may deadlock: https://docs.python.org/3/library/os.html#os.fork
        # What leaves traces: a first batch that sets a layer's scale, weights that are merged for evaluation (as LoRA's are) and unmerged
        # with other last bits. A loss may be a layer of the recipe's model also where `model` has the averaged weights.
        called = (
            self._recipe.model,
            self._recipe.loss,
            self._recipe.inputs_and_targets,
            *self._recipe.metrics.values(),
        )
        before = _num_collectives(self._group.device)
        with undo_trial(model, called, self._group.device), evaluation_mode(self._recipe.model, model), torch.no_grad():
            for fetched in map(raise_if_error, start_loader(self._loader)):
                batch = to_device(fetched.batch, self._group.device, channels_last=self._channels_last)
                self._batch_sums(model, batch, len(fetched.indices))
        most, fewest = self._held_out.num_batches
        if _num_collectives(self._group.device) != before and most != fewest:
            raise ConfigError(
                "The evaluation calls collectives (`torch.distributed`) in the model, the loss or a metric, but some ranks have "
                f"{most} batches of `eval_data` and some {fewest}: those with more would wait for ever. Choose `eval.batch_size` and the number of samples so "
                "that all ranks have equally many batches, or call no collectives in evaluation (`if torch.is_grad_enabled()`)."
            )
        self._held_out.is_wanted = True

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean of the loss and of each metric over the held-out samples, the same on every rank."""
        if self._loader is None:
            return {}
        sums = torch.zeros(len(self._recipe.metrics) + 3, dtype=torch.float64, device=self._group.device)
        # All ranks use the buffers (batch-norm statistics) of rank zero, as in training. There DDP's forward broadcasts them;
        # here `model` is not in DDP: ranks may have different numbers of batches, but must call collectives equally often.
        # https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
        if self._group.rank_info.world_size > 1:
            is_own = per_rank_predicate(model)
            _take_from_rank_zero([one for name, one in model.named_buffers() if not is_own(name)])
        with evaluation_mode(self._recipe.model, model), torch.no_grad(), rng.preserve_states(self._group.device):
            for fetched in map(raise_if_error, self._loader):
                batch = to_device(fetched.batch, self._group.device, channels_last=self._channels_last)
                sums += self._batch_sums(model, batch, len(fetched.indices))
                self._on_batch()
        loss, *totals, count, weight = self._group.sum(sums).tolist()
        means = {name: total / count for name, total in zip(self._recipe.metrics, totals, strict=True)}
        return {"loss": loss / weight if weight else 0.0, **means}

    def _batch_sums(self, model: nn.Module, batch: Any, num_samples: int) -> Tensor:
        inputs, targets = self._recipe.inputs_and_targets(batch)
        with self._precision.autocast():
            outputs = model(inputs)
            loss, weight = compute_loss(self._recipe.loss, outputs, targets)
            if self._num_parts and not self._held_out.is_wanted:
                warn_of_no_mean(self._recipe.loss, outputs, targets, self._num_parts)
        scores = [loss.double() * num_samples if weight is None else loss.double()]
        for name, metric in self._recipe.metrics.items():
            values: object = metric(outputs, targets)
            if not isinstance(values, Tensor) or values.shape != (num_samples,):
                got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
                # In the trial nothing has been trained yet, so it is an error of the input.
                kind = WorkerError if self._held_out.is_wanted else ConfigError
                raise kind(
                    f"Metric {name!r} returned {got} for {num_samples} samples, "
                    f"but must return one value per sample, shape ({num_samples},)."
                )
            scores.append(values.double().sum())
        count = torch.full_like(scores[0], num_samples)
        return torch.stack([*scores, count, count if weight is None else weight])


def _num_collectives(device: torch.device) -> int:
    """Return how many collectives the default group has begun, on CPUs and on `device`."""
    if not torch.distributed.is_initialized():
        return 0
    # Each backend counts its own; before PyTorch 2.12, the group itself has no number where gloo serves both.
    group: Any = torch.distributed.group.WORLD
    backends = [group._get_backend(torch.device(kind)) for kind in {"cpu", device.type}]  # noqa: SLF001
    return sum(one._get_sequence_number_for_group() for one in backends)  # noqa: SLF001


@torch.no_grad()
def _take_from_rank_zero(buffers: Sequence[Tensor]) -> None:
    """Copy rank zero's values into the tensors, which may have gaps in memory; all ranks call this together."""
    # gloo sends as many elements as there are from the first address on, whatever lies between them; NCCL refuses gaps.
    sent = [buffer.resolve_conj().resolve_neg().contiguous() for buffer in buffers]
    # In few messages, as DDP does it: a model may have hundreds of small ones. As bytes, so that types can share a message.
    contents = [one.reshape(-1).view(torch.uint8) for one in sent]
    group: Any = torch.distributed.group.WORLD
    _sync_params_and_buffers(group, contents, _BROADCAST_BYTES, 0)
    for buffer, one in zip(buffers, sent, strict=True):
        if one is not buffer:
            buffer.copy_(one)
