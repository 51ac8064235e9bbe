"""The campaign of hangs with nobody behind: breaks the workers' network under a training, and compares who is named with what was broken.

python -m tests.slurm.broken_networks        # as root, on the test cluster; writes docs/results/network-hangs.md
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.network import read_network
from tests.campaigns.written import RESULTS, stamp
from tests.slurm.cluster import USER, Cluster, booted
from tests.slurm.lab.settings import IB, address
from tests.slurm.lab.tools import attempt, sh
from tests.slurm.runs import TRIAL_RECIPE, LoginNode, world

HANG_TIMEOUT_S = 10
SETTINGS = (
    *world(4, 1),
    "recipe.target=trial_recipe:build",
    "recipe.args.load_s=0.002",
    "train.epochs=100000",
    "checkpoint.every_steps=20",
    "log.every_steps=5",
    "eval.every_epochs=100000",
    f"restart.hang_timeout_s={HANG_TIMEOUT_S}",
    "restart.max_no_progress=100",
    "restart.exclude_after=50",
    "slurm.requeue=false",
)
JSON, TABLE = RESULTS / "network-hangs.json", RESULTS / "network-hangs.md"


@dataclass(frozen=True)
class Break:
    """One way to break the network, and what is to be named."""

    kind: str
    nodes: tuple[str, ...]
    expected: str
    begin: Callable[[Cluster], None]

    @property
    def where(self) -> str:
        return " - ".join(self.nodes)


def drop(cluster: Cluster, node: str, chain: str, *words: str) -> None:
    """Have a node drop packets without an answer."""
    side = "-i" if chain == "INPUT" else "-o"
    sh("ip", "netns", "exec", cluster.lab.netns(node), "iptables", "-A", chain, side, "ib0", *words, "-j", "DROP")


def ip_of(node: str) -> str:
    return address(node, IB)


def black_hole(one: str, other: str) -> Break:
    def begin(cluster: Cluster) -> None:
        drop(cluster, one, "INPUT", "-s", ip_of(other))
        drop(cluster, other, "INPUT", "-s", ip_of(one))

    return Break("black hole between two nodes", (one, other), " - ".join(sorted((one, other))), begin)


def black_hole_of(node: str) -> Break:
    def begin(cluster: Cluster) -> None:
        drop(cluster, node, "INPUT")
        drop(cluster, node, "OUTPUT")

    return Break("black hole around a node", (node,), node, begin)


def one_way(sender: str, receiver: str) -> Break:
    def begin(cluster: Cluster) -> None:
        drop(cluster, receiver, "INPUT", "-s", ip_of(sender))

    return Break("one-way loss between two nodes", (sender, receiver), f"{sender} - {receiver}", begin)


def mute(node: str) -> Break:
    return Break("nothing that a node sends arrives", (node,), node, lambda cluster: drop(cluster, node, "OUTPUT"))


def unplugged(node: str) -> Break:
    return Break("cable of a node pulled", (node,), node, lambda cluster: cluster.cut(node, "ib0"))


def split(*groups: tuple[str, ...]) -> Break:
    pairs = [(one, other) for one in groups[0] for other in groups[1]]

    def begin(cluster: Cluster) -> None:
        for one, other in pairs:
            drop(cluster, one, "INPUT", "-s", ip_of(other))
            drop(cluster, other, "INPUT", "-s", ip_of(one))

    named = ", ".join(sorted(" - ".join(sorted(pair)) for pair in pairs))
    return Break("fabric cut in two", (*groups[0], *groups[1]), named, begin)


CASES: Sequence[tuple[str, Break]] = (
    ("agent", black_hole("node1", "node2")),
    ("agent", black_hole("node2", "node4")),
    ("agent", one_way("node1", "node3")),
    ("agent", one_way("node4", "node1")),
    ("agent", mute("node3")),
    ("agent", unplugged("node2")),
    ("agent", unplugged("node1")),
    ("agent", split(("node1", "node2"), ("node3", "node4"))),
    ("srun", black_hole("node3", "node4")),
    ("srun", black_hole_of("node4")),
    ("srun", one_way("node2", "node1")),
    ("srun", one_way("node3", "node4")),
    ("srun", unplugged("node3")),
    ("srun", split(("node1", "node3"), ("node2", "node4"))),
    ("torchrun", black_hole("node1", "node4")),
    ("torchrun", black_hole("node2", "node3")),
    ("torchrun", one_way("node1", "node2")),
    ("torchrun", mute("node2")),
    ("torchrun", unplugged("node4")),
    ("torchrun", split(("node1", "node4"), ("node2", "node3"))),
)


def heal(cluster: Cluster) -> None:
    for node in cluster.settings.hostnames:
        attempt("ip", "netns", "exec", cluster.lab.netns(node), "iptables", "-F")
        if node != "head":
            cluster.plug(node, "ib0")


def newest(login: LoginNode, name: str) -> Attempt | None:
    return Ledger.read(login.run(name)).newest


def training(login: LoginNode, name: str, launcher: str) -> Attempt:
    """Return the newest attempt of the run once it makes progress; submit the run where no job has it."""
    found = newest(login, name)
    if found is None or (found.ending is not None and not found.next):
        login.cluster.wait_for(login.cluster._is_empty, 90)
        login.submit(name, *SETTINGS, f"launcher={launcher}")
    before = -1 if found is None else found.attempt

    def runs() -> Attempt | None:
        now = newest(login, name)
        if now is None or now.ending is not None or (found is not None and found.ending and now.attempt <= before):
            return None
        return now

    begun = login.cluster.wait_for(runs, 180)
    assert begun is not None
    first = login.status(name)["step"] or 0
    login.cluster.wait_for(lambda: (login.status(name)["step"] or 0) > first and begun.ending is None, 180)
    return begun


def try_case(login: LoginNode, number: int, launcher: str, case: Break) -> dict[str, Any]:
    """Break the network under a training; return what was named, and when."""
    name = f"net-{launcher}"
    begun = training(login, name, launcher)
    case.begin(login.cluster)
    broken_at = time.time()

    def ended() -> Attempt | None:
        found = Ledger.read(login.run(name)).attempt(begun.attempt)
        return found if found is not None and found.ending is not None else None

    end = login.cluster.wait_for(ended, 240)
    heal(login.cluster)
    assert end is not None
    found = read_network(login.run(name), begun.attempt)
    why = json.loads(login.type("why", name, "--attempt", str(begun.attempt), "--json").stdout)
    named = "" if found is None else found.culprits_text
    known_at = (end.ended_at or 0.0) - broken_at
    return {
        "case": number,
        "launcher": launcher,
        "kind": case.kind,
        "where": case.where,
        "named": named,
        "why": why["failure"],
        "is_right": same(named, case.expected)
        and why["failure"] == "hang-network"
        and same(why["host"], case.expected),
        "seconds_after_break": round(known_at, 1),
        "probe_seconds": None if found is None else found.seconds,
        "cause": str(end.cause),
        "next": str(end.next),
        "failed_nodes": list(end.failed_nodes),
        "reason": end.reason.replace(str(login.run(name).path.parent), "RUNS"),
    }


def same(named: str | None, expected: str) -> bool:
    def pairs(text: str) -> set[frozenset[str]]:
        return {frozenset(part.split(" - ")) for part in text.split(", ")}

    return pairs(named or "") == pairs(expected)


def as_table(rows: Sequence[dict[str, Any]], stamped: dict[str, str]) -> str:
    """Return the table for docs/results."""
    right = sum(row["is_right"] for row in rows)
    slowest = max((row["seconds_after_break"] for row in rows), default=0)
    head = (
        "# Hangs with nobody behind: which nodes the probe names\n\n"
        f"{right} of {len(rows)} right, of {len(CASES)} cases that the campaign has; the slowest answer stood in the ledger {slowest:.0f} s after the network was broken, "
        f"with `restart.hang_timeout_s={HANG_TIMEOUT_S}`. Commit {stamped['commit'][:12]}, {stamped['date']}; four nodes of the "
        "[test cluster](../survival.md), one worker each, by `python -m tests.slurm.broken_networks`.\n\n"
        "| launcher | what was broken | where | named | right | next | seconds after the break | of these, the probe |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    lines = [
        f"| {row['launcher']} | {row['kind']} | {row['where']} | {row['named']} | {'yes' if row['is_right'] else 'NO'} "
        f"| {row['next'] or 'the end'} | {row['seconds_after_break']:.0f} | {row['probe_seconds'] or 0:.0f} |"
        for row in rows
    ]
    return head + "\n".join(lines) + "\n"


def _without_arguments(config: Path) -> None:
    """Leave out the arguments of the recipe in the example, as this one has others."""
    plain = yaml.safe_load(config.read_text(encoding="utf-8"))
    plain["recipe"] = {"target": plain["recipe"]["target"]}
    config.write_text(yaml.safe_dump(plain), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Try all cases; write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    arguments = parser.parse_args(argv)
    chosen = arguments.only if arguments.only is not None else range(len(CASES))
    rows: list[dict[str, Any]] = []
    stamped = stamp()
    with booted() as cluster:
        folder = Path(tempfile.mkdtemp(prefix="networks-", dir=cluster.shared))
        sh("chown", f"{USER}:", str(folder))
        login = LoginNode(cluster, folder)
        login.add_recipe(TRIAL_RECIPE)
        _without_arguments(folder / "digits.yaml")
        for number in chosen:
            launcher, case = CASES[number]
            if rows and rows[-1]["launcher"] != launcher:
                cluster.cancel_all()
            try:
                rows.append(try_case(login, number, launcher, case))
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
            except AssertionError as error:
                heal(cluster)
                cluster.cancel_all()
                failed = {
                    "case": number,
                    "launcher": launcher,
                    "kind": case.kind,
                    "where": case.where,
                    "named": "",
                    "next": "",
                }
                rows.append(
                    {**failed, "is_right": False, "seconds_after_break": 0, "probe_seconds": 0, "reason": str(error)}
                )
                sys.stdout.write(f"case {number}: {error}\n{login.console(f'net-{launcher}')[-3000:]}\n")
            sys.stdout.flush()
            if arguments.only is None:
                JSON.write_text(json.dumps({**stamped, "rows": rows}, indent=1) + "\n", encoding="utf-8")
                TABLE.write_text(as_table(rows, stamped), encoding="utf-8")
        cluster.cancel_all()
    return 0 if all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
