"""From the answers of all nodes to the node that differs."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from ddp_hpc.cluster.node_checks.answers import NodeAnswers, NodeNeeds, odd_nodes
from ddp_hpc.cluster.node_checks.checks import findings_of
from ddp_hpc.cluster.node_checks.facts import EMPTY, MISSING, THERE, Disk, NodeFacts, SharedDir, neighbours, parse_facts
from ddp_hpc.cluster.node_checks.of_network import ahead_s_by_node
from ddp_hpc.run.run_dir.network import LinkMetrics, NetworkFindings, PairFault
from ddp_hpc.run.run_dir.preflight import Finding

NODES = ("node1", "node2", "node3", "node4")
ADDRESSES = {node: (f"10.0.0.{number}",) for number, node in enumerate(NODES, 1)}
GOOD = NodeFacts(
    software={
        "python": "3.11.2",
        "torch": "2.9.0",
        "cuda": "12.8",
        "hip": "",
        "nccl": "2.27",
        "driver": "570",
        "ddp_hpc": "1",
        "machine": "Linux",
    },
    gpus=("H100",) * 4,
    num_gpus=4,
    num_cpus=64,
    names=ADDRESSES,
    reverse_s=0.001,
    networks={"InfiniBand": 1, "Ethernet": 1},
    limits={"nofile": 65536, "memlock": -1, "nproc": -1},
    disks={"temporary files": Disk(path="/tmp", free_bytes=100 << 30, free_files=10**6)},
    shared=SharedDir(write_s=0.01, seen=NODES, seen_s=0.1),
    paths={"/data": THERE},
    mounts={"/data": ("/data", "nfs4", "server:/sets")},
)


def network(nodes: tuple[str, ...] = NODES, **fields: Any) -> NetworkFindings:
    pairs = [(one, other) for one in nodes for other in nodes if one != other]
    paces = tuple(
        LinkMetrics(sender=one, receiver=other, mb_per_s=1000.0, ahead_s=0.0, trip_s=0.0001) for one, other in pairs
    )
    whole: dict[str, Any] = {"at": 0.0, "seconds": 1.0, "address": "10.0.0.1", "num_nodes": len(nodes)}
    return NetworkFindings(**{**whole, "num_pairs": len(pairs) // 2, "paces": paces, **fields})


def answers(changed: dict[str, NodeFacts] | None = None, **fields: Any) -> NodeAnswers:
    facts = {**dict.fromkeys(NODES, GOOD), **(changed or {})}
    return NodeAnswers(**{"nodes": NODES, "facts": facts, "network": network(), **fields})


def bad(found: NodeAnswers) -> list[Finding]:
    return [one for one in findings_of(found) if one.level != "ok"]


@pytest.mark.parametrize(
    ("mount", "level", "nodes", "said"),
    [
        (("/", "ext4", "/dev/sda1"), "fail", ("node3",), "it lies on /data (nfs4 of server:/sets) on most, and on / (ext4 of /dev/sda1) on node3"),
        (("/data", "nfs4", "server:/sets"), "warn", (), "/data is empty on node3"),
        (("/data", "autofs", "/etc/auto.data"), "warn", (), "autofs"),
        (None, "warn", (), "/data is empty on node3"),
    ],
)  # fmt: skip
def test_an_empty_directory_names_its_node_only_where_a_mount_is_missing(
    mount: tuple[str, str, str] | None, level: str, nodes: tuple[str, ...], said: str
) -> None:
    facts = replace(GOOD, paths={"/data": EMPTY}, mounts={} if mount is None else {"/data": mount})

    (found,) = bad(answers({"node3": facts}))

    assert (found.check, found.level, found.nodes) == ("data", level, nodes)
    assert said in found.found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cuda": "13.2", "driver": "570.195.03"}, "built with CUDA 13.2, which needs NVIDIA's driver 580 or newer, but the driver is 570.195.03"),
        ({"cuda": "12.4", "driver": "470.82"}, "needs NVIDIA's driver 525 or newer"),
        ({"cuda": "13.0", "driver": "580.65.06"}, ""),
        ({"cuda": "12.8", "driver": "535.104.05"}, ""),
        ({"cuda": "12.8", "driver": "615.10"}, ""),
        ({"cuda": "14.0", "driver": "535.104.05"}, ""),
        ({"cuda": "", "driver": "580.65.06"}, "is built without CUDA, so it does not use the GPUs of driver 580.65.06"),
        ({"cuda": "", "driver": ""}, ""),
        ({"cuda": "", "hip": "6.2", "driver": "580.65.06"}, ""),
        ({"torch": "", "cuda": "", "driver": "580.65.06"}, ""),
    ],
)  # fmt: skip
def test_a_driver_that_does_not_fit_pytorch_is_told_once_for_all_nodes(changed: dict[str, str], said: str) -> None:
    facts = replace(GOOD, software={**(GOOD.software or {}), **changed})

    found = [one for one in bad(answers(dict.fromkeys(NODES, facts))) if one.check == "driver"]

    assert [one.level for one in found] == (["warn"] if said else [])
    assert all(said in one.found and one.found.startswith("node1, node2, node3, node4: ") for one in found)


@pytest.mark.parametrize(
    ("num_gpus", "granted", "asked", "level", "said"),
    [
        (None, None, 4, "unknown", "nothing on node3 shows whether there are GPUs"),
        (None, 4, 0, "unknown", "nothing on node3 shows"),
        (3, 4, 0, "fail", "node3 shows 3 of the 4 GPUs that Slurm gave the job"),
        (3, 4, 2, "fail", "node3 shows 3 of the 4 GPUs that Slurm gave the job"),
        (2, 2, 4, "fail", "node3 shows 2 of the 4 GPUs that the run asks for"),
    ],
)
def test_gpus_that_nothing_shows_are_unknown_and_lost_ones_are_told(
    num_gpus: int | None, granted: int | None, asked: int, level: str, said: str
) -> None:
    facts = replace(GOOD, num_gpus=num_gpus, granted_gpus=granted)

    (found,) = bad(answers({"node3": facts}, asked=NodeNeeds(gpus_per_node=asked)))

    assert (found.check, found.level) == ("GPUs", level)
    assert said in found.found


def test_a_name_that_was_not_answered_in_time_is_not_taken_for_one_that_does_not_resolve() -> None:
    few = {node: ADDRESSES[node] for node in NODES if node != "node2"}
    facts = replace(GOOD, names=few, late=("1 of 4 names",))

    (found,) = bad(answers({"node3": facts}))

    assert (found.check, found.level, found.nodes) == ("nodes", "unknown", ())


def test_equal_nodes_have_no_finding() -> None:
    assert bad(answers(asked=NodeNeeds(cpus_per_node=64, gpus_per_node=4))) == []


OTHER_TORCH = replace(GOOD, software={**(GOOD.software or {}), "torch": "2.8.0"})
OTHER_DRIVER = replace(GOOD, software={**(GOOD.software or {}), "driver": "550"})
WRONG_HOSTS = replace(GOOD, names={**ADDRESSES, "node2": ("10.0.0.99",)})
FULL = replace(GOOD, disks={"temporary files": Disk(path="/tmp", free_bytes=4 << 20, free_files=10)})
OVER_QUOTA = replace(
    GOOD, disks={"temporary files": Disk(path="/tmp", error="Disk quota exceeded", free_bytes=1 << 40)}
)
NO_DATA = replace(GOOD, paths={"/data": MISSING})
EMPTY_MOUNT = replace(GOOD, paths={"/data": EMPTY}, mounts={"/data": ("/", "ext4", "/dev/sda1")})
ALONE = replace(GOOD, shared=SharedDir(write_s=0.01, seen=("node3",), seen_s=6.0))
NO_RUN_DIR = replace(GOOD, shared=SharedDir(error="No such file or directory"))
LATE = replace(GOOD, paths={}, late=("path /data",))
CUT = replace(GOOD, networks={"InfiniBand": 0, "Ethernet": 1})
UNPLUGGED = replace(GOOD, networks={"InfiniBand": 1})
FEW_GPUS = replace(GOOD, num_gpus=3)


@pytest.mark.parametrize(
    ("facts", "check", "level", "word"),
    [
        (OTHER_TORCH, "torch", "fail", "node3 has 2.8.0; the other nodes have 2.9.0"),
        (OTHER_DRIVER, "driver", "warn", "node3 has 550"),
        (WRONG_HOSTS, "names", "warn", "node2: node3 resolves it to 10.0.0.99, the others to 10.0.0.2"),
        (FULL, "disk", "fail", "node3: 4 MiB free"),
        (OVER_QUOTA, "disk", "fail", "Disk quota exceeded"),
        (NO_DATA, "data", "fail", "/data is missing on node3"),
        (EMPTY_MOUNT, "data", "fail", "/data is empty on node3"),
        (NO_RUN_DIR, "run directory", "fail", "node3 cannot write into the run directory: No such file"),
        (LATE, "nodes", "fail", "node3 did not answer in time about: path /data"),
        (CUT, "interfaces", "fail", "node3 has no interface of InfiniBand that is up; the other nodes have 1"),
        (UNPLUGGED, "interfaces", "warn", "node3 has no interface of Ethernet"),
        (FEW_GPUS, "GPUs", "fail", "node3 shows 3 of the 4 GPUs that the run asks for"),
    ],
)
def test_the_node_that_differs_is_named(facts: NodeFacts, check: str, level: str, word: str) -> None:
    found = bad(answers({"node3": facts}, asked=NodeNeeds(gpus_per_node=4)))

    assert [(one.check, one.level, one.nodes) for one in found] == [(check, level, ("node3",))]
    assert word in found[0].found
    assert found[0].to_do or check in {"driver", "GPUs"}


@pytest.mark.parametrize(
    ("number", "named", "to_do"),
    [
        (errno.ESTALE, ("node3",), "mounted again on the node"),
        (errno.EIO, ("node3",), "the file system fails on this node"),
        (errno.EROFS, ("node3",), "mounted read-only on the node"),
        (errno.EACCES, ("node3",), "`id` on the node"),
        (errno.ENOENT, ("node3",), "`findmnt --target DIR`"),
        (errno.EDQUOT, (), "free space of your quota"),  # the other nodes have only come before
        (errno.ENOSPC, (), "remove files"),
    ],
)
def test_why_a_node_cannot_write_tells_whose_fault_it_is(number: int, named: tuple[str, ...], to_do: str) -> None:
    (found,) = bad(answers({"node3": replace(GOOD, shared=SharedDir(error=os.strerror(number)))}))

    assert (found.check, found.level, found.nodes) == ("run directory", "fail", named)
    assert f"node3 cannot write into the run directory: {os.strerror(number)}" in found.found
    assert to_do in found.to_do


def test_nodes_that_cannot_write_for_different_reasons_are_told_apart() -> None:
    stale, over = (replace(GOOD, shared=SharedDir(error=os.strerror(one))) for one in (errno.ESTALE, errno.EDQUOT))

    found = bad(answers({"node2": stale, "node3": over}))

    assert [one.nodes for one in found] == [("node2",), ()]


def test_a_node_with_another_file_system_in_the_place_of_the_run_directory_is_named() -> None:
    others = replace(GOOD, shared=SharedDir(write_s=0.01, seen=("node1", "node2", "node4"), seen_s=6.0))

    (found,) = bad(answers({**dict.fromkeys(("node1", "node2", "node4"), others), "node3": ALONE}))

    assert (found.check, found.level, found.nodes) == ("run directory", "fail", ("node3",))


def test_a_node_that_starts_after_the_others_have_looked_is_on_the_same_file_system() -> None:
    others = replace(GOOD, shared=SharedDir(write_s=0.01, seen=("node1", "node2", "node4"), seen_s=6.0))

    assert bad(answers(dict.fromkeys(("node1", "node2", "node4"), others))) == []


def test_a_node_looks_at_few_others_however_many_there_are() -> None:
    nodes = [f"n{number}" for number in range(1000)]

    assert neighbours(0, nodes) == ["n996", "n997", "n998", "n999", "n1", "n2", "n3", "n4"]
    assert neighbours(0, ["n1", "n2"]) == ["n2"]
    assert neighbours(0, ["n1"]) == []


def test_of_many_nodes_the_one_on_another_file_system_is_named() -> None:
    nodes = tuple(f"n{number}" for number in range(64))
    names = {node: (f"10.0.1.{number}",) for number, node in enumerate(nodes)}
    facts = {
        node: replace(
            GOOD, names=names, shared=SharedDir(seen=(node, *(n for n in neighbours(at, nodes) if n != "n7")))
        )
        for at, node in enumerate(nodes)
    }
    facts["n7"] = replace(facts["n7"], shared=SharedDir(seen=("n7",)))

    (found,) = bad(NodeAnswers(nodes=nodes, facts=facts, network=network(nodes)))

    assert (found.check, found.nodes) == ("run directory", ("n7",))


def test_where_each_node_has_a_run_directory_of_its_own_none_is_the_odd_one() -> None:
    alone = {node: replace(GOOD, shared=SharedDir(write_s=0.01, seen=(node,), seen_s=6.0)) for node in NODES}

    (found,) = bad(answers(alone))

    assert (found.check, found.level, found.nodes) == ("run directory", "fail", ())


def test_of_two_nodes_that_differ_neither_is_named() -> None:
    nodes = NODES[:2]
    shared = SharedDir(write_s=0.01, seen=nodes, seen_s=0.1)
    facts = {"node1": replace(GOOD, shared=shared), "node2": replace(OTHER_TORCH, shared=shared)}

    (found,) = bad(NodeAnswers(nodes=nodes, facts=facts, network=network(nodes)))

    assert (found.check, found.level, found.nodes) == ("torch", "fail", ())
    assert "node1 has 2.9.0, node2 has 2.8.0" in found.found


def test_what_no_node_has_is_no_finding_as_the_run_may_make_it() -> None:
    assert bad(answers(dict.fromkeys(NODES, NO_DATA))) == []


def test_data_that_no_node_may_read_is_a_failure_of_no_single_node() -> None:
    (found,) = bad(answers(dict.fromkeys(NODES, replace(GOOD, paths={"/data": "Permission denied"}))))

    assert (found.check, found.level, found.nodes) == ("data", "warn", ())


def test_a_node_that_does_not_answer_is_named_and_what_it_has_is_not_compared() -> None:
    whole = answers()
    facts = {node: replace(GOOD, shared=SharedDir(write_s=0.01, seen=NODES[:3])) for node in NODES[:3]}

    (found,) = bad(replace(whole, facts=facts))

    assert (found.check, found.level, found.nodes) == ("nodes", "fail", ("node4",))


@pytest.mark.parametrize(("num_silent", "named"), [(1, NODES[3:]), (2, NODES[2:]), (3, ())])
def test_where_most_nodes_do_not_answer_none_is_the_odd_one(num_silent: int, named: tuple[str, ...]) -> None:
    answered = NODES[: len(NODES) - num_silent]
    facts = {node: replace(GOOD, shared=SharedDir(write_s=0.01, seen=answered)) for node in answered}

    (found,) = bad(replace(answers(), facts=facts))

    assert (found.check, found.level, found.nodes) == ("nodes", "fail", named)
    assert f"no answer from {', '.join(NODES[len(answered) :])}" in found.found


@pytest.mark.parametrize("answered", [(), NODES[:1], NODES[:2]])
def test_where_slurm_cannot_start_the_check_on_a_node_the_others_that_it_then_ends_are_not_to_blame(
    answered: tuple[str, ...],
) -> None:
    facts = {node: replace(GOOD, shared=SharedDir(write_s=0.01, seen=answered)) for node in answered}

    found = bad(replace(answers(), facts=facts, unstarted=["node3"]))

    assert [(one.check, one.level, one.nodes) for one in found] == [("nodes", "fail", ("node3",))]
    assert found[0].found.endswith("node4; Slurm could not start the check on node3")


def test_without_any_answer_nothing_is_known() -> None:
    (found,) = findings_of(NodeAnswers(nodes=NODES, facts={}, problem="srun: error: Unable to create step"))

    assert found.level == "unknown"
    assert "Unable to create step" in found.found


def test_parts_that_no_node_gave_are_unknown_and_never_ok() -> None:
    found = findings_of(answers(dict.fromkeys(NODES, NodeFacts()), network=None))

    unknown = {one.check for one in found if one.level == "unknown"}
    assert {"interfaces", "network", "names", "run directory", "disk", "python", "torch"} <= unknown
    assert {one.check for one in found if one.level == "ok"} == {"nodes"}


def test_a_node_may_resolve_its_own_name_to_the_loopback() -> None:
    debian = {node: replace(GOOD, names={**ADDRESSES, node: ("127.0.1.1",)}) for node in NODES}

    assert bad(answers(debian)) == []


@pytest.mark.parametrize(
    "everywhere",
    [
        replace(GOOD, names=dict.fromkeys(NODES, ())),
        replace(GOOD, disks={"shared memory": Disk(path="/dev/shm", free_bytes=63 << 20)}),
        replace(GOOD, names=None, late=("names",)),
        replace(GOOD, paths={}, late=("path /data",)),
        replace(GOOD, num_gpus=None),
    ],
)
def test_what_all_nodes_of_a_healthy_site_have_is_no_failure(everywhere: NodeFacts) -> None:
    found = bad(answers(dict.fromkeys(NODES, everywhere), asked=NodeNeeds(gpus_per_node=4)))

    assert [one for one in found if one.level == "fail"] == []


@pytest.mark.parametrize(("label", "to_do"), [("shared memory", "data.num_workers"), ("temporary files", "env.TMPDIR")])
def test_a_full_disk_and_full_memory_each_have_their_own_remedy(label: str, to_do: str) -> None:
    full = replace(GOOD, disks={label: Disk(path="/there", free_bytes=1 << 20)})

    (found,) = bad(answers({"node3": full}))

    assert to_do in found.to_do


def test_a_node_that_knows_one_address_more_does_not_differ() -> None:
    both = replace(GOOD, names={**ADDRESSES, "node2": ("10.0.0.2", "fd00::2")})

    assert bad(answers({"node3": both})) == []


@pytest.mark.parametrize("part", ["names", "software", "networks", "limits"])
def test_a_part_that_is_slow_on_a_node_is_unknown(part: str) -> None:
    found = bad(answers({"node3": replace(GOOD, late=(part,))}))

    assert [(one.check, one.level, one.nodes) for one in found] == [("nodes", "unknown", ())]


@pytest.mark.parametrize("num_there", [1, 2])
def test_what_most_nodes_lack_names_no_node(num_there: int) -> None:
    (found,) = bad(answers(dict.fromkeys(NODES[num_there:], NO_DATA)))

    assert (found.check, found.level, found.nodes) == ("data", "warn", ())


def test_a_path_on_a_disk_of_each_node_names_no_node() -> None:
    there, missing = (replace(GOOD, paths={"/tmp/cache": state}) for state in (THERE, MISSING))

    (found,) = bad(answers({**dict.fromkeys(NODES, there), "node3": missing}))

    assert (found.check, found.level, found.nodes) == ("data", "warn", ())


def test_a_name_that_no_other_node_resolves_is_a_failure() -> None:
    none = replace(GOOD, names={**ADDRESSES, "node4": ()})

    (found,) = bad(answers(dict.fromkeys(NODES, none)))

    assert (found.check, found.nodes) == ("names", ())
    assert "resolves it to nothing" in found.found


def clocks(**ahead: float) -> NetworkFindings:
    def offset(one: str, other: str) -> float:
        return ahead.get(other, 0.0) - ahead.get(one, 0.0)

    paces = (replace(pace, ahead_s=offset(pace.sender, pace.receiver)) for pace in network().paces)
    return replace(network(), paces=tuple(paces))


@pytest.mark.parametrize(
    ("node", "ahead", "level"), [("node1", 60.0, "fail"), ("node3", -60.0, "fail"), ("node4", 5.0, "warn")]
)
def test_the_node_whose_clock_is_off_is_named(node: str, ahead: float, level: str) -> None:
    (found,) = bad(answers(network=clocks(**{node: ahead})))

    assert (found.check, found.level, found.nodes) == ("clocks", level, (node,))
    assert f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'}" in found.found


@pytest.mark.parametrize(
    "ahead", [{"node3": 60.0, "node4": 60.0}, {"node1": 0.0, "node2": 40.0, "node3": 90.0, "node4": 200.0}]
)
def test_where_no_time_is_that_of_most_nodes_none_is_named(ahead: dict[str, float]) -> None:
    (found,) = bad(answers(network=clocks(**ahead)))

    assert (found.check, found.level, found.nodes) == ("clocks", "warn", ())
    assert f"differ by up to {max(ahead.values()):.1f} s" in found.found


def speeds(*slow: tuple[str, str]) -> NetworkFindings:
    paces = (replace(pace, mb_per_s=1.2) if (pace.sender, pace.receiver) in slow else pace for pace in network().paces)
    return replace(network(), paces=tuple(paces))


def test_a_node_all_of_whose_links_are_slow_is_named() -> None:
    (found,) = bad(answers(network=speeds(*[("node2", other) for other in NODES if other != "node2"])))

    assert (found.check, found.level, found.nodes) == ("speed", "warn", ("node2",))


def test_of_one_slow_pair_no_node_is_named() -> None:
    (found,) = bad(answers(network=speeds(("node2", "node3"), ("node3", "node2"))))

    assert (found.check, found.nodes) == ("speed", ())
    assert "node2 to node3 1.2" in found.found


def test_a_cut_fabric_names_its_node() -> None:
    pairs = tuple(PairFault(nodes=(one, "node3"), fault="nothing passes") for one in ("node1", "node2", "node4"))

    found = bad(answers(network=network(bad_nodes=("node3",), pairs=pairs)))

    assert [(one.check, one.level, one.nodes) for one in found] == [("network", "fail", ("node3",))]


def test_few_cpus_on_all_nodes_are_a_warning_about_none() -> None:
    (found,) = bad(answers(asked=NodeNeeds(cpus_per_node=65)))

    assert (found.check, found.level, found.nodes) == ("CPUs", "warn", ())


@pytest.mark.parametrize(
    ("values", "common", "odd"),
    [
        ({"a": 1, "b": 1, "c": 2}, 1, ["c"]),
        ({"a": 1, "b": 2}, None, []),
        ({"a": 1, "b": 1, "c": 2, "d": 2}, None, []),
        ({"a": 1}, 1, []),
        ({}, None, []),
    ],
)
def test_the_odd_one_needs_a_majority_against_it(values: dict[str, int], common: int | None, odd: list[str]) -> None:
    assert odd_nodes(values) == (common, odd)


def test_an_answer_survives_the_way_through_json() -> None:
    assert parse_facts(json.loads(json.dumps(asdict(GOOD)))) == GOOD


@pytest.mark.parametrize("plain", [None, [], "text", {"names": 3}, {"disks": {"tmp": {"colour": "red"}}}])
def test_what_is_no_answer_is_not_taken_for_one(plain: Any) -> None:
    assert parse_facts(plain) is None


@pytest.mark.parametrize(
    ("nofile", "level", "nodes"), [(4096, "fail", ("node3",)), (6164, "ok", ()), (512, "fail", ("node3",))]
)
def test_a_node_that_allows_too_few_open_files_for_the_world_fails(
    nofile: int, level: str, nodes: tuple[str, ...]
) -> None:
    facts = replace(GOOD, limits={"nofile": nofile, "memlock": -1, "nproc": -1})

    found = bad(answers({"node3": facts}, asked=NodeNeeds(open_files=3 * 2048 + 20)))

    assert [(one.level, one.nodes) for one in found] == ([(level, nodes)] if nodes else [])


def test_the_checks_of_thousands_of_nodes_are_judged_in_a_moment() -> None:
    """Each clock was once looked for in all links: a minute for 1,000 nodes that had all measured each other."""
    nodes = tuple(f"n{number}" for number in range(3000))
    links = [(one, nodes[(at + step) % 3000]) for at, one in enumerate(nodes) for step in (1, 2, 4, 8)]
    paces = [LinkMetrics(sender=one, receiver=to, mb_per_s=1e3, ahead_s=0.0, trip_s=0.0001) for one, to in links]
    near = {node: neighbours(at, nodes) for at, node in enumerate(nodes)}
    facts = {
        node: replace(GOOD, names=dict.fromkeys(near[node], ("10.0.0.1",)), shared=SharedDir(seen=(node, *near[node])))
        for node in nodes
    }
    asked = NodeAnswers(nodes=nodes, facts=facts, network=network(NODES, num_nodes=3000, paces=tuple(paces)))
    began = time.process_time()

    found = bad(asked)

    assert found == []
    assert time.process_time() - began < 3


def test_a_clock_is_known_along_a_chain_of_links_in_whatever_order_they_were_measured() -> None:
    nodes = [f"n{number}" for number in range(64)]
    links = [
        LinkMetrics(sender=one, receiver=to, mb_per_s=1e3, ahead_s=2.0, trip_s=0.0001) if at % 2
        else LinkMetrics(sender=to, receiver=one, mb_per_s=1e3, ahead_s=-2.0, trip_s=0.0001)
        for at, (one, to) in enumerate(itertools.pairwise(nodes))
    ]  # fmt: skip
    random.Random(7).shuffle(links)

    ahead = ahead_s_by_node(network(paces=tuple(links)))

    assert ahead == {node: 2.0 * (at - 31) for at, node in enumerate(nodes)}
