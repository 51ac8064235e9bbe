"""Which tests run when, and what becomes of one that fails."""

from __future__ import annotations

import os
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


FAILS_ONCE = """
from pathlib import Path

def test_passes_the_second_time():
    tried = Path(__file__).with_name("tried")
    if not tried.exists():
        tried.touch()
        print("the first output")
        raise AssertionError("only once")
    print("the second output")

def test_always_passes():
    pass
"""
FAILS_TWICE = "def test_fails():\n    raise AssertionError('each time')\n"


@pytest.mark.parametrize(
    ("text", "exit_code", "last_line"),
    [
        (FAILS_ONCE, 0, "FLAKY (passed alone) test_it.py::test_passes_the_second_time"),
        (FAILS_TWICE, 1, "FAILED TWICE test_it.py::test_fails"),
        ("import no_such_module\n", 1, "The session ended before all of its tests had run; see above."),
        ("def test_passes():\n    pass\n", 1, "No failed test was noted, so something else has failed; see above."),
    ],
    ids=["passes-then", "fails-again", "cannot-be-imported", "nothing-failed"],
)
def test_a_failed_test_is_run_once_more_and_reported(text: str, exit_code: int, last_line: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_configure\n")
    (tmp_path / "test_it.py").write_text(text)
    failures = tmp_path / "failures.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(HERE)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", *words]
        return subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    run("pytest", "-p", "no:cacheprovider", "--keep-failures", str(failures))
    done = run("tests.once_more", str(failures))

    assert (done.returncode, done.stdout.splitlines()[-1]) == (exit_code, last_line), done.stdout + done.stderr
    if text == FAILS_ONCE:
        assert "the first output" in done.stdout


def test_a_test_of_this_project_that_failed_is_run_once_more_and_passes(tmp_path: Path) -> None:
    one_test = "tests/architecture/test_tiers.py::test_one_that_takes_no_time"
    failures = tmp_path / "failures.jsonl"
    failures.write_text(f'{{"test": "{one_test}", "output": "once"}}\n{{"exit_status": 1}}\n')

    argv = [sys.executable, "-m", "tests.once_more", str(failures)]
    done = subprocess.run(argv, cwd=HERE, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"FLAKY (passed alone) {one_test}"), done.stdout
