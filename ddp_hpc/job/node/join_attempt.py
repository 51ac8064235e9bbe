"""The workers of a foreign launcher wait for each other, and rank zero tells the others which attempt this is.

They meet at the address and port of the launcher. torchrun's agent serves a store there; with other launchers, rank zero listens
there itself, and the run's own store uses the same socket afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

from ddp_hpc.base.durable import record_bytes
from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.cluster.rendezvous.choose_network import source_address
from ddp_hpc.cluster.rendezvous.launchers import RankPlace
from ddp_hpc.job.wire.endpoint import Endpoint, PortTakenError, listen
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_rendezvous_token

PATIENCE_S = 600.0
"""How long to wait for the last worker: nodes may start at different times."""
PORT_PATIENCE_S = 60.0
"""How long the port may still be in use by the workers before these."""
_RETRY_S = 0.2
_MAX_ANSWER_BYTES = 1 << 16
_MOST_SILENT_CONNECTIONS = 256
"""Connections that have not yet said which rank they are; the oldest is closed where there are more."""
_OTHER_RUN_ANSWER = "another run"
"""What rank zero answers to a worker of another run."""

# --- at a port ---------------------------------------------------------------------------------------------------------


def gather_at_port(
    place: RankPlace, address: str, begin: Callable[[], int], *, run: RunDir, patience_s: float = PATIENCE_S
) -> tuple[int, int | None]:
    """Meet at rank zero's socket; return the attempt's number, and rank zero's socket for the store.

    `begin` is called on rank zero when all are there, and returns the number.

    A worker shows that it can read the run's token, which rank zero writes. So rank zero refuses workers of another run, which
    may have been given the same port, and other users.
    """
    endpoint = Endpoint(address, int(place.port.value or 0))
    deadline = time.monotonic() + patience_s
    if place.rank != 0:
        return _ask_rank_zero(endpoint, place, run, deadline), None
    if not run.joining_token.exists():
        write_rendezvous_token(run.joining_token)
    server = _listen(_listening_endpoint(endpoint, is_alone=place.num_nodes == 1), place)
    try:
        others = _accept_others(server, place.world_size, _run_identity(place, run), deadline)
        try:
            attempt = begin()
            text = json.dumps({"attempt": attempt}).encode() + b"\n"
            for other in others.values():
                with suppress(OSError):  # that worker has died: its launcher sees it
                    other.sendall(text)
        finally:
            for other in others.values():
                other.close()
        server.setblocking(True)
        return attempt, os.dup(server.fileno())
    finally:
        server.close()


def _listening_endpoint(endpoint: Endpoint, *, is_alone: bool) -> Endpoint:
    """Return where rank zero listens: at that address if it is this node's, else at all of them (behind NAT, a service name)."""
    is_own = source_address(endpoint.address) == endpoint.address and not endpoint.address.startswith("127.")
    if is_alone or is_own:
        return endpoint
    return Endpoint("::" if ":" in endpoint.address else "0.0.0.0", endpoint.port)  # noqa: S104  see above


def _listen(endpoint: Endpoint, place: RankPlace) -> socket.socket:
    deadline = time.monotonic() + PORT_PATIENCE_S
    while True:
        try:
            return listen(endpoint)
        except PortTakenError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Another process listens at port {endpoint.port} of this node, where the ranks were to meet ({place.port.source}). "
                    "Set MASTER_PORT to a free port for all processes."
                ) from None
            time.sleep(_RETRY_S)


def _run_identity(place: RankPlace, run: RunDir) -> str:
    """Return the word by which workers of a run know each other."""
    token = record_bytes(run.joining_token)
    return hashlib.sha256(b"%d %s" % (place.world_size, token)).hexdigest()[:32]


def _accept_others(server: socket.socket, world_size: int, identity: str, deadline: float) -> dict[int, socket.socket]:
    """Return a connection to each other rank; one that connects again has restarted. Those who say nothing keep no rank waiting."""
    others: dict[int, socket.socket] = {}
    silent: list[socket.socket] = []
    server.setblocking(False)
    try:
        while len(others) < world_size - 1:
            with selectors.DefaultSelector() as selector:
                for one in (server, *silent):
                    selector.register(one, selectors.EVENT_READ, one)
                ready = [key.data for key, _ in selector.select(max(deadline - time.monotonic(), 0.0))]
            if not ready:
                missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in others)
                raise WorkerError(
                    f"Of the {world_size} workers that the launcher's variables announce, these ranks did not come: {missing}. Start "
                    "`ddp-hpc join` for each, and check that they can reach this node."
                )
            for connection in ready:
                if connection is server:
                    with suppress(OSError):
                        silent.append(server.accept()[0])
                    continue
                silent.remove(connection)
                rank = _read_peer_rank(connection, world_size, identity)
                if rank is None:
                    connection.close()
                    continue
                if rank in others:
                    others[rank].close()
                others[rank] = connection
            while len(silent) > _MOST_SILENT_CONNECTIONS:
                silent.pop(0).close()
    finally:
        for connection in silent:
            connection.close()
    return others


def _read_peer_rank(connection: socket.socket, world_size: int, identity: str) -> int | None:
    """Return the rank that has connected; None for a worker of another run, a port scanner, or a worker that has died."""
    with suppress(OSError, ValueError):
        number, theirs = connection.recv(64, socket.MSG_DONTWAIT).decode().split()
        if not secrets.compare_digest(theirs, identity):
            connection.sendall(json.dumps(_OTHER_RUN_ANSWER).encode() + b"\n")
        elif 0 < int(number) < world_size:
            return int(number)
    return None


def _ask_rank_zero(endpoint: Endpoint, place: RankPlace, run: RunDir, deadline: float) -> int:
    """Connect to rank zero, say which rank of which run this is, and wait for the attempt's number."""
    rank, is_refused = place.rank, False
    while True:
        with (
            suppress(OSError, ValueError),
            socket.create_connection((endpoint.address, endpoint.port), timeout=10.0) as line,
        ):
            line.sendall(f"{rank} {_run_identity(place, run)}\n".encode())
            line.settimeout(max(deadline - time.monotonic(), 1.0))
            answer = json.loads(line.makefile("rb").readline(_MAX_ANSWER_BYTES))
            if isinstance(answer, dict):
                return int(answer["attempt"])
            is_refused = answer == _OTHER_RUN_ANSWER
        if time.monotonic() > deadline:
            if is_refused:
                raise WorkerError(
                    f"Rank {rank} has met rank zero of another run at {endpoint.netloc}: its run has another directory, or another "
                    "number of workers. Set MASTER_PORT to another free port for all processes of this run, and give all of them the "
                    "run's directory by the same path."
                )
            raise WorkerError(
                f"Rank {rank} could not meet rank zero at {endpoint.netloc}. Check that rank zero runs, that this node reaches that "
                f"address, and that it sees the run's directory {run.path}."
            )
        time.sleep(_RETRY_S)


# --- in torchrun's store -----------------------------------------------------------------------------------------------


def gather_in_store(place: RankPlace, begin: Callable[[], int]) -> int:
    """Meet in the store that torchrun's agent serves; return the attempt's number.

    The store outlives restarts of the workers, so it may hold keys of earlier ones. Each worker makes a word of its own: an answer
    counts only for those whose words it repeats.
    """
    distributed = import_module("torch.distributed")  # the worker needs it anyway; this package imports no torch
    store = distributed.TCPStore(
        host_name=place.address.value,
        port=int(place.port.value or 0),
        is_master=False,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    prefix = f"ddp_hpc/{place.restart}"
    deadline = time.monotonic() + PATIENCE_S
    word = secrets.token_hex(8)
    if place.rank != 0:
        return _ask_store(store, prefix, place.rank, word, deadline)
    store.set(f"{prefix}/zero", word)
    # This waits as long as the store's timeout.
    words = {str(rank): store.get(f"{prefix}/{word}/{rank}").decode() for rank in range(1, place.world_size)}
    attempt = begin()
    store.set(f"{prefix}/{word}/answer", json.dumps({"answer": {"attempt": attempt}, "words": words}))
    return attempt


def _ask_store(store: Any, prefix: str, rank: int, word: str, deadline: float) -> int:
    while time.monotonic() < deadline:
        if store.check([f"{prefix}/zero"]):
            zero = store.get(f"{prefix}/zero").decode()
            store.set(f"{prefix}/{zero}/{rank}", word)
            if store.check([f"{prefix}/{zero}/answer"]):
                found = json.loads(store.get(f"{prefix}/{zero}/answer"))
                if found["words"].get(str(rank)) == word:
                    return int(found["answer"]["attempt"])
        time.sleep(_RETRY_S / 4)
    raise WorkerError(
        f"Rank {rank} has not heard of rank zero in torchrun's store. Read the messages of rank zero; then start the run again."
    )
