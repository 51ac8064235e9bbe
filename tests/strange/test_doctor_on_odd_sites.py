"""The check of nodes on sites that its authors did not have: one node, many, IPv6, parts of GPUs, a TMPDIR that is nowhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.cluster.node_checks.answers import NodeAnswers, NodeNeeds
from ddp_hpc.cluster.node_checks.checks import findings_of
from ddp_hpc.cluster.node_checks.facts import Disk, NodeFacts, SharedDir
from ddp_hpc.cluster.node_checks.gather import gather
from ddp_hpc.job.preflight import outcome_of_findings
from ddp_hpc.run.run_dir.network import LinkMetrics, NetworkFindings
from ddp_hpc.run.run_dir.preflight import Finding, PreflightReport
from tests.unit.test_doctor import a_slurm, found_by
from tests.unit.test_node_verdict import GOOD, network


def many(count: int) -> dict[str, NodeFacts]:
    names = tuple(f"n{number}" for number in range(count))
    facts = replace(GOOD, names={name: (f"10.0.{name[1:]}.1",) for name in names}, shared=SharedDir(seen=names))
    return dict.fromkeys(names, facts)


def not_good(facts: dict[str, NodeFacts], known: NetworkFindings | None = None) -> list[Finding]:
    whole = NodeAnswers(nodes=tuple(facts), facts=facts, network=known or network(tuple(facts)))
    return [one for one in findings_of(whole) if one.level != "ok"]


def test_a_job_of_one_node_has_no_network_to_probe_and_nothing_to_compare() -> None:
    facts = many(1)

    assert [one for one in findings_of(NodeAnswers(nodes=("n0",), facts=facts)) if one.level != "ok"] == []


def test_of_many_nodes_all_that_differ_are_named() -> None:
    facts = many(64)
    old = replace(facts["n7"], software={**(GOOD.software or {}), "torch": "1.0"})

    (found,) = not_good({**facts, "n7": old, "n9": old, "n63": old})

    assert (found.check, found.nodes) == ("torch", ("n7", "n9", "n63"))


def test_nodes_that_have_only_ipv6_agree() -> None:
    names = {"n0": ("fd00::1", "fe80::1%eth0"), "n1": ("fd00::2",), "n2": ("fd00::3",)}
    facts = {name: replace(one, names=names) for name, one in many(3).items()}

    assert not_good(facts) == []


def test_a_scratch_directory_that_no_node_has_is_a_failure_of_no_single_one() -> None:
    none = replace(GOOD, disks={"temporary files": Disk(path="/scratch/me", error="No such file or directory")})
    facts = {name: replace(one, disks=none.disks) for name, one in many(3).items()}

    (found,) = not_good(facts)

    assert (found.check, found.level, found.nodes) == ("disk", "fail", ())
    assert "/scratch/me" in found.found


def test_a_file_system_without_inodes_is_not_full() -> None:
    disks = {"temporary files": Disk(path="/tmp", free_bytes=1 << 40, free_files=None)}

    assert not_good({name: replace(one, disks=disks) for name, one in many(3).items()}) == []


@pytest.mark.parametrize(("visible", "count"), [("MIG-1,MIG-2", 2), ("0,1,2,3", 4), ("", 0), ("-1", 0)])
def test_parts_of_gpus_count_as_the_job_sees_them(visible: str, count: int, tmp_path: Path) -> None:
    found = gather("a", ["a"], folder=tmp_path, paths=[], environ={"CUDA_VISIBLE_DEVICES": visible})

    assert found.num_gpus == count


@pytest.mark.parametrize("name", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_amd_gpus_count_as_the_job_sees_them(name: str, tmp_path: Path) -> None:
    assert gather("a", ["a"], folder=tmp_path, paths=[], environ={name: "0,1"}).num_gpus == 2


def test_a_node_of_another_version_of_ddp_hpc_is_named() -> None:
    facts = many(3)
    del facts["n1"]  # its answer had another form, so it counts as none
    facts = {name: replace(one, shared=SharedDir(seen=("n0", "n2"))) for name, one in facts.items()}

    found = findings_of(NodeAnswers(nodes=("n0", "n1", "n2"), facts=facts, network=network(("n0", "n1", "n2"))))

    assert [(one.check, one.nodes) for one in found if one.level == "fail"] == [("nodes", ("n1",))]


def test_two_nodes_whose_clocks_differ_name_neither() -> None:
    nodes = ("n0", "n1")
    paces = (
        LinkMetrics(sender="n0", receiver="n1", mb_per_s=100.0, ahead_s=90.0, trip_s=0.001),
        LinkMetrics(sender="n1", receiver="n0", mb_per_s=100.0, ahead_s=-90.0, trip_s=0.001),
    )

    (found,) = not_good(many(2), network(nodes, paces=paces))

    assert (found.check, found.level, found.nodes) == ("clocks", "warn", ())


def preflight(*findings: Finding) -> PreflightReport:
    return PreflightReport(at=0.0, seconds=1.0, nodes=("n0", "n1", "n2"), findings=findings)


NAMED = Finding(check="torch", level="fail", found="", nodes=("n1",))
NAMELESS = Finding(check="data", level="fail", found="")
WARNED = Finding(check="driver", level="warn", found="", nodes=("n1",))


@pytest.mark.parametrize(
    ("findings", "on_fail", "lost", "ends"),
    [
        ((), "stop", (), False),
        ((WARNED,), "stop", (), False),
        ((WARNED,), "exclude", (), False),
        ((NAMED,), "warn", (), False),
        ((NAMED,), "stop", (), True),
        ((NAMED,), "exclude", ("n1",), False),
        ((NAMED, NAMELESS), "exclude", (), True),  # without the node, the job would fail again
        ((NAMELESS,), "exclude", (), True),
    ],
)
def test_a_node_is_left_out_only_where_that_mends_all(
    findings: tuple[Finding, ...], on_fail: str, lost: tuple[str, ...], ends: bool
) -> None:
    outcome = outcome_of_findings(preflight(*findings), on_fail)

    assert (outcome is not None and outcome.has_failed_preflight) == ends
    assert (() if outcome is None else outcome.lost_nodes) == lost


def test_a_node_that_the_user_asked_for_is_not_left_out_but_ends_the_run() -> None:
    outcome = outcome_of_findings(preflight(NAMED), "exclude", nodelist="n[0-2]")

    assert outcome is not None
    assert (outcome.has_failed_preflight, outcome.lost_nodes) == (True, ())
    assert "`slurm.nodelist` asks for n1" in outcome.reason


def test_more_cpus_are_asked_for_than_one_node_has() -> None:
    facts = many(3)
    whole = NodeAnswers(
        nodes=tuple(facts),
        facts={**facts, "n2": replace(facts["n2"], num_cpus=1)},
        network=network(tuple(facts)),
        asked=NodeNeeds(cpus_per_node=8),
    )

    assert [(one.check, one.level, one.nodes) for one in findings_of(whole) if one.level != "ok"] == [
        ("CPUs", "warn", ("n2",))
    ]


def site(folder: Path, **programs: str) -> dict[str, list[Finding]]:
    """Return what the doctor says on a login node some of whose programs answer otherwise."""
    environ = a_slurm(folder)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    return found_by(environ, folder=folder)


def test_a_site_that_hides_its_nodes_from_users_is_not_one_without_nodes(tmp_path: Path) -> None:
    (found,) = site(tmp_path, sinfo="exit 0")["nodes"]

    assert (found.level, "PrivateData" in found.to_do) == ("unknown", True)


def test_what_a_policy_denies_is_not_asked_for_again(tmp_path: Path) -> None:
    denied = "echo 'slurm_load_partitions error: Access/permission denied' >&2; exit 1"

    found = site(tmp_path, scontrol=f'[ "$1" = ping ] && echo "Slurmctld(primary) at head is UP" || {{ {denied}; }}')

    assert {one.level for check in ("Slurm", "partition", "requeue") for one in found[check]} == {"unknown"}
    assert "a policy of the site" in found["partition"][0].to_do


def test_of_five_thousand_nodes_those_that_are_down_for_one_reason_are_one_line(tmp_path: Path) -> None:
    rows = (
        rf"n{number}.site.example\x1f{'down*' if number % 2 else 'idle'}\x1freason {number % 40}\x1e"
        for number in range(5000)
    )
    (tmp_path / "rows").write_text("\n".join(rows).encode().decode("unicode_escape"), encoding="utf-8")

    whole, *groups, rest = site(tmp_path, sinfo=f"cat {tmp_path}/rows")["nodes"]

    assert whole.found == "2500 of 5000 nodes take jobs; the run asks for 1"
    assert len(groups) == 8
    assert groups[0].found.startswith("n1.site.example, n41.site.example, ")
    assert "and 121 more are down*: reason 1" in groups[0].found
    assert rest.found == "1500 more nodes are out of service, for 12 other reasons"


@pytest.mark.parametrize(
    ("num_reasons", "last"),
    [
        (8, "n7 is down: reason 7"),
        (9, "n8 is down: reason 8"),
        (10, "2 more nodes are out of service, for 2 other reasons"),
    ],
)
def test_a_last_reason_is_shown_itself(tmp_path: Path, num_reasons: int, last: str) -> None:
    rows = "".join(f"n{number}\x1fdown\x1freason {number}\x1e\n" for number in range(num_reasons))
    (tmp_path / "rows").write_text(rows, encoding="utf-8")

    _, *lines = site(tmp_path, sinfo=f"cat {tmp_path}/rows")["nodes"]

    assert lines[-1].found == last


def test_few_processes_of_a_user_are_a_warning() -> None:
    facts = many(3)
    facts["n1"] = replace(facts["n1"], limits={"nofile": 65536, "memlock": -1, "nproc": 50})

    (found,) = not_good(facts)

    assert (found.check, found.level, found.nodes) == ("limits", "warn", ("n1",))
    assert "only 50 processes and threads" in found.found


def test_where_no_more_threads_may_be_started_what_is_known_without_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit such as `ulimit -u 50`, with a user's other processes, has Python raise this."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)

    here = site(tmp_path)["runs directory"][0]
    node = gather("a", ["a"], folder=tmp_path, paths=[], environ={})

    assert (here.level, "ulimit -u" in here.found) == ("unknown", True)
    assert node.limits is not None
    assert "disks" in node.late
