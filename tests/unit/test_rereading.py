"""Looking again and again: what has not changed is not read again, and nothing that changes is missed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.durable import append_json_line, replace_text
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import LOOK_INTERVAL_S, SETTLED_S, ReadCache, SaveWatch, Tail, await_next_poll
from ddp_hpc.watch import status as status_module
from ddp_hpc.watch.follow import follow
from tests.made_run import add_attempt, add_checkpoint, add_metrics, add_progress, make_run
from tests.pauses import in_pauses_of


class Looks:
    """Looks at one file, `LOOK_INTERVAL_S` apart, that count how often it is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.now, self.num_reads = path, 0.0, 0
        self._files = ReadCache(clock=lambda: self.now)

    def look(self, *, later_s: float = LOOK_INTERVAL_S) -> str | None:
        self.now += later_s
        return self._files.read(self.path, self._read)

    def _read(self) -> str | None:
        self.num_reads += 1
        return self.path.read_text() if self.path.exists() else None


def test_a_file_that_stays_as_it_is_is_read_twice_and_then_no_more(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.write_text("one")
    looks = Looks(path)

    assert [looks.look() for _ in range(10)] == ["one"] * 10
    assert looks.num_reads == 2


def test_a_file_that_is_not_there_is_looked_for_at_every_look_and_read_as_soon_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    looks = Looks(path)

    before = [looks.look() for _ in range(5)]
    path.write_text("one")

    assert (before, looks.look()) == ([None] * 5, "one")


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("+")


@pytest.mark.parametrize("change", [append, lambda path: replace_text(path, "two"), Path.unlink])
def test_a_file_that_grows_or_is_replaced_or_goes_is_read_again(change: object, tmp_path: Path) -> None:
    assert callable(change)
    path = tmp_path / "progress.json"
    path.write_text("one")
    looks = Looks(path)
    for _ in range(5):
        looks.look()

    change(path)

    assert looks.look() == (path.read_text() if path.exists() else None)


def test_a_change_that_the_clock_of_the_file_system_is_too_coarse_for_is_seen_a_look_later(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.write_text("one")
    looks = Looks(path)
    assert looks.look() == "one"
    found = path.stat()

    path.write_text("two")  # of the same length, and within the same tick
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    assert looks.look(later_s=2 * SETTLED_S) == "two"


def test_a_new_entry_of_a_directory_is_a_change(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    now = [0.0]
    files, counts = ReadCache(clock=lambda: now[0]), []

    def look() -> list[str]:
        now[0] += LOOK_INTERVAL_S
        return files.read(run.checkpoints, names)

    def names() -> list[str]:
        counts.append(1)
        return sorted(os.listdir(run.checkpoints))  # noqa: PTH208  names

    add_checkpoint(run, 20)
    for _ in range(4):
        look()
    add_checkpoint(run, 40)

    assert (len(look()), len(counts)) == (2, 3)


def test_a_file_system_that_does_not_answer_is_asked_by_the_reader_who_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "open", refuse)

    assert ReadCache().read(tmp_path / "progress.json", lambda: "asked") == "asked"


def test_a_file_of_lines_is_read_from_where_the_last_reading_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)

    def lines() -> Iterator[list[int]]:
        yield [line["step"] for line in tail.new_records()]
        for step in (1, 2):
            append_json_line(path, {"step": step})
        yield [line["step"] for line in tail.new_records()]
        yield [line["step"] for line in tail.new_records()]
        with path.open("a") as file:
            file.write('{"step":')
        yield [line["step"] for line in tail.new_records()]
        with path.open("a") as file:
            file.write(' 3}\nnot one of ours\n[4]\n\0\0{"step": 5}\n')
        yield [line["step"] for line in tail.new_records()]

    assert list(lines()) == [[], [1, 2], [], [], [3, 5]]


def test_of_a_long_file_of_lines_the_end_and_parts_before_it_are_read_and_then_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path, most_bytes=40_000)
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(100_000)))

    first = [line["step"] for line in tail.new_records()]
    append_json_line(path, {"step": 100_000})
    then = [line["step"] for line in tail.new_records()]

    assert first == sorted(set(first))
    assert (first[0], first[-1], then) == (0, 99_999, [100_000])
    assert first[-600:] == list(range(99_400, 100_000))
    assert len(first) < 2000
    assert max(later - earlier for earlier, later in pairwise(first)) < 100_000 / 50


def test_a_file_of_lines_that_is_replaced_or_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail.new_records()

    replace_text(path, '{"step": 1}\n{"step": 7}\n')
    replaced = tail.new_records()
    path.write_text('{"step": 8}\n')
    cut = tail.new_records()

    assert [[line["step"] for line in lines] for lines in (replaced, cut)] == [[1, 7], [8]]


def test_a_new_file_that_got_the_old_ones_inode_and_grew_past_it_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail.new_records()

    path.write_text("".join(f'{{"step": {step}}}\n' for step in (11, 12, 13, 14)))  # in place: of the same inode

    assert [line["step"] for line in tail.new_records()] == [11, 12, 13, 14]


def test_following_a_run_in_which_nothing_happens_reads_none_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    add_attempt(run)
    add_progress(run)
    add_checkpoint(run, 20)
    add_metrics(run, [{"kind": "eval", "step": 20, "epoch": 1, "loss": 0.5, "at": time.time() + 1}])
    fd = processes.take_lock(run.lock)
    assert fd is not None
    reads: list[str] = []
    monkeypatch.setattr("ddp_hpc.run.run_dir.poll_files.SETTLED_S", 0.0)
    monkeypatch.setattr(Ledger, "read", counting("Ledger.read", Ledger.read, reads))
    for name in ("read_progress", "read_queued_job"):
        monkeypatch.setattr(status_module, name, counting(name, getattr(status_module, name), reads))
    looks = follow(run, 0, clock=time.time, pause=lambda _: None)
    for _ in range(4):
        next(looks)
    reads.clear()

    for _ in range(10):
        assert next(looks).status.state == "running"

    assert reads == []
    os.close(fd)


def counting(name: str, read: object, reads: list[str]) -> object:
    """Return `read`, with each call noted."""
    assert callable(read)

    def counted(*args: object) -> object:
        reads.append(name)
        return read(*args)

    return counted


def test_the_pause_between_two_looks_ends_when_the_supervisor_does(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    code = (
        "import sys; from tests.made_run import *; add_attempt(RunDir(Path(sys.argv[1]))); print(flush=True); input()"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert supervisor.stdout is not None
    supervisor.stdout.readline()
    (attempt,) = Ledger.read(run).attempts
    assert attempt.is_alive_on(attempt.host)
    threading.Timer(0.3, supervisor.kill).start()

    began = time.monotonic()
    processes.await_exit(attempt.pid, attempt.pid_start, timeout_s=600)  # would stand here for ten minutes

    assert time.monotonic() - began < 300
    assert not attempt.is_alive_on(attempt.host)
    supervisor.communicate()


@pytest.mark.parametrize("error", [None, OSError(errno.EPERM, "no"), OSError(errno.EMFILE, "no")])
def test_where_nobody_can_say_that_a_process_ends_the_whole_pause_is_made(
    error: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python without `pidfd_open`, a sandbox that forbids it, no descriptor left: never a pause of nothing."""
    run = make_run(tmp_path)
    add_attempt(run)
    pauses: list[float] = []
    in_pauses_of("ddp_hpc.base.processes", pauses.append, monkeypatch)

    def refuse(_: int) -> int:
        assert error is not None
        raise error

    if error is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)

    await_next_poll(Ledger.read(run).attempts[0])

    assert pauses == [LOOK_INTERVAL_S]


def test_a_process_is_waited_for_by_who_has_more_than_a_thousand_files_open() -> None:
    with ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))  # noqa: PTH123  many, and quick
        processes.await_exit(os.getpid(), None, timeout_s=0.01)


def test_a_process_that_proc_hides_is_not_known_to_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`hidepid=1` of proc(5), for other users' processes."""
    run = make_run(tmp_path)
    add_attempt(run)
    (attempt,) = Ledger.read(run).attempts

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "read_text", refuse)

    assert not attempt.is_alive_on(attempt.host)


def test_one_flaky_look_at_the_ledger_between_two_looks_ends_no_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    add_attempt(run)
    fd = processes.take_lock(run.lock)
    assert fd is not None
    errors = [OSError(errno.ESTALE, "Stale file handle")]

    def flaky(run: RunDir) -> object:
        if errors:
            raise errors.pop()
        return Ledger.read(run)

    monkeypatch.setattr("ddp_hpc.run.run_dir.poll_files.SETTLED_S", 1e9)  # each look reads
    monkeypatch.setattr("time.sleep", lambda _: None)
    looks = follow(run, 0, clock=time.time, pause=lambda _: None)
    next(looks)
    monkeypatch.setattr("ddp_hpc.run.run_dir.poll_files.Ledger", SimpleNamespace(read=flaky))

    assert next(looks).status.state == "starting"
    assert errors == []
    os.close(fd)


def test_a_process_that_lives_is_waited_for_until_it_ends_and_another_of_its_number_is_not() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = processes.start_ticks(sleeper.pid)
    assert started is not None

    processes.await_exit(sleeper.pid, started + 1, timeout_s=600)
    processes.await_exit(sleeper.pid, started, timeout_s=0.01)
    assert sleeper.poll() is None
    sleeper.kill()
    processes.await_exit(sleeper.pid, started, timeout_s=600)

    sleeper.communicate()
    assert sleeper.returncode == -9


def test_a_run_on_another_host_is_looked_at_after_the_whole_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    add_attempt(run)
    pauses: list[float] = []
    in_pauses_of("ddp_hpc.run.run_dir.poll_files", pauses.append, monkeypatch)
    monkeypatch.setattr("ddp_hpc.base.processes.host_name", lambda: "login")

    await_next_poll(Ledger.read(run).attempts[0])
    await_next_poll(None)

    assert pauses == [LOOK_INTERVAL_S] * 2


@pytest.mark.parametrize(("host", "is_held"), [("", True), ("elsewhere", None)])
def test_another_users_lock_is_not_tried_but_its_supervisor_is_looked_for(
    host: str, is_held: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    add_attempt(run)  # by this process
    run.lock.touch()
    (attempt,) = Ledger.read(run).attempts
    monkeypatch.setattr(os, "geteuid", lambda: run.lock.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(processes, "is_locked", lambda _: pytest.fail("the lock was tried"))

    assert status_module.is_held_here(run, attempt, host or attempt.host) is is_held


def test_a_lock_that_its_server_gives_another_owner_is_ours_where_we_may_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with `all_squash`, an idmap that fails, SMB."""
    run = make_run(tmp_path)
    fd = processes.take_lock(run.lock)
    assert fd is not None
    monkeypatch.setattr(os, "geteuid", lambda: run.lock.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_, **__: True)

    held = status_module.is_held_here(run, None, "here")
    os.close(fd)

    assert (held, status_module.is_held_here(run, None, "here")) == (True, False)


def test_whoever_waits_is_told_of_the_first_failed_save_in_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    saves = SaveWatch(run, 1, ReadCache())

    saves.warn_of_failures()  # before there is any progress
    for attempt, error in ((0, "of before"), (1, None), (1, "full"), (1, "full"), (1, None), (2, "quota")):
        add_progress(run, attempt=attempt, save_error=error)
        saves.warn_of_failures()

    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[3].split(";")[0] for line in told] == ["full", "quota"]
    assert all(line.startswith(f"warning: {run.name}: the newest save failed: ") for line in told)
