"""A rank that computes wrongly before the all-reduce is found and named; nothing of the training changes where all compute the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.processes import in_group
from tests.distributed.wrong_processors import EVERY, Fault, Outcome, try_faults

FAULTS = [
    Fault(kind="a product", rank=1, after=12),
    Fault(kind="a stuck bit", rank=0, after=21, bit=22),
    Fault(kind="large values", rank=1, after=31),
]


def outcomes(world_size: int, folder: Path, faults: list[Fault]) -> list[Outcome]:
    by_rank = in_group(world_size, partial(try_faults, path=folder / "runs", faults=faults), folder / "ranks")
    assert all(one == by_rank[0] for one in by_rank), "the ranks do not tell the same story"
    return by_rank[0]


@pytest.mark.parametrize(
    "world_size", [3, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_a_rank_that_computes_wrongly_is_found_named_if_clear_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, world_size: int
) -> None:
    for one in outcomes(world_size, tmp_path, FAULTS):
        assert (one.end, one.is_same) == ("ranks differ", True)
        assert one.found_at is not None
        assert 0 < one.found_at - one.fault.after <= EVERY
        assert (one.told_by, one.named) == (("vote", (one.fault.rank,)) if world_size > 2 else ("", ()))
