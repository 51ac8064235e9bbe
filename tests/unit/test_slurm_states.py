"""Slurm's states and reasons, in our words."""

from __future__ import annotations

from typing import get_args

import pytest

from ddp_hpc.cluster.slurm.states import ENDED, JobState, explain_reason, has_ended, parse_state, state_as_verb


@pytest.mark.parametrize(
    ("state", "meant"),
    [
        ("PENDING", "pending"),
        ("CONFIGURING", "pending"),
        ("REQUEUE_HOLD", "pending"),
        ("RUNNING", "running"),
        ("SUSPENDED", "suspended"),
        ("COMPLETING", "ending"),
        ("REQUEUED", "requeued"),
        ("COMPLETED", "completed"),
        ("FAILED", "failed"),
        ("CANCELLED", "cancelled"),
        ("CANCELLED by 1000", "cancelled"),
        ("CANCELLED+", "cancelled"),
        ("REVOKED", "running"),
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "timeout"),
        ("DEADLINE", "timeout"),
        ("NODE_FAIL", "node_fail"),
        ("BOOT_FAIL", "node_fail"),
        ("OUT_OF_MEMORY", "out_of_memory"),
        ("OUT_OF_ME+", "out_of_memory"),
        ("RUNNING*", "running"),
        ("completed", "completed"),
        ("RE+", "unknown"),  # RESIZING, REQUEUED, REVOKED ...
        ("SLEEPWALKING", "unknown"),
        ("+", "unknown"),
        ("", "unknown"),
        (" ", "unknown"),
    ],
)
def test_a_state_has_one_word(state: str, meant: JobState) -> None:
    assert parse_state(state) == meant


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ("COMPLETED", True),
        ("CANCELLED by 0", True),
        ("PREEMPTED", True),
        ("PENDING", False),
        ("COMPLETING", False),
        ("REQUEUED", False),
        ("SLEEPWALKING", False),
    ],
)
def test_a_job_has_ended_only_where_slurm_has_no_more_plans(state: str, ended: bool) -> None:
    assert has_ended(state) == ended


def test_every_end_is_a_state() -> None:
    assert set(get_args(JobState)) > ENDED


@pytest.mark.parametrize(
    "code", ["PENDING", "COMPLETING", "REQUEUED", "CANCELLED by 1", "OUT_OF_ME+", "NODE_FAIL", "?"]
)
def test_every_state_has_a_phrase(code: str) -> None:
    assert " " in f"job 7 {state_as_verb(code)}".strip()
    assert "_" not in state_as_verb(code).replace("ddp_hpc", "")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("Resources", "nodes to become free"),
        ("Priority", "higher priority"),
        ("Dependency", "depends on"),
        ("DependencyNeverSatisfied", "the job will not start"),
        ("BeginTime", "earliest start time"),
        ("PartitionTimeLimit", "time limit is longer"),
        ("PartitionNodeLimit", "nodes than its partition"),
        ("JobHeldUser", "scontrol release"),
        ("JobHeldAdmin", "administrator"),
        ("Reservation", "reservation"),
        ("Licenses", "licenses"),
        ("InvalidAccount", "account is not valid"),
        ("InvalidQOS", "QOS is not valid"),
        ("BadConstraints", "no node"),
        ("ReqNodeNotAvail", "down, drained or reserved"),
        ("(Resources)", "nodes to become free"),
        ("launch failed requeued held", "Slurm holds the job"),
        ("launch_failed_requeued_held", "Slurm holds the job"),
        # As squeue writes it, and as scontrol.
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "higher priority",
        ),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
            "higher priority",
        ),
        # Limits, of which there are too many to list.
        ("QOSMaxGRESPerUser", "your jobs have reached the QOS's limit of GPUs"),
        ("QOSMaxJobsPerUserLimit", "your jobs have reached the QOS's limit of running jobs"),
        ("QOSMaxSubmitJobPerUserLimit", "your jobs have reached the QOS's limit of jobs in the queue"),
        ("QOSMaxWallDurationPerJobLimit", "the job asks for more than its QOS allows one job (time)"),
        ("QOSMaxCpuMinutesPerJobLimit", "the job asks for more than its QOS allows one job (time)"),
        ("QOSMaxNodePerJobLimit", "the job asks for more than its QOS allows one job (nodes)"),
        ("QOSMinGRES", "the job asks for less than its QOS requires"),
        ("QOSMinCpuNotSatisfied", "the job asks for less than its QOS requires of a job (CPUs)"),
        ("QOSGrpNodeLimit", "all jobs of this job's QOS together have reached the limit of nodes"),
        ("MaxGRESPerAccount", "the jobs of this job's account have reached the QOS's limit of GPUs"),
        ("AssocGrpGRES", "all jobs of this job's account together have reached the limit of GPUs"),
        ("AssocGrpCpuLimit", "all jobs of this job's account together have reached the limit of CPUs"),
        ("AssocGrpCPUMinutesLimit", "the job's account has used all the time that it was granted"),
        ("AssocGrpGRESMinutes", "the job's account has used all the time that it was granted"),
        ("AssocGrpCPURunMinutesLimit", "running jobs may still use"),
        ("AssocGrpWallLimit", "the job's account has used all the time that it was granted"),
        ("QOSGrpWallLimit", "the job's QOS has used all the time that it was granted"),
        ("AssocGrpGRES", "this job starts when some of them end, unless it asks for more than that limit itself"),
        ("QOSMaxGRESPerUser", "this job starts when some of them end, unless it asks for more than that limit itself"),
        ("AssocMaxJobsLimit", "your jobs have reached the account's limit of running jobs"),
        ("AssocMaxWallDurationPerJobLimit", "the job asks for more than its account allows one job (time)"),
    ],
)
def test_a_reason_is_told_in_words(code: str, words: str) -> None:
    assert words in explain_reason(code)


@pytest.mark.parametrize("code", ["QOSMaxJobsPerUserLimit", "AssocGrpJobsLimit", "QOSMaxSubmitJobPerUserLimit"])
def test_one_job_is_never_more_jobs_than_a_limit_allows(code: str) -> None:
    assert explain_reason(code).endswith("this job starts when some of them end")


def test_nodes_that_are_missing_are_named() -> None:
    told = explain_reason("(ReqNodeNotAvail, UnavailableNodes:node[1-2],node4)")

    assert told.endswith("down, drained or reserved, for instance for maintenance: node[1-2],node4")


@pytest.mark.parametrize("code", ["", "None", "(null)"])
def test_no_reason_is_no_words(code: str) -> None:
    assert explain_reason(code) == ""


def test_an_unknown_reason_is_told_as_it_is() -> None:
    assert explain_reason("(MoonPhase, full)") == "MoonPhase, full"
