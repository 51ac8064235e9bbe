"""Files of which a reader sees the whole new text or the whole old one."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from ddp_hpc.base import durable
from ddp_hpc.base.durable import append_json_line, atomic_output, read_json, read_json_lines, replace_text
from ddp_hpc.base.errors import ConfigError


@pytest.mark.parametrize("durable", [True, False])
def test_a_text_takes_the_place_of_the_old_one(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a longer old one")

    replace_text(path, "new", durable=durable)

    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["text"]


def test_a_text_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("old")

    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\udc80")

    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["text"]


def test_a_leftover_of_a_killed_writer_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / f".text.{os.getpid()}.tmp").write_text("half of it")

    replace_text(tmp_path / "text", "new")

    assert (tmp_path / "text").read_text() == "new"


@pytest.mark.parametrize("before", [None, "old"], ids=["new", "old"])
def test_an_output_is_there_whole_or_not_at_all(before: str | None, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if before is not None:
        path.write_text(before)

    with pytest.raises(UnicodeEncodeError), atomic_output(path) as file:
        file.write_text("half of it \udc80")

    assert [entry.read_text() for entry in tmp_path.iterdir()] == ([] if before is None else [before])
    with atomic_output(path) as file:
        file.write_text("all of it")
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["all of it"]


def test_an_output_that_is_a_pipe_is_written_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # open for both, so that nobody waits for anybody

    with atomic_output(path) as file:
        file.write_text("new")

    assert os.read(reader, 100) == b"new"
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]
    os.close(reader)


@pytest.mark.parametrize("target", ["there", "not there yet"])
def test_an_output_that_is_a_link_stays_one(target: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    link = tmp_path / "link"
    link.symlink_to(target)

    with atomic_output(link) as file:
        file.write_text("new")

    assert link.readlink() == Path(target)
    assert (tmp_path / target).read_text() == "new"


@pytest.mark.parametrize(
    ("output", "told"),
    [(".", "that is a directory"), ("nowhere/out", "does not exist. Create it first")],
    ids=["is", "is none"],
)
def test_an_output_that_cannot_be_a_file_is_refused(output: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told), atomic_output(tmp_path / output):
        pytest.fail("nothing is to be made first")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("", [{"a": 1}]),
        ('{"b":2}\n', [{"b": 2}, {"a": 1}]),
        ('{"b":2}\n{"c":', [{"b": 2}, {"a": 1}]),
        ('{"b":2}\n[3]\nnonsense\n', [{"b": 2}, {"a": 1}]),
    ],
    ids=["empty", "whole lines", "a torn line", "lines that are no records"],
)
def test_a_line_is_added_after_whatever_a_dead_writer_left(
    before: str, lines: list[dict[str, int]], tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    path.write_text(before)

    append_json_line(path, {"a": 1})

    assert list(read_json_lines(path)) == lines


def test_a_first_line_makes_the_file(tmp_path: Path) -> None:
    append_json_line(tmp_path / "lines", {"text": "two\nlines \u2028"})

    assert list(read_json_lines(tmp_path / "lines")) == [{"text": "two\nlines \u2028"}]


@pytest.mark.parametrize(
    ("text", "record"),
    [(None, None), ("", None), ('{"a":', None), ("[1]", None), (json.dumps({"a": 1}), {"a": 1})],
    ids=["missing", "empty", "torn", "no object", "whole"],
)
def test_an_object_is_read_or_there_is_none(text: str | None, record: dict[str, int] | None, tmp_path: Path) -> None:
    path = tmp_path / "record"
    if text is not None:
        path.write_text(text)

    assert read_json(path) == record


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_json_lines(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"a\n", b"a\n\nbcd\nefghijklmnop\nq", b"\n\n", b"abc\ndefgh\n"])
def test_lines_come_from_the_end_with_their_places(
    text: bytes, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_BLOCK", block)
    (tmp_path / "lines").write_bytes(text)

    found = list(durable.lines_from_end(tmp_path / "lines"))

    assert [raw for _, raw in found] == text.splitlines(keepends=True)[::-1]
    assert all(text[at:].startswith(raw) for at, raw in found)


@pytest.mark.parametrize(("number", "is_raised"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_directory_that_cannot_be_flushed_is_told_of_once_and_a_disk_that_fails_is_an_error(
    number: int, *, is_raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    durable._warn_of_unflushed.cache_clear()
    for _ in range(2):
        with pytest.raises(OSError, match="output error") if is_raised else nullcontext():
            durable.replace_text(tmp_path / "record", "text")

    assert (tmp_path / "record").read_text() == "text"
    assert caplog.text.count("cannot flush directories") == (not is_raised)
