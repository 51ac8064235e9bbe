"""Checks the nodes of a job before a training: asks each of them once, probes the network between them, and judges the answers.

    python -m ddp_hpc.job.preflight --folder DIR [--path PATH ...]      # in a job: prints the result as JSON

The supervisor does it where `preflight.enabled` is set; `ddp-hpc doctor --nodes` runs this module in a job of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.durable import make_directories
from ddp_hpc.base.errors import ConfigError, DdpHpcError
from ddp_hpc.base.record import write_record
from ddp_hpc.cluster.node_checks.answers import NodeAnswers, NodeNeeds
from ddp_hpc.cluster.node_checks.checks import findings_of
from ddp_hpc.cluster.node_checks.facts import parse_facts
from ddp_hpc.cluster.slurm.allocation import Allocation, read_allocation
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.cluster.slurm.steps import overlap_step_argv
from ddp_hpc.job.choose_endpoint import rank0_addr
from ddp_hpc.job.ending import network_probe
from ddp_hpc.job.ending.best_effort import best_effort, best_effort_diagnosis
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.wire.subprocesses import ask_nodes
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.run_dir.preflight import PreflightReport

ANSWER_S, UNPACK_S = 30.0, 300.0
"""How long the nodes may take to start Python and to answer; in an image, which each may have to unpack first."""


@dataclass(frozen=True, kw_only=True)
class NodesCheckRequest:
    """What is checked, and how commands run on the nodes."""

    allocation: Allocation
    folder: Path
    """A directory that all nodes share; each writes a file there. It is removed."""
    environ: Mapping[str, str]
    paths: Sequence[str] = ()
    """What workers read."""
    python: Sequence[str] = (sys.executable,)
    step: Sequence[str] | None = None
    """The beginning of the command that starts a process on each node as workers start; None for a step of one CPU."""
    has_image: bool = False
    interfaces: Sequence[str] = ()
    """Networks to prefer (`network.interfaces`)."""
    asked: NodeNeeds = field(default_factory=NodeNeeds)


def examine_nodes(question: NodesCheckRequest) -> PreflightReport:
    """Ask each node once, probe the network between those that answered, and judge."""
    nodes, began, at = question.allocation.node_names, time.monotonic(), time.time()
    make_directories(question.folder)
    options = [*(f"--node={node}" for node in nodes), *(f"--path={path}" for path in question.paths)]
    answered = ask_nodes(
        [*question.python, "-m", "ddp_hpc.cluster.node_checks.gather", f"--folder={question.folder}", *options],
        nodes,
        environ=question.environ,
        timeout_s=UNPACK_S if question.has_image else ANSWER_S,
        step=question.step,
        is_over=processes.is_stop_pending,
    )
    shutil.rmtree(question.folder, ignore_errors=True)
    facts = {node: found for node in nodes if (found := parse_facts(answered.by_node.get(node))) is not None}
    network: NetworkFindings | None = None
    if len(facts) > 1 and not processes.is_stop_pending():
        with best_effort_diagnosis("the network between the nodes"):
            allocation = replace(question.allocation, node_names=tuple(facts))
            address, _ = rank0_addr(allocation, environ=question.environ, preferred=question.interfaces)
            network = network_probe.probe_network(allocation.node_names, address, measures=True)
    answers = NodeAnswers(
        nodes=nodes,
        facts=facts,
        unstarted=answered.unstarted,
        problem=answered.last_error,
        network=network,
        asked=question.asked,
    )
    seconds = round(time.monotonic() - began, 1)
    return PreflightReport(at=at, seconds=seconds, nodes=nodes, findings=findings_of(answers))


def check_new_nodes(context: JobContext, attempt: int) -> Outcome | None:
    """Check the job's nodes before its first attempt, where the run asks for it.

    Return how the attempt ends where the workers must not start, else None.
    """
    spec, allocation = context.spec, context.allocation
    if not spec.preflight.enabled or allocation is None:
        return None
    found: PreflightReport | None = None
    with best_effort_diagnosis("the nodes before the workers start"):
        ledger = Ledger.read(context.run)
        begun, before = ledger.attempt(attempt), ledger.newest_before(attempt)
        # Only in the first attempt of this start of the job, the nodes are new to the run.
        if not (begun and before and (begun.job_id, begun.restart) == (before.job_id, before.restart)):
            found = examine_nodes(_make_check_request(context, attempt, allocation))
    if found is None or processes.is_stop_pending():
        return None  # what a check that was cut short found is no reason; the workers' start takes the signal
    with best_effort():
        write_record(context.run.preflight(attempt), found, indent=1)
    for finding in found.findings:
        if finding.level != "ok":
            sys.stderr.write(f"preflight: {finding.level}: {finding.check}: {finding.found}\n")
    sys.stderr.write(
        f"note: {len(found.nodes)} nodes were checked in {found.seconds:.0f} s; failures: {len(found.failures)}\n"
    )
    return outcome_of_findings(found, spec.preflight.on_fail, nodelist=spec.slurm.nodelist or "")


def _make_check_request(context: JobContext, attempt: int, allocation: Allocation) -> NodesCheckRequest:
    spec, world, workload, wrapper = context.spec, context.world, context.workload, context.wrapper
    inputs = [str(path) for path in workload.input_paths(Path.cwd())]
    binds = [bind.partition(":")[0] for bind in spec.container.binds]
    step = overlap_step_argv(spec, world, cpus_per_worker=workload.cpus_per_worker)
    return NodesCheckRequest(
        allocation=allocation,
        folder=context.run.preflight_files(attempt),
        environ={**context.environ, **wrapper.environ},
        paths=[*inputs, *([] if wrapper.image else binds)],
        python=wrapper.command,
        step=[*step, *wrapper.srun_args],
        has_image=bool(wrapper.image),
        interfaces=spec.network.interfaces,
        asked=NodeNeeds(
            cpus_per_node=workload.cpus_per_worker * world.workers_per_node,
            gpus_per_node=spec.resources.num_gpus,
            open_files=processes.needed_open_files(world.world_size),
        ),
    )


def outcome_of_findings(found: PreflightReport, on_fail: str, *, nodelist: str = "") -> Outcome | None:
    """Return how an attempt ends of what was found; None where its workers may start."""
    if not found.failures or on_fail == "warn":
        return None
    reason = f"the check before the training (`preflight`) found: {found.words}"
    asked: list[str] = []
    with suppress(ConfigError):  # Slurm also takes the name of a file
        asked = expand_hostlist(nodelist) if nodelist else []
    kept = [node for node in found.bad_nodes if node in asked]
    if on_fail == "exclude" and kept:
        reason += f"; `slurm.nodelist` asks for {', '.join(kept)}, so it cannot be left out"
    elif on_fail == "exclude" and found.bad_nodes and not found.has_failure_without_bad_nodes:
        return Outcome(code=exit_codes.FAILED, reason=reason, lost_nodes=found.bad_nodes)
    return Outcome(code=exit_codes.FAILED, reason=reason, has_failed_preflight=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the nodes of the job that this process is in; print the result as JSON."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.preflight", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--interface", action="append", default=[])
    parser.add_argument("--gpus-per-node", type=int, default=0)
    arguments = parser.parse_args(argv)
    processes.die_with_parent(os.getppid())
    try:
        allocation = read_allocation(os.environ)
        if allocation is None:
            raise ConfigError(
                "This process is in no Slurm job, so it has no nodes to check. Run `ddp-hpc doctor --nodes`."
            )
        question = NodesCheckRequest(
            allocation=allocation,
            folder=arguments.folder,
            environ=os.environ,
            paths=arguments.path,
            interfaces=arguments.interface,
            asked=NodeNeeds(gpus_per_node=arguments.gpus_per_node),
        )
        found = examine_nodes(question)
    except (DdpHpcError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_codes.FAILED
    sys.stdout.write(f"\n{json.dumps(asdict(found))}\n")  # the text before may lack a line break
    return exit_codes.FINISHED


if __name__ == "__main__":
    sys.exit(main())
