"""Why the processes of a run failed: a report of each, with the fields that decisions rest on; and how those ended that wrote none."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ddp_hpc.base.durable import read_end_of_file, record_text
from ddp_hpc.base.errors import ConfigError, DivergedError, RanksDifferError, text_of
from ddp_hpc.base.exit_codes import signal_name, signal_of
from ddp_hpc.base.patience import ask_once
from ddp_hpc.base.processes import host_name
from ddp_hpc.base.record import try_read_record, write_record
from ddp_hpc.run.run_dir.error_fingerprint import affected_entity
from ddp_hpc.run.run_dir.paths import RunDir

Phase = Literal["", "starting", "joining", "building", "training"]
"""What a worker was doing: not known; importing; joining the process group; building the recipe; all that follows, such as
restoring, training and saving."""

HangKind = Literal["", "behind", "different", "network", "link", "crashed"]
"""Of a hang: the ranks wait for one of them (or for one that has crashed), are in different calls, or wait in the same one; `link`:
the network between nodes is proved not to carry. Empty where nothing shows it."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """Why a process failed, written by that process, its agent or the supervisor."""

    rank: int
    """-1 for an agent, and for a hang for which no rank can be named."""
    host: str
    at: float
    step: int = 0
    exception: str
    """Type and message. For people: decisions rest on the fields below."""
    log: str
    """Where its output is."""
    traceback: str = ""
    is_input_error: bool = False
    """The input is invalid (exit code 2)."""
    is_secondary: bool = False
    """The worker failed because another one had: it lost the connection."""
    is_diverged: bool = False
    """The losses or weights are not finite."""
    ranks_differ: bool = False
    """The ranks did not have equal weights."""
    signal: int | None = None
    """The signal that killed it, where its agent did not send it."""
    is_hardware: bool = False
    """A device, or the library that drives it, has failed."""
    is_code_error: bool = False
    """A signal killed it because a device reported an error of the code."""
    of_script: bool = False
    """A user's script failed, whose step is not known."""
    phase: Phase = ""
    exception_type: str = ""
    """Name of the exception's class, where one ended the process."""
    exit_code: int | None = None
    """What a user's script exited with, where no exception of it was seen."""
    memory_ran_out: str | bool = ""
    """Whose, where the kernel killed a process in this rank's cgroup for it, and SIGKILL ended this rank; older versions wrote only that."""
    is_hang: bool = False
    """The supervisor's report of a hang; `rank` is the one that the others wait for."""
    entity: str = ""
    """The sample or the file that the exception concerns, where the process knew."""
    entity_version: str = ""
    """Size and time of that file; of a sample that is proved to last, size and hash of its file."""
    may_recover: bool = True
    """Whether another attempt may get past it; false only where that process has proved the opposite."""
    place: str = ""
    """`file.py in function`, where the exception was raised."""
    hang_kind: HangKind = ""
    hang_detail: str = ""
    """The same as a sentence, with ranks, collectives and lines of code."""

    @property
    def is_plain(self) -> bool:
        """Whether its message says all, without type, rank and traceback."""
        return self.is_input_error or self.is_diverged or self.ranks_differ


def make_failure(error: BaseException, *, rank: int, log: Path, phase: Phase = "") -> WorkerFailure:
    """Return the report of a process that ends because of `error`, which its caller has just caught."""
    import traceback  # late: only a process that fails pays for it

    is_plain = isinstance(error, ConfigError | DivergedError | RanksDifferError)  # clear without the type
    affected = affected_entity(error)
    return WorkerFailure(
        rank=rank,
        host=host_name(),
        at=time.time(),
        exception=text_of(error) if is_plain else f"{type(error).__name__}: {text_of(error)}",
        log=str(log),
        traceback="".join(traceback.format_exception(error)),
        is_input_error=isinstance(error, ConfigError),
        is_diverged=isinstance(error, DivergedError),
        ranks_differ=isinstance(error, RanksDifferError),
        is_hardware=is_hardware_error(error),
        phase=phase,
        exception_type=type(error).__name__,
        entity=affected.entity,
        entity_version=affected.version,
        may_recover=affected.may_recover,
        place=affected.place,
    )


_LOST_CONNECTION_TEXTS = (
    *("DistNetworkError", "Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe"),
    # NCCL's, and those of its watchdog, where the error of another rank reaches this one
    *("remote process exited or there was a network error", "Connection closed by remote peer"),
    *("NCCL communicator was aborted", "Watchdog caught collective operation timeout"),
    *("socketStartConnect: Connect to", "socketPollConnect", "NET/IB: Got completion from peer"),
    *("SocketProgressOpt: Call to", "socketProgressOpt: Call to"),
)
_STORE_ERROR_TEXTS = ("The server socket has failed to listen", "(gai error:")
"""The store's own errors before it has met any other rank: its port is in use, or the address has no name."""
_OTHER_ERROR = re.compile(r"(\[\w+\]:? *)?(?!RuntimeError|torch\.|Dist|nccl)[\w.]*(Error|Exception|Timeout)\b")
"""The beginning of an exception that PyTorch does not raise for another rank: a storage's or a web service's connection may break, too."""
_DEVICE_TEXTS = ("CUDA error", "Cuda failure", "HIP error", "ECC error", "cuDNN error")
_CODE_ERROR_TEXTS = (
    *("device-side assert triggered", "invalid device ordinal", "invalid argument", "invalid configuration argument"),
    *("invalid resource handle", "invalid device function", "no kernel image is available", "out of memory"),
    *("operation not permitted", "operation not supported", "_STATUS_ALLOC_FAILED", "_STATUS_INVALID_VALUE"),
    *("_STATUS_BAD_PARAM", "_STATUS_NOT_SUPPORTED", "Duplicate GPU detected"),
)
"""Texts of errors of a device that are the code's, or the configuration's: a healthy device reports them on each node. A memory
access that was illegal is not among them, as a broken device causes it, too."""


def is_lost_connection(text: str) -> bool:
    """Tell whether an exception's text, with its type, says that another rank is gone: gloo, NCCL and the store say so."""
    is_other = any(phrase in text for phrase in _STORE_ERROR_TEXTS) or _OTHER_ERROR.match(text)
    return not is_other and any(phrase in text for phrase in _LOST_CONNECTION_TEXTS)


def is_hardware_error(error: BaseException) -> bool:
    """Tell whether an exception says that a device, or the library that drives it, has failed.

    PyTorch has a type for the device's errors since 2.8, `torch.AcceleratorError`; before, and for NCCL and cuDNN still, it
    raises RuntimeError or a subclass that other errors share, and only C++'s text tells them apart. By name, as only workers
    import torch.
    """
    if not isinstance(error, RuntimeError):
        return False
    is_of_device = type(error).__name__ == "AcceleratorError" or any(text in text_of(error) for text in _DEVICE_TEXTS)
    return is_of_device and not _is_code_error(text_of(error))


def _is_code_error(text: str) -> bool:
    return any(phrase in text for phrase in _CODE_ERROR_TEXTS)


_WATCHDOG_TEXTS = ("watchdog thread terminated with exception: ", "Watchdog caught collective operation timeout")
_LOG_END_BYTES = 64 * 1024
"""NCCL's watchdog writes why it aborts its process; the frames of C++ and Python follow."""


def _watchdog_message(log: Path) -> str:
    """Return what NCCL's watchdog wrote before it aborted its process; empty where it did not."""
    with suppress(OSError):
        lines = read_end_of_file(log, _LOG_END_BYTES)[1].decode("utf-8", errors="replace").splitlines()
        return "\n".join(line for line in lines if any(text in line for text in _WATCHDOG_TEXTS))
    return ""


def write_failure(path: Path, failure: WorkerFailure) -> None:
    """Write a report to `path`, which is `RunDir.rank_error` or `RunDir.agent_error` of the attempt.

    Where the disk does not take it, the process ends with its own exit code all the same.
    """
    with suppress(OSError):
        write_record(path, failure, indent=1)


def report_failed_start(path: Path, error: BaseException, *, rank: int, log: Path) -> None:
    """Print and write the error of a process that failed before its worker began; `rank` is -1 for an agent."""
    failure = make_failure(error, rank=rank, log=log, phase="starting")
    sys.stderr.write(f"error: {error}\n" if failure.is_input_error else failure.traceback)
    write_failure(path, failure)


def report_killed(path: Path, number: int, *, rank: int, log: Path, memory_ran_out: str = "") -> None:
    """Write that a signal ended a worker."""
    by_kernel = (
        f"the memory {memory_ran_out} ran out, and the kernel killed a process: use fewer workers or loader processes; on Slurm, `resources.mem_gb` asks for more"
        if memory_ran_out
        else "the kernel does that when memory runs out; on Slurm, `resources.mem_gb` asks for more"
    )
    hint = by_kernel if number == signal.SIGKILL else f"its log may say why: {log}"
    name = signal_name(number) or f"signal {number}"
    watchdogs = _watchdog_message(log) if number == signal.SIGABRT else ""
    failure = WorkerFailure(
        rank=rank,
        host=host_name(),
        at=time.time(),
        exception=f"killed by {name} ({hint})",
        log=str(log),
        signal=number,
        memory_ran_out=memory_ran_out if number == signal.SIGKILL else "",
        is_secondary=is_lost_connection(watchdogs),
        is_code_error=_is_code_error(watchdogs),
    )
    write_failure(path, failure)


def silent_end_message(code: int, step_code: int | None) -> str:
    """Describe how workers ended where none of them, and no agent, has written a report.

    `code` is what their exit codes mean together, `step_code` what the command that started them ended with.
    """
    number = signal_of(step_code or 0)
    if not number:
        return (
            f"the workers exited with code {code} and wrote no error report; read their logs (`ddp-hpc logs RUN --all`)"
        )
    is_kill = number == signal.SIGKILL
    sender = (
        "a user or Slurm sent it, or the kernel did because memory ran out"
        if is_kill
        else "they crashed, or a user or Slurm sent it"
    )
    return (
        f"signal {number} ({signal_name(number)}) killed all workers before they could write an error report: "
        f"{sender}. Read the kernel's log (`dmesg`), or on Slurm the output of `sacct -j JOB --format=State,ExitCode,MaxRSS`"
        f"{'; `resources.mem_gb` asks for more memory' if is_kill else ''}"
    )


def announced_phase(run: RunDir, attempt: int) -> Phase:
    """Return the phase in which rank zero last announced a long silence (`Watchdog.allow`), if it is still in it."""
    path = run.allowance(attempt)
    text = ask_once(path, lambda: record_text(path) if path.exists() else "", unknown="")
    return next((phase for phase in get_args(Phase) if phase == text), "")


def read_failures(run: RunDir, attempt: int) -> Sequence[WorkerFailure]:
    """Return the reports of an attempt, the first cause first: a lost connection follows from another failure."""
    folder = run.attempt_errors(attempt)
    paths: list[Path] = ask_once(folder, lambda: sorted(folder.glob("*.json")), unknown=[])
    found = (try_read_record(path, WorkerFailure) for path in paths)
    return sorted(filter(None, found), key=lambda failure: (failure.is_secondary, failure.at))


def first_failure(run: RunDir, attempt: int) -> WorkerFailure | None:
    """Return the first to fail, or None without a report."""
    return next(iter(read_failures(run, attempt)), None)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a process of a rank ended that nobody had asked to end: for `why`, where that process could write no error report.

    No decision rests on it: Slurm and a launcher end processes by the same signals when they stop a whole run.
    """

    code: int
    """Its exit code; minus the number of the signal that killed it."""
    at: float


def write_rank_end(run: RunDir, attempt: int, rank: int, code: int) -> None:
    """Record an end that is not recorded yet; without the record, `why` says less."""
    path = run.rank_end(attempt, rank)
    with suppress(OSError):
        if not path.exists():
            write_record(path, RankEnd(code=code, at=time.time()), durable=False)


def read_rank_ends(run: RunDir, attempt: int, ranks: Sequence[int]) -> Mapping[int, RankEnd]:
    """Return the ends that are recorded of these ranks."""
    found = {rank: try_read_record(run.rank_end(attempt, rank), RankEnd) for rank in ranks}
    return {rank: end for rank, end in found.items() if end is not None}
