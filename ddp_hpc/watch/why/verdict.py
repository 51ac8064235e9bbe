"""The verdict on one attempt: which rank failed first, and why, from records and clean lines; where nothing is proved, it says so. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ddp_hpc.run.run_dir.differences import Difference
from ddp_hpc.run.run_dir.error_fingerprint import fingerprint, sample_or_file
from ddp_hpc.run.run_dir.ledger import Cause, Ending
from ddp_hpc.watch.why.findings import AttemptFacts, EvidenceLine, Verdict
from ddp_hpc.watch.why.hangs import is_network_to_blame, verdict_on_hang, verdict_on_missing_ranks, verdict_on_network
from ddp_hpc.watch.why.of_rank import (
    NO_MEMORY_MATCH,
    matches_in,
    verdict_from_end,
    verdict_from_log,
    verdict_from_report,
    verdict_on_signal,
)
from ddp_hpc.watch.why.on_gpu import gpu_explanation
from ddp_hpc.watch.why.signalled_ranks import signalled
from ddp_hpc.watch.why.signatures import Match, Role, match_line
from ddp_hpc.watch.why.slurm_lines import lines_of_newest_step, node_of

_FAILURE_BY_CAUSE: Mapping[Cause | None, str] = {
    Cause.PREEMPTED: "preempted",
    Cause.TIME_LIMIT: "time-limit",
    Cause.NODE_FAILED: "node-failed",
    Cause.CANCELLED: "cancelled",
    Cause.SUSPENDED: "suspended",
    Cause.DIVERGED: "nan",
    Cause.RANKS_DIFFER: "ranks-differ",
    Cause.PREFLIGHT: "preflight",
}
_FALLBACKS: Mapping[Cause | None, str] = {Cause.SUPERVISOR_DIED: "supervisor-died", Cause.NOT_SAVED: "not-saved"}
_PEER_FAILURES = frozenset({"collective-timeout", "ranks-missing", "peer-gone"})
_ANY_END_FAILURES = _PEER_FAILURES | {"killed", "unknown", "signal", "exit-code", "native-crash", "user-exception"}
EFFECTS_BY_CAUSE: Mapping[Cause, AbstractSet[str]] = {
    Cause.HANG: {"killed", "unknown"},
    Cause.TIME_LIMIT: _ANY_END_FAILURES,
    Cause.CANCELLED: _ANY_END_FAILURES,
}
"""An end of ranks that may have waited in vain before -> what a rank reports that may follow from that end, which sends signals. All else
that ranks said came first, and is the cause. The other ends have causes outside of the ranks: what these said follows from them."""
_GOOD_CAUSES = {Cause.FINISHED, Cause.STOP_ASKED, Cause.REQUEUE_ASKED, Cause.SCRIPT_ASKED, Cause.FENCED}
_GOOD_ENDS = {Ending.FINISHED, Ending.STOPPED, Ending.FENCED}
_MOST_EVIDENCE = 5
_LINE_NUMBER = re.compile(r"(?:line |:)\d+")


def verdict_of(facts: AttemptFacts) -> Verdict:
    """Return why an attempt ended."""
    attempt = facts.attempt
    findings = sorted(_findings(facts), key=lambda one: one.sort_key)
    said = next((one for one in findings if _came_before(one, attempt.cause)), None)
    has_failed = (attempt.cause, attempt.ending) == (Cause.STOP_ASKED, Ending.FAILED)  # as it saved, or before
    is_good = attempt.ending in _GOOD_ENDS or (attempt.cause in _GOOD_CAUSES and not has_failed)
    if is_good and (said is None or (attempt.last_step or 0) > attempt.first_step):
        return Verdict(failure="")
    if attempt.ending is None and not facts.failures:  # it may run: texts of its logs are shown, and prove nothing
        shown = tuple(replace(line, role="either") for one in findings for line in one.evidence)
        return Verdict(failure="unknown", basis="none", evidence=shown[:_MOST_EVIDENCE])
    recorded = _verdict_from_record(facts, findings)
    if recorded is not None:
        return replace(_with_others(said or recorded, findings, facts), end=recorded.failure if said else "")
    network = verdict_on_network(facts) if is_network_to_blame(facts, findings) else None
    first = network or _verdict_from_first_rank(facts, findings) or _verdict_from_ledger(facts)
    return _with_others(first, findings, facts)


def _verdict_from_first_rank(facts: AttemptFacts, findings: Sequence[Verdict]) -> Verdict | None:
    """Return what the first rank says; where it only lost a connection, the rank without a report, or what all have met."""
    first = next(iter(findings), None)
    reported = [one for one in findings if one.has_report]
    if reported and all(one.role == "cascade" for one in reported) and (first is None or first.is_from_log):
        first = reported[0]
    if first is None or first.role != "cascade":
        return first
    silent = _verdict_on_silent_rank(facts, findings)
    memory = _verdict_on_lost_memory(facts) if silent is None or silent.failure == "unknown" else None
    first = memory or silent or replace(first, rank=None, host="", step=None, at=float("inf"))
    if first.failure == "peer-gone" and len(facts.logs) == 1:  # no other rank was there
        return replace(first, failure="unknown", role="either", basis="none")
    return first


def _verdict_from_ledger(facts: AttemptFacts) -> Verdict:
    """Return what the ledger says where no rank said more."""
    name = _FALLBACKS.get(facts.attempt.cause)
    if name is None:
        return Verdict(failure="unknown", role="either", basis="none")
    return Verdict(failure=name, host=facts.attempt.host)


def _came_before(finding: Verdict, cause: Cause | None) -> bool:
    """Tell whether a rank said it before its attempt ended in this way, and not because of that."""
    if cause is None or cause not in EFFECTS_BY_CAUSE or not (finding.role == "root" or finding.is_from_log):
        return False
    return finding.failure not in (_ANY_END_FAILURES if finding.is_from_log else EFFECTS_BY_CAUSE[cause])


def _verdict_from_record(facts: AttemptFacts, findings: Sequence[Verdict]) -> Verdict | None:
    """Return what the ledger alone proves."""
    cause, check = facts.attempt.cause, facts.preflight
    if cause == Cause.HANG:
        return verdict_on_hang(facts)
    if cause == Cause.DIVERGED and any(one.failure == "nan" for one in findings):
        return None  # a rank says more
    # Nodes that failed, and are those which the check before the training named: then no worker was started.
    named = () if check is None else check.bad_nodes
    if cause == Cause.PREFLIGHT or (cause == Cause.NODE_FAILED and named and {*facts.attempt.failed_nodes} == {*named}):
        return _verdict_on_preflight(facts)
    is_cancelled = cause is None and facts.attempt.ending == Ending.CANCELLED
    name = "cancelled" if is_cancelled else _FAILURE_BY_CAUSE.get(cause)
    if name is None:
        return None
    if name == "ranks-differ" and facts.difference is not None:
        return _verdict_on_difference(facts.difference)
    proofs = [line for line in facts.console if match_line(line.text) == Match(name, "confirmation")]
    evidence = tuple(EvidenceLine("confirmation", None, line.text, line) for line in proofs[:1])
    return Verdict(failure=name, host=", ".join(facts.attempt.failed_nodes), evidence=evidence)


def _verdict_on_difference(difference: Difference) -> Verdict:
    """Return which rank was wrong, as the ranks' digests, or those of another attempt, show it.

    A loss that is not finite on some ranks alone is a training that diverges until another attempt has proved that they were wrong.
    """
    only = difference.odd_ranks[0] if len(difference.odd_ranks) == 1 else None
    return Verdict(
        failure="nan" if difference.of_loss and not difference.odd_ranks else "ranks-differ",
        rank=only,
        host=", ".join(dict.fromkeys(difference.hosts[rank] for rank in difference.odd_ranks)),
        step=difference.step,
        detail=difference.finding,
        evidence=(EvidenceLine("root", only, difference.blame),),
    )


def _verdict_on_preflight(facts: AttemptFacts) -> Verdict:
    if facts.preflight is None:
        return Verdict(failure="preflight")
    failures = facts.preflight.failures
    return Verdict(
        failure="preflight",
        host=", ".join(facts.preflight.bad_nodes),
        detail="; ".join(dict.fromkeys(one.to_do for one in failures if one.to_do)),
        evidence=tuple(EvidenceLine("root", None, f"{one.check}: {one.found}") for one in failures),
    )


def _findings(facts: AttemptFacts) -> list[Verdict]:
    failures = [one for one in facts.failures if not (one.is_hang or one.ranks_differ)]
    reported = [_abstain_if_unknown(replace(verdict_from_report(facts, one), has_report=True)) for one in failures]
    told = {failure.rank for failure in facts.failures if not failure.is_hang}  # others report a hang
    silent = [one for rank in facts.logs if rank not in told and (one := verdict_from_log(facts, rank)) is not None]
    for number, one in enumerate(silent):  # the rank may have gone on after that text, so it is not a root
        role: Role = "either" if one.role == "root" else one.role
        evidence = tuple(replace(line, role=role) for line in one.evidence)
        silent[number] = _abstain_if_unknown(replace(one, role=role, evidence=evidence))
    signalled_ranks = _verdicts_on_signalled(facts, {failure.rank for failure in facts.failures})
    return [*reported, *signalled_ranks, *silent, *_verdict_from_console(facts)]


def _abstain_if_unknown(finding: Verdict) -> Verdict:
    """Return the finding; nothing proves the class `unknown`."""
    return replace(finding, basis="none") if finding.failure == "unknown" else finding


def _verdicts_on_signalled(facts: AttemptFacts, reported: AbstractSet[int]) -> list[Verdict]:
    """Return the ranks without a report that a signal ended by the job's log, if no other rank is without a report."""
    ended = signalled(facts.console, facts.attempt.nodes, len(facts.logs))
    silent = set(facts.logs) - reported
    found = []
    for rank, host, number, line in ended:
        if rank not in silent or silent - {other for other, *_ in ended}:
            continue  # a rank that left nothing at all may have been the first
        finding = verdict_on_signal(facts, Verdict(failure="unknown", rank=rank, host=host), number)
        evidence = (EvidenceLine("root", None, line.text.strip(), line), *finding.evidence)
        found.append(replace(finding, basis="log", has_report=True, evidence=evidence))
    return found


def _verdict_from_console(facts: AttemptFacts) -> Iterator[Verdict]:
    """Yield why the workers could not be started, by what Slurm and the container runtime printed first."""
    if any(line.text for lines in facts.logs.values() for line in lines):
        return  # a rank has started: such a line is of a setup that went on
    for line in facts.console:
        found = match_line(line.text)
        if found is not None and found.role == "root" and found.name in {"image", "launch-failed"}:
            proof = (EvidenceLine("either", None, line.text, line),)
            yield Verdict(failure=found.name, role="either", basis="log", detail=line.text, evidence=proof)
            return


def _verdict_on_silent_rank(facts: AttemptFacts, findings: Iterable[Verdict]) -> Verdict | None:
    """Return the one rank that left no report while all others lost a connection."""
    silent = sorted(set(facts.logs) - {one.rank for one in findings if one.has_report})
    if len(silent) != 1:
        return None
    if ended := verdict_from_end(facts, silent[0]):
        return ended
    proofs = next((one.evidence for one in findings if one.rank == silent[0]), ())
    said = f"rank {silent[0]} ended without an error report"
    return Verdict(failure="unknown", role="either", basis="none", rank=silent[0], detail=said, evidence=proofs)


def _verdict_on_lost_memory(facts: AttemptFacts) -> Verdict | None:
    """Return that memory ran out in the ranks' step, where the ranks that are left only lost their connections."""
    lines = matches_in(lines_of_newest_step(facts.console, facts.attempt.job_id, ""))
    line = next((line for line, match in lines if match == NO_MEMORY_MATCH), None)
    if line is None:
        return None
    proof, node = (EvidenceLine("confirmation", None, line.text, line),), node_of(line)
    return Verdict(failure="host-memory", role="either", basis="log", host=node, detail=line.text, evidence=proof)


def _with_others(first: Verdict, findings: Sequence[Verdict], facts: AttemptFacts) -> Verdict:
    """Return the verdict: the first failure, and what followed on other ranks."""
    first = verdict_on_missing_ranks(first, facts) if first.failure == "ranks-missing" else first
    others = [one for one in findings if one.rank is not None and one.rank != first.rank]
    cascades = [one for one in others if one.role == "cascade"]
    alike = [one for one in others if one.failure == first.failure and one.role != "cascade"]
    short, proofs = gpu_explanation(first, facts.logs.get(-1 if first.rank is None else first.rank, ()))
    evidence = [*first.evidence, *proofs, *(line for one in cascades[:1] for line in one.evidence)]
    hosts = (*facts.attempt.nodes, facts.attempt.host, *(failure.host for failure in facts.failures))
    where = _LINE_NUMBER.sub("", first.place.rpartition("/")[2])
    return replace(
        first,
        in_short=short,
        entity=sample_or_file(first.detail) if first.failure in _ENTITY_FAILURES else "",
        fingerprint=fingerprint(first.failure, first.detail, where, hosts=hosts),
        evidence=tuple(dict.fromkeys(evidence))[:_MOST_EVIDENCE],
        num_cascades=len({one.rank for one in cascades}),
        num_alike=len({one.rank for one in alike}),
    )


_ENTITY_FAILURES = {"data", "disk-full", "quota", "stale-mount", "user-exception"}
