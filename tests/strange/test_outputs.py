"""Commands whose output goes where nothing can be written, or nowhere at all."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.durable import replace_text
from ddp_hpc.cli import main
from ddp_hpc.train.recording.metrics_file import MetricsFile
from tests.full_disk import no_file_larger_than
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


@pytest.mark.parametrize("named", [True, False])
def test_a_full_disk_behind_a_file_is_not_said_of_the_output(
    named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record"

    def write(*_: object) -> int:
        sys.stdout.write("done\n")
        with no_file_larger_than(0):
            if named:
                replace_text(path, "text")
            with path.open("w") as file:
                file.write("text")
        return 0

    monkeypatch.setattr("ddp_hpc.cli.verbs.status.run", write)

    assert main(["status", "a"]) == 1

    said = capsys.readouterr()
    assert said.out.startswith("done")
    told = (
        f"{path} cannot be used: File too large."
        if named
        else "a file that this command writes could not be written: F"
    )
    assert said.err.startswith(f"error: {told}")


def test_a_page_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="failed", reason="RuntimeError: no")

    assert main(["report", str(run.path), "--output", str(FULL)]) == 1

    assert capsys.readouterr().err.startswith(f"error: {FULL} cannot be used: No space left on device.")


def test_a_dash_is_standard_output_in_utf_8_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "日本")
    add_attempt(run, ending="failed", reason="RuntimeError: no")
    argv = [sys.executable, "-m", "ddp_hpc", "report", str(run.path), "-o", "-"]
    (tmp_path / "here").mkdir()

    done = subprocess.run(
        argv, env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=tmp_path / "here", capture_output=True, check=True
    )

    text = done.stdout.decode("utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert "日本" in text
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ('"$@" > /dev/full', 1, "error: the output of this command could not be written: No space left on device."),
        ('exec 3> >(:); wait $!; "$@" >&3', 141, ""),
        ('"$@" >&-', 0, ""),
    ],
)
def test_a_page_whose_reader_goes_away_or_is_full_ends_as_any_other_output(
    shell: str, code: int, said: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="failed", reason="RuntimeError: no")
    argv = ["bash", "-c", shell, "bash", sys.executable, "-m", "ddp_hpc", "report", str(run.path), "-o", "-"]

    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == bool(said)
    assert not (tmp_path / "-").exists()


def test_a_command_that_is_started_without_any_stream_does_its_work(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    page = tmp_path / "page.html"
    argv = [sys.executable, "-m", "ddp_hpc", "report", str(run.path), "--output", str(page)]

    done = subprocess.run(["bash", "-c", WITHOUT_STREAMS, "bash", *argv], check=False)

    assert done.returncode == 0
    assert page.stat().st_size > 1000


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_what_a_command_starts_has_open_streams_where_its_own_were_closed(closed: str, tmp_path: Path) -> None:
    found = tmp_path / "found"
    child = f'for n in 0 1 2; do readlink /proc/$$/fd/$n || echo closed; done > "{found}"'
    program = (
        f"import subprocess; from ddp_hpc.cli.terminal import open_closed_streams; "
        f"open_closed_streams(); subprocess.run(['sh', '-c', {child!r}])"
    )

    subprocess.run(["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-c", program], check=True)

    assert "closed" not in found.read_text().split()


def test_how_many_lines_of_metrics_a_full_disk_has_cost_is_said_at_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = MetricsFile(run, 0)
    file.open(0)

    with no_file_larger_than(1):
        assert not is_written(file, {"kind": "train", "step": 1})
        assert not is_written(file, {"kind": "train", "step": 2})
        num_lost = file.close()

    assert num_lost == 2


def test_metrics_that_a_full_disk_has_not_taken_are_counted_once_and_closing_again_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = MetricsFile(run, 0)
    file.open(0)

    with no_file_larger_than(1):
        assert not is_written(file, {"kind": "train", "step": 1})
        counts = [file.close(), file.close()]

    assert counts == [1, 0]


class TakesNothing(io.RawIOBase):
    """A file of which each write takes no byte and is no error, as of some file systems in user space."""

    def __init__(self) -> None:
        self.num_calls = 0

    def write(self, _: Any) -> int:
        self.num_calls += 1
        if self.num_calls > 2:
            raise AssertionError("it is tried for ever")
        return 0


def test_a_file_system_that_takes_no_byte_without_an_error_does_not_hold_the_training(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = MetricsFile(run, 0)
    file.open(0)
    assert file._file is not None
    file._file.close()
    file._file = TakesNothing()  # type: ignore[assignment]  # a file of bytes

    assert not is_written(file, {"kind": "train", "step": 1})
    assert file.close() == 1


def test_an_error_of_closing_the_metrics_does_not_reach_what_is_closed_after_them(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = MetricsFile(run, 0)
    file.open(0)
    descriptor = next(
        int(one.name) for one in Path("/proc/self/fd").iterdir() if one.resolve() == run.metrics.resolve()
    )

    os.close(descriptor)  # so that close(2) fails

    assert file.close() == 0


def is_written(file: MetricsFile, record: dict[str, Any]) -> bool:
    try:
        file.append(record)
    except OSError:
        return False
    return True
