"""Commands whose output goes where nothing can be written, or nowhere at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from tests.made_run import add_attempt, make_run

FULL = Path("/dev/full")
"""A device that refuses each write as a full disk does."""
WITHOUT_STREAMS = 'exec "$@" <&- >&- 2>&-'


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_output_is_one_line_that_says_so(unbuffered: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    argv = [sys.executable, "-m", "ddp_hpc", "status", str(run.path), "--json"]

    with FULL.open("w") as full:
        done = subprocess.run(
            argv,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr.startswith("error: the output of this command could not be written: No space left on device.")
    assert len(done.stderr.splitlines()) == 1


def test_a_page_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="failed", reason="RuntimeError: no")

    assert main(["report", str(run.path), "--output", str(FULL)]) == 1

    assert capsys.readouterr().err.startswith(f"error: {FULL} cannot be used: No space left on device.")


def test_a_command_that_is_started_without_any_stream_does_its_work(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    page = tmp_path / "page.html"
    argv = [sys.executable, "-m", "ddp_hpc", "report", str(run.path), "--output", str(page)]

    done = subprocess.run(["bash", "-c", WITHOUT_STREAMS, "bash", *argv], check=False)

    assert done.returncode == 0
    assert page.stat().st_size > 1000
