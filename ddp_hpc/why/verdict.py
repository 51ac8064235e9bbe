"""The verdict on one attempt: which rank failed first, and why, from records and clean lines. Pure.

Fields of records count before texts. A text counts where no field says more, and only with the role that the registry gives it. Where
nothing is proved, the verdict says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Literal

from ddp_hpc.base.processes import signal_number, signal_of
from ddp_hpc.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run_dir.fingerprint import entity, fingerprint
from ddp_hpc.run_dir.joining import MissingRanks
from ddp_hpc.run_dir.ledger import Attempt, Cause, Ending
from ddp_hpc.run_dir.network import NetworkFindings
from ddp_hpc.run_dir.rank_ends import RankEnd
from ddp_hpc.why.ends import signalled
from ddp_hpc.why.exceptions import Raised, tracebacks, uncaught
from ddp_hpc.why.lines import Line
from ddp_hpc.why.signatures import Match, Role, match_exception, match_line
from ddp_hpc.why.slurm_lines import node_of, of_step

Basis = Literal["record", "log", "none"]
"""What the verdict rests on: a field of a record, a text in a log, or nothing."""

_BY_CAUSE: Mapping[Cause, str] = {
    Cause.PREEMPTED: "preempted",
    Cause.TIME_LIMIT: "time-limit",
    Cause.NODE_FAILED: "node-failed",
    Cause.CANCELLED: "cancelled",
    Cause.SUSPENDED: "suspended",
    Cause.DIVERGED: "nan",
}
_NO_FAILURE = {Cause.FINISHED, Cause.STOP_ASKED, Cause.REQUEUE_ASKED, Cause.SCRIPT_ASKED, Cause.FENCED}
_KILL = signal_number("KILL")
_CRASHES = frozenset(map(signal_number, ("SEGV", "ABRT", "BUS", "ILL", "FPE", "SYS", "TRAP")))
_OF_SHELL = 128
_CANNOT_START = {126, 127}
_NEAR_END = 60
"""Lines at the end of a log in which a text may be the reason of an end."""
_AT_END = 3
"""Lines at the very end, where a message of a shell or of a runtime is the reason: programs go on after others."""
_OF_STARTS = {"image", "import", "launch-failed"}
"""Classes of a command that could not start, so no signal ended it."""
_NO_MEMORY = Match("host-memory", "confirmation")
_ANY_NUMBER = re.compile(r"(?:line |:)\d+")
_MOST_EVIDENCE = 5
_EXIT_S = 0.2
"""From a process's report to its exit, at least: it has connections and threads to end."""
_HANGS: Mapping[str, str] = {"behind": "hang-behind", "different": "hang-mismatch", "network": "hang-nobody"}
"""What the ranks' collectives show (`WorkerFailure.hang_kind`) -> class."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A line that the verdict rests on."""

    role: Role
    rank: int | None
    """None for the log of the job."""
    text: str
    line: Line | None = None
    """Where it stands; None for a record."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of one attempt."""

    attempt: Attempt
    failures: Sequence[WorkerFailure] = ()
    logs: Mapping[int, Sequence[Line]] = field(default_factory=dict)
    """The end of each rank's log."""
    console: Sequence[Line] = ()
    """What the job's log says of this attempt."""
    places: Mapping[int, str] = field(default_factory=dict)
    """Where each rank was when the attempt hung: `file:line in function`."""
    missing: MissingRanks | None = None
    """Which ranks the others waited for at the beginning; None where nobody waited for long, or all have joined."""
    network: NetworkFindings | None = None
    """What a probe of the network between the nodes found at the end; None without one."""
    ends: Mapping[int, RankEnd] = field(default_factory=dict)
    """How the process of a rank ended that nobody had asked to end."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why an attempt ended."""

    failure: str
    """A name of the registry; empty where nothing failed."""
    basis: Basis = "none"
    rank: int | None = None
    """That failed first, where one is known."""
    host: str = ""
    step: int | None = None
    detail: str = ""
    """The exception, the signal or the exit code."""
    place: str = ""
    """The line of the user's code that raised it."""
    entity: str = ""
    """The sample or the file that it concerns."""
    fingerprint: str = ""
    evidence: Sequence[Evidence] = ()
    num_cascades: int = 0
    """Other ranks that lost their connection to another one."""
    num_alike: int = 0
    """Other ranks that failed in the same way."""


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What is known of the end of one rank."""

    failure: str
    role: Role
    basis: Basis
    rank: int | None
    host: str = ""
    at: float = float("inf")
    step: int | None = None
    detail: str = ""
    place: str = ""
    evidence: tuple[Evidence, ...] = ()
    has_report: bool = False
    """Whether the rank left an error report."""
    is_traceback: bool = False
    """Whether it rests on a traceback in a log."""
    is_of_silent: bool = False
    """Whether it rests on a traceback in the log of a rank that left no report."""

    @property
    def order(self) -> tuple[int, float, int]:
        """The root comes first: by role, then by time."""
        strength = {"root": 0, "either": 1, "confirmation": 2, "cascade": 3}[self.role]
        return strength, self.at, -1 if self.rank is None else self.rank


def verdict_of(facts: Facts) -> Verdict:
    """Return why an attempt ended."""
    attempt = facts.attempt
    if attempt.cause in _NO_FAILURE or attempt.ending in {Ending.FINISHED, Ending.STOPPED, Ending.FENCED}:
        return Verdict(failure="", basis="record")
    findings = sorted(_findings(facts), key=lambda one: one.order)
    if attempt.ending is None and not facts.failures:
        return _of_unended(findings)
    recorded = _of_record(facts)
    if recorded is not None and not (attempt.cause == Cause.DIVERGED and any(one.failure == "nan" for one in findings)):
        return _with_others(recorded, findings, facts)
    if attempt.cause == Cause.HANG:
        hang = _hang(facts)
        earlier = next(
            (one for one in findings if one.role == "root" and one.failure not in {"killed", "unknown"}), None
        )
        return _with_others(earlier or hang, findings, facts)
    first = next(iter(findings), None)
    if _is_network_to_blame(facts, findings):
        return _with_others(_of_network(facts), findings, facts)
    reported = [one for one in findings if one.has_report]
    if reported and all(one.role == "cascade" for one in reported) and (first is None or first.is_of_silent):
        first = reported[0]
    if first is not None and first.role == "cascade":
        silent = _of_silent_rank(facts, findings)
        memory = _of_lost_memory(facts) if silent is None or silent.failure == "unknown" else None
        first = memory or silent or replace(first, rank=None, host="", step=None, at=float("inf"))
        if first.failure == "peer-gone" and len(facts.logs) == 1:  # no other rank was there
            first = replace(first, failure="unknown", role="either", basis="none")
    if first is None and attempt.cause == Cause.SUPERVISOR_DIED:
        first = _Finding(failure="supervisor-died", role="root", basis="record", rank=None, host=attempt.host)
    first = first or _Finding(failure="unknown", role="either", basis="none", rank=None)
    return _with_others(first, findings, facts)


def _of_unended(findings: Sequence[_Finding]) -> Verdict:
    """Return the verdict on an attempt that may run: texts of its logs are shown, and prove nothing."""
    shown = [replace(line, role="either") for one in findings for line in one.evidence]
    return Verdict(failure="unknown", evidence=shown[:_MOST_EVIDENCE])


def _of_record(facts: Facts) -> _Finding | None:
    """Return what the ledger alone proves."""
    cause = facts.attempt.cause
    name = (
        _BY_CAUSE.get(cause) if cause is not None else "cancelled" if facts.attempt.ending == Ending.CANCELLED else None
    )
    if name is None:
        return None
    evidence = tuple(
        Evidence(role="confirmation", rank=None, text=line.text, line=line)
        for line in facts.console
        if match_line(line.text) == Match(name, "confirmation")
    )
    hosts = ", ".join(facts.attempt.failed_nodes)
    return _Finding(failure=name, role="root", basis="record", rank=None, host=hosts, evidence=evidence[:1])


def _findings(facts: Facts) -> list[_Finding]:
    reported = [
        _abstaining(replace(_of_report(facts, failure), has_report=True))
        for failure in facts.failures
        if not failure.is_hang
    ]
    ranks = {failure.rank for failure in facts.failures}
    silent = (_of_log(facts, rank) for rank in facts.logs if rank not in ranks)
    of_job = _of_console(facts)
    weaker = (_weaker(one) for one in silent if one is not None)
    return [*reported, *_of_signalled(facts, ranks), *weaker, *([of_job] if of_job is not None else [])]


def _of_signalled(facts: Facts, reported: AbstractSet[int]) -> list[_Finding]:
    """Return the ranks without a report that a signal ended by the job's log, if no other rank is without a report."""
    ended = signalled(facts.console, facts.attempt.nodes, len(facts.logs))
    silent = set(facts.logs) - reported
    found = []
    for one in ended:
        if one.rank not in silent or silent - {other.rank for other in ended}:
            continue  # a rank that left nothing at all may have been the first
        finding = _Finding(failure="unknown", role="root", basis="record", rank=one.rank, host=one.host)
        finding = replace(_by_signal(facts, finding, one.signal), basis="log", has_report=True)
        line = Evidence(role="root", rank=None, text=one.line.text.strip(), line=one.line)
        found.append(replace(finding, evidence=(line, *finding.evidence)))
    return found


def _weaker(finding: _Finding) -> _Finding:
    """Return what a log says of a rank that left no report: it may have gone on after that text, so it is not a root."""
    role: Role = "either" if finding.role == "root" else finding.role
    evidence = tuple(replace(one, role=role) for one in finding.evidence)
    return _abstaining(replace(finding, role=role, evidence=evidence, is_of_silent=finding.is_traceback))


def _abstaining(finding: _Finding) -> _Finding:
    """Return the finding; nothing proves the class `unknown`."""
    return replace(finding, basis="none") if finding.failure == "unknown" else finding


def _of_report(facts: Facts, failure: WorkerFailure) -> _Finding:
    """Return what a rank's error report, and its log, say of its end."""
    finding = _Finding(
        failure="unknown",
        role="root",
        basis="record",
        rank=failure.rank if failure.rank >= 0 else None,
        host=failure.host,
        at=failure.at,
        step=None if failure.of_script or not failure.step else failure.step,
        detail=_said(failure.exception),
    )
    if failure.is_diverged:
        return _with_line(replace(finding, failure="nan"), facts)
    if failure.signal is not None:
        return _by_memory(finding) if failure.memory_ran_out else _by_signal(facts, finding, failure.signal)
    if failure.exit_code is not None:
        return _by_exit_code(facts, finding, failure.exit_code)
    all_raised = tracebacks(failure.traceback.splitlines())
    raised = next(reversed(all_raised), None)
    text = _typed(failure)
    found = match_exception(text) or (match_exception(raised.text) if raised else None)
    found = _of_earlier(found, all_raised)
    if raised is not None and (found is None or found.name == "data"):
        found = _of_cause(raised) or found
    if found is None:
        found = Match(_unmatched(failure), "root")
    finding = _with_line(replace(finding, failure=found.name, role=found.role, place=_place(raised)), facts)
    return _of_killed_child(facts, finding)


def _said(exception: str) -> str:
    """Return an exception's first line; of one that a DataLoader's process has passed on, the original's, which is the last."""
    lines = [line for line in exception.splitlines() if line.strip()] or [""]
    return lines[-1] if _PASSED_ON.search(lines[0]) else lines[0]


def _of_earlier(found: Match | None, all_raised: Sequence[Raised]) -> Match | None:
    """Return the class of the exception before, where the last one only says that a process is gone."""
    if found is None or found.name != "unknown" or len(all_raised) < 2 or not all_raised[-2].is_linked:
        return found
    return match_exception(all_raised[-2].text) or found


def _of_killed_child(facts: Facts, finding: _Finding) -> _Finding:
    """Return host-memory where SIGKILL ended a process of the rank's own, and a message says that memory ran out."""
    if finding.failure != "killed":
        return finding
    own = [] if finding.rank is None else _matches(facts.logs.get(finding.rank, ())[-_NEAR_END:])
    killed = _killed(finding, own, _matches(of_step(facts.console, facts.attempt.job_id, finding.host)))
    return replace(killed, evidence=tuple(dict.fromkeys((*finding.evidence, *killed.evidence))))


def _typed(failure: WorkerFailure) -> str:
    """Return `Type: message`, as Python prints it."""
    name = failure.exception_type
    has_type = not name or failure.exception.startswith(name)
    return failure.exception if has_type else f"{name}: {failure.exception}"


def _unmatched(failure: WorkerFailure) -> str:
    """Return the class of an exception that the registry does not know, by the report's fields."""
    if failure.is_input_error:
        return "configuration"
    if failure.is_hardware:  # the device, its driver, NCCL's network, or a call that was wrong: it does not say which
        return "unknown"
    if failure.rank < 0:
        return "launch-failed"
    if failure.exception_type == "SystemExit":
        return "exit-code"
    if failure.is_secondary and failure.exception_type in _OF_TORCH:
        return "unknown"
    return "user-exception" if failure.exception_type or failure.traceback else "unknown"


_PASSED_ON = re.compile(r"Caught \w+ in (?:DataLoader worker process|pin memory thread|replica) ")
"""`torch._utils.ExceptionWrapper.reraise`: the text of the original, with its traceback, follows in the next lines."""
_OF_TORCH = {"RuntimeError", "DistNetworkError", "DistBackendError", "DistStoreError", "DistError"}
"""Types by which PyTorch reports a lost connection, among other errors."""


def _of_cause(raised: Raised) -> Match | None:
    """Return the class of the exception that a loader met: a stale mount is one also where it meets a sample."""
    found = match_exception(raised.text)
    if found is not None and found.name not in {"data", "user-exception"}:
        return found
    return Match("data", "root") if raised.is_in_data else found


def _place(raised: Raised | None) -> str:
    frame = raised.users_frame if raised else None
    return f"{frame.file}:{frame.line} in {frame.function}" if frame else ""


def _by_memory(finding: _Finding) -> _Finding:
    """Return the class of a rank that SIGKILL ended while the kernel counted a process that it killed for memory."""
    detail = "killed by SIGKILL, and the kernel has killed a process of its cgroup because memory ran out"
    evidence = Evidence(role="confirmation", rank=finding.rank, text=detail)
    return replace(finding, failure="host-memory", detail=detail, evidence=(evidence,))


def _by_signal(facts: Facts, finding: _Finding, number: int) -> _Finding:
    """Return the class of a rank that a signal ended; its log may say more."""
    own = [] if finding.rank is None else _matches(facts.logs.get(finding.rank, ())[-_NEAR_END:])
    finding = replace(finding, detail=f"killed by {_name_of(number)}")
    if number == _KILL:
        return _killed(finding, own, _matches(of_step(facts.console, facts.attempt.job_id, finding.host)))
    if number not in _CRASHES:
        return replace(finding, failure="signal")
    reasons = [pair for pair in own if pair[1].role != "confirmation" and pair[1].name not in _OF_STARTS]
    more = [pair for pair in reasons if pair[1].name != "native-crash"]
    strength = {"root": 0, "either": 1}
    said = min(more or reasons, key=lambda pair: (strength.get(pair[1].role, 2), pair[0].offset), default=None)
    if said is None:
        return replace(finding, failure="native-crash")
    line, match = said
    evidence = Evidence(role=match.role if more else "confirmation", rank=finding.rank, text=line.text, line=line)
    if not more:
        return replace(finding, failure="native-crash", evidence=(evidence,))
    return replace(finding, failure=match.name, role=match.role, basis="log", evidence=(evidence,))


def _name_of(number: int) -> str:
    """Return a signal's name; empty where there is no such signal."""
    try:
        return signal_of(number).name
    except ValueError:
        return ""


def _killed(finding: _Finding, own: Sequence[tuple[Line, Match]], of_job: Sequence[tuple[Line, Match]]) -> _Finding:
    """Return the class of a rank that SIGKILL ended: only a message of Slurm or of the kernel proves that memory ran out."""
    proofs = [(line, finding.rank) for line, match in own if match == _NO_MEMORY]
    proofs += [(line, None) for line, match in of_job if match == _NO_MEMORY]
    if not proofs:
        return replace(finding, failure="killed")
    line, rank = proofs[0]
    evidence = Evidence(role="confirmation", rank=rank, text=line.text, line=line)
    return replace(finding, failure="host-memory", basis="log", evidence=(evidence,))


def _by_exit_code(facts: Facts, finding: _Finding, code: int) -> _Finding:
    """Return the class of a script that exited with a code; Python's own is 1 for an exception that nothing caught."""
    if code > _OF_SHELL and _name_of(code - _OF_SHELL):
        return _by_signal(facts, finding, code - _OF_SHELL)
    finding = replace(finding, detail=f"exit code {code}")
    found = _of_log(facts, finding.rank) if finding.rank is not None and code in {1, *_CANNOT_START} else None
    if found is not None:
        return replace(found, at=finding.at, host=finding.host)
    return _with_line(replace(finding, failure="launch-failed" if code in _CANNOT_START else "exit-code"), facts)


def _of_log(facts: Facts, rank: int) -> _Finding | None:
    """Return what only the log of a rank says: the exception that ended it, or a known text near its end."""
    lines = facts.logs.get(rank, ())
    texts = [line.text for line in lines]
    raised = uncaught(texts)
    if raised is not None:
        found = _of_earlier(_of_cause(raised), tracebacks(texts)) or Match("user-exception", "root")
        evidence = Evidence(role=found.role, rank=rank, text=raised.first_line, line=lines[raised.at])
        finding = _Finding(
            failure=found.name,
            role=found.role,
            basis="log",
            rank=rank,
            detail=raised.first_line,
            place=_place(raised),
            evidence=(evidence,),
            is_traceback=True,
        )
        return _of_killed_child(facts, finding)
    last = [line.offset for line in lines[-_AT_END:]][:1]
    matches = [
        (line, match)
        for line, match in _matches(lines[-_NEAR_END:])
        if match.role == "either" or (match.role == "root" and line.offset >= last[0])
    ]
    first = min(matches, key=lambda pair: (pair[1].role != "root", pair[0].offset), default=None)
    if first is None:
        return None
    line, match = first
    evidence = Evidence(role=match.role, rank=rank, text=line.text, line=line)
    return _Finding(failure=match.name, role=match.role, basis="log", rank=rank, detail=line.text, evidence=(evidence,))


def _matches(lines: Iterable[Line]) -> list[tuple[Line, Match]]:
    """Return the lines that the registry knows."""
    found = ((line, match_line(line.text)) for line in lines)
    return [(line, match) for line, match in found if match is not None]


def _of_console(facts: Facts) -> _Finding | None:
    """Return why the workers could not be started, by what Slurm and the container runtime printed."""
    if any(line.text for lines in facts.logs.values() for line in lines):
        return None  # a rank has started: such a line is of a setup that went on
    for line in facts.console:
        found = match_line(line.text)
        if found is not None and found.role == "root" and found.name in {"image", "launch-failed"}:
            evidence = Evidence(role="either", rank=None, text=line.text, line=line)
            return _Finding(
                failure=found.name, role="either", basis="log", rank=None, detail=line.text, evidence=(evidence,)
            )
    return None


def _of_silent_rank(facts: Facts, findings: Iterable[_Finding]) -> _Finding | None:
    """Return the one rank that left no report while all others lost a connection."""
    silent = sorted(set(facts.logs) - {one.rank for one in findings if one.has_report})
    if len(silent) != 1:
        return None
    if ended := _of_end(facts, silent[0]):
        return ended
    said = next((one for one in findings if one.rank == silent[0]), None)
    return _Finding(
        failure="unknown",
        role="either",
        basis="none",
        rank=silent[0],
        detail=f"rank {silent[0]} ended without an error report",
        evidence=said.evidence if said else (),
    )


def _is_network_to_blame(facts: Facts, findings: Sequence[_Finding]) -> bool:
    """Tell whether a probe proves that nodes do not reach each other, and all that ranks report are lost connections."""
    if facts.network is None or not facts.network.is_faulty:
        return False
    return all(one.role == "cascade" or one.failure in _OF_CONNECTIONS for one in findings)


_OF_CONNECTIONS = {"unknown", "collective-timeout", "ranks-missing"}
"""Classes that say no more than that a rank did not hear of another one."""


def _of_network(facts: Facts) -> _Finding:
    """Return what the probe of the network proves."""
    assert facts.network is not None  # noqa: S101  the callers looked
    words, nodes = facts.network.words, facts.network.culprits
    evidence = (Evidence(role="root", rank=None, text=f"probe of the network: {words}"),)
    return _Finding(
        failure="hang-network", role="root", basis="record", rank=None, host=nodes, detail=words, evidence=evidence
    )


def _of_lost_memory(facts: Facts) -> _Finding | None:
    """Return that memory ran out in the ranks' step, where the ranks that are left only lost their connections."""
    lines = _matches(of_step(facts.console, facts.attempt.job_id, ""))
    line = next((line for line, match in lines if match == _NO_MEMORY), None)
    if line is None:
        return None
    evidence = Evidence(role="confirmation", rank=None, text=line.text, line=line)
    host = node_of(line)
    return _Finding(
        failure="host-memory",
        role="either",
        basis="log",
        rank=None,
        host=host,
        detail=line.text,
        evidence=(evidence,),
    )


def _of_end(facts: Facts, rank: int) -> _Finding | None:
    """Return the end of the one rank without a report; of one that a signal ended, if no launcher can have sent it."""
    end = facts.ends.get(rank)
    if end is None or not end.code:
        return None
    # A launcher ends the others after a task has exited, which takes longer than that from its report on.
    noticed = min((one.at for one in facts.failures), default=float("inf")) + _EXIT_S
    if (end.code < 0 or end.code > _OF_SHELL) and end.at > noticed:
        return None
    finding = _Finding(failure="unknown", role="root", basis="record", rank=rank, at=end.at)
    finding = _by_signal(facts, finding, -end.code) if end.code < 0 else _with_line(_of_code(finding, end.code), facts)
    return replace(finding, at=end.at)


def _of_code(finding: _Finding, code: int) -> _Finding:
    return replace(finding, failure="exit-code", detail=f"exit code {code}")


def _of_missing(finding: _Finding, facts: Facts) -> _Finding:
    """Name the ranks that never joined, instead of one that waited for them."""
    if facts.missing is None or not facts.missing.ranks:
        return finding
    nodes = {rank: facts.missing.node_of(rank, facts.attempt.nodes) for rank in facts.missing.ranks}
    named = ", ".join(f"rank {rank}{f' on {node}' if node else ''}" for rank, node in list(nodes.items())[:8])
    more = f", and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    words = f"{named}{more} did not join"
    evidence = (Evidence(role="root", rank=None, text=f"record of rank zero: {words}"), *finding.evidence)
    first = facts.missing.ranks[0]
    return replace(
        finding, rank=first, host=nodes[first], basis="record", detail=f"{words}; {finding.detail}", evidence=evidence
    )


def _hang(facts: Facts) -> _Finding:
    failure = next((one for one in facts.failures if one.is_hang), None)
    is_found = failure is not None and (failure.rank in facts.places or failure.hang_kind in {"behind", "different"})
    if facts.network is not None and facts.network.is_faulty and not is_found:
        return _of_network(facts)
    if failure is None:
        return _Finding(failure="hang", role="either", basis="record", rank=None)
    finding = _Finding(failure="hang", role="either", basis="record", rank=None, at=failure.at)
    if failure.hang_kind not in _HANGS:
        return _by_stacks(finding, failure, facts)
    rank = failure.rank if failure.rank >= 0 else None
    name = _HANGS[failure.hang_kind]
    return replace(finding, failure=name, rank=rank, host=failure.host, detail=failure.hang_detail)


def _by_stacks(finding: _Finding, failure: WorkerFailure, facts: Facts) -> _Finding:
    """Return what a hang was, as far as the places show it at which the ranks were."""
    if failure.rank >= 0 and facts.places:
        place = facts.places.get(failure.rank, "")
        name = "hang-behind" if len(facts.places) > 1 or len(facts.logs) > 1 else "hang"
        return replace(
            finding, failure=name, rank=failure.rank, host=failure.host, detail=place and f"it was in {place}"
        )
    if failure.rank >= 0 and len(facts.logs) > 1:
        return replace(finding, failure="hang-behind", rank=failure.rank, host=failure.host)
    if len(facts.places) < 2:
        return finding
    calls = {_ANY_NUMBER.sub("", place) for place in facts.places.values()}
    detail = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(facts.places.items())[:4])
    return replace(finding, failure="hang-nobody" if len(calls) == 1 else "hang-mismatch", detail=detail)


def _with_line(finding: _Finding, facts: Facts) -> _Finding:
    """Add the line of the rank's log that holds its error, or the record's own text."""
    if finding.rank is None:
        return replace(finding, evidence=(Evidence(role=finding.role, rank=None, text=finding.detail),))
    lines = facts.logs.get(finding.rank, ())
    place = next((line for line in reversed(lines) if finding.detail and finding.detail[:200] in line.text), None)
    text = place.text if place else finding.detail
    return replace(finding, evidence=(Evidence(role=finding.role, rank=finding.rank, text=text, line=place),))


def _with_others(first: _Finding, findings: Sequence[_Finding], facts: Facts) -> Verdict:
    """Return the verdict: the first failure, and what followed on other ranks."""
    first = _of_missing(first, facts) if first.failure == "ranks-missing" else first
    others = [one for one in findings if one.rank is not None and one.rank != first.rank]
    cascades = [one for one in others if one.role == "cascade"]
    alike = [one for one in others if one.failure == first.failure and one.role != "cascade"]
    evidence = [*first.evidence, *(line for one in cascades[:1] for line in one.evidence)]
    hosts = (*facts.attempt.nodes, facts.attempt.host, *(failure.host for failure in facts.failures))
    where = _ANY_NUMBER.sub("", first.place.rpartition("/")[2])
    concerns = entity(first.detail) if first.failure in _OF_ENTITIES else ""
    unique = list(dict.fromkeys(evidence))[:_MOST_EVIDENCE]
    return Verdict(
        failure=first.failure,
        basis=first.basis,
        rank=first.rank,
        host=first.host,
        step=first.step,
        detail=first.detail,
        place=first.place,
        entity=concerns,
        fingerprint=fingerprint(first.failure, first.detail, where, hosts=hosts),
        evidence=unique,
        num_cascades=len({one.rank for one in cascades}),
        num_alike=len({one.rank for one in alike}),
    )


_OF_ENTITIES = {"data", "disk-full", "quota", "stale-mount", "user-exception"}
