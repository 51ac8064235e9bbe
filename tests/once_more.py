"""Run failed tests once more, each alone; report those that pass then as flaky, with the output of their failure.

    python -m pytest --keep-failures failures.jsonl ...
    python -m tests.once_more failures.jsonl

A flaky test passes and fails on the same code. It is a bug of the test or of the code, so `docs/results/flaky-tests.md`
lists each that was seen, with its cause and its mend.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

MOST = 10
"""More failed tests than these are no flakiness, and are not run again."""
RULE = "=" * 100


def read_failures(path: Path) -> dict[str, list[str]]:
    """Return the failed tests of a session by node id, each with what its phases (setup, call, teardown) printed."""
    failures: dict[str, list[str]] = {}
    for record in _records(path):
        if "test" in record:
            failures.setdefault(record["test"], []).append(record["output"])
    return failures


def is_complete(path: Path) -> bool:
    """Tell whether the session ran to its end: it was neither interrupted nor broken off by an error of pytest's own."""
    return any(
        record.get("exit_status") in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} for record in _records(path)
    )


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_alone(test: str) -> tuple[bool, str]:
    """Run one test in a session of its own; return whether it passed, and what pytest printed."""
    argv = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:randomly", test]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode == 0, done.stdout


def report(failures: Mapping[str, Sequence[str]], second_runs: Mapping[str, tuple[bool, str]]) -> str:
    """Return both outputs of each test, and then, as the last lines, one line a test: flaky, or failed twice."""
    parts, last_lines = [], []
    for test, (has_passed, output) in second_runs.items():
        parts += [RULE, f"{test}, the first run:", *failures[test], f"{test}, alone:", output]
        last_lines.append(f"{'FLAKY (passed alone)' if has_passed else 'FAILED TWICE'} {test}")
    return "\n".join([*parts, RULE, *last_lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 where there were failures and all of them pass alone; else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("failures", type=Path, help="what `pytest --keep-failures` has written")
    path = parser.parse_args(argv).failures
    failures = read_failures(path)
    if not failures:
        sys.stdout.write("No failed test was noted, so something else has failed; see above.\n")
        return 1
    if not is_complete(path):
        sys.stdout.write("The session ended before all of its tests had run; see above.\n")
        return 1
    if len(failures) > MOST:
        sys.stdout.write(f"{len(failures)} tests failed; at most {MOST} are run once more.\n")
        return 1
    second_runs = {test: run_alone(test) for test in failures}
    sys.stdout.write(report(failures, second_runs) + "\n")
    return 0 if all(has_passed for has_passed, _ in second_runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
