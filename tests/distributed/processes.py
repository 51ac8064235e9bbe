"""Running a function in several real processes that are joined by gloo, as workers are."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ddp_hpc.train import process_group
from ddp_hpc.train.process_group import Group, RankInfo

T = TypeVar("T")

# A process's first backward counts the devices. Where `torch.compile` has run before, it finds one more, starts a thread for it, and
# forked processes can compute no gradients from then on. So the first one comes here, before any test.
torch.ones((), requires_grad=True).backward()


def in_group(world_size: int, function: Callable[[Group], T], folder: Path) -> list[T]:
    """Call `function` on every rank of a group; return what each returned, by rank.

    Results come back as files in `folder`; a rank that raises fails the caller, with the rank's traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as meeting_point:
        pids = [_fork(rank, world_size, function, meeting_point, folder) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = "\n".join(path.read_text() for path in sorted(folder.glob("rank-*.txt")))
    assert codes == [0] * world_size, f"ranks ended with {codes}:\n{said}"
    return [pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()) for rank in range(world_size)]  # noqa: S301


def _fork(
    rank: int, world_size: int, function: Callable[[Group], T], meeting_point: socket.socket, folder: Path
) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        place = RankInfo(
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            local_world_size=world_size,
            node_rank=0,
            master_addr="127.0.0.1",
            master_port=meeting_point.getsockname()[1],
        )
        listen_fd = os.dup(meeting_point.fileno()) if rank == 0 else None
        meeting_point.close()
        group = process_group.join(place, torch.device("cpu"), listen_fd=listen_fd)
        (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(function(group)))
        code = 0
    except BaseException:  # noqa: BLE001  a forked child must never return into pytest
        (folder / f"rank-{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(code)
