"""Between which steps two runs part, as far as their records say. Pure, except `read_known`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddp_hpc.base.errors import CorruptCheckpointError, UnreadableError
from ddp_hpc.prove.replay.comparison import compare, differing_names
from ddp_hpc.prove.replay.history import History
from ddp_hpc.prove.replay.record import record_of, state_of_checkpoint


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the records of two runs say of their states."""

    equal_at: int
    """The newest step after which the states are known to be equal; 0 without one: not even the beginning is known."""
    digest_equal_at: int
    """The same by digests, which say nothing of buffers and random generators."""
    is_equal_known: bool
    unequal_at: int | None
    """The first step after which they are known to differ; None without one."""
    end: int
    """The newest step that both have taken."""
    notes: tuple[str, ...] = ()


def narrowed(
    equal: list[int], unequal: list[int], end: int, *, digest_equal: Iterable[int] = (), notes: tuple[str, ...] = ()
) -> Known:
    """Return between which steps the first difference lies.

    Runs that part may look equal again later, so only a step before the first known difference counts as equal.
    """
    first = min(unequal, default=None)
    before = [step for step in equal if first is None or step < first]
    by_digest = [step for step in digest_equal if first is None or step < first]
    return Known(
        equal_at=max(before, default=0),
        digest_equal_at=max([*before, *by_digest], default=0),
        is_equal_known=bool(before),
        unequal_at=first,
        end=end,
        notes=notes,
    )


def read_known(one: History, other: History) -> Known:
    """Read what two runs have recorded of the same steps: states in checkpoints, losses, samples."""
    end = min(one.last_step, other.last_step)
    equal: list[int] = []
    unequal: list[int] = []
    notes: list[str] = []
    for step in sorted({*one.committed} & {*other.committed}):
        try:
            states = state_of_checkpoint(one.run, step), state_of_checkpoint(other.run, step)
        except (CorruptCheckpointError, UnreadableError, OSError) as error:
            notes.append(f"the checkpoints of step {step} cannot be compared: {error}")
            continue
        # These say only what the next log line will show, which depends on `log.every_steps`.
        of_log = ("loss_steps", "/loss_meter")
        differing = [name for name in differing_names(*states) if not name.endswith(of_log)]
        (unequal if differing else equal).append(step)
    mine, others = (record_of(history.run, 0, end) for history in (one, other))
    if one.log_every != other.log_every:  # a loss is a mean over the steps since the line before
        mine.losses = {}
    # A loss or samples that are equal prove nothing of the state.
    unequal += [difference.step for difference in compare(mine, others).differences]
    same = [step for step in mine.digests.keys() & others.digests.keys() if mine.digests[step] == others.digests[step]]
    return narrowed(equal, unequal, end, digest_equal=same, notes=tuple(notes))
