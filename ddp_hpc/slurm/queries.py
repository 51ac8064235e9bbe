"""Questions to Slurm and how to read the answers, as pairs: a command line and a parser. Pure.

Looked up on Slurm 22.05 and 24.11, whose answers are alike. sacct of 22.05 has no `Restarts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.slurm.times import minutes, moment, seconds

_FIELD, _RECORD = "\x1f", "\x1e"
"""ASCII's separators of units and of records, which no name or comment holds; newlines they may hold."""
_NOTHING = frozenset({"", "(null)", "N/A", "None", "None assigned", "NONE", "Unknown", "UNLIMITED", "INFINITE", "n/a"})

_QUEUE_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "State",
    "Reason",
    "Partition",
    "NumNodes",
    "NodeList",
    "TimeLimit",
    "StartTime",
    "SubmitTime",
    "RestartCnt",
    "Name",
    "Comment",
)


@dataclass(frozen=True, kw_only=True)
class QueuedEntry:
    """A job that waits or runs, as squeue lists it."""

    job_id: str
    """`12`; `14_3` for a task of an array, and `14_[4-9%2]` for those that wait still."""
    number: str
    """The job's own number, which a task of an array has too."""
    name: str
    state: str
    reason: str
    """Why it waits; empty once it runs."""
    partition: str
    num_nodes: int
    nodes: str
    """Slurm's compressed list; empty while it waits."""
    time_limit_min: float | None
    """None: without limit."""
    starts_at: float | None
    """Seconds since the epoch: an estimate while it waits, None where Slurm has none."""
    submitted_at: float | None = None
    restarts: int = 0
    comment: str = ""


def queue_argv(user: str) -> list[str]:
    """Ask for all jobs of a user that wait or run."""
    asked = f"{_FIELD},".join(f"{name}:" for name in _QUEUE_FIELDS) + _RECORD
    return ["squeue", "--noheader", "--noconvert", f"--user={user}", f"--Format={asked}"]


def parse_queue(text: str) -> list[QueuedEntry]:
    """Return the jobs, as listed."""
    records = (record.lstrip("\n").split(_FIELD) for record in text.split(_RECORD))
    rows = (
        dict(zip(_QUEUE_FIELDS, map(str.strip, record), strict=True))
        for record in records
        if len(record) == len(_QUEUE_FIELDS)
    )
    return [_queued_entry(row) for row in rows]


def _queued_entry(row: Mapping[str, str]) -> QueuedEntry:
    task = row["ArrayTaskID"]
    task_id = f"{row['ArrayJobID']}_{task if task.isdecimal() else f'[{task}]'}"
    return QueuedEntry(
        job_id=task_id if _something(task) else row["JobID"],
        number=row["JobID"],
        name=row["Name"],
        state=row["State"],
        reason=_something(row["Reason"]),
        partition=row["Partition"],
        num_nodes=_integer(row["NumNodes"]) or 0,
        nodes=_something(row["NodeList"]),
        time_limit_min=minutes(row["TimeLimit"]),
        starts_at=moment(row["StartTime"]),
        submitted_at=moment(row["SubmitTime"]),
        restarts=_integer(row["RestartCnt"]) or 0,
        comment=_something(row["Comment"]),
    )


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job, as scontrol or sacct tells of it."""

    job_id: str
    """The job's own number, which a task of an array has too."""
    state: str
    reason: str = ""
    exit_code: str = ""
    """`code:signal`."""
    restarts: int | None = None
    """None where only the database knows the job: each start is a record of its own there."""
    partition: str = ""
    """Where it runs; of one that waits, all where it may."""
    nodes: str = ""
    batch_host: str = ""
    time_limit_min: float | None = None
    submitted_at: float | None = None
    starts_at: float | None = None
    eligible_at: float | None = None
    """From when on it may begin."""
    ends_at: float | None = None
    """When it ended, or will at its time limit."""
    elapsed_s: int | None = None
    preempted_at: float | None = None
    """When Slurm began to take its nodes away; told from the first signal on, while the job still runs."""
    excluded_nodes: str = ""
    """Slurm's compressed list."""


def job_argv(job_id: str) -> list[str]:
    """Ask the controller for one job; it remembers ended ones for some minutes (MinJobAge)."""
    return ["scontrol", "--oneliner", "show", "job", job_id]


def parse_job(text: str) -> JobRecord | None:
    """Return the job, of an array the first that is told.

    Only what stands between the user and the command is read: before it is the job's name, behind it the command and
    the comment, which may hold anything, also newlines and what looks like a field.
    """
    number = re.match(r"JobId=(\d+)", text, re.ASCII)
    told = re.search(r" UserId=.*?(?= Command=| WorkDir=|$)", text)
    fields = _fields(told[0]) if told else {}
    if number is None or "JobState" not in fields:
        return None
    return JobRecord(
        job_id=number[1],
        state=fields["JobState"],
        reason=_something(fields.get("Reason", "")),
        exit_code=fields.get("ExitCode", ""),
        restarts=_integer(fields.get("Restarts", "")),
        partition=_something(fields.get("Partition", "")),
        nodes=_something(fields.get("NodeList", "")),
        batch_host=_something(fields.get("BatchHost", "")),
        time_limit_min=minutes(fields.get("TimeLimit", "")),
        submitted_at=moment(fields.get("SubmitTime", "")),
        starts_at=moment(fields.get("StartTime", "")),
        eligible_at=moment(fields.get("EligibleTime", "")),
        ends_at=moment(fields.get("EndTime", "")),
        elapsed_s=seconds(fields.get("RunTime", "")),
        preempted_at=moment(fields.get("PreemptTime", "")),
        excluded_nodes=_something(fields.get("ExcNodeList", "")),
    )


_ACCOUNTING_FIELDS = (
    "JobIDRaw",
    "State",
    "ExitCode",
    "Submit",
    "Start",
    "End",
    "ElapsedRaw",
    "Timelimit",
    "NodeList",
    "Reason",
)


def accounting_argv(job_ids: Sequence[str]) -> list[str]:
    """Ask the database for every start of some jobs."""
    options = ["--allocations", "--duplicates", "--parsable2", "--noheader", f"--delimiter={_FIELD}"]
    return ["sacct", *options, f"--jobs={','.join(job_ids)}", f"--format={','.join(_ACCOUNTING_FIELDS)}"]


def parse_accounting(text: str) -> list[JobRecord]:
    """Return the starts, oldest first. A requeued job is submitted anew in the database's eyes."""
    lines = (line.split(_FIELD) for line in text.splitlines())
    rows = (dict(zip(_ACCOUNTING_FIELDS, line, strict=True)) for line in lines if len(line) == len(_ACCOUNTING_FIELDS))
    records = [
        JobRecord(
            job_id=row["JobIDRaw"],
            state=row["State"],
            reason=_something(row["Reason"]),
            exit_code=row["ExitCode"],
            nodes=_something(row["NodeList"]),
            time_limit_min=minutes(row["Timelimit"]),
            submitted_at=moment(row["Submit"]),
            starts_at=moment(row["Start"]),
            ends_at=moment(row["End"]),
            elapsed_s=_integer(row["ElapsedRaw"]),
        )
        for row in rows
    ]
    return sorted(records, key=lambda record: record.submitted_at or 0.0)


@dataclass(frozen=True)
class TestOnly:
    """What Slurm would do with a job."""

    starts_at: float | None = None
    """Centuries ahead where jobs without a limit are before it."""
    refusal: str | None = None
    """What it said, where it would not take it."""
    num_cpus: int | None = None
    nodes: str = ""
    partition: str = ""

    __test__ = False  # no test, whatever its name


def test_only_argv(script: Path) -> list[str]:
    """Ask what would become of a script; nothing is submitted. The answer comes on the error output."""
    return ["sbatch", "--test-only", str(script)]


test_only_argv.__test__ = False  # type: ignore[attr-defined]  # pytest collects by name

_ESTIMATE = re.compile(
    r"to start at (?P<start>\S+)"
    r"(?: using (?P<cpus>\d+) processors)?(?: on nodes (?P<nodes>\S+))?(?: in partition (?P<partition>\S+))?"
)


def parse_test_only(returncode: int, stderr: str) -> TestOnly:
    """Return the estimate, or the refusal."""
    if returncode != 0:
        return TestOnly(refusal=stderr.strip())
    found = _ESTIMATE.search(stderr)
    if found is None:
        return TestOnly()
    return TestOnly(
        starts_at=moment(found["start"]),
        num_cpus=_integer(found["cpus"] or ""),
        nodes=_something(found["nodes"] or ""),
        partition=found["partition"] or "",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What of slurm.conf matters to a run."""

    version: str = ""
    name: str = ""
    preempt_mode: str = ""
    preempt_type: str = ""
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
    """Return the keys that matter. Slurm does not tell upper from lower case in them."""
    pairs = (line.partition("=") for line in text.splitlines())
    config = {key.strip().lower(): _something(value.strip()) for key, separator, value in pairs if separator}
    parameters = f"{config.get('slurmctldparameters', '')},{config.get('preemptparameters', '')}".lower()
    return ClusterConfig(
        version=config.get("slurm_version", ""),
        name=config.get("clustername", ""),
        preempt_mode=config.get("preemptmode", ""),
        preempt_type=config.get("preempttype", ""),
        job_requeue=config.get("jobrequeue", "1") != "0",
        sends_user_signal=not {"preempt_send_user_signal", "send_user_signal"}.isdisjoint(parameters.split(",")),
        max_array_size=_integer(config.get("maxarraysize", "")),
        kill_wait_s=_integer(config.get("killwait", "").partition(" ")[0]),
        has_accounting=config.get("accountingstoragetype", "") not in {"", "accounting_storage/none"},
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
    """Zero also where the cluster does not count them (AccountingStorageTRES)."""
    allow_accounts: tuple[str, ...] | None = None
    """None: all."""
    allow_qos: tuple[str, ...] | None = None
    """None: all."""


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
            allow_accounts=_allowed(row.get("AllowAccounts", "ALL")),
            allow_qos=_allowed(row.get("AllowQos", "ALL")),
        )
        for row in rows
    ]


def _allowed(text: str) -> tuple[str, ...] | None:
    return None if text == "ALL" else tuple(text.split(","))


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """Nodes of a partition that are alike."""

    partition: str
    num_nodes: int
    num_cpus: int
    """Of each node."""
    mem_mb: int
    num_gpus: int
    gpu_type: str | None = None
    """As `--gres=gpu:TYPE` wants it."""


def shapes_argv() -> list[str]:
    """Ask what the nodes of each partition have."""
    return ["sinfo", "--noheader", "--format=%R|%D|%c|%m|%G"]


def parse_shapes(text: str) -> list[NodeShape]:
    """Return a row for each kind of node in each partition; of `64+`, the least."""
    rows = (line.split("|") for line in text.splitlines() if line.count("|") == 4)
    return [
        NodeShape(
            partition=partition,
            num_nodes=_integer(number) or 0,
            num_cpus=_integer(cpus.rstrip("+")) or 0,
            mem_mb=_integer(memory.rstrip("+")) or 0,
            num_gpus=sum(int(count) for _, count in _GPUS.findall(gres)),
            gpu_type=next((kind for kind, _ in _GPUS.findall(gres) if kind), None),
        )
        for partition, number, cpus, memory, gres in rows
    ]


_GPUS = re.compile(r"(?:^|,)gpu:(?:([^:,(]*[^:,(0-9][^:,(]*):)?(\d+)")
"""`gpu:4`, `gpu:a100:4(S:0-1)`; of several types, all."""


def associations_argv(user: str) -> list[str]:
    """Ask which accounts a user may use, with which QOS."""
    return ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=account,qos"]


def parse_associations(text: str) -> list[str]:
    """Return `lab (QOS high, low)`, one an account."""
    rows = (line.split("|") for line in text.splitlines() if "|" in line)
    return [f"{account} (QOS {qos.replace(',', ', ')})" for account, qos, *_ in rows]


def requeue_argv(job_id: str) -> list[str]:
    """Put a job back into the queue, under its number; its processes are ended."""
    return ["scontrol", "requeue", job_id]


def update_argv(job_id: str, **values: str) -> list[str]:
    """Change fields of a job, by scontrol's names (`StartTime="now"`)."""
    return ["scontrol", "update", f"JobId={job_id}", *(f"{key}={value}" for key, value in values.items())]


def signal_argv(job_id: str, signal_name: str, *, batch_only: bool = False) -> list[str]:
    """Send a signal to all steps of a job, or to its batch shell alone."""
    return ["scancel", f"--signal={signal_name}", *(["--batch"] if batch_only else []), job_id]


def beside_argv(job_id: str, node: str, command: Sequence[str]) -> list[str]:
    """Run a command on a node of a job, beside the steps that are there."""
    where = [f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1"]
    return ["srun", *where, "--overlap", "--quiet", "--input=none", *command]


def submit_argv(script: Path, options: Sequence[str] = ()) -> list[str]:
    """Submit a script; options win over its own. The answer is the job's number alone."""
    return ["sbatch", "--parsable", *options, str(script)]


def parse_submitted(text: str) -> str:
    """Return the job's number from `12` or `12;cluster`, the last such line: a site's wrapper of sbatch may greet before."""
    lines = re.findall(r"^(\d+)(?:;.*)?$", text, re.MULTILINE | re.ASCII)
    return lines[-1] if lines else text.strip().split(";")[0]


def nodes_argv(nodes: Sequence[str] = (), *, partition: str | None = None) -> list[str]:
    """Ask for the states of some nodes, or of all of a partition."""
    options = [f"--nodes={','.join(nodes)}"] if nodes else []
    options += [f"--partition={partition}"] if partition else []
    return ["sinfo", "--Node", "--noheader", *options, "--format=%N %T"]


def parse_nodes(text: str) -> dict[str, str]:
    """Return each node's state in Slurm's word; `*` at its end means that the node does not answer."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def is_lost(node_state: str) -> bool:
    """Tell whether a node in this state can run nothing: it is down, or has not answered for a while."""
    state = node_state.lower()
    return state.endswith("*") or state.startswith(("down", "fail", "power", "reboot", "unk"))


def takes_jobs(node_state: str) -> bool:
    """Tell whether a node in this state may be given jobs now or later: it is neither lost nor drained."""
    return not is_lost(node_state) and not node_state.lower().startswith("drain")


ESLURM_ACCESS_DENIED = "ESLURM_ACCESS_DENIED"
_REFUSALS: Mapping[str, str] = {"access/permission denied": ESLURM_ACCESS_DENIED}
"""What Slurm's commands print for a number of slurm_errno.h (they print no numbers) -> the number's name."""


def refusal_code(text: str) -> str:
    """Return the name of the refusal that a command's errors tell of; empty for one that nobody decides by."""
    return next((code for words, code in _REFUSALS.items() if words in text.lower()), "")


def release_argv(job_id: str) -> list[str]:
    """Let a held job go on."""
    return ["scontrol", "release", job_id]


def steps_argv(job_id: str) -> list[str]:
    """Ask for the steps of a job that run."""
    return ["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"]


def parse_steps(text: str) -> list[str]:
    """Return the numbers of the steps that srun has started, as `12.0`; its batch script is none, nor what watches it."""
    return [line.strip() for line in text.splitlines() if line.strip().rpartition(".")[2].isdecimal()]


def cancel_argv(job_id: str) -> list[str]:
    """Take a job out of the queue, or end it. Slurm does not mind one that it does not know."""
    return ["scancel", job_id]


def _fields(line: str) -> Mapping[str, str]:
    """Return `Key=value` pairs; a value runs to the next key, and may hold spaces and equals signs."""
    found = re.findall(r"(?:^|(?<= ))([A-Za-z][\w/:]*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", line)
    return {key: value.strip() for key, value in found}


def _something(text: str) -> str:
    return "" if text in _NOTHING else text


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _num_gpus(tres: str) -> int:
    """Return `gres/gpu=8`; where only types are counted, `gres/gpu:a100=4`, their sum."""
    counts = [found.groups() for found in re.finditer(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d+)", tres)]
    return next((int(count) for kind, count in counts if not kind), sum(int(count) for _, count in counts))
