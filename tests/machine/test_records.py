"""What is written of machines, read again, and said of all nodes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from ddp_hpc.cli import main
from ddp_hpc.run.run_dir import machine_use
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.machine_use import (
    GpuUse,
    MachineUse,
    append_use,
    newest_uses,
    read_uses,
    recent_uses,
    summary_of,
)
from ddp_hpc.run.run_dir.machine_words import gpus as gpus_in_words
from ddp_hpc.run.run_dir.machine_words import sentence
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    return run


def use(node_rank: int = 0, at: float = 100.0, seconds: float = 10.0, **more: object) -> MachineUse:
    return MachineUse(node_rank=node_rank, node=f"n{node_rank}", at=at, seconds=seconds, **more)  # type: ignore[arg-type]


FULL = use(
    0,
    num_gpus=2,
    gpus=(GpuUse(name="0", busy=0.0, memory_gib=0.0, total_gib=80.0), GpuUse(name="MIG-x", memory_gib=1.0)),
    gpu_problem="GPU MIG-x: its utilisation is not known (Not Supported)",
    num_cpus=8,
    cpus_used=0.0,
    throttled=0.0,
    waiting=0.0,
    memory_gib=2.0,
    memory_limit_gib=64.0,
)


def test_a_line_is_read_as_it_was_written_and_zero_stays_apart_from_not_known(run: RunDir) -> None:
    append_use(run, 0, FULL)
    append_use(run, 0, use(0, at=120.0, is_memory_of_node=True))

    assert read_uses(run, 0) == [FULL, use(0, at=120.0, is_memory_of_node=True)]
    assert FULL.gpu_busy == 0.0
    assert read_uses(run, 0)[1].gpu_busy is None


def test_the_newest_line_of_each_node_is_found_behind_a_half_written_one(run: RunDir) -> None:
    for at in range(200):
        append_use(run, 0, use(10, at=float(at)))
    append_use(run, 0, use(2, at=5.0))
    with run.machine_use(0, 10).open("ab") as file:
        file.write(b'\n{"node_rank":10,"at":')

    assert [(one.node_rank, one.at) for one in newest_uses(run, 0)] == [(2, 5.0), (10, 199.0)]


def test_of_a_long_attempt_only_the_newest_lines_are_read_and_oldest_first(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends, and `status` answers, as soon as after a short attempt."""
    for at in range(400):
        append_use(run, 0, use(0, at=float(at)))
    assert recent_uses(run, 0) == read_uses(run, 0)

    monkeypatch.setattr(machine_use, "RECENT_BYTES", 0)
    found = recent_uses(run, 0)

    assert 0 < len(found) < 400
    assert found == read_uses(run, 0)[-len(found) :]


def test_lines_of_others_do_no_harm(run: RunDir) -> None:
    run.machine_use(0, 0).write_text(
        '7\nnull\n{"node_rank":0,"at":1,"seconds":0}\n{"node_rank":"x","at":1,"seconds":1}\n'
        '{"node_rank":0,"at":NaN,"seconds":1}\n{"node_rank":0,"at":1,"seconds":2,"gpus":[5],"cpus_used":"many"}\n\0\0'
    )

    [found] = read_uses(run, 0)

    assert (found.at, found.seconds, found.gpus, found.cpus_used) == (1.0, 2.0, (), None)
    assert newest_uses(run, 0) == [found]


def test_nothing_was_measured_before_the_first_line(run: RunDir) -> None:
    assert read_uses(run, 0) == newest_uses(run, 7) == []
    assert summary_of([]) is None


def gpus(*busy: float | None) -> tuple[GpuUse, ...]:
    return tuple(
        GpuUse(name=str(number), busy=one, memory_gib=10.0 + number, total_gib=80.0) for number, one in enumerate(busy)
    )


def test_all_nodes_together_are_means_by_time_and_size_and_the_nodes_that_stand_out_are_named() -> None:
    one = use(
        0,
        seconds=30.0,
        num_gpus=2,
        gpus=gpus(0.9, 0.9),
        num_cpus=4,
        cpus_used=1.0,
        memory_gib=9.0,
        memory_limit_gib=64.0,
    )
    two = use(
        1,
        seconds=10.0,
        num_gpus=2,
        gpus=gpus(0.1, 0.1),
        num_cpus=12,
        cpus_used=12.0,
        memory_gib=60.0,
        memory_limit_gib=64.0,
    )

    found = summary_of([one, two])

    assert found is not None
    assert found.gpu_busy == pytest.approx(0.7)
    assert (found.num_cpus, found.num_gpus, found.num_nodes) == (16, 4, 2)
    assert sentence(found) == (
        "GPUs 70% busy (10% on n1), 11.0 of 80.0 GiB of GPU memory; 16 CPUs 62% busy (100% on n1); "
        "memory 60.0 of 64.0 GiB on n1, nearly all"
    )


def test_what_is_not_known_is_said_and_is_not_zero() -> None:
    found = summary_of([use(0, num_gpus=4, gpu_problem="no driver")])

    assert found is not None
    assert sentence(found) == "use of the GPUs is not known (no driver); use of the CPUs is not known"


def test_some_gpus_that_are_known_do_not_stand_for_all() -> None:
    found = summary_of([use(0, num_gpus=4, gpus=gpus(0.5, None), num_cpus=2, cpus_used=1.0)])

    assert found is not None
    assert sentence(found).startswith("GPUs 50% busy (1 of 4 are known)")


def test_a_driver_that_hung_at_the_end_does_not_make_the_time_before_unknown() -> None:
    before = use(0, at=100.0, num_gpus=2, gpus=gpus(0.9, 0.9))
    found = summary_of([before, use(0, at=110.0, num_gpus=2, gpu_problem="it hangs")])

    assert found is not None
    assert gpus_in_words(found) == "GPUs 90% busy, 11.0 of 80.0 GiB of GPU memory"


def test_a_run_without_gpus_does_not_speak_of_them() -> None:
    found = summary_of([use(0, num_cpus=2, cpus_used=1.0, throttled=1.0)])

    assert found is not None
    assert sentence(found) == "2 CPUs 50% busy, the cgroup's quota stops them for 50% of the time"


def test_status_answers_where_the_file_system_does_not_say_what_was_measured(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: RunDir, attempt: int) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.attempt_logs(attempt)))

    record_start(run, attempt=0, job_id="1")
    monkeypatch.setattr(RunDir, "machine_uses", fail)

    assert main(["status", str(run.path)]) == 0
    assert "machines" not in capsys.readouterr().out
