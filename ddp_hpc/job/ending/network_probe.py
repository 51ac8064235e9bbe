"""Probes the network between the nodes of a job after a hang: which node, or which pair of nodes, it does not carry.

A short job step runs `rendezvous.links.probe` on every node. Orders and reports go through srun, over Slurm's network; the probe itself
goes over the network on which the ranks met. A node that Slurm does not reach either is left out, and the record says so.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.cluster.rendezvous.links.findings import NodeLinkReport, confirm_findings, findings_of
from ddp_hpc.cluster.rendezvous.links.probe import PARTNER_TIMEOUT_S, ROUND_S
from ddp_hpc.cluster.rendezvous.links.rounds import rounds_of
from ddp_hpc.cluster.slurm.steps import probe_on_argv
from ddp_hpc.job.ending.best_effort import best_effort, best_effort_diagnosis
from ddp_hpc.job.ending.hang_report import has_stacks
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.wire import subprocesses
from ddp_hpc.job.wire.control_channel import ControlChannel
from ddp_hpc.run.run_dir.failure_reports import read_failures
from ddp_hpc.run.run_dir.network import NetworkFindings, write_network
from ddp_hpc.run.run_dir.records import read_stop_request

READY_TIMEOUT_S = 20.0
"""How long the nodes may take to start Python and to listen."""
REPORT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 60.0
"""How long all of it takes at most."""
_POLL_INTERVAL_S = 0.05
_END_TIMEOUT_S = 2.0

StepArgvFunction = Callable[[Sequence[str]], list[str]]
"""From the names of nodes to the beginning of the command that runs one task on each."""


def explain_by_network(context: JobContext, attempt: int, outcome: Outcome) -> Outcome:
    """Return the outcome with what a probe of the network found, where the attempt hung or its ranks lost each other."""
    explained = outcome
    with best_effort_diagnosis("the network between the nodes"):
        if len(context.nodes) > 1 and _may_be_network(context, attempt, outcome) and context.has_time(PROBE_TIMEOUT_S):
            sys.stderr.write(
                "note: ddp-hpc now probes the network between the nodes, as it may be why the ranks made no progress\n"
            )
            findings = probe_network(context.nodes, outcome.met_at)
            if findings.bad_nodes:
                # The job gives up a bad node, so one sample is not enough: the node may have stood still for some seconds.
                may_ask = context.has_time(PROBE_TIMEOUT_S) and not processes.is_stop_pending()
                findings = confirm_findings(findings, probe_network(context.nodes, outcome.met_at) if may_ask else None)
            sys.stderr.write(f"note: {findings.words} (probed in {findings.seconds:.0f} s)\n")
            explained = replace(outcome, network=findings)
            with best_effort():
                write_network(context.run, attempt, findings)
    return explained


def _may_be_network(context: JobContext, attempt: int, outcome: Outcome) -> bool:
    """Tell whether an attempt failed in a way that a broken network can cause."""
    if outcome.code in {*exit_codes.GOOD_CODES, exit_codes.FENCED} or outcome.was_suspended or not outcome.met_at:
        return False
    if outcome.lost_nodes or read_stop_request(context.run) is not None:
        return False  # srun would wait for lost nodes; ranks that obey a stop at different times lose each other
    if outcome.reason or outcome.was_signalled or outcome.is_out_of_time or processes.is_stop_pending():
        return False
    if outcome.is_unresponsive:
        return True
    if failures := read_failures(context.run, attempt):
        return failures[0].is_secondary  # the first cause comes first: all have lost a connection
    return has_stacks(context.run, attempt, context.world.world_size)


def probe_network(
    nodes: Sequence[str],
    address: str,
    *,
    step_argv: StepArgvFunction = probe_on_argv,
    ready_s: float = READY_TIMEOUT_S,
    measures: bool = False,
) -> NetworkFindings:
    """Probe the network of `address` between nodes; a stop signal to this process ends it early.

    With `measures`, also say how fast each link is, and how far apart the nodes' clocks are.
    """
    began, at = time.monotonic(), time.time()
    talk = _ProbeSession(nodes, address, step_argv, began + PROBE_TIMEOUT_S, measures=measures)
    try:
        talk.start_and_wait(nodes, ready_s)
        if talk.has_ended and 2 <= len(talk.places) < len(nodes):
            # srun ends the whole step where it cannot start a task on one node.
            talk.close()
            talk.start_and_wait([nodes[number] for number in sorted(talk.places)], ready_s)
        if len(talk.places) >= 2:
            talk.run_probes()
    except OSError as error:
        return _unknown_findings(f"srun cannot be started: {error}", nodes, address, at)
    finally:
        talk.close()
    if not talk.answers:
        return _unknown_findings("no node answered over Slurm's network", nodes, address, at)
    return findings_of(nodes, talk.answers, address=address, at=at, seconds=time.monotonic() - began)


def _unknown_findings(problem: str, nodes: Sequence[str], address: str, at: float) -> NetworkFindings:
    return NetworkFindings(
        at=at,
        seconds=time.time() - at,
        address=address,
        num_nodes=len(nodes),
        num_pairs=0,
        silent=tuple(nodes),
        problem=problem,
    )


@dataclass
class _ProbeSession:
    """The conversation with the nodes' sides of one probe."""

    nodes: Sequence[str]
    address: str
    step_argv: StepArgvFunction
    deadline: float
    measures: bool = False
    mark: str = ""
    answers: dict[int, NodeLinkReport] = field(default_factory=dict)
    places: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Where the nodes listen that do."""
    _done: set[int] = field(default_factory=set)
    _numbers: dict[str, int] = field(init=False)
    _step: Any = None
    _line: ControlChannel | None = None

    def __post_init__(self) -> None:
        self._numbers = {name: number for number, name in enumerate(self.nodes)}

    @property
    def has_ended(self) -> bool:
        return self._step is None or self._step.poll() is not None

    def start_and_wait(self, nodes: Sequence[str], seconds: float) -> None:
        """Start the step; wait until each of these nodes says where it listens, or why it does not."""
        self.answers, self.places, self._done = {}, {}, set()
        self.mark = secrets.token_hex(8)
        command = [
            sys.executable,
            "-m",
            "ddp_hpc.cluster.rendezvous.links.probe",
            f"--toward={self.address}",
            f"--mark={self.mark}",
        ]
        self._step = subprocesses.start_command([*self.step_argv(nodes), *command], [], on_line=True)
        stdin, stdout = self._step.stdin, self._step.stdout
        self._line = ControlChannel(stdout.fileno(), stdin.fileno(), wakes=False)
        self._read_until(lambda: len(self.answers) == len(nodes), seconds)

    def run_probes(self) -> None:
        """Order the nodes to probe each other, and read what they report."""
        rows = [[node, *self.places.get(number, ("", 0))] for number, node in enumerate(self.nodes)]
        self._send_order(do="go", token=secrets.token_hex(16), nodes=rows, measures=self.measures)
        whole = set(self.places)
        self._read_until(
            lambda: self._done >= whole,
            len(rounds_of(len(self.nodes))) * ROUND_S + PARTNER_TIMEOUT_S + REPORT_TIMEOUT_S,
        )
        self._send_order(do="finish")
        self._read_until(lambda: all(self.answers[number].is_whole for number in whole), REPORT_TIMEOUT_S)

    def close(self) -> None:
        if self._step is None:
            return
        for pipe in (self._step.stdin, self._step.stdout):
            pipe.close()
        for end in (lambda _: None, processes.terminate, processes.kill):
            end([self._step.pid])
            until = time.monotonic() + _END_TIMEOUT_S
            while not self.has_ended and time.monotonic() < until:
                time.sleep(_POLL_INTERVAL_S)
        self._step = self._line = None

    def _send_order(self, **order: Any) -> None:
        assert self._line is not None  # noqa: S101  `gather` comes first
        self._line.send(mark=self.mark, **order)

    def _read_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        assert self._line is not None  # noqa: S101  `gather` comes first
        until = min(time.monotonic() + seconds, self.deadline - REPORT_TIMEOUT_S)
        while True:
            has_ended = self.has_ended  # asked first, so that the last reports are not missed
            for message in self._line.read():
                if message.get("mark") == self.mark:
                    self._take_message(message)
            # A stop signal stays pending here, for the supervisor: so this sleeps instead of waiting for signals.
            if is_over() or has_ended or time.monotonic() >= until or processes.is_stop_pending():
                return
            time.sleep(_POLL_INTERVAL_S)

    def _take_message(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"ready": str(name), "error": str(), "has_address": bool(has_address)} if name in self._numbers:
                self.answers[self._numbers[name]] = NodeLinkReport(is_whole=not has_address)
            case {"ready": str(name), "address": str(address), "port": int(port), "network": str(network)} if (
                name in self._numbers
            ):
                number = self._numbers[name]
                self.places[number] = (address, port)
                self.answers[number] = NodeLinkReport(address=address, network=network)
            case {"tcp": str(found), "at": int(number), "to": int(partner)} if number in self.answers:
                self.answers[number].tcp[partner] = found
            case {
                "heard": [int(small), int(large)],
                "missed": int(missed),
                "at": int(number),
                "sender": int(sender),
            } if number in self.answers:
                self.answers[number].heard[sender] = (small, large)
                self.answers[number].missed[sender] = missed
            case {"pace": [rate, ahead, trip], "at": int(number), "to": int(partner)} if number in self.answers:
                self.answers[number].paces[partner] = (float(rate), float(ahead), float(trip))
            case {"done": int(number)}:
                self._done.add(number)
            case {"end": int(number), "dropped": int(num_dropped)} if number in self.answers:
                self.answers[number].num_dropped, self.answers[number].is_whole = num_dropped, True
