"""What the error report, the log and the end of one rank say of its end. Pure.

Fields of records count before texts: a text counts where no field says more, and only with the role that the registry gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddp_hpc.base.exit_codes import signal_name, signal_of
from ddp_hpc.base.processes import signal_number
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.watch.why.exceptions import Raised, tracebacks, uncaught
from ddp_hpc.watch.why.findings import AttemptFacts, EvidenceLine, Verdict
from ddp_hpc.watch.why.lines import LogLine
from ddp_hpc.watch.why.signatures import Match, match_exception, match_line
from ddp_hpc.watch.why.slurm_lines import of_step

_KILL = signal_number("KILL")
_CRASHES = frozenset(map(signal_number, ("SEGV", "ABRT", "BUS", "ILL", "FPE", "SYS", "TRAP")))
_CANNOT_START = {126, 127}
_NEAR_END = 60
"""Lines at the end of a log in which a text may be the reason of an end."""
_AT_END = 3
"""Lines at the very end, where a message of a shell or of a runtime is the reason: programs go on after others."""
_OF_STARTS = {"arguments", "image", "import", "launch-failed"}
"""Classes of a command that could not start, so no signal ended it."""
NO_MEMORY = Match("host-memory", "confirmation")
_EXIT_S = 0.2
"""From a process's report to its exit, at least: it has connections and threads to end."""


def of_report(facts: AttemptFacts, failure: WorkerFailure) -> Verdict:
    """Return what a rank's error report, and its log, say of its end."""
    lines = [line for line in failure.exception.splitlines() if line.strip()] or [""]
    finding = Verdict(
        failure="unknown",
        rank=failure.rank if failure.rank >= 0 else None,
        host=failure.host,
        at=failure.at,
        step=None if failure.of_script or not failure.step else failure.step,
        # Of an exception that a DataLoader's process has passed on, the last line is the original's.
        detail=lines[-1] if _PASSED_ON.search(lines[0]) else lines[0],
    )
    if failure.is_diverged:
        return with_line(replace(finding, failure="nan"), facts)
    if failure.signal is not None and failure.memory_ran_out:
        return _by_memory(finding, failure.memory_ran_out)
    if failure.signal is not None:
        return by_signal(facts, finding, failure.signal)
    if failure.exit_code is not None:
        return _by_exit_code(facts, finding, failure.exit_code)
    all_raised = tracebacks(failure.traceback.splitlines())
    raised = next(reversed(all_raised), None)
    name, text = failure.exception_type, failure.exception
    typed = text if not name or text.startswith(name) else f"{name}: {text}"  # as Python prints it
    found = match_exception(typed) or (match_exception(raised.text) if raised else None)
    found = _of_earlier(found, all_raised)
    if raised is not None and (found is None or found.name == "data"):
        found = _of_cause(raised) or found
    if found is None:
        found = Match(_unmatched(failure), "root")
    finding = with_line(replace(finding, failure=found.name, role=found.role, place=_place(raised)), facts)
    if of_save := _OF_SAVE.search(failure.exception):
        finding = replace(finding, rank=int(of_save["rank"]), host=of_save["host"])
    return _of_killed_child(facts, finding)


_OF_SAVE = re.compile(r"could not be committed: rank (?P<rank>\d+) on (?P<host>[\w.-]+): ")
"""All ranks report that a checkpoint could not be committed; one of them could not write its part."""


def _of_earlier(found: Match | None, all_raised: Sequence[Raised]) -> Match | None:
    """Return the class of the exception before, where the last one only says that a process is gone, or is ours and unknown."""
    if len(all_raised) < 2 or not all_raised[-2].is_linked:
        return found
    if found.name != "unknown" if found else not all_raised[-1].text.startswith("ddp_hpc."):
        return found
    return match_exception(all_raised[-2].text) or found


def _of_killed_child(facts: AttemptFacts, finding: Verdict) -> Verdict:
    """Return host-memory where SIGKILL ended a process of the rank's own, and a message says that memory ran out."""
    if finding.failure != "killed":
        return finding
    killed = _killed(facts, finding)
    return replace(killed, evidence=tuple(dict.fromkeys((*finding.evidence, *killed.evidence))))


def _unmatched(failure: WorkerFailure) -> str:
    """Return the class of an exception that the registry does not know, by the report's fields."""
    if failure.is_input_error:
        return "configuration"
    if failure.is_hardware or failure.exception_type == "DistBackendError":
        # The device, its driver, NCCL's network, or a call that was wrong: it does not say which.
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
    return f"{frame.filename}:{frame.lineno}{f' in {frame.name}' if frame.name else ''}" if frame else ""


def _by_memory(finding: Verdict, whose: str | bool) -> Verdict:
    """Return the class of a rank that SIGKILL ended while the kernel counted a process that it killed for memory."""
    ran_out = (
        f"the memory {whose} ran out" if isinstance(whose, str) else "memory ran out, there or on the whole machine"
    )
    detail = f"killed by SIGKILL, and the kernel has killed a process of its cgroup because {ran_out}"
    evidence = EvidenceLine("confirmation", finding.rank, detail)
    return replace(finding, failure="host-memory", detail=detail, evidence=(evidence,))


def by_signal(facts: AttemptFacts, finding: Verdict, number: int) -> Verdict:
    """Return the class of a rank that a signal ended; its log may say more."""
    finding = replace(finding, detail=f"killed by {signal_name(number)}")
    if number == _KILL:
        return _killed(facts, finding)
    if number not in _CRASHES:
        return replace(finding, failure="signal")
    reasons = [
        pair for pair in _at_end(facts, finding) if pair[1].role != "confirmation" and pair[1].name not in _OF_STARTS
    ]
    more = [pair for pair in reasons if pair[1].name != "native-crash"]
    strength = {"root": 0, "either": 1}
    said = min(more or reasons, key=lambda pair: (strength.get(pair[1].role, 2), pair[0].offset), default=None)
    if said is None:
        return replace(finding, failure="native-crash")
    line, match = said
    evidence = EvidenceLine(match.role if more else "confirmation", finding.rank, line.text, line)
    if not more:
        return replace(finding, failure="native-crash", evidence=(evidence,))
    return replace(finding, failure=match.name, role=match.role, basis="log", evidence=(evidence,))


def _at_end(facts: AttemptFacts, finding: Verdict) -> list[tuple[LogLine, Match]]:
    return [] if finding.rank is None else matches_in(facts.logs.get(finding.rank, ())[-_NEAR_END:])


def _killed(facts: AttemptFacts, finding: Verdict) -> Verdict:
    """Return the class of a rank that SIGKILL ended: only a message of Slurm or of the kernel proves that memory ran out."""
    of_job = matches_in(of_step(facts.console, facts.attempt.job_id, finding.host))
    proofs = [(line, finding.rank) for line, match in _at_end(facts, finding) if match == NO_MEMORY]
    proofs += [(line, None) for line, match in of_job if match == NO_MEMORY]
    if not proofs:
        return replace(finding, failure="killed")
    line, rank = proofs[0]
    evidence = EvidenceLine("confirmation", rank, line.text, line)
    return replace(finding, failure="host-memory", basis="log", evidence=(evidence,))


def _by_exit_code(facts: AttemptFacts, finding: Verdict, code: int) -> Verdict:
    """Return the class of a script that exited with a code; Python's own is 1 for an exception that nothing caught, argparse's is 2."""
    if number := signal_of(code):
        return by_signal(facts, finding, number)
    found = of_log(facts, finding.rank) if finding.rank is not None and code in {1, 2, *_CANNOT_START} else None
    if found is not None:
        return replace(found, at=finding.at, host=finding.host)
    return with_line(replace(finding, failure="launch-failed" if code in _CANNOT_START else "exit-code"), facts)


def of_log(facts: AttemptFacts, rank: int) -> Verdict | None:
    """Return what only the log of a rank says: the exception that ended it, or a known text near its end."""
    lines = facts.logs.get(rank, ())
    texts = [line.text for line in lines]
    raised = uncaught(texts)
    if raised is not None:
        found = _of_earlier(_of_cause(raised), tracebacks(texts)) or Match("user-exception", "root")
        evidence = EvidenceLine(found.role, rank, raised.first_line, lines[raised.at])
        finding = Verdict(
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
        for line, match in matches_in(lines[-_NEAR_END:])
        if match.role == "either" or (match.role == "root" and line.offset >= last[0])
    ]
    first = min(matches, key=lambda pair: (pair[1].role != "root", pair[0].offset), default=None)
    if first is None:
        return None
    line, match = first
    text = line.text.strip()
    evidence = EvidenceLine(match.role, rank, text, line)
    return Verdict(failure=match.name, role=match.role, basis="log", rank=rank, detail=text, evidence=(evidence,))


def of_end(facts: AttemptFacts, rank: int) -> Verdict | None:
    """Return the end of the one rank without a report; of one that a signal ended, if no launcher can have sent it."""
    end = facts.ends.get(rank)
    if end is None or not end.code:
        return None
    # A launcher ends the others after a task has exited, which takes longer than that from its report on.
    noticed = min((one.at for one in facts.failures), default=float("inf")) + _EXIT_S
    if (end.code < 0 or end.code > 128) and end.at > noticed:
        return None
    finding = Verdict(failure="unknown", rank=rank, at=end.at)
    if number := signal_of(end.code):
        return replace(by_signal(facts, finding, number), at=end.at)
    return with_line(replace(finding, failure="exit-code", detail=f"exit code {end.code}"), facts)


def matches_in(lines: Iterable[LogLine]) -> list[tuple[LogLine, Match]]:
    """Return the lines that the registry knows."""
    found = ((line, match_line(line.text)) for line in lines)
    return [(line, match) for line, match in found if match is not None]


def with_line(finding: Verdict, facts: AttemptFacts) -> Verdict:
    """Add the line of the rank's log that holds its error, or the record's own text."""
    if finding.rank is None:
        return replace(finding, evidence=(EvidenceLine(finding.role, None, finding.detail),))
    lines = facts.logs.get(finding.rank, ())
    place = next((line for line in reversed(lines) if finding.detail and finding.detail[:200] in line.text), None)
    text = place.text if place else finding.detail
    return replace(finding, evidence=(EvidenceLine(finding.role, finding.rank, text, place),))
