"""Followers of runs whose files somebody has edited."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.watch.follow import follow
from tests.made_run import add_attempt, add_metrics, make_run

LATER = 4e9
"""A time after every test's start."""
GOOD = {"kind": "eval", "step": 20, "epoch": 1, "loss": 0.5, "at": LATER}


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "eval"},
        {"kind": "eval", "step": 10, "at": "soon"},
        {"kind": "eval", "step": 10, "at": None},
        {"kind": "eval", "at": LATER},
        {"kind": ["eval"], "step": {}, "at": LATER},
    ],
)
def test_a_line_of_the_metrics_that_no_run_writes_ends_nobodys_look(odd: dict[str, object], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="finished")
    add_metrics(run, [odd, GOOD])

    (look,) = follow(run, 0, clock=lambda: LATER, pause=lambda _: None)

    assert [line["step"] for line in look.evaluations] == [20]
