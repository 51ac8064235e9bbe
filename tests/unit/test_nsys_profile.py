"""Which steps a rank has nsys record, and that the training goes on where that fails."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch

from ddp_hpc.nsys import BEGIN, BEGUN, CONTROL, END, WHY_NOT, Capture, capture_from
from ddp_hpc.train.recording.nsys_profile import NsysProfile


class Loop:
    """The phases of the loop around a timer, and the other end of its socket."""

    def __init__(self, steps: tuple[int, int], *, done: int = 0, answer: bytes = BEGUN) -> None:
        self.done = done
        self.ranges: list[str] = []
        self.depth = 0
        mine, self.front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.front.send(answer)  # the answer to the only question that there is
        device = torch.device("cpu")
        self.timer = NsysProfile(steps, Capture(mine), Path("report"), device, lambda: self.done + 1, ranges=self)

    def range_push(self, msg: str) -> None:
        self.ranges.append(msg)
        self.depth += 1

    def range_pop(self) -> None:
        self.depth -= 1

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for phase in ("forward", "optimizer", "other"):
                self.timer.enter(phase)
            self.done += 1
            self.timer.enter("data")

    def asked(self) -> list[bytes]:
        self.front.setblocking(False)
        said = []
        try:
            while one := self.front.recv(100):
                said.append(one)
        except OSError:  # nothing is left, or the timer has left an answer unread
            pass
        self.timer.close()
        self.front.close()
        return said


def test_the_chosen_steps_are_recorded_each_in_a_range_with_its_phases() -> None:
    loop = Loop((3, 4))

    loop.run(7)

    assert loop.asked() == [BEGIN, END]
    assert [name for name in loop.ranges if name.startswith("step")] == ["step 3", "step 4"]
    assert {"forward", "optimizer"} <= set(loop.ranges)
    assert loop.depth == 0


def test_a_training_that_ends_among_these_steps_ends_the_record() -> None:
    loop = Loop((3, 9))

    loop.run(4)
    loop.timer.close()

    assert loop.asked() == [BEGIN, END]
    assert loop.depth == 0


def test_a_save_after_a_step_begins_no_record_and_no_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loop = Loop((3, 9), done=1)

    loop.timer.enter("forward")
    loop.done += 1
    loop.timer.enter("checkpoint")
    before = list(loop.ranges)
    loop.timer.enter("data")
    loop.timer.enter("forward")
    loop.done += 1
    loop.timer.enter("checkpoint")
    loop.timer.close()

    assert before == []
    assert loop.ranges == ["step 3", "data", "forward", "checkpoint"]
    assert "nsys has recorded steps 3 to 3, and writes report" in caplog.text
    assert loop.asked() == [BEGIN, END]


@pytest.mark.parametrize(("done", "num_steps"), [(4, 3), (0, 1)])
def test_a_training_without_these_steps_asks_for_nothing(done: int, num_steps: int) -> None:
    loop = Loop((3, 4), done=done)

    loop.run(num_steps)
    loop.timer.close()

    assert loop.asked() == []


def test_a_record_that_does_not_begin_is_said_once_and_the_phases_are_timed(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop((2, 3), answer=b"nsys ended with exit code 1")

    with caplog.at_level(logging.WARNING):
        loop.run(5)
        loop.timer.close()

    assert caplog.text.count("cannot be recorded: nsys ended with exit code 1") == 1
    assert loop.asked() == [BEGIN]
    assert loop.timer.so_far().seconds["forward"] > 0


def test_a_front_that_is_gone_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop((2, 3))
    loop.front.close()

    with caplog.at_level(logging.WARNING):
        loop.run(5)
        loop.timer.close()

    assert "cannot be recorded" in caplog.text
    assert loop.done == 5


@pytest.mark.parametrize(
    ("environ", "said"),
    [({WHY_NOT: "there is no program 'nsys'"}, "there is no program 'nsys'"), ({}, "was not started by nsys")],
)
def test_a_rank_that_does_not_run_under_nsys_says_why(
    environ: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    capture = capture_from(environ)

    with caplog.at_level(logging.WARNING):
        timer = NsysProfile((2, 3), capture, Path("report"), torch.device("cpu"), lambda: 2)
        timer.enter("forward")
        timer.close()

    assert said in caplog.text
    assert caplog.text.count("cannot be recorded") == 1


def test_a_rank_under_nsys_speaks_by_the_socket_that_its_environment_names() -> None:
    mine, front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    front.send(BEGUN)

    capture = capture_from({CONTROL: str(mine.detach())})

    assert isinstance(capture, Capture)
    assert capture.begin() == ""
    assert front.recv(100) == BEGIN
    capture.close()
    assert front.recv(100) == b""
    front.close()
