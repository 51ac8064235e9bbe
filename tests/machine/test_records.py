"""What is written of machines, read again, and said of all nodes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.machine_use import (
    MachineUse,
    append_use,
    merge_uses,
    newest_uses,
    read_uses,
    use_texts,
    uses_as_json,
)
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
    gpu_busy=0.0,
    gpu_memory_gib=0.0,
    gpu_memory_total_gib=80.0,
    gpu_problem="GPU MIG-x: its utilisation is not known (Not Supported)",
    num_cpus=8.0,
    cpu_busy=0.0,
    memory_gib=2.0,
    memory_limit_gib=64.0,
)


def test_a_record_is_read_as_it_was_written_and_zero_stays_apart_from_not_known(run: RunDir) -> None:
    append_use(run, 0, FULL)
    append_use(run, 0, use(at=120.0))

    assert read_uses(run, 0) == [FULL, use(at=120.0)]


def test_the_newest_record_of_each_node_is_found_behind_a_half_written_one(run: RunDir) -> None:
    for at in range(200):
        append_use(run, 0, use(10, at=float(at)))
    append_use(run, 0, use(2, at=5.0))
    with run.machine_use(0, 10).open("ab") as file:
        file.write(b'\n{"node_rank":10,"at":')

    assert [(one.node_rank, one.at) for one in newest_uses(run, 0)] == [(10, 199.0), (2, 5.0)]


def test_of_a_long_attempt_only_the_newest_records_are_read_and_oldest_first(run: RunDir) -> None:
    """A run ends, and `status` answers, as soon as after a short attempt."""
    for at in range(400):
        append_use(run, 0, use(0, at=float(at)))
    found = read_uses(run, 0, most_bytes=0)

    assert 0 < len(found) < 400
    assert found == read_uses(run, 0)[-len(found) :]
    assert len(read_uses(run, 0)) == 400


OLDER = (
    '{"node_rank":0,"node":"n0","at":1.5,"seconds":15.0,"num_gpus":2,"gpus":[{"name":"0","busy":0.5,"memory_gib":1.0}],'
    '"num_cpus":4,"cpus_used":1.5,"throttled":0.1,"waiting":0.2,"memory_gib":2.0,"memory_limit_gib":8.0,"is_memory_of_node":true}'
)
"""A line of version 0.10."""


def test_the_lines_of_an_older_version_are_read_for_what_is_still_known(run: RunDir) -> None:
    run.machine_use(0, 0).write_text(f"\n{OLDER}\n")

    [found] = read_uses(run, 0)

    assert use_texts(found) == ["use of the CPUs is not known", "memory 2.0 of 8.0 GiB on n0"]


def test_lines_of_others_do_no_harm(run: RunDir) -> None:
    run.machine_use(0, 0).write_text(
        '7\nnull\n{"node_rank":0,"node":"n","at":1,"seconds":0}\n{"node_rank":"x","node":"n","at":1,"seconds":1}\n'
        '{"node_rank":0,"node":"n","at":NaN,"seconds":1}\n{"node_rank":0,"node":"n","at":1,"seconds":2,"gpus":[5]}\n\0\0'
    )

    [found] = read_uses(run, 0)

    assert (found.at, found.seconds) == (1.0, 2.0)
    assert newest_uses(run, 0) == [found]


def test_nothing_was_measured_before_the_first_record(run: RunDir) -> None:
    assert read_uses(run, 0) == newest_uses(run, 7) == []
    assert merge_uses([]) is None
    assert uses_as_json([]) is None


def words_of(*uses: MachineUse) -> str:
    found = merge_uses(uses)
    assert found is not None
    return "; ".join(use_texts(found))


def test_all_nodes_together_are_means_by_time_and_the_memory_is_that_of_the_fullest() -> None:
    of_gpus = {"gpu_memory_total_gib": 80.0, "memory_limit_gib": 64.0, "num_cpus": 4.0}
    one = use(0, seconds=30.0, gpu_busy=0.9, gpu_memory_gib=11.0, cpu_busy=0.25, memory_gib=9.0, **of_gpus)
    two = use(1, seconds=10.0, gpu_busy=0.1, gpu_memory_gib=10.0, cpu_busy=1.0, memory_gib=60.0, **of_gpus)

    assert words_of(one, two) == (
        "GPUs 70% busy, 11.0 of 80.0 GiB of GPU memory; 4 CPUs a node 44% busy; memory 60.0 of 64.0 GiB on n1, nearly all"
    )
    record = uses_as_json([one, two])
    assert record is not None
    assert (record["seconds"], [node["node"] for node in record["nodes"]]) == (30.0, ["n0", "n1"])


def test_what_is_not_known_is_said_and_is_not_zero() -> None:
    assert (
        words_of(use(gpu_problem="no driver"))
        == "use of the GPUs is not known (no driver); use of the CPUs is not known"
    )


def test_a_driver_that_hung_at_the_end_does_not_make_the_time_before_unknown() -> None:
    hung = use(at=110.0, gpu_problem="it hangs")

    assert words_of(use(gpu_busy=0.9, gpu_memory_gib=11.0, gpu_memory_total_gib=80.0), hung).startswith(
        "GPUs 90% busy, 11.0 of 80.0 GiB of GPU memory; "
    )


def test_a_run_without_gpus_does_not_speak_of_them() -> None:
    assert words_of(use(num_cpus=2.0, cpu_busy=0.5)) == "2 CPUs a node 50% busy"


def test_status_answers_where_the_file_system_does_not_say_what_was_measured(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: RunDir, attempt: int) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.attempt_logs(attempt)))

    record_start(run, attempt=0, job_id="1")
    monkeypatch.setattr(RunDir, "machine_use_paths", fail)

    assert main(["status", str(run.path)]) == 0
    assert "machines" not in capsys.readouterr().out
