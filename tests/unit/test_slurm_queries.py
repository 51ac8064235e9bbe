"""Slurm's answers, as 22.05.8 and 24.11.5 wrote them, are understood."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.slurm_times import parse_minutes, parse_seconds, parse_time
from ddp_hpc.cluster.slurm import queries

QUEUE = (
    "2|2|N/A|PENDING|Resources|2026-11-21T07:37:30;\n"
    "3|3|0-3%2|PENDING|Priority|N/A;\n"
    "10|3|0|RUNNING|None|2026-11-21T07:28:20;\n"
    "7|7|N/A|PENDING|JobHeldUser|N/A;\n"
    "1|1|N/A|RUNNING|None|2026-11-21T07:27:30;\n"
).replace("|", "\x1f").replace(";\n", "\x1e\n")  # fmt: skip

JOB = (
    'JobId=1 JobName=odd JobState=FAILED |name, "q" = x UserId=hpc(1001) GroupId=hpc(1001) MCS_label=N/A Priority=4294901759 '
    "Nice=0 Account=lab QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=1-00:00:48 TimeLimit=2-00:10:00 TimeMin=N/A SubmitTime=2026-11-21T07:27:30 "
    "EligibleTime=2026-11-21T07:27:30 AccrueTime=2026-11-21T07:27:30 StartTime=2026-11-21T07:27:30 "
    "EndTime=2026-11-21T07:37:30 Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-21T07:27:30 "
    "Scheduler=Backfill Partition=batch AllocNode:Sid=head:0 ReqNodeList=(null) ExcNodeList=(null) NodeList=node[1-2] "
    "BatchHost=node1 NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=1,mem=100M,node=1,billing=1 "
    "Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=1 MinMemoryCPU=100M MinTmpDiskNode=0 Features=(null) "
    "DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/tmp/a b/s.sh WorkDir=/tmp "
    'Comment=a=b JobState=COMPLETED Restarts=9 | c\ttab; {"k": "v"}  StdErr=/tmp/slurm-1.out StdIn=/dev/null '
    "StdOut=/tmp/slurm-1.out Power= \n"
)
PENDING_JOB = (
    "JobId=5 JobName=two\nlines UserId=hpc(1001) GroupId=hpc(1001) MCS_label=N/A Priority=4294901756 Nice=0 Account=lab "
    "QOS=normal JobState=PENDING "
    "Reason=Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions Dependency=(null) "
    "Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A "
    "SubmitTime=2026-11-21T07:56:40 StartTime=Unknown EndTime=Unknown Deadline=N/A NodeList= NumNodes=1-1 NumCPUs=1 "
    "ReqTRES=cpu=1,mem=100M,node=1,billing=1 AllocTRES=(null) Command=/tmp/s.sh WorkDir=/tmp StdErr=/tmp/slurm-5.out \n"
)
ACCOUNTING = (
    "1|CANCELLED by 1001|2026-11-21T07:56:43|2026-11-21T07:56:48|00:10:00|None assigned|None\n"
    "1|REQUEUED|2026-11-21T07:56:40|2026-11-21T07:56:43|00:10:00|node1|None\n"
    "11|FAILED|2026-11-21T07:57:00|2026-11-21T07:57:05|UNLIMITED|node1|None\n"
    "12|RUNNING|2026-11-21T07:58:00|Unknown|1-00:00:00|node[1-2]|None\n"
).replace("|", "\x1f")
PARTITIONS = (
    "PartitionName=batch AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE "
    "DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO "
    "MaxCPUsPerNode=UNLIMITED Nodes=node[1-2] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO "
    "OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=32 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=32,mem=32000M,node=2,billing=32,gres/gpu=8\n"
    "PartitionName=low AllowGroups=ALL AllowAccounts=lab,guest AllowQos=low AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=10 Hidden=NO MaxNodes=4 "
    "MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED Nodes=node[1-2] "
    "PriorityTier=1 PreemptMode=REQUEUE State=DRAIN TotalCPUs=32 TotalNodes=2 "
    "TRES=cpu=32,mem=32000M,node=2,gres/gpu:a100=4,gres/gpu:h200=2\n"
)
CONFIG = """\
Configuration data as of 2026-11-21T07:28:18
AccountingStorageBackupHost = (null)
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = lab
JobRequeue              = 1
KillWait                = 5 sec
MaxArraySize            = 1001
PreemptMode             = REQUEUE
PreemptParameters       = (null)
PreemptType             = preempt/partition_prio
SchedulerParameters     = bf_interval=1,bf_continue
SlurmctldParameters     = enable_configless,preempt_send_user_signal
SLURM_VERSION           = 22.05.8
X11Parameters           = (null)

Slurmctld(primary) at head is UP
"""
TEST_ONLY = "sbatch: Job 8 to start at 2026-11-21T07:30:02 using 2 processors on nodes node[1-2] in partition batch\n"


def at(text: str) -> float:
    """Return a time of the answers above in seconds since the epoch."""
    return time.mktime(time.strptime(f"2026-11-21T{text}", "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("30:00", 1800),
        ("0:20", 20),
        ("30", 1800),
        ("1-02", 93600),
        ("1-02:03", 93780),
        (" 10:00 ", 600),
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("NONE", None),
        ("Partition_Limit", None),
        ("INVALID", None),
        ("", None),
        ("9" * 400, None),  # more than a float holds
    ],
)
def test_a_duration_is_read(text: str, expected: int | None) -> None:
    assert parse_seconds(text) == expected
    assert parse_minutes(text) == (None if expected is None else expected / 60)


@pytest.mark.parametrize("text", ["Unknown", "N/A", "None", "NONE", "", "tomorrow"])
def test_no_moment_is_none(text: str) -> None:
    assert parse_time(text) is None


def test_a_moment_is_in_this_hosts_time() -> None:
    assert parse_time("2026-11-21T07:00:00") == at("07:00:00")


def test_the_queue_is_asked_for_one_user_in_fields_of_any_length() -> None:
    argv = queries.queue_argv("ada")

    assert argv[:5] == ["squeue", "--all", "--noheader", "--noconvert", "--user=ada"]
    assert argv[5].startswith("--Format=JobID:\x1f,ArrayJobID:\x1f,")
    assert argv[5].endswith(",StartTime:\x1e")


def test_the_queue_is_understood() -> None:
    entries = queries.parse_queue(QUEUE)

    assert [entry.job_id for entry in entries] == ["2", "3_[0-3%2]", "3_0", "7", "1"]
    assert [entry.number for entry in entries] == ["2", "3", "10", "7", "1"]
    assert [entry.reason for entry in entries] == ["Resources", "Priority", "", "JobHeldUser", ""]
    assert entries[4] == queries.QueuedEntry(
        job_id="1", number="1", state="RUNNING", reason="", starts_at=at("07:27:30")
    )


def test_an_estimate_of_the_start_is_told_where_there_is_one() -> None:
    entries = queries.parse_queue(QUEUE)

    assert [entry.starts_at for entry in entries[:2]] == [at("07:37:30"), None]


@pytest.mark.parametrize("text", ["", "\n", "CLUSTER: lab\n"])
def test_an_empty_queue_is_empty(text: str) -> None:
    assert queries.parse_queue(text) == []


def test_a_job_is_understood_whatever_its_name_and_comment_pretend() -> None:
    assert queries.parse_job(JOB) == queries.JobRecord(
        job_id="1",
        state="RUNNING",
        restarts=2,
        partition="batch",
        account="lab",
        qos="normal",
        nodes="node[1-2]",
        time_limit_min=2 * 1440 + 10,
        eligible_at=at("07:27:30"),
        ends_at=at("07:37:30"),
    )


def test_a_job_that_waits_is_understood() -> None:
    job = queries.parse_job(PENDING_JOB)

    assert job is not None
    assert (job.job_id, job.state, job.nodes) == ("5", "PENDING", "")
    assert job.reason.startswith("Nodes_required_for_job_are_DOWN,_DRAINED")
    assert (job.ends_at, job.time_limit_min) == (None, None)


def test_of_an_array_the_first_is_told() -> None:
    job = queries.parse_job(PENDING_JOB + JOB)

    assert job is not None
    assert job.job_id == "5"


@pytest.mark.parametrize("text", ["", "No jobs in the system\n", "JobId=7 JobName=x"])
def test_no_job_is_none(text: str) -> None:
    assert queries.parse_job(text) is None


def test_the_database_is_asked_for_every_start_of_all_jobs() -> None:
    argv = queries.accounting_argv(["1", "11"])

    assert {"--duplicates", "--allocations", "--noheader", "--jobs=1,11"} <= set(argv)
    assert not any("Restarts" in part for part in argv)  # which 22.05 does not know


def test_every_start_of_a_job_is_told_oldest_first() -> None:
    first, second, failed, running = queries.parse_accounting(ACCOUNTING)

    assert (first.job_id, first.state, first.nodes) == ("1", "REQUEUED", "node1")
    assert (second.job_id, second.state, second.nodes) == ("1", "CANCELLED by 1001", "")
    assert second.ends_at == at("07:56:48")
    assert failed.time_limit_min is None
    assert (running.ends_at, running.reason, running.restarts) == (None, "", None)


def test_an_estimate_is_understood() -> None:
    assert queries.parse_test_only(0, f"sbatch: a word of the site\n{TEST_ONLY}") == queries.Estimate(
        starts_at=at("07:30:02"), nodes="node[1-2]"
    )


@pytest.mark.parametrize(
    "said",
    [
        "allocation failure: Requested node configuration is not available\n",
        "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
    ],
)
def test_a_refusal_is_told_whole(said: str) -> None:
    answer = queries.parse_test_only(1, said)

    assert answer.refusal == said.strip()
    assert answer.starts_at is None


def test_an_answer_without_an_estimate_is_no_refusal() -> None:
    assert queries.parse_test_only(0, "sbatch: fine\n") == queries.Estimate()


def test_the_configuration_is_understood() -> None:
    assert queries.parse_config(CONFIG) == queries.ClusterConfig(
        version="22.05.8",
        name="lab",
        preempt_mode="REQUEUE",
        preempt_type="preempt/partition_prio",
        job_requeue=True,
        sends_user_signal=True,
        max_array_size=1001,
        kill_wait_s=5,
        has_accounting=True,
    )


@pytest.mark.parametrize(
    ("line", "sends"),
    [
        ("SlurmctldParameters = preempt_send_user_signal", True),
        ("PreemptParameters = youngest_first,send_user_signal", True),
        ("SlurmctldParameters = enable_configless", False),
        ("SlurmctldParameters = (null)", False),
        ("", False),
    ],
)
def test_it_is_told_whether_the_users_signal_is_sent_at_preemption(line: str, sends: bool) -> None:
    assert queries.parse_config(line).sends_user_signal == sends


@pytest.mark.parametrize(
    "line", ["", "AccountingStorageType = (null)", "AccountingStorageType = accounting_storage/none"]
)
def test_a_cluster_may_keep_no_accounts(line: str) -> None:
    assert not queries.parse_config(line).has_accounting


def test_partitions_are_understood() -> None:
    batch, low = queries.parse_partitions(PARTITIONS)

    assert batch == queries.Partition(
        name="batch",
        is_default=True,
        is_up=True,
        total_nodes=2,
        max_time_min=None,
        default_time_min=None,
        preempt_mode="OFF",
        grace_time_s=0,
        priority_tier=10,
        num_gpus=8,
    )
    assert (low.is_default, low.is_up) == (False, False)
    assert (low.max_time_min, low.default_time_min, low.grace_time_s) == (2880, 60, 10)
    assert low.num_gpus == 6


def test_qos_and_where_an_account_holds_are_understood() -> None:
    """Lines as Slurm 22.05 prints them."""
    text = "normal||cluster|00:00:00\nlow||requeue|00:00:15\nhigh|low,normal|cluster|00:00:00\n"

    normal, low, high = queries.parse_qos(text)

    assert (normal.preempt_mode, normal.grace_time_s, normal.preempts) == ("", 0, ())
    assert (low.preempt_mode, low.grace_time_s) == ("REQUEUE", 15)
    assert high.preempts == ("low", "normal")
    assert queries.parse_associations("lab||high,low|normal\nlab|gpu|low|\n") == [
        queries.Association(account="lab", qos=("high", "low"), default_qos="normal"),
        queries.Association(account="lab", partition="gpu", qos=("low",)),
    ]


@pytest.mark.parametrize(
    ("text", "is_up"),
    [
        ("Slurmctld(primary) at head is UP\n", True),
        ("Slurmctld(primary) at a is DOWN\nSlurmctld(backup1) at b is UP\n", True),
        ("Welcome\nSlurmctld(primary) at a is DOWN\n", False),
        ("the cluster is UP\n", None),
        ("", None),
    ],
)
def test_one_controller_that_is_up_suffices(text: str, is_up: bool | None) -> None:
    assert queries.parse_ping(text) is is_up


@pytest.mark.parametrize(
    ("line", "kind"),
    [("PreemptType = preempt/qos", "preempt/qos"), ("PreemptType = (null)", "preempt/none"), ("PreemptMode = OFF", "")],
)
def test_no_type_of_preemption_is_told_from_one_that_is_not_shown(line: str, kind: str) -> None:
    assert queries.parse_config(line).preempt_type == kind


NOTE = "NOTE: maintenance on Monday | all partitions\n12 days left = 3.5 SUs\n"
"""What a site's wrapper of Slurm's commands prints beside their answers."""


@pytest.mark.parametrize(
    ("parse", "answer"),
    [
        (queries.parse_queue, QUEUE),
        (queries.parse_job_scripts, "12\x1f/home/a/job.sbatch\x1e\n13\x1f/home/a/b.sh\x1e\n"),
        (queries.parse_job, JOB),
        (queries.parse_job, PENDING_JOB),
        (queries.parse_accounting, ACCOUNTING),
        (queries.parse_partitions, PARTITIONS),
        (queries.parse_config, CONFIG),
        (queries.parse_node_shapes, "NodeName=n1 CPUTot=4 RealMemory=1000 Gres=gpu:a100:4 Partitions=gpu\n"),
        (queries.parse_associations, "lab||high,low|normal\n"),
        (queries.parse_qos, "high|low|requeue|00:01:00\n"),
        (queries.parse_nodes, "node1\x1fidle\x1fnone\x1e\nnode2\x1fdrained\x1fbad disk\x1e\n"),
        (queries.parse_steps, "12.0\n12.1\n12.batch\n"),
        (queries.parse_submitted, "12\n"),
        (queries.parse_submitted, "Submitted batch job 12\n"),
        (queries.parse_ping, "Slurmctld(primary) at head is UP\n"),
    ],
)
def test_lines_of_a_sites_wrapper_change_no_answer(parse: Callable[[str], Any], answer: str) -> None:
    expected = parse(answer)

    assert expected
    assert parse(NOTE + answer) == expected
    assert parse(answer + NOTE) == expected


@pytest.mark.parametrize("text", ["", "Welcome!\n", "job 12 is not submitted\n"])
def test_an_answer_of_sbatch_without_a_number_is_an_error_that_says_what_to_see(text: str) -> None:
    with pytest.raises(ConfigError, match="squeue --me"):
        queries.parse_submitted(text)


def test_a_wrapper_may_print_text_on_the_line_of_the_first_record() -> None:
    nodes = queries.parse_nodes("NOTE: node1\x1fidle\x1fnone\x1e\nnode2\x1fidle\x1fnone\x1e\n")
    assert [one.node for one in nodes] == ["node1", "node2"]
    assert [one.number for one in queries.parse_queue(f"NOTE: {QUEUE}")] == [
        one.number for one in queries.parse_queue(QUEUE)
    ]


@pytest.mark.parametrize(
    ("text", "preempted_at", "excluded"),
    [
        (JOB, None, ""),
        (JOB.replace("SuspendTime=None", "PreemptEligibleTime=2026-11-21T07:28:00 PreemptTime=None"), None, ""),
        (JOB.replace("SuspendTime=None", "PreemptTime=2026-11-21T07:29:00"), "07:29:00", ""),
        (JOB.replace("ExcNodeList=(null)", "ExcNodeList=node[3-4,7]"), None, "node[3-4,7]"),
        (JOB.replace("Comment=a=b", "Comment=PreemptTime=2026-11-21T07:29:00 ExcNodeList=node9"), None, ""),
    ],
    ids=["neither", "could be preempted", "is being preempted", "avoids nodes", "the comment says so"],
)
def test_a_job_tells_when_it_is_preempted_and_which_nodes_it_avoids(
    text: str, preempted_at: str | None, excluded: str
) -> None:
    job = queries.parse_job(text)

    assert job is not None
    assert job.preempted_at == (at(preempted_at) if preempted_at else None)
    assert job.excluded_nodes == excluded


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            queries.nodes_argv(["node1", "node2"]),
            "sinfo --Node --noheader --nodes=node1,node2 --all --format=%N\x1f%T\x1f%E\x1e",
        ),
        (queries.nodes_argv(partition="gpu"), "sinfo --Node --noheader --partition=gpu --format=%N\x1f%T\x1f%E\x1e"),
    ],
)
def test_questions_are_in_slurms_words(argv: list[str], words: str) -> None:
    assert argv == words.split(" ")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "12\n",
            "12;lab\n",
            " 12 ",
            "Welcome!\n12\n",
            "Submitted batch job 12\n",
            "Submitted batch job 12 on cluster lab\n",
        ),
        "12 estimates 2 SUs from allocation abc\n",  # LSU
        "60 SUs are left\n12\n",
        "NOTE: job 3 is the limit | all partitions\nSubmitted batch job 12\n",
    ],
)
def test_the_number_of_a_submitted_job_is_told_with_or_without_its_cluster(text: str) -> None:
    assert queries.parse_submitted(text) == "12"


def test_the_states_of_nodes_are_understood() -> None:
    rows = ("node1\x1fidle\x1fnone", "node2\x1fmixed*\x1fnone", "node3\x1fdraining\x1fkernel update")
    text = "".join(f"{row}\x1e\n" for row in rows) + "\nslurm_load_partitions: Unable to contact slurm controller\n"

    assert queries.parse_nodes(text) == [
        queries.NodeState(node="node1", state="idle"),
        queries.NodeState(node="node2", state="mixed*"),
        queries.NodeState(node="node3", state="draining", reason="kernel update"),
    ]


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        *((state, False) for state in ("idle", "mixed", "allocated", "completing", "draining", "drained", "maint")),
        *((state, True) for state in ("down", "DOWN", "idle*", "allocated*", "down*", "fail", "failing", "unknown")),
        *((state, True) for state in ("powered_down", "powering_down", "reboot", "reboot_issued")),
    ],
)
def test_a_node_is_lost_that_can_run_nothing(state: str, lost: bool) -> None:
    assert queries.is_lost(state) is lost
