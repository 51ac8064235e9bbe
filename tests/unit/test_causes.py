"""Why an attempt ended: what each sign means, and which goes before which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base import exit_codes
from ddp_hpc.cluster.slurm.queries import JobRecord, parse_job
from ddp_hpc.job.ending.causes import Evidence, cause_of
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.run.run_dir.ledger import Cause

FINISHED, STOPPED, FAILED = exit_codes.FINISHED, exit_codes.STOPPED, exit_codes.FAILED
REFUSED, FENCED, STOPPED_EARLY = exit_codes.REFUSED, exit_codes.FENCED, exit_codes.STOPPED_BEFORE_START
NOW = 1_000_000.0
LEAD_S = 120.0


def job(state: str = "RUNNING", **more: Any) -> JobRecord:
    """Return what Slurm says of the job."""
    known = {"reason": "None", "restarts": 0, "ends_at": NOW + 86_400, **more}
    return JobRecord(job_id="7", state=state, **known)


RUNNING = job()
ENDING = job("COMPLETING", ends_at=NOW)
"""What scontrol shows of every job that ends, whatever the reason (measured: 22.05, 24.11)."""


def evidence(code: int, **more: Any) -> Evidence:
    of_outcome = {
        name: more.pop(name) for name in Outcome.__dataclass_fields__ if name in more and name != "lost_nodes"
    }
    return Evidence(outcome=Outcome(code=code, **of_outcome), now=NOW, lead_s=LEAD_S, **more)


# --- one sign at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (evidence(FINISHED), "finished"),
        (evidence(FENCED), "fenced"),
        (evidence(FAILED, owns_run=False), "fenced"),
        (evidence(STOPPED, owns_run=False), "fenced"),
        (evidence(REFUSED), "refused"),
        (evidence(exit_codes.DIVERGED), "diverged"),
        (evidence(exit_codes.DIVERGED, job=job(restarts=1)), "diverged"),
        (evidence(exit_codes.DIVERGED, owns_run=False), "fenced"),
        (evidence(exit_codes.NOT_SAVED), "not saved"),
        (evidence(exit_codes.NOT_SAVED, is_out_of_time=True), "time limit"),
        (evidence(exit_codes.NOT_SAVED, owns_run=False), "fenced"),
        (evidence(STOPPED, stop_request="end"), "stop asked"),
        (evidence(STOPPED, stop_request="requeue"), "requeue asked"),
        (evidence(STOPPED, is_out_of_time=True), "time limit"),
        (evidence(STOPPED), "requeue asked"),
        (evidence(STOPPED, has_script_asked=True), "script asked"),
        (evidence(STOPPED, has_script_asked=True, stop_request="end"), "stop asked"),
        (evidence(STOPPED, has_script_asked=True, is_out_of_time=True), "time limit"),
        (evidence(STOPPED, has_script_asked=True, job=replace(ENDING, preempted_at=NOW - 3)), "preempted"),
        (evidence(STOPPED_EARLY), "unexplained"),
        (evidence(STOPPED_EARLY, stop_request="end"), "stop asked"),
        (evidence(STOPPED_EARLY, is_out_of_time=True), "time limit"),
        (evidence(FAILED), "worker crashed"),
        (evidence(exit_codes.PORT_TAKEN), "worker crashed"),
        (evidence(FAILED, has_stacks=True), "hang"),
        (evidence(FAILED, is_unresponsive=True), "hang"),
        (evidence(FAILED, lost_nodes=["node2"]), "node failed"),
        (evidence(FAILED, lost_nodes=["node2"], has_stacks=True), "hang"),
    ],
)
def test_what_workers_and_directory_say_without_slurm(found: Evidence, cause: Cause) -> None:
    assert cause_of(found) == cause


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        (ENDING, "cancelled"),
        (job("CANCELLED"), "cancelled"),
        (job("CANCELLED by 1000"), "cancelled"),
        (replace(ENDING, reason="TimeLimit"), "time limit"),
        (replace(ENDING, reason="NodeDown"), "node failed"),
        (job("TIMEOUT"), "time limit"),
        (replace(ENDING, preempted_at=NOW - 3), "preempted"),
        (job("PREEMPTED"), "preempted"),
        (job("NODE_FAIL"), "node failed"),
        (job("RUNNING", preempted_at=NOW - 3), "preempted"),
    ],
)
@pytest.mark.parametrize("code", [STOPPED, FAILED])
def test_slurms_word_on_its_own_doings_goes_before_what_the_workers_made_of_them(
    code: int, known: JobRecord, cause: Cause
) -> None:
    assert cause_of(evidence(code, job=known)) == cause


@pytest.mark.parametrize(
    ("accounted_as", "cause"),
    [
        ("PREEMPTED", "preempted"),
        ("NODE_FAIL", "node failed"),
        ("TIMEOUT", "time limit"),
        ("REQUEUED", "requeue asked"),
        ("CANCELLED by 1000", "requeue asked"),
        ("", "requeue asked"),
    ],
)
@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", "RUNNING"])
@pytest.mark.parametrize("restart", [0, 3])
def test_a_count_of_restarts_that_has_risen_means_that_slurm_has_requeued_the_job(
    restart: int, state: str, accounted_as: str, cause: Cause
) -> None:
    known = job(state, restarts=restart + 1)
    found = evidence(FAILED, job=known, restart=restart, accounted_as=accounted_as)

    assert found.is_requeued_by_slurm
    assert cause_of(found) == cause


@pytest.mark.parametrize("code", [STOPPED, FAILED])
@pytest.mark.parametrize(
    ("accounted_as", "cause"),
    [("CANCELLED by 1000", "cancelled"), ("PREEMPTED", "preempted"), ("RUNNING", "preempted"), ("", "preempted")],
)
def test_who_cancels_a_job_that_is_being_preempted_is_told_by_accounting_alone(
    accounted_as: str, cause: Cause, code: int
) -> None:
    found = evidence(code, job=replace(ENDING, preempted_at=NOW - 3), accounted_as=accounted_as)

    assert found.is_accounting_needed
    assert cause_of(found) == cause


@pytest.mark.parametrize(
    ("accounted_as", "cause"), [("", "node failed"), ("RUNNING", "node failed"), ("PREEMPTED", "preempted")]
)
def test_where_accounting_does_not_say_yet_why_slurm_requeued_it_a_lost_node_does(
    accounted_as: str, cause: Cause
) -> None:
    known = job("PENDING", restarts=1)

    assert cause_of(evidence(FAILED, job=known, accounted_as=accounted_as, lost_nodes=["node2"])) == cause


@pytest.mark.parametrize("restarts", [None, 0, 2])
def test_a_count_that_has_not_risen_means_nothing(restarts: int | None) -> None:
    found = evidence(FAILED, job=job(restarts=restarts), restart=2)

    assert not found.is_requeued_by_slurm
    assert cause_of(found) == "worker crashed"


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED", "COMPLETED", "FAILED", "SOMETHING_NEW"])
def test_a_job_that_nobody_ends_says_nothing_of_a_crash(state: str) -> None:
    assert cause_of(evidence(FAILED, job=job(state))) == "worker crashed"


@pytest.mark.parametrize(
    ("ends_in_s", "cause"),
    [
        (LEAD_S + 2 * 60 + 1, "requeue asked"),
        (LEAD_S + 2 * 60, "time limit"),
        (LEAD_S, "time limit"),
        (-10, "time limit"),
        (None, "requeue asked"),
    ],
)
def test_workers_that_stopped_unasked_shortly_before_the_limit_were_told_because_of_it(
    ends_in_s: float | None, cause: Cause
) -> None:
    """Slurm's own signal, sent to the tasks, may come a minute earlier than asked, and saving takes its time."""
    ends_at = None if ends_in_s is None else NOW + ends_in_s

    assert cause_of(evidence(STOPPED, job=job(ends_at=ends_at))) == cause


# --- one sign before another -----------------------------------------------------------------------------------------

IN_ORDER: list[tuple[Cause, dict[str, Any]]] = [
    (Cause.FENCED, {"owns_run": False}),
    (Cause.TIME_LIMIT, {"job": replace(ENDING, reason="TimeLimit")}),
    (Cause.STOP_ASKED, {"stop_request": "end"}),
    (Cause.TIME_LIMIT, {"is_out_of_time": True}),
    (Cause.HANG, {"has_stacks": True}),
    (Cause.NODE_FAILED, {"lost_nodes": ["node2"]}),
    (Cause.WORKER_CRASHED, {}),
]
"""From the sign that outweighs all others to the one that means something only alone."""


@pytest.mark.parametrize("place", range(len(IN_ORDER)))
def test_of_several_signs_the_weightiest_counts(place: int) -> None:
    cause, _ = IN_ORDER[place]
    signs: dict[str, Any] = {}
    for _, sign in reversed(IN_ORDER[place:]):
        signs.update(sign)

    assert cause_of(evidence(FAILED, **signs)) == cause


@pytest.mark.parametrize(
    "known", [ENDING, replace(ENDING, reason="TimeLimit"), job(restarts=1), job("NODE_FAIL"), RUNNING]
)
def test_what_is_finished_is_finished_whatever_slurm_does_to_the_job(known: JobRecord) -> None:
    assert cause_of(evidence(FINISHED, job=known, owns_run=False, stop_request="end")) == "finished"


def test_a_cancelled_job_stays_cancelled_though_the_user_had_asked_for_a_stop_and_it_was_committed() -> None:
    assert cause_of(evidence(STOPPED, job=ENDING, stop_request="requeue")) == "cancelled"


def test_a_job_that_comes_back_is_not_cancelled_though_it_is_ending() -> None:
    assert cause_of(evidence(FAILED, job=replace(ENDING, restarts=1))) == "requeue asked"


# --- as scontrol prints it -------------------------------------------------------------------------------------------

SHOWN = "JobId=7 JobName=digits UserId=hpc(1000) JobState={state} Reason={reason} Requeue=1 Restarts={restarts} {more}"


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "more", "cause"),
    [
        ("COMPLETING", "None", 0, "PreemptTime=None", "cancelled"),
        ("COMPLETING", "TimeLimit", 0, "PreemptTime=None", "time limit"),
        (
            "COMPLETING",
            "None",
            0,
            "PreemptEligibleTime=2026-01-01T10:00:00 PreemptTime=2026-01-01T11:00:00",
            "preempted",
        ),
        ("COMPLETING", "BeginTime", 1, "PreemptTime=None", "requeue asked"),
        ("RUNNING", "None", 0, "PreemptTime=2026-01-01T11:00:00", "preempted"),
        ("RUNNING", "None", 0, "PreemptTime=None", "worker crashed"),
    ],
)
def test_what_scontrol_prints_of_a_job_is_understood(
    state: str, reason: str, restarts: int, more: str, cause: Cause
) -> None:
    known = parse_job(SHOWN.format(state=state, reason=reason, restarts=restarts, more=more))

    assert known is not None
    assert cause_of(evidence(FAILED, job=known)) == cause


@given(
    st.builds(
        evidence,
        st.sampled_from([0, 1, 2, 97, 98, 99, -9]),
        owns_run=st.booleans(),
        stop_request=st.sampled_from([None, "end", "requeue"]),
        is_out_of_time=st.booleans(),
        is_unresponsive=st.booleans(),
        has_stacks=st.booleans(),
        lost_nodes=st.sampled_from([(), ("node1",)]),
        restart=st.integers(0, 2),
        accounted_as=st.sampled_from(["", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "?"]),
        job=st.none()
        | st.builds(
            job,
            st.sampled_from(
                ["RUNNING", "PENDING", "COMPLETING", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "?"]
            ),
            reason=st.sampled_from(["", "None", "TimeLimit", "BeginTime"]),
            restarts=st.sampled_from([None, 0, 1, 2, 3]),
            ends_at=st.sampled_from([None, 0.0, 1e12]),
            preempted_at=st.sampled_from([None, 1.0]),
        ),
    )
)
def test_every_evidence_has_a_cause_and_only_code_zero_is_finished(found: Evidence) -> None:
    cause = cause_of(found)

    assert isinstance(cause, Cause)
    assert (cause == "finished") == (found.outcome.code == FINISHED)
    if found.job is None:
        assert cause not in {"cancelled", "preempted"}
