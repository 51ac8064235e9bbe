"""The report of a hang: the stacks of all ranks in one file, and the rank that the others waited for."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from ddp_hpc.base.durable import make_directories, read_end_of_file, replace_text
from ddp_hpc.cluster.rank_probe.compare_ranks import main_thread_frames
from ddp_hpc.cluster.rank_probe.hang_verdict import RankStack, judge_hang
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.run.run_dir.failure_reports import Phase, WorkerFailure, announced_phase, write_failure
from ddp_hpc.run.run_dir.hang_records import RankInHang, read_hang_records
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.run_dir.paths import RunDir

_WATCHDOG_DUMP_PATTERN = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_TAIL_BYTES = 256 << 10
"""Of a log: where the stacks that a watchdog dumped stand."""


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
    kind, waited_for, words = judge_hang(hosts, records, stands, network, lost_peer=lost_peer)
    phase = announced_phase(run, attempt)
    rank = max(waited_for, 0)  # reports are files of ranks: one of no rank goes to rank zero's
    failure = WorkerFailure(
        rank=waited_for,
        host=(hosts[waited_for] or "") if waited_for >= 0 else "",
        at=time.time(),
        exception=f"{_timeout_text(context, phase)}; {words}; the stacks of all ranks are in {path}",
        log=str(run.rank_log(attempt, rank)),
        phase=phase,
        is_hang=True,
        hang_kind=kind,
        hang_detail=words,
    )
    write_failure(run.rank_error(attempt, rank), failure)
    return failure


def _timeout_text(context: JobContext, phase: Phase) -> str:
    restart = context.spec.restart
    if phase == "building":
        limit_s = restart.build_timeout_s
        return f"the recipe did not return within {limit_s} s; if it needs longer, raise `restart.hang_timeout_s` above {limit_s}"
    return f"no rank made progress for {restart.hang_timeout_s} s; if a step may take longer, raise `restart.hang_timeout_s`"


def read_rank_stacks(run: RunDir, attempt: int, world_size: int, records: Sequence[RankInHang] = ()) -> list[RankStack]:
    """Return the stacks of the ranks whose watchdogs timed out, and of those that only their node has asked: a script's."""
    asked = {one.rank: RankStack(one.rank, main_thread_frames(one.stacks), one.stacks) for one in records if one.stacks}
    found = [_read_rank_stack(run, attempt, rank) or asked.get(rank) for rank in range(world_size)]
    return [stand for stand in found if stand is not None]


def has_stacks(run: RunDir, attempt: int, world_size: int) -> bool:
    """Tell whether any watchdog timed out."""
    return any(_read_rank_stack(run, attempt, rank) is not None for rank in range(world_size))


def _read_rank_stack(run: RunDir, attempt: int, rank: int) -> RankStack | None:
    try:
        text = read_end_of_file(run.rank_log(attempt, rank), _TAIL_BYTES)[1].decode("utf-8", errors="replace")
    except OSError:
        return None
    dumps = list(_WATCHDOG_DUMP_PATTERN.finditer(text))
    if not dumps:
        return None
    stacks = text[dumps[-1].start() :]
    return RankStack(rank, main_thread_frames(stacks), stacks)
