"""What processes that failed leave behind: in which order it is read, and the fields that decisions rest on."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_hpc.base.durable import read_json
from ddp_hpc.base.errors import ConfigError, DivergedError
from ddp_hpc.run.run_dir.failure_reports import (
    announced_phase,
    first_failure,
    is_hardware_error,
    is_lost_connection,
    make_failure,
    read_failures,
    report_killed,
    write_failure,
)
from tests.made_run import add_failure, make_run


def test_the_first_to_fail_comes_before_those_who_died_of_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lost_first = add_failure(run, rank=0, at=1.0, is_secondary=True)
    cause = add_failure(run, rank=1, at=2.0)
    later = add_failure(run, rank=2, at=3.0)

    failures = read_failures(run, 0)

    assert failures == [cause, later, lost_first]
    assert first_failure(run, 0) == cause


def test_failures_are_those_of_one_attempt_and_unreadable_ones_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_failure(run, 0, rank=0)
    failure = add_failure(run, 1, rank=3)
    run.rank_error(1, 4).write_text('{"rank": 4')

    failures = read_failures(run, 1)

    assert failures == [replace(failure)]
    assert first_failure(run, 2) is None


def test_a_report_of_an_older_or_newer_version_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    old = {"rank": 1, "host": "node1", "at": 2.0, "step": 7, "exception": "killed by SIGKILL", "log": "rank-1.log"}
    for rank, record in enumerate([old, {**old, "at": 3.0, "signal": 9, "colour": "blue"}]):
        path = run.rank_error(0, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))

    older, newer = read_failures(run, 0)

    assert (older.signal, older.is_hardware, older.phase) == (None, False, "")
    assert newer == replace(older, at=3.0, signal=9)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    failure = make_failure(OSError("no such disk"), rank=2, log=run.rank_log(0, 2), phase="training")

    write_failure(run.rank_error(0, 2), failure)

    assert first_failure(run, 0) == failure
    assert failure.exception == "OSError: no such disk"


def test_a_report_that_the_disk_does_not_take_changes_no_exit_code(tmp_path: Path) -> None:
    (tmp_path / "errors").touch()  # where the directory should be
    failure = make_failure(DivergedError("NaN"), rank=0, log=tmp_path / "log")

    write_failure(tmp_path / "errors" / "rank-0.json", failure)

    assert not (tmp_path / "errors" / "rank-0.json").exists()


def test_invalid_input_and_divergence_are_said_without_a_type() -> None:
    refused, diverged = (
        make_failure(error, rank=0, log=Path("log")) for error in (ConfigError("no GPU"), DivergedError("loss is nan"))
    )

    assert (refused.exception, refused.is_input_error, refused.is_diverged) == ("no GPU", True, False)
    assert (diverged.exception, diverged.is_input_error, diverged.is_diverged) == ("loss is nan", False, True)


IN_NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3384, "
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
SYSTEM = (
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n"
)
NCCL_LOST = (
    (
        f"{IN_NCCL}remote process exited or there was a network error, NCCL version 2.21.5\n{REMOTE}"
        "socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer"
    ),
    (
        f"{IN_NCCL}remote process exited or there was a network error, NCCL version 2.14.3\n{REMOTE}"
        "NET/IB : Got completion from peer 10.0.0.2<42> with error 12, opcode 0, len 0, vendor err 129"
    ),
    (
        f"{IN_NCCL}internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\n"
        "Net : Connection closed by remote peer node2<50260>"
    ),
    (
        f"{IN_NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6\n{SYSTEM}"
        "socketStartConnect: Connect to 10.0.0.2<52822> failed : No route to host"
    ),
    "NCCL communicator was aborted on rank 1.",
    (
        "NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800324 milliseconds before timing out."
    ),
)
"""What a healthy rank's NCCL says where another rank is gone."""
NCCL_CUDA = (
    (
        f"{IN_NCCL}unhandled cuda error, NCCL version 2.28.9\nLast error:\nCuda failure 214 'uncorrectable ECC error'",
        True,
    ),
    (f"{IN_NCCL}unhandled cuda error, NCCL version 2.28.9\nLast error:\nCuda failure 2 'out of memory'", False),
    (f"{IN_NCCL}invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000", False),
)


@pytest.mark.parametrize("text", NCCL_LOST)
def test_nccl_says_of_another_rank_that_it_is_gone(text: str) -> None:
    assert is_lost_connection(f"DistBackendError: {text}")


@pytest.mark.parametrize(
    "text",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "[rank0]: BrokenPipeError: [Errno 32] Broken pipe",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "botocore.exceptions.EndpointConnectionError: Connection reset by peer",
    ],
)
def test_a_connection_to_something_else_than_a_rank_is_not_one_to_a_rank(text: str) -> None:
    assert not is_lost_connection(text)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:48712",
        "[rank0]: torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistBackendError: socketProgress: Connection closed by remote peer",
        "socketPollConnect: connect returned Connection refused, exceeded error retry count",
    ],
)
def test_a_connection_to_a_rank_is_one_with_each_beginning_of_its_line(text: str) -> None:
    assert is_lost_connection(text)


@pytest.mark.parametrize("text", [text for text, _ in NCCL_CUDA])
def test_an_error_of_this_rank_is_no_lost_connection(text: str) -> None:
    assert not is_lost_connection(f"DistBackendError: {text}")


@pytest.mark.parametrize(
    "text",
    [
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE",
        "The IPv4 network addresses of (node7, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
    ],
)
def test_a_store_that_cannot_begin_has_lost_no_connection(text: str) -> None:
    assert not is_lost_connection(f"DistNetworkError: {text}")


OF_WATCHDOG = (
    "[rank1]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:2108] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog "
    "thread terminated with exception: "
)


@pytest.mark.parametrize(
    ("log", "is_secondary", "is_code_error"),
    [
        (
            f"{OF_WATCHDOG}NCCL error: remote process exited or there was a network error, NCCL version 2.21.5",
            True,
            False,
        ),
        (
            (
                "[rank1]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: "
                "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE) ran for 600060 milliseconds before timing out."
            ),
            True,
            False,
        ),
        (f"{OF_WATCHDOG}CUDA error: device-side assert triggered", False, True),
        (f"{OF_WATCHDOG}CUDA error: uncorrectable ECC error encountered", False, False),
        ("the user prints: Connection reset by peer, out of memory", False, False),
    ],
)
def test_why_nccls_watchdog_has_aborted_a_rank_is_read_from_the_ranks_log(
    log: str, *, is_secondary: bool, is_code_error: bool, tmp_path: Path
) -> None:
    path = tmp_path / "rank-1.log"
    path.write_text(
        f"{log}\nframe #0: c10::Error::Error(c10::SourceLocation, std::string)\nFatal Python error: Aborted\n"
    )

    for number in (signal.SIGABRT, signal.SIGSEGV):
        report_killed(tmp_path / f"{number}.json", number, rank=1, log=path)

    aborted, crashed = (read_json(tmp_path / f"{number}.json") or {} for number in (signal.SIGABRT, signal.SIGSEGV))
    assert (aborted["is_secondary"], aborted["is_code_error"]) == (is_secondary, is_code_error)
    assert (crashed["is_secondary"], crashed["is_code_error"]) == (False, False)


class AcceleratorError(RuntimeError):
    """As PyTorch names it since 2.8."""


@pytest.mark.parametrize(
    ("error", "is_hardware"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (AcceleratorError("HIP error: an illegal memory access was encountered"), True),
        (AcceleratorError("CUDA error: unspecified launch failure"), True),
        (AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
        (AcceleratorError("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in"), False),
        (AcceleratorError("CUDA error: invalid device ordinal"), False),
        (AcceleratorError("CUDA error: invalid argument"), False),
        (AcceleratorError("CUDA error: no kernel image is available for execution on the device"), False),
        (AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        *((torch.distributed.DistBackendError(text), is_hardware) for text, is_hardware in NCCL_CUDA),
        *((torch.distributed.DistBackendError(text), False) for text in NCCL_LOST),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (ValueError("my own check: CUDA error"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_an_error_of_the_device_is_told_from_an_error_of_the_code(error: BaseException, *, is_hardware: bool) -> None:
    assert is_hardware_error(error) is is_hardware
    assert make_failure(error, rank=0, log=Path("log")).is_hardware is is_hardware


@pytest.mark.parametrize(("text", "phase"), [("building", "building"), ("", ""), ("a later version's word", "")])
def test_what_rank_zero_was_allowed_to_be_silent_for_is_known(text: str, phase: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert announced_phase(run, 0) == ""
    run.allowance(0).parent.mkdir(parents=True)
    run.allowance(0).write_text(text)

    assert announced_phase(run, 0) == phase
