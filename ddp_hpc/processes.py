"""What the kernel is asked about processes: dying together, waiting for signals, holding a run."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""What a cluster sends before it takes the machine away: both mean, commit and leave."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(128 + signal.SIGKILL)


def be_ended_with_parent(parent_pid: int) -> None:
    """Between fork and exec: have the kernel ask this process to end (SIGTERM) when its parent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(128 + signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become_bound_child(parent_pid: int) -> None:
    """Between fork and exec: take signals as they come, and die with the parent."""
    die_with_parent(parent_pid)
    unblock_signals()


def ignore_stop_signals() -> None:
    """Leave it to the parent to answer them: Slurm signals every process of a job step, helpers included."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def heed_stop_signals() -> None:
    """Undo that the parent had this process ignore them, and so all that it starts; call once they are blocked."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


_SIGSET_BYTES = 128
"""Of a `sigset_t`, in glibc and in musl."""
_AWAITED = frozenset({*STOP_SIGNALS, signal.SIGCHLD, signal.SIGIO})


def block_awaited_signals() -> None:
    """Keep stop signals, children's deaths and news of input for `await_signal`; call before any thread is started.

    Who started this process may ignore the deaths of children. Then the kernel would keep no exit codes for us.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)


def unblock_signals() -> None:
    """Take signals as they come again; for a child, once its handlers are set."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def wake_on_input(fd: int) -> None:
    """Have input on a pipe or socket, and its end, wake `await_signal` (fcntl(2), O_ASYNC); reads do not wait any more."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)


@contextmanager
def deaths_held_back() -> Iterator[None]:
    """Have children's deaths (SIGCHLD) wait until the block is left; a process forked in it waits until `unblock_signals`.

    Python's fork calls hooks that swallow exceptions. One that a handler of SIGCHLD raises amid them is lost, and with it
    the release of `logging`'s lock: whoever logs first in another thread then waits for ever.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_signal(timeout_s: float) -> signal.Signals | None:
    """Wait for a stop signal, a child's death or input; return which, or None after `timeout_s`.

    By the C library: Python's own `signal.sigtimedwait` returns a number that nobody has sent where the process is
    suspended while it waits, and goes on after the time has passed.
    """
    libc, awaited = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(awaited)
    for each in _AWAITED:
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


def reap() -> dict[int, int]:
    """Return the exit codes, by pid, of the children that have died; minus the number for a signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of `pids` that still live."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def tell_to_stop(pids: Iterable[int]) -> None:
    """Have those of `pids` that still live commit and leave."""
    send(pids, signal.SIGUSR2)


def start_ticks(pid: int) -> int | None:
    """Return when a process of this host started, in ticks since the boot; None where it is gone, or dead and not reaped.

    With its number, that tells it from a later process of the same number (proc(5), /proc/pid/stat). Another user's process
    may be hidden from us (`hidepid`, proc(5)); then it is None, too.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = stat.rpartition(")")[2].split()  # the second field, its name, may hold anything
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def await_exit(pid: int, started: int | None, timeout_s: float) -> None:
    """Return once a process of this host has ended, or after `timeout_s`; at once where it is gone.

    `started` is what `start_ticks` said of it, where that is known: a later process of its number is not waited for.
    """
    if not hasattr(os, "pidfd_open"):  # Python was built for kernels before Linux 5.3, as some standalone ones are
        time.sleep(timeout_s)
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # such a kernel, a sandbox that forbids the call, or no descriptor left
        time.sleep(timeout_s)
        return
    try:
        # Asked after the descriptor was opened, so that both mean the same process.
        if started in (None, start_ticks(pid)):
            end = select.poll()  # select(2) takes no descriptor above 1023
            end.register(fd, select.POLLIN)
            end.poll(timeout_s * 1000)
    finally:
        os.close(fd)


def is_listening(pid: int) -> bool:
    """Tell whether a process would hear `tell_to_stop`: one that neither blocks nor catches it may die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines())
    heard = int(fields["SigBlk"], 16) | int(fields["SigCgt"], 16)  # proc(5): the lowest bit is signal 1
    return bool(heard >> (signal.SIGUSR2 - 1) & 1)


def tell_to_end(pids: Iterable[int]) -> None:
    """Have those of `pids` that still live clear up and leave."""
    send(pids, signal.SIGTERM)


def kill(pids: Iterable[int]) -> None:
    """End those of `pids` that still live, at once."""
    send(pids, signal.SIGKILL)


def take_lock(path: Path, *, patience_s: float = 0.0) -> int | None:
    """Lock `path` for this process and all its children; return the descriptor that holds it, or None if it is held.

    The kernel lets go of it when the last of them is gone, so a run that was killed is free at once. A file system that
    knows no locks (Lustre without `flock`, NFS without lockd) gives it to everybody.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            if error.errno in _NO_LOCKS:
                return fd
            os.close(fd)
            raise
        else:
            return fd


_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})


def is_locked(path: Path) -> bool:
    """Tell whether somebody on this host holds the lock at `path`.

    Raises:
        OSError: where the file system knows no locks, or the file is not ours to open.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def lasting_threads() -> list[str]:
    """Return the names of this process's other threads, which a forked process would not have.

    A library that ends its threads before a fork, and starts them again later, is safe (OpenBLAS): so a fork is made, and
    what is left after it counts. So is one that starts them again in the child.
    """
    folder = Path("/proc/self/task")
    if len(list(folder.iterdir())) == 1:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what Python 3.12 and newer say of a fork beside threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    known = {
        thread.native_id: f"{thread.name} ({type(thread).__module__}.{type(thread).__qualname__})"
        for thread in threading.enumerate()
    }
    names = []
    for task in folder.iterdir():
        if int(task.name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended meanwhile
            command = (task / "comm").read_text(errors="replace").strip()
            if command not in _STARTED_AGAIN_AFTER_FORK:
                names.append(known.get(int(task.name)) or f"{command!r} of a library")
    return names


_STARTED_AGAIN_AFTER_FORK = frozenset({"jemalloc_bg_thd"})
"""Threads that their library starts again in a forked process: jemalloc's, which pyarrow brings, and so pandas."""
