"""The death of a process that cannot write it down itself, or had no time to: written down for it, or told in words."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from ddp_hpc.durable import make_directories, replace_text
from ddp_hpc.errors import ConfigError
from ddp_hpc.records import WorkerFailure


def report(path: Path, error: BaseException, *, rank: int, log: Path) -> None:
    """Write down what ended a process before its worker began; `rank` is -1 for an agent."""
    text = "".join(traceback.format_exception(error))
    is_input_error = isinstance(error, ConfigError)
    sys.stderr.write(f"error: {error}\n" if is_input_error else text)
    exception = str(error) if is_input_error else f"{type(error).__name__}: {error}"
    _write(path, rank, exception, log, traceback=text, is_input_error=is_input_error)


def report_killed(path: Path, number: signal.Signals, *, rank: int, log: Path) -> None:
    """Write down that a signal ended a worker."""
    hint = " (the kernel does that when memory runs out)" if number == signal.SIGKILL else ""
    _write(path, rank, f"killed by {number.name}{hint}", log)


def silent_end(code: int, step_code: int | None) -> str:
    """Say how workers ended where none of them, and no agent, has written down why.

    `code` is what their exit codes mean together, `step_code` what the command that started them ended with.
    """
    number = _signal_number(step_code)
    if number is None:
        return f"the workers ended with code {code} and left no reason; their logs have what they printed"
    memory = " or memory ran out" if number == signal.SIGKILL else ""
    return (
        f"all workers were killed by signal {number} ({signal.Signals(number).name}) and left no reason: somebody killed "
        f"them{memory}. Look at the kernel's log (`dmesg`), or on Slurm at `sacct -j JOB --format=State,ExitCode,MaxRSS`"
        f"{'; `resources.mem_gb` asks for more memory' if memory else ''}"
    )


def _signal_number(code: int | None) -> int | None:
    """Return the signal that a process ended by; srun and shells say 128 and its number."""
    number = 0 if code is None else -code if code < 0 else code - 128
    return number if number in set(signal.Signals) else None


def _write(  # noqa: PLR0913  a record's fields
    path: Path, rank: int, exception: str, log: Path, *, traceback: str = "", is_input_error: bool = False
) -> None:
    failure = WorkerFailure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        step=0,
        exception=exception,
        log=str(log),
        traceback=traceback,
        is_input_error=is_input_error,
    )
    make_directories(path.parent)
    replace_text(path, json.dumps(asdict(failure), indent=1))
