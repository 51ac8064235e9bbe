"""Slurm's states and reasons, in our words."""

from __future__ import annotations

from typing import get_args

import pytest

from ddp_hpc.slurm.states import ENDED, State, has_ended, phrase, reason, word


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
def test_a_state_has_one_word(state: str, meant: State) -> None:
    assert word(state) == meant


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
    assert set(get_args(State)) > ENDED


@pytest.mark.parametrize(
    "code", ["PENDING", "COMPLETING", "REQUEUED", "CANCELLED by 1", "OUT_OF_ME+", "NODE_FAIL", "?"]
)
def test_every_state_has_a_phrase(code: str) -> None:
    assert " " in f"job 7 {phrase(code)}".strip()
    assert "_" not in phrase(code).replace("ddp_hpc", "")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("Resources", "nodes to become free"),
        ("Priority", "higher priority"),
        ("Dependency", "depends on"),
        ("DependencyNeverSatisfied", "never start"),
        ("BeginTime", "earliest time"),
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
        ("launch failed requeued held", "held by Slurm"),
        ("launch_failed_requeued_held", "held by Slurm"),
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
        ("QOSMaxGRESPerUser", "your jobs are at the QOS's limit: GPUs"),
        ("QOSMaxJobsPerUserLimit", "your jobs are at the QOS's limit: running jobs"),
        ("QOSMaxSubmitJobPerUserLimit", "your jobs are at the QOS's limit: jobs in the queue"),
        ("QOSMaxWallDurationPerJobLimit", "it asks for more than its QOS allows one job (time)"),
        ("QOSMaxCpuMinutesPerJobLimit", "it asks for more than its QOS allows one job (time)"),
        ("QOSMaxNodePerJobLimit", "it asks for more than its QOS allows one job (nodes)"),
        ("QOSMinGRES", "it asks for less than its QOS demands"),
        ("QOSMinCpuNotSatisfied", "it asks for less than its QOS demands of a job (CPUs)"),
        ("QOSGrpNodeLimit", "all jobs of its QOS together are at their limit: nodes"),
        ("MaxGRESPerAccount", "its account is at the QOS's limit: GPUs"),
        ("AssocGrpGRES", "all jobs of its account together are at their limit: GPUs"),
        ("AssocGrpCpuLimit", "all jobs of its account together are at their limit: CPUs"),
        ("AssocGrpCPUMinutesLimit", "the time that its account may use is spent"),
        ("AssocGrpGRESMinutes", "the time that its account may use is spent"),
        ("AssocGrpCPURunMinutesLimit", "running jobs may still use"),
        ("AssocMaxJobsLimit", "your jobs are at the account's limit: running jobs"),
        ("AssocMaxWallDurationPerJobLimit", "it asks for more than its account allows one job (time)"),
    ],
)
def test_a_reason_is_told_in_words(code: str, words: str) -> None:
    assert words in reason(code)


def test_nodes_that_are_missing_are_named() -> None:
    told = reason("(ReqNodeNotAvail, UnavailableNodes:node[1-2],node4)")

    assert told.endswith("down, drained or reserved, for instance for maintenance: node[1-2],node4")


@pytest.mark.parametrize("code", ["", "None", "(null)"])
def test_no_reason_is_no_words(code: str) -> None:
    assert reason(code) == ""


def test_an_unknown_reason_is_told_as_it_is() -> None:
    assert reason("(MoonPhase, full)") == "MoonPhase, full"
