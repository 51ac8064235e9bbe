"""Waiting for a file system that does not answer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import await_answer
from tests.pauses import in_pauses_of


class StopError(Exception):
    """Ends a wait."""


def test_a_callback_that_raises_ends_a_long_pause_within_about_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unanswered = tmp_path / "file"
    unanswered.symlink_to(unanswered.name)  # "Too many levels of symbolic links" says nothing of the file
    slept: list[float] = []
    in_pauses_of("ddp_hpc.base.patience", slept.append, monkeypatch)
    stop_at_s = 7.0

    def stop_if_wanted() -> None:
        if sum(slept) >= stop_at_s:
            raise StopError

    with pytest.raises(StopError):
        await_answer("file", unanswered.read_text, on_wait=stop_if_wanted)

    assert max(slept) <= 1.0
    assert sum(slept) <= stop_at_s + 1.0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_no_pause_heals_is_not_tried_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pauses_of("ddp_hpc.base.patience", lambda seconds: pytest.fail(f"it waits {seconds} s"), monkeypatch)

    with pytest.raises(OSError, match=os.strerror(number)):
        await_answer("metrics.jsonl", lambda: fail(number), done="written")


def test_a_write_that_fails_is_not_called_a_read() -> None:
    with pytest.raises(UnreadableError, match=r"^metrics.jsonl cannot be written: .*permission to write there"):
        await_answer("metrics.jsonl", lambda: fail(errno.EIO), patience_s=0.0, done="written")


def fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))
