"""Watches a script until its end: whether it is to stop, whether it is alive, and what it saves."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.durable import make_directories
from ddp_hpc.base.errors import FencedError
from ddp_hpc.base.patience import ask_once
from ddp_hpc.base.record import write_record
from ddp_hpc.cluster.rank_probe.client import RankProbe
from ddp_hpc.cluster.rank_probe.collect import ask_rank
from ddp_hpc.cluster.rank_probe.deadlines import run_in_thread
from ddp_hpc.cluster.rank_probe.folder import socket_of
from ddp_hpc.job.script.liveness import ScriptActivity
from ddp_hpc.job.script.plan import ScriptRank
from ddp_hpc.job.script.script_end import last_log_line
from ddp_hpc.run.run_dir.failure_reports import read_failures, write_rank_end
from ddp_hpc.run.run_dir.hang_records import write_hang_record
from ddp_hpc.run.run_dir.records import Progress, with_script_report, write_progress
from ddp_hpc.run.workload.script_progress import SeenFiles, look

ECHO_INTERVAL_S = 0.25
"""How often rank zero's output is copied to the console."""
STOP_POLL_INTERVAL_S = 1.0
"""How often to look for a user's request to stop."""
SIGNAL_LAG_S = 2.0
"""How long after a script this process may receive the signal that Slurm has sent to both."""
MAX_POLL_INTERVAL_S = 10.0
"""The longest time between two checks of a script."""

_SHELL_SIGNAL_BASE = 128
"""Shells, and programs that imitate them, exit with this plus the number of the signal that ended them."""
_CHUNK_BYTES = 1 << 16
_CONSOLE_FD = 1


def worker_exit_code(code: int, *, stop_signal: int | None, resume_codes: Collection[int]) -> int:
    """Return the worker's exit code for a script's, which is minus the number of a signal; `stop_signal` is what it was sent.

    A script that ends with 0 after a stop signal has obeyed, or has finished at that moment. Nothing tells the two apart, so it
    is started again, and a script that had finished then ends at once.
    """
    if code in resume_codes:
        return exit_codes.STOPPED
    if stop_signal is not None and (code == 0 or is_end_by_stop_signal(code, stop_signal)):
        return exit_codes.STOPPED
    return exit_codes.FINISHED if code == 0 else exit_codes.FAILED


def is_end_by_stop_signal(code: int, *sent: int) -> bool:
    """Tell whether a script's exit code is the end by a stop signal; of a job step, Slurm and srun may signal all processes."""
    signals = {*sent, *processes.STOP_SIGNALS, *processes.INTERRUPT_SIGNALS}
    return -code in signals or code - _SHELL_SIGNAL_BASE in signals


class LogEcho:
    """Copies what is added to a log to this process's standard output.

    The script writes to the file itself, not to a pipe of this process: a console that takes nothing does not stop it.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)

    def copy_new(self) -> None:
        """Copy what was added since the last call; what is added meanwhile waits, as a script may print faster than the console takes."""
        with suppress(OSError):
            num_bytes = os.fstat(self._fd).st_size
            while os.lseek(self._fd, 0, os.SEEK_CUR) < num_bytes and (chunk := os.read(self._fd, _CHUNK_BYTES)):
                left = memoryview(chunk)
                while left:
                    left = left[os.write(_CONSOLE_FD, left) :]


@dataclass(kw_only=True)
class Watcher:
    """Waits for a script's end, and does meanwhile what has to be done beside it."""

    script_rank: ScriptRank
    seen: SeenFiles
    probe_folder: Path | None = None
    """Where the script answers questions, if it does."""
    echo: LogEcho | None
    sent_signal: int | None = None
    """The stop signal, once the script was sent it."""
    was_stopped_for_failure: bool = False
    """Whether the launcher stops this rank because another one has failed: srun and torchrun send SIGTERM then, too."""
    has_killed: bool = False
    interruptions: Sequence[int] = field(default_factory=processes.find_blocked_interruptions)
    _gives_stacks: bool = True
    """Whether to ask for stacks: a question that waits for the interpreter (GIL) keeps a thread of the server for ever."""
    _asked: set[int] = field(default_factory=set)
    """The processes that were sent the stop signal; none gets it twice."""
    _kill_at: float = float("inf")
    _looked_at: float = 0.0

    def wait_for(self, pid: int) -> int:
        """Return the script's exit code, or minus the number of the signal that killed it."""
        [code] = self._await_end([pid])
        self._await_own_signal(code)
        code = self._stop_children(code)
        as_torchrun = f"got signal: {self.sent_signal}"  # it has passed the signal on to its ranks
        if self.sent_signal and not self.has_killed and last_log_line(self.script_rank.log).endswith(as_torchrun):
            return -self.sent_signal
        return code

    def _await_end(self, pids: Sequence[int]) -> list[int]:
        """Wait until these children have ended; return their exit codes."""
        spec = self.script_rank.spec
        interval_s = min(MAX_POLL_INTERVAL_S, max(1.0, spec.restart.hang_timeout_s / 10))
        life = ScriptActivity(pid=pids[0], log=self.script_rank.log, interval_s=interval_s)
        self._write_life_sign()
        patience_s, has_asked = ECHO_INTERVAL_S if self.echo else STOP_POLL_INTERVAL_S, False
        ended: dict[int, int] = {}
        while left := [pid for pid in pids if pid not in ended]:
            left_s = max(self._kill_at - time.monotonic(), 0.0)
            number = processes.await_signal(min(patience_s, left_s), self.interruptions)
            if self.sent_signal is None and (self._is_stop_signal(number) or self._is_stop_asked()):
                self.was_stopped_for_failure = number is not None and self._has_another_failed()
                self._ask_to_stop(left)
            if time.monotonic() >= self._kill_at:
                self.has_killed, self._kill_at = True, float("inf")
                processes.kill(left)
            ended.update(processes.reap_children())
            if pids[0] in ended and self.sent_signal is None and ended[pids[0]]:
                write_rank_end(self.script_rank.run, self.script_rank.attempt, self.script_rank.rank, ended[pids[0]])
            if self.echo:
                self.echo.copy_new()
            have_ended = ended.keys() >= {*pids}
            if have_ended or life.is_due():
                is_alive = life.was_active()
                is_silent = life.silent_s >= spec.restart.hang_timeout_s
                if is_silent and not has_asked and not have_ended:  # the supervisor kills it a minute later
                    run_in_thread(partial(self._record_hang, pids[0]))  # this loop passes on signals, and kills in time
                has_asked = is_silent
                # At the end, there may be what the script has reported by `attach` since the last look.
                if self.record_new_saves() or is_alive or have_ended:
                    self._write_life_sign()
        return [ended[pid] for pid in pids]

    def _stop_children(self, code: int) -> int:
        """Stop the training that a shell or a launcher has started, where the stop signal has ended that one.

        Return the exit code of all: of the first that has failed, or `code`.
        """
        script = self.script_rank.spec.script
        if self.script_rank.plan.program.python is not None or self.sent_signal is None:
            return code  # what a Python script leaves are its helpers
        if not is_end_by_stop_signal(code, self.sent_signal):
            return code
        self._kill_at = min(self._kill_at, time.monotonic() + script.stop_within_s)
        codes: list[int] = []
        while not self.has_killed and (adopted := _running_children()):
            # `tee` in `python train.py | tee log` ends with the training, which could not print any more without it.
            if asked := [pid for pid in adopted if not _is_pipe_reader(pid)]:
                processes.send_signal(set(asked) - self._asked, processes.signal_number(script.stop_signal))
                codes += self._await_end(asked)
            else:
                self._await_end(adopted)
        means = partial(worker_exit_code, stop_signal=self.sent_signal, resume_codes=script.resume_exit_codes)
        return next((one for one in codes if means(one) == exit_codes.FAILED), code)

    def _await_own_signal(self, code: int) -> None:
        """Find out whether this process was sent a stop signal, too, where one has perhaps ended the script before."""
        # Slurm signals the processes of a step one after the other.
        may_have_obeyed = is_end_by_stop_signal(code) or code in self.script_rank.spec.script.resume_exit_codes
        ends_at = time.monotonic() + (SIGNAL_LAG_S if may_have_obeyed else 0.0)
        while self.sent_signal is None:
            left_s = max(ends_at - time.monotonic(), 0.0)
            number = processes.await_signal(left_s, self.interruptions)
            if number is not None and self._is_stop_signal(number):
                self.sent_signal = number
                self.was_stopped_for_failure = self._has_another_failed()
            elif not left_s:
                return

    def _is_stop_signal(self, number: int | None) -> bool:
        return number in {*processes.STOP_SIGNALS, *self.interruptions}

    def _has_another_failed(self) -> bool:
        """Tell whether a rank of this attempt has written an error report, which it does before it exits."""
        failures = read_failures(self.script_rank.run, self.script_rank.attempt)
        return any(not one.is_secondary and one.rank != self.script_rank.rank for one in failures)

    def _is_stop_asked(self) -> bool:
        """Look every second whether a user has asked the run to stop: `ddp-hpc stop` writes a file and sends no signal."""
        now = time.monotonic()
        if now - self._looked_at < STOP_POLL_INTERVAL_S:
            return False
        self._looked_at = now
        request = self.script_rank.run.stop_request
        return ask_once(request, request.exists, unknown=False)

    def _ask_to_stop(self, pids: Iterable[int]) -> None:
        """Send the stop signal to the script's own process, and to no process that it has started, but for what a shell waits for."""
        # PyTorch's loader processes die of SIGTERM, so a script whose loaders get it cannot finish its step.
        script = self.script_rank.spec.script
        self.sent_signal = processes.signal_number(script.stop_signal)
        self._kill_at = time.monotonic() + script.stop_within_s
        is_program = self.script_rank.plan.program.python is None
        below = [child for pid in pids for child in _foreground_children(pid, self.sent_signal)] if is_program else []
        self._asked = {*pids, *below}
        processes.send_signal(self._asked, self.sent_signal)

    def record_new_saves(self) -> bool:
        """Record that the script has saved its state, if it has; rank zero does that for all."""
        pattern = self.script_rank.spec.script.progress
        if pattern is None or self.script_rank.rank != 0:
            return False
        before = self.seen
        with suppress(OSError):  # the file system does not answer now; the next look sees the change, too
            now = look(before, pattern, Path.cwd())
            if now is not before:
                write_record(self.script_rank.run.script_progress, now)
            self.seen = now
        return self.seen.num_changes != before.num_changes

    def _record_hang(self, pid: int) -> None:
        """Ask a silent script what it does, and write the answer; `pid` is its process. It may wait for the file system."""
        folder = self.probe_folder or Path("/nonexistent")  # then only the kernel is asked
        rank = self.script_rank.rank
        probe = RankProbe(path=socket_of(folder, rank))
        record = ask_rank(rank, probe, pid=pid, with_stacks=self._gives_stacks)
        self._gives_stacks = not record.holds_interpreter
        with suppress(OSError):  # a full disk: the supervisor then reports a hang without it
            write_hang_record(self.script_rank.run, self.script_rank.attempt, record)

    def _write_life_sign(self) -> None:
        """Write what the supervisor takes for a sign of life."""
        run, attempt = self.script_rank.run, self.script_rank.attempt
        with suppress(OSError, FencedError):  # a newer attempt has the run
            if self.script_rank.rank == 0:
                progress = Progress(
                    attempt=attempt,
                    saves=self.seen.num_changes,
                    last_checkpoint_at=self.seen.newest_at,
                    at=time.time(),
                )
                write_progress(run, with_script_report(run, progress))
            else:
                sign = run.allowance(attempt)
                make_directories(sign.parent)
                sign.touch(mode=0o600)


def _foreground_children(shell: int, number: int) -> list[int]:
    """Return what a shell runs in the foreground, where the shell traps a signal: it does nothing before that has ended.

    What it runs in the background, its trap may signal itself, so that one gets no second signal from here.
    """
    # POSIX, "Signals and Error Handling". With job control, each process has a group of its own, in the background or not.
    if not processes.is_in_mask(shell, number, "SigCgt", "SigIgn"):
        return []
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(shell).children()
    found = []
    for child in children:
        with suppress(OSError):
            is_here = os.getpgid(child.pid) == os.getpgid(shell)
            if is_here and not processes.is_in_background(child.pid) and not _is_pipe_reader(child.pid):
                found.append(child.pid)
    return found


def _running_children() -> list[int]:
    """Return the running children of this process: once the script has ended, those whose parent was the script."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def _is_pipe_reader(pid: int) -> bool:
    """Tell whether a process reads what another one prints; it then ends with that one."""
    with suppress(OSError):
        source = str(Path(f"/proc/{pid}/fd/0").readlink())
        return source.startswith("pipe:") and source != str(Path("/proc/self/fd/0").readlink())
    return False
