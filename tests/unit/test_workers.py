"""The workers of an attempt, by agents and by tasks: real processes stand in for srun."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.job.workers import AgentWorkers, TaskWorkers, Workers
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import ask_to_stop, read_stop_request, write_rank_zero_exit
from tests.made_run import add_failure, make_run
from tests.unit.held_signals import signals_held_back

FINISHED, STOPPED, FAILED = exit_codes.FINISHED, exit_codes.STOPPED, exit_codes.FAILED
REFUSED, FENCED, PORT_TAKEN = exit_codes.REFUSED, exit_codes.FENCED, exit_codes.PORT_TAKEN
STOPPED_EARLY = exit_codes.STOPPED_BEFORE_START
PATIENCE_S = 60.0
SOON_S = 0.3
"""How long those who are told to leave are given, where a test is about those who do not."""
FAKE_STEP = Path(__file__).with_name("fake_step.py")
ENDPOINT = Endpoint("10.0.0.1", 29500)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with signals_held_back():
        yield


class Step:
    """A step of agents with a plan, and what it noted."""

    def __init__(self, folder: Path, *, num_nodes: int = 2, leave_s: float = PATIENCE_S, **plan: Any) -> None:
        self._note = folder / "note"
        self.lock = folder / "lock"
        lock_fd = processes.take_lock(self.lock)
        assert lock_fd is not None
        argv = [sys.executable, "-S", "-E", str(FAKE_STEP), json.dumps({"note": str(self._note), **plan})]
        self.workers = AgentWorkers(argv, num_nodes=num_nodes, lock_fds=[lock_fd], leave_s=leave_s)
        self._lock_fd = lock_fd

    @property
    def notes(self) -> list[str]:
        return self._note.read_text().splitlines() if self._note.exists() else []

    @property
    def orders(self) -> list[str]:
        return [json.loads(line)["do"] for line in self.notes if line.startswith("{")]

    @property
    def signals(self) -> list[str]:
        return [line for line in self.notes if line.startswith("SIG")]

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.notes if line.startswith("begun")]

    def end_test(self) -> None:
        self.workers.close()
        os.close(self._lock_fd)


@pytest.fixture
def make_step(tmp_path: Path) -> Iterator[Callable[..., Step]]:
    made: list[Step] = []

    def make(**plan: Any) -> Step:
        made.append(Step(tmp_path, **plan))
        return made[-1]

    yield make
    for step in made:
        step.end_test()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this should have come about by now"
        time.sleep(0.01)


def await_news(workers: Workers) -> int:
    """Wait as a supervisor does."""
    deadline = time.monotonic() + PATIENCE_S
    while (code := workers.poll()) is None:
        assert time.monotonic() < deadline, "they should be over by now"
        processes.await_signal(min(workers.patience_s(), 0.05))
    return code


# --- by agents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "meaning"),
    [
        ([FINISHED, FINISHED], FINISHED),
        ([STOPPED, STOPPED], STOPPED),
        ([FINISHED, STOPPED], STOPPED),
        ([STOPPED, FINISHED], STOPPED),
        ([FAILED, FAILED], FAILED),
        ([FINISHED, FAILED], FAILED),
        ([FAILED, FINISHED], FAILED),
        ([FAILED, STOPPED], FAILED),
        ([STOPPED, FAILED], STOPPED),
        ([REFUSED, FAILED], REFUSED),
        ([FAILED, REFUSED], REFUSED),
        ([FAILED, FENCED], FENCED),
        ([REFUSED, FENCED], FENCED),
        ([PORT_TAKEN, FAILED], PORT_TAKEN),
        ([FAILED, PORT_TAKEN], FAILED),
        ([-9, FAILED], FAILED),
    ],
)
def test_the_nodes_codes_mean_something_together(
    codes: list[int], meaning: int, make_step: Callable[..., Step]
) -> None:
    step = make_step(start=list(enumerate(codes)))

    step.workers.begin(0, ENDPOINT)

    assert await_news(step.workers) == meaning


def test_agents_are_told_of_the_attempt_and_where_to_meet(make_step: Callable[..., Step]) -> None:
    step = make_step(start=[(0, FINISHED), (1, FINISHED)])

    step.workers.begin(3, ENDPOINT)
    await_news(step.workers)

    assert [json.loads(line) for line in step.notes[1:]] == [{"do": "start", "attempt": 3, "meet": "10.0.0.1 29500"}]


def test_an_agent_alone_needs_no_meeting(make_step: Callable[..., Step]) -> None:
    step = make_step(num_nodes=1, start=[(0, FINISHED)])

    step.workers.begin(0, None)

    assert await_news(step.workers) == FINISHED
    assert json.loads(step.notes[1]) == {"do": "start", "attempt": 0}


def test_the_same_agents_begin_the_next_attempt(make_step: Callable[..., Step]) -> None:
    step = make_step(start=[(0, FAILED), (1, FAILED)])

    for attempt in range(3):
        step.workers.begin(attempt, ENDPOINT)
        await_news(step.workers)

    assert len(step.pids) == 1
    assert step.orders == ["start"] * 3


@pytest.mark.parametrize("reports", [[], [(0, FAILED)], [(0, FAILED), (1, FAILED)]], ids=["none", "one", "all"])
def test_a_step_that_dies_is_a_failure_and_the_next_attempt_has_a_new_one(
    reports: list[tuple[int, int]], make_step: Callable[..., Step]
) -> None:
    step = make_step(start=reports, leaves_at="start")
    codes, silent = [], []

    for attempt in range(2):
        step.workers.begin(attempt, ENDPOINT)
        codes.append(await_news(step.workers))
        silent += step.workers.silent_nodes()
        until(lambda: not psutil.pid_exists(step.pids[-1]) or _is_zombie(step.pids[-1]))

    assert codes == [FAILED, FAILED]
    assert silent == []
    assert len(step.pids) == 2


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (128 + 12, STOPPED_EARLY),
        (128 + 15, STOPPED_EARLY),
        (128 + 9, FAILED),
        (128 + 11, FAILED),
        (15, FAILED),
        (1, FAILED),
    ],
)
def test_a_step_that_dies_of_a_stop_signal_was_told_before_it_could_listen(
    code: int, meaning: int, make_step: Callable[..., Step]
) -> None:
    step = make_step(leaves_at="start", code=code)

    step.workers.begin(0, ENDPOINT)

    assert await_news(step.workers) == meaning


@pytest.mark.parametrize(("reported", "meaning"), [(FAILED, FAILED), (REFUSED, REFUSED), (STOPPED, STOPPED)])
def test_what_a_node_has_said_stands_though_the_step_died_of_a_stop_signal(
    reported: int, meaning: int, make_step: Callable[..., Step]
) -> None:
    step = make_step(start=[(0, reported)], leaves_at="start", code=128 + 12)

    step.workers.begin(0, ENDPOINT)

    assert await_news(step.workers) == meaning


def test_a_step_that_we_have_ended_was_not_told_to_stop(make_step: Callable[..., Step]) -> None:
    step = make_step(leaves_at="end", code=128 + 15)
    step.workers.begin(0, ENDPOINT)

    step.workers.end()

    assert await_news(step.workers) == FAILED


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("code", [FAILED, REFUSED, FENCED, PORT_TAKEN])
def test_when_one_node_fails_the_others_are_ordered_to_end(code: int, make_step: Callable[..., Step]) -> None:
    step = make_step(start=[(0, code)], end=[(1, FAILED)])

    step.workers.begin(0, ENDPOINT)

    assert await_news(step.workers) == code
    assert step.orders == ["start", "end"]
    assert step.workers.silent_nodes() == []


@pytest.mark.parametrize("code", [FINISHED, STOPPED])
def test_a_node_that_is_done_ends_no_other(code: int, make_step: Callable[..., Step]) -> None:
    step = make_step(start=[(0, code)], stop=[(1, code)])
    step.workers.begin(0, ENDPOINT)
    until(lambda: step.orders == ["start"])

    for _ in range(20):
        assert step.workers.poll() is None
        processes.await_signal(0.01)
    step.workers.stop()

    assert await_news(step.workers) == code
    assert step.orders == ["start", "stop"]


def test_told_to_stop_agents_pass_it_on(make_step: Callable[..., Step]) -> None:
    step = make_step(stop=[(0, STOPPED), (1, STOPPED)])

    step.workers.begin(0, ENDPOINT)
    step.workers.stop()

    assert await_news(step.workers) == STOPPED
    assert step.orders == ["start", "stop"]


def test_told_to_end_they_are_ordered_once(make_step: Callable[..., Step]) -> None:
    step = make_step(end=[(0, FAILED), (1, FAILED)])

    step.workers.begin(0, ENDPOINT)
    for _ in range(3):
        step.workers.end()

    assert await_news(step.workers) == FAILED
    assert step.orders == ["start", "end"]


@pytest.mark.parametrize("is_deaf", [False, True], ids=["srun ends it", "srun does not"])
def test_a_node_that_does_not_answer_the_order_to_end_is_named_and_its_step_ended(
    is_deaf: bool, make_step: Callable[..., Step]
) -> None:
    step = make_step(leave_s=SOON_S, start=[(0, FAILED)], is_deaf=is_deaf)

    step.workers.begin(0, ENDPOINT)
    code = await_news(step.workers)

    assert code == FAILED
    assert step.workers.silent_nodes() == [1]
    assert step.signals == ["SIGTERM"]
    assert not psutil.pid_exists(step.pids[0])


def test_after_a_step_that_had_to_be_ended_the_next_attempt_has_a_new_one(make_step: Callable[..., Step]) -> None:
    step = make_step(leave_s=SOON_S, start=[(0, FAILED)])

    for attempt in range(2):
        step.workers.begin(attempt, ENDPOINT)
        await_news(step.workers)

    assert len(step.pids) == 2


def test_a_report_of_an_earlier_attempt_is_not_one_of_this(make_step: Callable[..., Step]) -> None:
    step = make_step(late=[(0, FAILED), (1, FAILED)], start=[(0, FINISHED), (1, FINISHED)])

    step.workers.begin(4, ENDPOINT)

    assert await_news(step.workers) == FINISHED


def test_what_srun_prints_between_reports_is_passed_over(make_step: Callable[..., Step]) -> None:
    step = make_step(
        prints='srun: job 7 queued\n{"progress": 3}\n[]\n{"node_ra\n', start=[(0, FINISHED), (1, FINISHED)]
    )

    step.workers.begin(0, ENDPOINT)

    assert await_news(step.workers) == FINISHED


@pytest.mark.parametrize(
    "more", [{}, {"stays": True}, {"stays": True, "is_deaf": True}], ids=["leaves", "stays", "deaf"]
)
def test_closing_leaves_no_process_and_no_lock(more: dict[str, Any], tmp_path: Path) -> None:
    step = Step(tmp_path, leave_s=PATIENCE_S if not more else SOON_S, **more)
    step.workers.begin(0, ENDPOINT)
    until(lambda: step.orders)

    step.end_test()

    assert not psutil.pid_exists(step.pids[0])
    assert not processes.is_locked(step.lock)


def test_closing_what_never_began_is_nothing(make_step: Callable[..., Step]) -> None:
    step = make_step()

    step.workers.close()

    assert step.notes == []


def test_workers_hold_the_runs_lock_as_long_as_they_live(tmp_path: Path) -> None:
    step = Step(tmp_path)
    step.workers.begin(0, ENDPOINT)
    until(lambda: step.orders)

    os.close(step._lock_fd)
    while_they_live = processes.is_locked(step.lock)
    step.workers.close()

    assert while_they_live
    assert not processes.is_locked(step.lock)


# --- by tasks --------------------------------------------------------------------------------------------------------

TASK = """
import os, pathlib, signal, sys, time
note, deed = pathlib.Path(sys.argv[1]), sys.argv[2]
def on_signal(number, frame):
    with note.open("a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if "deaf" not in deed:
        os._exit(128 + number)
signal.signal(signal.SIGTERM, on_signal)
signal.signal(signal.SIGUSR2, on_signal)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR2})
with note.open("a") as file:
    file.write(f"begun {os.getpid()} {sys.argv[3:]}\\n")
if deed.startswith("exit"):
    os._exit(int(deed.split()[1]))
while True:
    time.sleep(0.05)
"""


class Tasks:
    """Tasks that do one deed, `exit 1` or `wait` (deaf or not), and what they noted."""

    def __init__(self, run: RunDir, deed: str, *, leave_s: float = PATIENCE_S) -> None:
        self._note = run.path / "note"
        self.workers = TaskWorkers(run, self._argv, lock_fds=[], leave_s=leave_s)
        self._deed = deed

    def _argv(self, attempt: int, endpoint: Endpoint) -> list[str]:
        return [sys.executable, "-S", "-E", "-c", TASK, str(self._note), self._deed, str(attempt), endpoint.netloc]

    @property
    def notes(self) -> list[str]:
        return self._note.read_text().splitlines() if self._note.exists() else []

    @property
    def pid(self) -> int:
        return int(self.notes[0].split()[1])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.mark.parametrize(
    ("code", "word", "failure", "meaning"),
    [
        (0, FINISHED, None, FINISHED),
        (0, STOPPED, None, STOPPED),
        (1, STOPPED, None, STOPPED),
        (1, FENCED, None, FENCED),
        (1, PORT_TAKEN, None, PORT_TAKEN),
        (1, FINISHED, None, FAILED),
        (1, FAILED, None, FAILED),
        (1, FAILED, {"is_input_error": True}, REFUSED),
        (0, None, None, FAILED),
        (1, None, None, FAILED),
        (1, None, {}, FAILED),
        (1, None, {"is_input_error": True}, REFUSED),
        (137, None, None, FAILED),
        (140, None, None, STOPPED_EARLY),  # of a stop signal, before they could listen
        (143, None, None, STOPPED_EARLY),
        (143, None, {}, FAILED),
        (143, FAILED, None, FAILED),
    ],
)
def test_rank_zeros_word_says_what_sruns_code_cannot(
    code: int, word: int | None, failure: dict[str, Any] | None, meaning: int, run: RunDir
) -> None:
    if word is not None:
        write_rank_zero_exit(run, 2, word)
    if failure is not None:
        add_failure(run, 2, **failure)
    tasks = Tasks(run, f"exit {code}")

    tasks.workers.begin(2, ENDPOINT)

    assert await_news(tasks.workers) == meaning
    assert tasks.notes[0].endswith("['2', '10.0.0.1:29500']")


def test_a_word_of_an_earlier_attempt_is_not_taken_for_this_ones(run: RunDir) -> None:
    write_rank_zero_exit(run, 1, STOPPED)
    tasks = Tasks(run, "exit 1")

    tasks.workers.begin(2, ENDPOINT)

    assert await_news(tasks.workers) == FAILED


def test_tasks_are_told_to_stop_by_signal_and_by_file_and_the_file_is_not_the_users(run: RunDir) -> None:
    tasks = Tasks(run, "wait")
    tasks.workers.begin(0, ENDPOINT)
    until(lambda: tasks.notes)
    write_rank_zero_exit(run, 0, STOPPED)

    tasks.workers.stop()

    assert await_news(tasks.workers) == STOPPED
    assert tasks.notes[1:] == ["SIGUSR2"]
    assert run.stop_request.exists()
    assert read_stop_request(run) is None


def test_a_stop_that_the_user_has_asked_for_stays_the_users_when_slurm_asks_too(run: RunDir) -> None:
    tasks = Tasks(run, "wait")
    tasks.workers.begin(0, ENDPOINT)
    until(lambda: tasks.notes)
    write_rank_zero_exit(run, 0, STOPPED)
    ask_to_stop(run)

    tasks.workers.stop()

    assert await_news(tasks.workers) == STOPPED
    assert read_stop_request(run) == "end"


def test_tasks_of_an_ousted_attempt_leave_no_file_that_would_stop_the_newer_one(run: RunDir) -> None:
    tasks = Tasks(run, "wait")
    tasks.workers.begin(0, ENDPOINT)
    until(lambda: tasks.notes)
    record_start(run, attempt=1, job_id="8")

    tasks.workers.stop()
    await_news(tasks.workers)

    assert tasks.notes[1:] == ["SIGUSR2"]
    assert not run.stop_request.exists()


def test_a_full_disk_keeps_tasks_from_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ddp_hpc.job.workers.ask_to_stop", no_room)
    tasks = Tasks(run, "wait")
    tasks.workers.begin(0, ENDPOINT)
    until(lambda: tasks.notes)

    tasks.workers.stop()
    await_news(tasks.workers)

    assert tasks.notes[1:] == ["SIGUSR2"]


@pytest.mark.parametrize("deed", ["wait", "wait deaf"])
def test_tasks_that_are_to_end_end_whether_srun_hears_or_not(deed: str, run: RunDir) -> None:
    tasks = Tasks(run, deed, leave_s=SOON_S)
    tasks.workers.begin(0, ENDPOINT)
    until(lambda: tasks.notes)

    tasks.workers.end()

    assert await_news(tasks.workers) == FAILED
    assert tasks.notes[1:] == ["SIGTERM"]
    assert not psutil.pid_exists(tasks.pid)
    assert tasks.workers.silent_nodes() == []


@pytest.mark.parametrize("deed", ["wait", "wait deaf", "exit 0"])
def test_closing_leaves_no_task(deed: str, run: RunDir) -> None:
    tasks = Tasks(run, deed, leave_s=SOON_S)
    tasks.workers.begin(0, ENDPOINT)
    until(lambda: tasks.notes)

    tasks.workers.close()

    assert not psutil.pid_exists(tasks.pid)


def test_each_attempt_is_a_step_of_its_own(run: RunDir) -> None:
    tasks = Tasks(run, "exit 1")

    for attempt in (4, 5):
        tasks.workers.begin(attempt, ENDPOINT)
        await_news(tasks.workers)

    assert [note.split(" ", 2)[2] for note in tasks.notes] == [f"['{attempt}', '10.0.0.1:29500']" for attempt in (4, 5)]


def test_closing_tasks_that_never_began_is_nothing(run: RunDir) -> None:
    Tasks(run, "wait").workers.close()
