"""Receives requests to stop, and lets all ranks agree on the step after which they stop.

The signals that a cluster or a user sends, and the run's STOP file, all mean: commit a checkpoint and exit. The signal handler only sets a flag. About
every half second the ranks all-reduce their flags, so that all of them stop after the same step; in between, a step costs
one comparison. Rank zero also checks whether a newer attempt has taken the run over; then all ranks stop without a save.

Before the first step there is no such exchange: each rank reads a checkpoint alone, and may wait for a file system.
Then a rank that has been asked sets a key of the store, at which all ranks look about once a second (`EarlyStop`).
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch

from ddp_hpc.base.errors import FencedError
from ddp_hpc.base.patience import ask_once
from ddp_hpc.base.processes import STOP_SIGNALS, unblock_signals
from ddp_hpc.train.process_group import Group, RankInfo
from ddp_hpc.train.save_plan import SavePlan

CONSENSUS_INTERVAL_S, _LONGEST_INTERVAL_S, _EXCHANGES_APART = 0.5, 5.0, 50
"""Gloo's all-reduce goes from rank to rank, so among a thousand it takes a tenth of a second; then the ranks exchange less often."""
_EARLY_INTERVAL_S = 1.0
"""How often a rank that restores looks whether it is to stop."""
_EARLY_KEY = "stop-asked"
_FENCED_VOTE = 1 << 32
"""More than the votes of all ranks together."""


class StopFlag:
    """Whether this process has been asked to stop."""

    def __init__(self, stop_file: Path | None, signals: Collection[int] = STOP_SIGNALS) -> None:
        self._stop_file = stop_file
        self._handlers_before = {number: signal.getsignal(number) for number in signals}
        self._pid = os.getpid()
        self._signalled = False
        self.is_listening = False

    def listen(self, *, keeps_newer: bool = False) -> None:
        """Install handlers by which the stop signals set the flag.

        Forked processes inherit them. There, SIGTERM ends the process as if nobody had listened, because `multiprocessing` ends its
        processes by it and waits; so helpers of a script may end before its ranks where SIGTERM goes to all processes of a job step. The
        other stop signals have no effect there. With `keeps_newer`, a handler stays that was set since this flag was made.
        """
        self.is_listening = True
        for number, before in self._handlers_before.items():
            if not keeps_newer or signal.getsignal(number) == before:
                signal.signal(number, self._on_signal)
        _restore_sigterm_in_forks()
        unblock_signals()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # Python calls this in the main thread between any two bytecodes, perhaps while a save holds a lock. So it only sets a
        # flag: https://docs.python.org/3/library/signal.html#execution-of-python-signal-handlers
        # Forked processes inherit this handler, and their copy of the flag: it must stay unset there.
        if os.getpid() == self._pid:
            self._signalled = True

    def is_set(self, *, look_at_file: bool) -> bool:
        if self._signalled or not look_at_file or self._stop_file is None:
            return self._signalled
        return ask_once(self._stop_file, self._stop_file.exists, unknown=False)


_masks = threading.local()


@cache
def _restore_sigterm_in_forks() -> None:
    """Have each process that is forked from now on take SIGTERM as if nobody had listened."""
    # Not by a handler of Python, which cannot interrupt a wait that begins just after the signal, nor run before a fork is over:
    # SIGTERM would be lost, and `multiprocessing` would wait for ever. So it is blocked until its default action is back.
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_reset_sigterm)


def _hold_sigterm() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _reset_sigterm() -> None:
    try:
        is_ours = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopFlag)
        if is_ours and not _is_loader_process():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:
        _release_sigterm()


def _is_loader_process() -> bool:
    """Tell whether PyTorch's DataLoader has just forked this process, which soon takes SIGTERM in PyTorch's way."""
    # It must not die of a stop signal before that: its rank needs its batches until all ranks stop.
    frame = inspect.currentframe()
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch.utils.data.dataloader", "__init__"):
            return True
        frame = frame.f_back
    return False


@dataclass
class EarlyStop:
    """Whether any rank has been asked to stop before the first step, as far as this rank knows."""

    group: Group
    is_asked_here: Callable[[], bool]
    _is_known: bool = False
    _looked_at: float = float("-inf")

    def share_stop_request(self) -> bool:
        """Tell all ranks whether this one has been asked, and return whether any has; nearly free if called often."""
        now = time.monotonic()
        if not self._is_known and now - self._looked_at >= _EARLY_INTERVAL_S:
            self._looked_at = now
            store = self.group.store
            if self.is_asked_here():
                store.set(_EARLY_KEY, "")
                self._is_known = True
            else:
                self._is_known = store.try_get(_EARLY_KEY) is not None
        return self._is_known


class Ranks(Protocol):
    """What the ranks' consensus needs of them: `process_group.Group`, and the ranks of a user's script."""

    @property
    def rank_info(self) -> RankInfo:
        """Which one this is."""

    def sum(self, values: torch.Tensor, /) -> torch.Tensor:
        """Add up a tensor over the ranks, in place, and return it."""


@dataclass
class StopConsensus:
    """Decides at which steps the ranks exchange their flags, and whether all of them stop.

    Rank zero measures how long steps take and announces the number of steps until the next exchange. So all ranks exchange
    after the same step, without communication in between.
    """

    group: Ranks
    flag: StopFlag
    _: KW_ONLY
    is_fenced: Callable[[], bool]
    news: SavePlan | None = None
    """Tells all ranks numbers of rank zero's at each exchange, so that this costs no exchange of its own."""
    next_step: int = 0
    """After this step, or the first one behind it, the ranks exchange their flags."""
    _exchanged_at: tuple[int, float] | None = None
    _exchange_s: float = float("inf")
    """How long the shortest exchange has taken: in the others, ranks may have waited for each other."""

    def agree_before_first_step(self, step: int) -> bool:
        """Exchange the flags after a restore, as `agree_to_stop` does."""
        is_agreed = self.agree_to_stop(step)
        self._exchanged_at = None  # the first step may compile, so the time that it takes says nothing of the others
        return is_agreed

    def agree_to_stop(self, step: int) -> bool:
        """Exchange the flags after `step`; return, the same on all ranks, whether any rank has been asked to stop.

        Raises:
            FencedError: on all ranks, if another attempt has taken the run over.
        """
        is_rank_zero = self.group.rank_info.is_rank_zero
        vote = int(self.flag.is_set(look_at_file=is_rank_zero))
        pause, news = 0, (0, 0)
        if is_rank_zero:
            vote += _FENCED_VOTE if self.is_fenced() else 0
            pause = self._steps_until_next(step)
            news = (0, 0) if self.news is None else self.news.next_announcement(step)
        # All that the ranks decide here comes from this one sum, so all decide the same: a rank that stopped alone would
        # leave the others waiting for it in the next step's all-reduce.
        began = time.monotonic()
        votes = self.group.sum(torch.tensor([vote, pause, *news], dtype=torch.int64))
        self._exchange_s = min(self._exchange_s, time.monotonic() - began)
        stop_votes, pause_sum, *announced = votes.tolist()
        if stop_votes >= _FENCED_VOTE:
            raise FencedError(
                f"A newer start of the run has replaced this one, which stops at step {step} without a checkpoint. You need do nothing."
            )
        self.next_step = step + pause_sum
        if self.news is not None:
            self.news.take_announced(*announced)
        return bool(stop_votes > 0)

    def _steps_until_next(self, step: int) -> int:
        now = time.monotonic()
        before, self._exchanged_at = self._exchanged_at, (step, now)
        if before is None or step == before[0]:
            return 1
        seconds_a_step = (now - before[1]) / (step - before[0])
        interval_s = max(CONSENSUS_INTERVAL_S, min(_EXCHANGES_APART * self._exchange_s, _LONGEST_INTERVAL_S))
        return max(1, min(int(interval_s / max(seconds_a_step, 1e-9)), 2 * (step - before[0])))
