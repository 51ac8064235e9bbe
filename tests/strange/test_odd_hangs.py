"""Ranks that hang, or are asked, in ways that the authors did not have in mind."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.processes import kill
from ddp_hpc.cluster.rank_probe.client import NoAnswerError, RankProbe
from ddp_hpc.cluster.rank_probe.collect import process_state
from ddp_hpc.cluster.rank_probe.compare_ranks import compare
from ddp_hpc.cluster.rank_probe.folder import make_folder, socket_of
from ddp_hpc.job.script.liveness import cpu_seconds
from ddp_hpc.run.run_dir.hang_records import DUMPING_STATE, RankInHang, read_hang_records, write_hang_record
from ddp_hpc.run.run_dir.paths import RunDir
from tests.unit.test_compare_ranks import LOADS, OPEN, launched, rank

SCRIPT = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from ddp_hpc.cluster.rank_probe.client import RankProbe
from ddp_hpc.cluster.rank_probe.server import serve_at_rendezvous

path = Path(sys.argv[1])
assert serve_at_rendezvous(path) == ""
exec(sys.argv[2])
for _ in range(2):  # some scripts join, leave and join again
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()
assert RankProbe(path=path, answer_s=30).ping() == os.getpid()
os.closerange(3, 300)  # daemons do that
open(os.devnull)
os._exit(7)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "before",
    [
        "sys.stderr = None",
        pytest.param("os.close(2)", marks=pytest.mark.long),
        pytest.param("sys.stderr.close()", marks=pytest.mark.long),
        pytest.param("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))", marks=pytest.mark.long),
        pytest.param("dist.rendezvous = None; import signal; signal.setitimer(signal.ITIMER_REAL, 600, 1)", marks=pytest.mark.long),
        pytest.param("pid = os.fork()\nif pid == 0:\n    dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1); os._exit(0)\nos.waitpid(pid, 0); assert not path.exists()", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_script_that_does_odd_things_to_its_descriptors_answers_and_ends_as_ever(before: str, tmp_path: Path) -> None:
    folder = make_folder()
    assert folder is not None

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, socket_of(folder.path, 0), before], capture_output=True, check=False, timeout=120
    )
    folder.close()

    assert done.returncode == 7, done.stderr


def test_what_only_looks_like_a_leftover_is_not_removed(tmp_path: Path) -> None:
    place, data = tmp_path / "tmp", tmp_path / "data"
    place.mkdir()
    data.mkdir()
    (data / "weights").touch()
    (place / "ddp-hpc-link").symlink_to(data)
    (place / "ddp-hpc-file").touch()
    for path in place.iterdir():
        os.utime(path, (1, 1), follow_symlinks=False)

    folder = make_folder([str(place)])

    assert folder is not None
    assert (data / "weights").exists()
    assert (place / "ddp-hpc-file").exists()
    folder.close()
    assert make_folder([str(place / "ddp-hpc-file"), "/proc"]) is None  # no disk can be written


def test_records_of_nodes_whose_clocks_differ_by_an_hour_are_of_one_hang(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number, at in ((0, time.time()), (1, time.time() + 3600)):
        write_hang_record(run, 0, RankInHang(rank=number, host=f"node{number}", at=at))

    assert [record.rank for record in read_hang_records(run, 0)] == [0, 1]


def test_a_process_with_a_name_that_looks_like_its_state_is_read_right() -> None:
    sleeper = subprocess.Popen(
        ["/bin/sh", "-c", "printf 'x) R 1 (y' > /proc/$$/comm; read line"], stdin=subprocess.PIPE
    )
    try:
        ends_at = time.monotonic() + 30
        while b"x) R" not in Path(f"/proc/{sleeper.pid}/comm").read_bytes():
            assert time.monotonic() < ends_at
        while process_state(sleeper.pid) != "sleeping":
            assert time.monotonic() < ends_at
        assert cpu_seconds(sleeper.pid) >= 0
    finally:
        kill([sleeper.pid])
        sleeper.wait()
        assert sleeper.stdin is not None
        sleeper.stdin.close()


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/sys/kernel/core_pattern").read_text().startswith("core"), reason="core files go elsewhere"
)
def test_a_rank_whose_core_file_is_still_being_written_has_crashed_and_does_not_hang(tmp_path: Path) -> None:
    allow = f"import resource; resource.setrlimit(resource.RLIMIT_CORE, ({1 << 30}, {1 << 30}))"
    fill = f"memory = bytearray(b'1') * {1 << 30}"
    crashing = subprocess.Popen([sys.executable, "-c", f"{allow}; {fill}; import os; os.abort()"], cwd=tmp_path)
    states = set()
    while crashing.poll() is None:
        states.add(process_state(crashing.pid))
    for core in tmp_path.glob("core*"):
        core.unlink()
    assert DUMPING_STATE in states

    verdict = compare([rank(0, OPEN), rank(1, flight_record=None, stacks=None, answers=False, state=DUMPING_STATE)], 2)

    assert (verdict.kind, verdict.ranks) == ("crashed", [1])
    assert "core file" in verdict.how


def test_five_hundred_ranks_are_compared_at_once_and_the_one_that_is_late_is_named() -> None:
    chance = random.Random(3)
    late = chance.randrange(512)

    def entries(number: int) -> list[dict[str, Any]]:
        first = chance.randrange(1, 40)  # rings of records begin at different places
        last = 90 if number == late else 91
        return [launched(count, done=count <= 90) for count in range(first, last + 1)]

    records = [rank(number, *entries(number), **({"frames": LOADS} if number == late else {})) for number in range(512)]

    found = compare(records, 512)

    assert (found.kind, list(found.ranks)) == ("behind", [late])
    assert "others wait in collective 91" in found.how


def test_ranks_that_launch_ahead_without_waiting_are_not_mixed_up() -> None:
    ahead = [launched(number, done=False) for number in range(4, 40)]

    found = compare([rank(0, *ahead), rank(1, *ahead[:30]), rank(2, launched(3), frames=LOADS)], 3)

    assert (found.kind, list(found.ranks)) == ("behind", [2])


def test_scripts_that_start_as_new_processes_give_no_verdict_but_a_stopped_one_is_named() -> None:
    unknown: dict[str, Any] = {"flight_record": None, "stacks": None, "answers": False, "state": "sleeping"}

    assert compare([rank(0, **unknown), rank(1, **unknown)], 2).kind == ""
    held = compare([rank(0, **unknown), rank(1, **{**unknown, "state": "stopped"})], 2)
    assert (held.kind, list(held.ranks), held.how) == ("behind", [1], "is stopped (SIGSTOP)")
    stopped = compare([rank(0, OPEN), rank(1, **{**unknown, "state": "stopped by a debugger"})], 2)
    assert (stopped.kind, stopped.how) == ("behind", "is stopped by a debugger")


def test_a_group_name_of_a_user_is_shown_and_one_of_two_backends_is_not_mixed_with_the_other() -> None:
    named = {"process_group": ["7", "tensor parallel"], "profiling_name": "nccl:_allgather_base"}
    records = [
        rank(0, {**launched(2, done=False), **named}, launched(9)),
        rank(1, {**launched(1), **named}, {**launched(2), **named, "profiling_name": "gloo:broadcast"}, frames=LOADS),
    ]

    found = compare(records, 2)

    assert (found.kind, list(found.ranks)) == ("behind", [1])
    assert "1 collectives of group 7 (tensor parallel)" in found.how
    assert "_allgather_base of 4 Float elements" in found.how


def test_a_folder_that_somebody_has_deleted_is_said_to_be_gone(tmp_path: Path) -> None:
    folder = make_folder([str(tmp_path)])
    assert folder is not None
    shutil.rmtree(folder.path)

    with pytest.raises(NoAnswerError, match="No such file"):
        RankProbe(path=socket_of(folder.path, 0)).ping()

    folder.close()
