"""The line between a supervisor and its agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base import processes
from ddp_hpc.job.wire.control_channel import ControlChannel
from tests.unit.held_signals import signals_held_back

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with signals_held_back():
        yield


@contextmanager
def two_ends() -> Iterator[tuple[ControlChannel, ControlChannel]]:
    """Yield both ends of a line, in one process."""
    (down_read, down_write), (up_read, up_write) = os.pipe(), os.pipe()
    ours, theirs = ControlChannel(up_read, down_write), ControlChannel(down_read, up_write)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


@contextmanager
def raw_end() -> Iterator[tuple[int, ControlChannel]]:
    """Yield a descriptor to write anything to, and the line that reads it; the descriptor may be closed within."""
    (read_fd, write_fd), spare = os.pipe(), os.open(os.devnull, os.O_WRONLY)
    line = ControlChannel(read_fd, spare)
    try:
        yield write_fd, line
    finally:
        line.close()
        if _is_open(write_fd):
            os.close(write_fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# --- two ends --------------------------------------------------------------------------------------------------------


def test_what_one_end_sends_the_other_reads_in_order_and_once() -> None:
    with two_ends() as (ours, theirs):
        ours.send(do="start", attempt=0, meet="10.0.0.1 29500")
        ours.send(do="stop")
        theirs.send(node_rank=1, attempt=0, code=99)

        heard = list(theirs.read())

        assert heard == [{"do": "start", "attempt": 0, "meet": "10.0.0.1 29500"}, {"do": "stop"}]
        assert list(ours.read()) == [{"node_rank": 1, "attempt": 0, "code": 99}]
        assert (list(theirs.read()), list(ours.read())) == ([], [])
        assert not theirs.is_closed


def test_reading_where_nothing_has_come_does_not_wait() -> None:
    with two_ends() as (ours, _):
        assert list(ours.read()) == []


def test_who_hangs_up_is_heard_after_what_he_said() -> None:
    with two_ends() as (ours, theirs):
        ours.send(do="end")
        ours.close()

        heard = list(theirs.read())

        assert heard == [{"do": "end"}]
        assert theirs.is_closed
        assert list(theirs.read()) == []


def test_one_who_is_gone_misses_what_is_sent_and_the_sender_lives() -> None:
    with two_ends() as (ours, theirs):
        theirs.close()

        ours.send(do="stop")

        assert list(ours.read()) == []
        assert ours.is_closed


def test_hanging_up_twice_is_no_error() -> None:
    with two_ends() as (ours, _):
        ours.close()
        ours.close()


# --- what comes in pieces, and what is not ours ----------------------------------------------------------------------


def test_an_object_that_comes_in_pieces_is_read_when_it_is_whole() -> None:
    text = json.dumps({"do": "start", "attempt": 3}).encode() + b"\n"
    with raw_end() as (fd, line):
        heard = []
        for at in range(len(text)):
            os.write(fd, text[at : at + 1])
            heard.append(list(line.read()))

    assert heard == [[]] * (len(text) - 1) + [[{"do": "start", "attempt": 3}]]


def test_half_an_object_before_the_end_is_nothing() -> None:
    with raw_end() as (fd, line):
        os.write(fd, b'{"do": "stop"}\n{"do": "en')
        os.close(fd)

        assert list(line.read()) == [{"do": "stop"}]
        assert line.is_closed


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"Loading data ... done",
        b"\xff\xfe\x00",
        b"3",
        b'"text"',
        b"null",
        b"[1, 2]",
        b'{"do": "sto',
        b"{'do': 'stop'}",
        b"NaN",
        b"[" * 100,
        b"\r",
    ],
    ids=repr,
)
def test_what_is_no_object_of_ours_is_passed_over(garbage: bytes) -> None:
    with raw_end() as (fd, line):
        os.write(fd, garbage + b'\n{"do": "stop"}\n' + garbage + b"\n")

        assert list(line.read()) == [{"do": "stop"}]


MESSAGES = st.lists(
    st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=9), max_size=4),
    max_size=6,
)


@given(MESSAGES, st.data())
def test_however_the_bytes_are_cut_the_same_objects_are_read(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    text = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    heard = []
    with raw_end() as (fd, line):
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            os.write(fd, text[begin:end])
            heard += list(line.read())

    assert heard == messages


# --- two processes ---------------------------------------------------------------------------------------------------

ECHO = """
import sys
from ddp_hpc.base import processes
from ddp_hpc.job.wire.control_channel import ControlChannel
processes.block_awaited_signals()
line = ControlChannel.of_agent()
print("printed by the user's module", flush=True)
line.send(ready=True)
while True:
    for message in line.read():
        line.send(heard=message)
    if line.is_closed:
        break
    assert processes.await_signal(60.0) is not None, "nothing woke us"
print("left", flush=True)
sys.stdin.read()
"""
"""An agent that says what it hears, until nobody listens; what it prints itself goes elsewhere."""


def test_an_agent_in_another_process_is_woken_by_each_order_and_by_the_end() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    line = ControlChannel(os.dup(child.stdout.fileno()), os.dup(child.stdin.fileno()))
    child.stdin.close()
    child.stdout.close()

    heard = [until_heard(line)]
    for number in range(3):
        line.send(number=number)
        heard.append(until_heard(line))
    line.close()
    printed = child.stderr.read().decode()
    child.stderr.close()

    assert heard == [{"ready": True}, *({"heard": {"number": number}} for number in range(3))]
    assert child.wait(PATIENCE_S) == 0
    assert printed.splitlines() == ["printed by the user's module", "left"]


def until_heard(line: ControlChannel) -> dict[str, Any]:
    """Return the next object; nothing else may come with it."""
    messages: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE_S
    while not messages:
        assert time.monotonic() < deadline, "this should have come by now"
        processes.await_signal(0.05)
        messages = list(line.read())
    (message,) = messages
    return message


WOKEN = """
import os
from ddp_hpc.base import processes
from ddp_hpc.job.wire.control_channel import ControlChannel
processes.block_awaited_signals()
read_fd, write_fd = os.pipe()
line = ControlChannel(read_fd, os.open(os.devnull, os.O_WRONLY))
assert processes.await_signal(0.0) is None
{deed}
woken = processes.await_signal(60.0)
print(woken.name, list(line.read()), line.is_closed)
"""


@pytest.mark.parametrize(
    ("deed", "read"),
    [
        ('os.write(write_fd, b\'{"do": "stop"}\\n\')', "[{'do': 'stop'}] False"),
        ("os.write(write_fd, b'{\"do\": ')", "[] False"),
        ("os.close(write_fd)", "[] True"),
    ],
    ids=["an object", "half of one", "the end"],
)
def test_news_on_the_line_wake_who_waits_for_signals(deed: str, read: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WOKEN.format(deed=deed)], capture_output=True, text=True, check=False, timeout=100
    )

    assert (done.stdout.strip(), done.stderr) == (f"{signal.SIGIO.name} {read}", "")
