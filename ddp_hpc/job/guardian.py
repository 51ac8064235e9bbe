"""The guardian of a supervisor on this machine: starts it, waits, and starts another one where it dies undecided.

    python -m ddp_hpc.job.guardian RUN_DIR

On Slurm the shell of the job script is the guardian. This process does nothing but wait: it holds the run's lock, so that
the run stays taken from one supervisor to the next, and passes stop signals on. If it dies itself, the supervisor goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil

from ddp_hpc import exit_codes, ownership, processes
from ddp_hpc.ledger import Cause, End, Ending, Ledger, record_end
from ddp_hpc.run_dir import RunDir

LOCK_PATIENCE_S = 10.0
"""How long the processes of a killed attempt may take to vanish."""
STUCK_S = 60.0
"""How long to wait for processes that were killed."""
GOOD_WHILE_S = 600.0
"""A supervisor that lived for so long is no sign that the next one dies at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Have a supervisor see the run through; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.guardian", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--import-path", action="append", default=[], help="passed on to the supervisor")
    arguments = parser.parse_args(argv)
    processes.block_awaited_signals()
    processes.adopt_orphans()
    run = RunDir(arguments.run)
    try:
        lock_fd = processes.take_lock(run.lock, patience_s=LOCK_PATIENCE_S)
        since = ownership.next_attempt(run)
    except OSError as error:
        sys.stderr.write(f"error: {run.path} cannot be worked on: {error}.\n")
        return exit_codes.FAILED
    if lock_fd is None:
        sys.stderr.write(f"error: {run.path} is being worked on by another process.\n")
        return exit_codes.REFUSED
    words = [str(run.path), "--guarded", f"--lock-fd={lock_fd}", f"--since={since}"]
    return _guard(run, [*words, *(f"--import-path={path}" for path in arguments.import_path)], since=since)


def _guard(run: RunDir, words: Sequence[str], *, since: int) -> int:
    """Start supervisors until one decides, or too many died one after another."""
    num_deaths, is_told, after = 0, False, 0
    while True:
        began = time.monotonic()
        more = [*(["--stop-requested"] if is_told else []), *([f"--after={after}"] if after else [])]
        after, heard = _see_through([*words, *more])
        is_told = is_told or heard
        if after in exit_codes.DECISIONS:  # what users' code has left running, such as an upload, may go on
            return exit_codes.FAILED if after == exit_codes.GAVE_UP else after
        is_told = _end_what_lives() or is_told
        if _is_cancelled(run, since):
            return exit_codes.FAILED
        num_deaths = 1 if time.monotonic() - began > GOOD_WHILE_S else num_deaths + 1
        if num_deaths > len(exit_codes.GUARD_PAUSES_S):
            reason = f"the supervisor {exit_codes.told(after)}, {num_deaths} times in a row"
            sys.stderr.write(f"error: {reason}; submit the run again.\n")
            _write_down(run, since, reason)
            return exit_codes.FAILED
        pause_s = exit_codes.GUARD_PAUSES_S[num_deaths - 1]
        sys.stderr.write(f"note: the supervisor {exit_codes.told(after)}; another one starts in {pause_s} s\n")
        is_told = _pause(pause_s) or is_told


def _write_down(run: RunDir, since: int, reason: str) -> None:
    """Say in the ledger that no supervisor goes on, if the newest attempt is one of ours, from `since` on."""
    try:
        newest = Ledger.read(run).newest
        if newest is None or newest.attempt < since or (newest.ending is not None and not newest.next):
            return
        cause = newest.cause or Cause.SUPERVISOR_DIED
        end = End(cause=cause, last_step=newest.last_step, failed_nodes=newest.failed_nodes)
        told = "; ".join(filter(None, [newest.reason, reason, "the guardian gave up"]))
        record_end(run, attempt=newest.attempt, ending=Ending.FAILED, exit_code=exit_codes.FAILED, reason=told, end=end)
    except OSError as error:
        sys.stderr.write(f"note: that was not written down: {error}\n")


def _is_cancelled(run: RunDir, since: int) -> bool:
    """Tell whether the user has ended an attempt of ours, from `since` on, by killing its supervisor."""
    try:
        newest = Ledger.read(run).newest
        return newest is not None and newest.attempt >= since and newest.ending == Ending.CANCELLED
    except OSError:  # the next supervisor looks again
        return False


def _see_through(words: Sequence[str]) -> tuple[int, bool]:
    """Start a supervisor; return its exit code, once it has ended, and whether it was told to stop meanwhile."""
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_supervisor(words)
    is_told = False
    while True:
        ended = processes.reap()
        if pid in ended:
            return ended[pid], is_told
        number = processes.await_signal(3600.0)
        if number in processes.STOP_SIGNALS:
            is_told = True
            processes.send([pid], number)


def _become_supervisor(words: Sequence[str]) -> None:
    """Be a supervisor in this forked process; never return. It imports what it needs anew each time."""
    code = exit_codes.FAILED
    try:
        from ddp_hpc.job import supervisor

        code = supervisor.main(words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  nothing may return into the guardian's own code
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_what_lives() -> bool:
    """Kill what a dead supervisor has left; return whether a stop signal came meanwhile.

    Its agent and workers die with it; this is for what they started. A process that waits for a device or a file system
    cannot be killed until that answers, so it is not waited for without end.
    """
    deadline, is_told = time.monotonic() + STUCK_S, False
    while left := psutil.Process().children(recursive=True):
        processes.kill(process.pid for process in left)
        is_told = processes.await_signal(0.1) in processes.STOP_SIGNALS or is_told
        processes.reap()
        if time.monotonic() > deadline:
            numbers = ", ".join(str(process.pid) for process in left)
            sys.stderr.write(f"note: processes {numbers} were killed and have not ended for {STUCK_S:.0f} s\n")
            break
    return is_told


def _pause(seconds: float) -> bool:
    """Wait; return at once, and whether, where a stop signal comes meanwhile."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if processes.await_signal(left) in processes.STOP_SIGNALS:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
