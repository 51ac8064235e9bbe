"""Finds the nodes that cannot start a worker: tries each one, after attempts that ended without an error report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from ddp_hpc.base import exit_codes
from ddp_hpc.cluster.containers import CommandWrapper
from ddp_hpc.cluster.slurm.steps import probe_argv
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.wire.subprocesses import printed_by
from ddp_hpc.run.requeue import reserve_s
from ddp_hpc.run.run_dir.failure_reports import read_failures
from ddp_hpc.run.run_dir.ledger import Cause, Ledger

TIMEOUT_S = 180.0
"""How long a node may take to start Python and to import what a worker needs, while other nodes do the same."""
_AT_A_TIME = 16
_UNEXPLAINED = (Cause.WORKER_CRASHED, Cause.UNEXPLAINED)
"""Causes of attempts that end without an error report. Where one task cannot start, srun sends SIGTERM to the others; a
task whose Python has not installed its handlers yet is killed by it, which looks like an early stop signal."""
_CAN = "ddp-hpc-can-start"
_CODE = (
    "import importlib, os, sys; from ddp_hpc.job.node.python_environ import make_users_code_importable; "
    "make_users_code_importable(os.environ); "
    f"importlib.import_module(sys.argv[2]).preload(sys.argv[1]); print('\\n{_CAN}')"
)


def blame(context: JobContext, wrapper: CommandWrapper, attempt: int, outcome: Outcome) -> Outcome:
    """Return the outcome with the nodes that cannot start a worker, where this attempt and the one before left no report."""
    if not _is_unexplained(outcome) or read_failures(context.run, attempt) or len(context.nodes) < 2:
        return outcome
    ledger = Ledger.read(context.run)
    ends_at = ledger.newest.ends_at if ledger.newest else None
    if ends_at is not None and time.time() > ends_at - TIMEOUT_S - reserve_s(context.spec.slurm.signal_lead_s):
        return outcome  # the job's time would be over before the nodes have answered, and such a job does not come back
    before = ledger.before(attempt)
    if before is None or before.cause not in _UNEXPLAINED or read_failures(context.run, before.attempt):
        return outcome
    sys.stderr.write(
        "note: the workers failed twice in a row without an error report; ddp-hpc now checks that each node can start Python and import their modules\n"
    )
    environ = {**context.environ, **wrapper.environ}
    unable = unable_nodes(context, wrapper, environ)
    if not unable or len(unable) == len(context.nodes):
        return outcome  # what holds for all is no node's fault
    reason = f"{', '.join(unable)} cannot start a worker's Python and import its modules; the {len(context.nodes) - len(unable)} other nodes can"
    return replace(outcome, code=exit_codes.FAILED, lost_nodes=unable, reason=reason)


def _is_unexplained(outcome: Outcome) -> bool:
    """Tell whether an attempt failed without a reason that the supervisor knows."""
    was_asked = outcome.is_out_of_time or outcome.was_signalled
    is_explained = outcome.reason or outcome.lost_nodes or outcome.is_unresponsive or was_asked
    has_failed = outcome.code in (exit_codes.FAILED, exit_codes.STOPPED_EARLY)
    return has_failed and not is_explained


def unable_nodes(context: JobContext, wrapper: CommandWrapper, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes on which a step of one task does not import what a worker needs."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        ask = partial(_answer, context=context, wrapper=wrapper, environ=environ)
        return tuple(
            node for node, answer in zip(context.nodes, pool.map(ask, context.nodes), strict=True) if _CAN not in answer
        )


def _answer(node: str, *, context: JobContext, wrapper: CommandWrapper, environ: Mapping[str, str]) -> str:
    command = [*wrapper.srun_args, *wrapper.command, "-c", _CODE, str(context.run.path), context.workload.worker]
    printed, _ = printed_by([*probe_argv(1), f"--nodelist={node}", *command], environ=environ, timeout_s=TIMEOUT_S)
    return printed
