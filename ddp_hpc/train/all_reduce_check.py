"""Adds up known numbers with the other nodes by the workers' process group, before a training: are the sums right, and how fast do they come.

    srun --ntasks-per-node=1 python -m ddp_hpc.train.all_reduce_check --node NAME ... --address A --port P --backend gloo --mark MARK

Each two that `rendezvous.links.rounds` pairs; then all nodes together. The result is known by value, so a wrong one is
found. Over a slow link, less is sent. By gloo, an exchange that does not end is given up after `GLOO_S`, and the next one follows.
At the time limit, each node reports what it has measured until then and the stage that it is at, and the process ends.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ddp_hpc.node_checks.collectives import ALL, DONE, ENDING, IMPORTING, JOINING, LIMIT_S, Exchange, NodeReport
from ddp_hpc.rendezvous.interfaces import local_interfaces
from ddp_hpc.rendezvous.links.node import own_place
from ddp_hpc.rendezvous.links.rounds import partners
from ddp_hpc.rendezvous.store import listening_on
from ddp_hpc.rendezvous.worker_env import Fact, network_variables
from ddp_hpc.slurm.allocation import node_name
from ddp_hpc.slurm.answers import framed

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

NUM_ELEMENTS = {"gloo": 1 << 20, "nccl": 1 << 22}
"""Of 4 bytes each: 4 MiB, and for a back end that is made for fast networks 16 MiB."""
NUM_FIRST = 1 << 14
"""Elements of the first round, 64 KiB: over a slow link, its time says how much more can be sent."""
NUM_ROUNDS = 5
ROUND_S = 1.0
"""About how long one round may take, and all rounds after which no other follows."""
GLOO_S = 10.0
"""How long gloo may take for an exchange between two nodes that both are ready for it."""
GLOO_WHOLE_S = 30.0
"""The same for all nodes together: each connects to each other one."""
_BACKLOG = 1024
_PERIOD = 1021
"""The numbers repeat after so many: a prime, so that no block of a network or of memory has the same ones as the next."""


@dataclass
class Check:
    """One node among the others."""

    nodes: Sequence[str]
    own: str
    backend: str
    began: float = field(default_factory=time.monotonic)
    stage: str = IMPORTING
    whole: Exchange | None = None
    pairs: dict[str, Exchange] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    ready_s: float = 0.0

    @property
    def rank(self) -> int:
        return self.nodes.index(self.own)

    def report(self, *, error: str = "") -> NodeReport:
        """Return what is known until now."""
        return NodeReport(
            backend=self.backend,
            stage=self.stage,
            error=error,
            whole=self.whole,
            pairs=dict(self.pairs),
            failed=dict(self.failed),
            ready_s=self.ready_s,
        )

    def run(self, address: str, port: int, *, limit_s: float) -> None:
        """Join the others, and make all exchanges."""
        import torch  # it takes longer than all that follows, so the timer already runs
        import torch.distributed as dist

        torch.set_num_threads(1)
        device = torch.device("cuda", 0) if self.backend == "nccl" else torch.device("cpu")
        self.ready_s, self.stage = round(time.monotonic() - self.began, 1), JOINING
        timeout = timedelta(seconds=limit_s)
        size = len(self.nodes)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # A store that PyTorch binds listens on all addresses of the node; the socket here listens on one.
        listening = {} if self.rank else listening_on(_listening(address, port), torch.__version__)
        store = dist.TCPStore(address, port, size, self.rank == 0, timeout=timeout, wait_for_workers=False, **listening)
        self.stage = ALL
        until = self.began + limit_s
        self._gathered([*range(size)], store, "start", until)
        # Two by two first: an exchange of all nodes takes all of the time where one pair does not come to an end.
        for partner in partners(size, self.rank):
            if partner is not None:
                self.stage = f"the all-reduce with {self.nodes[partner]}"
                both = sorted((self.rank, partner))
                found = self._tried(both, store, f"{both[0]}-{both[1]}", until, device)
                if found is not None:
                    self.pairs[self.nodes[partner]] = found
        self.stage = ALL
        self.whole = self._tried([*range(size)], store, "all", until, device)
        self.stage = ENDING
        store.set(f"end/{self.rank}", "")
        if self.rank == 0:  # it serves the store
            store.wait([f"end/{rank}" for rank in range(size)], timeout)
        self.stage = DONE

    def _gathered(self, ranks: Sequence[int], store: dist.Store, name: str, until: float) -> timedelta:
        """Wait until all of these ranks are here; return how much of the time is left then."""
        store.set(f"ready/{name}/{self.rank}", "")
        store.wait([f"ready/{name}/{rank}" for rank in ranks], timedelta(seconds=max(until - time.monotonic(), 1.0)))
        return timedelta(seconds=max(until - time.monotonic(), 1.0))

    def _tried(
        self, ranks: Sequence[int], store: dist.Store, name: str, until: float, device: torch.device
    ) -> Exchange | None:
        """Make an exchange with these ranks; note why, and return None, where gloo does not end it. NCCL's errors end the process."""
        import torch.distributed as dist

        from ddp_hpc.train import process_group

        left = self._gathered(ranks, store, name, until)  # one of them may still be at another exchange
        most = timedelta(seconds=GLOO_S if len(ranks) == 2 and name != "all" else GLOO_WHOLE_S)
        if self.backend != "gloo":
            return self._with(ranks, dist.PrefixStore(name, store), left, device)
        try:
            return self._with(ranks, dist.PrefixStore(name, store), min(left, most), device)
        except RuntimeError as error:
            others = "" if name == "all" else next(self.nodes[rank] for rank in ranks if rank != self.rank)
            self.failed[others] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            with suppress(RuntimeError):
                process_group.leave()
            return None

    def _with(self, ranks: Sequence[int], store: dist.Store, timeout: timedelta, device: torch.device) -> Exchange:
        """Make an exchange with these ranks, in a group of their own.

        Not by `new_group`: of its groups, PyTorch derives the names from how many a rank has made before, and those who are
        in other pairs have made other numbers of them.
        """
        import torch.distributed as dist

        from ddp_hpc.train import process_group

        dist.init_process_group(
            self.backend, store=store, rank=ranks.index(self.rank), world_size=len(ranks), timeout=timeout
        )
        found = exchange(ranks, self.rank, device, NUM_ELEMENTS[self.backend])
        process_group.leave()
        return found


def _listening(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG).detach()


def exchange(ranks: Sequence[int], rank: int, device: torch.device, num_elements: int) -> Exchange:
    """Add up known numbers over the ranks a few times; return how fast the fastest time was on the slowest rank, and how many sums were wrong.

    The first time with few numbers. All ranks know how long it took on the slowest, so all choose the same number for the next times.
    """
    spent_s = 0.0
    best_s, num_wrong = _added_up(ranks, rank, device, min(NUM_FIRST, num_elements))
    affordable = int(NUM_FIRST * ROUND_S / max(best_s, 1e-9))
    count = max(min(NUM_FIRST, num_elements), min(num_elements, affordable))
    if count > NUM_FIRST:
        best_s = float("inf")
        for _ in range(NUM_ROUNDS):
            seconds, wrong = _added_up(ranks, rank, device, count)
            best_s, num_wrong, spent_s = min(best_s, seconds), num_wrong + wrong, spent_s + seconds
            if spent_s > ROUND_S:
                break
    return Exchange(mb_per_s=round(4 * count / max(best_s, 1e-9) / 1e6, 3), num_wrong=num_wrong)


def _added_up(ranks: Sequence[int], rank: int, device: torch.device, count: int) -> tuple[float, int]:
    """Add up so many known numbers once; return how long it took on the slowest rank, and how many sums are wrong on this one."""
    import torch
    import torch.distributed as dist

    base = torch.arange(count, device=device).remainder_(_PERIOD)
    expected = (base * len(ranks) + sum(ranks)).to(torch.float32)  # below 2^24, so each sum is exact
    numbers = (base + rank).to(torch.float32)
    dist.all_reduce(torch.zeros(1, device=device))  # all begin together
    _wait_for(device)
    began = time.monotonic()
    dist.all_reduce(numbers)
    _wait_for(device)
    slowest = torch.tensor([time.monotonic() - began], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item()), int((numbers != expected).sum().item())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the exchanges; print this node's report."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.train.all_reduce_check", description=__doc__)
    parser.add_argument("--node", action="append", required=True, help="the name of a node, rank zero's first")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", choices=["gloo", "nccl"], required=True)
    parser.add_argument("--name", help="of this node; default: as Slurm calls it")
    parser.add_argument("--mark", required=True)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds")
    arguments = parser.parse_args(argv)
    own = arguments.name or node_name(os.environ)
    check = Check(arguments.node, own, arguments.backend)
    once = threading.Lock()

    def tell(error: str = "") -> None:
        if once.acquire(blocking=False):
            sys.stdout.write(framed(check.report(error=error).as_record, node=own, mark=arguments.mark))
            sys.stdout.flush()
            os._exit(0)  # a collective that hangs would hold a plain exit

    late = threading.Timer(arguments.limit, tell)
    late.daemon = True
    late.start()
    place = own_place(arguments.address, local_interfaces())
    if place.interface:
        interface = Fact(value=place.interface, rule="the one that the address is on")
        for name, fact in network_variables(interface).items():
            os.environ.setdefault(name, str(fact.value))
    try:
        check.run(arguments.address, arguments.port, limit_s=arguments.limit)
    except Exception as error:  # noqa: BLE001  whatever PyTorch raises is reported
        tell(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    tell()
    time.sleep(60)  # the timer has begun to tell, and ends this process
    return 0


if __name__ == "__main__":
    sys.exit(main())
