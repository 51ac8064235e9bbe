"""The report of a hang: the stacks of all ranks in one file, and the rank that the others waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.cluster.rank_probe.hang_verdict import judge_hang
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.ending.stacks import read_rank_stacks
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.run.run_dir.failure_reports import Phase, WorkerFailure, allowed_phase, write_failure
from ddp_hpc.run.run_dir.hang_records import read_hang_records
from ddp_hpc.run.run_dir.network import NetworkFindings


def report_hang(
    context: JobContext, attempt: int, failures: Sequence[WorkerFailure], network: NetworkFindings | None = None
) -> WorkerFailure:
    """Write all ranks' stacks into one file, and an error report that names the rank that the others wait for."""
    run, hosts = context.run, [context.node_of(rank) for rank in range(context.world.world_size)]
    records = read_hang_records(run, attempt)
    stands = read_rank_stacks(run, attempt, len(hosts), records)
    path = run.stacks(attempt)
    texts = [
        f"=== rank {stand.rank} on {hosts[stand.rank] or 'this machine'}: {stand.place}\n{stand.stacks}\n"
        for stand in stands
    ]
    with best_effort():
        make_directories(path.parent)
        replace_text(path, "".join(texts))
    lost_peer = {failure.rank for failure in failures if failure.is_secondary}
    verdict = judge_hang(hosts, records, stands, network, lost_peer=lost_peer)
    phase = allowed_phase(run, attempt)
    rank = max(verdict.rank, 0)  # reports are files of ranks: one of no rank goes to rank zero's
    failure = WorkerFailure(
        rank=verdict.rank,
        host=verdict.node or "",
        at=time.time(),
        step=0,
        exception=f"{_timeout(context, phase)}; {verdict.words}; the stacks of all ranks are in {path}",
        log=str(run.rank_log(attempt, rank)),
        phase=phase,
        is_hang=True,
        hang_kind=verdict.kind,
        hang_detail=verdict.words,
    )
    write_failure(run.rank_error(attempt, rank), failure)
    return failure


def _timeout(context: JobContext, phase: Phase) -> str:
    """Say which timeout was exceeded."""
    restart = context.spec.restart
    if phase == "building":
        limit_s = restart.build_timeout_s
        return f"the recipe did not return within {limit_s} s; if it needs longer, raise `restart.hang_timeout_s` above {limit_s}"
    return f"no rank made progress for {restart.hang_timeout_s} s; if a step may take longer, raise `restart.hang_timeout_s`"
