"""`train.compile`: which passes of the training run compiled, and one line in the log where none does.

Only micro batches of one size run compiled, that of a full step. The compiler makes another graph for another size, which
takes as long as the first one; from then on it may take that graph for the first size, too, whose last bits can differ. An
attempt that resumes later would take the first graph, and would no longer repeat the steps of an unbroken run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hpc.train.data.sample_order import MicroBatch, SampleOrder

log = logging.getLogger(__name__)

_NULL_CONTEXT = nullcontext()


class PlainPasses:
    """Runs every pass as it is."""

    def forward_context(self, plan: MicroBatch) -> AbstractContextManager[object]:  # noqa: ARG002  as the compiled ones
        """Return the context manager for the forward pass on a micro batch."""
        return _NULL_CONTEXT

    def warmup_context(self) -> AbstractContextManager[object]:
        """Return the context manager for the pass before the first step (`ddp_warmup`)."""
        return _NULL_CONTEXT


class CompiledPasses(PlainPasses):
    """Runs the passes on full micro batches compiled, and says after the first one what the compiler has made of the model."""

    def __init__(self, order: SampleOrder, rank: int) -> None:
        at_once = min(order.num_samples, order.micro_batch_size * order.world_size)
        self._size = len(range(rank, at_once, order.world_size)) or 1
        self._graphs_before: int | None = None
        self._has_reported = self._is_warming_up = False

    def forward_context(self, plan: MicroBatch) -> AbstractContextManager[object]:
        if self._is_warming_up:
            return _NULL_CONTEXT
        if not self._has_reported and self._graphs_before is not None:
            self._report(_num_graphs() - self._graphs_before)
        if len(plan.indices) != self._size:
            return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]  # a context manager's class
        if self._graphs_before is None:
            self._graphs_before = _num_graphs()
        return _NULL_CONTEXT

    @contextmanager
    def warmup_context(self) -> Iterator[None]:
        """Run without the compiler: the pass fixes DDP's buckets by the order of the gradients, which the compiler changes.

        An attempt may begin with a smaller micro batch, which is not compiled, and needs the buckets of an unbroken run.
        """
        self._is_warming_up = True
        with torch.compiler.set_stance("force_eager"):
            yield
        self._is_warming_up = False

    def _report(self, num_graphs: int) -> None:
        self._has_reported = True
        if not num_graphs:
            log.warning(
                "`train.compile` is on, but PyTorch has compiled nothing of the model, so the training runs as without it. "
                "Graph breaks or `torch.compiler.disable` in its forward are the usual reasons: `env.TORCH_LOGS=graph_breaks,recompiles` "
                "writes them into this log."
            )
            return
        log.info(
            "`train.compile`: PyTorch has compiled the model (graphs: %d) for micro batches of %d samples. Micro batches of "
            "another size, and evaluations, run without the compiler.",
            num_graphs,
            self._size,
        )


def compile_model(model: nn.Module) -> nn.Module:
    """Return the model that the loop calls, compiled; for one in DDP, split where its all-reduces begin."""
    if not isinstance(model, DistributedDataParallel):
        return torch.compile(model)  # type: ignore[return-value]  # typed as a callable
    # Not DDP as a whole: then the compiler looks at the frames below DDP's forward, and passes over those of torch.nn itself,
    # such as `nn.Sequential.forward` (https://github.com/pytorch/pytorch/issues/140416). Called by DDP, the compiled module is
    # still split at DDP's buckets: https://pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer
    model.module = torch.compile(model.module)
    return model


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
