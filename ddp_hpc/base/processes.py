"""System calls for processes: exit together with the parent, wait for signals, hold a run's lock."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.base.errors import ConfigError

SLURMS_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""The signals that Slurm sends before it takes the nodes away, one by its own choice, the other because our job script asks for it."""
STOP_SIGNALS = (*SLURMS_SIGNALS, signal.SIGUSR1)
"""The signals that mean: commit a checkpoint and exit. Users have Slurm send SIGUSR1, too (`scancel --signal=USR1`)."""
CTRL_C_SIGNAL = signal.SIGINT
INTERRUPT_SIGNALS = (CTRL_C_SIGNAL, signal.SIGHUP)
"""Ctrl-C, and the end of a terminal; in a job step, which has no terminal, `scancel` sends them, and they mean the same as stop signals."""

_MOST_OPEN_FILES = 1 << 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent exits, for whatever reason."""
    # PR_SET_PDEATHSIG: https://man7.org/linux/man-pages/man2/prctl.2.html
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:  # a race: the parent exited before prctl, so no signal will come
        os._exit(128 + by)


def terminate_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent exits; to be called between fork and exec."""
    # The kernel keeps this setting across exec, but clears it in a child of a fork (prctl(2)).
    die_with_parent(parent_pid, by=signal.SIGTERM)


def needed_open_files(num_ranks: int) -> int:
    """Return how many files rank zero opens at least: for each rank one connection to the store, and two of gloo (measured)."""
    return 3 * num_ranks + 20


def allow_open_files(num_ranks: int = 0) -> None:
    """Raise the soft limit of open files to the hard one, for this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some programs close all numbers up to the limit when they start, and containers have limits of 10^9.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_OPEN_FILES)), hard))
    if hard < needed_open_files(num_ranks):
        raise ConfigError(
            f"A process may open {hard} files on {host_name()} (`ulimit -Hn`), but rank zero of {num_ranks} needs {needed_open_files(num_ranks)}, "
            "as it holds connections to all others. Ask for fewer workers, or have the hard limit raised: in what set it for this "
            "shell, in /etc/security/limits.conf or, for jobs, in slurmd's service (LimitNOFILE)."
        )


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent exits (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become_bound_child(parent_pid: int) -> None:
    """Receive signals again, and exit together with the parent; to be called between fork and exec."""
    die_with_parent(parent_pid)
    unblock_signals()


def ignore_stop_signals() -> None:
    """Ignore stop signals in a helper process: Slurm signals every process of a job step, and the parent handles them."""
    for number in (*STOP_SIGNALS, *INTERRUPT_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def restore_stop_signals() -> None:
    """Set stop signals back to their default action, if the parent ignored them; to be called while they are blocked."""
    # Ignored signals stay ignored across fork and exec, also in all children. A signal that comes while they are blocked
    # waits, so none is lost between this and the first handler: https://man7.org/linux/man-pages/man7/signal.7.html
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def reset_signals_in_child(parent_pid: int, *, is_new_program: bool, ignores: Iterable[int] = ()) -> None:
    """Be what a program expects to be when it starts: all signals but `ignores` as they are by default, and none blocked.

    To be called in a forked process. Python's own way with SIGPIPE and SIGINT stays, unless another program follows (exec).
    """
    die_with_parent(parent_pid)
    restore_stop_signals()
    # SIGQUIT: a shell that has started our parent with `&` ignores it for all below, and `is_in_background` reads it.
    for number in (signal.SIGCHLD, signal.SIGIO, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for ignored in ignores:
        signal.signal(ignored, signal.SIG_IGN)
    if is_new_program:
        # Python ignores them, and an ignored signal stays so across exec.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def set_process_title(words: Iterable[str]) -> None:
    """Have `ps` show this process as one that these words have started, as far as its own command line leaves room for them."""
    # What it shows is memory of the process, from `arg_start` to `arg_end` (proc_pid_stat(5)). Where the last byte is not
    # zero, the text ends at the first zero (the kernel's get_mm_cmdline, fs/proc/base.c).
    with suppress(OSError, ValueError):
        start, end = map(int, Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[45:47])
        text = os.fsencode(" ".join(words))[: max(0, end - start - 2)]
        if 0 < start < end - 2:
            ctypes.memmove(start, text.ljust(end - start - 1, b"\0") + b" ", end - start)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt within the `with` block, as Ctrl-C does, so that `finally` is reached.

    Signals after the first have no effect, so that they do not interrupt what `finally` does.
    """
    awaited = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]

    def interrupt(number: int, _: object) -> None:
        for each in awaited:
            signal.signal(each, lambda *_: None)
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {each: signal.signal(each, interrupt) for each in awaited}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP take effect only at the end of the `with` block, such as one that starts a process.

    Else a KeyboardInterrupt may come between the process's start and the assignment by which the caller knows it.
    """
    import threading  # late: no command needs it that only reads (cli/__init__.py)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs no handler in another thread
        return
    came: list[int] = []
    awaited = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(one))]
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in awaited}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if came:
            signal.raise_signal(came[0])


class StopSignalled(BaseException):
    """A stop signal has come within `leaving_at_stop_signals`."""


@contextmanager
def leaving_at_stop_signals() -> Iterator[None]:
    """Have a stop signal raise `StopSignalled` within the `with` block, until `block_awaited_signals` is called; then they are blocked."""

    def leave(*_: object) -> None:
        raise StopSignalled

    # A wait in C++, such as that of torchrun's store, runs no handler of Python: there, the signal itself is to end the process.
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        block_awaited_signals()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


_SIGSET_BYTES = 128
"""Size of a `sigset_t`, in glibc and in musl."""
_WAIT_SIGNALS = frozenset({*STOP_SIGNALS, signal.SIGCHLD, signal.SIGIO})


def block_awaited_signals() -> None:
    """Block stop signals, SIGCHLD and SIGIO, which `await_signal` then returns; to be called before any thread starts."""
    # The kernel delivers a signal of the process to any thread that does not block it, and a thread inherits the mask of its
    # creator. So a thread that was started before would get the signal: https://man7.org/linux/man-pages/man7/signal.7.html
    # Our parent may have ignored SIGCHLD. Then the kernel would discard the exit codes of our children (waitpid(2)).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAIT_SIGNALS)


def block_interruptions() -> list[signal.Signals]:
    """Block and return those of INTERRUPT_SIGNALS that are not ignored, for `await_signal`; to be called before any thread starts."""
    # `nohup` ignores SIGHUP, and a shell ignores SIGINT for what it starts with `&`. An ignored signal that is blocked would come.
    numbers = [number for number in INTERRUPT_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    return numbers


def find_blocked_interruptions() -> list[signal.Signals]:
    """Return those of INTERRUPT_SIGNALS that this process, or the one that forked it, has blocked for `await_signal`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return [number for number in INTERRUPT_SIGNALS if number in blocked]


def unclaimed_stop_signals() -> set[signal.Signals]:
    """Return the signals that ask this process to stop, without those that a user's module has given a handler of its own.

    That is, a recipe may print its stacks at SIGUSR1 (`faulthandler.register`). Slurm's own signals always ask to stop.
    """
    # By /proc, because `signal.getsignal` does not know of handlers in C. Python itself catches SIGINT.
    has_own = {number for number in (*STOP_SIGNALS, *INTERRUPT_SIGNALS) if is_in_mask(os.getpid(), number, "SigCgt")}
    if signal.getsignal(CTRL_C_SIGNAL) is signal.default_int_handler:
        has_own.discard(CTRL_C_SIGNAL)
    return {*SLURMS_SIGNALS, *({*STOP_SIGNALS, *find_blocked_interruptions()} - has_own)}


def unblock_signals() -> None:
    """Receive these signals again; to be called in a child after it set its handlers."""
    # A forked process inherits the mask, and exec keeps it. A signal that waited meanwhile arrives within this call.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_WAIT_SIGNALS, *INTERRUPT_SIGNALS})


def wake_on_input(fd: int) -> None:
    """Have input on a pipe or socket, or its end, wake `await_signal` (SIGIO; fcntl(2), O_ASYNC). Reads no longer block."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)


@contextmanager
def sigchld_blocked() -> Iterator[None]:
    """Block SIGCHLD within the `with` block; a process that is forked there calls `unblock_signals` itself."""
    # os.fork runs the hooks of os.register_at_fork, and only prints an exception that one of them raises. A handler of
    # SIGCHLD may raise (PyTorch's DataLoader does) while the hook of `logging` runs, which then does not release its lock:
    # the next thread that logs would wait forever.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def all_signals_blocked() -> Iterator[None]:
    """Block all signals of this thread: a thread that is started meanwhile never takes one (pthread_sigmask(3))."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_signal(timeout_s: float, also: Iterable[int] = ()) -> signal.Signals | None:
    """Wait for a stop signal, the exit of a child, input, or one of `also`; return the signal, or None after `timeout_s`."""
    # Through the C library: Python's `signal.sigtimedwait` returns a signal that was not sent if the process was stopped
    # while it waited (SIGSTOP, SIGCONT) and the time passed meanwhile.
    libc, awaited = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(awaited)
    for each in {*_WAIT_SIGNALS, *also}:
        libc.sigaddset(awaited, each)
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        timespec = (ctypes.c_long * 2)(int(left), int(left % 1 * 1e9))
        number = libc.sigtimedwait(awaited, None, timespec)
        if number > 0:
            return signal.Signals(number)
        if ctypes.get_errno() != errno.EINTR:
            return None


def reap_children() -> dict[int, int]:
    """Return the exit codes of children that have exited, by pid; minus the signal's number for a killed one."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def is_stop_pending() -> bool:
    """Tell whether a stop signal has come that `await_signal` has not taken yet."""
    return not signal.sigpending().isdisjoint(STOP_SIGNALS)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of `pids` that still run."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def signal_number(name: str) -> signal.Signals:
    """Return the signal of a name as `kill -l` prints it: `USR2`.

    Raises:
        ValueError: if there is no such signal.
    """
    try:
        return signal.Signals[f"SIG{name}"]
    except KeyError as error:
        raise ValueError(name) from error


def request_stop(pids: Iterable[int]) -> None:
    """Ask those of `pids` that still run, processes of ours, to stop (SIGUSR2)."""
    send_signal(pids, signal.SIGUSR2)


def host_name() -> str:
    """Return what `socket.gethostname` returns (gethostname(2), uname(2)); commands start sooner without `socket`."""
    return os.uname().nodename


def kernel_text(path: Path) -> str:
    """Return what a file of the system says, in /proc, /sys or /etc; nothing where its version, or this container, does not have it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot; None if it is gone or a zombie.

    None also if /proc hides another user's process.
    """
    # The kernel uses pids again, so only the pid and the start time together identify a process. Field 22 of /proc/PID/stat;
    # `hidepid` hides it: https://man7.org/linux/man-pages/man5/proc.5.html
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = stat.rpartition(")")[2].split()  # the second field, its name, may hold anything
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def await_exit(pid: int, started: int | None, timeout_s: float) -> None:
    """Return once a process of this host has exited, or after `timeout_s`; at once if it is gone.

    `started` is what `start_ticks` returned for it, or None if that is not known. A later process with the same pid is not
    waited for.
    """
    try:
        fd = open_pidfd(pid)
    except ProcessLookupError:
        return
    if fd is None:
        time.sleep(timeout_s)
        return
    try:
        # Compare the start time only now. The descriptor refers to one process for good, while its pid may be used again; had
        # the pid been used again before pidfd_open, the start time would differ (pidfd_open(2)).
        if started in (None, start_ticks(pid)):
            end = select.poll()  # select(2) takes no descriptor above 1023
            end.register(fd, select.POLLIN)
            end.poll(timeout_s * 1000)
    finally:
        os.close(fd)


def open_pidfd(pid: int) -> int | None:
    """Return a file descriptor that becomes readable when a process ends (pidfd_open(2)); None where there is no such call.

    Raises:
        ProcessLookupError: if there is no such process.
    """
    if not hasattr(os, "pidfd_open"):  # this Python was built for kernels before Linux 5.3
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, a sandbox that forbids the call, or too many open files
        return None


def set_dummy_stop_handlers() -> None:
    """Have `handles_stop_signal` recognise this process, which blocks stop signals and takes them by `await_signal`."""
    # While a process waits in sigtimedwait, the kernel shows the awaited signals as not blocked. These handlers are never
    # called, because the signals are blocked at all other times: https://man7.org/linux/man-pages/man2/sigtimedwait.2.html
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)


def handles_stop_signal(pid: int, number: int = signal.SIGUSR2) -> bool:
    """Tell whether a process blocks or catches a stop signal; the signal would kill any other process."""
    return is_in_mask(pid, number, "SigBlk", "SigCgt")


def is_in_background(pid: int) -> bool:
    """Tell whether a shell without job control has started a process with `&`: it ignores SIGQUIT then."""
    # https://pubs.opengroup.org/onlinepubs/9699919799/utilities/V3_chap02.html#tag_18_11; few programs change that.
    return is_in_mask(pid, signal.SIGQUIT, "SigIgn")


def is_in_mask(pid: int, number: int, *fields: str) -> bool:
    """Tell whether a signal is in one of these fields of /proc/PID/status; in none once the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    found = dict(line.split(":", 1) for line in status.splitlines())
    return any(int(found[field], 16) >> (number - 1) & 1 for field in fields)  # proc(5): the lowest bit is signal 1


def terminate(pids: Iterable[int]) -> None:
    """Ask those of `pids` that still run to clean up and exit (SIGTERM)."""
    send_signal(pids, signal.SIGTERM)


def kill(pids: Iterable[int]) -> None:
    """Kill those of `pids` that still run (SIGKILL)."""
    send_signal(pids, signal.SIGKILL)


def kill_all_below(pids: Collection[int]) -> None:
    """Kill those of `pids` that still run, and all that they have started (SIGKILL)."""
    import psutil  # late: only where workers are killed

    # The kernel binds a process to its parent (`die_with_parent`), but not that process's own children: a shell dies, and what
    # it has started goes on without it. So look for them first, as nothing leads to them afterwards.
    below = []
    for pid in pids:
        with suppress(psutil.Error):
            below += [one.pid for one in psutil.Process(pid).children(recursive=True)]
    kill([*pids, *below])


def take_lock(path: Path, *, patience_s: float = 0.0) -> int | None:
    """Lock `path` for this process and all its children; return the descriptor with the lock, or None if it is taken.

    On a file system without locks (Lustre without `flock`, NFS without lockd) everybody gets the lock.
    """
    # flock(2), not fcntl(2): its lock belongs to the open file, which children of a fork share. The kernel releases it when
    # the last process with a descriptor of that file exits, also if all were killed. A lock of fcntl(2) belongs to one
    # process, and ends when that process closes any descriptor of the file.
    # https://man7.org/linux/man-pages/man2/flock.2.html
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(0.05)
        except OSError as error:
            if error.errno in NO_LOCKS_ERRNOS:
                return fd
            os.close(fd)
            raise
        else:
            return fd


def release_lock(fd: int) -> None:
    """Release a lock that `take_lock` returned, also where a process that was forked meanwhile has inherited it."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


NO_LOCKS_ERRNOS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
"""What flock(2) answers on a file system without locks: Lustre without the mount option `flock`, NFS without lockd."""


def is_locked(path: Path) -> bool:
    """Tell whether a process on this host holds the lock at `path`.

    Raises:
        OSError: if the file system has no locks, or the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    # A shared lock, so that several watchers may look at the same time. It still keeps the run from starting for a
    # moment: `take_lock` tries again for that reason.
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def threads_lost_by_fork() -> list[str]:
    """Return the names of this process's other threads that a fork would lose."""
    # fork(2) copies only the calling thread. A library is safe if it ends its threads before a fork (OpenBLAS, with
    # pthread_atfork) or starts them again in the child. So fork once, and then list the threads that are still here.
    folder = Path("/proc/self/task")
    if len(list(folder.iterdir())) == 1:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer warn of a fork beside threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    import threading  # late: no command needs it (cli/__init__.py)

    known = {
        thread.native_id: f"{thread.name} ({type(thread).__module__}.{type(thread).__qualname__})"
        for thread in threading.enumerate()
    }
    names = []
    for task in folder.iterdir():
        if int(task.name) == os.getpid():
            continue
        with suppress(OSError):  # the thread has ended meanwhile
            command = (task / "comm").read_text(errors="replace").strip()
            if command not in _STARTED_AGAIN_AFTER_FORK:
                names.append(known.get(int(task.name)) or f"{command!r} of a library")
    return names


_STARTED_AGAIN_AFTER_FORK = frozenset({"jemalloc_bg_thd"})
"""Threads that their library starts again in a forked process: those of jemalloc, which pyarrow (and so pandas) loads."""


def die_with_process(pid: int) -> None:
    """Kill this process once another process of this host has ended, whichever process is its parent."""
    import threading  # late: no command needs it (cli/__init__.py)

    started = start_ticks(pid)

    def watch() -> None:
        while started is not None and start_ticks(pid) == started:
            await_exit(pid, started, 1.0)
        kill([os.getpid()])

    with all_signals_blocked():
        threading.Thread(target=watch, name=f"end of {pid}", daemon=True).start()
