"""Questions to Slurm and how to read the answers, as pairs: a command line and a parser. Pure.

Looked up on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_SEPARATOR = "\x1f"
"""The unit separator of ASCII, which no job's name or comment holds."""
_NOTHING = frozenset({"", "(null)", "N/A", "None", "NONE", "Unknown", "UNLIMITED", "INFINITE", "n/a"})

_QUEUE_FORMAT = ("%i", "%A", "%j", "%T", "%r", "%P", "%D", "%N", "%l", "%S")


@dataclass(frozen=True, kw_only=True)
class QueuedEntry:
    """A job that waits or runs, as squeue lists it."""

    job_id: str
    """`12`, or `14_3` for a task of an array."""
    number: str
    """The job's own number, which a task of an array has too."""
    name: str
    state: str
    reason: str
    partition: str
    num_nodes: int
    nodes: str
    """Slurm's compressed list; empty while it waits."""
    time_limit_min: float | None
    """None: without limit."""
    starts_at: float | None
    """Seconds since the epoch: an estimate while it waits, None where Slurm has none."""


def queue_argv(user: str) -> list[str]:
    """Ask for all jobs of a user that wait or run."""
    return ["squeue", "--noheader", f"--user={user}", f"--format={_SEPARATOR.join(_QUEUE_FORMAT)}"]


def parse_queue(text: str) -> list[QueuedEntry]:
    """Return the jobs, as listed."""
    rows = (line.split(_SEPARATOR) for line in text.splitlines() if line.count(_SEPARATOR) == len(_QUEUE_FORMAT) - 1)
    return [
        QueuedEntry(
            job_id=job_id,
            number=number,
            name=name,
            state=state,
            reason=reason,
            partition=partition,
            num_nodes=int(num_nodes),
            nodes="" if nodes in _NOTHING else nodes,
            time_limit_min=minutes(limit),
            starts_at=timestamp(start),
        )
        for job_id, number, name, state, reason, partition, num_nodes, nodes, limit, start in rows
    ]


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job, as scontrol or sacct tells of it."""

    job_id: str
    state: str
    reason: str = ""
    exit_code: str = ""
    """`code:signal`."""
    restarts: int | None = None
    nodes: str = ""
    starts_at: float | None = None
    ends_at: float | None = None


def job_argv(job_id: str) -> list[str]:
    """Ask the controller for one job; it remembers ended ones for some minutes (MinJobAge)."""
    return ["scontrol", "--oneliner", "show", "job", job_id]


def parse_job(text: str) -> JobRecord | None:
    """Return the job, of an array the first that is told."""
    fields = _fields(text.splitlines()[0]) if text.strip() else {}
    if "JobState" not in fields:
        return None
    return JobRecord(
        job_id=fields.get("JobId", ""),
        state=fields["JobState"],
        reason=_something(fields.get("Reason", "")),
        exit_code=fields.get("ExitCode", ""),
        restarts=int(fields["Restarts"]) if fields.get("Restarts", "").isdecimal() else None,
        nodes=_something(fields.get("NodeList", "")),
        starts_at=timestamp(fields.get("StartTime", "")),
        ends_at=timestamp(fields.get("EndTime", "")),
    )


_ACCOUNTING_FORMAT = ("JobID", "State", "ExitCode", "Start", "End", "NodeList", "Reason")


def accounting_argv(job_id: str) -> list[str]:
    """Ask the database for every start of a job."""
    options = ["--allocations", "--duplicates", "--parsable2", "--noheader"]
    return ["sacct", *options, f"--jobs={job_id}", f"--format={','.join(_ACCOUNTING_FORMAT)}"]


def parse_accounting(text: str) -> list[JobRecord]:
    """Return the starts, oldest first."""
    rows = (line.split("|") for line in text.splitlines() if line.count("|") >= len(_ACCOUNTING_FORMAT) - 1)
    return [
        JobRecord(
            job_id=row[0],
            state=row[1],
            exit_code=row[2],
            starts_at=timestamp(row[3]),
            ends_at=timestamp(row[4]),
            nodes=_something(row[5]),
            reason=_something(row[6]),
        )
        for row in rows
    ]


@dataclass(frozen=True)
class TestOnly:
    """What Slurm would do with a job."""

    starts_at: float | None = None
    refusal: str | None = None
    """What it said, where it would not take it."""

    __test__ = False  # no test, whatever its name


def test_only_argv(script: Path) -> list[str]:
    """Ask what would become of a script; nothing is submitted. The answer comes on the error output."""
    return ["sbatch", "--test-only", str(script)]


test_only_argv.__test__ = False  # type: ignore[attr-defined]  # pytest collects by name


def parse_test_only(returncode: int, stderr: str) -> TestOnly:
    """Return the estimate, or the refusal."""
    if returncode != 0:
        return TestOnly(refusal=stderr.strip())
    found = re.search(r"to start at (\S+)", stderr)
    return TestOnly(starts_at=timestamp(found[1]) if found else None)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What of slurm.conf matters to a run."""

    version: str = ""
    preempt_mode: str = ""
    job_requeue: bool = True
    """Whether jobs are put back into the queue unless they say otherwise."""
    sends_user_signal: bool = False
    """Whether a preempted job gets the signal of its `--signal` at once."""
    max_array_size: int | None = None
    kill_wait_s: int | None = None
    has_accounting: bool = False


def config_argv() -> list[str]:
    """Ask for the configuration."""
    return ["scontrol", "show", "config"]


def parse_config(text: str) -> ClusterConfig:
    """Return the keys that matter."""
    pairs = (line.partition("=") for line in text.splitlines())
    config = {key.strip(): value.strip() for key, separator, value in pairs if separator}
    parameters = f"{config.get('SlurmctldParameters', '')},{config.get('PreemptParameters', '')}".split(",")
    return ClusterConfig(
        version=config.get("SLURM_VERSION", ""),
        preempt_mode=config.get("PreemptMode", ""),
        job_requeue=config.get("JobRequeue", "1") != "0",
        sends_user_signal=any(one in {"preempt_send_user_signal", "send_user_signal"} for one in parameters),
        max_array_size=_integer(config.get("MaxArraySize", "")),
        kill_wait_s=_integer(config.get("KillWait", "").partition(" ")[0]),
        has_accounting=config.get("AccountingStorageType", "") not in {"", "accounting_storage/none", "(null)"},
    )


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A part of the cluster with rules of its own."""

    name: str
    is_default: bool
    is_up: bool
    total_nodes: int
    max_nodes: int | None
    max_time_min: float | None
    """None: without limit."""
    default_time_min: float | None
    """None: the longest."""
    preempt_mode: str
    grace_time_s: int
    num_gpus: int


def partitions_argv() -> list[str]:
    """Ask for all partitions."""
    return ["scontrol", "--oneliner", "show", "partition"]


def parse_partitions(text: str) -> list[Partition]:
    """Return the partitions, as listed."""
    rows = (_fields(line) for line in text.splitlines() if line.startswith("PartitionName="))
    return [
        Partition(
            name=row["PartitionName"],
            is_default=row.get("Default") == "YES",
            is_up=row.get("State") == "UP",
            total_nodes=_integer(row.get("TotalNodes", "")) or 0,
            max_nodes=_integer(row.get("MaxNodes", "")),
            max_time_min=minutes(row.get("MaxTime", "")),
            default_time_min=minutes(row.get("DefaultTime", "")),
            preempt_mode=_something(row.get("PreemptMode", "")),
            grace_time_s=_integer(row.get("GraceTime", "")) or 0,
            num_gpus=_num_gpus(row.get("TRES", "")),
        )
        for row in rows
    ]


def associations_argv(user: str) -> list[str]:
    """Ask which accounts a user may use, with which QOS."""
    return ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=account,qos"]


def parse_associations(text: str) -> list[str]:
    """Return `lab (QOS high, low)`, one an account."""
    rows = (line.split("|") for line in text.splitlines() if "|" in line)
    return [f"{account} (QOS {qos.replace(',', ', ')})" for account, qos, *_ in rows]


def minutes(text: str) -> float | None:
    """Return a duration of Slurm's in minutes: `10:00`, `1-02:03:04`, `30`; None for no limit.

    Alone, a number is of minutes; behind days, of hours (sbatch(1), `--time`).
    """
    if text in _NOTHING:
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":") if part.isdecimal()]
    if not parts or len(parts) != len(rest.split(":")):
        return None
    if dash:
        hours, mins, secs = (*parts, 0, 0)[:3]
    elif len(parts) == 1:
        hours, mins, secs = 0, parts[0], 0
    else:
        hours, mins, secs = (0, *parts)[-3:]
    return int(days or 0) * 1440 + hours * 60 + mins + secs / 60


def timestamp(text: str) -> float | None:
    """Return a time of Slurm's, in the clock of this host, in seconds since the epoch."""
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return None


def _fields(line: str) -> Mapping[str, str]:
    """Return `Key=value` pairs; a value runs to the next key, and may hold spaces and equals signs."""
    found = re.findall(r"(?:^|(?<= ))([A-Za-z][\w/:]*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", line)
    fields: dict[str, str] = {}
    for key, value in found:
        fields.setdefault(key, value.strip())  # what a comment holds comes later
    return fields


def _something(text: str) -> str:
    return "" if text in _NOTHING else text


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _num_gpus(tres: str) -> int:
    return sum(int(count) for count in re.findall(r"(?:^|,)gres/gpu=(\d+)", tres))


def queued(entries: Sequence[QueuedEntry], job_id: str) -> QueuedEntry | None:
    """Return a job of the list by its number."""
    return next((entry for entry in entries if job_id in {entry.number, entry.job_id}), None)
