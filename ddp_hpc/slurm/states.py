"""What Slurm's states and reasons mean: our words for a job's state, sentences for why it waits."""

from __future__ import annotations

import re
from typing import Literal

State = Literal[
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
"""`requeued`: this start of the job is over, and the job waits for another. `unknown`: a state we have no word for."""

ENDED: frozenset[State] = frozenset(
    {"completed", "failed", "cancelled", "preempted", "timeout", "node_fail", "out_of_memory"}
)
"""The job will not run again by itself."""

_WORDS: dict[str, State] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",  # it has nodes, and they boot
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
    "REVOKED": "cancelled",  # another cluster of the federation has it
    "PREEMPTED": "preempted",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "OUT_OF_MEMORY": "out_of_memory",
}
"""https://slurm.schedmd.com/job_state_codes.html"""

_PHRASES: dict[State, str] = {
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
    "out_of_memory": "ran out of memory",
    "unknown": "is in a state unknown to ddp_hpc",
}


def word(state: str) -> State:
    """Return our word for a state as Slurm writes it: `CANCELLED by 1000`, `OUT_OF_ME+`, `RUNNING*`."""
    code = state.split(maxsplit=1)[0].upper() if state.strip() else ""
    if code.endswith("+"):  # sacct cut it at the column's width
        meant = {_WORDS[known] for known in _WORDS if known.startswith(code[:-1])}
        return meant.pop() if len(meant) == 1 else "unknown"
    return _WORDS.get(code.rstrip("*"), "unknown")


def phrase(state: str) -> str:
    """Return what to say behind a job's name: `was cancelled`, `ran out of memory`."""
    return _PHRASES[word(state)]


def has_ended(state: str) -> bool:
    """Tell whether Slurm has no more plans for a job in this state. A state we do not know has not ended."""
    return word(state) in ENDED


_HELD = "held; `scontrol release` lets it go on"
_HELD_AFTER_FAILURE = (
    "held by Slurm, which could not launch it on a node, for instance because a prolog failed there; "
    "`ddp-hpc requeue RUN --now` or `scontrol release` lets it go on"
)
_NODE_MISSING = "a node it needs is down, drained or reserved, for instance for maintenance"

_REASONS: dict[str, str] = {
    "": "",
    "none": "",
    "null": "",
    "resources": "next in line: it waits for nodes to become free",
    "priority": "jobs of higher priority are before it",
    "cleaning": "its last start is still being cleaned up",
    "begintime": "its earliest time to start has not come; after a requeue that is a minute or two",
    "dependency": "a job it depends on has not ended yet",
    "dependencyneversatisfied": "a job it depends on failed, so it will never start; cancel it",
    "joblocked": "a job it depends on has not ended yet",
    "arraytasklimit": "the array's limit of tasks at a time (`%` in `--array`) is reached",
    "jobarraytasklimit": "the array's limit of tasks at a time (`%` in `--array`) is reached",
    "jobhelduser": _HELD,
    "jobheldadmin": "held by an administrator; ask them",
    "jobholdmaxrequeue": "requeued as often as the cluster allows, and held; `scontrol release` lets it go on",
    "job requeued in held state": _HELD,
    "launch failed requeued held": _HELD_AFTER_FAILURE,
    "launch failure limit exceeded requeued held": _HELD_AFTER_FAILURE,
    "partitiondown": "its partition is closed for starts",
    "partitioninactive": "its partition takes no jobs",
    "partitionnodelimit": "it asks for more or fewer nodes than its partition allows a job, so it will not start",
    "partitiontimelimit": "its time limit is longer than its partition allows, so it will not start",
    "partitionconfig": "it asks for more than its partition can give, so it will not start",
    "accountnotallowed": "its account may not use this partition, so it will not start",
    "qosnotallowed": "its QOS may not be used with this account or partition, so it will not start",
    "invalidaccount": "its account is not valid any more, so it will not start",
    "invalidqos": "its QOS is not valid any more, so it will not start",
    "qosresourcelimit": "its QOS is at its limit of resources",
    "qosjoblimit": "its QOS is at its limit of jobs",
    "qostimelimit": "its QOS is at its limit of time",
    "qosusagethreshold": "its account has used too much for this QOS",
    "assocjoblimit": "its account is at its limit of jobs",
    "assocresourcelimit": "its account is at its limit of resources",
    "associationjoblimit": "its account is at its limit of jobs",
    "associationresourcelimit": "its account is at its limit of resources",
    "associationtimelimit": "its account is at its limit of time",
    "badconstraints": "no node can ever have all it asks for; change the request",
    "constraints": "nodes with what it asks for are not available",
    "reqnodenotavail": _NODE_MISSING,
    "nodedown": _NODE_MISSING,
    "nodes required for job are down, drained or reserved for jobs in higher priority partitions": (
        "the nodes it could use are down, drained, or kept for jobs of partitions with higher priority"
    ),
    "licenses": "licenses it asks for are in use",
    "reservation": "its reservation has not begun",
    "reservationdeleted": "its reservation was deleted, so it will not start",
    "invalidbbf": "its burst buffer request is not valid",
    "burstbufferresources": "it waits for space in the burst buffer",
    "burstbufferstagein": "its files are being copied to the burst buffer",
    "burstbufferstaging": "its files are being copied to the burst buffer",
    "frontenddown": "no front end node is available",
    "power": "it would use more power than the cluster may now",
    "prolog": "the nodes are being prepared",
    "systemfailure": "Slurm itself, a file system or the network failed",
    "joblaunchfailure": "it could not be started: a bad path, or a node that does not answer",
    "nonzeroexitcode": "its script ended with an error",
    "raisedsignal": "a signal ended it",
    "timelimit": "it reached its time limit",
    "inactivelimit": "it was silent for longer than the cluster allows",
    "outofmemory": "it ran out of memory",
    "nodefail": "a node failed",
    "deadline": "it could not end before its deadline",
    "maxmemperlimit": "it asks for more memory than the cluster allows, so it will not start",
    "maxmempercpu": "it asks for more memory a CPU than the cluster allows, so it will not start",
    "maxrequeueexceeded": "requeued as often as the cluster allows",
    "waitingforscheduling": "Slurm has not looked at it yet",
    "fedjoblock": "clusters of the federation agree on who starts it",
    "schedulinglimits": "Slurm did not look further down the queue; it will",
}
"""Slurm's code, lower case and blanks for underscores -> our words.
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
"""Part of a limit's code -> what is limited; the first that is found in it."""


_LIMITS = {
    ("min", ""): "it asks for less than its {whose} demands of a job ({what}), so it will not start",
    ("budget", ""): "the time that its {whose} may use is spent",
    ("grp", ""): "all jobs of its {whose} together are at their limit: {what}",
    ("max", "perjob"): "it asks for more than its {whose} allows one job ({what}), so it will not start",
    ("max", "pernode"): "it asks for more than its {whose} allows one job ({what} on a node), so it will not start",
    ("max", "peraccount"): "its account is at the {whose}'s limit: {what}",
    ("max", ""): "your jobs are at the {whose}'s limit: {what}",
}
"""Kind of a limit, and for each what it holds -> our words."""


def reason(code: str) -> str:
    """Return why a job waits, in words to set behind its name; the code itself where we have none.

    Takes it as squeue and scontrol write it: `Priority`, `(ReqNodeNotAvail, UnavailableNodes:node1)`.
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
    """Return what a code about a limit means, or None where it is no such code."""
    found = _LIMIT.fullmatch(key)
    if found is None:
        return None
    is_budget = found["kind"] == "grp" and found["what"].endswith("minutes") and "run" not in found["what"]
    kind = "budget" if is_budget else found["kind"]
    template = _LIMITS.get((kind, found["each"]), _LIMITS[kind, ""])
    what = next((words for part, words in _RESOURCES.items() if part in found["what"]), "resources")
    return template.format(whose="account" if found["whose"] == "assoc" else "QOS", what=what)
