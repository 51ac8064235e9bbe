"""Loads the samples of one rank, in the order of `data_order`, as tensors."""

from __future__ import annotations

import os
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

from ddp_hpc.base.errors import DdpHpcError, text_of
from ddp_hpc.base.processes import die_with_parent, ignore_stop_signals, sigchld_blocked, unblock_signals
from ddp_hpc.run.run_dir.error_fingerprint import AffectedEntity, is_decoder_error, raising_place
from ddp_hpc.run.spec import DataSpec
from ddp_hpc.train import unsaved
from ddp_hpc.train.data.sample_files import record_sources, size_and_hash_of
from ddp_hpc.train.data.sample_order import GlobalBatch, MicroBatch, RankSampler, derive_seed
from ddp_hpc.train.data.seedless import reads_no_generator
from ddp_hpc.train.state.rng import preserve_cpu_states, seed_host_libraries

Collate = Callable[[list[Any]], Any]
"""A list of samples -> one batch."""


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """A micro batch, and the indices of its samples.

    Not a tuple: older versions of PyTorch pin a tuple's items, and do not ask it.
    """

    indices: tuple[int, ...]
    batch: Any

    def pin_memory(self) -> FetchedBatch:
        """Return it with its tensors in pinned memory; PyTorch's DataLoader calls this where it pins."""
        return FetchedBatch(self.indices, map_leaves(self.batch, _pin_leaf))


def _pin_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        can_be = (leaf.device.type, leaf.layout, leaf.is_nested) == ("cpu", torch.strided, False)
    else:  # a batch of the user's own type: https://docs.pytorch.org/docs/stable/data.html#memory-pinning
        can_be = hasattr(leaf, "pin_memory")
    return leaf.pin_memory() if can_be else leaf


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose random numbers depend only on (seed, epoch, index), not on the process that loads."""

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate
        # Exactly TensorDataset, so no code of the user runs and no random number is drawn: all rows are taken at once.
        self._is_of_tensors = collate is None and type(dataset) is TensorDataset
        self._num_watched, self._named = 0, list[str]()
        self._needs_seeds = collate is not None or not reads_no_generator(dataset)
        self._has_plain_rows = self._is_of_tensors and all(map(_has_plain_rows, dataset.tensors))  # type: ignore[attr-defined]  # TensorDataset's

    def __getitems__(self, micro_batch: Sequence[MicroBatch]) -> FetchedBatch | SampleError:
        """Fetch one micro batch; the DataLoader passes a list of one. In a loader process, return an error of a sample."""
        try:
            return self.fetch_batch(micro_batch)
        except SampleError as error:
            if get_worker_info() is None:
                raise
            # Raised, it would reach the worker as a text only (`torch._utils.ExceptionWrapper`).
            return SampleError(text_of(error), error.affected, "".join(traceback.format_exception(error)))

    def fetch_batch(self, micro_batch: Sequence[MicroBatch]) -> FetchedBatch:
        """Fetch a list of one micro batch."""
        (wanted,) = micro_batch
        if self._is_of_tensors:
            # `torch.tensor` takes four times as long
            rows = torch.frombuffer(array("q", wanted.indices), dtype=torch.int64)
            if not self._has_plain_rows:
                return FetchedBatch(wanted.indices, self._dataset[rows])
            tensors = self._dataset.tensors  # type: ignore[attr-defined]
            return FetchedBatch(wanted.indices, tuple([one.index_select(0, rows) for one in tensors]))
        look = None  # at two batches, as the first may make what the second changes
        if self._num_watched < 2 and getattr(get_worker_info(), "id", 0) == 0:
            roots = {"train_data" if wanted.epoch >= 0 else "eval_data": self._dataset, "collate_fn": self._collate}
            look = partial(unsaved.unsaved_numbers, roots, sees_files=self._num_watched == 0)
        before = look() if look else {}
        with preserve_cpu_states() if self._needs_seeds and get_worker_info() is None else nullcontext():
            samples = [self._fetch(wanted.epoch, index) for index in wanted.indices]
            try:
                batch = (self._collate or default_collate)(samples)
            except StopIteration as error:
                # Raised through the loader's iterator, it would mean that there are no more batches.
                raise RuntimeError(
                    "`collate_fn` raised StopIteration. Check each `next` in it: the iterator had nothing left."
                ) from error
        if look:
            self._num_watched += 1
            found = [place for place in unsaved.find_changed(before, look()) if place not in self._named]
            self._named += found
            unsaved.warn_of_changes(found, "a batch")
        return FetchedBatch(wanted.indices, batch)

    def _fetch(self, epoch: int, index: int) -> Any:
        try:
            return self._read(epoch, index)
        except DdpHpcError:
            raise
        except Exception as error:
            sample = f"{'eval_data' if epoch < 0 else 'train_data'}[{index}]"
            content = self._undecodable_content(error, epoch, index)
            raise SampleError(
                f"`{sample}` raised {type(error).__name__}: {text_of(error).rstrip('.')}. Check this sample and the "
                "dataset's `__getitem__`; the rank's log has the traceback.",
                AffectedEntity(entity=sample, version=content, may_recover=not content, place=raising_place(error)),
            ) from error

    def _read(self, epoch: int, index: int) -> Any:
        # Which loader process fetches a sample depends on their number. So each sample gets a seed of its own, rather
        # than each process: https://pytorch.org/docs/stable/notes/randomness.html#dataloader
        if self._needs_seeds:
            seed = derive_seed("sample", self._seed, epoch, index)
            torch.default_generator.manual_seed(seed)
            seed_host_libraries(seed)
        return self._dataset[index]

    def _undecodable_content(self, error: Exception, epoch: int, index: int) -> str:
        """Return the content of the sample's file where it is proved that a decoder rejects it each time; empty where not.

        The sample fails twice more in the same way, and between the two its one file can be read. A reader that returns
        nothing where a file system fails may look like that, so another sample has to be readable, too.
        """
        if not is_decoder_error(error):
            return ""
        with record_sources() as sources:
            fails_alike = self._fails_alike(error, epoch, index)
        content = size_and_hash_of(sources) if fails_alike else ""
        if not content or not self._fails_alike(error, epoch, index):
            return ""
        num = len(self._dataset)  # type: ignore[arg-type]  # map-style data has a length
        others = {(index + 1) % num, (index - 1) % num, (index + num // 2) % num} - {index}
        return content if any(self._error_of(epoch, other) is None for other in sorted(others)) else ""

    def _fails_alike(self, error: Exception, epoch: int, index: int) -> bool:
        again = self._error_of(epoch, index)
        return type(again) is type(error) and raising_place(again) == raising_place(error) and is_decoder_error(again)

    def _error_of(self, epoch: int, index: int) -> Exception | None:
        try:
            self._read(epoch, index)
        except Exception as error:  # noqa: BLE001  whatever the user's data set raises
            return error
        return None


def _has_plain_rows(tensor: torch.Tensor) -> bool:
    """Tell whether `index_select` returns what indexing returns, with the same strides: it copies whole rows, which is faster."""
    return (
        type(tensor) is torch.Tensor
        and (tensor.device.type, tensor.layout) == ("cpu", torch.strided)
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        # Strides of an axis of size 1 count, too: convolutions choose by them.
        and tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    )


class SampleError(RuntimeError):
    """A sample could not be read. It does not count as an invalid request: another attempt may succeed."""

    def __init__(self, message: str, affected: AffectedEntity, traceback: str = "") -> None:
        """`traceback` is that of the loader process."""
        super().__init__(message)
        self.affected = affected
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.affected, self.traceback)


class LoaderTracebackError(Exception):
    """Holds the traceback of an error in a loader process, as a text."""


def raise_if_error(fetched: FetchedBatch | SampleError) -> FetchedBatch:
    """Return what a loader has fetched."""
    if isinstance(fetched, SampleError):
        raise fetched from LoaderTracebackError(f"\n{fetched.traceback}")
    return fetched


LoadedGlobalBatch = tuple[GlobalBatch, Iterator[FetchedBatch]]
"""A global batch with its samples, in the order of its micro batches."""


def load_global_batches(
    dataset: Dataset[Any], sampler: RankSampler, *, data: DataSpec, pin_memory: bool, collate: Collate | None = None
) -> Iterator[LoadedGlobalBatch]:
    """Yield the global batches of `sampler` with their samples; loading runs ahead, also into the next epoch."""
    plans, ahead = tee(sampler)  # each global batch is computed once, for the loader and for the loop
    fetch = SeededDataset(dataset, sampler.order.seed, collate)
    micro_batches = ([one] for global_batch in ahead for one in global_batch.micro_batches)
    fetched: Iterator[FetchedBatch]
    if data.num_workers or pin_memory:
        fetched = map(raise_if_error, start_loader(make_loader(fetch, micro_batches, data=data, pin_memory=pin_memory)))
    else:
        # What a DataLoader without processes does, without its overhead.
        fetched = map(fetch.fetch_batch, micro_batches)
    for plan in plans:
        yield plan, islice(fetched, len(plan.micro_batches))


def make_loader(
    dataset: Dataset[Any], sampler: Any, *, data: DataSpec, pin_memory: bool, is_kept: bool = False
) -> DataLoader[Any]:
    """Return a loader of what `sampler` names; its processes die with this one and ignore the job's stop signals.

    A loader that `is_kept` keeps its processes for the next iteration.
    """
    parallel: dict[str, Any] = {}
    if data.num_workers:
        parallel = {
            "num_workers": data.num_workers,
            "prefetch_factor": data.prefetch_factor,
            "worker_init_fn": partial(_init_loader_process, os.getpid()),
            # Not Python's default, which is forkserver since 3.14: each process would import PyTorch and the recipe
            # again.
            # https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
            "multiprocessing_context": "fork",
            "persistent_workers": is_kept,
        }
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=lambda fetched: fetched,  # `SeededDataset` has made the batch
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own: otherwise the loader would draw its seed from the training's generator
        **parallel,
    )


def start_loader(loader: DataLoader[Any]) -> Iterator[Any]:
    """Fork the processes of a loader, and return its iterator."""
    # PyTorch's handler of SIGCHLD raises an error in the main thread when a loader process dies, wherever that thread is.
    # Raised inside a fork, it would leave a half-made child; so the signal is blocked until the processes exist:
    # https://docs.python.org/3/library/signal.html#signal.pthread_sigmask
    with sigchld_blocked():
        return iter(loader)


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Move every tensor in nested tuples, lists and dicts to the device, from pinned memory asynchronously.

    With `channels_last`, 4-D tensors get that memory format.
    """
    if device.type == "cpu" and not channels_last:  # the loader has put it there
        return batch

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        order = torch.channels_last if channels_last and leaf.dim() == 4 else torch.preserve_format
        return leaf.to(device, non_blocking=True, memory_format=order)

    return map_leaves(batch, move)


def map_leaves(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with each leaf changed."""
    if isinstance(nest, dict):
        return {key: map_leaves(value, change) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_leaves(value, change) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map_leaves(value, change) for value in nest)
    return change(nest)


def _init_loader_process(parent_pid: int, _worker_id: int) -> None:
    die_with_parent(parent_pid)
    # Slurm's signals reach every process of a step (https://slurm.schedmd.com/scancel.html), but the worker still needs
    # batches until the step after which all ranks stop. It ends its loaders itself.
    ignore_stop_signals()
    unblock_signals()
