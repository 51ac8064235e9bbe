"""Finds the nodes that cannot start a worker: tries each one, after attempts that ended without an error report."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.cluster.slurm.steps import probe_on_argv
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.wire.subprocesses import run_for_out_and_err
from ddp_hpc.run.run_dir.failure_reports import read_failures
from ddp_hpc.run.run_dir.ledger import Cause, Ledger

TIMEOUT_S = 180.0
"""How long a node may take to start Python and to import what a worker needs, while other nodes do the same."""
_MOST_NODES_AT_ONCE = 16
_UNEXPLAINED_CAUSES = (Cause.WORKER_CRASHED, Cause.UNEXPLAINED)
"""Causes of attempts that end without an error report. Where one task cannot start, srun sends SIGTERM to the others; a
task whose Python has not installed its handlers yet is killed by it, which looks like an early stop signal."""
_CAN_START_MARKER = "ddp-hpc-can-start"
_PROBE_PROGRAM = (
    "import importlib, os, sys; from ddp_hpc.job.node.python_environ import make_users_code_importable; make_users_code_importable(os.environ); "
    f"importlib.import_module(sys.argv[2]).preload(sys.argv[1]); print('\\n{_CAN_START_MARKER}')"
)


def explain_by_nodes(context: JobContext, attempt: int, outcome: Outcome) -> Outcome:
    """Return the outcome with the nodes that cannot start a worker, where this attempt and the one before left no report."""
    was_asked = outcome.is_out_of_time or outcome.was_signalled
    is_explained = outcome.reason or outcome.lost_nodes or outcome.is_unresponsive or was_asked
    has_failed = outcome.code in (exit_codes.FAILED, exit_codes.STOPPED_BEFORE_START)
    if is_explained or not has_failed or read_failures(context.run, attempt) or len(context.nodes) < 2:
        return outcome
    before = Ledger.read(context.run).newest_before(attempt)
    if (
        not context.has_time(TIMEOUT_S)
        or before is None
        or before.cause not in _UNEXPLAINED_CAUSES
        or read_failures(context.run, before.attempt)
    ):
        return outcome
    sys.stderr.write(
        "note: the workers failed twice in a row without an error report; ddp-hpc now checks that each node can start Python and import their modules\n"
    )
    unable = _unable_nodes(context)
    if not unable or len(unable) == len(context.nodes) or processes.is_stop_pending():
        return outcome  # what holds for all is no node's fault, and a stop cuts the probe short
    reason = f"{', '.join(unable)} cannot start a worker's Python and import its modules; the {len(context.nodes) - len(unable)} other nodes can"
    return replace(outcome, code=exit_codes.FAILED, lost_nodes=unable, reason=reason)


def _unable_nodes(context: JobContext) -> tuple[str, ...]:
    """Return the nodes on which a step of one task does not import what a worker needs."""
    wrapper, environ = context.wrapper, {**context.environ, **context.wrapper.environ}
    imports = ["-c", _PROBE_PROGRAM, str(context.run.path), context.workload.worker]

    def can_start(node: str) -> bool:
        argv = [*probe_on_argv([node]), *wrapper.srun_args, *wrapper.command, *imports]
        return (
            _CAN_START_MARKER
            in run_for_out_and_err(argv, environ=environ, timeout_s=TIMEOUT_S, is_over=processes.is_stop_pending)[0]
        )

    with ThreadPoolExecutor(_MOST_NODES_AT_ONCE) as pool:
        return tuple(
            node for node, can in zip(context.nodes, pool.map(can_start, context.nodes), strict=True) if not can
        )
