"""Saves the training state while the training continues.

The loop waits only for one copy into buffers (see `save_buffers`). A thread of each rank writes that rank's shard.
Rank zero's thread then waits for the others, commits (see `checkpoint_store`), and deletes old checkpoints. The threads
exchange messages through the store, never through the process group, so they cannot disturb the training's collectives.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from heapq import heapreplace
from typing import Any

import torch
from torch import Tensor

import ddp_hpc
from ddp_hpc.base.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    DivergedError,
    NotSavedError,
    UnreadableError,
)
from ddp_hpc.base.processes import host_name
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store, shards
from ddp_hpc.run.checkpoints.checkpoint_store import Manifest
from ddp_hpc.run.checkpoints.shards import ShardRecord
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import save_memory_text
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train import unsaved
from ddp_hpc.train.process_group import Group, set_cuda_device
from ddp_hpc.train.state import digests, round_trip, training_state
from ddp_hpc.train.state.optimizer_state import KeptByOptimizer, SavedTensor
from ddp_hpc.train.state.restore import Restorer, without_garbage_collection
from ddp_hpc.train.state.save_buffers import NotFiniteError, SaveBuffers
from ddp_hpc.train.state.training_state import NamedTensor, TrainingState
from ddp_hpc.train.stop import EarlyStop

log = logging.getLogger(__name__)

_CHECK_S = 1.0
"""How often the main thread, while it waits for the writer's thread, checks whether that makes progress."""

_FINITE_CHECK_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def partition_tensors(named: Sequence[NamedTensor], *, rank: int, world_size: int) -> list[NamedTensor]:
    """Return the tensors that `rank` writes: its own, and an even part, by bytes, of those that all ranks have.

    Every rank computes the same division, because the shared tensors come in the same order on all ranks.
    """
    loads = [(0, writer) for writer in range(world_size)]  # a heap: the least first
    mine = [item for item in named if item.owner == rank]
    shared = [item for item in named if item.owner is None]
    for item in sorted(shared, key=lambda item: -item.tensor.nbytes):
        load, writer = loads[0]
        heapreplace(loads, (load + item.tensor.nbytes, writer))
        if writer == rank:
            mine.append(item)
    return sorted(mine, key=lambda item: (-item.tensor.element_size(), item.name))


@dataclass
class Checkpointer:
    """Saves and restores the state of one rank; made once in an attempt."""

    run: RunDir
    group: Group
    _: KW_ONLY
    attempt: int
    keep: CheckpointSpec
    before_commit: Callable[[], object] = lambda: None
    on_result: Callable[[int, float, str | None], object] = lambda *_: None
    """Called by rank zero's writer thread at the end of a save: with the step, the seconds that it took, and why it failed, if it did."""
    on_progress: Callable[[], object] = lambda: None
    """Called by the main thread while a writer that it waits for, here or on another rank, makes progress."""
    on_buffers: Callable[[Mapping[str, int]], object] = lambda _: None
    """Called by the writer's thread with the memory that a save takes (`SaveBuffers.memory`)."""
    is_stop_asked: Callable[[], bool] = lambda: False
    newest_losses: Callable[[], Sequence[Tensor]] = tuple
    """Returns the losses of the last step. If one is not finite, a periodic save is not committed: the weights may still be
    finite, but too large to continue from."""
    refused: str | None = None
    """On rank zero, why a save was refused because the state was not finite."""
    _num_moves: int = 0
    """How often this rank's writer thread, or one that it waits for, has made progress."""
    _writing: Future[None] | None = None
    _last_saved: int | None = None
    _restored: int | None = None
    _watched: frozenset[str] = frozenset()
    _made: dict[str, dict[str, SavedTensor]] | None = None
    """Names and shapes of what the model saves, as they were before any forward; None where that was not asked."""
    _is_checked_again: bool = False
    _watch: unsaved.UnsavedWatch | None = None
    """On rank zero."""
    _num_saves: int = 0
    _committed_at: float = field(default_factory=time.time)
    """On rank zero, when the newest checkpoint was committed; before the first one, when the attempt began."""
    _num_tries: int = 0
    """How often a final save was repeated; the same on every rank."""

    def __post_init__(self) -> None:
        stop = EarlyStop(self.group, self.is_stop_asked)
        self._restorer = Restorer(self.run, self.group, attempt=self.attempt, on_progress=self.on_progress, stop=stop)
        self._buffers = SaveBuffers(self.group.device)
        # One thread for all saves, not one for each: a process that is forked (as data loader workers are) while a thread starts
        # or ends can hang in CPython's fork.
        select = partial(set_cuda_device, self.group.device)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer", initializer=select)

    def check(self, state: TrainingState) -> None:
        """Find out before the first step whether `state` can be saved and restored."""
        training_state.check(state)
        round_trip.check_loading(state)
        self._made = training_state.shapes_to_save(state)

    def check_after_first_step(self, state: TrainingState, *, will_save: bool = True) -> None:
        """When this is called for the first time, do `check_again`, and have the writer's thread make the buffers; nothing later."""
        if self._is_checked_again:
            return
        changed = [] if self._watch is None else self._watch.changed_places()
        is_first = state.position.step == 1  # an earlier attempt was let train on
        lost = self._watch.why_refused(changed) if self._watch is not None and is_first else ""
        self.check_again(state, why=round_trip.why_not_restored(state) or lost)
        self._compare_between_ranks(state)
        unsaved.warn_of_changes(changed)
        if will_save:  # the optimizer has made its state in this step, so its size is known
            self.wait()
            self._writing = self._writer.submit(self._make_buffers, self._tensors_to_write(state))

    def watch(self, state: TrainingState, **functions: object) -> None:
        """Note, before the first forward, what no checkpoint holds of the model, the optimizer and these functions, to name it if the training changes it."""
        if self.group.rank_info.is_rank_zero:
            self._watch = unsaved.UnsavedWatch(state.model, state.optimizer, **functions)

    def _compare_between_ranks(self, state: TrainingState) -> None:
        """Find out whether all ranks have what rank zero alone saves."""
        rank_info = self.group.rank_info
        if rank_info.world_size == 1:
            return
        mine = round_trip.digests_to_compare(state)
        if len({*self.group.gather_digests(digests.combined_digest(mine))}) == 1:
            return
        reports = self.group.gather_on_rank_zero(mine)
        text = round_trip.why_ranks_differ(reports) if rank_info.is_rank_zero else None
        raise ConfigError(self.group.broadcast_last_word("ranks-differ", text))

    def check_again(self, state: TrainingState, *, why: str = "") -> None:
        """Find out whether what would be saved now could be restored, as a forward may have changed what the model has; `why` says why not, if known.

        All ranks call this after the same step: the first one, as early as that can be known, and each that is saved.
        """
        self._is_checked_again = True
        if self._made is None or state.position.step == self._last_saved:
            return
        why = training_state.why_not_loadable(state, self._made) or why
        if not self.group.sum(torch.tensor([bool(why)], dtype=torch.int64, device=self.group.device)).item():
            return
        self.wait()  # commit the checkpoint that is being written: it can be restored
        found = self.group.gather_on_rank_zero(why) if self.group.rank_info.world_size > 1 else [why]
        raise ConfigError(self.group.broadcast_last_word("changed-model", next(filter(None, found), None)))

    def restore_newest(self, state: TrainingState, *, seed: int) -> int | None:
        """Restore the newest checkpoint that is not damaged, the same on all ranks; return its step, or None (see `restore`)."""
        step = self._restorer.restore_newest(state, seed=seed)
        self._restored = self._last_saved = step
        return step

    # --- saving ---

    def refuse_nonfinite(self, model: torch.nn.Module) -> None:
        """From now on, refuse to commit a state in which a weight or buffer that is finite now is no longer finite.

        Tensors that have infinities from the start, such as attention masks, are not checked.
        """
        named = {f"model/{name}": one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
        watched = {name: one for name, one in named.items() if one.dtype in _FINITE_CHECK_DTYPES and one.numel()}
        if watched:
            are_finite = torch.stack([one.isfinite().all() for one in watched.values()]).tolist()
            self._watched = frozenset(name for name, is_finite in zip(watched, are_finite, strict=True) if is_finite)

    def save(self, state: TrainingState, *, metrics: Mapping[str, float] | None = None, is_final: bool = False) -> None:
        """Copy the state, and commit it in the background; return as soon as it is copied.

        Waits first for a save that any rank still writes. An error is reported (`on_result`), and the training continues.
        """
        step, before = state.position.step, self._last_saved
        if step == before:
            return
        self.wait()
        if before not in {None, self._restored}:  # with heartbeats, which the next collective would not hear
            self.group.side_store.get(self._key(before, "outcome"), on_heartbeat=self.on_progress)
        self._num_saves += 1
        is_looked_at = is_final or self._num_saves.bit_count() == 1  # a teacher may begin to follow late
        if self._watch is not None and is_looked_at:
            unsaved.warn_of_changes(self._watch.changed_places(), "the training")
        with without_garbage_collection():
            kept = state.kept_of_optimizer()
            self._buffers.fill(self._tensors_to_write(state, kept))
            manifest = Manifest(
                step=step,
                world_size=self.group.rank_info.world_size,
                shards=(),
                state=training_state.non_tensor_state(state, kept),
                metrics=dict(metrics or {}),
                made={
                    "at": time.time(),
                    "attempt": self.attempt,
                    "torch": torch.__version__,
                    "ddp_hpc": ddp_hpc.__version__,
                    "gradient_order": state.gradient_order,
                    "plan": state.plan,
                    "has_recipes_optimizer": state.has_recipes_optimizer,
                },
            )
        self._last_saved = step
        self._writing = self._writer.submit(self._write, manifest, () if is_final else self.newest_losses())

    def _tensors_to_write(self, state: TrainingState, kept: KeptByOptimizer | None = None) -> list[NamedTensor]:
        rank_info, named = self.group.rank_info, training_state.tensors(state, kept)
        return partition_tensors(named, rank=rank_info.rank, world_size=rank_info.world_size)

    def save_and_wait(
        self, state: TrainingState, *, metrics: Mapping[str, float] | None = None, or_end: bool = False
    ) -> None:
        """Save, and return after the checkpoint is committed on the disk.

        Raises:
            CheckpointError: on every rank, if it could not be committed; with `or_end`, a NotSavedError.
            DivergedError: on every rank, if the state is not finite.
        """
        step = state.position.step
        was_tried = step == self._last_saved
        while True:
            self.save(state, metrics=metrics, is_final=True)
            self.wait()
            if step == self._restored:
                return
            key, store = self._key(step, "outcome"), self.group.side_store
            error, refused, since = json.loads(store.get(key, on_heartbeat=self.on_progress))
            if error is None or not was_tried:
                break
            # It was tried by a periodic save: a disk that was full then, or a network, may work again.
            was_tried, self._last_saved = False, None
            self._num_tries += 1
        self.group.wait_until_all_read(self._key(step, "read"), store=self.group.side_store)
        if refused is not None:
            raise DivergedError(divergence_message(self.run, refused))
        if error is not None:
            ends = again = ""
            if or_end:
                ends = f" None has been committed since {since}, so the run ends (`checkpoint.max_failing_s`)."
                again = ", then submit the run again"
            raise (NotSavedError if or_end else CheckpointError)(
                f"The checkpoint of step {step} could not be committed: {str(error).rstrip('.')}.{ends} Earlier ones in "
                f"{self.run.checkpoints} are not affected: the next attempt continues from the newest, if there is one. Check "
                f"the space, the quota and the permissions there{again}."
            )

    def wait(self) -> None:
        """Wait until this rank has written its shard; rank zero also until the save is committed or has failed."""
        if self._writing is None:
            return
        num_moves = self._num_moves
        while futures.wait([self._writing], timeout=_CHECK_S).not_done:
            if num_moves != self._num_moves:
                num_moves = self._num_moves
                self.on_progress()
        self._writing.result()
        self._writing = None

    # --- the writer's thread ---

    def _make_buffers(self, mine: Sequence[NamedTensor]) -> None:
        self._buffers.prepare(mine)
        log.info("a save takes %s", save_memory_text(self._buffers.memory))
        self.on_buffers(self._buffers.memory)

    def _key(self, step: int | None, name: str) -> str:
        return f"checkpoint/{step}.{self._num_tries}/{name}"

    def _send_heartbeat(self, key: str) -> None:
        """Show that the writer's thread makes progress: to the main thread, and to the ranks that wait for `key`."""
        self._num_moves += 1
        self.group.side_store.heartbeat(key)

    def _write(self, manifest: Manifest, losses: Sequence[Tensor]) -> None:
        """Write this rank's shard; on rank zero, also commit. An error is reported as a value, since no caller can catch it."""
        began = time.monotonic()
        rank_info, store = self.group.rank_info, self.group.side_store
        uncommitted = checkpoint_store.uncommitted_path(self.run, manifest.step, self.attempt)
        report: dict[str, Any]
        own_key = self._key(manifest.step, "outcome" if rank_info.is_rank_zero else str(rank_info.rank))
        send_heartbeat = partial(self._send_heartbeat, own_key)
        try:
            checkpoint_store.make_uncommitted_dir(self.run, manifest.step, self.attempt)
            if losses and not torch.hstack([*losses]).isfinite().all().item():  # one wait for the device
                raise CheckpointError("the loss of this step is not finite")  # noqa: TRY301  reported below, as all others
            shard = checkpoint_store.write_shard(
                uncommitted / checkpoint_store.shard_name(rank_info.rank, rank_info.world_size),
                self._buffers.shard_parts(self._watched),
                size=self._buffers.size,
                on_progress=send_heartbeat,
            )
            report = asdict(shard)
        except NotFiniteError as error:
            report = {"nonfinite": str(error)}
        except Exception as error:  # noqa: BLE001
            report = {"error": f"rank {rank_info.rank} on {host_name()}: {type(error).__name__}: {error}"}
        if not rank_info.is_rank_zero:
            store.set(own_key, json.dumps(report))
            return
        others = [self._key(manifest.step, str(rank)) for rank in range(1, rank_info.world_size)]
        try:
            reports = [report, *(json.loads(store.take(key, on_heartbeat=send_heartbeat)) for key in others)]
            shards = tuple(_parse_report(item, manifest.step) for item in reports)
            self.before_commit()
            checkpoint_store.commit_checkpoint(self.run, uncommitted, replace(manifest, shards=shards))
            message = self._why_not_read_back(manifest.step, send_heartbeat)
            if message is None:
                self._prune()
        except DivergedError as error:
            shutil.rmtree(uncommitted, ignore_errors=True)
            self.refused = str(error)
            message = f"{error}, so no run can continue from it"
        except Exception as error:  # noqa: BLE001
            shutil.rmtree(uncommitted, ignore_errors=True)
            message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        self._report_outcome(own_key, message)
        self.on_result(manifest.step, time.monotonic() - began, message)

    def _report_outcome(self, key: str, message: str | None) -> None:
        """Tell all ranks whether a save was committed, and since when none was."""
        if message is None:
            self._committed_at = time.time()
        since = time.strftime("%F %T", time.localtime(self._committed_at))
        self.group.side_store.set(key, json.dumps([message, self.refused, since]))

    def _why_not_read_back(self, step: int, on_progress: Callable[[], object]) -> str | None:
        """Say why a restore would not take the newest checkpoint; then older ones have to stay."""
        try:
            checkpoint_store.check_headers(checkpoint_names.checkpoint_path(self.run, step), on_progress)
        except (CorruptCheckpointError, UnreadableError) as error:
            return f"its files are written, but cannot be read back, so older checkpoints are kept: {error}"
        return None

    def _prune(self) -> None:
        try:
            checkpoint_store.prune_checkpoints(self.run, attempt=self.attempt, keep=self.keep)
        except (OSError, UnreadableError) as error:
            log.warning("Old checkpoints could not be deleted: %s. The next save tries again.", str(error).rstrip("."))


def divergence_message(run: RunDir, what: str) -> str:
    """Return the message that a run has diverged, with what its user can do."""
    steps = checkpoint_names.committed_steps(run)
    goes_on = f"goes on from step {steps[-1]}, its newest checkpoint; with `--fresh` it starts over" if steps else ""
    return (
        f"The training has diverged: {what}. Lower `train.lr`, or limit the gradients with `train.grad_clip_norm`, and "
        f"submit the run again: it {goes_on or 'starts over, as it has no checkpoint yet'}."
    )


def _parse_report(report: dict[str, Any], step: int) -> ShardRecord:
    """Return the shard that a rank reported."""
    if "nonfinite" in report:
        raise DivergedError(f"`{report['nonfinite']}` is not finite after step {step}")
    if "error" in report:
        raise CheckpointError(report["error"])
    return shards.parse_shard_record(report)
