"""Which tests run when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]


@pytest.mark.parametrize(("limit_min", "outcome"), [("0", "1 skipped"), ("60", "1 passed")])
def test_no_test_is_begun_after_the_minutes_that_a_caller_has(limit_min: str, outcome: str) -> None:
    one_test = "tests/architecture/test_tiers.py::test_one_that_takes_no_time"

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--stop-after-min", limit_min, one_test],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )

    assert outcome in done.stdout


def test_one_that_takes_no_time() -> None:
    pass
