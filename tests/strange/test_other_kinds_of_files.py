"""Something else than a file lies where a run keeps a record: no command waits for it, and none is killed by it."""

from __future__ import annotations

import inspect
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ddp_hpc.base import patience
from ddp_hpc.base.durable import MOST_BYTES_OF_LINES, MOST_RECORD_BYTES, read_json, read_json_lines
from ddp_hpc.base.errors import NotARecordError
from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.paths import RunDir
from tests.report.made import Plan, made_run

COMMANDS = (
    "status",
    "status --json",
    "list",
    "status --watch",
    "report",
    "why",
    "why --json",
)
NEEDED = {"config", "attempts", "progress", "submission", "checkpoints"}
"""Without these, the state of a run is not known, so a command may end with an error that names the path."""
FOLDERS = {"attempt_logs", "attempt_errors", "errors", "checkpoints", "samples", "snapshots", "submitit", "tensorboard"}
FOLDERS |= {"nccl_logs", "preflight_files", "profile", "snapshot"}


def paths_of(run: RunDir) -> dict[str, Path]:
    """Return all paths that a run's directory has, by the name of what tells them; of attempt 0 and rank 0."""
    found = {}
    for name, member in inspect.getmembers(run):
        if name.startswith("_") or name == "path":
            continue
        found[name] = member(*[0] * len(inspect.signature(member).parameters)) if callable(member) else member
    return {name: path for name, path in found.items() if isinstance(path, Path) and path != run.path}


def a_socket(path: Path) -> None:
    where = os.open(path.parent, os.O_RDONLY)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{where}/{path.name}")
    finally:
        os.close(where)


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 10_000_000_000)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": a_socket,
    "a huge file": a_huge_file,
    "a stale mount": lambda path: path.symlink_to(path.name),  # an error that says nothing of what is there
}


def put(kind: str, path: Path) -> Path | None:
    """Put something of this kind at a path; return where what was there is now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = path.rename(path.with_name(f"{path.name}.kept")) if path.exists() else None
    KINDS[kind](path)
    return kept


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    return made_run(tmp_path / "runs" / "one", [Plan(first=0, reached=60), Plan(first=50, reached=100)])


def answers(run: RunDir, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, int, str]]:
    """Yield each command, its exit code and what it printed."""
    for command in COMMANDS:
        verb, *options = command.split()
        yield (
            command,
            main([verb, *([] if verb == "list" else [str(run.path)]), *options]),
            "".join(capsys.readouterr()),
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_no_command_waits_for_or_dies_of_something_else_in_the_place_of_all_records_but_those_that_it_needs(
    kind: str, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {name: path for name, path in paths_of(run).items() if name not in NEEDED | FOLDERS}
    for path in known.values():
        put(kind, path)

    found = {command: code for command, code, _ in answers(run, capsys)}

    assert len(known) > 30
    assert found == dict.fromkeys(COMMANDS, 0)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_something_else_in_the_place_of_any_one_record_ends_no_command_without_its_name(
    kind: str, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = []

    for name, path in paths_of(run).items():
        if name in FOLDERS and kind != "a pipe":
            continue
        kept = put(kind, path)
        for command, code, said in answers(run, capsys):
            if code == 0 or (name == "config" and code == 2) or (name in NEEDED and str(path) in said):
                continue
            faults.append(f"{command} with {kind} at {name}: {code}, {said.strip()[-200:]}")
        path.rmdir() if kind == "a directory" else path.unlink()
        if kept is not None:
            kept.rename(path)

    assert faults == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_cannot_be_read_is_named_on_the_page(
    kind: str, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths: Sequence[Path] = (run.timeline, run.waits, run.metrics)
    for path in paths:
        path.unlink()
        KINDS[kind](path)

    main(["report", str(run.path), "-o", str(tmp_path / "page.html")])

    page = (tmp_path / "page.html").read_text()
    for words in ("The timeline", "The comparison of the ranks", "The metrics"):
        assert f"{words} cannot be read" in page


def test_a_record_is_read_from_a_file_of_a_bounded_size_only(tmp_path: Path) -> None:
    for name, read, most in (
        ("one", read_json, MOST_RECORD_BYTES),
        ("lines", lambda path: [*read_json_lines(path)], MOST_BYTES_OF_LINES),
    ):
        path = tmp_path / name
        path.write_text('{"a": 1}\n')
        assert read(path) in ({"a": 1}, [{"a": 1}])

        os.truncate(path, most + 1)

        with pytest.raises(NotARecordError, match="MB, and a record there has at most"):
            read(path)


def test_a_run_without_its_records_is_no_fault(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run.timeline, run.waits, run.metrics):
        path.unlink()
    shutil.rmtree(run.attempt_logs(0))

    assert [code for _, code, _ in answers(run, capsys)] == [0] * len(COMMANDS)
