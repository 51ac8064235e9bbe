"""Verdicts on attempts, from records and logs made by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.run.run_dir.differences import FINITE, NOT_FINITE, Difference
from ddp_hpc.run.run_dir.error_fingerprint import fingerprint, invariant_text, sample_or_file
from ddp_hpc.run.run_dir.failure_reports import HangKind, RankEnd, WorkerFailure
from ddp_hpc.run.run_dir.joined_ranks import MissingRanks
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ending
from ddp_hpc.run.run_dir.network import NetworkFindings, PairFault
from ddp_hpc.watch.why.exceptions import tracebacks, uncaught
from ddp_hpc.watch.why.findings import AttemptFacts
from ddp_hpc.watch.why.lines import LogLine, clean, number_of, tail
from ddp_hpc.watch.why.verdict import verdict_of
from tests.made_run import made_attempt

USERS = """Traceback (most recent call last):
  File "/home/me/train.py", line 57, in <module>
    main()
  File "/home/me/model.py", line 31, in forward
    return self.table[key]
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in __getattr__
    raise AttributeError
KeyError: 'no such key'
"""
CAUGHT = USERS.replace('  File "/home/me/train.py", line 57, in <module>\n    main()\n', "")
"""A traceback begins where its exception was caught: at the top of the program only where no function caught it."""
RESET = "RuntimeError: [../gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.1]:44715"
WATCHDOG = "[rank2]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE) ran for 600060 milliseconds before timing out."
OOM_KILL = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed."


def attempt(cause: Cause | None = Cause.WORKER_CRASHED, **more: Any) -> Attempt:
    return made_attempt(**{"host": "node0", "job_id": "1", "cause": cause, **more})


def report(rank: int, exception: str = "", **more: Any) -> WorkerFailure:
    known = {"host": f"node{rank}", "at": float(rank), "step": 0, "log": "", "exception": exception, **more}
    return msgspec.convert({"rank": rank, **known}, WorkerFailure)


def log(text: str, name: str = "rank.log") -> Sequence[LogLine]:
    lines, offset = [], 0
    for raw in text.splitlines():
        lines.append(LogLine(Path(name), offset, clean(raw)))
        offset += len(raw) + 1
    return lines


def facts(
    *failures: WorkerFailure,
    logs: Mapping[int, str] | None = None,
    console: str = "",
    cause: Cause | None = Cause.WORKER_CRASHED,
    ends: Mapping[int, RankEnd] | None = None,
    **more: Any,
) -> AttemptFacts:
    lines = {rank: log(text, f"rank-{rank}.log") for rank, text in (logs or {}).items()}
    return AttemptFacts(
        attempt=attempt(cause, **more),
        failures=failures,
        logs=lines,
        console=log(console),
        ends=ends or {},
    )


def raised(rank: int, text: str = USERS, **more: Any) -> WorkerFailure:
    last = text.rstrip().splitlines()[-1]
    return report(rank, last, traceback=text, exception_type=last.partition(":")[0], **more)


def reset(rank: int, **more: Any) -> WorkerFailure:
    return report(
        rank,
        RESET,
        traceback=f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{RESET}\n',
        is_secondary=True,
        **more,
    )


def test_an_exception_in_one_rank_and_resets_in_seven_have_one_root() -> None:
    others = [reset(rank, at=0.5) for rank in range(8) if rank != 3]  # their clocks are behind

    found = verdict_of(facts(*others, raised(3), logs={3: USERS}))

    assert (found.failure, found.basis, found.rank, found.host) == ("user-exception", "record", 3, "node3")
    assert found.place == "/home/me/model.py:31 in forward"
    assert found.detail == "KeyError: 'no such key'"
    assert found.num_cascades == 7
    assert [one.role for one in found.evidence] == ["root", "cascade"]


def test_the_same_exception_on_all_ranks_is_one_event() -> None:
    found = verdict_of(facts(*(raised(rank, at=9.0 - rank) for rank in range(4))))

    assert (found.failure, found.rank, found.num_alike, found.num_cascades) == ("user-exception", 3, 3, 0)


@pytest.mark.parametrize(
    ("made", "failure", "rank"),
    [
        (facts(report(1, signal=9)), "killed", 1),
        (facts(report(1, signal=9), logs={1: "Killed\n"}), "killed", 1),
        (facts(report(1, signal=9), console=OOM_KILL), "host-memory", 1),
        (facts(report(1, signal=11)), "native-crash", 1),
        (facts(report(1, signal=6), logs={1: "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"}), "host-memory", 1),
        (facts(report(1, signal=6), logs={1: "double free or corruption (!prev)"}), "native-crash", 1),
        (facts(report(1, signal=15)), "signal", 1),
        (facts(report(2, signal=6), logs={2: WATCHDOG}), "collective-timeout", 2),
        (facts(report(2, signal=6), raised(5, at=9.0), logs={2: WATCHDOG}), "user-exception", 5),
        (facts(report(2, signal=6), report(4, signal=11, at=9.0), logs={2: WATCHDOG}), "native-crash", 4),
        (facts(report(1, "the script exited with code 3; its last line: bye", exit_code=3, of_script=True)), "exit-code", 1),
        (facts(report(1, exit_code=1), logs={1: USERS}), "user-exception", 1),
        (facts(report(1, exit_code=1), logs={1: CAUGHT + "using the default instead"}), "exit-code", 1),
        (facts(report(1, exit_code=3), logs={1: USERS}), "exit-code", 1),
        (facts(report(1, exit_code=139)), "native-crash", 1),
        (facts(report(1, signal=6), logs={1: "bash: line 1: nvidia-smi: command not found\nstep 1"}), "native-crash", 1),
        (facts(report(1, exit_code=1), logs={1: "bash: line 1: nvidia-smi: command not found\n1\n2\n3"}), "exit-code", 1),
        (facts(report(1, exit_code=127), logs={1: "bash: line 1: torchrum: command not found"}), "launch-failed", 1),
        (facts(report(1, "SystemExit: 3", exception_type="SystemExit")), "exit-code", 1),
        (facts(report(1, "`train_data[17]` raised ValueError: bad", exception_type="SampleError")), "data", 1),
        (facts(report(0, "The training has diverged: ...", is_diverged=True, exception_type="DivergedError"), cause=Cause.DIVERGED), "nan", 0),
        (facts(report(0, "`train.lr` is 0", is_input_error=True, exception_type="ConfigError"), cause=Cause.REFUSED), "configuration", 0),
        (facts(report(-1, "RuntimeError: no fork", exception_type="RuntimeError")), "launch-failed", None),
        (facts(raised(1), cause=Cause.PREEMPTED), "preempted", None),
        (facts(raised(1), cause=Cause.TIME_LIMIT), "time-limit", None),
        (facts(reset(0), cause=Cause.NODE_FAILED, failed_nodes=("node3",)), "node-failed", None),
        (facts(cause=Cause.CANCELLED, ending=Ending.CANCELLED), "cancelled", None),
        (facts(cause=Cause.SUPERVISOR_DIED), "supervisor-died", None),
        (facts(cause=Cause.NOT_SAVED), "not-saved", None),
        (facts(report(0, "CheckpointError: no space left", exception_type="CheckpointError"), cause=Cause.STOP_ASKED), "not-saved", 0),
        (facts(report(1, "NotSavedError: The checkpoint of step 9 could not be committed: rank 1: PermissionError: [Errno 13] Permission denied", exception_type="NotSavedError"), cause=Cause.NOT_SAVED), "not-saved", 1),
        (facts(report(1, "NotSavedError: The checkpoint of step 9 could not be committed: rank 1: OSError: [Errno 28] No space left on device", exception_type="NotSavedError"), cause=Cause.NOT_SAVED), "disk-full", 1),
        (facts(console="srun: error: Unable to create step for job 12: Memory required by task is not available"), "launch-failed", None),
        (facts(console="FATAL:   could not open image /images/torch.sif: no such file or directory"), "image", None),
    ],
)  # fmt: skip
def test_records_count_before_texts(made: AttemptFacts, failure: str, rank: int | None) -> None:
    found = verdict_of(made)

    assert (found.failure, found.rank) == (failure, rank)


@pytest.mark.parametrize(
    "made",
    [
        facts(),
        facts(logs={0: "bash: line 1: nvidia-smi: command not found\nstep 1\nstep 2\nstep 3\n"}),
        facts(logs={0: "step 1\nKilled\n", 1: "CUDA out of memory, trying again\n"}),
        facts(logs={0: USERS + "that was expected\nstep 7 loss 0.3\n"}),
        facts(logs={0: "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"}),
        facts(logs={0: "NCCL_TIMEOUT=600\nwatchdog timeout is 600 s\nslurm: oom_kill is on"}),
        facts(cause=Cause.UNEXPLAINED),
    ],
)
def test_where_nothing_is_proved_the_verdict_abstains(made: AttemptFacts) -> None:
    found = verdict_of(made)

    assert (found.failure, found.basis, found.rank) == ("unknown", "none", None)


def test_only_lost_connections_name_no_root_but_the_one_rank_without_a_report() -> None:
    all_lost = verdict_of(facts(reset(0), reset(1)))
    one_silent = verdict_of(facts(reset(0), reset(1), logs={0: "", 1: "", 2: "step 7\n"}))

    assert (all_lost.failure, all_lost.rank) == ("peer-gone", None)
    assert (one_silent.failure, one_silent.basis, one_silent.rank) == ("unknown", "none", 2)


@pytest.mark.parametrize(
    ("kind", "rank", "failure"),
    [
        ("behind", 1, "hang-behind"),
        ("different", -1, "hang-mismatch"),
        ("network", -1, "hang-nobody"),
        ("crashed", 1, "native-crash"),
        ("", -1, "hang"),
    ],
)
def test_a_hang_is_what_the_supervisor_has_found(kind: HangKind, rank: int, failure: str) -> None:
    hang = report(rank, "no rank made progress; and so on", is_hang=True, hang_kind=kind, hang_detail="rank 1 is late")

    found = verdict_of(facts(hang, cause=Cause.HANG, logs={0: "", 1: ""}))

    assert (found.failure, found.rank, found.detail) == (failure, None if rank < 0 else rank, "rank 1 is late")


TOO_LONG = """Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 244, in _feed
    obj = _ForkingPickler.dumps(obj)
OSError: AF_UNIX path too long
"""
STACKS = """Timeout (0:00:20)!
Thread 0x00007f8d4b7fe6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
"""


@pytest.mark.parametrize("cause", [Cause.TIME_LIMIT, Cause.HANG, Cause.CANCELLED])
@pytest.mark.parametrize("words", [TOO_LONG, TOO_LONG + STACKS])
def test_a_known_error_in_the_logs_counts_before_the_end_of_ranks_that_waited_in_vain(cause: Cause, words: str) -> None:
    hang = [report(-1, "no rank made progress", is_hang=True)] if cause == Cause.HANG else []

    found = verdict_of(facts(*hang, cause=cause, logs={0: words, 1: words}))

    assert (found.failure, found.basis, found.rank, found.num_alike) == ("socket-path", "log", 0, 1)
    assert found.end == {Cause.TIME_LIMIT: "time-limit", Cause.HANG: "hang", Cause.CANCELLED: "cancelled"}[cause]


@pytest.mark.parametrize(("last_step", "failure"), [(0, "socket-path"), (None, "socket-path"), (7, "")])
def test_an_attempt_that_saved_nothing_until_it_was_stopped_at_the_limit_has_failed(
    last_step: int | None, failure: str
) -> None:
    """A script that waits in vain and does not handle the stop signal ends by it: the ledger calls that stopped."""
    limit: dict[str, Any] = {"cause": Cause.TIME_LIMIT, "ending": Ending.STOPPED, "last_step": last_step}

    assert verdict_of(facts(logs={0: TOO_LONG}, **limit)).failure == failure
    assert not verdict_of(facts(logs={0: USERS}, **limit)).failure


@pytest.mark.parametrize(
    ("cause", "words", "failure"),
    [
        (Cause.PREEMPTED, TOO_LONG, "preempted"),
        (Cause.NODE_FAILED, TOO_LONG, "node-failed"),
        (Cause.SUSPENDED, TOO_LONG, "suspended"),
        (Cause.TIME_LIMIT, TOO_LONG + "step 7", "time-limit"),
        (Cause.TIME_LIMIT, USERS, "time-limit"),
        (Cause.CANCELLED, USERS.replace("KeyError: 'no such key'", "KeyboardInterrupt"), "cancelled"),
        (Cause.HANG, USERS, "hang"),
        (Cause.HANG, USERS.replace("KeyError: 'no such key'", RESET), "hang"),
    ],
)
def test_what_may_follow_from_the_end_does_not_count_before_it(cause: Cause, words: str, failure: str) -> None:
    found = verdict_of(facts(cause=cause, logs={0: words, 1: words}))

    assert (found.failure, found.end) == (failure, "")


NO_SPACE = """OSError: [Errno 28] No space left on device: '/runs/r/metrics.jsonl'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/ddp_hpc/base/patience.py", line 76, in patiently
    raise UnreadableError(
ddp_hpc.base.errors.UnreadableError: /runs/r/metrics.jsonl cannot be read: [Err"""
FAILED_SAVE = "2026-06-18 13:05:36,123 WARNING the checkpoint of step 6 could not be written: rank 0 on node0: OSError: [Errno 28] No space"


@pytest.mark.parametrize(
    "log_of_rank_zero",
    [USERS.replace("KeyError: 'no such key'\n", NO_SPACE), f"{FAILED_SAVE}\nTraceback (most recent"],
)
def test_where_a_full_disk_takes_no_report_the_last_lines_of_a_log_name_it(log_of_rank_zero: str) -> None:
    found = verdict_of(facts(logs={0: log_of_rank_zero, 1: ""}))

    assert (found.failure, found.basis, found.rank) == ("disk-full", "log", 0)


def test_a_save_that_failed_before_a_rank_failed_for_another_reason_is_not_the_reason() -> None:
    assert verdict_of(facts(raised(0), logs={0: FAILED_SAVE + "\n" + USERS})).failure == "user-exception"


def test_a_checkpoint_that_was_not_committed_is_of_the_rank_that_could_not_write_its_part() -> None:
    said = "The checkpoint of step 6 could not be committed: rank 1 on node1: OSError: [Errno 122] Disk quota exceeded"
    reports = [report(rank, said, exception_type="CheckpointError") for rank in (0, 1, 2)]

    found = verdict_of(facts(*reports))

    assert (found.failure, found.rank, found.host) == ("quota", 1, "node1")


def test_an_exception_before_a_hang_is_its_root() -> None:
    hang = report(-1, "no rank made progress", is_hang=True, at=99.0)

    assert verdict_of(facts(hang, raised(1), cause=Cause.HANG)).failure == "user-exception"


def test_nothing_is_explained_where_nothing_failed() -> None:
    assert verdict_of(facts(cause=Cause.FINISHED, ending=Ending.FINISHED)).failure == ""


REPORTS = [
    raised(3, at=2.0),
    raised(4, at=2.0),
    reset(0, at=1.0),
    reset(1, at=3.0),
    report(2, signal=11, at=2.5),
    report(5, signal=9, at=4.0),
]
LOGS = dict.fromkeys(range(7), "step 1\n") | {3: USERS}


@given(st.permutations(REPORTS), st.integers())
def test_the_order_of_reports_and_logs_does_not_change_the_verdict(reports: list[WorkerFailure], seed: int) -> None:
    order = list(LOGS)
    random.Random(seed).shuffle(order)

    found = verdict_of(facts(*reports, logs={rank: LOGS[rank] for rank in order}))

    assert found == verdict_of(facts(*REPORTS, logs=LOGS))


@given(st.lists(st.sampled_from(["step 3 loss 0.5", "NCCL WARN", "saving", RESET.partition(": ")[2]]), max_size=9))
def test_other_lines_before_the_end_do_not_change_the_verdict(others: list[str]) -> None:
    text = "".join(f"{line}\n" for line in others) + USERS

    assert verdict_of(facts(report(1, exit_code=1), logs={1: text})).failure == "user-exception"


LOADER = """Traceback (most recent call last):
  File "/home/me/train.py", line 5, in <module>
    for batch in loader:
  File "/v/lib/python3.11/site-packages/torch/_utils.py", line 9, in reraise
    raise exception
OSError: Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 3, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 3, in __getitem__
    return open(path)
"""


@pytest.mark.parametrize(
    ("last", "failure", "named"),
    [
        ("OSError: [Errno 116] Stale file handle: '/data/train/7.bin'", "stale-mount", "/data/train/7.bin"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/train/7.bin'", "data", "/data/train/7.bin"),
        ("KeyError: 7", "data", ""),
    ],
)
def test_what_a_loader_met_is_named(last: str, failure: str, named: str) -> None:
    found = verdict_of(facts(report(1, exit_code=1), logs={1: f"{LOADER}{last}\n"}))

    assert (found.failure, found.entity, found.place) == (failure, named, "/home/me/data.py:3 in __getitem__")


@pytest.mark.parametrize(
    "message", ["no such key", "Weights only load failed.\n\t(1) In PyTorch 2.6\n\nCheck the page."]
)
def test_an_exception_for_which_hydra_exits_has_ended_the_program(message: str) -> None:
    text = (
        f'Traceback (most recent call last):\n  File "/w/train.py", line 8, in main\n    f()\nValueError: {message}\n\n'
    )

    found = uncaught(f"{text}Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.".splitlines())

    assert found is not None
    assert found.first_line == f"ValueError: {message.splitlines()[0]}"
    assert uncaught(f"{text}step 12\n".splitlines()) is None


FRAMEWORKS = {
    "rich": (
        1,
        """
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /w/train.py:8 in <module>                                                    │
│                                                                              │
│ ❱ 8 main()                                                                   │
│                                                                              │
│ /home/ada/a/place/that/is/so/far/down/that/its/path/takes/more/than/one/line │
│ /net.py:7 in forward                                                         │
│                                                                              │
│ ❱ 7 │   raise ValueError("odd")                                              │
│ ╭─── locals ───╮                                                             │
│ │ path = '/x'  │                                                             │
│ ╰──────────────╯                                                             │
╰──────────────────────────────────────────────────────────────────────────────╯
ValueError: odd
""",
        "user-exception",
        "ValueError: odd",
        "/home/ada/a/place/that/is/so/far/down/that/its/path/takes/more/than/one/line/net.py:7 in forward",
    ),
    "rich's log": (
        1,
        """
[11/27/26 10:38:02] ERROR    training failed                       train.py:6
                             ╭─ Traceback (most recent call last─╮
                             │ /w/train.py:4                     │
                             │ in main                           │
                             │                                   │
                             │ ❱ 4 def main(): raise ValueError( │
                             ╰───────────────────────────────────╯
                             ValueError: odd
""",
        "user-exception",
        "ValueError: odd",
        "/w/train.py:4",
    ),
    "loguru": (
        1,
        """
2026-11-27 10:38:02.971 | ERROR    | __main__:<module>:5 - An error has been caught in function '<module>':
Traceback (most recent call last):

> File "/w/train.py", line 5, in <module>
    main()
    └ <function main at 0x7f69226d6de0>

  File "/w/train.py", line 4, in main
    def main(): raise ValueError("odd")

ValueError: odd
""",
        "user-exception",
        "ValueError: odd",
        "/w/train.py:4 in main",
    ),
    "progress bars, as of tqdm and Lightning": (
        1,
        """
  0%|          | 0/10 [00:00<?, ?it/s]\r 60%|██████    | 6/10 [00:00<00:00, 59.71it/s]Traceback (most recent call last):
  File "/w/train.py", line 7, in main
    if i == 5: raise ValueError("odd")
ValueError: odd

Epoch 0:  60%|██████    | 6/10 [00:00<00:00, 46.18it/s]
""",
        "user-exception",
        "ValueError: odd",
        "/w/train.py:7 in main",
    ),
    "a prefix before each line": (
        1,
        """
worker-3 | Traceback (most recent call last):
worker-3 |   File "/w/train.py", line 7, in main
worker-3 |     raise ValueError("odd")
worker-3 | ValueError: odd
""",
        "user-exception",
        "ValueError: odd",
        "/w/train.py:7 in main",
    ),
    "argparse": (
        2,
        "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --foo\n",
        "arguments",
        "train.py: error: unrecognized arguments: --foo",
        "",
    ),
    "LightningCLI": (
        2,
        'usage: train.py [-h]\ntip: For details run: train.py --help\nerror: Parser key "lr":\n  Expected a float. Got: abc\n',
        "arguments",
        'error: Parser key "lr":',
        "",
    ),
    "absl": (
        1,
        "FATAL Flags parsing error: Unknown command line flag 'foo'\nPass --helpshort or --helpfull to see help on flags.\n",
        "arguments",
        "FATAL Flags parsing error: Unknown command line flag 'foo'",
        "",
    ),
    "click": (
        2,
        "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option '--foo'.\n",
        "arguments",
        "Error: No such option '--foo'.",
        "",
    ),
    "typer": (
        2,
        "Usage: train.py [OPTIONS]\n╭─ Error ─────────────────╮\n│ No such option: --foo   │\n╰─────────────────────────╯\n",
        "arguments",
        "No such option: --foo",
        "",
    ),
    "Hydra": (
        1,
        (
            "Could not override 'foo'.\nTo append to your config use +foo=1\nKey 'foo' is not in struct\n    full_key: foo\n"
            "    object_type=dict\n\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
        ),
        "arguments",
        "Could not override 'foo'.",
        "",
    ),
}


@pytest.mark.parametrize(
    ("code", "log", "failure", "detail", "place"), [pytest.param(*made, id=name) for name, made in FRAMEWORKS.items()]
)
def test_what_a_framework_prints_in_a_form_of_its_own_is_read(
    code: int, log: str, failure: str, detail: str, place: str
) -> None:
    found = verdict_of(facts(report(1, exit_code=code), logs={1: log}))

    assert (found.failure, found.detail, found.place) == (failure, detail, place)


def test_a_code_that_nothing_explains_is_shown_with_the_scripts_last_line() -> None:
    said = "the script exited with code 3; its last line: no data here"

    assert verdict_of(facts(report(1, said, exit_code=3, of_script=True))).detail == said


def test_a_tool_that_says_error_or_a_crash_after_a_rejected_word_is_not_called_rejected_arguments() -> None:
    tool = report(1, "the script exited with code 1; its last line: gcc: error: x.c: No such file", exit_code=1)
    crash = report(1, signal=11)

    assert verdict_of(facts(tool, logs={1: "gcc: error: x.c: No such file\n"})).failure == "exit-code"
    assert verdict_of(facts(crash, logs={1: "train.py: error: odd\n"})).failure == "native-crash"


@pytest.mark.parametrize("char", ["─", "│", "╭", " ", "╭ ", "%|"])
def test_a_line_of_many_signs_of_a_box_is_read_at_once(char: str) -> None:
    began = time.monotonic()

    uncaught([clean("╭" + char * 100_000 + "│")] * 100)

    assert time.monotonic() - began < 5


def test_a_traceback_that_a_program_survived_is_caught() -> None:
    assert uncaught((USERS + "step 4").splitlines()) is None
    assert (
        uncaught((USERS + "\n[W1123 10:00 x.cpp:1] Warning: destroy_process_group() was not called").splitlines())
        is not None
    )
    assert [one.first_line for one in tracebacks((USERS + USERS).splitlines())] == ["KeyError: 'no such key'"] * 2


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("\x1b[31mred\x1b[0m text\r\n", "red text"),
        ("  3%|   | 1/30\r 10%|#  | 3/30\rdone", "done"),
        ('[rank1]:   File "a.py", line 1', '  File "a.py", line 1'),
        ("[rank12]:[E321 x.cpp:1] oops", "[E321 x.cpp:1] oops"),
        ("[default3]:KeyError: 1", "KeyError: 1"),
        ("[1,3]<stderr>:KeyError: 1", "KeyError: 1"),
        ("[prterun-n1-77,3]<stderr>: KeyError: 1", "KeyError: 1"),
        ("a\x00b\x07c", "abc"),
        ("[0] is an item", "[0] is an item"),
    ],
)
def test_a_line_is_read_as_it_stands_on_a_terminal(raw: str, text: str) -> None:
    assert clean(raw) == text


def test_only_the_end_of_a_log_is_read_and_its_lines_have_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"".join(b"line %d \xff\xfe\n" % number for number in range(1, 1000)))

    lines = tail(path, 200)

    assert lines[-1].text.startswith("line 999")
    assert len(lines) < 20
    assert number_of(lines[-1]) == 999
    assert tail(tmp_path / "missing.log") == []


def test_a_fingerprint_is_that_of_the_mechanism() -> None:
    one = fingerprint(
        "data", "[Rank 3] node7: lost 10.0.0.1:44715 at 2026-01-01 10:00:00, /tmp/a.12/x", "m.py in f", hosts=("node7",)
    )
    same = fingerprint(
        "data", "[Rank 5] node12: lost 10.0.0.2:5 at 2026-01-02 11:00:00, /tmp/b/x", "m.py in f", hosts=("node12",)
    )

    assert one == same
    assert one != fingerprint("nan", "[Rank 3] node7", "m.py in f", hosts=("node7",))
    assert invariant_text("[Errno 28] x") != invariant_text("[Errno 2] x")


def test_the_sample_is_named_that_a_loaders_process_could_not_read() -> None:
    passed_on = (
        "SampleError: Caught SampleError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        + "  line\n" * 900
    )
    original = "ddp_hpc.train.data.loader.SampleError: `train_data[9]` raised ValueError: label 12 is out of range."

    found = verdict_of(facts(report(1, f"{passed_on}{original}\n", exception_type="SampleError")))

    assert (found.failure, found.entity, found.detail) == ("data", "train_data[9]", original)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("SampleError: `train_data[17]` raised ValueError: bad", "train_data[17]"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/a b.bin'", "/data/a b.bin"),
        ("OSError: [Errno 28] No space left on device: '/tmp/x/y'", ""),
        ("cannot identify image file 'cat.jpg'", "cat.jpg"),
        ("KeyError: 'no such key'", ""),
    ],
)
def test_the_sample_or_the_file_is_the_entity(text: str, named: str) -> None:
    assert sample_or_file(text) == named


FAULTY = NetworkFindings(
    at=0.0,
    seconds=3.0,
    address="10.2.0.1",
    num_nodes=4,
    num_pairs=6,
    pairs=(PairFault(nodes=("node1", "node3"), fault="one way"),),
)


def test_a_hang_over_a_network_that_does_not_carry_names_the_pair() -> None:
    hang = report(-1, "no rank made progress", is_hang=True, hang_kind="link")

    verdict = verdict_of(replace(facts(hang, cause=Cause.HANG), network=FAULTY))

    assert (verdict.failure, verdict.basis, verdict.rank, verdict.host) == (
        "hang-network",
        "record",
        None,
        "node1 - node3",
    )
    assert verdict.detail.endswith("nothing that node1 sends arrives at node3, while packets pass the other way")
    assert verdict.evidence[0].line is None


@pytest.mark.parametrize(
    ("rank", "kind", "network", "failure"),
    [
        (-1, "", FAULTY, "hang-network"),
        (-1, "network", FAULTY, "hang-network"),
        (1, "", None, "hang-behind"),
        (-1, "", None, "hang"),
    ],
)
def test_a_hang_that_an_older_version_has_recorded_is_read_as_it_was_then(
    rank: int, kind: HangKind, network: NetworkFindings | None, failure: str
) -> None:
    hang = report(rank, "no rank made progress; all wait", is_hang=True, hang_kind=kind)

    verdict = verdict_of(replace(facts(hang, cause=Cause.HANG, logs={0: "", 1: ""}), network=network))

    assert verdict.failure == failure
    assert verdict.detail


def test_a_rank_that_the_others_wait_for_is_named_before_the_network() -> None:
    hang = report(3, "no rank made progress", is_hang=True, host="node4", hang_kind="behind")

    verdict = verdict_of(replace(facts(hang, cause=Cause.HANG), network=FAULTY))

    assert (verdict.failure, verdict.rank, verdict.host) == ("hang-behind", 3, "node4")


def test_lost_connections_are_explained_by_a_network_that_does_not_carry_but_an_exception_is_not() -> None:
    lost = [report(rank, RESET, is_secondary=True, exception_type="RuntimeError") for rank in (0, 1)]
    raised = report(2, "KeyError: 'no such key'", exception_type="KeyError", traceback=USERS)

    assert verdict_of(replace(facts(*lost), network=FAULTY)).failure == "hang-network"
    assert verdict_of(replace(facts(*lost, raised), network=FAULTY)).failure == "user-exception"
    assert verdict_of(replace(facts(*lost), network=replace(FAULTY, pairs=()))).failure == "peer-gone"


def test_ranks_that_never_joined_are_named_instead_of_those_that_waited() -> None:
    waited = "DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined."
    failure = report(0, waited, exception_type="DistStoreError")
    known = facts(failure, nodes=("node0", "node1"))

    verdict = verdict_of(replace(known, missing=MissingRanks(ranks=(3,), workers_per_node=2, at=0.0)))

    assert (verdict.failure, verdict.rank, verdict.host, verdict.basis) == ("ranks-missing", 3, "node1", "record")
    assert verdict.detail.startswith("rank 3 on node1 did not join; ")
    assert verdict_of(known).rank == 0


@pytest.mark.parametrize(
    ("more", "failure", "rank"),
    [
        ({}, "nan", None),
        ({"odd_ranks": (1,), "told_by": "repetition", "told_in": 1}, "ranks-differ", 1),
        ({"told_by": "undecided", "told_in": 1}, "nan", None),
    ],
)
def test_a_loss_that_is_not_finite_on_one_rank_is_nan_until_another_attempt_proves_that_rank_wrong(
    more: Any, failure: str, rank: int | None
) -> None:
    difference = Difference(
        attempt=0,
        step=7,
        digests=(FINITE, NOT_FINITE),
        hosts=("node0", "node1"),
        processors=("x", "x"),
        tensors=("the loss",),
        num_tensors=1,
        at=1.0,
        of_loss=True,
        **more,
    )

    found = verdict_of(replace(facts(cause=Cause.RANKS_DIFFER), difference=difference))

    assert (found.failure, found.rank, found.basis) == (failure, rank, "record")
    assert found.detail == "the ranks differ after step 7: the loss is not finite on rank 1 on node1 alone"
