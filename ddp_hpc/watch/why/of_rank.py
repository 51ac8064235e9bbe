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
from ddp_hpc.watch.why.exceptions import NEAR_END_LINES, TOP_FUNCTIONS, Raised, is_users, tracebacks, uncaught
from ddp_hpc.watch.why.findings import AttemptFacts, EvidenceLine, Verdict
from ddp_hpc.watch.why.lines import LogLine
from ddp_hpc.watch.why.signatures import Match, match_exception, match_line
from ddp_hpc.watch.why.slurm_lines import lines_of_newest_step

_SIGKILL = signal_number("KILL")
_CRASH_SIGNALS = frozenset(map(signal_number, ("SEGV", "ABRT", "BUS", "ILL", "FPE", "SYS", "TRAP")))
_CANNOT_START = {126, 127}
_VERY_END_LINES = 3
"""So many lines at the very end, where a message of a shell or of a runtime is the reason: programs go on after others."""
_START_FAILURES = {"arguments", "image", "import", "launch-failed"}
"""Classes of a command that could not start, so no signal ended it."""
NO_MEMORY_MATCH = Match("host-memory", "confirmation")
_REPORT_TO_EXIT_S = 0.2
"""From a process's report to its exit, at least: it has connections and threads to end."""


def verdict_from_report(facts: AttemptFacts, failure: WorkerFailure) -> Verdict:
    """Return the verdict on a rank that has written an error report; its log may add to it."""
    lines = [line for line in failure.exception.splitlines() if line.strip()] or [""]
    verdict = Verdict(
        failure="unknown",
        rank=failure.rank if failure.rank >= 0 else None,
        host=failure.host,
        at=failure.at,
        step=None if failure.of_script or not failure.step else failure.step,
        detail=lines[0],
    )
    if _PASSED_ON.search(lines[0]):  # the original's text counts
        passed = tracebacks(lines)
        verdict = replace(verdict, detail=passed[-1].first_line if passed else lines[-1])
    if failure.is_diverged:
        return add_log_line(replace(verdict, failure="nan"), facts)
    if failure.signal is not None and failure.memory_ran_out:
        return _verdict_on_memory(verdict, failure.memory_ran_out)
    if failure.signal is not None:
        return verdict_on_signal(facts, verdict, failure.signal)
    if failure.exit_code is not None:
        return _verdict_on_exit_code(facts, verdict, failure.exit_code)
    all_raised = tracebacks(failure.traceback.splitlines())
    raised = next(reversed(all_raised), None)
    name, text = failure.exception_type, failure.exception
    typed = text if not name or text.startswith(name) else f"{name}: {text}"  # as Python prints it
    found = match_exception(typed) or (match_exception(raised.text) if raised else None)
    found = _match_of_earlier(found, all_raised)
    if raised is not None and (found is None or found.name == "data"):
        found = _match_of_cause(raised) or found
    if found is None:
        found = Match(_class_by_fields(failure), "either" if failure.is_secondary else "root")
    verdict = add_log_line(replace(verdict, failure=found.name, role=found.role, place=_place(raised)), facts)
    if of_save := _NO_COMMIT_PATTERN.search(failure.exception):
        verdict = replace(verdict, rank=int(of_save["rank"]), host=of_save["host"])
    return _with_memory_of_child(facts, verdict)


_NO_COMMIT_PATTERN = re.compile(r"could not be committed: rank (?P<rank>\d+) on (?P<host>[\w.-]+): ")
"""All ranks report that a checkpoint could not be committed; one of them could not write its part."""


def _match_of_earlier(found: Match | None, all_raised: Sequence[Raised]) -> Match | None:
    """Return the class of the nearest exception before that has one, where the last one has none, or only says that a process is gone."""
    for earlier in reversed(all_raised[:-1]):
        if not earlier.is_linked or (found is not None and found.name != "unknown"):
            break
        found = match_exception(earlier.text) or found
    return found


def _with_memory_of_child(facts: AttemptFacts, verdict: Verdict) -> Verdict:
    """Return the verdict; on a rank whose own process SIGKILL ended, with what a message says of memory."""
    if verdict.failure != "killed":
        return verdict
    killed = _verdict_on_kill(facts, verdict)
    return replace(killed, evidence=tuple(dict.fromkeys((*verdict.evidence, *killed.evidence))))


def _class_by_fields(failure: WorkerFailure) -> str:
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
    if failure.is_secondary and failure.exception_type in _TORCH_ERROR_TYPES:
        return "unknown"
    return "user-exception" if failure.exception_type or failure.traceback else "unknown"


_PASSED_ON = re.compile(r"Caught \w+ in (?:DataLoader worker process|pin memory thread|replica) ")
"""`torch._utils.ExceptionWrapper.reraise`: the text of the original, with its traceback, follows in the next lines."""
_TORCH_ERROR_TYPES = {"RuntimeError", "DistNetworkError", "DistBackendError", "DistStoreError", "DistError"}
"""Types by which PyTorch reports a lost connection, among other errors."""


def _match_of_cause(raised: Raised) -> Match | None:
    """Return the class of the exception that a loader met: a stale mount is one also where it meets a sample."""
    found = match_exception(raised.text)
    if "[Errno 11]" in raised.first_line and raised.frames[-1].name in {"_launch", "_execute_child"}:
        return Match("process-limit", "root")  # it could not fork; a lock that is held has the same text
    if found is not None and found.name not in {"data", "user-exception"}:
        return found
    # A process of a loader cannot use CUDA that the rank has used: no sample is at fault.
    return Match("user-exception" if "CUDA" in raised.first_line else "data", "root") if raised.is_in_data else found


def _place(raised: Raised | None) -> str:
    frame = next(filter(is_users, reversed(raised.frames)), None) if raised else None
    return f"{frame.filename}:{frame.lineno}{f' in {frame.name}' if frame.name else ''}" if frame else ""


def _verdict_on_memory(verdict: Verdict, whose: str | bool) -> Verdict:
    """Return the verdict on a rank that SIGKILL ended while the kernel counted a process that it killed for memory."""
    ran_out = (
        f"the memory {whose} ran out" if isinstance(whose, str) else "memory ran out, there or on the whole machine"
    )
    detail = f"killed by SIGKILL, and the kernel has killed a process of its cgroup because {ran_out}"
    evidence = EvidenceLine("confirmation", verdict.rank, detail)
    return replace(verdict, failure="host-memory", detail=detail, evidence=(evidence,))


def verdict_on_signal(facts: AttemptFacts, verdict: Verdict, number: int) -> Verdict:
    """Return the verdict on a rank that a signal ended; its log may say more."""
    verdict = replace(verdict, detail=f"killed by {signal_name(number)}")
    if number == _SIGKILL:
        return _verdict_on_kill(facts, verdict)
    if number not in _CRASH_SIGNALS:
        return replace(verdict, failure="signal")
    found = _matches_at_end(facts, verdict)
    reasons = [pair for pair in found if pair[1].role != "confirmation" and pair[1].name not in _START_FAILURES]
    more = [pair for pair in reasons if pair[1].name != "native-crash"]
    more.sort(key=lambda pair: (pair[1].role != "root", pair[1].role != "either", pair[0].offset))
    is_said = more and more[0][1].role == "root"
    raised = None if is_said else _verdict_on_traceback(facts, verdict.rank, has_failed=True)
    if raised is not None and raised.failure not in _START_FAILURES and (raised.role == "root" or not more):
        return replace(raised, at=verdict.at, host=verdict.host, step=verdict.step)
    if not more:
        proofs = tuple(EvidenceLine("confirmation", verdict.rank, line.text, line) for line, _ in reasons[:1])
        return replace(verdict, failure="native-crash", evidence=proofs)
    line, match = more[0]
    evidence = EvidenceLine(match.role, verdict.rank, line.text, line)
    return replace(verdict, failure=match.name, role=match.role, basis="log", evidence=(evidence,))


# These are not counted: a process that dies prints any number of them.
_OF_STACK = re.compile(r"$|  File |frame #|(?:Current t|T)hread 0x")


def _matches_at_end(facts: AttemptFacts, verdict: Verdict) -> list[tuple[LogLine, Match]]:
    lines = () if verdict.rank is None else facts.logs.get(verdict.rank, ())
    return matches_in([line for line in lines if not _OF_STACK.match(line.text)][-NEAR_END_LINES:])


def _verdict_on_kill(facts: AttemptFacts, verdict: Verdict) -> Verdict:
    """Return the verdict on a rank that SIGKILL ended: only a message of Slurm or of the kernel proves that memory ran out."""
    of_job = matches_in(lines_of_newest_step(facts.console, facts.attempt.job_id, verdict.host))
    proofs = [(line, verdict.rank) for line, match in _matches_at_end(facts, verdict) if match == NO_MEMORY_MATCH]
    proofs += [(line, None) for line, match in of_job if match == NO_MEMORY_MATCH]
    if not proofs:
        return replace(verdict, failure="killed")
    line, rank = proofs[0]
    evidence = EvidenceLine("confirmation", rank, line.text, line)
    return replace(verdict, failure="host-memory", basis="log", evidence=(evidence,))


def _verdict_on_exit_code(facts: AttemptFacts, verdict: Verdict, code: int) -> Verdict:
    """Return the verdict on a script that exited with a code; Python's own is 1 for an exception that nothing caught, argparse's is 2."""
    if number := signal_of(code):
        return verdict_on_signal(facts, verdict, number)
    found = verdict_from_log(facts, verdict.rank, has_failed=True) if code in {1, 2, *_CANNOT_START} else None
    if found is not None:
        return replace(found, at=verdict.at, host=verdict.host)
    return add_log_line(replace(verdict, failure="launch-failed" if code in _CANNOT_START else "exit-code"), facts)


def verdict_from_log(facts: AttemptFacts, rank: int | None, *, has_failed: bool = False) -> Verdict | None:
    """Return the verdict by the log of a rank alone: the exception that ended it, or a known text near its end."""
    lines = () if rank is None else facts.logs.get(rank, ())
    said = next((pair for pair in matches_in(lines[-_VERY_END_LINES:]) if pair[1].role == "root"), None)
    raised = _verdict_on_traceback(facts, rank, has_failed=has_failed and said is None)
    said = said or next((pair for pair in matches_in(lines[-NEAR_END_LINES:]) if pair[1].role == "either"), None)
    if raised is not None or said is None:
        return raised
    line, match = said
    return _verdict_on_line(match, rank, line.text.strip(), line)


def _verdict_on_line(match: Match, rank: int | None, text: str, line: LogLine) -> Verdict:
    evidence = EvidenceLine(match.role, rank, text, line)
    return Verdict(failure=match.name, role=match.role, basis="log", rank=rank, detail=text, evidence=(evidence,))


def _verdict_on_traceback(facts: AttemptFacts, rank: int | None, *, has_failed: bool) -> Verdict | None:
    """Return the verdict by the exception that ended a rank; after one that `has_failed`, its shell, for example, may have printed more."""
    lines = () if rank is None else facts.logs.get(rank, ())
    texts = [line.text for line in lines]
    raised = uncaught(texts, num_more=NEAR_END_LINES if has_failed else 0)
    if raised is None:
        return None
    found = _match_of_earlier(_match_of_cause(raised), tracebacks(texts[: raised.at + 1]))
    if raised.frames[0].name not in TOP_FUNCTIONS and uncaught(texts) is None:  # a function may have caught it
        if found is None:
            return None
        found = replace(found, role="either" if found.role == "root" else found.role)
    verdict = _verdict_on_line(found or Match("user-exception", "root"), rank, raised.first_line, lines[raised.at])
    return _with_memory_of_child(facts, replace(verdict, place=_place(raised), is_traceback=True))


def verdict_from_end(facts: AttemptFacts, rank: int) -> Verdict | None:
    """Return the verdict on a rank without a report, by its exit code; on one that a signal ended, if no launcher can have sent it."""
    end = facts.ends.get(rank)
    if end is None or not end.code:
        return None
    # A launcher ends the others after a task has exited, which takes longer than that from its report on.
    noticed = min((one.at for one in facts.failures), default=float("inf")) + _REPORT_TO_EXIT_S
    if (end.code < 0 or end.code > 128) and end.at > noticed:
        return None
    verdict = Verdict(failure="unknown", rank=rank, at=end.at)
    if number := signal_of(end.code):
        return replace(verdict_on_signal(facts, verdict, number), at=end.at)
    return add_log_line(replace(verdict, failure="exit-code", detail=f"exit code {end.code}"), facts)


def matches_in(lines: Iterable[LogLine]) -> list[tuple[LogLine, Match]]:
    """Return the lines that the registry knows."""
    found = ((line, match_line(line.text)) for line in lines)
    return [(line, match) for line, match in found if match is not None]


def add_log_line(verdict: Verdict, facts: AttemptFacts) -> Verdict:
    """Add the line of the rank's log that holds its error, or the record's own text."""
    if verdict.rank is None:
        return replace(verdict, evidence=(EvidenceLine(verdict.role, None, verdict.detail),))
    lines = facts.logs.get(verdict.rank, ())
    place = next((line for line in reversed(lines) if verdict.detail and verdict.detail[:200] in line.text), None)
    text = place.text if place else verdict.detail
    return replace(verdict, evidence=(EvidenceLine(verdict.role, verdict.rank, text, place),))
