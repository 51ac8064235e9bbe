"""From the order of samples to tensors: the loader of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.processes import deaths_held_back, die_with_parent, ignore_stop_signals, unblock_signals
from ddp_hpc.spec import DataSpec
from ddp_hpc.train.data_order import MicroBatch, Walk, Window, derive_seed
from ddp_hpc.train.rng import HostGenerators, seed_host_libraries

Collate = Callable[[list[Any]], Any]
"""A list of samples -> one batch of them."""


class Fetched(NamedTuple):
    """A micro batch with the ids of the samples that it was made from."""

    indices: tuple[int, ...]
    batch: Any


class SeededFetch(Dataset[Any]):
    """A map-style dataset whose randomness follows from (seed, epoch, index), whichever process does the work."""

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate

    def __getitems__(self, micro_batch: Sequence[MicroBatch]) -> Fetched:
        """Fetch one micro batch; the loader hands over a list of one."""
        (wanted,) = micro_batch
        if self._collate is None and type(self._dataset) is TensorDataset:
            # No code of the user's runs, as it does in a subclass: take all rows at once.
            return Fetched(wanted.indices, self._dataset[torch.tensor(wanted.indices)])
        generators = HostGenerators() if get_worker_info() is None else None
        samples = [self._fetch(wanted.epoch, index) for index in wanted.indices]
        batch = (self._collate or default_collate)(samples)
        if generators is not None:
            generators.put_back()
        return Fetched(wanted.indices, batch)

    def _fetch(self, epoch: int, index: int) -> Any:
        seed = derive_seed("sample", self._seed, epoch, index)
        torch.default_generator.manual_seed(seed)
        seed_host_libraries(seed)
        try:
            return self._dataset[index]
        except DdpHpcError:
            raise
        except Exception as error:
            data = "eval_data" if epoch < 0 else "train_data"
            raise SampleError(f"`{data}[{index}]` raised {type(error).__name__}: {error}") from error


class SampleError(RuntimeError):
    """A sample could not be read; the message names it. It is no error of input: another attempt may well read it."""


class _MicroBatches:
    """What the loader asks for, one micro batch at a time: a batch sampler of lists of one."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        for window in self._walk:
            for micro_batch in window.micro_batches:
                yield [micro_batch]


class LoadedWindow(NamedTuple):
    """A window with its samples, in the order of its micro batches."""

    plan: Window
    fetched: Iterator[Fetched]


def training_windows(
    dataset: Dataset[Any], walk: Walk, *, data: DataSpec, pin_memory: bool, collate: Collate | None = None
) -> Iterator[LoadedWindow]:
    """Yield the windows of `walk` with their samples; loading runs ahead over the ends of epochs."""
    fetch = SeededFetch(dataset, walk.order.seed, collate)
    fetched = begin(make_loader(fetch, _MicroBatches(walk), data=data, pin_memory=pin_memory))
    for plan in walk:
        yield LoadedWindow(plan, (next(fetched) for _ in plan.micro_batches))


def make_loader(
    dataset: Dataset[Any],
    sampler: Any,
    *,
    data: DataSpec,
    pin_memory: bool,
    is_kept: bool = False,
) -> DataLoader[Any]:
    """Return a loader of what `sampler` names; its processes die with this one and heed no signals of the job's.

    A loader that `is_kept` keeps its processes for the next time it is walked through.
    """
    parallel: dict[str, Any] = {}
    if data.num_workers:
        parallel = {
            "num_workers": data.num_workers,
            "prefetch_factor": data.prefetch_factor,
            "worker_init_fn": _LoaderProcess(os.getpid()),
            "multiprocessing_context": "fork",
            "persistent_workers": is_kept,
        }
    generator = torch.Generator()  # or else the loader would draw its seed from the training's own
    return DataLoader(
        dataset, batch_sampler=sampler, collate_fn=_as_is, pin_memory=pin_memory, generator=generator, **parallel
    )


def begin(loader: DataLoader[Any]) -> Iterator[Any]:
    """Fork a loader's processes and begin to walk through it; a death among all loaders' is told once they are there.

    PyTorch raises it from its handler of SIGCHLD, wherever the main thread is: not in the midst of a fork, please.
    """
    with deaths_held_back():
        return iter(loader)


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Move every tensor in a nest of tuples, lists and dicts, from pinned memory without waiting.

    With `channels_last`, 4-D tensors come in that order.
    """
    if device.type == "cpu" and not channels_last:  # where loaders put it
        return batch
    if isinstance(batch, torch.Tensor):
        order = torch.channels_last if channels_last and batch.dim() == 4 else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=order)
    move = partial(to_device, device=device, channels_last=channels_last)
    if isinstance(batch, dict):
        return {key: move(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value) for value in batch)
    return batch


def _as_is(fetched: Any) -> Any:
    return fetched


class _LoaderProcess:
    """Run once in each loader process."""

    def __init__(self, parent_pid: int) -> None:
        self._parent_pid = parent_pid

    def __call__(self, _worker_id: int) -> None:
        die_with_parent(self._parent_pid)
        ignore_stop_signals()
        unblock_signals()
