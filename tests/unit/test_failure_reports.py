"""What processes that failed leave behind: in which order it is read, and the fields that decisions rest on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_hpc.errors import ConfigError, DivergedError
from ddp_hpc.run_dir.failure_reports import (
    allowed_phase,
    failure_of,
    first_failure,
    is_of_hardware,
    read_failures,
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
    failure = failure_of(OSError("no such disk"), rank=2, log=run.rank_log(0, 2), phase="training")

    write_failure(run.rank_error(0, 2), failure)

    assert first_failure(run, 0) == failure
    assert failure.exception == "OSError: no such disk"


def test_invalid_input_and_divergence_are_said_without_a_type() -> None:
    refused, diverged = (
        failure_of(error, rank=0, log=Path("log")) for error in (ConfigError("no GPU"), DivergedError("loss is nan"))
    )

    assert (refused.exception, refused.is_input_error, refused.is_diverged) == ("no GPU", True, False)
    assert (diverged.exception, diverged.is_input_error, diverged.is_diverged) == ("loss is nan", False, True)


class AcceleratorError(RuntimeError):
    """As PyTorch names it since 2.8."""


@pytest.mark.parametrize(
    ("error", "is_hardware"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited"), True),
        (AcceleratorError("HIP error: an illegal memory access was encountered"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (ValueError("my own check: CUDA error"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=["device", "cuDNN", "NCCL", "by type", "shapes", "memory", "another's text", "no error"],
)
def test_an_error_of_the_device_is_told_from_an_error_of_the_code(error: BaseException, *, is_hardware: bool) -> None:
    assert is_of_hardware(error) is is_hardware
    assert failure_of(error, rank=0, log=Path("log")).is_hardware is is_hardware


@pytest.mark.parametrize(("text", "phase"), [("building", "building"), ("", ""), ("a later version's word", "")])
def test_what_rank_zero_was_allowed_to_be_silent_for_is_known(text: str, phase: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert allowed_phase(run, 0) == ""
    run.allowance(0).parent.mkdir(parents=True)
    run.allowance(0).write_text(text)

    assert allowed_phase(run, 0) == phase
