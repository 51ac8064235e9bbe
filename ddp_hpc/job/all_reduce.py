"""Has the nodes of a job add up known numbers by the back end that the workers will use, in a job step of one process on each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_hpc.base import processes
from ddp_hpc.job.choose_endpoint import meetings
from ddp_hpc.job.node_question import Question
from ddp_hpc.job.wire.subprocesses import ask_nodes
from ddp_hpc.node_checks import collectives
from ddp_hpc.node_checks.collectives import LIMIT_S, report_of
from ddp_hpc.run_dir.preflight import Finding

_MODULE = "ddp_hpc.train.all_reduce_check"
_START_S = 20.0
"""How much longer the step may take than a node: Slurm starts it, and collects the answers."""
_ATTEMPT = 10**6
"""Of no attempt of a run, so that its ports are others than those that workers will take."""


def findings_of(question: Question) -> tuple[Sequence[Finding], Sequence[str]]:
    """Make an all-reduce of all nodes and of each two: return whether the sums are right and how fast they came, and which nodes said nothing.

    Raises:
        ConfigError: where rank zero's node has no network.
        WorkerError: where no address of rank zero's node is known.
    """
    nodes = question.allocation.node_names
    if len(nodes) < 2:
        return [], []
    told = ask_nodes(
        [*question.python, "-m", _MODULE, *_options(question)],
        nodes,
        environ=question.environ,
        timeout_s=LIMIT_S + _START_S,
        step=question.step,
        is_over=processes.is_stop_pending,
    )
    reports = {node: found for node, plain in told.by_node.items() if (found := report_of(plain)) is not None}
    return [*collectives.findings_of(nodes, reports, problem=told.last_error)], told.silent


def _options(question: Question) -> Iterator[str]:
    where = meetings(question.allocation, attempt=_ATTEMPT, environ=question.environ, preferred=question.interfaces)
    meeting = next(where)
    yield from (f"--node={node}" for node in question.allocation.node_names)
    yield from (f"--address={meeting.address}", f"--port={meeting.port}")
    yield f"--backend={'nccl' if question.asked.gpus_per_node else 'gloo'}"
