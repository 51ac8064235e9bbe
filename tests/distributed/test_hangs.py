"""Real ranks on gloo that wait for ever: what their node keeps of each says who hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_hpc.cluster.rank_probe.client import NoAnswerError, RankProbe
from ddp_hpc.cluster.rank_probe.collect import keep_hang_records
from ddp_hpc.cluster.rank_probe.compare_ranks import ComparedRanks, compare
from ddp_hpc.cluster.rank_probe.folder import ProbeFolder, make_folder, socket_of
from ddp_hpc.cluster.rank_probe.server import serve
from ddp_hpc.run.run_dir.failure_reports import HangKind
from ddp_hpc.run.run_dir.hang_records import RankInHang, read_hang_records
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.skips import has_record_of_gloo

WORLD_SIZE = 3


def reduce(size: int = 4, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def sleep_in_python() -> None:
    time.sleep(600)


def two_groups() -> None:
    """Ranks 0 and 1 meet in one group, 1 and 2 in another one; rank 2 comes to neither, so rank 1 waits, and rank 0 for that."""
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    if rank == 0:
        reduce(group=groups[0])
    elif rank == 1:
        reduce(group=groups[1])
        reduce(group=groups[0])
    else:
        sleep_in_python()


def on_rank_two(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        if dist.get_rank() == WORLD_SIZE - 1:
            work()
        reduce()

    return run


HANGS: Mapping[str, tuple[Callable[[], None], HangKind, Sequence[int], str]] = {
    "sleeps in Python": (on_rank_two(sleep_in_python), "behind", [2], "in sleep_in_python: it has launched 2 collectives"),
    "holds the interpreter": (on_rank_two(lambda: ctypes.PyDLL(None).sleep(600)), "behind", [2], "interpreter (GIL)"),
    "is stopped": (on_rank_two(lambda: os.kill(os.getpid(), signal.SIGSTOP)), "behind", [2], "is stopped (SIGSTOP)"),
    "calls another operation": (on_rank_two(lambda: dist.broadcast(torch.ones(4), 2)), "different", [0, 2], "rank 2 calls broadcast of 4 Float elements"),
    "two groups": (two_groups, "behind", [2], "in sleep_in_python"),
}  # fmt: skip


@contextmanager
def ranks_of(work: Callable[[], None], folder: ProbeFolder, path: Path) -> Iterator[None]:
    """Fork the ranks, which meet, reduce twice, and go on to what hangs."""
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                os.dup2(os.open(path / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                torch.set_num_threads(1)
                assert serve(socket_of(folder.path, rank)) == ""
                store = dist.FileStore(str(path / "store"), WORLD_SIZE)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(minutes=5)
                )
                reduce()
                reduce()
                work()
                time.sleep(600)
            os._exit(1)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def verdict_in_time(run: RunDir, folder: ProbeFolder, said: str) -> tuple[ComparedRanks, Sequence[RankInHang]]:
    """Ask until the ranks stand where they hang: they need time to get there."""
    ends_at = time.monotonic() + 60
    while True:
        with suppress(NoAnswerError):
            entries = RankProbe(path=socket_of(folder.path, 0), answer_s=30).flight_record().get("entries")
            if entries and not entries[-1]["retired"]:
                keep_hang_records(
                    run, 0, {rank: socket_of(folder.path, rank) for rank in range(WORLD_SIZE)}, answer_s=2.0
                )
                records = read_hang_records(run, 0)
                if said in (verdict := compare(records, WORLD_SIZE)).how or time.monotonic() > ends_at:
                    return verdict, records
        assert time.monotonic() < ends_at
        time.sleep(0.1)


QUICK = {"sleeps in Python"}


@has_record_of_gloo
@pytest.mark.parametrize("hang", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.long) for one in HANGS])
def test_who_hangs_is_named_from_what_the_ranks_answer(hang: str, tmp_path: Path) -> None:
    work, kind, ranks, said = HANGS[hang]
    folder = make_folder()
    assert folder is not None
    run = RunDir(tmp_path / "run")

    with ranks_of(work, folder, tmp_path):
        verdict, records = verdict_in_time(run, folder, said)
    folder.close()

    assert (verdict.kind, list(verdict.ranks)) == (kind, ranks), verdict
    assert said in verdict.how
    assert records[2].line == ("time.sleep(600)" if "in sleep_in_python" in said else "")
    assert len(records) == WORLD_SIZE  # one also of a rank that did not answer
    assert all(record.pid and record.state for record in records)
