"""Slurm's questions in pairs: a function that returns the command line, and one that parses the output. Pure.

Without `--all`, squeue and sinfo leave out partitions that are hidden (`Hidden=YES`), and all jobs in them, also a user's own.

Checked on Slurm 22.05, 24.11 and 26.05, which print the same. What is not of Slurm's format is left out: a site's wrapper prints it. sacct of 22.05 has no field `Restarts`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.slurm_times import parse_minutes, parse_seconds, parse_time

_FIELD, _RECORD = "\x1f", "\x1e"
"""The unit and record separators of ASCII. Paths and reasons may hold line breaks, but hardly these."""
_EMPTY = frozenset({"", "(null)", "N/A", "None", "None assigned", "NONE", "Unknown", "UNLIMITED", "INFINITE", "n/a"})

_QUEUE_FIELDS = ("JobID", "ArrayJobID", "ArrayTaskID", "State", "Reason", "StartTime")


@dataclass(frozen=True, kw_only=True)
class QueuedEntry:
    """A pending or running job, as squeue lists it."""

    job_id: str
    """`12`; `14_3` for a task of an array; `14_[4-9%2]` for the tasks of an array that are still pending."""
    number: str
    """The job id as one number; each task of an array has its own."""
    state: str
    reason: str
    """Why it is pending; empty once it runs."""
    starts_at: float | None
    """Seconds since the epoch. While the job is pending: Slurm's estimate, or None."""


def queue_argv(user: str) -> list[str]:
    """List all pending and running jobs of a user."""
    asked = f"{_FIELD},".join(f"{name}:" for name in _QUEUE_FIELDS) + _RECORD
    return ["squeue", "--all", "--noheader", "--noconvert", f"--user={user}", f"--Format={asked}"]


def parse_queue(text: str) -> list[QueuedEntry]:
    """Return the jobs, as listed."""
    return [
        QueuedEntry(
            job_id=f"{array}_{task if task.isdecimal() else f'[{task}]'}" if _or_empty(task) else number,
            number=number,
            state=state,
            reason=_or_empty(reason),
            starts_at=parse_time(start),
        )
        for number, array, task, state, reason, start in _rows(text, len(_QUEUE_FIELDS))
    ]


def _rows(text: str, num_fields: int) -> Iterator[list[str]]:
    """Yield the records that have so many fields. The first is one word (a job, a node): a site's wrapper may print text before it."""
    for record in text.split(_RECORD):
        fields = [field.strip() for field in record.split(_FIELD)]
        if len(fields) == num_fields:
            yield [(fields[0].split() or [""])[-1], *fields[1:]]


def _line_fields(text: str, separator: str, num_fields: int) -> Iterator[list[str]]:
    """Yield the lines that have so many fields."""
    return (line.split(separator) for line in text.splitlines() if line.count(separator) + 1 == num_fields)


def job_scripts_argv(user: str) -> list[str]:
    """List the job scripts of all pending and running jobs of a user."""
    return ["squeue", "--all", "--noheader", f"--user={user}", f"--Format=ArrayJobID:{_FIELD},Command:{_RECORD}"]


def parse_job_scripts(text: str) -> dict[str, str]:
    """Return for the number of a job, or of the array that a task belongs to, its script, with arguments before Slurm 26.05."""
    return dict(_rows(text, 2))


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job, as scontrol or sacct describes it."""

    job_id: str
    """The job id as one number; each task of an array has its own."""
    state: str
    reason: str = ""
    restarts: int | None = None
    """None for a record of the database, which has one record for each start of the job."""
    partition: str = ""
    """Where the job runs; for a pending job, all partitions that it may run in."""
    account: str = ""
    qos: str = ""
    nodes: str = ""
    time_limit_min: float | None = None
    eligible_at: float | None = None
    """The earliest time at which Slurm may start it."""
    ends_at: float | None = None
    """When it ended, or when its time limit will end it."""
    preempted_at: float | None = None
    """When Slurm began to preempt it: known from Slurm's first signal on, while the job still runs."""
    excluded_nodes: str = ""
    """Slurm's compressed list."""


def job_argv(job_id: str) -> list[str]:
    """Ask the controller for one job."""
    # The controller remembers ended jobs for some minutes: https://slurm.schedmd.com/slurm.conf.html#OPT_MinJobAge
    return ["scontrol", "--oneliner", "show", "job", job_id]


def parse_job(text: str) -> JobRecord | None:
    """Return the job; for an array, its first task in the output."""
    # A site's wrapper may print lines before the answer. Only the part from UserId to Command is safe to parse. The job's name stands before it, the command and the comment
    # after it; these three may hold any text, also line breaks and what looks like a field.
    number = re.search(r"^JobId=(\d+) ", text, re.ASCII | re.MULTILINE)
    safe = re.search(r" UserId=.*?(?= Command=| WorkDir=|$)", text[number.start() :]) if number else None
    fields = _fields(safe[0]) if safe else {}
    if number is None or "JobState" not in fields:
        return None
    return JobRecord(
        job_id=number[1],
        state=fields["JobState"],
        reason=_or_empty(fields.get("Reason", "")),
        restarts=_integer(fields.get("Restarts", "")),
        partition=_or_empty(fields.get("Partition", "")),
        account=_or_empty(fields.get("Account", "")),
        qos=_or_empty(fields.get("QOS", "")),
        nodes=_or_empty(fields.get("NodeList", "")),
        time_limit_min=parse_minutes(fields.get("TimeLimit", "")),
        eligible_at=parse_time(fields.get("EligibleTime", "")),
        ends_at=parse_time(fields.get("EndTime", "")),
        preempted_at=parse_time(fields.get("PreemptTime", "")),
        excluded_nodes=_or_empty(fields.get("ExcNodeList", "")),
    )


_ACCOUNTING_FIELDS = ("JobIDRaw", "State", "Submit", "End", "Timelimit", "NodeList", "Reason")


def accounting_argv(job_ids: Sequence[str]) -> list[str]:
    """Ask the accounting database for every start of some jobs."""
    # Without --duplicates, sacct shows only the newest start of a job that was requeued:
    # https://slurm.schedmd.com/sacct.html#OPT_duplicates
    options = ["--allocations", "--duplicates", "--parsable2", "--noheader", f"--delimiter={_FIELD}"]
    return ["sacct", *options, f"--jobs={','.join(job_ids)}", f"--format={','.join(_ACCOUNTING_FIELDS)}"]


def parse_accounting(text: str) -> list[JobRecord]:
    """Return the starts, oldest first. The database counts a requeue as a new submission."""
    rows = _line_fields(text, _FIELD, len(_ACCOUNTING_FIELDS))
    return [
        JobRecord(
            job_id=number,
            state=state,
            reason=_or_empty(reason),
            nodes=_or_empty(nodes),
            time_limit_min=parse_minutes(limit),
            ends_at=parse_time(end),
        )
        for number, state, _, end, limit, nodes, reason in sorted(rows, key=lambda row: parse_time(row[2]) or 0.0)
    ]


NEVER_S = 180 * 86400.0
"""With jobs before it that may run for ever, Slurm's estimates are years ahead."""


@dataclass(frozen=True)
class Estimate:
    """What Slurm would do with a job."""

    starts_at: float | None = None
    """May be centuries ahead, if jobs without a time limit are ahead in the queue."""
    refusal: str | None = None
    """What Slurm printed, if it refuses the job."""
    nodes: str = ""


_ESTIMATE = re.compile(r"to start at (?P<start>\S+)(?: using \d+ processors)?(?: on nodes (?P<nodes>\S+))?")


def parse_test_only(returncode: int, stderr: str) -> Estimate:
    """Return when and where the job would start, or why Slurm refuses it."""
    if returncode != 0:
        return Estimate(refusal=stderr.strip())
    found = _ESTIMATE.search(stderr)
    if found is None:
        return Estimate()
    return Estimate(starts_at=parse_time(found["start"]), nodes=_or_empty(found["nodes"] or ""))


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The parts of slurm.conf that matter to a run."""

    version: str = ""
    name: str = ""
    preempt_mode: str = ""
    preempt_type: str = ""
    """`preempt/none` where there is no preemption; empty where Slurm does not say."""
    job_requeue: bool = True
    """Whether Slurm requeues jobs by default (JobRequeue)."""
    sends_user_signal: bool = False
    """Whether Slurm sends a preempted job the signal of its `--signal` at once."""
    max_array_size: int | None = None
    kill_wait_s: int | None = None
    has_accounting: bool = False


def parse_ping(text: str) -> bool | None:
    """Tell whether one of the controllers is up; None where the text does not say."""
    states = re.findall(r"^Slurmctld\b.* (UP|DOWN)\s*$", text, re.MULTILINE)
    return "UP" in states if states else None


CONFIG_ARGV = ("scontrol", "show", "config")
"""Ask the controller for its configuration."""


def parse_config(text: str) -> ClusterConfig:
    """Return the keys that matter. Their case does not matter in Slurm."""
    pairs = (line.partition("=") for line in text.splitlines())
    config = {key.strip().lower(): _or_empty(value.strip()) for key, separator, value in pairs if separator}
    parameters = f"{config.get('slurmctldparameters', '')},{config.get('preemptparameters', '')}".lower()
    return ClusterConfig(
        version=config.get("slurm_version", ""),
        name=config.get("clustername", ""),
        preempt_mode=config.get("preemptmode", ""),
        # Since Slurm 25.05, there is no plugin for none: it prints `(null)`.
        preempt_type=config.get("preempttype", "") or ("preempt/none" if "preempttype" in config else ""),
        job_requeue=config.get("jobrequeue", "1") != "0",
        sends_user_signal=not {"preempt_send_user_signal", "send_user_signal"}.isdisjoint(parameters.split(",")),
        max_array_size=_integer(config.get("maxarraysize", "")),
        kill_wait_s=_integer(config.get("killwait", "").partition(" ")[0]),
        has_accounting=config.get("accountingstoragetype", "") not in {"", "accounting_storage/none"},
    )


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition of the cluster, and its limits."""

    name: str
    is_default: bool
    is_up: bool
    total_nodes: int
    max_time_min: float | None
    """None: no limit."""
    default_time_min: float | None
    """None: the partition's maximum."""
    preempt_mode: str
    grace_time_s: int
    priority_tier: int = 1
    """Jobs of a higher tier may preempt those of a lower one (`PreemptType=preempt/partition_prio`)."""
    num_gpus: int
    """Zero also if the cluster does not count GPUs (AccountingStorageTRES)."""
    max_cpus_per_node: int | None = None
    """How many CPUs of a node all jobs of this partition may have together; None: no limit."""


PARTITIONS_ARGV = ("scontrol", "--all", "--oneliner", "show", "partition")
"""Ask for all partitions."""


def parse_partitions(text: str) -> list[Partition]:
    """Return the partitions, as listed."""
    rows = [_fields(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    # `gres/gpu=8`; if Slurm counts types only (`gres/gpu:a100=4`), their sum.
    gpus = [dict(re.findall(r"(?:^|,)gres/gpu(:[^=,]+|)=(\d{1,9})", row.get("TRES", ""))) for row in rows]
    return [
        Partition(
            name=row["PartitionName"],
            is_default=row.get("Default") == "YES",
            is_up=row.get("State") == "UP",
            total_nodes=_integer(row.get("TotalNodes", "")) or 0,
            max_time_min=parse_minutes(row.get("MaxTime", "")),
            default_time_min=parse_minutes(row.get("DefaultTime", "")),
            preempt_mode=_or_empty(row.get("PreemptMode", "")),
            grace_time_s=_integer(row.get("GraceTime", "")) or 0,
            priority_tier=_integer(row.get("PriorityTier", "1")) or 0,
            num_gpus=int(of_type[""]) if "" in of_type else sum(map(int, of_type.values())),
            max_cpus_per_node=_integer(row.get("MaxCPUsPerNode", "")),
        )
        for row, of_type in zip(rows, gpus, strict=True)
    ]


def chosen_partition(name: str | None, partitions: Sequence[Partition]) -> Partition | None:
    """Return the partition of a job that asks for this one, for the first of several that there is, or for none; None without one."""
    names = name.split(",") if name else [one.name for one in partitions if one.is_default]
    return next((one for asked in names for one in partitions if one.name == asked), None)


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """Equal nodes of a partition."""

    partition: str
    num_nodes: int
    num_cpus: int
    """CPUs of each node that jobs may have, without those that Slurm keeps for the system (CoreSpecCount)."""
    mem_mb: int
    """Memory of each node that jobs may have."""
    num_gpus: int
    gpu_type: str | None = None
    """The TYPE of `--gres=gpu:TYPE`."""


NODE_SHAPES_ARGV = ("scontrol", "--all", "--oneliner", "show", "node")
"""Ask for CPUs, memory, GPUs and partitions of each node; sinfo would count the CPUs and the memory that jobs cannot have."""
_NODE_KEY = re.compile(r" (CPUEfctv|CPUTot|RealMemory|MemSpecLimit|Gres|Partitions)=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d{1,9})(?=[(,]|$)")
"""Matches `gpu:4` and `gpu:a100:4(S:0-1)`; one match for each type of GPU, whose name may be a number (`gpu:3090:8`)."""


def parse_node_shapes(text: str) -> list[NodeShape]:
    """Return one row for each kind of node in each partition."""
    kinds: Counter[NodeShape] = Counter()
    for line in text.splitlines():
        if not line.startswith("NodeName="):
            continue
        node = dict(reversed(_NODE_KEY.findall(line)))  # the first of a name: comments and reasons stand at the end
        cpus, memory, kept = (_integer(node.get(key, "")) or 0 for key in ("CPUEfctv", "RealMemory", "MemSpecLimit"))
        gpus = _GPUS.findall(node.get("Gres", ""))
        shape = NodeShape(
            partition="",
            num_nodes=1,
            num_cpus=cpus or _integer(node.get("CPUTot", "")) or 0,
            mem_mb=memory - kept,
            num_gpus=sum(int(count) for _, count in gpus),
            gpu_type=next((kind for kind, _ in gpus if kind), None),
        )
        kinds.update(replace(shape, partition=name) for name in node.get("Partitions", "").split(",") if name)
    return [replace(kind, num_nodes=count) for kind, count in kinds.items()]


@dataclass(frozen=True, kw_only=True)
class Association:
    """An account that a user may use."""

    account: str
    partition: str = ""
    """Where it holds; empty for all partitions."""
    qos: tuple[str, ...] = ()
    default_qos: str = ""

    @property
    def words(self) -> str:
        """Return `lab (QOS high, low)`."""
        where = f" in {self.partition}" if self.partition else ""
        return f"{self.account}{where} (QOS {', '.join(self.qos)})"


def associations_argv(user: str) -> list[str]:
    """Ask which accounts a user may use, where, and with which QOS."""
    shown = "format=account,partition,qos,defaultqos"
    return ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", shown]


def parse_associations(text: str) -> list[Association]:
    """Return the accounts, as listed."""
    return [
        Association(
            account=account,
            partition=partition,
            qos=tuple(filter(None, qos.split(","))),
            default_qos=_or_empty(default),
        )
        for account, partition, qos, default in _line_fields(text, "|", 4)
    ]


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service, as far as preemption goes."""

    name: str
    preempts: tuple[str, ...] = ()
    """The QOS whose jobs its jobs may preempt."""
    preempt_mode: str = ""
    """Empty for the cluster's."""
    grace_time_s: int = 0


QOS_ARGV = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name,preempt,preemptmode,gracetime")
"""Ask how jobs of each QOS are preempted."""


def parse_qos(text: str) -> list[Qos]:
    """Return each QOS, as listed."""
    return [
        Qos(
            name=name,
            preempts=tuple(filter(None, preempts.split(","))),
            preempt_mode="" if mode.lower() in {"", "cluster"} else mode.upper(),
            grace_time_s=parse_seconds(grace) or 0,
        )
        for name, preempts, mode, grace in _line_fields(text, "|", 4)
    ]


def parse_submitted(text: str) -> str:
    """Return the job id from what sbatch has printed; a site's wrapper may print text around it, and on the same line."""
    for pattern in (r"^\s*(\d+)(?:;.*)?\s*$", r"^Submitted batch job (\d+)", r"^(\d+) "):
        if found := re.findall(pattern, text, re.MULTILINE | re.ASCII):
            return str(found[-1])
    raise ConfigError(
        f"sbatch has printed no job's number, but {text.strip()[:200]!r}, so it is not known whether Slurm has the job. See `squeue --me` before "
        "you submit again."
    )


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A node, as sinfo lists it."""

    node: str
    state: str
    """As Slurm writes it; a trailing `*`: it does not answer (https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES)."""
    reason: str = ""
    """Why an administrator, or a program, took it out of service; it may hold any text."""


def nodes_argv(nodes: Sequence[str] = (), *, partition: str | None = None) -> list[str]:
    """Ask for the states of some nodes, of all of a partition, or of all, and why they are out of service."""
    options = [f"--nodes={','.join(nodes)}"] if nodes else []
    options += [f"--partition={partition}"] if partition else ["--all"]  # which the former implies
    return ["sinfo", "--Node", "--noheader", *options, f"--format=%N{_FIELD}%T{_FIELD}%E{_RECORD}"]


def parse_nodes(text: str) -> list[NodeState]:
    """Return each node once, as sinfo repeats it for each of its partitions."""
    rows = {row[0]: row for row in _rows(text, 3)}
    return [
        NodeState(node=name, state=state, reason="" if reason == "none" else _or_empty(reason))
        for name, state, reason in rows.values()
    ]


def is_lost(node_state: str) -> bool:
    """Tell whether a node in this state cannot run jobs: it is down, or does not answer."""
    state = node_state.lower()
    return state.endswith("*") or state.startswith(("down", "fail", "power", "reboot", "unk"))


def takes_jobs(node_state: str) -> bool:
    """Tell whether a node in this state can get jobs, now or later: it is neither lost nor drained."""
    return not is_lost(node_state) and not node_state.lower().startswith("drain")


ESLURM_ACCESS_DENIED = "ESLURM_ACCESS_DENIED"
"""The name of a refusal in slurm_errno.h; commands print no number, only a text."""


def steps_argv(job_id: str) -> list[str]:
    """List the running steps of a job."""
    return ["squeue", "--all", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"]


def parse_steps(text: str) -> list[str]:
    """Return the ids of the steps that srun started (`12.0`), without the batch, interactive and extern steps."""
    return re.findall(r"^\s*([\d_+]+\.\d+)\s*$", text, re.MULTILINE | re.ASCII)


def _fields(line: str) -> Mapping[str, str]:
    """Return the pairs of `Key=value`. A value ends before the next key, and may hold spaces and equals signs."""
    found = re.findall(r"(?:^|(?<= ))([A-Za-z][\w/:]*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", line)
    return {key: value.strip() for key, value in found}


def _or_empty(text: str) -> str:
    return "" if text in _EMPTY else text


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 19 else None
