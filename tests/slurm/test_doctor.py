"""The doctor on a real cluster: what is broken is found, and the node is named; a healthy cluster passes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.record import try_read_record
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.preflight import PreflightReport
from tests.slurm.cluster import USER, Cluster
from tests.slurm.lab.tools import attempt, sh
from tests.slurm.runs import SMALL, TRIAL_RECIPE, LoginNode, world


def doctor(login: LoginNode, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what the doctor says of four nodes."""
    done = login.type("doctor", "--json", "--nodes=4", *words, env=env)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "code": done.returncode}


def named(found: dict[str, Any], *levels: str) -> dict[str, list[str]]:
    """Return the checks that found something, with the nodes that they name."""
    return {one["check"]: one["nodes"] for one in found["checked"]["findings"] if one["level"] in (levels or ("fail",))}


@contextmanager
def mounted(cluster: Cluster, node: str, *words: str | Path) -> Iterator[None]:
    """Mount something on one node; the last word is where."""
    cluster.run("mount", *words, node=node, user="root")
    try:
        yield
    finally:
        cluster.run("umount", "--lazy", words[-1], node=node, user="root", check=False)


@contextmanager
def queued(cluster: Cluster, node: str, *words: str) -> Iterator[None]:
    """Limit what a node may send on the workers' network (tc-tbf(8))."""
    where = ("-n", cluster.lab.netns(node), "qdisc")
    sh("tc", *where, "add", "dev", "ib0", "root", "tbf", *words)
    try:
        yield
    finally:
        attempt("tc", *where, "del", "dev", "ib0", "root")


def other_torch(login: LoginNode, node: str) -> Any:
    """Have one node show another version of PyTorch, as an environment on its own disk would."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    real = Path(spec.origin).with_name("version.py")
    fake = login.folder / "version.py"
    lines = real.read_text(encoding="utf-8").splitlines()
    changed = ["__version__ = '1.13.1'" if line.startswith("__version__") else line for line in lines]
    fake.write_text("\n".join(changed) + "\n", encoding="utf-8")
    return mounted(login.cluster, node, "--bind", fake, real)


def wrong_hosts(login: LoginNode, node: str, of: str) -> Any:
    """Have one node's /etc/hosts give another address to a name."""
    own = login.cluster.run("cat", "/etc/hosts", node=node).stdout.splitlines()
    lines = ["10.77.0.99 " + of if line.split()[1:] == [of] else line for line in own]
    assert lines != own
    fake = login.folder / "hosts"
    fake.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return mounted(login.cluster, node, "--bind", fake, "/etc/hosts")


@contextmanager
def no_data(login: LoginNode, node: str) -> Iterator[str]:
    """Have data on all nodes but one, where no temporary files lie, wherever these tests do; yield it as an option."""
    cluster, place, data = login.cluster, "/var/spool/sets", login.folder / "sets"
    data.mkdir()
    (data / "one.txt").write_text("1", encoding="utf-8")
    shutil.chown(data, USER, USER)
    with ExitStack() as mounts:
        for one in cluster.settings.hostnames:
            cluster.run("mkdir", "-p", place, node=one, user="root")
            if one != node:
                mounts.enter_context(mounted(cluster, one, "--bind", data, place))
        yield f"--path={place}"


@contextmanager
def full_disk(login: LoginNode, node: str) -> Iterator[dict[str, str]]:
    """Give one node a disk of half a MiB for temporary files; yield the variables of jobs that use it."""
    cluster, place = login.cluster, "/var/spool/scratch"
    for one in cluster.settings.hostnames:
        cluster.run("mkdir", "-p", "-m", "1777", place, node=one, user="root")
    with mounted(cluster, node, "-t", "tmpfs", "-o", "size=512k,mode=1777", "tmpfs", place):
        yield {"TMPDIR": place}


def test_a_healthy_cluster_passes_every_check(login: LoginNode) -> None:
    found = doctor(login, "slurm.extra.comment=it's mine, a b")

    assert named(found) == {}
    assert named(found, "unknown") == {}
    assert found["code"] == 0


@pytest.mark.long
def test_each_node_that_differs_is_named_with_what_differs(login: LoginNode) -> None:
    """Another PyTorch, a wrong hosts entry, missing data and a full disk, each on a node."""
    with ExitStack() as broken:
        path = broken.enter_context(no_data(login, "node1"))
        broken.enter_context(other_torch(login, "node2"))
        broken.enter_context(wrong_hosts(login, "node3", of="node1"))
        env = broken.enter_context(full_disk(login, "node4"))
        found = doctor(login, path, env=env)

    assert named(found) == {"torch": ["node2"], "data": ["node1"], "disk": ["node4"]}
    warned = named(found, "warn")
    warned.pop("speed", None)  # links of a busy machine are slow
    assert warned == {"names": ["node3"]}
    assert found["code"] == 1


@pytest.mark.long
def test_a_cut_fabric_is_found_and_the_job_can_leave_its_node_out(cluster: Cluster, login: LoginNode) -> None:
    cluster.cut("node3", "ib0")

    done = login.type("doctor", "--nodes=node[1-4]")

    assert done.returncode == 1
    assert "node3 has no interface of InfiniBand that is up; the other nodes have 1" in done.stdout, done.stdout
    assert "sbatch --exclude=node3" in done.stdout


@pytest.mark.long
def test_a_node_whose_packets_do_not_arrive_is_named(cluster: Cluster, login: LoginNode) -> None:
    with queued(cluster, "node2", "rate", "1kbit", "burst", "10", "latency", "1ms"):  # longer packets are dropped
        found = doctor(login)

    assert named(found) == {"network": ["node2"]}


@pytest.mark.long
def test_a_node_that_has_another_file_system_in_the_place_of_the_runs_is_named(
    cluster: Cluster, login: LoginNode
) -> None:
    runs = login.folder / "runs"
    runs.mkdir()
    shutil.chown(runs, USER, USER)

    with mounted(cluster, "node2", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", runs):
        found = doctor(login)

    assert named(found) == {"run directory": ["node2"]}
    assert found["exclude"] == "--exclude=node2"


@pytest.mark.long
def test_a_slow_link_is_named(cluster: Cluster, login: LoginNode) -> None:
    with queued(cluster, "node4", "rate", "10mbit", "burst", "64kb", "latency", "1s"):  # a shorter queue loses packets
        found = doctor(login)

    assert named(found, "warn") == {"speed": ["node4"]}


SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (!code && which == CLOCK_REALTIME) now->tv_sec += 60;
    return code;
}
"""
"""A process sees CLOCK_REALTIME a minute ahead: no namespace of the kernel shifts that clock."""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to build a shifted clock")
def test_a_clock_that_is_a_minute_ahead_is_named(cluster: Cluster, login: LoginNode) -> None:
    source, library, prolog = (login.folder / name for name in ("clock.c", "clock.so", "prolog.sh"))
    source.write_text(SHIFTED_CLOCK, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    prolog.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = node3 ] && echo "export LD_PRELOAD={library}"\nexit 0\n')
    prolog.chmod(0o755)
    library.chmod(0o755)
    cluster.reconfig(TaskProlog=str(prolog))

    found = doctor(login)

    assert named(found) == {"clocks": ["node3"]}
    (told,) = [one["found"] for one in found["checked"]["findings"] if one["check"] == "clocks"]
    assert "node3's clock is 60.0 s ahead" in told


ASKING, PROBING = "ddp_hpc.cluster.node_checks.gather", "ddp_hpc.cluster.rendezvous.links.probe"
"""What runs on a node in each part of a check."""


def lose(cluster: Cluster, node: str, how: str) -> None:
    """Have Slurm lose a node, by its power or its cable, or not at all."""
    match how:
        case "power":
            cluster.kill(node)
        case "cable":
            cluster.cut(node)


@pytest.mark.long
def test_a_node_whose_slurmd_is_down_before_the_check_is_named(cluster: Cluster, login: LoginNode) -> None:
    checks = (
        f"touch begun; while [ ! -e lost ]; do sleep 0.2; done; {sys.executable} -m ddp_hpc doctor --json --nodes=4"
    )
    asking = cluster.popen("salloc", "--nodes=4", "--ntasks-per-node=1", "sh", "-c", checks, cwd=login.folder)
    cluster.wait_for((login.folder / "begun").exists, 60)

    # By its command line: a thread of 26.05 names the process otherwise.
    cluster.run("pkill", "--signal", "KILL", "-f", "^[^ ]*slurmd -D", node="node3", user="root")
    (login.folder / "lost").touch()

    stdout, stderr = asking.communicate(timeout=280)
    cluster.kill("node3")  # a node that is off is booted for the next test
    assert stdout, stderr
    found = json.loads(stdout)
    assert named(found) == {"nodes": ["node3"]}
    assert found["exclude"] == "--exclude=node3"


def hang(cluster: Cluster, node: str, module: str) -> None:
    """Wait until a process of a module runs on a node, and stop it there, so that it does not end before the node does."""
    words = ("pkill", "--signal", "STOP", "-f", f"[{module[0]}]{module[1:]}")  # which does not match what runs pkill
    cluster.wait_for(lambda: cluster.run(*words, node=node, user="root", check=False).returncode == 0, 120)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "how", "expected"),
    [
        (ASKING, "power", ("nodes", "fail")),
        (ASKING, "cable", ("nodes", "fail")),
        (ASKING, "", ("nodes", "fail")),  # its process only hangs
        (PROBING, "power", ("network", "unknown")),
    ],
)
def test_a_node_that_does_not_answer_is_named_and_the_others_are_reported(
    cluster: Cluster, login: LoginNode, module: str, how: str, expected: tuple[str, str]
) -> None:
    asking = cluster.popen(sys.executable, "-m", "ddp_hpc", "doctor", "--json", "--nodes=4", cwd=login.folder)
    hang(cluster, "node3", module)

    lose(cluster, "node3", how)

    stdout, stderr = asking.communicate(timeout=280)
    assert stdout, stderr
    found = json.loads(stdout)
    assert found["checked"], found
    told = [one for one in found["checked"]["findings"] if "node3" in one["found"]]
    assert [(one["check"], one["level"]) for one in told] == [expected]
    assert found["exclude"] == ("--exclude=node3" if expected[1] == "fail" else "")
    levels = {one["check"]: one["level"] for one in found["checked"]["findings"]}
    assert (levels["python"], levels["disk"]) == ("ok", "ok")


@pytest.mark.long
def test_a_node_that_is_lost_in_the_middle_of_a_runs_check_is_left_out(cluster: Cluster, login: LoginNode) -> None:
    cluster.reconfig(SlurmdTimeout="60")  # as on most sites, the check ends before Slurm notices
    login.add_recipe(TRIAL_RECIPE)
    keys = ("preflight.enabled=true", "preflight.on_fail=exclude")
    login.submit("lost", *SMALL, *world(3, 1), *keys)
    hang(cluster, "node2", ASKING)

    lose(cluster, "node2", "power")

    login.await_state("lost", "finished", timeout_s=280)
    first, second = Ledger.read(login.run("lost")).attempts
    assert (first.cause, first.next, first.failed_nodes) == ("node failed", "requeue", ("node2",))
    assert (second.ending, second.nodes) == ("finished", ("node1", "node3", "node4"))


@pytest.mark.long
def test_a_node_on_which_the_runs_are_mounted_read_only_is_named(cluster: Cluster, login: LoginNode) -> None:
    runs = login.folder / "runs"
    runs.mkdir()
    shutil.chown(runs, USER, USER)

    with mounted(cluster, "node2", "--bind", runs, runs):
        cluster.run("mount", "-o", "remount,bind,ro", runs, node="node2", user="root")
        found = doctor(login)

    assert named(found) == {"run directory": ["node2"]}
    (told,) = [one for one in found["checked"]["findings"] if one["level"] == "fail"]
    assert "mounted read-only on the node" in told["to_do"]


@pytest.mark.long
def test_the_variables_of_a_job_that_has_ended_are_not_taken_for_a_job(cluster: Cluster, login: LoginNode) -> None:
    job_id = cluster.run("sbatch", "--parsable", "--nodes=2", "--wrap=exit", cwd=login.folder).stdout.strip()
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout, 30)
    stale = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}

    found = doctor(login, env=stale)

    assert found["code"] == 0
    assert len(found["checked"]["nodes"]) == 4
    assert [(one["level"], one["found"]) for one in found["site"] if one["check"] == "job"] == [
        ("warn", f"the Slurm variables of this shell name job {job_id}, which completed")
    ]


@pytest.mark.long
def test_without_a_controller_no_job_is_waited_for(cluster: Cluster, login: LoginNode) -> None:
    cluster.stop_controller()

    found = doctor(login)

    levels = {one["check"]: one["level"] for one in found["site"]}
    assert (levels["controller"], levels["nodes"], levels["start"]) == ("fail", "unknown", "unknown")
    assert found["checked"] is None
    assert found["not_checked"] == "the controller does not answer"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "setting", "said"),
    [
        ("preempt/partition_prio", "slurm.partition=low", "ok: .*by partition low; jobs of partition batch, partition high"),
        ("preempt/partition_prio", "slurm.partition=kill", "warn: .*PreemptMode is CANCEL"),
        ("preempt/partition_prio", "slurm.partition=high", "ok: .*OFF in partition high"),
        ("preempt/qos", "slurm.qos=low", "ok: .*by QOS low; jobs of QOS high"),
        ("preempt/qos", "slurm.partition=low", "warn: .*by QOS normal; jobs of QOS high"),  # the user's default QOS, not the partition
        ("preempt/qos", "slurm.qos=high", "ok: .*QOS high, but no partition or QOS has a higher rank"),
    ],
)  # fmt: skip
def test_the_rule_of_preemption_is_that_of_the_partition_or_of_the_qos(
    cluster: Cluster, login: LoginNode, kind: str, setting: str, said: str
) -> None:
    if kind == "preempt/qos":
        cluster.reconfig(PreemptType=kind)

    done = login.type("doctor", "--json", setting)

    (found,) = [one for one in json.loads(done.stdout)["site"] if one["check"] == "preemption"]
    assert re.match(said, f"{found['level']}: {found['found']}"), found


@pytest.mark.long
def test_the_reason_of_a_drained_node_is_explained(cluster: Cluster, login: LoginNode) -> None:
    reason = "[node_problem] GPU 3 fell off the bus"
    cluster.run("scontrol", "update", "nodename=node4", "state=drain", f"reason={reason}", user="root")

    done = login.type("doctor")

    assert f"warn     nodes           node4 is drained: {reason}" in done.stdout, done.stdout
    assert "the node has failed a check of hardware or system" in done.stdout
    assert "3 of 4 nodes take jobs" in done.stdout


@pytest.mark.long
def test_a_job_that_does_not_start_in_time_is_taken_out_of_the_queue(cluster: Cluster, login: LoginNode) -> None:
    cluster.popen("salloc", "--nodes=4", "--exclusive", "sleep", "60")
    cluster.wait_for(lambda: "R" in cluster.run("squeue", "--noheader", "--format=%t").stdout, 30)

    done = login.type("doctor", "--nodes=2", "--patience=3")

    assert "did not start and end within 3 s" in done.stderr
    assert len(cluster.run("squeue", "--noheader").stdout.splitlines()) == 1


@pytest.mark.long
def test_no_job_is_submitted_that_the_cluster_has_too_few_nodes_for(login: LoginNode) -> None:
    done = login.type("doctor", "--nodes=9")

    assert done.returncode == 1
    assert "4 of 4 nodes take jobs; the run asks for 9" in done.stdout
    assert "ddp-hpc did not check the nodes" in done.stdout


@pytest.mark.long
def test_inside_of_a_job_its_own_nodes_are_checked(cluster: Cluster, login: LoginNode) -> None:
    argv = ["salloc", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "ddp_hpc", "doctor", "--nodes=2"]

    done = cluster.run(*argv, cwd=login.folder)

    assert "2 nodes, checked in" in done.stdout
    assert "all nodes have: InfiniBand, Ethernet" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", "srun", "torchrun"])
def test_a_run_on_healthy_nodes_is_checked_and_trains(login: LoginNode, launcher: str) -> None:
    login.submit(
        "checked", *SMALL, *world(4, 1), "preflight.enabled=true", f"launcher={launcher}", "--wait", timeout=240
    )

    assert login.status("checked")["state"] == "finished"
    found = try_read_record(login.run("checked").preflight(0), PreflightReport)
    assert found is not None
    assert found.failures == []
    assert not login.run("checked").preflight_files(0).exists()


@pytest.fixture
def faulty(login: LoginNode) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Return what submits a run of three nodes, of which node2 has another PyTorch."""
    login.add_recipe(TRIAL_RECIPE)

    def submit(name: str, *settings: str) -> subprocess.CompletedProcess[str]:
        words = ["submit", "digits.yaml", f"name={name}", "--cluster", "slurm", *SMALL, *world(3, 1), "--wait"]
        return login.type(*words, "preflight.enabled=true", *settings)

    with other_torch(login, "node2"):
        yield submit


@pytest.mark.long
def test_a_node_that_differs_is_left_out_and_the_run_trains_on_others(login: LoginNode, faulty: Any) -> None:
    done = faulty("excluded", "preflight.on_fail=exclude")

    assert done.returncode == 0, done.stdout + done.stderr + login.console("excluded")
    first, second = Ledger.read(login.run("excluded")).attempts
    assert (first.cause, first.next, first.failed_nodes) == ("node failed", "requeue", ("node2",))
    assert (second.ending, second.nodes) == ("finished", ("node1", "node3", "node4"))
    why = login.type("why", "excluded", "--attempt", "0").stdout
    assert "[preflight; from the run's records]" in why
    assert "torch: node2 has 1.13.1" in " ".join(why.split())


@pytest.mark.long
def test_a_node_that_the_user_asks_for_by_name_is_not_left_out(login: LoginNode, faulty: Any) -> None:
    done = faulty("asked", "preflight.on_fail=exclude", "slurm.nodelist=node[1-3]")

    assert done.returncode != 0
    (only,) = Ledger.read(login.run("asked")).attempts
    assert (only.cause, only.next, only.failed_nodes) == ("preflight", "", ())
    assert "`slurm.nodelist` asks for node2, so it cannot be left out" in login.status("asked")["reason"]


@pytest.mark.long
def test_a_run_that_stops_at_a_failed_check_says_which_node_and_why(login: LoginNode, faulty: Any) -> None:
    done = faulty("halted")

    assert done.returncode != 0
    (only,) = Ledger.read(login.run("halted")).attempts
    assert (only.cause, only.ending, only.next) == ("preflight", "failed", "")
    assert "torch: node2 has 1.13.1" in login.status("halted")["reason"]
    assert not any(login.run("halted").path.glob("logs/attempt-0/rank-*.log"))


@pytest.mark.long
def test_a_run_that_only_warns_trains_all_the_same(login: LoginNode, faulty: Any) -> None:
    done = faulty("warned", "preflight.on_fail=warn")

    assert done.returncode == 0, done.stdout + done.stderr + login.console("warned")
    assert "preflight: fail: torch: node2 has 1.13.1" in login.console("warned")
    (only,) = Ledger.read(login.run("warned")).attempts
    assert only.ending == "finished"
