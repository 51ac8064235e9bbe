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
    "REVOKED": "cancelled",  # another cluster of the federation runs it
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


def phrase(state: str) -> str:
    """Return a state as a verb with the job as its subject: `was cancelled`, `ran out of host memory`."""
    return _PHRASES[parse_state(state)]


def has_ended(state: str) -> bool:
    """Tell whether a job in this state has ended. A state that we do not know counts as not ended."""
    return parse_state(state) in ENDED


_HELD = "it is held; release it with `scontrol release JOBID`"
_HELD_AFTER_FAILURE = (
    "Slurm holds it, because it could not launch it on a node, for instance because a prolog failed there; "
    "release it with `ddp-hpc requeue RUN --now` or `scontrol release JOBID`"
)
_NODE_MISSING = "a node it needs is down, drained or reserved, for instance for maintenance"

_REASONS: dict[str, str] = {
    "": "",
    "none": "",
    "null": "",
    "resources": "next in line: it waits for nodes to become free",
    "priority": "jobs with higher priority are ahead of it in the queue",
    "cleaning": "Slurm is still cleaning up after its previous start",
    "begintime": "its earliest start time has not come yet; after a requeue, Slurm waits a minute or two",
    "dependency": "a job it depends on has not ended yet",
    "dependencyneversatisfied": "a job that it depends on failed, so it will never start; cancel it, and submit again",
    "joblocked": "a job it depends on has not ended yet",
    "arraytasklimit": "as many tasks of the array run as its limit allows (`%` in `--array`)",
    "jobarraytasklimit": "as many tasks of the array run as its limit allows (`%` in `--array`)",
    "jobhelduser": _HELD,
    "jobheldadmin": "an administrator holds it; ask your cluster's support",
    "jobholdmaxrequeue": "Slurm holds it, because it was requeued as often as the cluster allows; release it with `scontrol release JOBID`",
    "job requeued in held state": _HELD,
    "launch failed requeued held": _HELD_AFTER_FAILURE,
    "launch failure limit exceeded requeued held": _HELD_AFTER_FAILURE,
    "partitiondown": "its partition is down; it starts when an administrator sets the partition up again",
    "partitioninactive": "its partition is inactive; it starts when an administrator activates the partition again",
    "partitionnodelimit": "it asks for more or fewer nodes than its partition allows for a job, so it will not start; cancel it, and change `resources.nodes`",
    "partitiontimelimit": "its time limit is longer than its partition allows, so it will not start; cancel it, and lower `resources.time_limit_min`",
    "partitionconfig": "it asks for more than its partition has, so it will not start; cancel it, and ask for less or for another partition",
    "accountnotallowed": "its account may not use this partition, so it will not start; cancel it, and submit with another `slurm.account` or `slurm.partition`",
    "qosnotallowed": "its QOS may not be used with this account or partition, so it will not start; cancel it, and submit with another `slurm.qos`",
    "invalidaccount": "its account is not valid any more, so it will not start; cancel it, and submit with another `slurm.account`",
    "invalidqos": "its QOS is not valid any more, so it will not start; cancel it, and submit with another `slurm.qos`",
    "qosresourcelimit": "jobs of its QOS use all the resources that the QOS may use; it starts when some of them end",
    "qosjoblimit": "as many jobs of its QOS run as the QOS allows; it starts when one of them ends",
    "qostimelimit": "its QOS has used all the time that it was granted; submit with another `slurm.qos`, or ask your cluster's support",
    "qosusagethreshold": "its account has used more than this QOS allows; wait, or submit with another `slurm.qos`",
    "assocjoblimit": "as many jobs of its account run as the account allows; it starts when one of them ends",
    "assocresourcelimit": "jobs of its account use all the resources that the account may use; it starts when some of them end",
    "associationjoblimit": "as many jobs of its account run as the account allows; it starts when one of them ends",
    "associationresourcelimit": "jobs of its account use all the resources that the account may use; it starts when some of them end",
    "associationtimelimit": "its account has used all the time that it was granted; submit with another `slurm.account`, or ask your cluster's support",
    "badconstraints": "no node has everything that it asks for, so it will not start; cancel it, and ask for less (`ddp-hpc config resources` lists the keys)",
    "constraints": "the nodes that match its constraints are in use or down; it starts when enough are free",
    "reqnodenotavail": _NODE_MISSING,
    "nodedown": _NODE_MISSING,
    "nodes required for job are down, drained or reserved for jobs in higher priority partitions": (
        "the nodes it could use are down, drained, or kept for jobs of partitions with higher priority"
    ),
    "licenses": "other jobs use the licenses that it asks for",
    "reservation": "its reservation has not begun yet",
    "reservationdeleted": "its reservation was deleted, so it will not start; cancel it, and submit without the reservation",
    "invalidbbf": "its burst buffer request is not valid; cancel it, and correct the request in `slurm.extra`",
    "burstbufferresources": "it waits for space in the burst buffer",
    "burstbufferstagein": "Slurm is copying its files to the burst buffer",
    "burstbufferstaging": "Slurm is copying its files to the burst buffer",
    "frontenddown": "no front end node is up; it starts when one is",
    "power": "the cluster is at its power limit; it starts when other jobs end",
    "prolog": "the cluster's prolog script is still preparing its nodes",
    "systemfailure": "Slurm, a file system or the network failed; submit again, or ask your cluster's support",
    "joblaunchfailure": "Slurm could not start it, for instance because a path does not exist or a node does not answer; read `ddp-hpc logs RUN`, and submit again",
    "nonzeroexitcode": "the job script exited with an error; read `ddp-hpc logs RUN`",
    "raisedsignal": "a signal killed it; read `ddp-hpc logs RUN`",
    "timelimit": "it reached its time limit",
    "inactivelimit": "it was inactive for longer than the cluster allows",
    "outofmemory": "it used more memory than it asked for; raise `resources.mem_gb`",
    "nodefail": "a node failed",
    "deadline": "it cannot end before its deadline (`--deadline`); submit again with a later one",
    "maxmemperlimit": "it asks for more memory than the cluster allows, so it will not start; cancel it, and lower `resources.mem_gb`",
    "maxmempercpu": "it asks for more memory for each CPU than the cluster allows, so it will not start; cancel it, and ask for less memory",
    "maxrequeueexceeded": "it was requeued as often as the cluster allows; submit again",
    "waitingforscheduling": "Slurm has not considered it for scheduling yet",
    "fedjoblock": "the clusters of the federation are deciding which of them starts it",
    "schedulinglimits": "Slurm has not reached it in the queue yet, and will try again",
}
"""Slurm's reason code, in lower case and with spaces for underscores -> what it means.
https://slurm.schedmd.com/job_reason_codes.html"""

_LIMIT = re.compile(
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
_JOBS = (_RESOURCES["submit"], _RESOURCES["job"])
"""Limits of numbers of jobs, which no job exceeds alone."""


_LIMITS = {
    (
        "min",
        "",
    ): "it asks for less than its {whose} requires of a job ({what}), so it will not start; cancel it, and ask for more",
    (
        "budget",
        "",
    ): "its {whose} has used all the time that it was granted; submit with another one, or ask your cluster's support",
    (
        "grp",
        "",
    ): "all jobs of its {whose} together have reached the limit of {what}; it starts when some of them end{unless}",
    (
        "max",
        "perjob",
    ): "it asks for more than its {whose} allows one job ({what}), so it will not start; cancel it, and ask for less",
    (
        "max",
        "pernode",
    ): "it asks for more than its {whose} allows one job ({what} on a node), so it will not start; cancel it, and ask for less",
    (
        "max",
        "peraccount",
    ): "the jobs of its account have reached the {whose}'s limit of {what}; it starts when some of them end{unless}",
    ("max", ""): "your jobs have reached the {whose}'s limit of {what}; it starts when some of them end{unless}",
}
"""(kind of limit, whom it is for) -> what it means."""


def explain_reason(code: str) -> str:
    """Return why a job waits, in plain English; for a reason that we do not know, Slurm's code.

    Takes the code as squeue and scontrol write it: `Priority`, `(ReqNodeNotAvail, UnavailableNodes:node1)`.
    """
    plain = code.strip()
    if plain.startswith("(") and plain.endswith(")"):
        plain = plain[1:-1]
    key = plain.lower().replace("_", " ").strip()
    first, _, rest = plain.partition(",")
    words = _REASONS.get(key, _REASONS.get(first.lower().strip()))
    if words is None:
        return _limit(key) or plain
    nodes = rest.partition("UnavailableNodes:")[2].strip()
    return f"{words}: {nodes}" if nodes else words


def _limit(key: str) -> str | None:
    """Return what a limit's code means, or None for other codes."""
    found = _LIMIT.fullmatch(key)
    if found is None:
        return None
    # `GrpWall`, too, limits the time that jobs have used, not the one that they ask for:
    # https://slurm.schedmd.com/resource_limits.html
    is_used_time = (found["what"].endswith("minutes") and "run" not in found["what"]) or "wall" in found["what"]
    is_budget = found["kind"] == "grp" and is_used_time
    kind = "budget" if is_budget else found["kind"]
    template = _LIMITS.get((kind, found["each"]), _LIMITS[kind, ""])
    what = next((words for part, words in _RESOURCES.items() if part in found["what"]), "resources")
    unless = "" if what in _JOBS else ", unless it asks for more than that limit itself"
    return template.format(whose="account" if found["whose"] == "assoc" else "QOS", what=what, unless=unless)
