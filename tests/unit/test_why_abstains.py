"""Texts that look like a cause and prove none: of a network, of a DataLoader's process, of NCCL, of a run that goes on."""

from __future__ import annotations

import pytest

from ddp_hpc.run.run_dir.error_fingerprint import sample_or_file
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Cause
from ddp_hpc.watch.why.findings import AttemptFacts
from ddp_hpc.watch.why.verdict import verdict_of
from tests.unit.test_why_verdict import OOM_KILL, RESET, USERS, facts, raised, report, reset

NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nLast error:\n"
LOADER_KILLED = "RuntimeError: DataLoader worker (pid 42) is killed by signal: Killed. "
LOADER_ENDED = "RuntimeError: DataLoader worker (pid(s) 42) exited unexpectedly"
THEN = "\nThe above exception was the direct cause of the following exception:\n\n"
WATCHDOG = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "


DUMP = "\nFatal Python error: Aborted\n" + 5 * (
    "\nThread 0x00007f00 (most recent call first):\n" + 15 * '  File "threading.py", line 3 in wait\n'
)


def traceback_of(text: str) -> str:
    return f'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in f\n    x\n{text}\n'


def error(rank: int, text: str, **more: object) -> WorkerFailure:
    return report(
        rank, text, traceback=traceback_of(text), exception_type=text.partition(":")[0].rpartition(".")[2], **more
    )


@pytest.mark.parametrize(
    ("made", "failure", "rank"),
    [
        # a process of the user's own, or a server, is no other rank
        (facts(error(0, "BrokenPipeError: [Errno 32] Broken pipe", is_secondary=True, of_script=True), logs={0: ""}), "user-exception", 0),
        (facts(error(1, "ConnectionResetError: [Errno 104] Connection reset by peer", is_secondary=True, of_script=True), logs={0: "", 1: ""}), "user-exception", 1),
        (facts(reset(0), error(1, "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))", is_secondary=True, of_script=True), reset(2)), "user-exception", 1),
        (facts(error(1, "RuntimeError: helper said Broken pipe", is_secondary=True), logs={0: "", 1: ""}), "unknown", 1),
        (facts(reset(0), logs={0: ""}), "unknown", None),
        # a process of a DataLoader, or of `mp.spawn`, that a signal ended
        (facts(error(1, LOADER_KILLED)), "killed", 1),
        (facts(error(1, LOADER_KILLED), console=OOM_KILL), "host-memory", 1),
        (facts(report(1, LOADER_ENDED, exception_type="RuntimeError", traceback=traceback_of(LOADER_KILLED) + THEN + traceback_of(LOADER_ENDED))), "killed", 1),
        (facts(report(1, exit_code=1), logs={1: traceback_of(LOADER_KILLED) + THEN + traceback_of(LOADER_ENDED)}, console=OOM_KILL), "host-memory", 1),
        (facts(error(1, "RuntimeError: DataLoader worker (pid 42) is killed by signal: Segmentation fault. ")), "native-crash", 1),
        (facts(error(1, LOADER_ENDED)), "unknown", 1),
        (facts(error(1, "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL")), "killed", 1),
        # NCCL, CUDA and cuDNN also fail for other reasons than a broken GPU
        (facts(error(1, NCCL + "socketStartConnect: Connect to 10.0.0.2<4> failed : No route to host", is_hardware=True)), "nccl-network", 1),
        (facts(error(1, NCCL + "Bootstrap : no socket interface found", is_hardware=True)), "nccl-network", 1),
        (facts(error(1, NCCL + "Error while creating shared memory segment /dev/shm/nccl-Yx (size 96)", is_hardware=True)), "shared-memory", 1),
        (facts(error(1, NCCL + "something else", is_hardware=True)), "unknown", 1),
        (facts(error(1, "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing", is_hardware=True)), "unknown", 1),
        (facts(error(1, "torch.AcceleratorError: CUDA error: invalid argument", is_hardware=True)), "unknown", 1),
        (facts(error(1, "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", is_hardware=True)), "unknown", 1),
        (facts(error(1, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", is_hardware=True)), "unknown", 1),
        (facts(error(1, "RuntimeError: CUDA error: device-side assert triggered", is_hardware=True)), "device-assert", 1),
        (facts(error(1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", is_hardware=True)), "gpu-fault", 1),
        (facts(error(0, NCCL + "socketPollConnect: connect to 10.0.0.2<45423> returned Connection refused", is_secondary=True, at=1.0), error(3, "KeyError: 7", at=1.5)), "user-exception", 3),
        # ranks that never met
        (facts(error(1, "DistNetworkError: The client socket has failed to connect to any network address of (10.1.0.1, 29500) (errno: 101 - Network is unreachable).", is_secondary=True), logs={0: "", 1: ""}), "nccl-network", 1),
        (facts(error(1, "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node7, 29500).", is_secondary=True)), "ranks-missing", 1),
        (facts(error(0, "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 80, code: -13, name: EACCES", is_secondary=True)), "unknown", 0),
        # a line of the setup, before ranks that trained
        (facts(logs={0: "step 900\n"}, console="env.sh: line 3: nvcc: command not found"), "unknown", None),
        # the signal is of NCCL's watchdog
        (facts(report(1, signal=6), logs={0: "", 1: WATCHDOG + "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5"}), "unknown", 0),
        (facts(report(1, signal=6), logs={1: WATCHDOG + "CUDA error: uncorrectable ECC error encountered"}), "gpu-fault", 1),
        (facts(report(1, signal=6), logs={1: "[F321 02:07:08.408271257 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 1] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang."}), "collective-timeout", 1),
        (facts(report(1, signal=6), logs={1: WATCHDOG + "CUDA error: uncorrectable ECC error encountered" + DUMP}), "gpu-fault", 1),
        (facts(report(1, signal=6), logs={1: "[default1]:" + WATCHDOG + "CUDA error: uncorrectable ECC error encountered"}), "gpu-fault", 1),
        # ranks that waited for another one, which says more
        (facts(error(0, "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 60000 ms"), error(1, "KeyError: 7")), "user-exception", 1),
        (facts(error(0, "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"), error(1, "KeyError: 7")), "user-exception", 1),
        (facts(error(0, "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] timed out connecting: SO_ERROR: Connection timed out"), error(1, "KeyError: 7")), "user-exception", 1),
        # a traceback in the log of a rank that left no report
        (facts(logs={0: USERS, 1: "step 7\n"}, cause=Cause.HANG), "hang", None),
        (facts(reset(0), logs={0: "", 1: USERS}), "unknown", 1),
        (facts(reset(0), logs={0: "", 1: USERS, 2: ""}), "peer-gone", None),
    ],
)  # fmt: skip
def test_a_text_that_only_looks_like_a_cause_is_not_taken_for_one(
    made: AttemptFacts, failure: str, rank: int | None
) -> None:
    found = verdict_of(made)

    assert (found.failure, found.rank) == (failure, rank)
    assert failure != "unknown" or found.basis == "none"


def test_an_attempt_without_a_recorded_end_has_not_failed_by_its_log() -> None:
    found = verdict_of(facts(logs={0: USERS}, cause=None, ending=None))

    assert (found.failure, found.basis, found.rank) == ("unknown", "none", None)
    assert [one.text for one in found.evidence] == ["KeyError: 'no such key'"]
    assert verdict_of(facts(raised(1), cause=None, ending=None)).failure == "user-exception"


def test_a_long_message_without_blanks_is_searched_in_a_moment() -> None:
    assert sample_or_file("KeyError: '" + "a/" * 16_000) == ""


@pytest.mark.parametrize(
    ("console", "failure"),
    [
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.1. Some of the step tasks have been OOM Killed.", "host-memory"),
        ("[2026-06-18T13:05:36.123] error: Detected 1 oom_kill event in StepId=2.1. Some of the step tasks have been OOM Killed.", "killed"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=2.1. Some of the step tasks have been OOM Killed.", "killed"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch. Some of the step tasks have been OOM Killed.", "killed"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.\nsrun: Force Terminated StepId=1.1", "killed"),
        ("slurmstepd-node1: error: Detected 1 oom_kill event in StepId=1.1. Some of the step tasks have been OOM Killed.", "host-memory"),
        ("slurmstepd-node2: error: Detected 1 oom_kill event in StepId=1.1. Some of the step tasks have been OOM Killed.", "killed"),
        ("srun: error: node1: task 1: Out Of Memory", "host-memory"),
        ("srun: error: node2: task 2: Out Of Memory", "killed"),
        ("srun: error: node1.hpc: task 1: Out Of Memory", "host-memory"),
        ("srun: error: node1: tasks 0-1: Out Of Memory", "host-memory"),
        ("srun: error: node2: tasks 2-3: Out Of Memory", "killed"),
    ],
)  # fmt: skip
def test_memory_that_ran_out_in_another_step_or_on_another_node_killed_no_rank(console: str, failure: str) -> None:
    found = verdict_of(facts(report(1, signal=9), console=console))

    assert (found.failure, found.rank, found.host) == (failure, 1, "node1")
    assert found.basis == ("log" if failure == "host-memory" else "record")


DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
NO_SPACE, QUOTA = "OSError: [Errno 28] No space left on device", "OSError: [Errno 122] Disk quota exceeded"
NOT_WRITTEN = "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470"


@pytest.mark.parametrize(
    ("texts", "failure"),
    [
        ((NO_SPACE, NOT_WRITTEN), "disk-full"),
        ((QUOTA, NOT_WRITTEN), "quota"),
        (("RuntimeError: basic_ios::clear: iostream error", NOT_WRITTEN), "disk-full"),  # of `torch.save` to a path
        ((NO_SPACE, NOT_WRITTEN, "ValueError: I/O operation on closed file."), "disk-full"),
        (("KeyError: 7", NO_SPACE), "disk-full"),
        ((QUOTA, NO_SPACE), "disk-full"),
        (("KeyError: 7", NOT_WRITTEN), "user-exception"),
    ],
)
def test_an_exception_that_says_nothing_is_called_by_the_one_in_whose_handling_it_was_raised(
    texts: tuple[str, ...], failure: str
) -> None:
    chain, apart = DURING.join(map(traceback_of, texts)), "".join(map(traceback_of, texts))

    assert verdict_of(facts(report(1, texts[-1], traceback=chain))).failure == failure
    assert verdict_of(facts(report(1, exit_code=1), logs={1: chain})).failure == failure
    assert texts[-1] == NO_SPACE or verdict_of(facts(report(1, texts[-1], traceback=apart))).failure == "user-exception"


@pytest.mark.parametrize(
    ("place", "failure"),
    [
        ('multiprocessing/popen_fork.py", line 66, in _launch', "process-limit"),
        ('subprocess.py", line 1885, in _execute_child', "process-limit"),
        ('site-packages/filelock/_unix.py", line 42, in _acquire', "user-exception"),
    ],
)
def test_a_process_that_cannot_be_started_is_told_from_a_lock_that_is_held(place: str, failure: str) -> None:
    text = f'Traceback (most recent call last):\n  File "/usr/lib/python3.11/{place}\n    x\nBlockingIOError: [Errno 11] Resource temporarily unavailable\n'

    assert verdict_of(facts(report(1, exit_code=1), logs={1: text})).failure == failure
    assert verdict_of(facts(raised(1, text))).failure == failure


@pytest.mark.parametrize("prefix", ["3: ", " 3: ", "worker-3 | ", "[default3]:[rank3]: "])
def test_a_traceback_is_read_whatever_stands_before_each_line(prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in traceback_of("KeyError: 7").splitlines())

    found = verdict_of(facts(report(3, exit_code=1), logs={3: text}))

    assert (found.failure, found.detail, found.place) == ("user-exception", "KeyError: 7", "/home/me/train.py:3 in f")


@pytest.mark.parametrize("first", [0, 1])
def test_of_the_ranks_in_one_log_the_one_that_lost_its_connection_is_not_the_cause(first: int) -> None:
    ranks = [traceback_of("ValueError: bad label"), traceback_of(RESET)]
    text = ranks[first] + ranks[1 - first] + traceback_of("torch.distributed.elastic.errors.ChildFailedError: ")

    found = verdict_of(facts(report(0, exit_code=1), logs={0: text}))

    assert (found.failure, found.detail) == ("user-exception", "ValueError: bad label")


def test_of_an_exception_that_a_loaders_process_passed_on_its_own_first_line_counts() -> None:
    more = "\nCUDA kernel errors might be asynchronously reported.\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions."
    inner = traceback_of("RuntimeError: CUDA error: initialization error" + more).replace(
        "/home/me/train.py", "/v/site-packages/torch/utils/data/_utils/fetch.py"
    )
    inner = inner.replace(
        " in f\n    x\n", ' in fetch\n    x\n  File "/home/me/data.py", line 3, in __getitem__\n    x\n'
    )
    text = "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal " + inner

    found = verdict_of(facts(report(1, text, exception_type="RuntimeError", traceback=traceback_of(text))))

    assert (found.failure, found.detail) == ("user-exception", "RuntimeError: CUDA error: initialization error")
