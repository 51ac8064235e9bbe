"""Which tests run when and where, and what becomes of one that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SHARE_RUNS, in_turn, part_of

HERE = Path(__file__).parents[2]


@pytest.mark.long
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


def test_the_cluster_has_one_process_as_have_the_runs_of_a_file_and_any_other_test_may_go_anywhere() -> None:
    assert part_of("tests/slurm/test_a.py::test_one") == part_of("tests/slurm/test_b.py::test_two")
    assert part_of("tests/distributed/test_a.py::test_one") == part_of("tests/distributed/test_a.py::test_two")
    assert part_of("tests/distributed/test_a.py::test_one") != part_of("tests/distributed/test_b.py::test_one")
    assert part_of("tests/unit/test_a.py::test_one[x::1]") != part_of("tests/unit/test_a.py::test_one[x::2]")
    assert [path for path in SHARE_RUNS if not (HERE / path).exists()] == []


def test_the_cluster_begins_first_and_tests_that_share_runs_begin_among_the_others() -> None:
    others = [f"tests/unit/test_a.py::test_{number}" for number in range(8)]
    shared = [f"tests/distributed/test_{name}.py::test_{number}" for name in "ab" for number in range(2)]

    order = in_turn([*others, *shared, "tests/slurm/test_a.py::test_one"])

    assert order == ["tests/slurm/test_a.py::test_one", others[0], *shared[:2], *others[1:5], *shared[2:], *others[5:]]


def test_makes_commands_may_keep_compiled_modules_whatever_the_shell_says() -> None:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    show = "--eval=show: ; @echo ${PYTHONDONTWRITEBYTECODE-unset}".replace("$", "$$")

    done = subprocess.run(
        ["make", "-s", show, "show"], cwd=HERE, env=environ, capture_output=True, text=True, check=True
    )

    assert done.stdout == "unset\n"


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "exit_code", "last_line"),
    [
        (FAILS_ONCE, 0, "FLAKY (passed alone) test_it.py::test_passes_the_second_time"),
        pytest.param(FAILS_TWICE, 1, "FAILED TWICE test_it.py::test_fails", marks=pytest.mark.long),
        pytest.param(
            *("import no_such_module\n", 1, "The session ended before all of its tests had run; see above."),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(
                "def test_passes():\n    pass\n",
                1,
                "No failed test was noted, so something else has failed; see above.",
            ),
            marks=pytest.mark.long,
        ),
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


@pytest.mark.long
def test_a_test_of_this_project_that_failed_is_run_once_more_and_passes(tmp_path: Path) -> None:
    one_test = "tests/architecture/test_tiers.py::test_one_that_takes_no_time"
    failures = tmp_path / "failures.jsonl"
    failures.write_text(f'{{"test": "{one_test}", "output": "once"}}\n{{"exit_status": 1}}\n')

    argv = [sys.executable, "-m", "tests.once_more", str(failures)]
    done = subprocess.run(argv, cwd=HERE, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"FLAKY (passed alone) {one_test}"), done.stdout
