"""The node agent over its line: it imports the worker once, and forks workers attempt after attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.job.workers import AgentWorkers
from ddp_hpc.prove.drill.injector import NodeProcess
from ddp_hpc.run.run_dir.failure_reports import first_failure, read_failures
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import add_failure, make_run
from tests.unit.held_signals import signals_held_back

PATIENCE_S = 60.0
NUM_WORKERS = 2
WORKER = """
import os, pathlib, signal, time
folder = pathlib.Path(__file__).parent

def note(text):
    with (folder / "note").open("a") as file:
        file.write(text + "\\n")

note(f"imported by {os.getpid()}")
if (folder / "broken").exists():
    from ddp_hpc.base.errors import ConfigError
    raise (ConfigError if (folder / "broken").read_text() else ImportError)("no such net")

def preload(run):
    note(f"preloaded by {os.getpid()}")
    return "it left a thread running" if (folder / "unforkable").exists() else ""

def main(run, environ, *, attempt, listen_fd):
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(99))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    print("printed by a worker", flush=True)
    note(f"attempt {attempt} rank {environ['RANK']} pid {os.getpid()}")
    deed = (folder / f"deed-{attempt}-{environ['RANK']}")
    if deed.exists():
        return int(deed.read_text())
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with signals_held_back():
        yield


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    (tmp_path / "counting_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return make_run(tmp_path)


@pytest.fixture
def workers(run: RunDir, request: pytest.FixtureRequest) -> Iterator[AgentWorkers]:
    words = ["--worker", "counting_worker", "--num-workers", str(NUM_WORKERS), *getattr(request, "param", [])]
    made = AgentWorkers(
        [sys.executable, "-m", "ddp_hpc.job.node.agent", str(run.path), *words],
        num_nodes=1,
        lock_fds=[],
        leave_s=PATIENCE_S,
    )
    yield made
    made.close()


def notes(run: RunDir, begin: str) -> list[str]:
    note = run.path.parent / "note"
    lines = note.read_text().splitlines() if note.exists() else []
    return [line for line in lines if line.startswith(begin)]


def pids(run: RunDir, attempt: int) -> dict[int, int]:
    """Return the workers of an attempt, by rank, once all have begun."""
    until(lambda: len(notes(run, f"attempt {attempt} ")) == NUM_WORKERS)
    words = [line.split() for line in notes(run, f"attempt {attempt} ")]
    return {int(line[3]): int(line[5]) for line in words}


def plan(run: RunDir, attempt: int, *codes: int) -> None:
    """Have the workers of an attempt leave with these codes; without a plan they work on."""
    for rank, code in enumerate(codes):
        (run.path.parent / f"deed-{attempt}-{rank}").write_text(str(code))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this should have come about by now"
        time.sleep(0.01)


def await_news(workers: AgentWorkers) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while (code := workers.poll()) is None:
        assert time.monotonic() < deadline, "they should be over by now"
        processes.await_signal(min(workers.patience_s(), 0.05))
    return code


def test_every_signal_that_users_send_to_a_jobs_steps_asks_the_workers_to_stop_and_ends_no_agent(
    run: RunDir, workers: AgentWorkers
) -> None:
    agents, codes = set(), []

    for attempt, number in enumerate((signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2)):
        workers.begin(attempt, None)
        agents.add(agent := psutil.Process(pids(run, attempt)[0]).ppid())
        os.kill(agent, signal.SIGCONT)
        os.kill(agent, number)
        codes.append(await_news(workers))

    assert codes == [exit_codes.STOPPED] * 5
    assert len(agents) == 1


def test_after_a_worker_was_killed_the_same_agent_begins_again_and_imports_nothing_twice(
    run: RunDir, workers: AgentWorkers
) -> None:
    workers.begin(0, None)
    first = pids(run, 0)
    agent = psutil.Process(first[1]).ppid()
    os.kill(first[1], signal.SIGKILL)
    after_the_kill = await_news(workers)
    are_gone = not any(psutil.pid_exists(pid) for pid in first.values())
    plan(run, 1, 0, 0)

    workers.begin(1, None)
    in_the_end = await_news(workers)

    failure = first_failure(run, 0)
    assert (after_the_kill, in_the_end) == (exit_codes.FAILED, exit_codes.FINISHED)
    assert are_gone
    assert failure is not None
    assert (failure.rank, failure.signal) == (1, signal.SIGKILL)
    assert (
        failure.exception
        == "killed by SIGKILL (the kernel does that when memory runs out; on Slurm, `resources.mem_gb` asks for more)"
    )
    assert notes(run, "imported") == [f"imported by {agent}"]
    assert notes(run, "preloaded") == [f"preloaded by {agent}"]
    assert set(pids(run, 1).values()).isdisjoint(first.values())
    assert read_failures(run, 1) == []


def test_workers_that_must_not_be_forked_are_processes_that_import_everything_themselves(
    run: RunDir, workers: AgentWorkers, capfd: pytest.CaptureFixture[str]
) -> None:
    (run.path.parent / "unforkable").touch()
    plan(run, 1, 99, 0)

    workers.begin(0, None)
    first = pids(run, 0)
    agents = {psutil.Process(pid).ppid() for pid in first.values()}
    modules = {NodeProcess(pid, 0, psutil.Process(pid).cmdline()).module for pid in first.values()}
    os.kill(first[0], signal.SIGKILL)
    after_the_kill = await_news(workers)
    workers.begin(1, None)
    in_the_end = await_news(workers)

    assert (after_the_kill, in_the_end) == (exit_codes.FAILED, exit_codes.STOPPED)
    assert not any(psutil.pid_exists(pid) for pid in first.values())
    importers = {int(line.split()[-1]) for line in notes(run, "imported")}
    assert importers == {*agents, *first.values(), *pids(run, 1).values()}
    assert len(agents) == 1
    assert modules == {"ddp_hpc.job.node.spawned_worker"}
    assert "each rank's worker starts as a new process" in (said := capfd.readouterr().err)
    assert "it left a thread running" in said


@pytest.mark.parametrize(
    ("codes", "joint"),
    [
        ((0, 0), exit_codes.FINISHED),
        ((99, 99), exit_codes.STOPPED),
        ((0, 99), exit_codes.STOPPED),
        ((0, 1), exit_codes.FAILED),
        ((1, 2), exit_codes.REFUSED),
        ((97, 2), exit_codes.FENCED),
        ((1, 97), exit_codes.FENCED),
    ],
)
def test_an_agent_reports_what_its_workers_codes_mean_together(
    codes: tuple[int, int], joint: int, run: RunDir, workers: AgentWorkers
) -> None:
    plan(run, 0, *codes)

    workers.begin(0, None)

    assert await_news(workers) == joint


def test_told_to_stop_an_agent_tells_its_workers(run: RunDir, workers: AgentWorkers) -> None:
    workers.begin(0, None)
    pids(run, 0)

    workers.stop()

    assert await_news(workers) == exit_codes.STOPPED


def test_told_by_a_signal_between_two_attempts_an_agent_tells_the_workers_of_the_next(
    run: RunDir, workers: AgentWorkers
) -> None:
    plan(run, 0, 1, 1)
    workers.begin(0, None)
    await_news(workers)
    (agent,) = {int(line.split()[-1]) for line in notes(run, "imported")}

    os.kill(agent, signal.SIGUSR2)
    workers.begin(1, None)

    assert await_news(workers) == exit_codes.STOPPED
    plan(run, 2, 0, 0)
    workers.begin(2, None)
    assert await_news(workers) == exit_codes.FINISHED  # it was told once


def test_told_to_end_an_agent_ends_workers_that_do_not_leave_and_stays_for_the_next(
    run: RunDir, workers: AgentWorkers
) -> None:
    workers.begin(0, None)
    first = pids(run, 0)

    workers.end()
    code = await_news(workers)
    plan(run, 1, 99, 99)
    workers.begin(1, None)

    assert (code, await_news(workers)) == (exit_codes.FAILED, exit_codes.STOPPED)
    assert not any(psutil.pid_exists(pid) for pid in first.values())
    assert len(notes(run, "imported")) == 1
    assert read_failures(run, 0) == []  # whom the agent killed did not fail


def test_the_report_of_a_rank_stays_where_a_signal_ends_it_afterwards(run: RunDir, workers: AgentWorkers) -> None:
    """As NCCL's watchdog aborts a process whose exception is on its way out."""
    workers.begin(0, None)
    first = pids(run, 0)[0]
    add_failure(run, 0, rank=0, exception="ValueError: its own")

    os.kill(first, signal.SIGABRT)

    assert await_news(workers) == exit_codes.FAILED
    assert [one.exception for one in read_failures(run, 0) if one.rank == 0] == ["ValueError: its own"]


@pytest.mark.parametrize(
    ("workers", "joint"),
    [
        pytest.param([], exit_codes.FAILED, id="script"),
        pytest.param(["--teardown-s", "600"], exit_codes.FINISHED, id="recipe"),
    ],
    indirect=["workers"],
)
def test_a_rank_that_is_killed_after_another_has_finished_had_finished_only_if_all_finish_together(
    joint: int, run: RunDir, workers: AgentWorkers
) -> None:
    """Of a script, rank zero alone may still evaluate and save."""
    (run.path.parent / "deed-0-1").write_text("0")
    workers.begin(0, None)
    finished = pids(run, 0)[1]
    until(lambda: not psutil.pid_exists(finished))

    workers.end()

    assert await_news(workers) == joint


def test_when_the_line_is_closed_nobody_is_left(run: RunDir, workers: AgentWorkers) -> None:
    workers.begin(0, None)
    everybody = pids(run, 0)
    agent = psutil.Process(everybody[0]).ppid()

    workers.close()

    until(lambda: not any(psutil.pid_exists(pid) for pid in [agent, *everybody.values()]))


@pytest.mark.parametrize(("text", "code"), [("", exit_codes.FAILED), ("input", exit_codes.REFUSED)])
def test_a_worker_that_cannot_be_imported_fails_every_attempt_and_says_why_in_each(
    text: str, code: int, run: RunDir, workers: AgentWorkers
) -> None:
    (run.path.parent / "broken").write_text(text)
    codes = []

    for attempt in range(2):
        workers.begin(attempt, None)
        codes.append(await_news(workers))

    failures = [first_failure(run, attempt) for attempt in range(2)]
    assert codes == [code, code]
    assert [(failure.rank, "no such net" in failure.exception) for failure in failures if failure] == [(-1, True)] * 2
    assert len(notes(run, "imported")) == 1


FEW_PROCESSES = """
import errno, os
fork, forked = os.fork, []

def fork_once_only():
    if len(forked) == 1:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    forked.append(fork())
    return forked[-1]

os.fork = fork_once_only
"""


NO_DESCRIPTORS = """
import errno, os
agent, dup = os.getpid(), os.dup

def dup_in_agent_only(fd):
    if os.getpid() != agent:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return dup(fd)

os.dup = dup_in_agent_only
"""


def agent_process() -> psutil.Process:
    """Return the agent that this process has started."""
    # Of a process that has ended and is not reaped, it gives no command line.
    every = psutil.process_iter(["ppid", "cmdline"])
    ours = [process for process in every if process.info["ppid"] == os.getpid()]
    (agent,) = [process for process in ours if "ddp_hpc.job.node.agent" in (process.info["cmdline"] or [])]
    return agent


def test_a_worker_that_can_open_no_more_files_leaves_and_does_not_go_on_as_a_second_agent(
    run: RunDir, workers: AgentWorkers
) -> None:
    (run.path.parent / "counting_worker.py").write_text(WORKER + NO_DESCRIPTORS)
    plan(run, 0, 0, 0)

    workers.begin(0, None)

    assert await_news(workers) == exit_codes.FAILED
    assert not agent_process().children()
    assert not run.agent_error(0, 0).exists(), "the agent itself has not failed"


def test_where_the_kernel_refuses_to_fork_a_worker_no_other_worker_is_left_and_the_report_names_the_limit(
    run: RunDir, workers: AgentWorkers
) -> None:
    code = run.path.parent / "counting_worker.py"
    code.write_text(WORKER + FEW_PROCESSES)

    workers.begin(0, None)
    await_news(workers)

    assert not agent_process().children()
    failure = first_failure(run, 0)
    assert failure is not None
    assert "the worker of rank 1" in failure.exception
    assert "`ulimit -u`" in failure.exception


def test_a_worker_that_a_real_time_signal_ends_is_reported_and_the_agent_stays(
    run: RunDir, workers: AgentWorkers
) -> None:
    workers.begin(0, None)
    os.kill(pids(run, 0)[1], 40)

    assert await_news(workers) == exit_codes.FAILED

    failure = first_failure(run, 0)
    assert failure is not None
    assert "killed by signal 40 (" in failure.exception
    workers.begin(1, None)
    assert len(pids(run, 1)) == NUM_WORKERS


def test_an_agent_that_an_error_ends_removes_its_directory_of_sockets(run: RunDir, tmp_path: Path) -> None:
    agent = "import sys, tempfile\nfrom ddp_hpc.job.node import agent\nfrom ddp_hpc.cluster.rank_probe import folder\n"
    made = (
        f"make = folder.make_folder\nagent.make_folder = lambda: make([{str(tmp_path)!r}])\nagent.main(sys.argv[1:])\n"
    )
    words = [str(run.path), "--worker", "counting_worker", "--num-workers", "1"]
    order = json.dumps({"do": "start", "attempt": 0, "meet": "nowhere"}) + "\n"

    done = subprocess.run(
        [sys.executable, "-c", agent + made, *words],
        input=order,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert "ValueError" in done.stderr
    assert not [*tmp_path.glob(".ddp-hpc-ranks-*")]
