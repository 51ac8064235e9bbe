"""Being told to stop."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_hpc.base.processes import INTERRUPT_SIGNALS, STOP_SIGNALS, unclaimed_stop_signals
from ddp_hpc.train.stop import StopConsensus, StopFlag
from tests.unit.made_state import alone


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def is_set(flag: StopFlag) -> bool:
    return flag.is_set(look_at_file=True)


def test_nobody_is_told_at_first(tmp_path: Path) -> None:
    flag = StopFlag(tmp_path / "STOP")

    flag.listen()

    assert not is_set(flag)


def test_a_handler_that_a_recipe_has_set_for_a_users_signal_stays_its_own(tmp_path: Path) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT_SIGNALS)
    at_first = unclaimed_stop_signals()
    with (tmp_path / "stacks").open("w") as stacks:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            faulthandler.register(number, stacks)  # a handler in C, of which Python's `signal` does not know
        claimed = unclaimed_stop_signals()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            faulthandler.unregister(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    assert at_first == {*STOP_SIGNALS, *INTERRUPT_SIGNALS}
    assert claimed == at_first - {signal.SIGUSR1}  # Slurm's own signals ask to stop in any case


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_sets_the_flag(number: signal.Signals, tmp_path: Path) -> None:
    flag = StopFlag(tmp_path / "STOP")
    flag.listen()

    os.kill(os.getpid(), number)

    assert is_set(flag)


def test_a_signal_that_came_before_anybody_listened_is_not_lost(tmp_path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # not to the tests' process: it has other threads
    flag = StopFlag(tmp_path / "STOP")

    flag.listen()

    assert is_set(flag)


@pytest.mark.parametrize(("looks", "told"), [(True, True), (False, False)])
def test_the_file_tells_who_looks_for_it(looks: bool, told: bool, tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()

    assert StopFlag(tmp_path / "STOP").is_set(look_at_file=looks) is told


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 0), (signal.SIGUSR2, 0)]
)
def test_a_child_that_inherits_the_handler_ends_by_sigterm_and_does_not_set_its_copy(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    flag = StopFlag(tmp_path / "STOP")
    flag.listen()

    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), number)
        os._exit(int(is_set(flag)))
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == code
    assert not is_set(flag)


def test_a_meeting_finds_out_who_was_told(tmp_path: Path) -> None:
    flag = StopFlag(tmp_path / "STOP")
    meetings = StopConsensus(alone(), flag, is_fenced=lambda: False)

    before = meetings.agree_to_stop(1)
    (tmp_path / "STOP").touch()
    after = meetings.agree_to_stop(2)

    assert (before, after) == (False, True)


@pytest.mark.parametrize(("exchange_s", "apart"), [(0.001, 5), (0.05, 25), (1.0, 50)])
def test_meetings_that_take_long_among_many_ranks_become_rare_but_a_stop_is_heard_within_seconds(
    exchange_s: float, apart: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Many:
        rank_info = alone().rank_info

        def sum(self, values: torch.Tensor, /) -> torch.Tensor:
            nonlocal now
            now += exchange_s
            return values

    monkeypatch.setattr(time, "monotonic", lambda: now)
    meetings = StopConsensus(Many(), StopFlag(tmp_path / "STOP"), is_fenced=lambda: False)
    met_at = []
    for step in range(1, 400):
        now += 0.1
        if step >= meetings.next_step:
            met_at.append(step)
            now -= exchange_s  # which the next steps on a GPU hide
            meetings.agree_to_stop(step)

    assert met_at[-1] - met_at[-2] == pytest.approx(apart, abs=1)


def test_meetings_of_fast_steps_become_rare_by_doubling(tmp_path: Path) -> None:
    meetings = StopConsensus(alone(), StopFlag(tmp_path / "STOP"), is_fenced=lambda: False)

    met_at = []
    for step in range(1, 40):
        if step >= meetings.next_step:
            met_at.append(step)
            meetings.agree_to_stop(step)

    assert met_at == [1, 2, 4, 8, 16, 32]
