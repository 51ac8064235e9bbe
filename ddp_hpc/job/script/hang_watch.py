"""Keeps what a silent script does, before the supervisor takes the silence of all ranks for a hang and kills them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.cluster.rank_probe.client import RankProbe
from ddp_hpc.cluster.rank_probe.collect import collect
from ddp_hpc.cluster.rank_probe.folder import socket_of
from ddp_hpc.job.script.script_rank import ScriptRank
from ddp_hpc.run.run_dir.hang_records import write_hang_record


@dataclass
class HangWatch:
    """Asks the script once in each silence that lasts for the hang timeout; the supervisor waits a minute longer."""

    script_rank: ScriptRank
    folder: Path | None
    timeout_s: float
    _alive_at: float = field(default_factory=time.monotonic)
    _has_asked: bool = False
    _gives_stacks: bool = True
    """Whether to ask for stacks: a question that waits for the interpreter (GIL) keeps a thread of the server for ever."""

    def is_due(self, *, is_alive: bool) -> bool:
        """Tell whether to ask now, once in each silence; call it whenever the script was checked."""
        if is_alive:
            self._alive_at, self._has_asked = time.monotonic(), False
        if self._has_asked or time.monotonic() - self._alive_at < self.timeout_s:
            return False
        self._has_asked = True
        return True

    def keep_record(self, pid: int) -> None:
        """Ask the script what it does, and write the answer; `pid` is its process. It may wait for the file system."""
        rank = self.script_rank.rank
        folder = self.folder or Path("/nonexistent")  # then only the kernel is asked
        probe = RankProbe(path=socket_of(folder, rank))
        record = collect(rank, probe, pid=pid, with_stacks=self._gives_stacks)
        self._gives_stacks = not record.holds_interpreter
        with suppress(OSError):  # a full disk: the supervisor then reports a hang without it
            write_hang_record(self.script_rank.run, self.script_rank.attempt, record)
