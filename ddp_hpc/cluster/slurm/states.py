"""What Slurm's job states and reason codes mean, in plain English."""

from __future__ import annotations

import re
from typing import Literal

JobState = Literal[
    "pending",
    "running",
    "suspended",
    "ending",
    "requeued",
    "completed",
    "failed",
    "cancelled",
    "preempted",
    "timeout",
    "node_fail",
    "out_of_memory",
    "unknown",
]
"""`requeued`: this start of the job is over, and Slurm will start the job again. `unknown`: a state that is not in `_STATES`."""

ENDED: frozenset[JobState] = frozenset(
    {"completed", "failed", "cancelled", "preempted", "timeout", "node_fail", "out_of_memory"}
)
"""States after which Slurm does not start the job again unless a user requeues it."""

_STATES: dict[str, JobState] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",  # it has nodes, which are booting
    "POWER_UP_NODE": "pending",
    "REQUEUE_HOLD": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "pending",  # requeued and held
    "EXPEDITING": "pending",
    "RUNNING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "SUSPENDED": "suspended",
    "STOPPED": "suspended",
    "COMPLETING": "ending",
    "STAGE_OUT": "ending",
    "REQUEUED": "requeued",
    "REQUEUE_FED": "requeued",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "running",  # by another cluster of the federation
    "PREEMPTED": "preempted",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "OUT_OF_MEMORY": "out_of_memory",
}
"""https://slurm.schedmd.com/job_state_codes.html"""

_PHRASES: dict[JobState, str] = {
    "pending": "waits",
    "running": "runs",
    "suspended": "is suspended",
    "ending": "is ending",
    "requeued": "waits to be started again",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "was cancelled",
    "preempted": "was preempted",
    "timeout": "reached its time limit",
    "node_fail": "lost a node",
    "out_of_memory": "ran out of host memory, so it needs more or must use less",
    "unknown": "is in a state that ddp_hpc does not know",
}


def parse_state(state: str) -> JobState:
    """Return the state that Slurm writes as `CANCELLED by 1000`, `OUT_OF_ME+` or `RUNNING*`."""
    code = state.split(maxsplit=1)[0].upper() if state.strip() else ""
    if code.endswith("+"):  # sacct cuts a state at the column's width
        meant = {_STATES[known] for known in _STATES if known.startswith(code[:-1])}
        return meant.pop() if len(meant) == 1 else "unknown"
    return _STATES.get(code.rstrip("*"), "unknown")


def state_as_verb(state: str) -> str:
    """Return a state as a verb with the job as its subject: `was cancelled`, `ran out of host memory`."""
    return _PHRASES[parse_state(state)]


def has_ended(state: str) -> bool:
    """Tell whether a job in this state has ended. A state that we do not know counts as not ended."""
    return parse_state(state) in ENDED


_HELD_TEXT = "the job is held; release it with `scontrol release JOBID`"
_HELD_AFTER_FAILURE = (
    "Slurm holds the job, because a node could not launch it, for instance because a prolog failed there; "
    "release it with `ddp-hpc requeue RUN --now` or `scontrol release JOBID`"
)
_NODE_MISSING_TEXT = "the job waits for a node that is down, drained or reserved, for instance for maintenance"

_REASONS: dict[str, str] = {
    "": "",
    "none": "",
    "null": "",
    "resources": "next in line: the job waits for nodes to become free",
    "priority": "jobs with higher priority are ahead of the job in the queue; wait for its turn",
    "cleaning": "the job waits until Slurm has cleaned up after its previous start",
    "begintime": "the job's earliest start time has not come yet; after a requeue, Slurm waits a minute or two",
    "dependency": "the job waits for the end of a job that it depends on",
    "dependencyneversatisfied": "another job, which this one needs, failed, so the job will not start; cancel it, and submit again",
    "joblocked": "the job waits for the end of a job that it depends on",
    "arraytasklimit": "the job waits until fewer tasks of its array run than the limit allows (`%` in `--array`)",
    "jobarraytasklimit": "the job waits until fewer tasks of its array run than the limit allows (`%` in `--array`)",
    "jobhelduser": _HELD_TEXT,
    "jobheldadmin": "an administrator holds the job; ask your cluster's support",
    "jobholdmaxrequeue": "Slurm holds the job, because it was requeued as often as the cluster allows; release it with `scontrol release JOBID`",
    "job requeued in held state": _HELD_TEXT,
    "launch failed requeued held": _HELD_AFTER_FAILURE,
    "launch failure limit exceeded requeued held": _HELD_AFTER_FAILURE,
    "partitiondown": "the job's partition is down; the job starts when an administrator sets the partition up again",
    "partitioninactive": "the job's partition is inactive; the job starts when an administrator activates the partition again",
    "partitionnodelimit": "the job asks for more or fewer nodes than its partition allows for a job, so the job will not start; cancel it, and change `resources.nodes`",
    "partitiontimelimit": "the job's time limit is longer than its partition allows, so the job will not start; cancel it, and lower `resources.time_limit_min`",
    "partitionconfig": "the job asks for more than its partition has, so the job will not start; cancel it, and ask for less or for another partition",
    "accountnotallowed": "the job's account may not use this partition, so the job will not start; cancel it, and submit with another `slurm.account` or `slurm.partition`",
    "qosnotallowed": "the job's QOS may not be used with this account or partition, so the job will not start; cancel it, and submit with another `slurm.qos`",
    "invalidaccount": "the job's account is not valid any more, so the job will not start; cancel it, and submit with another `slurm.account`",
    "invalidqos": "the job's QOS is not valid any more, so the job will not start; cancel it, and submit with another `slurm.qos`",
    "qosresourcelimit": "jobs of this job's QOS use all the resources that the QOS may use; this job starts when some of them end",
    "qosjoblimit": "as many jobs of this job's QOS run as the QOS allows; this job starts when one of them ends",
    "qostimelimit": "the job's QOS has used all the time that it was granted; submit with another `slurm.qos`, or ask your cluster's support",
    "qosusagethreshold": "the job's account has used more than this QOS allows; wait, or submit with another `slurm.qos`",
    "assocjoblimit": "as many jobs of this job's account run as the account allows; this job starts when one of them ends",
    "assocresourcelimit": "jobs of this job's account use all the resources that the account may use; this job starts when some of them end",
    "associationjoblimit": "as many jobs of this job's account run as the account allows; this job starts when one of them ends",
    "associationresourcelimit": "jobs of this job's account use all the resources that the account may use; this job starts when some of them end",
    "associationtimelimit": "the job's account has used all the time that it was granted; submit with another `slurm.account`, or ask your cluster's support",
    "badconstraints": "no node that the job may use has all that the job asks for, so it will not start; if it excludes nodes on which the run failed, allow them: `ddp-hpc requeue RUN --now`; else cancel it, and ask for less (`ddp-hpc config resources` lists the keys)",
    "constraints": "the nodes that match the job's constraints are in use or down; this job starts when enough are free",
    "reqnodenotavail": _NODE_MISSING_TEXT,
    "nodedown": _NODE_MISSING_TEXT,
    "nodes required for job are down, drained or reserved for jobs in higher priority partitions": (
        "the job waits for nodes that are down, drained, or kept for jobs of partitions with higher priority"
    ),
    "licenses": "the job waits for licenses that other jobs use",
    "reservation": "the job waits for its reservation to begin",
    "reservationdeleted": "the job's reservation was deleted, so the job will not start; cancel it, and submit without the reservation",
    "invalidbbf": "the job's burst buffer request is not valid; cancel it, and correct the request in `slurm.extra`",
    "burstbufferresources": "the job waits for space in the burst buffer",
    "burstbufferstagein": "the job waits until Slurm has copied its files to the burst buffer",
    "burstbufferstaging": "the job waits until Slurm has copied its files to the burst buffer",
    "frontenddown": "no front end node is up; the job starts when one is",
    "power": "the cluster is at its power limit; the job starts when other jobs end",
    "prolog": "the job waits for the cluster's prolog script, which prepares its nodes",
    "systemfailure": "Slurm, a file system or the network failed; submit again, or ask your cluster's support",
    "joblaunchfailure": "Slurm could not start the job, for instance because a path does not exist or a node does not answer; read `ddp-hpc logs RUN`, and submit again",
    "nonzeroexitcode": "the job script exited with an error; read `ddp-hpc logs RUN`, and submit again",
    "raisedsignal": "a signal killed the job; read `ddp-hpc logs RUN`, and submit again",
    "timelimit": "the job reached its time limit; if it has ended, submit again to continue",
    "inactivelimit": "the job was inactive for longer than the cluster allows; if it has ended, submit again to continue",
    "outofmemory": "the job used more memory than it asked for; raise `resources.mem_gb`, and submit again",
    "nodefail": "a node of the job failed; if the job has ended, submit again to continue",
    "deadline": "the job cannot end before its deadline (`--deadline`); submit again with a later one",
    "maxmemperlimit": "the job asks for more memory than the cluster allows, so the job will not start; cancel it, and lower `resources.mem_gb`",
    "maxmempercpu": "the job asks for more memory for each CPU than the cluster allows, so the job will not start; cancel it, and ask for less memory",
    "maxrequeueexceeded": "the job was requeued as often as the cluster allows; submit again",
    "waitingforscheduling": "the job waits until Slurm considers it for scheduling",
    "fedjoblock": "the job waits until the clusters of the federation have decided which of them starts it",
    "schedulinglimits": "Slurm has not considered the job yet, because others are before it in the queue; it does so later",
}
"""Slurm's reason code, in lower case and with spaces for underscores -> what it means.
https://slurm.schedmd.com/job_reason_codes.html"""

_LIMIT_PATTERN = re.compile(
    r"(?P<whose>qos|assoc|)(?P<kind>grp|max|min)(?P<what>[a-z]+?)(?P<each>per(?:user|job|node|account)|)(?:limit|notsatisfied|)",
    re.ASCII,
)
"""Limits come in a hundred combinations: `QOSMaxGRESPerUser`, `AssocGrpCPURunMinutesLimit`, `QOSMinCpuNotSatisfied`."""

_RESOURCES = {
    "runminutes": "time that running jobs may still use",
    "minutes": "time",
    "wall": "time",
    "submit": "jobs in the queue",
    "job": "running jobs",
    "gres": "GPUs",
    "node": "nodes",
    "cpu": "CPUs",
    "mem": "memory",
    "billing": "billing units",
    "lic": "licenses",
    "bb": "burst buffer space",
    "energy": "energy",
    "prio": "priority",
}
"""Part of a limit's code -> what it limits; the first part that the code contains counts."""
_JOB_RESOURCES = (_RESOURCES["submit"], _RESOURCES["job"])
"""Limits of numbers of jobs, which no job exceeds alone."""

_TEXT_BY_LIMIT = {
    "min": "the job asks for less than its {whose} requires of a job ({what}), so the job will not start; cancel it, and ask for more",
    "budget": "the job's {whose} has used all the time that it was granted; submit with another one, or ask your cluster's support",
    "grp": "all jobs of this job's {whose} together have reached the limit of {what}; this job starts when some of them end{unless}",
    "max perjob": "the job asks for more than its {whose} allows one job ({what}), so the job will not start; cancel it, and ask for less",
    "max pernode": "the job asks for more than its {whose} allows one job ({what} on a node), so the job will not start; cancel it, and ask for less",
    "max peraccount": "the jobs of this job's account have reached the {whose}'s limit of {what}; this job starts when some of them end{unless}",
    "max": "your jobs have reached the {whose}'s limit of {what}; this job starts when some of them end{unless}",
}
"""Kind of limit, and whom it is for -> what it means."""


def explain_reason(code: str) -> str:
    """Return why a job waits, in plain English; for a reason that we do not know, Slurm's code.

    Takes the code as squeue and scontrol write it: `Priority`, `(ReqNodeNotAvail, UnavailableNodes:node1)`.
    """
    plain = code.strip().removeprefix("(").removesuffix(")")
    key = plain.lower().replace("_", " ").strip()
    first, _, rest = plain.partition(",")
    words = _REASONS.get(key, _REASONS.get(first.lower().strip()))
    if words is None:
        return _explain_limit(key) or plain
    nodes = rest.partition("UnavailableNodes:")[2].strip()
    return f"{words}: {nodes}" if nodes else words


def why_never(code: str) -> str:
    """Return why a job will not start, by Slurm's reason code; empty where it may."""
    words = explain_reason(code)
    return words if "the job will not start" in words else ""


def is_held(code: str) -> bool:
    """Tell whether a job waits until a person releases it, so that Slurm's estimate of its start means nothing."""
    return any(words in explain_reason(code) for words in ("the job is held", "holds the job"))


def _explain_limit(key: str) -> str | None:
    """Return what a limit's code means, or None for other codes."""
    found = _LIMIT_PATTERN.fullmatch(key)
    if found is None:
        return None
    # `GrpWall`, too, limits the time that jobs have used, not the one that they ask for:
    # https://slurm.schedmd.com/resource_limits.html
    is_used_time = (found["what"].endswith("minutes") and "run" not in found["what"]) or "wall" in found["what"]
    is_budget = found["kind"] == "grp" and is_used_time
    kind = "budget" if is_budget else found["kind"]
    template = _TEXT_BY_LIMIT.get(f"{kind} {found['each']}", _TEXT_BY_LIMIT[kind])
    what = next((words for part, words in _RESOURCES.items() if part in found["what"]), "resources")
    unless = "" if what in _JOB_RESOURCES else ", unless it asks for more than that limit itself"
    return template.format(whose="account" if found["whose"] == "assoc" else "QOS", what=what, unless=unless)
