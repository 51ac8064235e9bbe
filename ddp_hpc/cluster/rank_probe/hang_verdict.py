"""The verdict on a hang, of the ranks' collectives, their stacks and a probe of the network together. Pure.

The supervisor makes it once, and its report keeps it: `ddp-hpc why` prints what the report holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_hpc.base.names import shorten_names
from ddp_hpc.cluster.rank_probe.compare_ranks import ComparedRanks, compare
from ddp_hpc.run.run_dir.failure_reports import HangKind
from ddp_hpc.run.run_dir.hang_records import RankInHang
from ddp_hpc.run.run_dir.network import NetworkFindings

_WAITING_CODE_PATHS = (
    *("torch/distributed/", "torch/autograd/", "torch/nn/parallel/"),
    "ddp_hpc/train/sealed_store.py",
)
"""Code in which a rank waits for others: a collective, the backward pass that exchanges gradients, or the store."""
_LINE_NUMBER = re.compile(r":\d+")
_MOST_NAMED = 4


@dataclass(frozen=True)
class RankStack:
    """The stacks of one rank."""

    rank: int
    frames: Sequence[str]
    """Of its main thread, the innermost first: `file:line in function`."""
    stacks: str
    """Of all its threads, as `faulthandler` wrote them."""

    @property
    def waits_for_others(self) -> bool:
        return any(part in frame for frame in self.frames[:4] for part in _WAITING_CODE_PATHS)

    @property
    def place(self) -> str:
        return self.frames[0] if self.frames else "code without a Python frame"


HangVerdict = tuple[HangKind, int, str]
"""What the ranks of a hang wait for; the rank that the others wait for, -1 where it is not one rank; who does what, as the report says it."""


def judge_hang(
    hosts: Sequence[str | None],
    records: Sequence[RankInHang],
    stands: Sequence[RankStack],
    network: NetworkFindings | None,
    *,
    lost_peer: Collection[int] = (),
) -> HangVerdict:
    """Weigh the ranks' collectives, their stacks, and the probe of the network.

    `hosts` has the node of each rank, None on this machine; `lost_peer` is as in `straggler`.
    """
    world_size = len(hosts)
    compared = compare(records, world_size)
    kind: HangKind
    if compared.kind in {"behind", "crashed"}:
        kind, ranks, how = compared.kind, compared.ranks, compared.how
    elif compared.how or (found := straggler(stands, world_size, lost_peer=lost_peer)) is None:
        return _judge_nobody(hosts, compared, stands, network)
    else:
        kind, ranks, how = "behind" if world_size > 1 else "", [found[0]], found[1]
    rank, node = ranks[0], hosts[ranks[0]]
    if network is not None and network.is_at_fault(node) and rank not in {stand.rank for stand in stands}:
        # The network of its node is proved to fail, which explains why it printed no stack.
        return _judge_nobody(hosts, ComparedRanks(), stands, network)
    if network is not None and network.is_faulty:
        how = f"{how}; besides, {network.words}"
    who = f"rank {rank}{f' on {node}' if node else ''}"
    words = f"other ranks wait for {who}, which {how}" if world_size > 1 else f"{who} {how}"
    if kind == "behind" and len({hosts[one] for one in ranks}) > 1:
        return kind, -1, words  # a file system, perhaps; the fault of none of these nodes
    return kind, rank, words


def straggler(
    stands: Sequence[RankStack], world_size: int, *, lost_peer: Collection[int] = ()
) -> tuple[int, str] | None:
    """Return the rank that the others wait for, and what it does; None where all wait for each other.

    It is the one that does not wait for others, or the one without a stack: a process that is stopped (SIGSTOP) or cut off
    prints none. The ranks in `lost_peer` did wait: they ended before their own timeout, as a rank that timed out earlier
    closed its connections.
    """
    silent = sorted(set(range(world_size)) - {stand.rank for stand in stands} - set(lost_peer))
    busy = [stand for stand in stands if not stand.waits_for_others]
    if len(silent) == 1:
        return silent[0], "did not print its stack: the process is stopped, or its node has no network"
    if busy and len(busy) < len(stands) + len(lost_peer):  # somebody waits
        return busy[0].rank, f"is in {busy[0].place}"
    if world_size == 1 and stands:
        return 0, f"is in {stands[0].place}"
    return None


def _judge_nobody(
    hosts: Sequence[str | None], compared: ComparedRanks, stands: Sequence[RankStack], network: NetworkFindings | None
) -> HangVerdict:
    """Say why all ranks wait, where they do not wait for one of them."""
    if compared.kind == "different":
        return "different", -1, compared.how
    how = "all ranks wait for each other"
    kind: HangKind = compared.kind
    if kind == "network":
        how = f"{compared.how} on the nodes {', '.join(dict.fromkeys(filter(None, hosts))) or 'of this machine'}; {how}"
    if network is not None and network.is_faulty:
        return "link", -1, f"{how}, and {network.words}"
    if compared.how and not kind:
        return "", -1, compared.how
    if not stands and not kind:
        more = f"; {network.words}" if network is not None else ""
        return "", -1, f"no rank says where it is: it did not answer, and no stack is in its log{more}"
    if not kind and len(stands) > 1:
        is_same = len({_LINE_NUMBER.sub("", stand.place) for stand in stands}) == 1
        kind = "network" if is_same else "different"
        places = [f"rank {stand.rank} is in {stand.place}" for stand in stands]
        if not any(stand.waits_for_others for stand in stands):
            return (
                "",
                -1,
                f"no rank's stack shows that it waits for another one: {shorten_names(places, _MOST_NAMED, between='; ')}",
            )
        how += "" if is_same else f", in different calls ({shorten_names(places, _MOST_NAMED, between='; ')})"
    if network is None or network.problem:
        how += f": check the network between the nodes{f' ({network.problem})' if network else ''}"
    elif network.carries_everywhere:
        how += f", but {network.words}: check the devices, and the calls in the stacks"
    else:
        how += f"; {network.words}"
    return kind, -1, how
