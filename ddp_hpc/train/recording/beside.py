"""Rank zero's side of the recorders: starts a process for each, and ends them within a bound."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddp_hpc.base import processes
from ddp_hpc.base.durable import make_directories, open_private
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.training import RecorderName
from ddp_hpc.train.recording.recorders import Ending, identity_of

log = logging.getLogger(__name__)

WAIT_S_BY_ENDING: Mapping[Ending, float] = {"finished": 20.0, "stopped": 5.0, "failed": 1.0}
"""How long the recorders may take to send the rest. A job that is preempted has little time, and after a failure the other nodes wait."""
_FOLLOWER_ARGV = (sys.executable, "-m", "ddp_hpc.train.recording.follower")
_UPLOAD_ADVICE = " With `WANDB_MODE=online`, `wandb sync` uploads what W&B has written to its files only."
_REAP_S = 1.0
"""A killed process that waits for a disk is gone only when the disk answers."""


class Followers:
    """The processes that send the metrics on. Nothing here raises or waits, but for `close`, which has a bound."""

    def __init__(self, run: RunDir, attempt: int, names: Sequence[RecorderName]) -> None:
        self._run = run
        self._attempt = attempt
        self._names = names
        self._processes: dict[RecorderName, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in self._names:
            try:
                identity_of(self._run)  # before two of them ask for it
                self._processes[name] = self._start(name)
            except OSError as error:
                log.warning(
                    "the process of the recorder %r cannot be started: %s. The training goes on; the numbers are in metrics.jsonl, "
                    "and the next attempt sends them.",
                    name,
                    error,
                )

    def _start(self, name: RecorderName) -> subprocess.Popen[bytes]:
        path = self._run.recorder_log(self._attempt, name)
        make_directories(path.parent)
        argv = [*_FOLLOWER_ARGV, str(self._run.path), name, f"--parent={os.getpid()}"]
        # Slurm sends a stop signal to all processes of a step: blocked until the new process ignores it. Its session is its
        # own, so that what it has started can be ended with it.
        with open_private(path, "ab") as output, processes.all_signals_blocked():
            return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)

    def close(self, ending: Ending) -> None:
        """Have all send the rest, wait for them within the bound, and kill those that still run, with what they started."""
        until = time.monotonic() + WAIT_S_BY_ENDING[ending]
        for process in self._processes.values():
            with suppress(OSError):  # it has ended before
                os.write(process.stdin.fileno(), f"{ending}\n".encode())  # type: ignore[union-attr]  # a pipe
        for name, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.returncode != 0:
                log.warning(
                    "the recorder %r has not sent all numbers%s; %s may say why. All are in metrics.jsonl. The next attempt of the run "
                    "sends them, or, after the run, `%s`.%s",
                    name,
                    f" within {WAIT_S_BY_ENDING[ending]:.0f} s" if process.returncode is None else "",
                    self._run.recorder_log(self._attempt, name),
                    shlex.join([*_FOLLOWER_ARGV, str(self._run.path), name]),
                    _UPLOAD_ADVICE if name == "wandb" else "",
                )
            processes.kill([-process.pid])  # its whole process group
            with suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
        self._processes = {}
