"""One node's side of a probe of the network: listens on it, connects to the other nodes, and says what came through.

    srun --ntasks-per-node=1 python -m ddp_hpc.cluster.rendezvous.links.probe --toward ADDRESS --mark MARK

It listens at its own address on the network of ADDRESS, at a port that the kernel chooses, and prints where. Orders come over standard
input and reports go over standard output, one short JSON object a line: srun carries both over Slurm's network, which may
work where the other one does not. `job.ending.network_probe` gives the orders. At end of file this process exits.

To each partner it opens a TCP connection, as the workers do, over which a few bytes pass and then more than one packet, both ways.
Then it sends numbered datagrams, small and large, which show what arrives one way. The connection comes first, and some datagrams
that are not counted: a network may drop what is sent before it has found the way (IP over InfiniBand does).
"""

from __future__ import annotations

import argparse
import errno
import hmac
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from ddp_hpc.cluster.rendezvous.choose_network import interface_with_address, source_address
from ddp_hpc.cluster.rendezvous.interfaces import Interface, local_interfaces
from ddp_hpc.cluster.rendezvous.links import pace
from ddp_hpc.cluster.rendezvous.links.rounds import partners
from ddp_hpc.cluster.slurm.allocation import node_name

NUM_DATAGRAMS = 200
"""Of each size, to each partner, after those that are not counted."""
CONNECT_S = 4.0
"""Long enough for the third SYN, which the kernel sends after 3 s (tcp(7), tcp_syn_retries)."""
SMALL_TRANSFER_S = 3.0
LARGE_TRANSFER_S = 4.0
"""How long a connection may take to pass a few bytes; and `_TCP_BYTES` both ways."""
ROUND_S = 0.3
"""Between the starts of two rounds; a round of good links takes less."""
PARTNER_TIMEOUT_S = SMALL_TRANSFER_S + CONNECT_S + SMALL_TRANSFER_S + LARGE_TRANSFER_S
"""How long one partner may take."""
LIFE_S = 180.0
"""When this process exits, whatever happens."""

_SMALL_BYTES = 64
_TCP_BYTES = 256 << 10
_LARGEST_DATAGRAM = 8972  # a jumbo frame of 9,000 bytes
_IP_AND_UDP_HEADER_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}
_NUM_UNCOUNTED = 10
_UNCOUNTED_PAUSE_S = 0.03
_BURST = 10
_BURST_PAUSE_S = 0.005
_TOKEN_BYTES = 16
_HEADER = struct.Struct(f"!{_TOKEN_BYTES}sHBH")
_UNCOUNTED_NUMBER = 0xFFFF
"""Stands for the number of a datagram that is not counted."""
_GREETING = struct.Struct(f"!{_TOKEN_BYTES}sH?")
"""The token, the sender's number, and whether it measures (`pace`)."""
_MTU_OPTIONS = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
"""The options IP_MTU_DISCOVER and IPV6_MTU_DISCOVER."""
_PMTUDISC_PROBE = 3
_SO_MEMINFO, _MEMINFO_DROPS = 55, 8
_MOST_GUESTS = 64
_USUAL_MTU = 1500


def own_address_and_mtu(toward: str, interfaces: Sequence[Interface]) -> tuple[str, str, int]:
    """Return this node's address on the network of `toward`, the subnet of it, and its MTU; no subnet where the interface is not known."""
    address = source_address(toward) or toward
    nic = interface_with_address(address, interfaces)
    if nic is None:
        return address, "", _USUAL_MTU
    network = next(
        str(ipaddress.ip_interface(text).network)
        for text in nic.addresses
        if ipaddress.ip_interface(text).ip == ipaddress.ip_address(address.partition("%")[0])
    )
    with suppress(OSError, KeyError):  # a card may go at any moment
        return address, network, psutil.net_if_stats()[nic.name].mtu
    return address, network, _USUAL_MTU


@dataclass(frozen=True)
class Sockets:
    """What a node listens on: TCP and UDP at one port of one address."""

    address: str
    port: int
    tcp: socket.socket
    udp: socket.socket

    @classmethod
    def open(cls, address: str) -> Sockets:
        """Listen at a port that is free for both."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for _ in range(20):
            tcp = socket.create_server((address, 0), family=family, backlog=_MOST_GUESTS)
            port = int(tcp.getsockname()[1])
            udp = socket.socket(family, socket.SOCK_DGRAM)
            try:
                udp.bind((address, port))
            except OSError:  # another process has this port for datagrams
                tcp.close()
                udp.close()
                continue
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            return cls(address, port, tcp, udp)
        raise OSError(f"no port of {address} is free for TCP and UDP")

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


@dataclass
class NodeProbe:
    """What one node does once it is ordered to begin."""

    sockets: Sockets
    me: int
    token: bytes
    places: Mapping[int, tuple[str, int]]
    """Address and port of each node that answered, by its number."""
    num_nodes: int
    heard: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """How many datagrams arrived from each node; true for the large ones."""
    first: dict[tuple[int, bool], int] = field(default_factory=dict)
    """The number of the first one that arrived: those before it may have been sent before the network had found the way."""
    tcp: dict[int, str] = field(default_factory=dict)
    """What became of the connection to each partner."""
    measures: bool = False
    """Whether it also measures how fast the links are, and how far apart the clocks."""
    mtu: int = _USUAL_MTU
    paces: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """What `pace.measure` has found, by partner."""
    _guests: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MOST_GUESTS))

    def serve(self) -> None:
        """Take the others' datagrams and connections, in threads of their own, until the sockets are closed."""
        for task in (self._take_datagrams, self._take_connections):
            threading.Thread(target=task, daemon=True).start()

    def probe_all(self) -> None:
        """Probe all partners, round by round; a bad one does not delay the next."""
        began, threads = time.monotonic(), []
        for number, partner in enumerate(partners(self.num_nodes, self.me)):
            if partner is None or partner not in self.places:
                continue
            time.sleep(max(0.0, began + number * ROUND_S - time.monotonic()))
            thread = threading.Thread(target=self._probe, args=(partner,), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(PARTNER_TIMEOUT_S + 5.0)

    @property
    def num_dropped(self) -> int:
        """How many datagrams this node's own kernel dropped, because this process was too slow to read them."""
        with suppress(OSError, struct.error):
            found = self.sockets.udp.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36)
            return int(struct.unpack("=9I", found)[_MEMINFO_DROPS])
        return 0

    def _probe(self, partner: int) -> None:
        place = self.places[partner]
        self.tcp[partner] = self._connect(place)
        if self.measures and self.tcp[partner] == "good":
            with suppress(OSError, struct.error):  # without an answer, nothing is known of it
                self.paces[partner] = self._measure(place)
        self._send_datagrams(place)

    def _measure(self, place: tuple[str, int]) -> tuple[float, float, float]:
        with socket.create_connection(place, CONNECT_S, source_address=(self.sockets.address, 0)) as link:
            link.sendall(_GREETING.pack(self.token, self.me, True))
            if pace.receive_exactly(link, 1, SMALL_TRANSFER_S) != b"+":
                raise ConnectionAbortedError("this is not the node that was asked for")
            return pace.measure(link)

    def _send_datagrams(self, place: tuple[str, int]) -> None:
        own = self.sockets
        large = min(self.mtu - _IP_AND_UDP_HEADER_BYTES[own.udp.family], _LARGEST_DATAGRAM)
        give_up = time.monotonic() + SMALL_TRANSFER_S
        # One socket for each partner: what waits for the hardware address of an unplugged one fills the socket's buffer (arp(7)).
        with suppress(OSError), socket.socket(own.udp.family, socket.SOCK_DGRAM) as sender:
            sender.bind((own.address, 0))
            # Full-sized packets go as they are: cut into fragments, they would hide a small MTU on the way (ip(7)).
            with suppress(OSError):
                sender.setsockopt(*_MTU_OPTIONS[own.udp.family], _PMTUDISC_PROBE)

            def send(number: int, size: int) -> None:
                sender.settimeout(max(give_up - time.monotonic(), 0.001))
                with suppress(OSError):  # not reachable, or too long for the interface: it counts as lost
                    sender.sendto(
                        _HEADER.pack(self.token, self.me, size > _SMALL_BYTES, number).ljust(size, b"\0"), place
                    )

            for _ in range(_NUM_UNCOUNTED):
                send(_UNCOUNTED_NUMBER, _SMALL_BYTES)
                time.sleep(_UNCOUNTED_PAUSE_S)
            for begin in range(0, NUM_DATAGRAMS, _BURST):
                for size in (_SMALL_BYTES, large):
                    for number in range(begin, min(begin + _BURST, NUM_DATAGRAMS)):
                        send(number, size)
                    time.sleep(_BURST_PAUSE_S)

    def _connect(self, place: tuple[str, int]) -> str:
        """Connect as a worker does; return `good`, or what failed."""
        stage = "connect"
        try:
            with socket.create_connection(place, CONNECT_S, source_address=(self.sockets.address, 0)) as link:
                stage = "small"
                link.settimeout(SMALL_TRANSFER_S)
                link.sendall(_GREETING.pack(self.token, self.me, False))
                if pace.receive_exactly(link, 1, SMALL_TRANSFER_S) != b"+":
                    return "stranger"
                stage = "large"
                link.settimeout(LARGE_TRANSFER_S)
                link.sendall(bytes(_TCP_BYTES))
                pace.receive_exactly(link, _TCP_BYTES, LARGE_TRANSFER_S)
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return stage
        return "good"

    def _take_datagrams(self) -> None:
        while True:
            try:
                datagram = self.sockets.udp.recv(1 << 16)
            except ConnectionRefusedError:  # an ICMP error of what was sent before
                continue
            except OSError:
                return
            if len(datagram) < _HEADER.size:
                continue
            token, sender, is_large, number = _HEADER.unpack_from(datagram)
            if number != _UNCOUNTED_NUMBER and hmac.compare_digest(token, self.token):
                self.heard[sender, bool(is_large)] += 1
                self.first.setdefault((sender, bool(is_large)), number)

    def _take_connections(self) -> None:
        while True:
            try:
                guest, _ = self.sockets.tcp.accept()
            except OSError:
                return
            if not self._guests.acquire(blocking=False):
                guest.close()
                continue
            threading.Thread(target=self._answer, args=(guest,), daemon=True).start()

    def _answer(self, guest: socket.socket) -> None:
        """Answer a partner; a stranger, who does not know the token, gets nothing."""
        try:
            with guest, suppress(OSError):
                guest.settimeout(SMALL_TRANSFER_S)
                token, _, measures = _GREETING.unpack(pace.receive_exactly(guest, _GREETING.size, SMALL_TRANSFER_S))
                if not hmac.compare_digest(token, self.token):
                    return
                guest.sendall(b"+")
                if measures:
                    pace.answer_measurements(guest)
                guest.settimeout(LARGE_TRANSFER_S)
                pace.receive_exactly(guest, _TCP_BYTES, LARGE_TRANSFER_S)
                guest.sendall(bytes(_TCP_BYTES))
        finally:
            self._guests.release()


def serve(toward: str, *, name: str, mark: str) -> int:
    """Probe on the network of `toward`: carry out the orders on standard input; return the exit code."""

    def say(**message: Any) -> None:
        sys.stdout.write(json.dumps({"mark": mark, **message}, separators=(",", ":")) + "\n")
        sys.stdout.flush()

    sys.stdout.write("\n")  # a TaskProlog may have begun a line here and not ended it
    address, network, mtu = own_address_and_mtu(toward, local_interfaces())
    try:
        sockets = Sockets.open(address)
    except OSError as error:
        # Only an address that is not here speaks against the network: a limit of open files or a firewall of this process does not.
        say(ready=name, error=str(error), has_address=error.errno != errno.EADDRNOTAVAIL)
        return 0
    say(ready=name, address=address, port=sockets.port, network=network)
    order = _read_order(mark, "go")
    if order is None or not isinstance(order.get("nodes"), list):
        return 0
    names = [str(node[0]) for node in order["nodes"]]
    places = {number: (str(node[1]), int(node[2])) for number, node in enumerate(order["nodes"]) if node[1]}
    me = names.index(name)
    token, measures = bytes.fromhex(str(order["token"])), order.get("measures") is True
    probe = NodeProbe(sockets, me, token, places, len(names), measures=measures, mtu=mtu)
    probe.serve()
    probe.probe_all()
    for partner, found in sorted(probe.tcp.items()):
        say(tcp=found, at=me, to=partner)
    for partner, measured in sorted(probe.paces.items()):
        say(pace=measured, at=me, to=partner)
    say(done=me)
    _read_order(mark, "finish")
    for sender in sorted({sender for sender, _ in probe.heard}):
        heard = [probe.heard[sender, False], probe.heard[sender, True]]
        say(heard=heard, missed=sum(probe.first.get((sender, size), 0) for size in (False, True)), at=me, sender=sender)
    say(end=me, dropped=probe.num_dropped)
    sockets.close()
    return 0


def _read_order(mark: str, verb: str) -> dict[str, Any] | None:
    """Wait for an order; None at end of file. Lines that are not ours are passed over."""
    for line in sys.stdin:
        with suppress(ValueError):
            order = json.loads(line)
            if isinstance(order, dict) and order.get("mark") == mark and order.get("do") == verb:
                return order
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one probe."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.cluster.rendezvous.links.probe", description=__doc__)
    parser.add_argument("--toward", required=True, help="the address where the ranks met")
    parser.add_argument("--mark", required=True, help="stands in each line of the conversation")
    parser.add_argument("--name", help="of this node; default: as Slurm calls it")
    arguments = parser.parse_args(argv)
    late = threading.Timer(LIFE_S, lambda: os._exit(1))
    late.daemon = True
    late.start()
    try:
        return serve(arguments.toward, name=arguments.name or node_name(os.environ), mark=arguments.mark)
    except BrokenPipeError:  # whoever ordered the probe is gone
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
