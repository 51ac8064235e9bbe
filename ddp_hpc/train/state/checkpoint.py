"""Saving the training state while the training goes on.

The loop pays for one copy into buffers that are made once. A thread of each rank writes that rank's shard; rank zero's
then waits for the others', commits (see `checkpoint_store`), and deletes what is no longer kept. The threads talk
through the store, never through the process group, so they cannot get in the way of the training's collectives. There
is one thread for all saves: a process forked while a thread begins or ends can hang in CPython's fork.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ddp_hpc
from ddp_hpc import checkpoint_store, shards
from ddp_hpc.checkpoint_store import Manifest
from ddp_hpc.errors import (
    CheckpointError,
    DivergedError,
    UnreadableError,
    WorkerError,
)
from ddp_hpc.run_dir import RunDir
from ddp_hpc.shards import ShardRecord, TensorEntry
from ddp_hpc.spec import CheckpointSpec
from ddp_hpc.train.engine.divergence import diverged
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state import training_state
from ddp_hpc.train.state.restore import DTYPES, Restorer
from ddp_hpc.train.state.training_state import NamedTensor, TrainingState

log = logging.getLogger(__name__)

PARTING_S = 30.0
"""How long rank zero stays for the others to read that the last checkpoint is committed."""
_LOOK_S = 1.0
"""How often the main thread looks whether the writer's thread gets on, while it waits for it."""

_COMPARABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_ALONE = 32767
"""Elements that torch works on in the calling thread alone; for more it starts others (at::internal::GRAIN_SIZE)."""


def partition_tensors(named: Sequence[NamedTensor], *, rank: int, world_size: int) -> list[NamedTensor]:
    """Return the tensors that `rank` writes: its own, and an even part, by bytes, of those that all ranks have.

    Every rank comes to the same division, because the shared tensors stand in the same order everywhere.
    """
    loads = [0] * world_size
    mine = [item for item in named if item.owner == rank]
    shared = [item for item in named if item.owner is None]
    for item in sorted(shared, key=lambda item: -item.tensor.nbytes):
        writer = loads.index(min(loads))
        loads[writer] += item.tensor.nbytes
        if writer == rank:
            mine.append(item)
    return sorted(mine, key=lambda item: (-item.tensor.element_size(), item.name))


class Staging:
    """The buffers a rank's part of the state is copied into; made once, and again only when the layout changes."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._views: list[Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None
        self.header = b""

    def fill(self, named: Sequence[NamedTensor]) -> None:
        """Copy `named` into the buffers. From a GPU the copy runs beside what the loop does next."""
        layout = [(item.name, item.tensor.dtype, item.tensor.shape) for item in named]
        if layout != self._layout:
            self._lay_out(named)
            self._layout = layout
        sources = [item.tensor.detach() for item in named]
        if self._stream is None:
            torch._foreach_copy_(self._views, sources)
            return
        self._copy_beside(named, sources)

    def _copy_beside(self, named: Sequence[NamedTensor], sources: list[Tensor]) -> None:
        """Copy what the next forward may change at once, the rest on a stream of its own."""
        assert self._stream is not None  # noqa: S101  `fill` looked
        for item, view, source in zip(named, self._views, sources, strict=True):
            if item.owner is not None:
                view.copy_(source, non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for item, view, source in zip(named, self._views, sources, strict=True):
                if item.owner is None:
                    view.copy_(source, non_blocking=True)
            self._copied = self._stream.record_event()

    def wait_for_copy(self) -> None:
        """Have the device change no weights before they are copied; call before each optimizer step."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def parts(self) -> list[memoryview | bytes]:
        """Return what is to be written, once the copy is complete; for the writer's thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return [self.header, memoryview(self._buffer.numpy())]  # type: ignore[arg-type]  # numpy says so only from Python 3.12 on

    def first_nonfinite(self, watched: AbstractSet[str]) -> str | None:
        """Return the name of a tensor of `watched` that is not finite, where one is; call after `parts`."""
        for (name, *_), view in zip(self._layout, self._views, strict=True):
            if name in watched and not all(_is_finite(some) for some in view.reshape(-1).split(_ALONE)):
                return name
        return None

    def _lay_out(self, named: Sequence[NamedTensor]) -> None:
        entries, offset = [], 0
        for item in named:
            end = offset + item.tensor.nbytes
            entries.append(_whole_entry(item, offset, end))
            offset = end
        self._buffer = torch.zeros(offset, dtype=torch.uint8, pin_memory=self._pinned)
        self._views = [
            self._buffer[entry.begin : entry.end].view(item.tensor.dtype).view(item.tensor.shape)
            for entry, item in zip(entries, named, strict=True)
        ]
        self.header = shards.shard_header(entries)


def _whole_entry(item: NamedTensor, begin: int, end: int) -> TensorEntry:
    """Return the entry of a tensor that is written whole: a piece that is as large as the tensor."""
    shape = tuple(item.tensor.shape)
    return TensorEntry(item.name, DTYPES[item.tensor.dtype], shape, begin, end, shape, (0,) * len(shape))


def _is_finite(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or all(map(math.isfinite, torch.stack(tensor.aminmax()).tolist()))


@dataclass(frozen=True)
class SaveResult:
    """How a save ended, as rank zero knows it."""

    step: int
    seconds: float
    error: str | None = None


class Checkpointer:
    """Saves and restores the state of one rank; made once an attempt."""

    def __init__(  # noqa: PLR0913  # two of them are whom to tell
        self,
        run: RunDir,
        group: Group,
        *,
        attempt: int,
        keep: CheckpointSpec,
        on_result: Callable[[SaveResult], None] = lambda _: None,
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        self._run = run
        self._group = group
        self._attempt = attempt
        self._restorer = Restorer(run, group, attempt=attempt, on_progress=on_progress)
        self._keep = keep
        self._on_result = on_result
        self._on_progress = on_progress
        """Called by the main thread while what it waits for moves, here or on another rank."""
        self._num_moves = 0
        """How often the writer's thread, or one that it waits for, got on."""
        self._staging = Staging(group.device)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._writing: Future[None] | None = None
        self._last_saved: int | None = None
        self._restored: int | None = None
        self._watched: frozenset[str] = frozenset()
        self.newest_losses: Callable[[], Sequence[Tensor]] = tuple
        """Those of the step just done. What is saved on the way is not committed where they are not finite: the weights may
        be finite still, but so large that nothing can go on from them."""
        self.refused: str | None = None
        """On rank zero, why a save was refused, where the state was not finite."""
        self._num_tries = 0
        """How often a save was tried again; the same on every rank."""

    def check(self, state: TrainingState) -> None:
        """Find out before the first step whether `state` can be saved and restored.

        Raises:
            ConfigError: where it cannot.
        """
        training_state.check(state, DTYPES)

    def restore_newest(self, state: TrainingState, *, seed: int) -> int | None:
        """Restore the newest checkpoint that verifies, the same on all ranks; return its step, or None (see `restore`)."""
        step = self._restorer.restore_newest(state, seed=seed)
        self._restored = self._last_saved = step
        return step

    # --- saving ---

    def refuse_nonfinite(self, model: torch.nn.Module) -> None:
        """Commit no state in which weights or buffers are not finite that are so now.

        What is not finite from the start, as a mask of minus infinities is, is not watched.
        """
        named = {f"model/{name}": one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
        watched = {name: one for name, one in named.items() if one.dtype in _COMPARABLE and one.numel()}
        if watched:
            are_finite = torch.stack([one.isfinite().all() for one in watched.values()]).tolist()
            self._watched = frozenset(name for name, is_finite in zip(watched, are_finite, strict=True) if is_finite)

    def save(self, state: TrainingState, *, metrics: Mapping[str, float] | None = None, is_final: bool = False) -> None:
        """Copy the state and have it committed in the background; returns as soon as it is copied.

        Waits first for a save that is still being written. What goes wrong is reported, and the training goes on.
        """
        step = state.position.step
        if step == self._last_saved:
            return
        self.wait()
        rank_info = self._group.rank_info
        mine = partition_tensors(training_state.tensors(state), rank=rank_info.rank, world_size=rank_info.world_size)
        self._staging.fill(mine)
        manifest = Manifest(
            step=step,
            world_size=rank_info.world_size,
            shards=(),
            state=training_state.numbers(state),
            metrics=dict(metrics or {}),
            made={
                "at": time.time(),
                "attempt": self._attempt,
                "torch": torch.__version__,
                "ddp_hpc": ddp_hpc.__version__,
            },
        )
        self._last_saved = step
        self._writing = self._writer.submit(self._write, manifest, () if is_final else self.newest_losses())

    def save_and_wait(self, state: TrainingState, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save, and return once it is committed on the disk.

        Raises:
            CheckpointError: on every rank, where it could not be.
            DivergedError: on every rank, where the state is not finite.
        """
        step = state.position.step
        was_tried = step == self._last_saved
        self.save(state, metrics=metrics, is_final=True)
        self.wait()
        if step == self._restored:
            return
        error, refused = self._verdict(step)
        if error is not None and was_tried:  # by a periodic save, to which a full disk or a network may have happened
            self._last_saved = None
            self._num_tries += 1
            self.save(state, metrics=metrics, is_final=True)
            self.wait()
            error, refused = self._verdict(step)
        self._let_all_read(step)
        if refused is not None:
            raise DivergedError(diverged(self._run, refused))
        if error is not None:
            raise CheckpointError(f"The checkpoint of step {step} could not be committed: {error}")

    def _verdict(self, step: int) -> Any:
        return json.loads(self._group.side_store.get(self._key(step, "verdict"), on_heartbeat=self._on_progress))

    def _let_all_read(self, step: int) -> None:
        """Keep rank zero, which leaves after this and takes the store with it, until all others have read the verdict."""
        rank_info, store = self._group.rank_info, self._group.side_store
        if not rank_info.is_rank_zero:
            with suppress(RuntimeError):  # it waits no longer: nothing is lost, for the verdict is here
                store.set(self._key(step, f"read/{rank_info.rank}"), "")
            return
        deadline = time.monotonic() + PARTING_S
        for rank in range(1, rank_info.world_size):
            with suppress(RuntimeError, WorkerError):  # it died at the last moment: whoever started it tells of that
                store.get(self._key(step, f"read/{rank}"), silence_s=max(deadline - time.monotonic(), 0.0))

    def wait(self) -> None:
        """Wait until this rank has nothing left to write."""
        if self._writing is None:
            return
        num_moves = self._num_moves
        while futures.wait([self._writing], timeout=_LOOK_S).not_done:
            if num_moves != self._num_moves:
                num_moves = self._num_moves
                self._on_progress()
        self._writing.result()
        self._writing = None

    def wait_for_copy(self) -> None:
        """See `Staging.wait_for_copy`."""
        self._staging.wait_for_copy()

    # --- the writer's thread ---

    def _key(self, step: int, name: str) -> str:
        return f"checkpoint/{step}.{self._num_tries}/{name}"

    def _get_on(self, key: str) -> None:
        """Say that the writer's thread gets on: to those who wait for what it will set as `key`, and to the main thread."""
        self._num_moves += 1
        self._group.side_store.heartbeat(key)

    def _write(self, manifest: Manifest, losses: Sequence[Tensor]) -> None:
        """Write this rank's shard; on rank zero, also commit. Errors are values here: a thread has nobody to raise to."""
        began = time.monotonic()
        rank_info, store = self._group.rank_info, self._group.side_store
        staging = checkpoint_store.staging_path(self._run, manifest.step, self._attempt)
        report: dict[str, Any]
        own_key = self._key(manifest.step, "verdict" if rank_info.is_rank_zero else str(rank_info.rank))
        get_on = partial(self._get_on, own_key)
        try:
            checkpoint_store.open_staging(self._run, manifest.step, self._attempt)
            name = checkpoint_store.shard_name(rank_info.rank, rank_info.world_size)
            if not all(math.isfinite(loss.item()) for loss in losses):
                raise CheckpointError("the loss of this step is not finite")  # noqa: TRY301  it is reported like others
            parts = self._staging.parts()  # waits for the copy from the GPU, which the next line reads
            nonfinite = self._staging.first_nonfinite(self._watched)
            if nonfinite:
                report = {"nonfinite": nonfinite}
            else:
                report = asdict(checkpoint_store.write_shard(staging / name, parts, on_progress=get_on))
        except Exception as error:  # noqa: BLE001
            report = {"error": f"rank {rank_info.rank}: {type(error).__name__}: {error}"}
        if not rank_info.is_rank_zero:
            store.set(own_key, json.dumps(report))
            return
        others = [self._key(manifest.step, str(rank)) for rank in range(1, rank_info.world_size)]
        try:
            reports = [report, *(json.loads(store.get(key, on_heartbeat=get_on)) for key in others)]
            shards = tuple(_shard_of(item, manifest.step) for item in reports)
            checkpoint_store.commit(self._run, staging, replace(manifest, shards=shards))
            verdict = None
            self._prune()
        except DivergedError as error:
            shutil.rmtree(staging, ignore_errors=True)
            self.refused = str(error)
            verdict = f"{error}, so it is no state to go on from"
        except Exception as error:  # noqa: BLE001
            shutil.rmtree(staging, ignore_errors=True)
            verdict = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        store.set(self._key(manifest.step, "verdict"), json.dumps([verdict, self.refused]))
        self._on_result(SaveResult(manifest.step, time.monotonic() - began, verdict))

    def _prune(self) -> None:
        keep = self._keep
        try:
            checkpoint_store.prune(
                self._run,
                attempt=self._attempt,
                keep_last=keep.keep_last,
                keep_best=keep.keep_best,
                metric=keep.best_metric,
                lowest_is_best=keep.best_is != "highest",
            )
        except (OSError, UnreadableError) as error:
            log.warning("old checkpoints could not be deleted: %s", error)


def _shard_of(report: dict[str, Any], step: int) -> ShardRecord:
    """Return the shard that a rank reported, or raise what kept it from writing one."""
    if "nonfinite" in report:
        raise DivergedError(f"`{report['nonfinite']}` is not finite after step {step}")
    if "error" in report:
        raise CheckpointError(report["error"])
    return shards.read_record(report)
