"""What is said before the queue: why Slurm refuses a job, and where a plan does not fit the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest

from ddp_hpc.base.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.cluster.slurm.queries import JobRecord, NodeShape, Partition, chosen_partition
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.launch.submission.submit_checks.sbatch_errors import KnownCluster, explain_refusal
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, write_queued_job
from ddp_hpc.run.spec import CheckpointSpec, ResourcesSpec, RestartSpec, RunSpec, ScriptSpec, SlurmSpec, TrainSpec
from ddp_hpc.watch.queue import QueueStatus
from ddp_hpc.watch.status import read_status
from ddp_hpc.watch.why.reading import chosen_attempt
from tests.made_run import make_run

TRAIN = TrainSpec(global_batch_size=1440)


def spec(*, slurm: Mapping[str, Any] | None = None, **resources: Any) -> RunSpec:
    return RunSpec(
        name="digits",
        train=TRAIN,
        resources=ResourcesSpec(**resources),
        slurm=SlurmSpec(**(slurm or {})),
        checkpoint=CheckpointSpec(every_steps=500),
    )


def partition(name: str = "batch", **more: Any) -> Partition:
    known = {
        "is_default": name == "batch",
        "is_up": True,
        "total_nodes": 4,
        "max_time_min": None,
        "default_time_min": None,
        "preempt_mode": "",
        "grace_time_s": 0,
        "num_gpus": 16,
    }
    return Partition(name=name, **{**known, **more})


CLUSTER = KnownCluster(
    partitions=[partition(max_time_min=1440.0), partition("long", total_nodes=2)],
    associations=["lab (QOS normal, high)", "guest (QOS normal)"],
)
POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "asked", "told"),
    [
        (
            "sbatch: error: invalid partition specified: nope\nsbatch: error: Invalid partition name specified",
            spec(slurm={"partition": "nope"}),
            ["`slurm.partition` is 'nope'", "batch (4 nodes), long (2 nodes)"],
        ),
        (
            "allocation failure: Invalid partition name specified",
            spec(slurm={"partition": "nope"}),
            ["(Invalid partition name specified)", "Set `slurm.partition` to one of them"],
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            spec(nodes=9, gpus_per_node=8),
            ["The run asks for 9 nodes with 8 tasks of 1 CPU and 8 GPUs each", "partition batch (4 nodes)"],
        ),
        (
            "sbatch: error: Batch job submission failed: Node count specification invalid",
            spec(nodes=9, slurm={"partition": "long"}),
            ["partition long (2 nodes)"],
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification",
            spec(gpus_per_node=4),
            ["4 GPUs each, by `--gpus-per-node`", "16 GPUs in partition batch", "`slurm.gpu_option=none`"],
        ),
        (
            "sbatch: error: Batch job submission failed: Job dependency problem",
            spec(slurm={"dependency": "afterok:99"}),
            ["(Batch job submission failed: Job dependency problem)", "`afterok:99` (`slurm.dependency`, `--after`)"],
        ),
        (
            "sbatch: error: Memory specification can not be satisfied",
            spec(mem_gb=9000),
            ["9000 GiB a node"],
        ),
        (
            "sbatch: error: Memory required by task is not available",
            spec(mem_gb=9000),
            ["9000 GiB a node", "other keys of `resources`"],
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            spec(time_limit_min=9999),
            ["`resources.time_limit_min` is 9999; batch allows 1440 min"],
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            spec(),
            ["`resources.time_limit_min` is not set; batch allows 1440 min. Set it"],
        ),
        (
            "No reservation for this job\nsbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            spec(slurm={"account": "nope"}),
            ["`slurm.account` is 'nope'", "you may use lab (QOS normal, high); guest (QOS normal)"],
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid qos specification",
            spec(slurm={"qos": "gold"}),
            ["`slurm.qos` 'gold'"],
        ),
        (POLICY, spec(gpus_per_node=4), ["more than your account or QOS allows at once", "4 GPUs"]),
        (
            "sbatch: error: QOSMaxGRESPerUser",
            spec(),
            ["more than your account or QOS allows at once"],
        ),
    ],
    ids=[
        "partition",
        "no prefix",
        "size",
        "nodes",
        "GPUs",
        "dependency",
        "memory",
        "memory of a task",
        "time",
        "a site that wants a time",
        "account",
        "qos",
        "policy",
        "a limit of a QOS",
    ],
)
def test_a_refusal_says_what_was_asked_what_there_is_and_what_to_do(said: str, asked: RunSpec, told: list[str]) -> None:
    explained = explain_refusal(said, asked, CLUSTER)

    assert explained.startswith("Slurm refuses the job (")
    assert "sbatch: error" not in explained
    for words in told:
        assert words in explained


SHAPES = [
    NodeShape(partition="batch", num_nodes=3, num_cpus=16, mem_mb=65536, num_gpus=0),
    NodeShape(partition="batch", num_nodes=1, num_cpus=64, mem_mb=515000, num_gpus=8, gpu_type="a100"),
    NodeShape(partition="long", num_nodes=2, num_cpus=128, mem_mb=1048576, num_gpus=16, gpu_type="h100"),
]
SIZE = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
GRES = "sbatch: error: Invalid generic resource (gres) specification"


@pytest.mark.parametrize(
    ("said", "asked", "told"),
    [
        (SIZE, spec(nodes=5), "`resources.nodes` is 5, but partition batch has 4 nodes"),
        (SIZE, spec(workers_per_node=80), "`resources.workers_per_node` is 80, with 1 CPU each"),
        (
            "sbatch: error: Memory specification can not be satisfied",
            spec(mem_gb=900),
            "`resources.mem_gb` is 900, but a node of partition batch has at most 502 GiB",
        ),
        (
            SIZE,
            spec(gpus_per_node=9),
            "`resources.gpus_per_node` is 9, but a node of partition batch has at most 8 GPUs",
        ),
        (
            GRES,
            spec(gpus_per_node=1, gpu_type="h100"),
            "`resources.gpu_type` is 'h100', but nodes of partition batch have a100. Set it to one of these, or choose",
        ),
        (SIZE, spec(gpus_per_node=9, slurm={"partition": "long"}), "The run asks for 1 node with 9 tasks"),
    ],
    ids=["nodes", "CPUs", "memory", "GPUs", "type of GPU", "nothing alone"],
)
def test_the_key_that_asks_for_more_than_any_node_has_is_named(said: str, asked: RunSpec, told: str) -> None:
    assert told in explain_refusal(said, asked, replace(CLUSTER, shapes=SHAPES))
    assert "The run asks for" in explain_refusal(said, asked, CLUSTER)  # where Slurm does not say what nodes have


def test_memory_that_is_asked_for_where_no_key_does_is_named_with_the_key_that_lowers_it() -> None:
    small = replace(CLUSTER, shapes=[NodeShape(partition="batch", num_nodes=4, num_cpus=4, mem_mb=4000, num_gpus=0)])

    told = explain_refusal(SIZE, spec(workers_per_node=2), small)

    means = "`resources.mem_gb` is 4 for 2 workers, as it is not set, but a node of partition batch has at most 3 GiB. Lower it"
    assert means in told
    assert "mem_gb" not in explain_refusal(
        SIZE, spec(workers_per_node=2, slurm={"extra": {"mem_per_cpu": "1G"}}), small
    )


def test_a_limit_on_the_number_of_jobs_is_no_question_of_size() -> None:
    told = explain_refusal(f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", spec(), CLUSTER)

    assert "You have as many jobs in the queue" in told
    assert "Ask for less" not in told


def test_a_policy_that_mentions_time_is_not_taken_for_a_time_limit() -> None:
    """Slurm's own words for every policy end with `and/or time limits`."""
    assert "resources.time_limit_min" not in explain_refusal(POLICY, spec(), CLUSTER)


def test_a_refusal_of_the_sites_own_is_told_as_it_is() -> None:
    said = "sbatch: error: Please use our portal\nsbatch: error: Batch job submission failed: Unspecified error\n"

    assert explain_refusal(said, spec(), CLUSTER).startswith("Slurm refuses the job. Correct what sbatch names")
    assert explain_refusal(said, spec(), CLUSTER).endswith(said.strip())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("sbatch: error: Invalid partition name specified", "none that you can see (`sinfo`)"),
        ("sbatch: error: Invalid account", "`sacctmgr show assoc`"),
        ("sbatch: error: Requested time limit is invalid", "writes a checkpoint and continues in its next job"),
        ("sbatch: error: Requested node configuration is not available", "or lower `resources.nodes`"),
    ],
)
def test_a_cluster_that_tells_nothing_of_itself_is_no_error(said: str, told: str) -> None:
    assert told in explain_refusal(said, spec(), KnownCluster())


@pytest.mark.parametrize(
    ("by", "told"),
    [
        ("requeue", "writes a checkpoint and ends, because `slurm.requeue` is false; submit it again to continue"),
        ("successor", "writes a checkpoint and continues in its next job"),
    ],
)
def test_a_run_that_does_not_go_back_into_the_queue_is_promised_no_next_job(
    by: Literal["requeue", "successor"], told: str
) -> None:
    one = replace(spec(slurm={"requeue": False}), restart=RestartSpec(by=by))

    assert told in explain_refusal("sbatch: error: Requested time limit is invalid", one, KnownCluster())


@pytest.mark.parametrize(("asked", "chosen"), [(None, "batch"), ("", "batch"), ("long", "long"), ("nope", None)])
def test_a_job_goes_to_the_partition_it_names_or_the_default(asked: str | None, chosen: str | None) -> None:
    found = chosen_partition(asked, CLUSTER.partitions)

    assert (found.name if found else None) == chosen


def mounted(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    """Have this machine mount file systems: place -> type."""
    mounts = [SimpleNamespace(mountpoint=place, fstype=fstype) for place, fstype in places.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)  # noqa: A006  # psutil's own word


@pytest.mark.parametrize(
    ("path", "mounts"),
    [
        ("/tmp/runs/digits", {"/": "ext4"}),
        ("/var/tmp/runs/digits", {"/": "ext4"}),
        ("/run/digits", {"/": "overlay"}),
        ("/tmp/runs/digits", {"/": "ext4", "/tmp": "xfs"}),
        ("/tmp/runs/digits", {"/": "ext4", "/tmp": "tmpfs"}),
        ("/dev/shm/digits", {"/": "ext4", "/dev": "devtmpfs", "/dev/shm": "tmpfs"}),
        ("/scratch/digits", {"/": "ext4", "/scratch": "tmpfs"}),
        ("/scratch/digits", {"/": "tmpfs"}),
        ("/tmp/digits", {}),
    ],
)
def test_a_directory_that_other_nodes_do_not_see_is_refused(
    path: str, mounts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, **mounts)

    with pytest.raises(ConfigError, match=r"each node has a .* of its own.*`runs_dir=\.\.\.`") as error:
        capacity.refuse_node_local_path(Path(path), [])

    assert path in str(error.value)


@pytest.mark.parametrize(
    ("path", "mounts"),
    [
        ("/home/ada/runs/digits", {"/": "ext4"}),
        ("/home/ada/runs/digits", {"/": "tmpfs", "/home": "nfs4"}),
        ("/tmp/shared/digits", {"/": "ext4", "/tmp": "tmpfs", "/tmp/shared": "nfs4"}),
        ("/tmpfiles/digits", {"/": "ext4"}),
        ("/runs/digits", {"/": "overlay"}),
        ("/home/ada/runs/digits", {}),
    ],
)
def test_a_directory_that_they_may_share_is_taken(
    path: str, mounts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, **mounts)

    capacity.refuse_node_local_path(Path(path), [])


def test_a_link_into_a_private_place_is_seen_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, **{"/": "ext4"})
    (tmp_path / "runs").symlink_to("/dev/shm")

    with pytest.raises(ConfigError, match="/dev/shm of its own"):
        capacity.refuse_node_local_path(tmp_path / "runs" / "digits", [])


class FakeSlurm:
    """Commands of Slurm's that say what they are told to say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": f"{folder}:/usr/bin:/bin"}
        self.run = RunDir(folder / "run")
        self.says("sbatch", stderr="sbatch: Job 7 to start at 2020-01-01T00:00:00 using 4 processors on nodes n1")
        self.says("sacctmgr", stderr="no accounting", code=1)
        self.has(partition())

    def says(self, command: str, *, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        (self.folder / f"{command}.out").write_text(stdout)
        (self.folder / f"{command}.err").write_text(f"{stderr}\n")
        path = self.folder / command
        path.write_text(
            f"#!/bin/sh\ncat {self.folder}/{command}.out\ncat {self.folder}/{command}.err >&2\nexit {code}\n"
        )
        path.chmod(0o755)

    def has(self, *partitions: Partition, more: Sequence[str] = (), **config: str) -> None:
        """Answer all questions to scontrol, whose lines do not clash."""
        lines = [
            f"PartitionName={one.name} Default={'YES' if one.is_default else 'NO'} State=UP "
            f"TotalNodes={one.total_nodes} MaxTime={_minutes(one.max_time_min)} "
            f"DefaultTime={_minutes(one.default_time_min)} GraceTime={one.grace_time_s} "
            f"PreemptMode={one.preempt_mode or 'OFF'} PriorityTier={one.priority_tier}"
            for one in partitions
        ]
        told = {"JobRequeue": "1", "PreemptMode": "OFF", **config}
        self.says(
            "scontrol", stdout="\n".join([*lines, *more, *(f"{key} = {value}" for key, value in told.items())]) + "\n"
        )

    def check(self, asked: RunSpec) -> list[str]:
        questions = capacity.SlurmQuestions(self.environ)
        questions.ask_about_script(self.run.job_script)
        return questions.wait_for_notes(asked, self.run)


def _minutes(length_min: float | None) -> str:
    return "UNLIMITED" if length_min is None else f"{length_min:.0f}:00"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


@pytest.mark.parametrize(("asked", "is_told"), [(None, True), (0, False), (2, False)])
def test_a_run_that_says_nothing_of_gpus_is_told_that_the_partition_has_some(
    asked: int | None, is_told: bool, slurm: FakeSlurm
) -> None:
    of_partition = "PartitionName=batch Default=YES State=UP TotalNodes=2 TRES=cpu=8,gres/gpu=4"
    slurm.says("scontrol", stdout=f"{of_partition}\nJobRequeue = 1\nPreemptMode = OFF\n")

    said = slurm.check(spec(gpus_per_node=asked))

    assert any("partition batch has GPUs, and the run asks for none" in line for line in said) == is_told


def test_a_plan_that_fits_is_told_in_one_line(slurm: FakeSlurm) -> None:
    assert slurm.check(spec(time_limit_min=60)) == [
        "the job asks for 1 node with 1 task of 1 CPU each; it could start now"
    ]


@pytest.mark.parametrize(
    ("wait_s", "told"),
    [
        (-5.0, "it could start now"),
        (30.0, "it could start now"),
        (20 * 60.0, "it could start in about 20 min"),
        (5 * 3600.0, "it could start in about 5 h"),
        (400 * 86400.0, "Slurm cannot estimate when it could start"),
        (None, None),
    ],
)
def test_when_it_could_start_is_told_as_far_as_slurm_knows(
    wait_s: float | None, told: str | None, slurm: FakeSlurm
) -> None:
    if wait_s is None:
        slurm.says("sbatch", stderr="sbatch: a word of the site")
    else:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + wait_s + 5))
        slurm.says("sbatch", stderr=f"sbatch: Job 7 to start at {at} using 4 processors on nodes n1")

    (line,) = slurm.check(spec(time_limit_min=60))

    assert line.partition("each")[2].startswith(f"; {told}" if told else "")
    assert (told is None) == line.endswith("each")


@pytest.mark.parametrize(
    ("resources", "told"),
    [
        ({"nodes": 2, "gpus_per_node": 4, "time_limit_min": 90}, "it uses up to 12 GPU-hours (8 GPUs for 1.5 h)"),
        ({"gpus_per_node": 1, "time_limit_min": 10}, "it uses up to 0.17 GPU-hours (1 GPUs for 0.1667 h)"),
        (
            {"nodes": 10, "gpus_per_node": 8, "time_limit_min": 14400},
            "it uses up to 19200 GPU-hours (80 GPUs for 240 h)",
        ),
        ({"gpus_per_node": 1}, None),
        ({"nodes": 2, "time_limit_min": 90}, None),
    ],
    ids=["hours", "minutes", "thousands", "no limit", "no GPUs"],
)
def test_what_it_may_cost_is_told_in_gpu_hours(resources: dict[str, Any], told: str | None, slurm: FakeSlurm) -> None:
    said = slurm.check(spec(**resources))

    assert [line for line in said if "GPU-hours" in line] == ([] if told is None else [told])


SCRIPT = ScriptSpec(command=("python", "train.py"))
BY_TIER = {"PreemptType": "preempt/partition_prio"}
MISFITS: list[tuple[str, Partition, dict[str, str], RunSpec, Sequence[str]]] = [
    ("all is well", partition(), {}, spec(time_limit_min=60), []),
    (
        "the cluster's own time",
        partition(default_time_min=30.0),
        {},
        spec(),
        ["note: `resources.time_limit_min` is not set, so partition batch ends the job after 30 min"],
    ),
    ("a time of its own", partition(default_time_min=30.0), {}, spec(time_limit_min=5), []),
    (
        "told to stop at once",
        partition(),
        {},
        spec(time_limit_min=3, slurm={"signal_lead_s": 120}),
        [
            "the run is asked to stop 120 s before the limit, and Slurm may ask 60 s earlier: this leaves no time to train"
        ],
    ),
    ("told to stop a little later", partition(), {}, spec(time_limit_min=2, slurm={"signal_lead_s": 59}), []),
    (
        "told to stop at once by the cluster's own time",
        partition(default_time_min=3.0),
        {},
        spec(),
        ["note: `resources.time_limit_min` is not set", "`resources.time_limit_min` is 3, but"],
    ),
    (
        "a script that may need longer than it is given",
        partition(),
        {},
        replace(spec(time_limit_min=60), script=replace(SCRIPT, stop_within_s=300)),
        ["note: `script.stop_within_s` is 300, but before the time limit the script has only 105 s to save"],
    ),
    (
        "a script that has the time that it may need",
        partition(),
        {},
        replace(spec(time_limit_min=60, slurm={"signal_lead_s": 315}), script=replace(SCRIPT, stop_within_s=300)),
        [],
    ),
    (
        "a script with the default times",
        partition(),
        {},
        replace(spec(time_limit_min=60), script=SCRIPT),
        [],
    ),
    (
        "a script without a time limit",
        partition(),
        {},
        replace(spec(), script=SCRIPT),
        [],
    ),
    (
        "cancelled when preempted",
        partition(preempt_mode="CANCEL", grace_time_s=60),
        BY_TIER,
        spec(time_limit_min=60),
        ["PreemptMode is CANCEL, GraceTime 60 s, by partition batch; jobs of partition top may preempt a run there"],
    ),
    (
        "requeued without grace",
        partition(preempt_mode="REQUEUE"),
        {**BY_TIER, "KillWait": "30 sec"},
        spec(time_limit_min=60),
        ["SIGTERM comes at once, SIGKILL 30 s (KillWait) later. A checkpoint that takes longer than 30 s"],
    ),
    ("requeued with grace", partition(preempt_mode="REQUEUE", grace_time_s=60), BY_TIER, spec(time_limit_min=60), []),
    (
        "of the highest tier, which nothing preempts",
        partition(preempt_mode="REQUEUE", priority_tier=2),
        BY_TIER,
        spec(time_limit_min=60),
        [],
    ),
    (
        "preempted by the QOS, of which the partition's mode says nothing",
        partition(preempt_mode="REQUEUE"),
        {"PreemptType": "preempt/qos"},
        spec(time_limit_min=60),
        [],
    ),
    ("the partition's word wins", partition(), {"PreemptMode": "CANCEL"}, spec(time_limit_min=60), []),
    (
        "not put back by default",
        partition(),
        {"JobRequeue": "0"},
        spec(time_limit_min=60),
        ["note: jobs of this cluster are not requeued by default (JobRequeue=0), but this job asks for it"],
    ),
    (
        "not put back, and not to be",
        partition(),
        {"JobRequeue": "0"},
        spec(time_limit_min=60, slurm={"requeue": False}),
        [],
    ),
]


@pytest.mark.parametrize(
    ("there", "config", "asked", "told"), [row[1:] for row in MISFITS], ids=[row[0] for row in MISFITS]
)
def test_a_plan_that_does_not_fit_is_told_though_slurm_takes_it(
    there: Partition, config: dict[str, str], asked: RunSpec, told: Sequence[str], slurm: FakeSlurm
) -> None:
    slurm.has(there, partition("top", priority_tier=2), **config)

    _, *said = slurm.check(asked)

    assert len(said) == len(told)
    assert all(words in line for words, line in zip(told, said, strict=True))


@pytest.mark.parametrize(("num_nodes", "is_refused"), [(4, False), (1, True)])
def test_a_job_that_waits_for_drained_nodes_is_submitted_and_one_that_the_cluster_can_never_place_is_refused(
    num_nodes: int, is_refused: bool, slurm: FakeSlurm
) -> None:
    slurm.says("sbatch", stderr="allocation failure: Requested node configuration is not available", code=1)
    slurm.has(
        partition(), more=[f"NodeName=n{n} CPUTot=64 RealMemory=99999 Partitions=batch" for n in range(num_nodes)]
    )
    asked = spec(nodes=2, time_limit_min=60)

    if is_refused:
        with pytest.raises(ConfigError, match=r"`resources.nodes` is 2, but partition batch has 1 node"):
            slurm.check(asked)
    else:
        assert "If it could with nodes that are down or drained, the job waits for them" in slurm.check(asked)[1]


@pytest.mark.parametrize("variable", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_a_shell_that_chooses_another_cluster_is_told_that_the_job_would_not_go_there(
    variable: str, slurm: FakeSlurm
) -> None:
    slurm.has(partition(), ClusterName="here")
    slurm.environ[variable] = "here"
    slurm.check(spec(time_limit_min=60))
    slurm.environ[variable] = "accelgor"

    with pytest.raises(ConfigError, match=rf"{variable} is 'accelgor', but this host's Slurm cluster is here"):
        slurm.check(spec(time_limit_min=60))


def test_what_slurm_would_refuse_is_an_error_with_what_the_cluster_has(slurm: FakeSlurm) -> None:
    slurm.says("sbatch", stderr="allocation failure: Invalid account", code=1)
    slurm.says("sacctmgr", stdout="lab||normal,high|\n")

    with pytest.raises(ConfigError, match=r"you may use lab \(QOS normal, high\)"):
        slurm.check(spec(slurm={"account": "nope"}))


def test_a_slurm_that_does_not_answer_is_no_refusal(slurm: FakeSlurm) -> None:
    slurm.says("sbatch", stderr="sbatch: error: Unable to contact slurm controller (connect failure)", code=1)

    with pytest.raises(SlurmUnavailableError, match="does not answer"):
        slurm.check(spec())


@pytest.mark.parametrize(
    ("job", "how"),
    [
        (None, "is no longer known to Slurm"),
        (JobRecord(job_id="7", state="CANCELLED by 0"), "was cancelled,"),
        (JobRecord(job_id="7", state="NODE_FAIL", reason="NodeDown"), "lost a node (NodeDown),"),
        (JobRecord(job_id="7", state="FAILED", reason="NonZeroExitCode"), "failed (NonZeroExitCode),"),
    ],
)
def test_a_job_that_left_without_a_word_is_told_with_where_to_look(job: JobRecord | None, how: str) -> None:
    said = capacity.vanished_job_message(RunDir(Path("/scratch/runs/digits")), "7", job, 0.0)

    assert said.startswith(f"Job 7 of digits {how}")
    assert "/scratch/runs/digits/logs/console.log" in said
    assert said.endswith("sacct -j 7 -o state,exitcode,nodelist")


def test_a_job_that_ended_before_ddp_hpc_began_in_it_is_told_by_its_console(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.console.parent.mkdir(exist_ok=True)
    run.console.write_text("line 3: module: command not found\nerror: the end\n")
    job = JobRecord(job_id="7", state="FAILED", reason="NonZeroExitCode")
    words = f"{run.console} ends with: line 3: module: command not found | error: the end"

    assert words in capacity.vanished_job_message(run, "7", job, 0.0)
    assert "ends with" not in capacity.vanished_job_message(run, "7", job, time.time() + 60)  # those of an earlier job
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0, since=0, backend="slurm"))
    ended = QueueStatus(job_id="7", state="FAILED", at=1.0)
    assert read_status(run, now=2.0, ask=lambda *_: ended).reason == f"job 7 failed before ddp-hpc began in it: {words}"
    with pytest.raises(ConfigError, match="has not begun an attempt") as told:
        chosen_attempt(run, Ledger.read(run), None)
    assert words in str(told.value)


@pytest.mark.parametrize(("limit_min", "default_min"), [(2, None), (None, 1.0)])
def test_a_time_limit_that_is_over_at_the_signal_is_refused(
    limit_min: int | None, default_min: float | None, slurm: FakeSlurm
) -> None:
    slurm.has(partition(default_time_min=default_min))

    with pytest.raises(ConfigError, match=r"asked to stop before it begins.*lower `slurm\.signal_lead_s`"):
        slurm.check(spec(time_limit_min=limit_min))
