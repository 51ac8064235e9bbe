"""What the exit codes of this program's processes mean, alone and together."""

from __future__ import annotations

from collections.abc import Iterable
from signal import Signals

FINISHED = 0
"""All steps are done and committed."""
FAILED = 1
"""Something broke."""
REFUSED = 2
"""The configuration or the input is invalid; the same again fails in the same way."""
STOPPED = 99
"""All that was trained is in a checkpoint, and there is more to do: start again (the code that batch systems use for it)."""
DIVERGED = 93
"""The losses or the weights are not finite any more: no checkpoint of them is committed, and no attempt is made again. If the losses of some
ranks alone are not finite, the first such attempt ends with `RANKS_DIFFER`."""
RANKS_DIFFER = 92
"""The ranks do not have equal weights: no checkpoint of them is committed, and the run goes on from the newest one."""
NOT_SAVED = 91
"""Saves have failed for longer than `checkpoint.max_failing_s`, the last one on all ranks: no attempt is made again."""
RESTART_SUPERVISOR = 94
"""From a supervisor to its guardian: it could not work and has decided nothing, so another one is to try."""
GAVE_UP = 95
"""From a supervisor to its guardian: it has decided that the run has failed (`FAILED`), so it is not started again."""
STOPPED_BEFORE_START = 96
"""A stop signal came before the workers had installed their handlers; no training had begun."""
FENCED = 97
"""Another attempt owns the run now; this one has written nothing more."""
PORT_TAKEN = 98
"""Another process listens at the port where the ranks were to meet: start again with another port."""

GOOD_CODES = frozenset({FINISHED, STOPPED})
"""Codes of a worker that has done what was asked of it."""
_RANK_ZERO_DECIDES = frozenset({STOPPED, STOPPED_BEFORE_START, PORT_TAKEN, FENCED, DIVERGED, RANKS_DIFFER, NOT_SAVED})
"""Codes of rank zero that count even if others fail after it: its commit stays valid."""
_STRONGEST_FIRST = (FENCED, REFUSED, DIVERGED, RANKS_DIFFER, NOT_SAVED)
"""Codes that count for all where one has them."""

DECISIONS = (FINISHED, REFUSED, GAVE_UP, STOPPED_BEFORE_START, FENCED, STOPPED)
"""Codes of a supervisor that has decided what follows. After any other end, such as a death by a signal, nothing is decided,
and its guardian starts another one."""
GUARD_RESTART_PAUSES_S = (1, 2, 5, 15, 60)
"""How long a guardian waits before it starts the supervisor for the second time, the third, and so on."""


def combined_exit_code(codes: Iterable[int], *, rank_zero: int | None = None) -> int:
    """Return what the codes of several workers, or of several nodes, mean together.

    `rank_zero` is the code of rank zero, or of its node, where the caller knows that the others follow it.
    """
    known = set(codes)
    if rank_zero in _RANK_ZERO_DECIDES:
        return rank_zero
    for code in _STRONGEST_FIRST:
        if code in known:
            return code
    if not known <= GOOD_CODES:
        return FAILED
    return STOPPED if STOPPED in known else FINISHED


def signal_name(number: int) -> str:
    """Return `SIGKILL`; empty where Python has no name, as for the real-time signals between SIGRTMIN and SIGRTMAX."""
    return Signals(number).name if number in set(Signals) else ""


def signal_of(code: int) -> int:
    """Return the number of the signal that ended a process, by its exit code; 0 where that stands for none with a name.

    Python returns minus the number (https://docs.python.org/3/library/subprocess.html#subprocess.Popen.returncode), shells and
    srun 128 plus it. 255 is an error of a program: of Apptainer and ssh, for instance.
    """
    number = -code if code < 0 else code - 128
    return number if signal_name(number) else 0


def describe_end(code: int) -> str:
    """Describe how a supervisor ended that decided nothing."""
    number = signal_of(code)
    return (
        f"was killed by signal {number} ({signal_name(number)})" if number else f"exited unexpectedly with code {code}"
    )
