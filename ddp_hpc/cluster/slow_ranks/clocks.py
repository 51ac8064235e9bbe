"""Compares the clocks of nodes through the store at which the ranks meet: a question and an answer, as NTP does.

Rank zero's node answers with its time. The clock of the node that asks is ahead by the middle of its two times minus that one, and this is
wrong by at most half of the round trip.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

from ddp_hpc.cluster.slow_ranks.summary import ClockOffset
from ddp_hpc.run.run_dir.paths import RunDir

NUM_QUESTIONS = 4
"""The answer with the shortest round trip counts. The first one wakes the node that answers."""
ANSWER_S = 5.0
CONNECT_S = 60.0
_ASLEEP_S, _AWAKE_S = 1.0, 0.5
"""How often the node that answers looks for a question, and how long after one it looks for the next at short intervals."""
_SHORT_S = 0.001


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(kw_only=True)
class ClockComparison:
    """This node's part of the comparison; a run on one node has none."""

    run: RunDir
    attempt: int
    environ: Mapping[str, str]
    """The variables of one rank of this node."""
    _store: Store | None = None
    _has_failed: bool = False

    def start(self) -> None:
        """Answer the other nodes, if this is rank zero."""
        if self._has_several_nodes and self.environ["RANK"] == "0":

            def answer_all() -> None:
                with suppress(RuntimeError, OSError):  # the store is gone
                    answer_questions(self._connect())

            threading.Thread(target=answer_all, name="ddp-hpc-clock", daemon=True).start()

    def compare(self) -> ClockOffset | None:
        """Ask rank zero's node; None where this is not the rank that asks for its node, or no answer comes."""
        asks = self._has_several_nodes and self.environ["NODE_RANK"] != "0" and self.environ["LOCAL_RANK"] == "0"
        if not asks or self._has_failed:
            return None
        try:
            self._store = self._store or self._connect()
            return ask_offset(self._store)
        except (RuntimeError, OSError, ValueError):  # the store's errors are RuntimeErrors
            self._has_failed = True  # a second try would print PyTorch's warnings again
            return None

    @property
    def _has_several_nodes(self) -> bool:
        return int(self.environ["WORLD_SIZE"]) > int(self.environ["LOCAL_WORLD_SIZE"])

    def _connect(self) -> Store:
        # By its name, because only `train` may import PyTorch. The prefix is known to owners of the attempt's token alone.
        distributed: Any = import_module("torch.distributed")
        token = self.run.rendezvous_token(self.attempt).read_text(encoding="ascii")
        prefix = hashlib.sha256(f"clocks {token}".encode()).hexdigest()
        store = distributed.TCPStore(
            self.environ["MASTER_ADDR"],
            int(self.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
        )
        found: Store = distributed.PrefixStore(f"{prefix}/{self.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        return found


def answer_questions(store: Store, clock: Callable[[], float] = time.time) -> None:
    """Answer one question after the other, until the store is gone, which is a RuntimeError."""
    # It looks, and does not wait in the store: PyTorch prints warnings where a store ends in which somebody waits.
    number, asked_at = 1, float("-inf")
    while True:
        if store.check([f"question/{number}"]):
            store.set(f"answer/{number}", repr(clock()))
            number, asked_at = number + 1, time.monotonic()
        else:
            time.sleep(_SHORT_S if time.monotonic() - asked_at < _AWAKE_S else _ASLEEP_S)


def ask_offset(store: Store, clock: Callable[[], float] = time.time) -> ClockOffset:
    """Return how far this clock is ahead of the one that answers."""
    return min((_ask_once(store, clock) for _ in range(NUM_QUESTIONS)), key=lambda one: one.error_s)


def _ask_once(store: Store, clock: Callable[[], float]) -> ClockOffset:
    number = store.add("questions", 1)
    asked_at = clock()
    store.set(f"question/{number}", "")
    ends_at = time.monotonic() + ANSWER_S
    while not store.check([f"answer/{number}"]):
        if time.monotonic() > ends_at:
            raise TimeoutError(f"no answer within {ANSWER_S:g} s")
        time.sleep(_SHORT_S)
    answered_at = clock()
    theirs = float(store.get(f"answer/{number}"))
    for kind in ("question", "answer"):
        store.delete_key(f"{kind}/{number}")
    return ClockOffset(ahead_s=(asked_at + answered_at) / 2 - theirs, error_s=(answered_at - asked_at) / 2)
