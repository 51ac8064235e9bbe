"""How the ranks of an attempt meet: where, and for which of them the others wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ddp_hpc.base.durable import numbers_in_names
from ddp_hpc.base.patience import ask_once
from ddp_hpc.base.record import read_record, try_read_record, write_record
from ddp_hpc.run.run_dir.paths import RANK_LOG, RunDir


@dataclass(frozen=True, kw_only=True)
class MissingRanks:
    """Who had not joined, when rank zero last checked."""

    ranks: tuple[int, ...]
    """None where all have reached rank zero, but have not all connected to each other."""
    workers_per_node: int
    at: float

    def node_of(self, rank: int, nodes: Sequence[str]) -> str:
        """Return the name of a rank's node; empty where it is not known."""
        node_rank = rank // max(self.workers_per_node, 1)
        return nodes[node_rank] if 0 <= node_rank < len(nodes) else ""


def write_missing(run: RunDir, attempt: int, ranks: Sequence[int], *, workers_per_node: int) -> None:
    """Write which ranks the others wait for."""
    missing = MissingRanks(ranks=tuple(ranks), workers_per_node=workers_per_node, at=time.time())
    write_record(run.missing_ranks(attempt), missing, durable=False)


def read_missing(run: RunDir, attempt: int) -> MissingRanks | None:
    """Return which ranks the others waited for; None where nobody waited for long, or the record cannot be read."""
    return try_read_record(run.missing_ranks(attempt), MissingRanks)


def forget_missing(run: RunDir, attempt: int) -> None:
    """Remove the record: all have joined."""
    with suppress(OSError):
        run.missing_ranks(attempt).unlink(missing_ok=True)


def started_ranks(run: RunDir, attempt: int) -> set[int] | None:
    """Return the ranks whose processes have opened their logs; None where the file system does not say.

    A network file system may leave out those of other nodes for a minute.
    """
    folder = run.attempt_logs(attempt)
    ranks: list[int] | None = ask_once(folder, partial(numbers_in_names, folder, RANK_LOG), unknown=None)
    return None if ranks is None else {*ranks}


@dataclass(frozen=True)
class RendezvousRecord:
    """What was chosen."""

    endpoint: str
    """`ADDRESS:PORT`; an IPv6 address stands in brackets."""
    why: str
    """The network, and the rule that chose it."""


def write_rendezvous(run: RunDir, attempt: int, endpoint: str, why: str) -> None:
    """Record where the ranks of an attempt meet."""
    write_record(run.meeting(attempt), RendezvousRecord(endpoint, why), durable=False)


def read_rendezvous(run: RunDir, attempt: int) -> RendezvousRecord | None:
    """Return where the ranks of an attempt meet; None on one machine, or where it is not recorded."""
    return read_record(run.meeting(attempt), RendezvousRecord)
