"""Runs that really end badly: `ddp-hpc why` names the class and the rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.deaths import DEATHS, Death, ask, happen

QUICK = {"recipe-data"}
"""What a newcomer's `make test` runs."""


@pytest.mark.parametrize(
    "death",
    [pytest.param(one, id=one.name, marks=[] if one.name in QUICK else pytest.mark.long) for one in DEATHS],
)
def test_a_run_that_ended_badly_is_explained(death: Death, tmp_path: Path) -> None:
    happen(death, tmp_path)

    answer = ask(tmp_path)

    assert answer["failure"] == death.failure, answer
    assert death.rank in (None, answer["rank"])
    assert death.entity in ("", answer["entity"])
    assert answer["evidence"] or death.how in {"hang", "segfault", "abort", "kill", "term"}
    assert answer["to_do"]
