"""The report of a hang: the stacks of all ranks in one file, and the rank that the others waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.cluster.rank_probe.compare import HangVerdict, Kind, verdict_of
from ddp_hpc.job.ending import stacks
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.run.run_dir.failure_reports import Phase, WorkerFailure, allowed_phase, write_failure
from ddp_hpc.run.run_dir.hang_records import read_hang_records
from ddp_hpc.run.run_dir.network import NetworkFindings


@dataclass(frozen=True)
class _Waited:
    """What the ranks of a hang wait for."""

    rank: int
    """The rank that the others wait for; -1 where it is not one rank."""
    node: str | None
    kind: Kind
    words: str
    """Who does what, as the report says it."""


def report_hang(
    context: JobContext, attempt: int, failures: Sequence[WorkerFailure], network: NetworkFindings | None = None
) -> WorkerFailure:
    """Write all ranks' stacks into one file, and an error report that names the rank that the others wait for."""
    run, world_size = context.run, context.world.world_size
    records = read_hang_records(run, attempt)
    verdict = verdict_of(records, world_size)
    stands = stacks.with_records(stacks.read_rank_stacks(run, attempt, world_size), records)
    path = run.stacks(attempt)
    texts = [
        f"=== rank {stand.rank} on {context.node_of(stand.rank) or 'this machine'}: {stand.place}\n{stand.stacks}\n"
        for stand in stands
    ]
    with best_effort():
        make_directories(path.parent)
        replace_text(path, "".join(texts))
    lost_peer = {failure.rank for failure in failures if failure.is_secondary}
    waited = _waited_for(context, verdict, stacks.straggler(stands, world_size, lost_peer=lost_peer), stands, network)
    phase = allowed_phase(run, attempt)
    failure = WorkerFailure(
        rank=waited.rank,
        host=waited.node or "",
        at=time.time(),
        step=0,
        exception=f"{_timeout(context, phase)}; {waited.words}; the stacks of all ranks are in {path}",
        log=str(run.rank_log(attempt, max(waited.rank, 0))),
        phase=phase,
        is_hang=True,
        hang_kind=waited.kind,
        hang_detail=waited.words if waited.kind else "",
    )
    write_failure(run.rank_error(attempt, max(waited.rank, 0)), failure)
    return failure


def _waited_for(
    context: JobContext,
    verdict: HangVerdict,
    straggler: tuple[int, str] | None,
    stands: Sequence[stacks.RankStack],
    network: NetworkFindings | None,
) -> _Waited:
    """Weigh the ranks' collectives, their stacks, and the probe of the network."""
    kind, found = verdict.kind, straggler
    if kind in {"behind", "crashed"}:
        found = verdict.ranks[0], verdict.how
    elif kind or verdict.how:
        found = None
    has_no_stack = found is not None and found[0] not in {stand.rank for stand in stands}
    if found is not None and has_no_stack and network is not None and network.is_at_fault(context.node_of(found[0])):
        # The network of its node is proved to fail, which explains why it printed none.
        return _Waited(-1, None, "", _of_nobody(network, is_known=bool(stands)))
    if found is None:
        how = _of_nobody(network, is_known=bool(stands))
        if kind == "different" or (not kind and verdict.how):
            how = verdict.how
        elif kind == "network":
            how = f"{verdict.how} on the nodes {', '.join(context.nodes) or 'of this machine'}; {how}"
        return _Waited(-1, None, kind, how)
    rank, how = found
    node = context.node_of(rank)
    if network is not None and network.is_faulty:
        how = f"{how}; besides, {network.words}"
    who = f"rank {rank}{f' on {node}' if node else ''}"
    words = f"other ranks wait for {who}, which {how}" if context.world.world_size > 1 else f"{who} {how}"
    if kind == "behind" and len({context.node_of(one) for one in verdict.ranks}) > 1:
        return _Waited(
            -1, None, kind, words
        )  # several nodes at once: a file system, perhaps; the fault of none of them
    return _Waited(rank, node, kind, words)


def _of_nobody(network: NetworkFindings | None, *, is_known: bool) -> str:
    """Say why all ranks wait, as far as a probe of the network has found it; `is_known`: whether any rank says where it is."""
    if not is_known and (network is None or not network.is_faulty):
        more = f"; {network.words}" if network is not None else ""
        return f"no rank says where it is: it did not answer, and no stack is in its log{more}"
    if network is None or network.problem:
        why = f" ({network.problem})" if network is not None else ""
        return f"all ranks wait for each other: check the network between the nodes{why}"
    if network.is_faulty:
        return f"all ranks wait for each other, and {network.words}"
    if network.carries:
        return f"all ranks wait for each other, but {network.words}: check the devices, and the calls in the stacks"
    return f"all ranks wait for each other; {network.words}"


def _timeout(context: JobContext, phase: Phase) -> str:
    """Say which timeout was exceeded."""
    restart = context.spec.restart
    if phase == "building":
        limit_s = restart.build_timeout_s
        return f"the recipe did not return within {limit_s} s; if it needs longer, raise `restart.hang_timeout_s` above {limit_s}"
    return f"no rank made progress for {restart.hang_timeout_s} s; if a step may take longer, raise `restart.hang_timeout_s`"
