"""The guardian of a supervisor on this machine: starts it, waits, and starts another one if it dies before it decided.

    python -m ddp_hpc.job.guardian RUN_DIR

On Slurm, the shell of the job script is the guardian. This process only waits: it holds the run's lock, so that the run
stays locked between two supervisors, and passes stop signals on. If the guardian dies itself, the supervisor goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger, record_end
from ddp_hpc.run.run_dir.paths import RunDir

KILL_PATIENCE_S = 60.0
"""How long to wait for processes that were killed."""
DEATHS_RESET_S = 600.0
"""After a supervisor that ran for so long, deaths are counted from one again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start supervisors until one decides what follows; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.guardian", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--import-path", action="append", default=[], help="where workers find the user's code; for the supervisor"
    )
    arguments = parser.parse_args(argv)
    # Blocked signals stay pending until `await_signal` takes them, so none is lost between two supervisors (signal(7)).
    processes.block_awaited_signals()
    processes.adopt_orphans()  # so that `_kill_leftovers` finds what a dead supervisor has started (prctl(2))
    run = RunDir(arguments.run)
    try:
        # The supervisors inherit this descriptor, so the run stays locked until the guardian and all of them have exited.
        lock_fd = processes.take_lock(run.lock, patience_s=ownership.LOCK_PATIENCE_S)
        since = ownership.next_attempt(run)
    except OSError as error:
        sys.stderr.write(
            f"error: ddp-hpc cannot use the run's directory {run.path}: {error}. Repair that, and submit {run.name} again.\n"
        )
        return exit_codes.FAILED
    if lock_fd is None:
        sys.stderr.write(f"error: {ownership.busy_message(run)}\n")
        return exit_codes.REFUSED
    options = [str(run.path), "--guarded", f"--lock-fd={lock_fd}", f"--since={since}"]
    options += [f"--import-path={path}" for path in arguments.import_path]
    return _run_supervisors(run, options, since=since, lock_fd=lock_fd)


def _run_supervisors(run: RunDir, options: Sequence[str], *, since: int, lock_fd: int) -> int:
    """Start supervisors until one decides, or too many have died in a row."""
    num_deaths, is_stop_asked, after = 0, False, 0
    while True:
        began = time.monotonic()
        more = [*(["--stop-requested"] if is_stop_asked else []), *([f"--after={after}"] if after else [])]
        after, was_signalled = _run_supervisor([*options, *more], new_with_lock=lock_fd if after else None)
        is_stop_asked = is_stop_asked or was_signalled
        if after in exit_codes.DECISIONS:  # processes that the user's code left running, such as an upload, may go on
            return exit_codes.FAILED if after == exit_codes.GAVE_UP else after
        is_stop_asked = _kill_leftovers() or is_stop_asked
        if _is_cancelled(run, since):
            return exit_codes.FAILED
        num_deaths = 1 if time.monotonic() - began > DEATHS_RESET_S else num_deaths + 1
        if num_deaths > len(exit_codes.GUARD_RESTART_PAUSES_S):
            reason = f"ddp-hpc's supervisor process {exit_codes.describe_end(after)}, {num_deaths} times in a row"
            sys.stderr.write(f"error: {reason}, so ddp-hpc does not start it again. Submit {run.name} again.\n")
            _record_last_end(run, since, reason)
            return exit_codes.FAILED
        pause_s = exit_codes.GUARD_RESTART_PAUSES_S[num_deaths - 1]
        sys.stderr.write(
            f"note: ddp-hpc's supervisor process {exit_codes.describe_end(after)}; it starts again in {pause_s} s\n"
        )
        is_stop_asked = _is_signalled_within(pause_s) or is_stop_asked


def _record_last_end(run: RunDir, since: int, reason: str) -> None:
    """Record in the ledger that no supervisor goes on, if the newest attempt is of this guardian, from `since` on."""
    try:
        newest = Ledger.read(run).newest
        if newest is None or newest.attempt < since or (newest.ending is not None and not newest.next):
            return
        then = "ddp-hpc does not start it again, so submit the run again"
        end = End(
            ending=Ending.FAILED,
            exit_code=exit_codes.FAILED,
            reason="; ".join(filter(None, [newest.reason, reason, then])),
            cause=newest.cause or Cause.SUPERVISOR_DIED,
        )
        record_end(run, newest.attempt, end)  # what an earlier line says of it besides, stays
    except OSError as error:
        sys.stderr.write(
            f"note: ddp-hpc could not write to {run.attempts} how the run ended: {error}. Checkpoints are not affected, but "
            "`ddp-hpc status` lacks this end. Check the space and the quota there.\n"
        )


def _is_cancelled(run: RunDir, since: int) -> bool:
    """Tell whether the user has cancelled an attempt of this guardian, from `since` on, by killing its supervisor."""
    try:
        newest = Ledger.read(run).newest
        return newest is not None and newest.attempt >= since and newest.ending == Ending.CANCELLED
    except OSError:  # the next supervisor looks again
        return False


def _run_supervisor(options: Sequence[str], *, new_with_lock: int | None = None) -> tuple[int, bool]:
    """Start a supervisor; return its exit code, once it has ended, and whether a stop signal came meanwhile.

    With `new_with_lock`, a new Python interpreter runs it, which inherits this descriptor.
    """
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_supervisor(options, new_with_lock)
    # Only now, so that workers do not start later; and not when it is needed, as the supervisor may have died because the
    # environment's file system does not answer.
    with suppress(Exception):
        import psutil  # noqa: F401
    is_stop_asked = False
    while True:
        ended = processes.reap_children()
        if pid in ended:
            return ended[pid], is_stop_asked
        number = processes.await_signal(3600.0)
        if number in processes.STOP_SIGNALS:
            is_stop_asked = True
            processes.send_signal([pid], number)


def _become_supervisor(options: Sequence[str], new_with_lock: int | None) -> None:
    """Run a supervisor in this forked process; never return.

    The first one imports its modules into this process, which is fast. One that replaces a dead one gets a new interpreter:
    ddp_hpc may have been upgraded since the guardian started, and the guardian's modules are those of the older version.
    """
    code = exit_codes.FAILED
    try:
        if new_with_lock is not None:
            os.set_inheritable(new_with_lock, True)
            os.execv(sys.executable, [sys.executable, "-m", "ddp_hpc.job.supervisor", *options])  # noqa: S606  no shell is needed
        from ddp_hpc.job import supervisor

        code = supervisor.main(options)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  nothing may return into the guardian's own code
        traceback.print_exc()
    finally:
        os._exit(code)


def _kill_leftovers() -> bool:
    """Kill the processes that a dead supervisor has left; return whether a stop signal came meanwhile.

    The kernel kills the agent and the workers with the supervisor (PR_SET_PDEATHSIG); this is for what they have started.
    """
    try:
        import psutil  # `_run_supervisor` has imported it
    except Exception as error:  # noqa: BLE001  a supervisor that starts matters more
        sys.stderr.write(
            "note: ddp-hpc cannot look for processes that its dead supervisor process left on this node, because psutil cannot "
            f"be imported: {error}. If the next attempt finds a GPU or a port in use, end these processes yourself.\n"
        )
        return False
    # A process in uninterruptible sleep, waiting for a device or an NFS server, does not die of SIGKILL before that answers
    # (state D, proc_pid_stat(5)). So the wait for it ends after KILL_PATIENCE_S.
    deadline, is_stop_asked = time.monotonic() + KILL_PATIENCE_S, False
    while left := psutil.Process().children(recursive=True):
        processes.kill(process.pid for process in left)
        is_stop_asked = processes.await_signal(0.1) in processes.STOP_SIGNALS or is_stop_asked
        processes.reap_children()
        if time.monotonic() > deadline:
            numbers = ", ".join(str(process.pid) for process in left)
            sys.stderr.write(
                f"note: processes {numbers} still exist {KILL_PATIENCE_S:.0f} s after SIGKILL; the run continues without them\n"
            )
            break
    return is_stop_asked


def _is_signalled_within(seconds: float) -> bool:
    """Wait for some seconds, or until a stop signal comes; return whether one came."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if processes.await_signal(left) in processes.STOP_SIGNALS:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
