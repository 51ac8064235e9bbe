"""What the kernel is asked about processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.processes import handles_stop_signal, is_locked, kill, send_signal, start_ticks, take_lock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gives_them_to_everybody(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)

    assert None not in {take_lock(tmp_path / "lock"), take_lock(tmp_path / "lock")}


def test_another_fault_of_a_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(OSError, match="Input/output error"):
        take_lock(tmp_path / "lock")


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    began = time.monotonic()

    first, second = take_lock(path), take_lock(path, patience_s=0.2)

    assert first is not None
    assert second is None
    assert time.monotonic() - began >= 0.2
    assert is_locked(path)
    os.close(first)


def test_a_lock_that_comes_free_within_our_patience_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = _python("import sys, time; from pathlib import Path; from ddp_hpc.base.processes import take_lock;"
                     f"take_lock(Path({str(path)!r})); print('held', flush=True); sys.stdin.read()")  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    assert take_lock(path) is None

    holder.stdin.close()
    fd = take_lock(path, patience_s=30.0)

    assert fd is not None
    os.close(fd)
    _end(holder)


def test_a_lock_is_held_until_the_last_process_that_has_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = take_lock(path)
    assert fd is not None
    heir = subprocess.Popen(["sleep", "60"], pass_fds=[fd])

    os.close(fd)
    while_the_heir_lives = is_locked(path)
    heir.kill()
    heir.wait()

    assert while_the_heir_lives
    assert not is_locked(path)


def test_nobody_holds_a_lock_that_does_not_exist_and_looking_does_not_make_it(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []


def test_looking_at_a_lock_does_not_take_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()

    assert not is_locked(path)
    assert take_lock(path) is not None


def test_exit_codes_of_the_dead_are_told_by_pid() -> None:
    script = """
import os, signal, time
from ddp_hpc.base.processes import reap_children

def child(end):
    pid = os.fork()
    if pid == 0:
        end()
        time.sleep(60)
    return pid

pids = [child(lambda: os._exit(3)), child(lambda: os.kill(os.getpid(), signal.SIGKILL)), child(lambda: None)]
codes = {}
while len(codes) < 2:
    codes |= reap_children()
os.kill(pids[2], signal.SIGKILL)
while len(codes) < 3:
    codes |= reap_children()
print([codes[pid] for pid in pids], reap_children())
"""

    assert _output(script) == "[3, -9, -9] {}\n"


def test_stop_signals_and_deaths_are_kept_until_somebody_waits_for_them() -> None:
    script = """
import os, signal
from ddp_hpc.base.processes import await_signal, block_awaited_signals

block_awaited_signals()
os.kill(os.getpid(), signal.SIGUSR2)
told = [await_signal(10.0), await_signal(0.01)]
if os.fork() == 0:
    os._exit(0)
print(*(number and number.name for number in [*told, await_signal(10.0)]))
"""

    assert _output(script) == "SIGUSR2 None SIGCHLD\n"


def test_a_process_that_is_suspended_past_the_end_of_its_wait_makes_no_signal_up() -> None:
    script = """
import sys
from ddp_hpc.base.processes import await_signal, block_awaited_signals

block_awaited_signals()
print("waits", flush=True)
told = [await_signal(0.5), *(await_signal(0.0) for _ in range(3))]
print(told, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
        time.sleep(0.001)

    process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    stdout, stderr = process.communicate(timeout=60)

    assert stdout == "[None, None, None, None]\n", stderr


def test_signals_come_to_who_lives_and_the_dead_are_no_error() -> None:
    living, dead = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])
    dead.wait()

    kill([dead.pid, living.pid])
    send_signal([dead.pid], signal.SIGTERM)

    assert living.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("does", "listens"),
    [
        ("", False),
        ("signal.signal(signal.SIGUSR2, signal.SIG_IGN)", False),
        ("signal.signal(signal.SIGTERM, print)", False),
        ("signal.signal(signal.SIGUSR2, print)", True),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})", True),
    ],
)
def test_who_catches_or_blocks_the_word_to_stop_is_listening(does: str, listens: bool) -> None:
    process = _python(f"import signal, sys\n{does}\nprint('ready', flush=True)\nsys.stdin.read()")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    found = handles_stop_signal(process.pid)

    assert found is listens
    _end(process)
    assert not handles_stop_signal(process.pid)


def test_a_process_dies_with_its_parent_however_that_dies() -> None:
    script = """
import os, time
from ddp_hpc.base.processes import die_with_parent

parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    parent = _python(script)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))

    parent.kill()

    _await(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    _end(parent)


def test_a_process_whose_parent_died_before_it_asked_is_gone_at_once() -> None:
    script = "from ddp_hpc.base.processes import die_with_parent; die_with_parent(1 << 22); print('alive')"

    orphan = _python(script)

    assert orphan.wait(timeout=30) == 128 + signal.SIGKILL
    _end(orphan)


def test_what_a_parent_had_ignored_is_heard_again_and_not_inherited() -> None:
    script = """
import os, signal, subprocess, sys
from ddp_hpc.base.processes import await_signal, block_awaited_signals, restore_stop_signals, ignore_stop_signals

def of_a_child():
    told = "import signal; print(signal.getsignal(signal.SIGUSR2).name)"
    return subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.strip()

ignore_stop_signals()
before = of_a_child()
block_awaited_signals()
os.kill(os.getpid(), signal.SIGUSR2)
restore_stop_signals()
print(before, await_signal(10.0).name, of_a_child())
"""

    assert _output(script) == "SIG_IGN SIGUSR2 SIG_DFL\n"


def test_an_interruption_is_awaited_unless_it_is_ignored_and_children_receive_it() -> None:
    script = """
import os, signal, subprocess, sys
from ddp_hpc.base.processes import await_signal, block_awaited_signals, block_interruptions, unblock_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
block_awaited_signals()
numbers = block_interruptions()
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGINT)
print(await_signal(5.0, numbers) == signal.SIGINT, await_signal(0.0, numbers))
print(subprocess.run(["sh", "-c", "kill -INT $$"], preexec_fn=unblock_signals).returncode)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "None", "-2"]


def test_helpers_leave_stop_signals_to_their_parent() -> None:
    script = """
import os, signal
from ddp_hpc.base.processes import STOP_SIGNALS, ignore_stop_signals

ignore_stop_signals()
for number in STOP_SIGNALS:
    os.kill(os.getpid(), number)
print("alive")
"""

    assert _output(script) == "alive\n"


def test_threads_that_a_forked_process_would_not_have_are_named() -> None:
    script = """
import os, threading
from ddp_hpc.base.processes import threads_lost_by_fork

before, end = threads_lost_by_fork(), threading.Event()
class Uploader(threading.Thread):
    pass
thread = Uploader(name="upload", target=end.wait)
thread.start()
while_it_runs = threads_lost_by_fork()
end.set()
thread.join()
while len(os.listdir("/proc/self/task")) > 1:  # Python's join may return before the kernel's thread has ended
    pass
print(before, while_it_runs, threads_lost_by_fork())
"""

    assert _output(script) == "[] ['upload (__main__.Uploader)'] []\n"


def test_threads_that_their_library_ends_before_a_fork_do_not_count() -> None:
    """As OpenBLAS does, which numpy brings."""
    script = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "4"
import numpy
from ddp_hpc.base.processes import threads_lost_by_fork
numpy.ones((500, 500)) @ numpy.ones((500, 500))
print(len(os.listdir("/proc/self/task")) > 1, threads_lost_by_fork())
"""

    assert _output(script) in {"True []\n", "False []\n"}  # built without OpenBLAS, it has no threads


def _python(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _output(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout


def _end(process: subprocess.Popen[str]) -> None:
    """Reap a process and close our ends of its pipes."""
    process.kill()
    with process:
        pass


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- which process is it ---------------------------------------------------------------------------------------------


def test_a_process_is_known_by_its_number_and_start_and_a_dead_one_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = start_ticks(child.pid)
    assert started is not None
    assert start_ticks(child.pid) == started

    child.kill()

    until = time.monotonic() + 60
    while start_ticks(child.pid) is not None:  # though nobody has reaped it
        assert time.monotonic() < until
    child.wait()


def test_a_signal_that_is_held_back_takes_effect_at_the_end_of_the_block() -> None:
    """Else it may come between a process's start and the assignment by which its caller knows it."""
    was_done = False

    with pytest.raises(KeyboardInterrupt), processes.signals_as_ctrl_c(), processes.signals_held_back():  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        was_done = True

    assert was_done


SHOWN = """
import subprocess, sys
import psutil
from ddp_hpc.base.processes import set_process_title
set_process_title(["python", "train.py", "--name", "x" * int(sys.argv[1])])
print(psutil.Process().cmdline())
print(subprocess.run(["ps", "-o", "args=", "-p", str(psutil.Process().pid)], capture_output=True, text=True).stdout.strip())
"""


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_process_is_shown_by_the_words_that_it_is_given_as_far_as_there_is_room(length: int) -> None:
    done = subprocess.run([sys.executable, "-c", SHOWN, str(length)], capture_output=True, text=True, check=True)

    words, shown = done.stdout.splitlines()
    assert words.startswith("['python', 'train.py', '--name', 'x")
    assert shown.startswith("python train.py --name x")
    assert len(shown) < 1000
