"""A rank whose weights are not those of the others is found, named and left behind; the run ends with the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.bit_flips import EVERY, Flip, Outcome, try_flips
from tests.distributed.processes import in_group

FLIPS = [
    Flip(step=13, rank=1, where="weight", place=3, bit=0),
    Flip(step=20, rank=0, where="moment", place=500, bit=22),
    Flip(step=27, rank=1, where="gradient", place=100, bit=30),
]


def outcomes(world_size: int, folder: Path, flips: list[Flip]) -> list[Outcome]:
    by_rank = in_group(world_size, partial(try_flips, path=folder / "runs", flips=flips), folder / "ranks")
    assert all(one == by_rank[0] for one in by_rank), "the ranks do not tell the same story"
    return by_rank[0]


@pytest.mark.parametrize(("world_size", "told_by"), [(3, "vote"), (2, "repetition")])
def test_a_flipped_bit_is_found_its_rank_is_named_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, world_size: int, told_by: str
) -> None:
    for found in outcomes(world_size, tmp_path, FLIPS):
        assert (found.end, found.end_after, found.is_same) == ("ranks differ", "finished", True)
        assert found.found_at is not None
        assert found.found_at - found.flip.step <= EVERY
        assert (found.told_by, found.named) == (told_by, (found.flip.rank,))
