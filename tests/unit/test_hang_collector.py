"""A node asks its ranks what they do shortly before a watchdog ends one of them, once for each time that they are silent."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddp_hpc.cluster.rank_probe import collect as collect_module
from ddp_hpc.cluster.rank_probe.client import RankProbe
from ddp_hpc.cluster.rank_probe.collect import ask_rank, process_state
from ddp_hpc.cluster.rank_probe.deadlines import LOOK_S, Deadline, HangCollector, deadline_file
from ddp_hpc.job.node.agent import _make_hang_collector
from ddp_hpc.job.script.liveness import cpu_seconds
from ddp_hpc.run.run_dir.hang_records import RankInHang, read_hang_records, write_hang_record
from ddp_hpc.run.run_dir.paths import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def records(run: RunDir) -> list[tuple[int, float]]:
    return [(record.rank, record.at) for record in read_hang_records(run, 0)]


def test_the_ranks_are_asked_before_the_first_deadline_and_not_again_for_the_same(run: RunDir, tmp_path: Path) -> None:
    collector = HangCollector(run, 0, tmp_path, [4, 5])
    deadlines = [Deadline(deadline_file(tmp_path, rank)) for rank in (4, 5)]

    deadlines[0].put_off(900)
    deadlines[1].put_off(float("inf"))
    collector.look()
    assert records(run) == []
    assert collector.patience_s() == LOOK_S

    deadlines[0].put_off(0.0)
    deadlines[1].put_off(2.0)  # within a step of the other one
    collector.look()
    asked = records(run)
    assert [rank for rank, _ in asked] == [4, 5]  # one that does not answer, too
    collector.look()
    assert records(run) == asked

    deadlines[1].put_off(1800)  # it went on, so nothing was lost, and a later silence is another one
    collector.look()
    assert records(run) == asked
    deadlines[1].put_off(0.0)
    collector.look()
    assert records(run) != asked


def test_a_look_comes_in_time_for_a_short_timeout(run: RunDir, tmp_path: Path) -> None:
    collector = HangCollector(run, 0, tmp_path, [0])
    Deadline(deadline_file(tmp_path, 0)).put_off(4.0)

    collector.look()

    assert collector.patience_s() <= 3.0  # a quarter of the timeout before the deadline
    assert records(run) == []


def test_deadlines_of_an_earlier_attempt_and_damaged_ones_count_for_nothing(run: RunDir, tmp_path: Path) -> None:
    collector = HangCollector(run, 0, tmp_path, [0, 1])
    Deadline(deadline_file(tmp_path, 0)).put_off(-1.0)
    deadline_file(tmp_path, 1).write_bytes(b"half")
    collector.forget()

    collector.look()

    assert records(run) == []
    Deadline(tmp_path / "missing" / "file").put_off(1.0)  # no directory: the rank trains all the same


def test_a_rank_that_does_not_answer_has_a_record_of_what_the_kernel_says(tmp_path: Path) -> None:
    record = ask_rank(3, RankProbe(path=tmp_path / "nothing"), pid=os.getpid())

    assert (record.rank, record.pid, record.answers) == (3, os.getpid(), False)
    assert record.state in {"running", "sleeping"}
    assert "No such file" in record.unknown["ping"]
    assert process_state(None) == process_state(2**22 + 1) == ""


def test_records_of_an_earlier_silence_or_in_another_format_are_left_out(run: RunDir) -> None:
    now = time.time()
    write_hang_record(run, 0, RankInHang(rank=0, host="a", at=now - 500))
    write_hang_record(
        run, 0, RankInHang(rank=1, host="b", at=now, flight_record={"entries": [{"n": i} for i in range(9999)]})
    )
    os.utime(run.hang_record(0, 0), (now - 500, now - 500))
    path = run.hang_record(0, 2)
    path.write_text('["no record"]')
    run.hang_record(0, 3).write_text('{"rank": 3')

    [found] = read_hang_records(run, 0)

    assert found.rank == 1
    assert found.flight_record is not None
    assert found.flight_record["entries"][-1] == {"n": 9998}
    assert len(found.flight_record["entries"]) == 400


def test_the_cpu_time_of_a_process_that_has_ended_is_nothing() -> None:
    assert cpu_seconds(2**22 + 1) == 0.0
    assert cpu_seconds(os.getpid()) > 0.0


@pytest.mark.parametrize("may_fork", [True, False])
def test_an_agent_does_not_wait_for_a_file_system_that_takes_no_record(
    may_fork: bool, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_file_system(run: RunDir, attempt: int, record: RankInHang) -> None:
        ends_at = time.monotonic() + 10
        while not (tmp_path / "answers").exists() and time.monotonic() < ends_at:
            time.sleep(0.01)
        write_hang_record(run, attempt, record)

    monkeypatch.setattr(collect_module, "write_hang_record", wait_for_file_system)
    collector = _make_hang_collector(run, 0, tmp_path, range(1), may_fork=may_fork)
    Deadline(deadline_file(tmp_path, 0)).put_off(0.0)

    collector.look()

    assert records(run) == []
    (tmp_path / "answers").touch()
    while not records(run):
        time.sleep(0.01)
