"""torchrun, whose agents meet at a fixed place and unpickle nothing.

    python -m ddp_hpc.train.torchrun --rdzv-endpoint=ADDRESS:PORT --rdzv-conf=rank=NODE_RANK OPTIONS OF TORCHRUN ...

torchrun's own rendezvous, `c10d`, keeps its state as a pickle in a store without a password: everybody who reaches the port
can replace it, and all agents load it. Its `static` one has no pickle, but listens on all networks of the node. In this one,
node rank 0 listens on the address alone (port 0: the kernel chooses one, for a single node), and agents exchange JSON. Where the
address is a name, it listens on all networks: a node's own name may mean another address there than elsewhere.
https://pytorch.org/docs/stable/elastic/rendezvous.html
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main

from ddp_hpc.cluster.rendezvous.store_options import listening_options

BACKEND = "fixed"
_TIMEOUT = timedelta(minutes=10)
"""How long an agent waits for the others, as torchrun's own do."""


class FixedRendezvous(RendezvousHandler):
    """The rendezvous of agents whose number and ranks are known; none joins or leaves later."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._address, self._port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        self._rank = int(parameters.config["rank"])
        self._num_nodes = parameters.max_nodes
        self._run_id = parameters.run_id
        self._stores: list[TCPStore] = []
        """One for each start of the workers: PyTorch's keys in it are those of one start."""

    @property
    def use_agent_store(self) -> bool:
        """Have the workers meet at the newest store."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        port, key = self._port, f"port/{len(self._stores)}"
        if self._stores:
            port = 0 if self._rank == 0 else int(self._stores[0].get(key))
        store = self._open_store(port)
        if self._stores and self._rank == 0:
            self._stores[0].set(key, str(store.port))
        self._stores.append(store)
        agents = PrefixStore(self._run_id, store)
        return RendezvousInfo(agents, self._rank, self._num_nodes, RendezvousStoreInfo(self._address, store.port))

    def _open_store(self, port: int) -> TCPStore:
        if self._rank != 0:
            return TCPStore(self._address, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
        server = _open_socket(self._address, port)
        return TCPStore(
            self._address,
            server.getsockname()[1],
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            **listening_options(server.detach(), torch.__version__),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _open_socket(address: str, port: int) -> socket.socket:
    try:
        is_v6 = ipaddress.ip_address(address).version == 6
    except ValueError:
        address, is_v6 = "", socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096, dualstack_ipv6=is_v6 and not address)


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, FixedRendezvous)
    sys.exit(main(["--rdzv-backend", BACKEND, *sys.argv[1:]]))
