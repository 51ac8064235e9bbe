"""When each rank's watchdog will end it: written by the rank beside its socket, read by its node, which asks shortly before."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ddp_hpc.base.processes import die_with_parent
from ddp_hpc.cluster.rank_probe.client import ANSWER_S
from ddp_hpc.cluster.rank_probe.collect import keep_hang_records
from ddp_hpc.cluster.rank_probe.folder import socket_of
from ddp_hpc.run.run_dir.paths import RunDir

_FORMAT = struct.Struct("dd")
BackgroundWork = Callable[[], object]
"""What may wait for a shared file system, beside its caller, who never waits for it."""
LOOK_S = 2.0
"""The longest time between two looks: a deadline may come nearer, as when building has ended and training begins."""
_MOST_LEAD_S = 10.0
_LEAD = 0.25
"""How long before the end to ask, as a share of the time that the rank was given: slow ranks go on, and then nothing was lost."""


def deadline_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes its deadline."""
    return folder / f"rank-{rank}.deadline"


class Deadline:
    """A rank's own deadline."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def put_off(self, seconds: float) -> None:
        """Write that the watchdog ends this process in `seconds`, unless it is put off again; inf: not at all."""
        if self._fd is not None:
            with suppress(OSError):  # a full disk
                os.pwrite(self._fd, _FORMAT.pack(time.monotonic() + seconds, seconds), 0)


@dataclass
class HangCollector:
    """Asks the ranks of one node, of one attempt, shortly before a watchdog ends one of them."""

    run: RunDir
    attempt: int
    folder: Path
    ranks: Iterable[int]
    run_work: Callable[[BackgroundWork], object] = lambda work: work()
    """How to ask and to write: beside a caller that must not wait for a file system."""
    _asked_for: float = 0.0
    """The deadline before which the ranks were asked last."""
    _deadlines: list[tuple[float, float]] = field(default_factory=list)
    """As `_read` returns them."""

    def forget(self) -> None:
        """Remove the deadlines of an earlier attempt."""
        for rank in self.ranks:
            with suppress(OSError):
                deadline_file(self.folder, rank).unlink(missing_ok=True)

    def patience_s(self) -> float:
        """Return how long to wait at most before the next look."""
        now = time.monotonic()
        waits = (ends_at - lead_s - now for ends_at, lead_s in self._deadlines if ends_at > self._asked_for)
        return max(0.05, min([LOOK_S, *waits]))

    def look_for_ever(self) -> None:
        """Look and wait, in a thread of the rank itself."""
        while True:
            self.look()
            time.sleep(self.patience_s())

    def look(self) -> None:
        """Ask all ranks if one of them is about to be ended, once for each deadline."""
        self._deadlines = [found for rank in self.ranks if (found := _read(deadline_file(self.folder, rank)))]
        now = time.monotonic()
        due = [one for one in self._deadlines if self._asked_for < one[0] and one[0] - one[1] <= now]
        if not due:
            return
        # The deadlines of the others lie within one step of the first; these ranks need not be asked again.
        self._asked_for = max(ends_at for ends_at, lead_s in self._deadlines if ends_at - 2 * lead_s <= now)
        sockets = {rank: socket_of(self.folder, rank) for rank in self.ranks}
        answer_s = min(ANSWER_S, *(lead_s / 3 for _, lead_s in due))
        self.run_work(partial(keep_hang_records, self.run, self.attempt, sockets, answer_s=answer_s))


def _read(path: Path) -> tuple[float, float] | None:
    """Return when a watchdog ends its rank, and how long before that to ask; None where it does not."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _FORMAT.size:
        return None
    ends_at, allowed_s = _FORMAT.unpack(data)
    return None if ends_at == float("inf") else (ends_at, min(_MOST_LEAD_S, _LEAD * allowed_s))


def run_in_thread(work: BackgroundWork) -> None:
    """Do it in a thread. A process that forks later must not have one."""
    threading.Thread(target=work, name="ddp-hpc-hang-record", daemon=True).start()


def run_in_child(work: BackgroundWork) -> None:
    """Do it in a forked process, which ends with this one; the caller has no other thread, and reaps its children."""
    parent = os.getpid()
    with suppress(OSError):  # no process can be made: then the report of the hang has what the logs say
        if os.fork() == 0:
            with suppress(BaseException):
                die_with_parent(parent)
                # Whoever reads what the parent prints must see its end, also while this process waits for a file system.
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, 0)
                os.dup2(nothing, 1)
                work()
            os._exit(0)
