"""Commands that run as new processes: the exception of a program stands in its log, and other programs print more after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.run.run_dir.ledger import Cause
from ddp_hpc.watch.why.lines import number_of, tail
from ddp_hpc.watch.why.verdict import verdict_of
from tests.unit.test_why_verdict import CAUGHT, RESET, USERS, WATCHDOG, facts, raised, report

NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
OOM = USERS.replace("KeyError: 'no such key'", NO_MEMORY)
ECC = USERS.replace(
    "KeyError: 'no such key'", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
)
ABORTED = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1."
TERMINATE = "terminate called after throwing an instance of 'c10::Error'\n  what():  {0}\nException raised from c10_cuda_check_implementation at x.cpp:44 (most recent call first):\n"
ACCELERATE = """Traceback (most recent call last):
  File "/venv/bin/accelerate", line 8, in <module>
    sys.exit(main())
  File "/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 763, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/venv/bin/python', 'train.py']' returned non-zero exit status 1.
"""
TORCHRUN = """Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 277, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_14:35:11
  exitcode  : 1 (pid: 1768)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""  # noqa: W291  torchrun prints it
AFTER = {
    "NCCL": "node1:1768:1801 [0] NCCL INFO comm 0x55d0 rank 0 nranks 2 cudaDev 0 busId 7000 - Abort COMPLETE\n",
    "conda": "\nERROR conda.cli.main_run:execute(125): `conda run python train.py` failed. (See above for error)\n",
    "time": "\nreal\t0m3.114s\nuser\t0m2.871s\nsys\t0m0.206s\n",
    "make": "make: *** [Makefile:7: train] Error 1\n",
    "echo": "the training has failed\n",
    "accelerate": ACCELERATE,
    "torchrun": TORCHRUN,
    "torchrun in time": TORCHRUN + "\nreal\t0m3.114s\n",
}


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize(("text", "failure"), [(OOM, "gpu-memory"), (USERS, "user-exception")])
def test_the_exception_of_a_program_counts_whatever_other_programs_print_after_it(
    text: str, failure: str, after: str
) -> None:
    found = verdict_of(facts(report(1, exit_code=2 if "make" in after else 1), logs={1: text + after}))

    assert (found.failure, found.basis, found.place) == (failure, "log", "/home/me/model.py:31 in forward")
    assert found.detail == text.splitlines()[-1]


@pytest.mark.parametrize(
    ("log", "failure"),
    [
        (CAUGHT + "using the default instead\n", "exit-code"),
        (OOM + "step 7\n" * 61, "exit-code"),
        (OOM + "again with half of the batch\n" + USERS, "user-exception"),
        (OOM + "again with half of the batch\n" + USERS + AFTER["time"], "user-exception"),
        (CAUGHT + "train.py: error: unrecognized arguments: --foo\n", "arguments"),
        (USERS + "/usr/bin/python3: No module named train\n", "import"),
        (ACCELERATE, "user-exception"),
        (OOM + "step 7\n" * 60 + ACCELERATE, "user-exception"),
    ],
)
def test_a_traceback_that_a_program_printed_and_survived_is_not_called_its_end(log: str, failure: str) -> None:
    assert verdict_of(facts(report(1, exit_code=1), logs={1: log})).failure == failure
    assert verdict_of(facts(logs={1: OOM + "step 7\n"})).failure == "unknown"  # nothing says that it has failed


@pytest.mark.parametrize(
    ("log", "failure"),
    [
        (ECC + TERMINATE.format("CUDA error: uncorrectable ECC error encountered"), "gpu-fault"),
        (TERMINATE.format("CUDA error: uncorrectable ECC error encountered"), "gpu-fault"),
        (ECC + TERMINATE.format("invalid device pointer: 0x7ff4"), "gpu-fault"),
        (ECC + "train.sh: line 3: 1768 Aborted (core dumped) python train.py\n", "gpu-fault"),
        (USERS + TERMINATE.format("invalid device pointer: 0x7ff4"), "user-exception"),
        (CAUGHT + "step 7\n" + TERMINATE.format("invalid device pointer: 0x7ff4"), "native-crash"),
        (
            WATCHDOG + "\n" + CAUGHT.replace("KeyError: 'no such key'", ABORTED) + TERMINATE.format("oops"),
            "collective-timeout",
        ),
        (TERMINATE.format("NCCL error: remote process exited or there was a network error"), "unknown"),  # a peer's
    ],
)
@pytest.mark.parametrize("end", [{"signal": 6}, {"exit_code": 134}])
def test_a_crash_that_follows_from_an_exception_is_called_by_that(end: dict[str, Any], log: str, failure: str) -> None:
    assert verdict_of(facts(report(1, **end), logs={1: log})).failure == failure


def test_progress_bars_of_more_bytes_than_are_read_do_not_hide_the_traceback_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    bars = "".join(f"\r{number % 100:3}%|####      | {number}/99999 [00:07<00:09, 9.31it/s]" for number in range(9999))
    path.write_text(f"hello\n{bars}{OOM}")

    lines = tail(path)
    found = verdict_of(replace(facts(report(0, exit_code=1)), logs={0: lines}))

    assert (found.failure, found.detail, found.place) == ("gpu-memory", NO_MEMORY, "/home/me/model.py:31 in forward")
    assert number_of(lines[0]) == 2
    path.write_bytes(b"a line of Windows\r\n" * 20)
    assert {line.text for line in tail(path, 199)} == {"a line of Windows"}


def test_a_known_error_that_a_function_may_have_caught_is_the_cause_only_where_no_rank_and_no_end_says_a_clearer_one() -> (
    None
):
    text = CAUGHT.replace("KeyError: 'no such key'", NO_MEMORY) + "again with half of the batch\n"
    caught = report(1, exit_code=1)

    assert verdict_of(facts(caught, logs={1: text})).failure == "gpu-memory"
    assert verdict_of(facts(caught, raised(0, at=9.0), logs={1: text})).failure == "user-exception"
    assert verdict_of(facts(caught, logs={1: text}, cause=Cause.TIME_LIMIT)).failure == "time-limit"


def test_an_error_of_a_lost_connection_in_a_shells_log_names_no_root() -> None:
    lost = USERS.replace("KeyError: 'no such key'", RESET) + AFTER["time"]

    found = verdict_of(
        facts(report(0, exit_code=1), report(1, exit_code=1, at=9.0), logs={0: lost, 1: OOM + AFTER["echo"]})
    )

    assert (found.failure, found.rank, found.num_cascades) == ("gpu-memory", 1, 1)
