"""Checks the nodes of a job before a training: asks each of them, probes the network between them, and judges the answers.

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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddp_hpc import exit_codes
from ddp_hpc.base import processes
from ddp_hpc.base.durable import make_directories
from ddp_hpc.containers import CommandWrapper
from ddp_hpc.errors import ConfigError, DdpHpcError
from ddp_hpc.job import all_reduce
from ddp_hpc.job.choose_endpoint import address_of
from ddp_hpc.job.ending import network_probe
from ddp_hpc.job.ending.best_effort import best_effort, diagnosis
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.node_question import Question, without
from ddp_hpc.job.unreached import Reach, are_all_reached, reach_of
from ddp_hpc.job.wire.subprocesses import NodesAnswers, ask_nodes
from ddp_hpc.node_checks import collectives
from ddp_hpc.node_checks.answers import Answers, Asked
from ddp_hpc.node_checks.facts import facts_of
from ddp_hpc.node_checks.of_network import slow_ways
from ddp_hpc.node_checks.verdict import findings_of
from ddp_hpc.run_dir.ledger import Ledger
from ddp_hpc.run_dir.network import NetworkFindings
from ddp_hpc.run_dir.preflight import Finding, Preflight, write_preflight
from ddp_hpc.slurm.allocation import Allocation, read_allocation
from ddp_hpc.slurm.hostlist import expand_hostlist
from ddp_hpc.slurm.steps import beside_argv

ANSWER_S = 30.0
"""How long the nodes may take to start Python and to answer."""


def examine(question: Question) -> Preflight:
    """Ask all nodes, probe the network, and judge. A node that goes down meanwhile is named, and the others are asked without it."""
    nodes, began, at = question.allocation.node_names, time.monotonic(), time.time()
    make_directories(question.folder)
    told, problem, lost = _asked(question)
    shutil.rmtree(question.folder, ignore_errors=True)
    facts = {node: found for node in nodes if (found := facts_of(told.get(node))) is not None}
    network = None
    if facts and not processes.is_stop_pending():
        network, lost = _network_without(question, lost)
    summed: Sequence[Finding] = ()
    if question.all_reduce:
        summed, lost = _all_reduce_without(question, network, lost)
    rest = [node for node in nodes if node not in lost and node in facts]
    last = Reach()
    if rest and not processes.is_stop_pending() and not are_all_reached(rest, question.environ):
        last = reach_of(
            rest, question.environ, job_nodes=rest
        )  # finds one whose processes go on, such as without its slurmd
    answers = Answers(
        nodes=nodes,
        facts=facts,
        lost=[*lost, *last.lost],
        unsure=last.unsure,
        problem=problem,
        network=network,
        asked=question.asked,
    )
    findings = [*findings_of(answers), *summed]
    return Preflight(at=at, seconds=round(time.monotonic() - began, 1), nodes=nodes, findings=tuple(findings))


def _asked(question: Question) -> tuple[Mapping[str, Any], str, list[str]]:
    """Return what the nodes say of themselves, srun's last error, and the nodes on which Slurm starts no command.

    Where there are such nodes, srun may have ended the step on the others, too, so these are asked once more without them.
    """
    first = _answers_to(question)
    lost = _lost(question, first.silent)
    rest = [node for node in first.silent if node not in lost]
    if not lost or not rest or processes.is_stop_pending():
        return first.by_node, first.last_error, lost
    again = _answers_to(question, rest)
    return {**first.by_node, **again.by_node}, first.last_error or again.last_error, lost


def _lost(question: Question, silent: Sequence[str], *, before: Sequence[str] = ()) -> list[str]:
    """Return those of the silent nodes on which Slurm starts no command; `before` are lost already."""
    if not silent or processes.is_stop_pending():
        return []
    job_nodes = [node for node in question.allocation.node_names if node not in before]
    return [*reach_of(silent, question.environ, job_nodes=job_nodes).lost]


def _answers_to(question: Question, rest: Sequence[str] = ()) -> NodesAnswers:
    """Ask all nodes for their facts, or only these."""
    nodes = question.allocation.node_names
    options = [*(f"--node={node}" for node in nodes), *(f"--path={path}" for path in question.paths)]
    command = [*question.python, "-m", "ddp_hpc.node_checks.node", f"--folder={question.folder}", *options]
    asked = without(question, [node for node in nodes if rest and node not in rest])
    return ask_nodes(
        command,
        asked.allocation.node_names,
        environ=asked.environ,
        timeout_s=ANSWER_S,
        step=asked.step,
        is_over=processes.is_stop_pending,
    )


def _network_without(question: Question, lost: Sequence[str]) -> tuple[NetworkFindings | None, list[str]]:
    """Probe the network between the nodes that are not lost; return also which are, with those that are lost meanwhile."""
    found = _network(without(question, lost))
    silent = found.silent if found is not None else ()
    newly = _lost(question, silent, before=lost)
    if not newly:
        return found, [*lost]
    all_lost = [*lost, *newly]
    # As in `_asked`: the step that probed may have ended on the other nodes, too.
    return (_network(without(question, all_lost)) if not processes.is_stop_pending() else found), all_lost


def _all_reduce_without(
    question: Question, network: NetworkFindings | None, lost: Sequence[str]
) -> tuple[Sequence[Finding], list[str]]:
    """Have the nodes that are not lost add up numbers; return also which are, with those that are lost meanwhile."""
    rest = without(question, lost)
    findings, silent = _all_reduce(rest, network)
    newly = _lost(question, silent, before=lost)
    all_lost = [*lost, *newly]
    if newly and len(silent) == len(rest.allocation.node_names) and not processes.is_stop_pending():
        findings, _ = _all_reduce(without(question, all_lost), network)  # the step did not start for the lost ones
    return findings, all_lost


def _all_reduce(question: Question, network: NetworkFindings | None) -> tuple[Sequence[Finding], Sequence[str]]:
    """Have the nodes add up numbers; where their network does not carry, they would only wait for each other."""
    why_not = ""
    if network is not None and network.is_faulty:
        why_not = "the network does not carry between all nodes"
    elif processes.is_stop_pending():
        why_not = "a signal asks for the end"
    if why_not:
        return [Finding(check=collectives.CHECK, level="unknown", found=f"none was made, as {why_not}")], []
    found: Sequence[Finding] = [Finding(check=collectives.CHECK, level="unknown", found="none could be made")]
    silent: Sequence[str] = []
    with diagnosis("an all-reduce between the nodes"):
        found, silent = all_reduce.findings_of(question)
    return found, silent


def _network(question: Question) -> NetworkFindings | None:
    """Probe the network that the ranks would meet on; None where that fails."""
    found: NetworkFindings | None = None
    with diagnosis("the network between the nodes"):
        found = _probed(question)
    return found  # noqa: RET504  `diagnosis` passes errors over


def _probed(question: Question) -> NetworkFindings | None:
    nodes = question.allocation.node_names
    if len(nodes) < 2:
        return None
    address, _ = address_of(question.allocation, environ=question.environ, preferred=question.interfaces)
    found = network_probe.probe(nodes, address, measures=True)
    if found.is_faulty or not slow_ways(found.paces) or processes.is_stop_pending():
        return found
    # A busy node slows a link down for a moment, and a slow link stays slow.
    return fastest(found, network_probe.probe(nodes, address, measures=True))


def fastest(first: NetworkFindings, again: NetworkFindings) -> NetworkFindings:
    """Return the second of two probes with the higher speed of each link."""
    rates = {(pace.sender, pace.receiver): pace.mb_per_s for pace in first.paces}
    paces = (
        replace(pace, mb_per_s=max(pace.mb_per_s, rates.get((pace.sender, pace.receiver), 0.0))) for pace in again.paces
    )
    return replace(again, paces=tuple(paces))


def checked(context: JobContext, wrapper: CommandWrapper, attempt: int) -> Outcome | None:
    """Check the job's nodes before its first attempt; return how the attempt ends where the workers must not start, else None."""
    found: Preflight | None = None
    with diagnosis("the nodes before the workers start"):
        found = _found(context, wrapper, attempt)
    if found is None or processes.is_stop_pending():
        return None  # what a check that was cut short found is no reason; the workers' start takes the signal
    return _told(context, attempt, found)


def _found(context: JobContext, wrapper: CommandWrapper, attempt: int) -> Preflight | None:
    """Return what a check found; None where none is asked for, or the job's nodes have been checked before."""
    allocation = context.allocation
    if not context.spec.preflight.enabled or allocation is None or not _is_first(context.records.ledger(), attempt):
        return None
    return examine(_question(context, wrapper, attempt, allocation))


def _told(context: JobContext, attempt: int, found: Preflight) -> Outcome | None:
    """Record and print what was found; return how the attempt ends, where it does."""
    with best_effort():
        write_preflight(context.run, attempt, found)
    for finding in found.findings:
        if finding.level != "ok":
            sys.stderr.write(f"preflight: {finding.level}: {finding.check}: {finding.found}\n")
    sys.stderr.write(
        f"note: {len(found.nodes)} nodes were checked in {found.seconds:.0f} s; failures: {len(found.failures)}\n"
    )
    return outcome_of(found, context.spec.preflight.on_fail, nodelist=context.spec.slurm.nodelist or "")


def _is_first(ledger: Ledger, attempt: int) -> bool:
    """Tell whether an attempt is the first of this start of the job: only then the nodes are new to the run."""
    begun, before = ledger.attempt(attempt), ledger.before(attempt)
    return begun is None or before is None or (begun.job_id, begun.restart) != (before.job_id, before.restart)


def _question(context: JobContext, wrapper: CommandWrapper, attempt: int, allocation: Allocation) -> Question:
    spec, world, workload = context.spec, context.world, context.workload
    inputs = [str(path) for path in workload.input_paths(Path.cwd())]
    binds = [bind.partition(":")[0] for bind in spec.container.binds]
    step = beside_argv(spec, world, cpus_per_worker=workload.cpus_per_worker)
    return Question(
        allocation=allocation,
        folder=context.run.preflight_files(attempt),
        environ={**context.environ, **wrapper.environ},
        paths=[*inputs, *([] if wrapper.image else binds)],
        python=wrapper.command,
        step=[*step, *wrapper.srun_args],
        interfaces=spec.network.interfaces,
        asked=Asked(
            cpus_per_node=workload.cpus_per_worker * world.workers_per_node, gpus_per_node=spec.resources.num_gpus
        ),
        all_reduce=spec.preflight.all_reduce,
    )


def outcome_of(found: Preflight, on_fail: str, *, nodelist: str = "") -> Outcome | None:
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
    elif on_fail == "exclude" and found.bad_nodes and not found.has_nameless_failure:
        return Outcome(code=exit_codes.FAILED, reason=reason, lost_nodes=found.bad_nodes)
    return Outcome(code=exit_codes.FAILED, reason=reason, has_failed_preflight=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the nodes of the job that this process is in; print the result as JSON."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.preflight", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--interface", action="append", default=[])
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--all-reduce", action="store_true")
    arguments = parser.parse_args(argv)
    processes.die_with_parent(os.getppid())
    try:
        allocation = read_allocation(os.environ)
        if allocation is None:
            raise ConfigError(
                "This process is in no Slurm job, so it has no nodes to check. Run `ddp-hpc doctor --nodes`."
            )
        question = Question(
            allocation=allocation,
            folder=arguments.folder,
            environ=os.environ,
            paths=arguments.path,
            interfaces=arguments.interface,
            asked=Asked(gpus_per_node=arguments.gpus_per_node),
            all_reduce=arguments.all_reduce,
        )
        found = examine(question)
    except (DdpHpcError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_codes.FAILED
    sys.stdout.write(f"\n{json.dumps(asdict(found))}\n")  # the text before may lack a line break
    return exit_codes.FINISHED


if __name__ == "__main__":
    sys.exit(main())
