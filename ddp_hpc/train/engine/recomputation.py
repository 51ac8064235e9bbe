"""Compares what ranks compute: all of them compute the loss and the gradients of one and the same micro batch, to the bit.

A rank that computes wrongly before the all-reduce makes the weights of all ranks wrong, and equal. So at certain steps one rank sends a micro
batch, its buffers and its random generators to all; each rank computes outside of DDP, and puts back what that changed. The ranks compare digests.
Where these differ, each computes the same several times: `run_dir/recomputed` says what follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.base.processes import host_name
from ddp_hpc.errors import RanksDifferError
from ddp_hpc.run_dir.differences import Difference, write_difference
from ddp_hpc.run_dir.recomputed import by_recomputation, is_nondeterministic
from ddp_hpc.train.comparable import processor_of
from ddp_hpc.train.data.loader import Fetched, LoadedGlobalBatch, to_device
from ddp_hpc.train.data.sent_values import NotSendableError, Taken, as_bytes, from_bytes, taken_apart
from ddp_hpc.train.engine.kept_values import NotKeptError
from ddp_hpc.train.engine.precision import Precision
from ddp_hpc.train.engine.set_aside import rank_state, set_aside, take_over, to_keep
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.replicas import Replicas, message_of
from ddp_hpc.train.state import digests, rng
from ddp_hpc.train.state.training_state import TrainingState

log = logging.getLogger(__name__)

NUM_RESULTS = 13
"""How many times each rank computes the same before a rank is blamed: a model that seldom repeats itself must show that it does not."""
_PAUSE_S = 0.01
_MOST_NAMED = 20
"""How many of the tensors that differ are recorded by name."""


@dataclass(kw_only=True)
class Computed:
    """The parts with which ranks compute gradients."""

    recipe: Recipe
    precision: Precision
    channels_last: bool
    may_be_unused: bool
    """Whether a step may leave parameters without a gradient."""
    phases: PhaseTimes
    feed: Callable[[], object] = lambda: None
    """Tells that this rank is at work."""
    patience_s: float = 120.0
    """How long a rank that could not compute waits for the others, which may wait for it in a collective of the user's code."""
    num_threads: int = field(default_factory=torch.get_num_threads)
    """Of a CPU; another number may round differently."""
    goes_backward: bool = False
    """Whether gradients are added up in `.grad`."""

    def of(self, state: TrainingState, sent: Tensor, classes: Mapping[str, type]) -> dict[str, Tensor]:
        """Return loss and gradients of what a rank has sent, by name; all else is as before.

        Raises:
            Exception: whatever the user's code raises.
        """
        loss, gradients = self._passed(state, from_bytes(sent, classes))
        if None in gradients.values() and not (self.may_be_unused or self.goes_backward):
            # A part of the model goes backward by itself, as `torch.utils.checkpoint` with `use_reentrant=True`.
            self.goes_backward = True
            loss, gradients = self._passed(state, from_bytes(sent, classes))
        return {"the loss": loss, **_plain(gradients)}

    def _passed(self, state: TrainingState, received: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
        model, recipe = state.model, self.recipe
        called = self._called()
        with set_aside(model, called, state.device), torch.enable_grad():
            self._take_over(model, called, received)
            rng.restore(received["random"], state.device)
            batch = to_device(received["batch"], state.device, channels_last=self.channels_last)
            inputs, targets = recipe.inputs_and_targets(batch)
            with self.precision.autocast():
                loss = recipe.loss(model(inputs), targets)
            named = {name: one for name, one in model.named_parameters() if one.requires_grad}
            scaled = loss if state.scaler is None else state.scaler.scale(loss)
            if self.goes_backward:
                scaled.backward()
                return loss.detach(), {name: one.grad for name, one in named.items()}
            # Not `backward`, which calls what DDP and the user have hooked to `.grad`.
            found = torch.autograd.grad(scaled, [*named.values()], allow_unused=True)
            return loss.detach(), dict(zip(named, found, strict=True))

    @staticmethod
    def _take_over(model: nn.Module, called: Sequence[object], received: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, one in model.named_buffers():
                one.copy_(received["buffers"][name])
        take_over(model, called, received["own"])

    def _called(self) -> tuple[object, ...]:
        return self.recipe.loss, self.recipe.inputs_and_targets

    def why_not_kept(self, model: nn.Module) -> str:
        """Return what of the model or the recipe's functions cannot be put back after a pass, or an empty text."""
        try:
            to_keep(model, self._called())
        except NotKeptError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  code of the user's values; the other ranks wait for this one
            return f"{type(error).__name__}: {error}"
        return ""

    def to_send(self, state: TrainingState, batch: Taken) -> Tensor:
        """Return what all ranks need to compute the same as this one.

        Raises:
            NotSendableError: if it cannot be sent.
        """
        called = self._called()
        beside = taken_apart(
            {
                "random": rng.capture(state.device),
                "own": rank_state(state.model, called),
                "buffers": dict(state.model.named_buffers()),
            }
        )
        items = [["batch", batch.shape], *beside.shape[1]]
        return as_bytes(Taken(["dict", items], [*batch.tensors, *beside.tensors]))


def _plain(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return gradients by the names of their parameters, those that are sparse as two tensors."""
    found: dict[str, Tensor] = {}
    for name, one in gradients.items():
        if one is not None and one.is_sparse:
            whole = one.coalesce()
            found |= {f"the places of the gradient of `{name}`": whole.indices()}
            found |= {f"the gradient of `{name}`": whole.values()}
        elif one is not None:
            found[f"the gradient of `{name}`"] = one
    return found


class Recomputation:
    """Compares the ranks' weights as `Replicas` does, and what the ranks compute with them."""

    def __init__(self, replicas: Replicas, computed: Computed, *, every_steps: int) -> None:
        """Recompute at multiples of `every_steps`."""
        self._replicas = replicas
        self._group = replicas.group
        self._computed = computed
        self._every = every_steps
        self._next_step = 0
        self._batch: Taken | None = None
        self._why_no_batch = ""
        self._recomputed: int | None = None
        self._num_exchanges = 0
        self._is_off = False
        self._is_checked = False
        self.num_equal = 0
        """How many comparisons of gradients have found all ranks equal."""

    # --- what the loop calls ---

    def following(self, global_batches: Iterator[LoadedGlobalBatch]) -> Iterator[LoadedGlobalBatch]:
        """Yield global batches, and keep some micro batch of them: of the first step, and of each step after which ranks recompute."""
        for one in global_batches:
            is_wanted = not self._is_off and (
                one.plan.after.step % self._every == 0 or not (self._batch or self._why_no_batch)
            )
            yield LoadedGlobalBatch(one.plan, self._keeping(one.fetched)) if is_wanted else one

    def _keeping(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        first = next(fetched)
        try:
            # Taken apart before the training has it, which may take things out of it.
            self._batch, self._why_no_batch = taken_apart(first.batch), ""
        except NotSendableError as error:
            self._batch, self._why_no_batch = None, str(error)
        yield first
        yield from fetched

    @property
    def next_step(self) -> int:
        """After this step, or the first one behind it, the ranks compare."""
        return min(self._replicas.next_step, self._next_step)

    def compare_due(self, state: TrainingState) -> None:
        """Compare what is due after this step, if anything is.

        Raises:
            RanksDifferError: with the same text on all ranks, if they are not equal.
        """
        if state.position.step >= self._next_step:
            self._computed.phases.enter("integrity")
            self.compare(state)
            self._computed.phases.enter("other")
        else:
            self._replicas.compare_due(state)

    def compare(self, state: TrainingState) -> None:
        """Compare weights and gradients after this step, as before a save.

        Raises:
            RanksDifferError: with the same text on all ranks, if they are not equal.
        """
        self._replicas.compare(state)
        step = state.position.step
        self._next_step = (step // self._every + 1) * self._every
        if self._is_off or step == self._recomputed or not (self._batch or self._why_no_batch):
            return
        self._recomputed = step
        if not self._is_checked:
            self._check_processors()
        if not self._is_off:
            self._check_values(state)
        if not self._is_off:
            self._compare_gradients(state)

    # --- one comparison ---

    def _compare_gradients(self, state: TrainingState) -> None:
        sender = state.position.step // self._every % self._group.rank_info.world_size
        sent = self._sent(state, sender)
        if isinstance(sent, str):
            self._switch_off(f"rank {sender} cannot send its micro batch: {sent}")
            return
        mine: list[dict[str, int]] = []
        found = self._results(state, sent, mine, 1)
        if found is None or len({of_rank[0] for of_rank in found}) == 1:
            self.num_equal += found is not None
            return
        log.warning(
            "after step %d, the ranks have computed the gradients of the same micro batch with different results; each computes it %d times more",
            state.position.step,
            NUM_RESULTS - 1,
        )
        more = self._results(state, sent, mine, NUM_RESULTS - 1)
        if more is None:
            return
        results = [[*one, *again] for one, again in zip(found, more, strict=True)]
        if is_nondeterministic(results):
            self._switch_off(
                "several ranks do not find the same when they compute the same again, so the model or the loss is not deterministic "
                "(`train.deterministic=true` may help)"
            )
            return
        self._end(state, results, mine[0])

    def _results(
        self, state: TrainingState, sent: Tensor, mine: list[dict[str, int]], num: int
    ) -> list[list[str]] | None:
        """Compute `num` times; return the digests of each rank, by rank, or None where a rank could not."""
        error: Exception | None = None
        slots = torch.zeros(self._group.rank_info.world_size, num + 1, dtype=torch.int64)
        own = slots[self._group.rank_info.rank]
        try:
            for number in range(num):
                self._computed.feed()
                classes = {} if self._batch is None else self._batch.classes
                mine.append(digests.of_tensors(self._computed.of(state, sent, classes)))
                own[number] = digests.as_number(digests.of_all(mine[-1]))
        except Exception as raised:  # noqa: BLE001  the training has computed the same without an error, so it goes on
            error = raised
            own[num] = 1
        self._computed.feed()
        self._arrive(error)
        numbers = self._group.sum(slots).tolist()
        failed = [rank for rank, one in enumerate(numbers) if one[num]]
        if failed:
            why = "" if error is None else f": {type(error).__name__}: {error}"
            self._switch_off(f"rank {failed[0]} could not compute its micro batch outside of a step{why}")
            return None
        return [[digests.from_number(number) for number in one[:num]] for one in numbers]

    def _arrive(self, error: Exception | None) -> None:
        """Tell that this rank comes to the exchange; with an error, go there only if all others come, too.

        Raises:
            Exception: `error`, if they do not: they may wait for this rank in a collective of the user's code.
        """
        self._num_exchanges += 1
        store, number = self._group.store, str(self._num_exchanges)
        store.set(_arrival(self._group.rank_info.rank), number)
        if error is None:
            return
        deadline = time.monotonic() + self._computed.patience_s
        for rank in range(self._group.rank_info.world_size):
            while store.try_get(_arrival(rank)) != number:
                if time.monotonic() > deadline:
                    raise error
                time.sleep(_PAUSE_S)

    def _sent(self, state: TrainingState, sender: int) -> Tensor | str:
        """Return what `sender` sends to all, or why it cannot."""
        row, why = torch.zeros(0, dtype=torch.uint8), self._why_no_batch
        is_sender = self._group.rank_info.rank == sender
        if is_sender and self._batch is not None:
            try:
                row = self._computed.to_send(state, self._batch)
            except NotSendableError as error:
                why = str(error)
        return self._broadcast(sender, row, why)

    def _broadcast(self, sender: int, row: Tensor, why: str) -> Tensor | str:
        """Return what `sender` has: a text if it has one, else its row of bytes."""
        is_sender = self._group.rank_info.rank == sender
        if is_sender and why:
            row = torch.frombuffer(bytearray(why.encode()), dtype=torch.uint8)
        head = torch.tensor([row.numel(), bool(why)])
        dist.broadcast(head, sender)
        length, is_refusal = head.tolist()
        if not is_sender:
            row = torch.empty(length, dtype=torch.uint8)
        dist.broadcast(row, sender)
        return row.numpy().tobytes().decode() if is_refusal else row

    def _check_values(self, state: TrainingState) -> None:
        """Switch it off, before anything has changed, where some rank has values that cannot be put back."""
        why = self._computed.why_not_kept(state.model)
        flags = torch.zeros(self._group.rank_info.world_size, dtype=torch.int64)
        flags[self._group.rank_info.rank] = bool(why)
        refusing = self._group.sum(flags).nonzero().flatten().tolist()
        if refusing:
            text = self._broadcast(refusing[0], torch.zeros(0, dtype=torch.uint8), why)
            self._switch_off(f"what a pass changes could not all be put back on rank {refusing[0]}: {text}")

    def _check_processors(self) -> None:
        """Switch it off where the ranks' processors, threads or versions of PyTorch may round differently."""
        self._is_checked = True
        threads = "" if self._group.device.type == "cuda" else f" with {self._computed.num_threads} threads"
        own = f"{processor_of(self._group.device)}{threads}, PyTorch {torch.__version__}"
        found = sorted(set(self._group.gathered_by_rank_zero(own)))
        kinds = self._group.broadcast_through_store("recomputation/processors", found)
        if len(kinds) > 1:
            self._switch_off(
                f"the ranks compute on several kinds of processors, which may round differently: {'; '.join(kinds)}"
            )

    def _switch_off(self, why: str) -> None:
        """Compare no more gradients in this attempt; all ranks call this after the same step."""
        self._is_off = True
        self._batch = None
        log.warning(
            "the ranks no longer compare what they compute (`integrity.recompute_every_steps`): %s. The training goes on.",
            why,
        )

    # --- a difference ---

    def _end(self, state: TrainingState, results: Sequence[Sequence[str]], mine: dict[str, int]) -> None:
        """Record which ranks were wrong, and end all ranks, once the checkpoint that is being written is committed."""
        self._replicas.wait_for_save()
        own = {"host": host_name(), "processor": processor_of(self._group.device), "tensors": mine}
        reports = self._group.gathered_by_rank_zero(own)
        text = None
        if reports:
            names = digests.differing([one["tensors"] for one in reports])
            difference = Difference(
                attempt=self._replicas.attempt,
                step=state.position.step,
                digests=tuple(of_rank[0] for of_rank in results),
                hosts=tuple(one["host"] for one in reports),
                processors=tuple(one["processor"] for one in reports),
                tensors=tuple(names[:_MOST_NAMED]),
                num_tensors=len(names),
                at=time.time(),
                of_gradients=True,
            )
            difference = by_recomputation(difference, results)
            try:
                write_difference(self._replicas.run, difference)
            except OSError as error:
                log.warning("the difference cannot be recorded: %s", error)
            text = message_of(self._replicas.run, difference)
        raise RanksDifferError(self._group.last_word(f"recomputation/{state.position.step}/message", text))


def _arrival(rank: int) -> str:
    return f"recomputation/arrived/{rank}"
