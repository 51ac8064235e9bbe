"""Who hangs: read from what real watchdogs left in real logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_hpc.cluster.rank_probe.hang_verdict import straggler
from ddp_hpc.job.ending.hang_report import has_stacks, read_rank_stacks
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import add_log, make_run

PATIENCE_S = 100.0

RANKS = """
import json, os, sys, time
import torch
import torch._dynamo  # DistributedDataParallel would import it in each rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_hpc.train.watchdog import Watchdog

class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if rank == late:
            time.sleep(600)
        return torch.ones(3)

def wait_in_backward(model, batch):
    model(batch).sum().backward()

def wait_in_collective(model, batch):
    dist.all_reduce(batch)

torch.set_num_threads(1)
for late, walk, timeouts_s, store, logs in json.loads(sys.argv[1]):
    for rank, log in enumerate(logs):
        if os.fork() == 0:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
            model = DistributedDataParallel(nn.Linear(3, 1))
            dist.barrier()
            Watchdog(timeouts_s[rank]).feed()
            for batch in torch.utils.data.DataLoader(Photos(), batch_size=2):
                globals()[walk](model, batch)
            os._exit(0)
for _ in range(2 * len(json.loads(sys.argv[1]))):
    os.wait()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@dataclass(frozen=True)
class Hang:
    """Two ranks, one of which keeps the other waiting."""

    late: int
    walk: str
    timeouts_s: tuple[float, float]
    bitten_ranks: list[int]


HANGS = {
    "in the backward": Hang(1, "wait_in_backward", (5, 8), [0, 1]),
    "in a collective": Hang(0, "wait_in_collective", (8, 5), [0, 1]),
    "bitten first, so the other loses its connection": Hang(0, "wait_in_collective", (5, 600), [0]),
}


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Have all of them hang at once, in processes that import torch together; return their runs."""
    runs = {name: make_run(tmp_path_factory.mktemp("hung")) for name in HANGS}
    asked = [
        (
            hang.late,
            hang.walk,
            hang.timeouts_s,
            str(run.path / "store"),
            [str(add_log(run, "", rank=rank)) for rank in range(2)],
        )
        for hang, run in zip(HANGS.values(), runs.values(), strict=True)
    ]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", RANKS, json.dumps(asked)], env=environ, check=True, timeout=2 * PATIENCE_S)
    return runs


@pytest.mark.parametrize("name", HANGS)
def test_the_rank_that_keeps_the_others_waiting_is_named_with_the_line_where_it_stands(
    name: str, hung: dict[str, RunDir]
) -> None:
    hang, run = HANGS[name], hung[name]
    logs = [run.rank_log(0, rank).read_text() for rank in range(2)]

    stands = read_rank_stacks(run, 0, 2)

    lost_peer = {rank for rank, log in enumerate(logs) if "Connection closed by peer" in log}
    assert [stand.rank for stand in stands] == hang.bitten_ranks, logs
    assert all(stand.waits_for_others == (stand.rank != hang.late) for stand in stands)
    found = straggler(stands, 2, lost_peer=lost_peer)
    assert found is not None
    assert found[0] == hang.late
    assert found[1].startswith("is in <string>:")
    assert found[1].endswith(" in __getitem__")


# --- the logs of single processes ------------------------------------------------------------------------------------


def bitten(code: str, log: Path) -> None:
    """Run this until its watchdog bites, once it has armed one."""
    text = f"import faulthandler, sys, threading, time\n{code}"
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", text], stderr=file, check=False, timeout=PATIENCE_S)


STAND_STILL = "faulthandler.dump_traceback_later(0.4, exit=True); time.sleep(600)"
MAIN = f"def in_main():\n    {STAND_STILL}\n"


@pytest.mark.parametrize(
    "code",
    [
        f"{MAIN}in_main()",
        f"{MAIN}threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\nin_main()",
        f"{MAIN}from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(2).submit(time.sleep, 9)\nin_main()",
    ],
    ids=["alone", "beside a thread", "beside a pool"],
)
def test_a_rank_stands_where_its_main_thread_does(code: str, run: RunDir) -> None:
    bitten(code, add_log(run, "2026-01-01 INFO step 7\n"))

    (stand,) = read_rank_stacks(run, 0, 1)

    assert stand.place.endswith(" in in_main")
    assert stand.frames[-1].endswith(" in <module>")
    assert stand.stacks.startswith("Timeout (0:00:00.4")
    assert not stand.waits_for_others
    assert straggler([stand], 1) == (0, f"is in {stand.place}")


def test_of_two_bites_in_one_log_the_last_counts(run: RunDir) -> None:
    log = add_log(run, "")
    bitten(f"def first():\n    {STAND_STILL}\nfirst()", log)
    add_log(run, "torchrun starts the workers again\n")
    bitten(f"def second():\n    {STAND_STILL}\nsecond()", log)

    (stand,) = read_rank_stacks(run, 0, 1)

    assert stand.place.endswith(" in second")
    assert "in first" not in stand.stacks


def test_a_bite_is_found_at_the_end_of_a_long_log(run: RunDir) -> None:
    bitten(MAIN + "in_main()", add_log(run, "x" * 79 + "\n" * (1 << 20)))

    assert [stand.place.endswith(" in in_main") for stand in read_rank_stacks(run, 0, 1)] == [True]


@pytest.mark.parametrize(
    "text",
    ["", "INFO step 7\n", "the socket says: Timeout (0:00:05)!\n", "\xff\x00\n", "Timeout (a user's)\n"],
)
def test_a_log_without_a_bite_has_no_stacks(text: str, run: RunDir) -> None:
    add_log(run, text)

    assert not has_stacks(run, 0, 1)
    assert read_rank_stacks(run, 0, 1) == []


def test_a_rank_without_a_log_and_one_whose_log_has_no_end_have_no_stacks(run: RunDir) -> None:
    run.attempt_logs(0).mkdir(parents=True)
    run.rank_log(0, 1).symlink_to("/dev/zero")

    assert not has_stacks(run, 0, 2)


def test_stacks_are_those_of_their_attempt(run: RunDir) -> None:
    bitten(MAIN + "in_main()", add_log(run, "", attempt=1, rank=2))

    assert [has_stacks(run, attempt, 3) for attempt in range(3)] == [False, True, False]
