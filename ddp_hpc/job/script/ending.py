"""What the end of a script's process means. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ddp_hpc.base import exit_codes
from ddp_hpc.base.processes import INTERRUPTIONS, STOP_SIGNALS

_OF_SHELL = 128
"""Shells, and programs that imitate them, exit with this plus the number of the signal that ended them."""


def meaning(code: int, *, stop_signal: int | None, resume_codes: Collection[int]) -> int:
    """Return the worker's exit code for a script's, which is minus the number of a signal; `stop_signal` is what it was sent.

    A script that ends with 0 after a stop signal has obeyed, or has finished at that moment. Nothing tells the two apart, so it
    is started again, and a script that had finished then ends at once.
    """
    if code in resume_codes:
        return exit_codes.STOPPED
    if stop_signal is not None and (code == 0 or is_of_stop_signal(code, stop_signal)):
        return exit_codes.STOPPED
    return exit_codes.FINISHED if code == 0 else exit_codes.FAILED


def is_of_stop_signal(code: int, *sent: int) -> bool:
    """Tell whether a script's exit code is the end by a stop signal; of a job step, Slurm and srun may signal all processes."""
    signals = {*sent, *STOP_SIGNALS, *INTERRUPTIONS}
    return -code in signals or code - _OF_SHELL in signals
