"""What the doctor says on a login node, and what it makes of Slurm's and NCCL's words."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hpc.base.record import try_read_record, write_record
from ddp_hpc.cluster.node_checks.facts import EMPTY, MISSING, THERE
from ddp_hpc.cluster.node_checks.gather import gather, num_by_network, num_gpus, path_state, probe_disk, probe_shared
from ddp_hpc.cluster.rendezvous.interfaces import Interface
from ddp_hpc.cluster.rendezvous.worker_env import nccl_debug_variables
from ddp_hpc.cluster.slurm.queries import NodeState, parse_nodes
from ddp_hpc.job import preflight
from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.run_dir.ledger import Cause
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.preflight import Finding, PreflightReport
from ddp_hpc.watch.diagnose.doctor import login, questions
from ddp_hpc.watch.diagnose.doctor.login import LoginSite, nodes_by_reason, reason_meaning
from ddp_hpc.watch.diagnose.doctor.on_nodes import parse_result, salloc_options
from ddp_hpc.watch.why.findings import AttemptFacts
from ddp_hpc.watch.why.verdict import verdict_of
from tests.made_run import made_attempt

SLURM: dict[str, str] = {
    "scontrol": """case "$*" in
ping) echo "Slurmctld(primary) at head is UP";;
"show config") cat <<'END'
SLURM_VERSION           = {version}
ClusterName             = lab
PreemptMode             = REQUEUE
PreemptType             = {kind}
KillWait                = 30 sec
JobRequeue              = 1
MaxArraySize            = 1001
AccountingStorageType   = accounting_storage/slurmdbd
END
;;
*partition*) echo "PartitionName=gpu Default=YES State=UP TotalNodes=4 PriorityTier=1 PreemptMode={mode} GraceTime={grace} MaxNodes=UNLIMITED MaxTime=UNLIMITED"
echo "PartitionName=urgent Default=NO State=UP TotalNodes=4 PriorityTier=9 PreemptMode=OFF GraceTime=0 MaxNodes=UNLIMITED MaxTime=UNLIMITED";;
esac""",
    "sinfo": "printf 'node1\\037idle\\037none\\036\\nnode2\\037drained\\037[user_problem] /tmp is full\\036\\nnode2\\037drained\\037[user_problem] /tmp is full\\036\\n'",
    "sacctmgr": """case "$*" in
*assoc*) echo 'lab||high,low|low';;
*qos*) printf 'low||requeue|00:01:00\nhigh|low|cluster|00:00:00\n';;
esac""",
    "sbatch": "echo 'sbatch: Job 7 to start at 2020-01-01T00:00:00 using 2 processors on nodes node1 in partition gpu' >&2",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a Slurm that answers."""
    return a_slurm(tmp_path)


def a_slurm(
    folder: Path,
    *,
    version: str = "25.11.8",
    mode: str = "REQUEUE",
    grace: int = 60,
    kind: str = "preempt/partition_prio",
) -> dict[str, str]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in SLURM.items():
        filled = (
            text.replace("{version}", version)
            .replace("{mode}", mode)
            .replace("{grace}", str(grace))
            .replace("{kind}", kind)
        )
        (programs / name).write_text(f"#!/bin/sh\n{filled}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:/usr/bin:/bin", "DDP_HPC_SITE_PROFILE": "", "HOME": str(folder)}


def found_by(environ: dict[str, str], *settings: str, folder: Path) -> dict[str, list[Finding]]:
    resolved = resolve(None, ["name=doctor", f"runs_dir={folder / 'runs'}", *settings], environ)
    found: dict[str, list[Finding]] = {}
    for one in login.findings_of(LoginSite(resolved, environ)):
        found.setdefault(one.check, []).append(one)
    return found


def test_a_login_node_says_what_its_cluster_does_to_a_run(slurm: dict[str, str], tmp_path: Path) -> None:
    found = found_by(slurm, folder=tmp_path)

    levels = {check: [one.level for one in several] for check, several in found.items()}
    assert levels == {
        "site": ["warn"],
        "runs directory": ["ok"],
        "quota": ["unknown"],
        "Slurm": ["ok"],
        "partition": ["ok"],
        "preemption": ["ok"],
        "requeue": ["ok"],
        "job arrays": ["ok"],
        "accounts": ["ok"],
        "nodes": ["ok", "warn"],
        "start": ["ok"],
    }
    assert "1 of 2 nodes take jobs" in found["nodes"][0].found
    assert found["nodes"][1].found == "node2 is drained: [user_problem] /tmp is full"
    assert "GraceTime 60 s" in found["preemption"][0].found


NVRM = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder@host)\nGCC version: gcc 12\n"
)


@pytest.mark.parametrize(
    ("driver", "settings", "level", "said"),
    [
        ("535.104.05", [], "ok" if torch.version.cuda and torch.version.cuda < "13" else "warn", "535.104.05"),
        ("390.157", [], "warn", "390.157"),
        ("999.10", [], "ok" if torch.version.cuda else "warn", "999.10"),
        ("", ["resources.gpus_per_node=4"], "unknown", "this host has no driver"),
        ("", ["resources.gpus_per_node=0"], "", ""),
        ("390.157", ["container.image=torch.sif"], "", ""),
    ],
)
def test_a_login_node_compares_its_driver_with_pytorch(
    driver: str, settings: list[str], level: str, said: str, *, slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "torch.sif").touch()
    proc = tmp_path / "proc"
    if driver:
        (proc / "driver/nvidia").mkdir(parents=True)
        (proc / "driver/nvidia/version").write_text(NVRM.format(driver))
    settings = [
        "name=doctor",
        f"runs_dir={tmp_path / 'runs'}",
        *(one.replace("torch.sif", f"{tmp_path}/torch.sif") for one in settings),
    ]

    found = login.findings_of(LoginSite(resolve(None, settings, slurm), slurm, proc))

    told = [one for one in found if one.check == "driver"]
    assert [one.level for one in told] == ([level] if level else [])
    assert all(said in one.found for one in told)


@pytest.mark.parametrize(
    ("about", "settings", "check", "said"),
    [
        ({"version": "22.05.8"}, (), "Slurm", r"ok: 22\.05\.8, cluster"),
        ({"mode": "CANCEL"}, (), "preemption", "warn: .*CANCEL"),
        (
            {"grace": 0},
            (),
            "preemption",
            r"warn: .*GraceTime 0 s.* SIGTERM comes at once, SIGKILL 30 s \(KillWait\) later",
        ),
        ({"mode": "GANG,SUSPEND"}, (), "preemption", "warn: .*SUSPEND.* without a warning signal"),
        ({"kind": "preempt/none"}, (), "preemption", "ok: .*not preempted"),
        ({"kind": "preempt/qos"}, (), "preemption", "ok: .*REQUEUE, GraceTime 60 s, by QOS low; jobs of QOS high"),
        ({"kind": "preempt/qos"}, ("slurm.qos=high",), "preemption", "ok: .*QOS high, but no partition or QOS"),
        ({"kind": "preempt/qos"}, ("slurm.qos=other",), "preemption", "unknown: .*preempt/qos"),
        ({}, ("slurm.partition=urgent",), "preemption", "ok: .*partition urgent"),
        ({"mode": "OFF"}, (), "preemption", "ok: .*not preempted"),
        ({}, ("slurm.partition=cpu",), "partition", "fail: there is no partition 'cpu'"),
        ({}, ("slurm.account=other",), "accounts", "fail: .*not 'other'"),
        ({}, ("slurm.requeue=false",), "requeue", "warn: `slurm.requeue` is false"),
        ({}, ("resources.nodes=2",), "nodes", "fail: .*the run asks for 2"),
    ],
)
def test_what_is_wrong_has_a_level_and_its_reason(
    about: dict[str, Any], settings: tuple[str, ...], check: str, said: str, tmp_path: Path
) -> None:
    found = found_by(a_slurm(tmp_path, **about), *settings, folder=tmp_path)[check][0]

    assert re.match(said, f"{found.level}: {found.found}"), found


def test_a_slurm_that_does_not_answer_is_unknown_and_never_ok(slurm: dict[str, str], tmp_path: Path) -> None:
    for name in SLURM:
        path = tmp_path / "bin" / name
        path.write_text("#!/bin/sh\necho 'error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n")

    found = found_by(slurm, folder=tmp_path)

    of_slurm = ("controller", *OF_SLURM)
    assert {check: [one.level for one in found[check]] for check in of_slurm} == {
        check: ["unknown"] for check in of_slurm
    }
    assert "Unable to contact slurm controller" in found["start"][0].found


OF_SLURM = ("Slurm", "partition", "preemption", "requeue", "job arrays", "accounts", "nodes", "start")


def test_without_the_accounting_database_accounts_are_unknown_and_a_job_may_start(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bin/sacctmgr").write_text("#!/bin/sh\necho 'failed to open persistent connection' >&2\nexit 1\n")

    found = found_by(slurm, folder=tmp_path)

    (accounts,) = found["accounts"]
    assert (accounts.level, "slurmdbd" in accounts.to_do) == ("unknown", True), accounts
    assert (found["start"][0].level, found["nodes"][0].level) == ("ok", "ok")


def test_a_controller_that_is_down_is_a_failure(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at head is DOWN'\nexit 1\n")

    (found,) = found_by(slurm, folder=tmp_path)["controller"]

    assert (found.level, found.found) == ("fail", "the controller does not answer: `scontrol ping` says DOWN")


@pytest.mark.parametrize("hangs", ["exec sleep 60", "sleep 60 & exit 0", "trap '' TERM; sleep 60"])
def test_all_commands_that_hang_cost_one_wait(slurm: dict[str, str], tmp_path: Path, hangs: str) -> None:
    for name in SLURM:
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{hangs}\n")
    spec = resolve(None, ["name=doctor", f"runs_dir={tmp_path / 'runs'}"], slurm).spec

    told = questions.ask(spec, {**slurm, "SLURM_JOB_ID": "7"}, seconds=0.3)

    asked = {"controller", "config", "partitions", "nodes", "associations", "qos", "test_only", "job"}
    assert asked <= told.problems.keys()
    assert "did not end within 0 s" in told.why_not("config")
    assert told.disk is not None


def test_an_answer_that_cannot_be_read_leaves_the_others(slurm: dict[str, str], tmp_path: Path) -> None:
    def fails(timeout_s: float) -> None:
        raise ValueError(timeout_s)

    told = questions.ask_side_by_side({"config": fails, "controller": lambda timeout_s: f"up {timeout_s}"}, seconds=5)

    assert told.controller == "up 5"
    assert told.why_not("config") == "the answer cannot be read: 5"


JOB = "JobId=7 JobName=x UserId=ada(1) JobState={state} Reason=None Restarts=0 NodeList={nodes} Command=x"


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        ("echo '" + JOB.format(state="RUNNING", nodes="node[1-2]") + "'", "ok", "job 7 runs on node[1-2]"),
        ("echo '" + JOB.format(state="SUSPENDED", nodes="node[1-2]") + "'", "ok", "job 7 runs on node[1-2]"),
        ("echo '" + JOB.format(state="COMPLETED", nodes="node[1-2]") + "'", "warn", "which completed"),
        ("echo '" + JOB.format(state="PENDING", nodes="(null)") + "'", "warn", "which waits"),
        ("echo '" + JOB.format(state="RUNNING", nodes="node[5-6]") + "'", "warn", "which runs on node[5-6]"),
        ("echo '" + JOB.format(state="NEW_WORD", nodes="node[1-2]") + "'", "unknown", "does not know"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "warn", "but Slurm knows no such job"),
        ("echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1", "unknown", "whether it runs is not known"),
    ],
)
def test_variables_of_a_job_count_only_while_it_runs(
    slurm: dict[str, str], tmp_path: Path, answer: str, level: str, said: str
) -> None:
    scontrol = tmp_path / "bin/scontrol"
    rest = scontrol.read_text().removeprefix("#!/bin/sh\n")
    scontrol.write_text(f"#!/bin/sh\ncase \"$*\" in *'show job'*) {answer};; *) {rest}\n;; esac\n")
    environ = {**slurm, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    site = LoginSite(resolve(None, ["name=doctor", f"runs_dir={tmp_path / 'runs'}"], environ), environ)

    findings = login.findings_of(site)

    (found,) = [one for one in findings if one.check == "job"]
    assert (found.level, said in found.found) == (level, True), found
    assert bool(login.why_no_job(site, findings)) == (level == "unknown")


def test_a_host_without_slurm_says_so(tmp_path: Path) -> None:
    (found,) = found_by({"PATH": "/nowhere", "HOME": str(tmp_path)}, folder=tmp_path)["Slurm"]

    assert found.level == "unknown"


def test_a_runs_directory_that_cannot_be_written_is_a_failure(slurm: dict[str, str]) -> None:
    resolved = resolve(None, ["name=doctor", "runs_dir=/proc/1/runs"], slurm)

    (found,) = [one for one in login.findings_of(LoginSite(resolved, slurm)) if one.check == "runs directory"]

    assert (found.level, "cannot be written" in found.found) == ("fail", True)


def test_a_runs_directory_whose_mount_is_stale_is_a_failure(
    slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, *words: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/stale"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *words, **options)

    resolved = resolve(None, ["name=doctor", "runs_dir=/stale/runs"], slurm)
    monkeypatch.setattr(os, "stat", stat)

    (found,) = [one for one in login.findings_of(LoginSite(resolved, slurm)) if one.check == "runs directory"]

    assert (found.level, "Stale file handle" in found.found) == ("fail", True), found


def test_a_reason_may_hold_any_text() -> None:
    text = "n1\x1fdown*\x1fNot responding | by root\x1e\nn2\x1fidle\x1fnone\x1e\n"

    assert parse_nodes(text) == [
        NodeState(node="n1", state="down*", reason="Not responding | by root"),
        NodeState(node="n2", state="idle"),
    ]
    assert [[one.node for one in same] for same in nodes_by_reason(parse_nodes(text))] == [["n1"]]


def test_prefixes_of_reasons_are_explained() -> None:
    assert "hardware" in reason_meaning("[node_problem] Xid 79")
    assert "user's processes" in reason_meaning("[USER_PROBLEM] disk")
    assert (
        reason_meaning("kernel update")
        == "this reason is the text of an administrator or of Slurm; ask your cluster's support"
    )
    assert not reason_meaning("")


def test_a_node_that_does_not_answer_the_controller_is_explained_without_a_reason() -> None:
    ((found,),) = nodes_by_reason([NodeState(node="n1", state="idle*"), NodeState(node="n2", state="idle")])

    assert found.node == "n1"
    assert "slurmd does not answer" in reason_meaning(found.reason, found.state)


def test_the_result_is_found_behind_a_greeting_without_a_line_break(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = PreflightReport(at=1.0, seconds=2.0, nodes=("n1",), findings=())
    monkeypatch.setattr(preflight, "examine_nodes", lambda question: checked)
    monkeypatch.setattr("ddp_hpc.base.processes.die_with_parent", lambda parent: None)
    for name, value in {"JOB_ID": "1", "JOB_NODELIST": "n1", "TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    sys.stdout.write("[site] welcome")
    assert preflight.main(["--folder=there"]) == 0

    assert parse_result(capsys.readouterr().out) == checked


def test_the_job_of_the_doctor_is_placed_as_the_run_would_be(tmp_path: Path) -> None:
    settings = [
        "name=doctor",
        "slurm.partition=gpu",
        "slurm.account=lab",
        "slurm.exclude=node9",
    ]
    spec = resolve(None, settings, {"HOME": str(tmp_path)}).spec

    assert salloc_options(spec, "3")[0] == "--nodes=3"
    assert salloc_options(spec, "node[1-2]")[0] == "--nodelist=node[1-2]"
    assert {"--partition=gpu", "--account=lab", "--exclude=node9"} <= {*salloc_options(spec, "3")}


# --- one node ----------------------------------------------------------------------------------------------------------


def test_a_node_says_what_it_has_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from ddp_hpc.cluster.node_checks.gather import gather;"
        "found = gather('a', ['a'], folder=Path(sys.argv[1]), paths=[sys.argv[1]], environ=os.environ);"
        "import json; from dataclasses import asdict; print(json.dumps(asdict(found))); assert 'torch' not in sys.modules"
    )

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)

    found = json.loads(done.stdout)
    assert found["late"] == []
    assert found["shared"]["seen"] == ["a"]
    assert found["software"]["torch"]


def test_nodes_see_each_others_files(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("b\n")

    assert set(probe_shared(tmp_path, "a", ["a", "b"]).seen) == {"a", "b"}


def test_a_directory_that_is_not_there_is_an_error_of_this_node(tmp_path: Path) -> None:
    assert "No such file" in probe_shared(tmp_path / "none", "a", ["a"]).error
    assert "No such file" in probe_disk(tmp_path / "none").error


def test_what_is_at_a_path(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("1")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer

    told = {name: path_state(tmp_path / name) for name in ("empty", "file", "none", "loop", "fifo")}

    assert told["empty"] == EMPTY
    assert told["file"] == THERE
    assert told["none"] == MISSING
    assert told["fifo"] == THERE
    assert "symbolic links" in told["loop"]


def test_a_part_that_does_not_end_in_time_is_named_and_the_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr("ddp_hpc.cluster.node_checks.gather.path_state", lambda _: over.wait())  # as a dead mount does
    monkeypatch.setattr("ddp_hpc.cluster.node_checks.gather.PATIENCE_S", 0.5)

    found = gather("a", ["a"], folder=tmp_path, paths=["/data"], environ={})
    over.set()

    assert found.late == ("path /data",)
    assert found.num_cpus


def test_where_tmpdir_is_not_there_the_disk_of_tmp_is_looked_at(tmp_path: Path) -> None:
    places = [tmp_path, tmp_path / "slurm.7"]
    found = [gather("a", ["a"], folder=tmp_path, paths=[], environ={"TMPDIR": str(one)}) for one in places]
    paths = [one.disks["temporary files"].path for one in found if one.disks]

    assert paths == [str(tmp_path), "/tmp"]


def test_a_directory_that_fills_a_moment_later_is_there(tmp_path: Path) -> None:
    """As one does that an automounter mounts at the first look."""
    late = threading.Timer(0.3, (tmp_path / "one").write_text, ["1"])
    late.start()

    found = gather("a", ["a"], folder=tmp_path, paths=[str(tmp_path)], environ={})
    late.join()

    assert found.paths == {str(tmp_path): THERE}
    assert found.mounts
    assert set(found.mounts) == {str(tmp_path)}


def test_names_that_are_not_answered_cost_one_wait_and_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, names = threading.Event(), [f"n{number}" for number in range(64)]
    monkeypatch.setattr(
        "ddp_hpc.cluster.node_checks.gather.socket.getaddrinfo",
        lambda name, *_, **__: [(0, 0, 0, "", ("10.0.0.1", 0))] if name == "n0" else over.wait() and [],
    )
    monkeypatch.setattr("ddp_hpc.cluster.node_checks.gather.socket.getnameinfo", lambda *_: over.wait())
    monkeypatch.setattr("ddp_hpc.cluster.node_checks.gather.NAMES_S", 0.4)

    found = gather("n0", names, folder=tmp_path, paths=[], environ={})
    over.set()

    assert found.names == {"n0": ("10.0.0.1",)}
    assert "8 of 9 names" in found.late
    assert found.reverse_s == 0.4
    assert found.num_cpus


@pytest.mark.parametrize(
    ("environ", "models", "amd", "count"),
    [
        ({}, 0, (), None),
        ({}, 0, ("0", "0", "31415", "27182"), 2),  # CPUs are nodes of AMD's driver, too
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, (), 3),  # one fell off the bus
        ({"CUDA_VISIBLE_DEVICES": "0"}, 8, (), 1),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}, 1, (), 3),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, (), 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, 0, ("5", "6", "7", "8"), 2),
    ],
)
def test_gpus_are_counted_where_something_shows_them(
    environ: dict[str, str], models: int, amd: tuple[str, ...], count: int | None, tmp_path: Path
) -> None:
    for number, gpu_id in enumerate(amd):
        (tmp_path / f"kfd/{number}").mkdir(parents=True)
        (tmp_path / f"kfd/{number}/gpu_id").write_text(f"{gpu_id}\n")

    assert num_gpus(environ, ["H100"] * models, dev=tmp_path, kfd=tmp_path / "kfd") == count


def test_gpus_of_nvidia_are_counted_by_their_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    assert num_gpus({}, [], dev=tmp_path, kfd=tmp_path) == 2


def test_an_interface_that_is_down_counts_as_a_network_that_is_missing() -> None:
    up = Interface(name="eth0", kind="ethernet", is_up=True, addresses=("10.0.0.1/24",))
    down = Interface(name="ib0", kind="infiniband", is_up=False)
    loopback = Interface(name="lo", kind="loopback", is_up=True, addresses=("127.0.0.1/8",))

    assert num_by_network([up, down, loopback]) == {"Ethernet": 1, "InfiniBand": 0}


# --- records and what they mean ----------------------------------------------------------------------------------------

FAILED = PreflightReport(
    at=1.0,
    seconds=2.0,
    nodes=("node1", "node2", "node3"),
    findings=(
        Finding(check="torch", level="fail", found="node2 has 1.13.1", to_do="use one", nodes=("node2",)),
        Finding(check="clocks", level="warn", found="5 s", nodes=("node3",)),
    ),
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_record(run.preflight(0), FAILED, indent=1)

    assert try_read_record(run.preflight(0), PreflightReport) == FAILED
    assert try_read_record(run.preflight(1), PreflightReport) is None


@pytest.mark.parametrize("plain", [None, {}, {"at": 1, "seconds": 1, "nodes": [], "findings": [{"level": "green"}]}])
def test_a_damaged_record_is_no_record(plain: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.preflight(0).parent.mkdir(parents=True)
    run.preflight(0).write_text(json.dumps(plain))

    assert try_read_record(run.preflight(0), PreflightReport) is None


def test_only_failures_exclude_nodes_and_never_all_of_them() -> None:
    everywhere = Finding(check="data", level="fail", found="", nodes=("node1", "node2", "node3"))

    assert FAILED.bad_nodes == ("node2",)
    assert not FAILED.has_failure_without_bad_nodes
    assert PreflightReport(at=0, seconds=0, nodes=FAILED.nodes, findings=(everywhere,)).bad_nodes == ()
    assert PreflightReport(at=0, seconds=0, nodes=FAILED.nodes, findings=(everywhere,)).has_failure_without_bad_nodes


@pytest.mark.parametrize(
    ("cause", "failed_nodes", "failure"),
    [
        (Cause.PREFLIGHT, (), "preflight"),
        (Cause.NODE_FAILED, ("node2",), "preflight"),
        (Cause.NODE_FAILED, ("node1",), "node-failed"),  # a node that went down later, under `on_fail=warn`
    ],
)
def test_why_shows_what_the_check_found(cause: Cause, failed_nodes: tuple[str, ...], failure: str) -> None:
    attempt = made_attempt(cause=cause, failed_nodes=failed_nodes)

    verdict = verdict_of(AttemptFacts(attempt=attempt, preflight=FAILED))

    assert verdict.failure == failure
    if failure == "preflight":
        assert verdict.host == "node2"
        assert [one.text for one in verdict.evidence] == ["torch: node2 has 1.13.1"]


# --- NCCL --------------------------------------------------------------------------------------------------------------


def test_one_key_turns_on_all_logs_of_the_libraries() -> None:
    assert nccl_debug_variables("off", Path("/run")) == {}
    assert nccl_debug_variables("info", Path("/run"))["NCCL_DEBUG_FILE"] == "/run/%h-%p.log"
    assert nccl_debug_variables("trace", Path("/run"))["NCCL_DEBUG"] == "TRACE"


def test_no_log_of_the_libraries_wraps_the_process_groups() -> None:
    """DETAIL ends ranks of gloo by SIGSEGV."""
    assert nccl_debug_variables("trace", Path("/run"))["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
