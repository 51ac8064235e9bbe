"""Explains that batch norm cannot train on a single sample, before and when that happens."""

from __future__ import annotations

import logging

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.data.sample_order import GlobalBatch, MicroBatch, SampleOrder

log = logging.getLogger(__name__)

_ERROR_OF_TORCH = "Expected more than 1 value per channel"
_REMEDY = (
    "Set `data.drop_last=true`, which leaves out the samples at an epoch's end that do not fill a global batch, "
    "or choose another `train.global_batch_size` or `train.micro_batch_size`."
)


def warn_of_single_samples(order: SampleOrder, model: nn.Module) -> None:
    """Warn at the start if a rank will get a micro batch of one sample, and the model trains batch norm."""
    if not any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        return
    at_once = order.micro_batch_size * order.world_size
    last = (order.samples_per_epoch % order.global_batch_size) % at_once
    if order.micro_batch_size == 1 or 0 < last < 2 * order.world_size:
        log.warning(
            "A rank gets a micro batch of a single sample %s, but the model has batch norm, "
            "which cannot train on one value per channel. %s",
            "in every micro step" if order.micro_batch_size == 1 else "at the end of each epoch",
            _REMEDY,
        )


def clearer_error(error: Exception, plan: MicroBatch, global_batch: GlobalBatch) -> ConfigError | None:
    """For batch norm's error on a single sample, return one that names the batch and the setting that helps; else None."""
    if len(plan.indices) > 1 or _ERROR_OF_TORCH not in str(error):
        return None
    return ConfigError(
        f"Batch norm got a single sample to train on and raised: {error}. It was one of {global_batch.num_samples} samples of "
        f"step {global_batch.after.step}, distributed over ranks and micro steps. {_REMEDY}"
    )
