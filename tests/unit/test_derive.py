"""Every variable that follows from a job: its value, and who is right where several know one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.cluster.rendezvous.address import Host, addresses_of, find_address, this_host
from ddp_hpc.cluster.rendezvous.derive_env import derive
from ddp_hpc.cluster.rendezvous.interfaces import Interface
from ddp_hpc.cluster.rendezvous.worker_env import Sourced, WorkerEnv
from ddp_hpc.cluster.slurm.allocation import read_allocation
from tests.unit.made_network import DOCKER, LO, batch, host, interface, node, shell, task

RANKS = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"]
DEBIAN = {"node1": ["127.0.1.1"]}
"""What node1's own name means on node1, after Debian's installer."""


def lab(number: int, *, interfaces: Sequence[Interface] | None = None) -> Host:
    """Return a node of the lab: names of other nodes mean their Ethernet address, its own means loopback."""
    own, known = f"node{number}", {f"node{other}": [f"10.77.0.{10 + other}"] for other in (1, 2, 3)}
    routes = {f"10.{net}.0.{10 + other}": f"10.{net}.0.{10 + number}" for net in (77, 78) for other in (1, 2, 3)}
    return host(interfaces or node(number), names={**known, own: ["127.0.1.1"]}, routes=routes)


def derived(environ: Mapping[str, str], where: Host) -> WorkerEnv:
    return derive(environ, read_allocation(environ), where)


def row(environ: Mapping[str, str], where: Host, name: str) -> Sourced:
    return derived(environ, where).variables[name]


def values(environ: Mapping[str, str], where: Host, names: Sequence[str]) -> list[str | None]:
    found = derived(environ, where)
    return [found.value(name) for name in names]


ALL_TASKS = [
    (task(0, 0, 0, on="node1"), 1),
    (task(3, 0, 3, on="node1"), 1),
    (task(4, 1, 0, on="node2"), 2),
    (task(5, 2, 0, on="node3"), 3),
]


def test_a_task_has_all_its_numbers_on_uneven_nodes() -> None:
    assert values(task(4, 1, 0, on="node2"), lab(2), RANKS) == ["4", "0", "6", "1", "1"]
    assert values(task(3, 0, 3, on="node1"), lab(1), RANKS) == ["3", "3", "6", "4", "0"]


def test_all_tasks_of_a_step_come_to_the_same_place_without_a_word() -> None:
    places = {tuple(values(environ, lab(number), ["MASTER_ADDR", "MASTER_PORT"])) for environ, number in ALL_TASKS}

    assert [address for address, _ in places] == ["10.77.0.11"]


def test_tasks_name_the_network_as_their_node_does() -> None:
    other_names = lab(2, interfaces=node(2, eth="eno7"))

    assert values(ALL_TASKS[0][0], lab(1), ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]) == ["=eth0", "eth0"]
    assert values(ALL_TASKS[2][0], other_names, ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]) == ["=eno7", "eno7"]


def test_all_tasks_follow_what_the_batch_script_exported() -> None:
    exported = derived(batch(), lab(1)).given

    found = [
        values({**environ, **exported}, lab(number), ["MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME", "RANK"])
        for environ, number in ALL_TASKS
    ]

    assert [place[0] for place in found] == ["10.78.0.11"] * 4
    assert {place[1] for place in found} == {exported["MASTER_PORT"]}
    assert [place[2:] for place in found] == [["=ib0", "0"], ["=ib0", "3"], ["=ib0", "4"], ["=ib0", "5"]]


def test_a_batch_script_exports_only_what_holds_for_every_task() -> None:
    assert sorted(derived(batch(), lab(1)).given) == [
        "CUBLAS_WORKSPACE_CONFIG",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "RES_OPTIONS",
        "WORLD_SIZE",
    ]


def test_a_batch_script_takes_the_fastest_network_and_says_what_it_did_not_take() -> None:
    address = row(batch(), lab(1), "MASTER_ADDR")

    assert (address.value, address.source) == ("10.78.0.11", "network interfaces")
    assert address.rule.startswith("ib0, the fastest network of node1, the only node whose networks are known")
    assert address.refused["docker0"] == "Docker's bridge"


def test_a_job_of_one_node_knows_its_interface_in_the_script_already() -> None:
    environ = batch("node1", "4", SLURM_CPUS_PER_TASK="2")

    names = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "RANK"]
    assert values(environ, lab(1), names) == ["4", "4", "=lo", "2", None]


def test_a_step_on_one_node_meets_on_loopback_which_no_other_host_reaches() -> None:
    environ = task(0, 0, 0, on="node2", nodes="node2", tasks="2")

    assert values(environ, lab(2), ["MASTER_ADDR", "NCCL_SOCKET_IFNAME"]) == ["127.0.0.1", "=lo"]


def test_a_step_on_some_nodes_meets_on_the_first_of_them() -> None:
    first, second = (task(rank, rank, 0, on=f"node{rank + 2}", nodes="node[2-3]", tasks="1(x2)") for rank in (0, 1))

    assert row(first, lab(2), "MASTER_ADDR").value == "10.77.0.12"
    assert row(second, lab(3), "MASTER_ADDR").value == "10.77.0.12"


def test_the_shell_of_salloc_resolves_the_first_node_as_it_sees_it() -> None:
    login = host(
        (LO, interface("eth0", "10.77.0.1/24")),
        names={"node1": ["10.77.0.11"]},
        routes={"10.77.0.11": "10.77.0.1"},
    )

    found = derived(shell(), login)

    assert (found.value("MASTER_ADDR"), found.value("RANK"), found.value("WORLD_SIZE")) == ("10.77.0.11", None, "6")
    assert found.value("NCCL_SOCKET_IFNAME") is None
    assert "every task inherits what this shell exports" in found.process


def test_a_terminal_under_srun_is_derived_like_any_task() -> None:
    environ = task(0, 0, 0, on="node1", SLURM_PTY_PORT="42175")

    assert values(environ, lab(1), ["RANK", "WORLD_SIZE", "MASTER_ADDR"]) == ["0", "6", "10.77.0.11"]


def test_tasks_of_an_array_and_steps_of_a_job_meet_at_ports_of_their_own() -> None:
    ports = {
        row(environ, lab(1), "MASTER_PORT").value
        for environ in (
            task(0, 0, 0, on="node1"),
            task(0, 0, 0, on="node1", SLURM_STEP_ID="1"),
            task(0, 0, 0, on="node1", SLURM_JOB_ID="8", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1"),
            task(0, 0, 0, on="node1", SLURM_JOB_ID="9", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2"),
        )
    }

    assert len(ports) == 4


def test_a_taken_port_is_passed_over_by_the_one_who_decides() -> None:
    first = int(row(batch(), lab(1), "MASTER_PORT").value or 0)

    port = row(batch(), host(node(1), taken=[first]), "MASTER_PORT")

    assert port.value != str(first)
    assert port.refused == {str(first): "another process uses it"}


def test_a_cyclic_distribution_is_slurms_to_number_and_ours_to_explain() -> None:
    rank = row(task(3, 0, 1, on="node1", SLURM_DISTRIBUTION="cyclic"), lab(1), "RANK")

    assert rank.value == "3"
    assert "ranks of a node are not consecutive (`--distribution=block` would make it 1)" in rank.rule


def test_a_hostfile_leaves_rank_zero_to_the_user() -> None:
    environ = task(1, 0, 0, on="node1", nodes="node[1,3]", tasks="1,2", SLURM_DISTRIBUTION="arbitrary")

    address = row(environ, lab(1), "MASTER_ADDR")

    assert address.value is None
    assert "set MASTER_ADDR yourself" in address.rule


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_ranks_of_a_step_are_all_ranks_of_its_world(tasks: list[int]) -> None:
    nodes, counts = f"node[1-{len(tasks)}]", ",".join(map(str, tasks))
    ranks = []
    for node_rank, count in enumerate(tasks):
        for local_rank in range(count):
            rank = sum(tasks[:node_rank]) + local_rank
            place = {"SLURM_JOB_NODELIST": nodes, "SLURM_STEP_NODELIST": nodes, "MASTER_ADDR": "10.0.0.1"}
            environ = task(rank, node_rank, local_rank, on=f"node{node_rank + 1}", tasks=counts, **place)
            found = derived(environ, host((LO,)))
            assert found.value("WORLD_SIZE") == str(sum(tasks))
            assert found.value("LOCAL_WORLD_SIZE") == str(count)
            ranks.append(int(found.value("RANK") or -1))

    assert sorted(ranks) == list(range(sum(tasks)))


def test_loopback_is_never_rank_zeros_address() -> None:
    """On Debian a node's own name means 127.0.1.1, and so it may on a node that copied its hosts file."""
    confused = host(node(2), names=DEBIAN)

    address = row(task(4, 1, 0, on="node2"), confused, "MASTER_ADDR")

    assert address.value is None
    assert (
        "Set MASTER_ADDR to an IP address of node1, the node of rank zero (in a job script: with `export`)"
        in address.rule
    )


def test_of_several_addresses_the_one_on_the_fastest_network_is_taken_by_all() -> None:
    both = {f"node{n}": ["172.17.0.1", f"10.77.0.{10 + n}", f"10.78.0.{10 + n}"] for n in (1, 2)}
    one = host(
        node(1), names={**both, "node1": ["127.0.1.1"]}, routes={"10.77.0.12": "10.77.0.11", "10.78.0.12": "10.78.0.11"}
    )
    two = host(node(2), names=both, routes={"10.77.0.11": "10.77.0.12", "10.78.0.11": "10.78.0.12"})

    own = row(task(0, 0, 0, on="node1"), one, "MASTER_ADDR")
    told = row(task(4, 1, 0, on="node2"), two, "MASTER_ADDR")

    assert (own.value, told.value) == ("10.78.0.11", "10.78.0.11")


def test_an_address_without_a_route_is_passed_over() -> None:
    two = host(node(2), names={"node1": ["203.0.113.9", "10.77.0.11"]}, routes={"10.77.0.11": "10.77.0.12"})

    address = row(task(4, 1, 0, on="node2"), two, "MASTER_ADDR")

    assert address.value == "10.77.0.11"


def test_ipv6_alone_will_do() -> None:
    interfaces = (LO, interface("eth0", "fd00::2/64", "fe80::2/64"))
    two = host(interfaces, names={"node1": ["fe80::1%eth0", "fd00::1"]}, routes={"fd00::1": "fd00::2"})

    assert values(task(4, 1, 0, on="node2"), two, ["MASTER_ADDR", "GLOO_SOCKET_IFNAME"]) == ["fd00::1", "eth0"]


def test_a_node_without_a_network_says_so() -> None:
    address = row(batch(), host((LO, DOCKER)), "MASTER_ADDR")

    assert address.value is None
    assert "node1 has no network interface" in address.rule


def test_the_users_own_values_win() -> None:
    own = {
        "RANK": "9",
        "MASTER_ADDR": "10.78.0.11",
        "MASTER_PORT": "29500",
        "NCCL_SOCKET_IFNAME": "^lo",
        "WORLD_SIZE": "",
    }

    found = derived({**task(4, 1, 0, on="node2"), **own}, lab(2))

    assert [found.value(name) for name in own] == ["9", "10.78.0.11", "29500", "^lo", "6"]
    assert found.value("GLOO_SOCKET_IFNAME") == "ib0"
    assert not {"RANK", "MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME"} & found.given.keys()
    assert found.variables["RANK"].source == "environment"
    assert (
        found.variables["RANK"].rule
        == "already set in the environment, so not changed; ddp-hpc would set '4' (Slurm (SLURM_PROCID))"
    )


def test_an_address_that_the_user_gave_by_name_is_asked_for() -> None:
    two = host(node(2), names={"node1-ib": ["127.0.1.1", "10.78.0.11"]}, routes={"10.78.0.11": "10.78.0.12"})

    assert row({**task(4, 1, 0, on="node2"), "MASTER_ADDR": "node1-ib"}, two, "GLOO_SOCKET_IFNAME").value == "ib0"


def test_an_unknown_name_leaves_the_interface_to_the_libraries() -> None:
    environ = {**task(4, 1, 0, on="node2"), "MASTER_ADDR": "nowhere"}

    interface_name = row(environ, lab(2), "NCCL_SOCKET_IFNAME")

    assert (interface_name.value, interface_name.rule) == (
        None,
        "this host cannot resolve nowhere to an address: set MASTER_ADDR to a numeric one",
    )


@pytest.mark.parametrize(
    ("more", "num_cpus", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "4"}, 16, "4"),
        ({"SLURM_CPUS_PER_TASK": "4"}, 2, "2"),
        ({"SLURM_CPUS_ON_NODE": "8"}, 16, "2"),
        ({"SLURM_CPUS_ON_NODE": "1"}, 16, "1"),
    ],
)
def test_a_task_computes_with_its_cpus(more: dict[str, str], num_cpus: int, threads: str) -> None:
    environ = task(0, 0, 0, on="node1", nodes="node1", tasks="4", **more)

    assert row(environ, host(node(1), num_cpus=num_cpus), "OMP_NUM_THREADS").value == threads


def test_outside_of_jobs_there_is_a_world_of_one() -> None:
    found = derived({}, host((LO, *node(1)), num_cpus=3))

    assert [found.value(name) for name in RANKS] == ["0", "0", "1", "1", "0"]
    assert (found.value("MASTER_ADDR"), found.value("OMP_NUM_THREADS")) == ("127.0.0.1", "3")
    assert found.process == "no Slurm job: a single process"


NO_IB = (interface("eth0", "10.77.0.12/24"), LO)
"""Of a node that has lost its fast network."""


@pytest.mark.parametrize(
    ("environ", "own", "answers", "num_asked", "address"),
    [
        (batch(), (LO, interface("eth0", "10.77.0.11/24")), {}, 0, "10.77.0.11"),  # there is no choice
        (batch("node1"), node(1), {}, 0, "127.0.0.1"),
        (batch(), node(1), {"node2": NO_IB, "node3": node(3)}, 1, "10.77.0.11"),
        (batch(), node(1), {}, 1, "10.78.0.11"),
        (batch(on="node2"), node(2), {"node1": node(1), "node2": node(2)}, 1, "10.78.0.11"),
        (batch(on="node2"), node(2), {"node2": node(2)}, 1, "10.77.0.11"),  # by its name
        (task(3, 0, 3, on="node1"), node(1), {"node2": NO_IB}, 1, "10.77.0.11"),  # `srun --pty` on the first node
    ],
)
def test_a_supervisor_asks_the_nodes_where_that_can_change_the_choice(
    environ: Mapping[str, str],
    own: Sequence[Interface],
    answers: Mapping[str, Sequence[Interface]],
    num_asked: int,
    address: str,
) -> None:
    asked: list[str] = []
    allocation = read_allocation(environ)
    assert allocation is not None

    def ask() -> Mapping[str, Sequence[Interface]]:
        asked.append("all nodes")
        return answers

    found = find_address(allocation, lab(1 if allocation.is_on_first_node else 2, interfaces=own), ask=ask)

    assert (found.value, len(asked)) == (address, num_asked)


def test_a_lone_node_is_asked_by_a_shell_elsewhere_where_the_user_prefers_networks() -> None:
    allocation = read_allocation({**batch("node1"), "SLURMD_NODENAME": ""})
    assert allocation is not None

    found = find_address(allocation, lab(2, interfaces=node(2)), preferred=["ib*"], ask=lambda: {"node1": node(1)})

    assert found.value == "10.78.0.11"


def test_where_rank_zeros_node_does_not_answer_a_supervisor_says_that_it_decides_by_the_name() -> None:
    allocation = read_allocation(batch(on="node2"))
    assert allocation is not None

    found = find_address(allocation, lab(2, interfaces=node(2)), ask=lambda: {"node2": node(2)})

    assert found.rule == "the address to which this host resolves node1, which did not say its networks"


def test_a_name_that_also_means_a_link_local_address_means_the_one_that_other_nodes_reach() -> None:
    where = replace(lab(2), resolve=lambda _: ["fe80::1%eth0", "10.77.0.11"])

    assert where.numeric_address("node1", may_be_loopback=False) == "10.77.0.11"


def test_this_host_answers() -> None:
    here = this_host()

    assert here.num_cpus > 0
    assert set(addresses_of("localhost")) <= {"127.0.0.1", "::1"}
    assert here.interface_towards("127.0.0.1").value == "lo"


def test_an_address_that_no_interface_leads_to_has_no_name() -> None:
    assert host((interface("eth0", "10.0.0.1/24"),)).interface_towards("127.0.0.1").value is None
