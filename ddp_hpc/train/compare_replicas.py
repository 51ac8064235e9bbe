"""Compares what all ranks must have equal, to the bit, at steps that depend on the step's number alone.

Each rank computes the digest of its own weights, averages and optimizer state (`state/digests`); one all-reduce tells all ranks the
digests of all. Where they are equal, rank zero records it. Where they are not, all ranks end with the same error, before anything
of it is saved. Where more than half of the ranks agree, the others were wrong. The next attempt compares after the same step, and tells
which ranks had its own values, or values near them: this may correct the vote.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hpc.base.errors import RanksDifferError
from ddp_hpc.base.processes import host_name
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.differences import (
    FINITE,
    NOT_FINITE,
    Difference,
    TensorSample,
    judge_by_repetition,
    judge_by_vote,
    read_differences,
    write_difference,
)
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import record_digest
from ddp_hpc.train.comparable_attempts import processor_of, why_not_comparable
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.save_plan import NO_STEP
from ddp_hpc.train.state import digests, training_state
from ddp_hpc.train.state.training_state import TrainingState

log = logging.getLogger(__name__)

_MOST_NAMED = 20
"""How many of the tensors that differ are recorded by name."""
_MOST_SAMPLED, _MOST_PLACES = 4, 64
"""Of how many of them, and of how many of their elements, the values are recorded."""
_WORD_BYTES = 8
_CHUNK_ELEMENTS = 1 << 24
"""Elements that the ranks compare at a time."""


@dataclass
class ReplicaCheck:
    """The ranks' copies of the training state, as one rank sees them."""

    run: RunDir
    group: Group
    _: KW_ONLY
    attempt: int
    every_steps: int | None
    """Compare at multiples of this number; None: never."""
    wait_for_save: Callable[[], object] = lambda: None
    """Returns when no save is being written any more."""
    _compared: int | None = None
    _open: list[Difference] | None = None
    """Earlier differences whose steps no attempt has computed again; only rank zero knows more than their steps."""
    _open_steps: list[int] = field(default_factory=list)
    _open_losses: list[Difference] | None = None
    """On rank zero, earlier attempts whose losses no attempt has computed again."""
    _left_out: set[str] = field(default_factory=set)
    """Tensors that are not compared, as the log says."""
    _is_losing: bool = False

    def __post_init__(self) -> None:
        self.is_on = self.every_steps is not None
        self.next_step = 0 if self.is_on else NO_STEP
        """After this step, or the first one behind it, the ranks compare."""

    def compare_due(self, state: TrainingState) -> None:
        """Compare, if that is due after this step."""
        if state.position.step >= self.next_step:
            self.compare(state)

    def compare(self, state: TrainingState) -> None:
        """Compare the state of all ranks after this step, if that is switched on, and record its digest."""
        step = state.position.step
        if self.every_steps is None or step == self._compared:
            return
        if self._open is None:
            self._find_disputed_steps()
        self._compared = step
        self.next_step = min(
            (step // self.every_steps + 1) * self.every_steps, *(one for one in self._open_steps if one > step), NO_STEP
        )
        compared, left_out = training_state.tensors_to_compare(state)
        self._note_left_out(left_out)
        mine = digests.digests_of_tensors(compared)
        found = self.group.gather_digests(digests.combined_digest(mine))
        if len(set(found)) > 1:
            self._end_attempt(step, found, mine, state)
        if self.group.rank_info.is_rank_zero:
            self._record_agreed(step, found[0], state)

    def _find_disputed_steps(self) -> None:
        """Find the steps after which an earlier attempt's ranks differed, the same on all ranks: they are compared again."""
        self._open = []
        steps: list[int] = []
        if self.group.rank_info.is_rank_zero:
            self._open = [one for one in read_differences(self.run) if one.is_open]
            steps = sorted({one.step for one in self._open})
        self._open_steps = self.group.broadcast_through_store("replicas/open", steps)

    # --- rank zero ---

    def _note_left_out(self, left_out: Mapping[str, str]) -> None:
        """Log once which tensors are not compared."""
        if not self.group.rank_info.is_rank_zero:
            return
        new = {name: why for name, why in left_out.items() if name not in self._left_out}
        self._left_out.update(new)
        for name, why in [*new.items()][:_MOST_NAMED]:
            log.warning("`%s` is not compared between the ranks (`integrity.every_steps`): it is %s", name, why)
        if len(new) > _MOST_NAMED:
            log.warning("%d more tensors are not compared between the ranks", len(new) - _MOST_NAMED)

    def _record_agreed(self, step: int, digest: str, state: TrainingState) -> None:
        """Record the digest, and who was wrong where earlier attempts' ranks differed after this step."""
        world_size = self.group.rank_info.world_size
        with self._log_errors():
            record_digest(self.run, attempt=self.attempt, step=step, world_size=world_size, digest=digest)
            for one in [one for one in self._open or () if one.step == step]:
                self._open = [other for other in self._open or () if other is not one]
                self.record_verdict(one, digest, _values_at(state, one.samples))

    def record_verdict(self, one: Difference, digest: str, values: Mapping[str, Sequence[float]]) -> None:
        """Record what this attempt, which has computed the step again, says of an earlier one's difference."""
        group, attempt = self.group, self.attempt
        different = why_not_comparable(
            self.run, one, attempt=attempt, world_size=group.rank_info.world_size, processor=processor_of(group.device)
        )
        concluded = judge_by_repetition(one, attempt, digest, values, not_comparable=different)
        write_difference(self.run, concluded)
        log.warning(
            "attempt %d ended because %s: %s. The training continues.", one.attempt, concluded.finding, concluded.blame
        )

    # --- a difference ---

    def _end_attempt(self, step: int, found: Sequence[str], mine: dict[str, int], state: TrainingState) -> None:
        """Tell all ranks what differs, once the checkpoint that is being written is committed; it was equal everywhere."""
        self.wait_for_save()
        named = training_state.replicated_tensors(state)
        tensors = {name: [mine[name], [*one.shape], str(one.dtype)] for name, one in named.items()}
        reports = self._gather_reports(tensors=tensors)
        names = digests.differing_tensors([one["tensors"] for one in reports])
        # Ranks without a tensor, or with one of another shape, could not take part in a comparison of its elements.
        sampled = [] if _shape_or_dtype_mismatch(names, reports) else names[:_MOST_SAMPLED]
        samples = [
            self._differing_values(name, named[name])
            for name in self.group.broadcast_through_store(f"replicas/{step}/sampled", sampled)
        ]
        text = self._explain(step, found, reports, names, samples) if self.group.rank_info.is_rank_zero else None
        raise RanksDifferError(self.group.broadcast_last_word(f"replicas/{step}/message", text))

    def _differing_values(self, name: str, tensor: Tensor) -> TensorSample:
        """Return the first elements of a tensor that are not equal on all ranks; on rank zero, with the values of all."""
        flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg().cpu()
        places: list[int] = []
        for begin in range(0, flat.numel(), _CHUNK_ELEMENTS):
            part = _bits_as_integers(flat[begin : begin + _CHUNK_ELEMENTS])
            least, most = part.clone(), part.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            unequal = (least != most).reshape(part.shape[0], -1).any(1)
            places += [begin + int(place) for place in unequal.nonzero().flatten()[:_MOST_PLACES]]
            if len(places) >= _MOST_PLACES:
                break
        places = places[:_MOST_PLACES]
        values = self.group.gather_on_rank_zero(_floats(flat, places))
        return TensorSample(tensor=name, places=tuple(places), values=tuple(map(tuple, values)))

    def _explain(
        self,
        step: int,
        found: Sequence[str],
        reports: Sequence[dict[str, Any]],
        names: Sequence[str],
        samples: Sequence[TensorSample],
    ) -> str:
        """Record the difference, and return the message of all ranks."""
        tensors = tuple(names[:_MOST_NAMED]) or ("the names of the tensors",)
        unlike = _shape_or_dtype_mismatch(names, reports)
        newest = judge_by_vote(
            self._difference(
                step, found, reports, tensors=tensors, num_tensors=len(names), samples=tuple(samples), unlike=unlike
            )
        )
        with self._log_errors():
            write_difference(self.run, newest)
        return message_on_difference(self.run, newest)

    def _gather_reports(self, **own: Any) -> list[dict[str, Any]]:
        """Return on rank zero what each rank has, and where it computes."""
        here = {"host": host_name(), "processor": processor_of(self.group.device)}
        return self.group.gather_on_rank_zero({**here, **own})

    def _difference(
        self, step: int, digests: Iterable[str], reports: Sequence[dict[str, Any]], **more: Any
    ) -> Difference:
        return Difference(
            attempt=self.attempt,
            step=step,
            digests=tuple(digests),
            hosts=tuple(one["host"] for one in reports),
            processors=tuple(one["processor"] for one in reports),
            at=time.time(),
            **more,
        )

    # --- losses ---
    #
    # If only some ranks have a loss that is not finite, a wrong bit may be the cause, so another attempt computes the step again. All
    # ranks have the same weights, so one attempt alone does not show whether a processor or a sample was bad; one step later, all have
    # weights that are not finite, and equal digests. If the next attempt finds finite losses in that step, the ranks with the others
    # were wrong. If it ends in the same way, the training diverges.

    def note_finite_losses(self, step: int) -> None:
        """Record on rank zero that all losses of a step are finite, where those of an earlier attempt were not."""
        if not self.group.rank_info.is_rank_zero:
            return
        with suppress(OSError):  # what cannot be read or written now is concluded by a later attempt, or not at all
            if self._open_losses is None:
                known = read_differences(self.run)
                self._open_losses = [one for one in known if one.of_loss and one.repeated_in is None]
            for one in [one for one in self._open_losses if one.step == step]:
                self._open_losses.remove(one)
                self.record_verdict(one, FINITE, {})

    def nonfinite_ranks_text(self, step: int, *, is_mine: bool) -> str:
        """Return on which ranks the losses began not to be finite, after `step`, as the end of a sentence; empty if on all.

        All ranks call this before a training ends as diverged. Another attempt may have to compute the step again: then they end with the
        same RanksDifferError.
        """
        found, answer = self._gather_reports(bad=is_mine), ["", ""]
        if found and not all(one["bad"] for one in found):
            digests = (NOT_FINITE if one["bad"] else FINITE for one in found)
            now = self._difference(step, digests, found, tensors=("the loss",), num_tensors=1, of_loss=True)
            # Once since the newest checkpoint: an earlier attempt may have ended so, and no rank was proved wrong.
            newest = max(checkpoint_names.committed_steps(self.run), default=0)
            before = [
                one for one in read_differences(self.run) if one.of_loss and one.step > newest and not one.odd_ranks
            ]
            answer = [f", first {now.not_finite_ranks_text}", "" if before else message_on_difference(self.run, now)]
            if not before:
                with suppress(OSError):  # then no later attempt can tell who was wrong
                    write_difference(self.run, now)
        first, message = self.group.broadcast_through_store("lone-losses", answer)
        if message:
            raise RanksDifferError(self.group.broadcast_last_word("lone-losses/end", message))
        return str(first)

    @contextmanager
    def _log_errors(self) -> Any:
        """Keep the training running on a full disk: skip records that cannot be written, and log the first of them."""
        try:
            yield
            self._is_losing = False
        except OSError as error:
            if not self._is_losing:
                log.warning("the state's digests cannot be recorded: %s. The training goes on without them.", error)
            self._is_losing = True


def message_on_difference(run: RunDir, difference: Difference) -> str:
    """Return what ends the ranks of an attempt, and what follows."""
    steps = checkpoint_names.committed_steps(run)
    goes_on = (
        f"goes on from step {steps[-1]}, its newest checkpoint" if steps else "starts over, as it has no checkpoint"
    )
    return f"{difference.finding}; {difference.blame}. This step is not saved: the run {goes_on}. See docs/integrity.md"


def _shape_or_dtype_mismatch(names: Sequence[str], reports: Sequence[dict[str, Any]]) -> str:
    """Say which of these tensors is the first that some ranks do not have, or have in another shape or dtype; empty if none is."""
    for name in names:
        found = [one["tensors"].get(name, ()) for one in reports]
        kinds = [tuple(map(str, one[1:])) for one in found]
        if len(set(kinds)) > 1:
            return "; ".join(
                f"`{name}` is {f'{kind[1]} of shape {kind[0]}' if kind else 'missing'} on {_ranks_text(kinds, kind)}"
                for kind in dict.fromkeys(kinds)
            )
    return ""


def _ranks_text(kinds: Sequence[object], kind: object) -> str:
    ranks = [rank for rank, one in enumerate(kinds) if one == kind]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, the first of which is {ranks[0]}"


def _bits_as_integers(flat: Tensor) -> Tensor:
    """Return the bits of each element as an integer that gloo can compare; as two, for an element of 16 bytes."""
    size = flat.element_size()
    if size >= _WORD_BYTES:
        return flat.contiguous().view(torch.int64).view(flat.numel(), size // _WORD_BYTES)
    same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return flat.contiguous().view(same_size).to(torch.int32)


def _floats(flat: Tensor, places: Sequence[int]) -> list[float]:
    """Return the elements at these places as numbers: of a complex one, its length; of a dtype without arithmetic, its bits."""
    try:
        found = flat[list(places)]
        return (torch.view_as_real(found).double().norm(dim=1) if found.is_complex() else found.double()).tolist()
    except RuntimeError:  # PyTorch has such dtypes to store numbers in, and cannot index or convert them
        bits = _bits_as_integers(flat)[list(places)].double()
        return bits.reshape(len(places), -1)[:, 0].tolist()


def _values_at(state: TrainingState, samples: Sequence[TensorSample]) -> dict[str, list[float]]:
    """Return what this rank has at the places of the samples; nothing of a tensor that it does not have."""
    named = {name: one.detach().reshape(-1) for name, one in training_state.replicated_tensors(state).items()}
    return {
        one.tensor: _floats(named[one.tensor], one.places)
        for one in samples
        if one.tensor in named and max(one.places, default=0) < named[one.tensor].numel()
    }
