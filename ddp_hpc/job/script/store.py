"""The store at which the ranks of a script meet: rank zero's worker hosts it, until the last rank's script has ended."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module

import psutil

from ddp_hpc.base import processes
from ddp_hpc.base.patience import ask_once
from ddp_hpc.cluster.rendezvous.store_options import listening_options
from ddp_hpc.job.script.plan import ScriptRank

POLL_INTERVAL_S = 0.25
"""How often to look whether the store is used."""


def host_store(environ: Mapping[str, str], listen_fd: int) -> object | None:
    """Host the store at which the ranks meet, as torchrun's agent does, so that its port is never free for others."""
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    options = {"is_master": True, "wait_for_workers": False, **listening_options(listen_fd, torch.__version__)}
    store: object = distributed.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), **options)
    return store


def wait_while_used(script_rank: ScriptRank, environ: Mapping[str, str]) -> None:
    """Wait while scripts of other ranks are connected to the store, which ends with this process."""
    # A process that a script has left behind may have inherited its connection, so the end of all scripts counts, too.
    others = range(1, int(environ["WORLD_SIZE"]))
    while _is_used(int(environ["MASTER_PORT"])):
        signs = (script_rank.run.script_ended(script_rank.attempt, rank) for rank in others)
        if all(ask_once(sign, sign.exists, unknown=False) for sign in signs):
            return
        processes.await_signal(POLL_INTERVAL_S)  # the others get a stop signal themselves


def _is_used(port: int) -> bool:
    """Tell whether another process is connected to the store at a port of this process, which is connected to it itself."""
    with suppress(psutil.Error, OSError):
        found = psutil.Process().net_connections("tcp")
        pairs = [(one.laddr, one.raddr) for one in found if one.status == psutil.CONN_ESTABLISHED and one.raddr]
        ours = {_unmapped_address(here.ip, here.port) for here, there in pairs if there.port == port}
        return any(here.port == port and _unmapped_address(there.ip, there.port) not in ours for here, there in pairs)
    return True  # perhaps; the others say when they end


def _unmapped_address(ip: str, port: int) -> tuple[str, int]:
    return ip.removeprefix("::ffff:"), port  # a socket for both families has its peers in that form
