"""What an exception concerns, and whether another attempt may get past it."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import pickle
import struct
import threading
import time
import types
import zipfile
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.run.run_dir.error_fingerprint import AffectedEntity, affected_entity, is_content_error, is_decoder_error


def caught(act: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011  each case has its own
        act()
    return info.value


def raises(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def wrapped(inner: BaseException, outer: BaseException, *, is_hidden: bool = False) -> Callable[[], object]:
    def act() -> None:
        try:
            raises(inner)()
        except BaseException as error:  # noqa: BLE001  whatever a case raises
            raise outer from (None if is_hidden else error)

    return act


class BadImageError(OSError):
    """As Pillow's, which has this module and name."""


BadImageError.__module__, BadImageError.__name__ = "PIL", "UnidentifiedImageError"


def in_module(name: str, error: BaseException) -> Callable[[], object]:
    """Return what raises an error in code of a module with this name."""
    module = types.ModuleType(name)
    exec("def act(error):\n    raise error\n", vars(module))  # noqa: S102  a line of ours
    return lambda: module.act(error)


@pytest.mark.parametrize(
    "act",
    [
        raises(ValueError("label 12")),
        raises(KeyError("label")),
        raises(ZeroDivisionError()),
        lambda: struct.unpack("<I", b"ab"),
        lambda: zlib.decompress(b"no zlib"),
        lambda: gzip.decompress(b"no gzip"),
        lambda: zipfile.ZipFile(io.BytesIO(b"no zip")),
        lambda: pickle.loads(b"\x80\x05no pickle."),  # noqa: S301  a line of ours
        lambda: json.loads("{"),
        lambda: b"\xff".decode("utf-8"),
        lambda: list(csv.reader(['"a' + "b"], strict=True)),
        raises(BadImageError("cannot identify image file")),
        in_module("PIL.ImageFile", OSError("image file is truncated (3 bytes not processed)")),
        in_module("PIL.BmpImagePlugin", OSError("Unsupported BMP header type (0)")),
        wrapped(KeyError("label"), ValueError("no label")),
    ],
    ids=map(str, count(1)),  # a function prints its address, which differs from process to process
)
def test_an_error_of_the_content_is_one(act: Callable[[], object]) -> None:
    assert is_content_error(caught(act))


@pytest.mark.parametrize(
    "act",
    [
        *(raises(OSError(getattr(errno, name), name)) for name in
          ("EIO", "ESTALE", "ETIMEDOUT", "ENOSPC", "EDQUOT", "ECONNRESET", "ENOENT", "EACCES", "EMFILE", "ENOTCONN")),
        raises(OSError("file read failed: errno = 5")),  # as h5py says it
        raises(BadImageError(errno.EIO, "Input/output error")),
        raises(TypeError("'NoneType' object is not subscriptable")),  # of an image that `cv2.imread` could not read
        raises(AttributeError("'NoneType' object has no attribute 'shape'")),
        raises(AssertionError()),
        raises(MemoryError()),
        raises(EOFError()),
        raises(TimeoutError()),
        raises(RuntimeError("CUDA error: device-side assert triggered")),
        raises(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed.")),
        raises(SystemExit(3)),
        raises(KeyboardInterrupt()),
        raises(Exception("HTTP 503")),
        wrapped(OSError(errno.EIO, "x"), ValueError("bad image")),
        wrapped(OSError(errno.EIO, "x"), ValueError("bad image"), is_hidden=True),
        wrapped(ConnectionResetError(), KeyError("x")),
        in_module("torchvision.io", OSError("something")),
        in_module("PIL.ImageFont", OSError("cannot open resource")),  # FreeType could not open a font's file
        in_module("PIL.ImageCms", OSError("cannot open profile file")),
    ],
    ids=map(str, count(1)),  # a function prints its address, which differs from process to process
)  # fmt: skip
def test_what_a_file_system_the_network_or_a_device_may_have_caused_is_none(act: Callable[[], object]) -> None:
    assert not is_content_error(caught(act))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file, written long ago, in a working directory; its path is relative, as one below /tmp would not count."""
    monkeypatch.chdir(tmp_path)
    path = Path("index.json")
    path.write_text("{")
    os.utime(path, (1000, 1000))
    return path


def undecodable(text: str) -> AffectedEntity:
    return affected_entity(caught(wrapped(caught(lambda: json.loads("{")), ValueError(text))))


def test_a_file_that_a_message_quotes_is_named_with_its_version_and_proves_nothing(index: Path) -> None:
    found = undecodable(f"cannot read '{index}'")

    assert found == AffectedEntity(
        entity="index.json", version="1 bytes, 1000000000000", may_recover=True, place=found.place
    )
    assert found.place.endswith(" in act")


@pytest.mark.parametrize("kept", [5, 600])
def test_pillows_errors_of_damaged_images_are_of_the_content(index: Path, kept: int) -> None:
    image = pytest.importorskip("PIL.Image")
    whole = io.BytesIO()
    image.new("RGB", (64, 64)).save(whole, "JPEG")
    index.write_bytes(whole.getvalue()[:kept])

    def load() -> None:
        with image.open(index) as opened:
            opened.load()

    error = caught(load)

    assert is_decoder_error(error), error


def test_a_file_that_has_changed_is_another_version(index: Path) -> None:
    before = undecodable(f"cannot read '{index}'")

    os.utime(index, (2000, 2000))

    assert undecodable(f"cannot read '{index}'").version != before.version


@pytest.mark.parametrize(
    "text",
    [
        "cannot read 'no-such-file.json'",
        "cannot read 'index.json' or 'other.json'",
        "cannot read '/tmp/index.json'",
        "cannot read 'https://user:secret@host/index.json?sig=abc'",
        "cannot read 'a\x1b[31m\nindex.json'",
        f"cannot read '{'x/' * 600}index.json'",
        "cannot read 'a\0b.json'",
        "no file is named",
        "",
    ],
)
def test_a_text_that_names_no_single_file_concerns_none(index: Path, text: str) -> None:
    found = undecodable(text)

    assert (found.entity, found.version, found.may_recover) == ("", "", True)


def test_a_file_that_was_just_written_may_still_be_written(index: Path) -> None:
    index.write_text("{")

    assert undecodable(f"cannot read '{index}'").version == ""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("label 99 is unknown"),
        KeyError("label"),
        FileNotFoundError(2, "No such file or directory", "index.json"),
        RuntimeError("cannot read 'index.json'"),
        TypeError("'NoneType' object is not subscriptable"),
    ],
    ids=str,
)
def test_an_error_that_no_decoder_has_raised_is_of_none(error: BaseException) -> None:
    assert not is_decoder_error(caught(raises(error)))


def test_what_a_loader_process_has_passed_on_is_of_no_decoder_as_its_reasons_are_unknown() -> None:
    error = json.JSONDecodeError("Caught JSONDecodeError in DataLoader worker process 0.", "{", 0)

    assert not is_decoder_error(caught(in_module("torch._utils", error)))


def test_an_exception_in_a_circle_and_one_with_odd_attributes_are_read_to_their_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__context__ = second, first
    odd: Any = ValueError("c")
    odd.affected = "everything"

    assert is_content_error(first)
    assert affected_entity(odd).entity == ""


def test_a_message_of_a_million_characters_is_read_at_once(index: Path) -> None:
    found = undecodable(f"cannot read '{index}' " + "'a/b" * 250_000)

    assert found.may_recover


def test_a_file_system_that_does_not_answer_keeps_no_failure_from_being_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, answers, stat = "/data/images/7.jpg", threading.Event(), os.stat

    def hanging(path: Any, **options: Any) -> os.stat_result:
        if path == file:
            answers.wait(20)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", hanging)
    began = time.monotonic()

    found = affected_entity(ValueError(f"cannot read '{file}'"))

    answers.set()
    assert 4 < time.monotonic() - began < 15
    assert (found.entity, found.may_recover) == ("", True)
