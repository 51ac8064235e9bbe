"""Runs one worker under Nsight Systems, and stands for it: passes signals on, ends with the worker's code, and takes nsys along.

The agent's child (or srun's task) becomes this process. The worker itself is a new process, which nsys starts, so its parent is
a part of nsys. Nothing of what decides on a run passes through nsys: this process signals the worker by its process id, learns the exit code by
a pipe, and the kernel kills the worker when this process is gone. nsys may die, hang, or change exit codes: the training goes on, and
what nsys has left running at its end is killed, by this process or, where it is killed itself, by a child of it. Where nsys cannot start
a worker, the worker runs without it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from ddp_hpc import exit_codes
from ddp_hpc.base import processes
from ddp_hpc.base.durable import make_directories
from ddp_hpc.nsys import BEGIN, BEGIN_S, BEGUN, CONTROL, END, WHY_NOT, Profiler, Session
from ddp_hpc.run_dir.paths import RunDir

START_S = 60.0
"""How long nsys may take to start the worker's process, in seconds."""
REPORT_S = {exit_codes.FINISHED: 50.0, exit_codes.STOPPED: 15.0}
"""How long nsys may write its report after the worker has ended with this code, in seconds: a node's other workers wait for 60 s, and a
run that has stopped may soon lose its node. After a failure not at all: the others must learn of it."""
_CODE_S = 2.0
"""How long to wait for the exit code of a worker that is gone, in seconds."""
_SWEEP_S = 10.0
"""How long to kill what nsys has left, in seconds."""
_POLL_S = 1.0
MARK = "_DDP_HPC_NSYS_FRONT"
"""Name of a variable that all processes of nsys inherit. Once their front is gone, nothing else tells whose they are."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Which worker is to run, and how a new process of it is started."""

    run: RunDir
    module: str
    attempt: int
    rank: int
    environ: Mapping[str, str]
    """Of its new process: as the worker's, but Python's import path as before `make_users_code_importable`."""
    listen_fd: int | None


def run_under(profiler: Profiler | None, worker: Worker, environ: MutableMapping[str, str]) -> int | None:
    """Run a worker under nsys to its end, if its rank is to be profiled; return its exit code, or end by the signal that has ended it.

    Return None where this process is to run the worker itself; if that was not the intention, `environ` then says why.
    """
    if profiler is None or worker.rank not in profiler.ranks:
        return None
    environ.pop(CONTROL, None)
    environ.pop(WHY_NOT, None)
    try:
        code: int | str = _under_nsys(profiler, worker)
    except OSError as error:
        code = f"nsys cannot be started: {error}"
    if isinstance(code, str):
        environ[WHY_NOT] = code
        sys.stderr.write(f"warning: rank {worker.rank} runs without a profile: {code}\n")
        return None
    if code < 0:
        processes.die_of(-code)
    return code


def _under_nsys(profiler: Profiler, worker: Worker) -> int | str:
    """Return the worker's exit code, or why nsys has not started it."""
    program = shutil.which(profiler.command, path=worker.environ.get("PATH"))
    if program is None:
        return (
            f"`profile.kind` is 'nsys', but there is no program {profiler.command!r} on the PATH of {processes.host_name()}. "
            "Have the job load it (`slurm.modules`), or set `profile.command` to its path"
        )
    name = f"ddp-hpc-{worker.attempt}-{worker.rank}-{os.getpid()}"
    session = Session(program, name, worker.run.nsys_report(worker.attempt, worker.rank).absolute())
    front = Front(session, worker)
    try:
        code = front.see_through()
    finally:
        front.close()
    if isinstance(code, str):
        processes.forget_input()
        for number in front.signals:  # for the worker that this process becomes; they are blocked until then
            processes.send([os.getpid()], number)
    return code


@dataclass
class _Command:
    """A command to nsys that runs."""

    process: subprocess.Popen[bytes]
    deadline: float
    is_begin: bool


@dataclass
class Front:
    """What stands for one worker, as long as it runs."""

    session: Session
    worker: Worker
    start_s: float = START_S
    report_s: Mapping[int, float] = field(default_factory=REPORT_S.copy)
    _code: int | None = None
    _was_started: bool = False
    _pid: int | None = None
    """The worker's, once it has said it."""
    _ticks: int | None = None
    """When it has started: another process may get its number."""
    signals: list[int] = field(default_factory=list)
    """That came before the worker's process was known."""
    _command: _Command | None = None
    _wants: list[bytes] = field(default_factory=list)
    """What the worker has asked for, and nsys has not begun."""
    _has_begun: bool = False
    """Whether nsys has recorded something."""

    def __post_init__(self) -> None:
        processes.adopt_orphans()  # nsys has a process that outlives its command
        self._interruptions = processes.blocked_interruptions()
        self._others = {child.pid for child in psutil.Process().children()}
        make_directories(self.session.report.parent)
        self._log_path = self.worker.run.nsys_log(self.worker.attempt, self.worker.rank)
        self._log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        lifeline, self._life = os.pipe()
        self._mark = f"{os.getpid()} {self.session.report}"
        _fork_sweeper(lifeline, self._mark)
        self._codes, codes = os.pipe()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = [lifeline, control.fileno(), os.dup(1), os.dup(2)]
        listens = [] if self.worker.listen_fd is None else [self.worker.listen_fd]
        argv = self.session.launch_argv(_command_of(self.worker, passed), f"/dev/fd/{codes}")
        self._nsys = self._start(argv, [*passed, codes, *listens])
        control.close()
        for fd in (lifeline, codes, *passed[2:]):
            os.close(fd)
        processes.wake_on_input(self._codes)
        processes.wake_on_input(self._control.fileno())

    def see_through(self) -> int | str:
        """Return the worker's exit code once it has ended, or why nsys has not started it."""
        deadline = time.monotonic() + self.start_s
        while not self._was_started:
            if self._nsys.poll() is not None:
                self._read()
                if not self._was_started:
                    return f"{self.session.program} ended with exit code {self._nsys.returncode} before it had started the worker{self._said()}"
            elif time.monotonic() >= deadline:
                return f"{self.session.program} has not started the worker within {self.start_s:.0f} s{self._said()}"
            self._wait()
        gone_at: float | None = None
        while self._code is None:
            if gone_at is None and self._is_gone():
                gone_at = time.monotonic()
            elif gone_at is not None and time.monotonic() >= gone_at + _CODE_S:
                self._code = -9  # only a shell that was killed does not say it
                break
            self._wait(_POLL_S if gone_at is None else 0.1)
        if self.worker.listen_fd is not None:
            os.close(self.worker.listen_fd)
        self._await_report()
        return self._code

    def close(self) -> None:
        """Kill the worker, if it runs, and what is left of nsys."""
        os.close(self._life)  # of this, a worker dies, too, that nsys would start only now
        left = [one for one in psutil.Process().children() if one.pid not in self._others]
        for one in left:
            with suppress(psutil.NoSuchProcess):
                left.extend(one.children(recursive=True))
        processes.kill(one.pid for one in left)
        psutil.wait_procs(left, timeout=_CODE_S)
        for fd in (self._codes, self._log):
            os.close(fd)
        self._control.close()

    def _start(self, argv: Sequence[str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        # Stop signals are blocked here, and so in nsys and in the worker: nsys does not die of one that Slurm sends to all processes of a step.
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**self.worker.environ, MARK: self._mark},
            pass_fds=pass_fds,
            preexec_fn=processes.block_no_news,  # noqa: PLW1509  there are no threads here
        )

    def _is_gone(self) -> bool:
        if self._pid is None:
            return self._nsys.poll() is not None
        return processes.start_ticks(self._pid) != self._ticks

    def _wait(self, timeout_s: float = _POLL_S) -> None:
        """Wait for news, and do what follows from them."""
        number = processes.await_signal(timeout_s, self._interruptions)
        if number in {*processes.STOP_SIGNALS, *self._interruptions}:
            assert number is not None  # noqa: S101  it is one of these
            self.signals.append(number)
        self._read()
        self._follow_command()
        if self._pid is not None and not self._is_gone():
            for each in self.signals:
                processes.send([self._pid], each)
            self.signals.clear()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            for line in os.read(self._codes, 4096).decode().split():
                self._was_started = True
                if line != "started":
                    self._code = processes.of_shell(int(line))
        with suppress(OSError):
            while message := self._control.recv(4096):
                if message in {BEGIN, END}:
                    self._wants.append(message)
                else:
                    self._pid = int(message)
                    self._ticks = processes.start_ticks(self._pid)

    def _follow_command(self) -> None:
        """See to the command to nsys that runs, and then begin the next one."""
        if self._command is not None:
            code = self._command.process.poll()
            is_late = time.monotonic() >= self._command.deadline
            if code is None and not is_late:
                return
            if code is None:
                self._command.process.kill()
                self._command.process.wait()
            if self._command.is_begin:
                self._has_begun = code == 0
                why_not = (
                    f"nsys takes longer than {BEGIN_S:.0f} s" if code is None else f"nsys ended with exit code {code}"
                )
                with suppress(OSError):
                    self._control.send(BEGUN if self._has_begun else f"{why_not}{self._said()}".encode())
            self._command = None
        if self._wants:
            is_begin = self._wants.pop(0) == BEGIN
            if is_begin or self._has_begun:
                argv = self.session.start_argv() if is_begin else self.session.stop_argv()
                deadline = time.monotonic() + BEGIN_S if is_begin else float("inf")
                self._command = _Command(self._start(argv), deadline, is_begin)

    def _await_report(self) -> None:
        """Give nsys time for its report, and say where it is."""
        assert self._code is not None  # noqa: S101  the worker has ended
        limit = time.monotonic() + self.report_s.get(self._code, 0.0)
        while (self._nsys.poll() is None or self._command or self._wants) and time.monotonic() < limit:
            self._wait(0.2)
        is_whole = self._nsys.poll() is not None and not self._command
        if not self._has_begun or self._code not in self.report_s:
            return
        path = self.worker.run.nsys_written(self.worker.attempt, self.worker.rank)
        if path is None:
            sys.stderr.write(f"warning: nsys has left no report of rank {self.worker.rank}{self._said()}\n")
        elif is_whole:
            sys.stderr.write(f"note: nsys has written its report of rank {self.worker.rank}: {path}\n")
        else:
            sys.stderr.write(
                f"warning: nsys was ended {self.report_s[self._code]:.0f} s after the worker of rank {self.worker.rank}, so its report may not be "
                f"whole: {path}\n"
            )

    def _said(self) -> str:
        """Return the last line that nsys has printed, for the end of a message."""
        with suppress(OSError):
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                return f". Its last line: {lines[-1].strip()!r} ({self._log_path})"
        return ""


def _fork_sweeper(lifeline: int, mark: str) -> None:
    """Fork a process that waits until its front is gone, and then kills the processes with this mark."""
    # A killed front kills nothing. The agent of nsys has no parent of its own, so it would stay, with the sockets that it has inherited.
    if os.fork() != 0:
        return
    try:
        os.closerange(0, lifeline)
        os.closerange(lifeline + 1, os.sysconf("SC_OPEN_MAX"))
        os.read(lifeline, 1)  # nothing is ever written: it returns when the front is gone
        deadline = time.monotonic() + _SWEEP_S
        while (marked := _marked(mark)) and time.monotonic() < deadline:
            processes.kill(marked)
            time.sleep(0.05)  # one of them may just have forked
    finally:
        os._exit(0)


def _marked(mark: str) -> list[int]:
    every = psutil.process_iter(["environ"])
    return [process.pid for process in every if (process.info["environ"] or {}).get(MARK) == mark]


def _command_of(worker: Worker, fds: Sequence[int]) -> list[str]:
    options = [f"--worker={worker.module}", f"--attempt={worker.attempt}", f"--under-nsys={','.join(map(str, fds))}"]
    if worker.listen_fd is not None:
        options.append(f"--listen-fd={worker.listen_fd}")
    return [sys.executable, "-m", "ddp_hpc.job.node.spawned", str(worker.run.path), *options]


def settle(fds: str) -> int:
    """Prepare a worker's process that nsys has started; return the descriptor of the socket to its front.

    It gets the front's own output, not nsys's copy of it, and dies with the front.
    """
    lifeline, control, output, errors = map(int, fds.split(","))
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for fd in (output, errors):
        os.close(fd)
    for fd in (lifeline, control):
        os.set_inheritable(fd, False)
    processes.die_with_pipe(lifeline)
    with socket.socket(fileno=os.dup(control)) as front:
        front.send(str(os.getpid()).encode())
    return control
