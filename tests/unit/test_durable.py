"""Files of which a reader sees the whole new text or the whole old one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddp_hpc.durable import append_json_line, read_json, read_json_lines, replace_text


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
