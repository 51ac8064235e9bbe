"""From the answers of all nodes to findings: which node differs from the others, in what, and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TypeVar

from ddp_hpc.node_checks.facts import EMPTY, MISSING, SOFTWARE, THERE, UNLIMITED, NodeFacts, Shared
from ddp_hpc.rendezvous.choice import speed_order
from ddp_hpc.run_dir.network import NetworkFindings
from ddp_hpc.run_dir.preflight import Finding, Level

T = TypeVar("T")

FULL_BYTES, TIGHT_BYTES = 64 << 20, 1 << 30
FEW_FILES = 1000
FEW_OPEN_FILES = 1024
"""Loader processes pass tensors by file descriptors, and each rank holds connections to others."""
SLOW_WRITE_S = 2.0
SLOW_LOOKUP_S = 1.0
CLOCK_S = 1.0
"""Clocks that differ by more make log lines and the times of files misleading; NTP keeps them within some ms."""
CLOCK_FAIL_S = 30.0
"""Tickets and tokens (Kerberos, munge) are refused beyond some minutes; such a node has no working time service."""
SLOW_SHARE = 1 / 8
"""A link is slow that has less than this share of the speed of the middle one."""
MUST_AGREE: Mapping[str, Level] = {
    "python": "fail",
    "torch": "fail",
    "cuda": "fail",
    "hip": "fail",
    "nccl": "fail",
    "ddp_hpc": "fail",
    "driver": "warn",
    "machine": "warn",
}
"""Software -> what a difference between nodes is."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run needs of each node; None and 0 where that is not known."""

    cpus_per_node: int = 0
    gpus_per_node: int = 0


@dataclass(frozen=True, kw_only=True)
class Answers:
    """All that is known of the nodes."""

    nodes: Sequence[str]
    """Of the job, rank zero's first."""
    facts: Mapping[str, NodeFacts]
    """Of those that answered."""
    problem: str = ""
    """Why others did not, as srun says."""
    network: NetworkFindings | None = None
    asked: Asked = field(default_factory=Asked)

    def of(self, part: Callable[[NodeFacts], T | None]) -> dict[str, T]:
        """Return one part of the answers, of the nodes that gave it."""
        told = {node: part(facts) for node, facts in self.facts.items()}
        return {node: value for node, value in told.items() if value is not None}


def findings_of(answers: Answers) -> tuple[Finding, ...]:
    """Return what all checks found, in the order of the table."""
    if not answers.facts:
        why = f": {answers.problem}" if answers.problem else ""
        told = f"no node answered{why}"
        return (
            Finding(
                check="nodes", level="unknown", found=told, to_do="run `srun --overlap hostname` in the job to see why"
            ),
        )
    return tuple(finding for check in CHECKS for finding in check(answers))


def odd_ones(values: Mapping[str, T]) -> tuple[T | None, list[str]]:
    """Return the value that more than half of the nodes have, and the nodes that have another; None where there is none."""
    if not values:
        return None, []
    value, count = Counter(values.values()).most_common(1)[0]
    if count * 2 <= len(values):
        return None, []
    return value, [node for node in values if values[node] != value]


def _difference(check: str, values: Mapping[str, str], *, level: Level, to_do: str) -> Finding:
    """Return whether all nodes that answered have the same."""
    if not values:
        return Finding(check=check, level="unknown", found="no node said it in time")
    if len({*values.values()}) == 1:
        return Finding(check=check, level="ok", found=f"the same on all nodes: {next(iter(values.values())) or 'none'}")
    common, odd = odd_ones(values)
    told = odd or list(values)
    found = ", ".join(f"{node} has {values[node] or 'none'}" for node in told)
    others = f"; the other nodes have {common or 'none'}" if odd else ""
    return Finding(check=check, level=level, found=found + others, to_do=to_do, nodes=tuple(odd))


def _nodes(answers: Answers) -> Iterator[Finding]:
    silent = [node for node in answers.nodes if node not in answers.facts]
    if silent:
        why = f" ({answers.problem})" if answers.problem else ""
        to_do = f"examine them: `srun --overlap --nodelist={silent[0]} hostname`"
        yield Finding(
            check="nodes", level="fail", found=f"no answer from {_listed(silent)}{why}", to_do=to_do, nodes=(*silent,)
        )
    else:
        yield Finding(check="nodes", level="ok", found=f"all {len(answers.nodes)} answered")
    for node, late in answers.of(lambda facts: facts.late or None).items():
        to_do = "a file system or a name server does not answer there: `ls` the path, or `getent hosts NAME`"
        yield Finding(
            check="nodes",
            level="fail",
            found=f"{node} did not answer in time about: {', '.join(late)}",
            to_do=to_do,
            nodes=(node,),
        )


def _software(answers: Answers) -> Iterator[Finding]:
    told = answers.of(lambda facts: facts.software)
    for name in SOFTWARE:
        values = {node: software[name] for node, software in told.items() if name in software}
        if name in {"hip", "driver", "nccl", "cuda"} and not any(values.values()):
            continue  # none of these nodes has any
        to_do = "use one environment on a shared file system, or an image" if MUST_AGREE[name] == "fail" else ""
        yield _difference(name, values, level=MUST_AGREE[name], to_do=to_do)


def _gpus(answers: Answers) -> Iterator[Finding]:
    models = {
        node: ", ".join(f"{count} x {model}" for model, count in sorted(Counter(gpus).items()))
        for node, gpus in answers.of(lambda facts: facts.gpus).items()
    }
    if any(models.values()):
        to_do = "ask for one type: `resources.gpu_type`, or `slurm.constraint`"
        yield _difference("GPU type", models, level="warn", to_do=to_do)
    counts = answers.of(lambda facts: facts.num_gpus)
    asked = answers.asked.gpus_per_node
    if asked:
        few = [node for node, count in counts.items() if count < asked]
        found = ", ".join(f"{node} has {counts[node]}" for node in few)
        yield _judged(
            "GPUs", few, answers, f"{found}, but the run asks for {asked} on each node", f"{asked} or more on all nodes"
        )


def _cpus(answers: Answers) -> Iterator[Finding]:
    counts, asked = answers.of(lambda facts: facts.num_cpus), answers.asked.cpus_per_node
    if not asked:
        return
    few = [node for node, count in counts.items() if count < asked]
    found = ", ".join(f"{node} has {counts[node]}" for node in few)
    told = f"{found} CPUs for {asked} workers and loader processes"
    to_do = "raise `resources.cpus_per_worker`, lower `data.num_workers`, or check `--cpu-bind` in `slurm.srun_args`"
    yield _judged("CPUs", few, answers, told, f"{asked} or more on all nodes", level="warn", to_do=to_do)


def _judged(  # noqa: PLR0913  the fields of a finding
    check: str,
    bad: Sequence[str],
    answers: Answers,
    bad_words: str,
    good_words: str,
    *,
    level: Level = "fail",
    to_do: str = "",
) -> Finding:
    """Return a failure that names nodes, or that all is well."""
    if not bad:
        return Finding(check=check, level="ok", found=good_words)
    # Of what all nodes have in common, no single one is the odd one.
    nodes = () if len(bad) == len(answers.facts) else tuple(bad)
    return Finding(check=check, level=level, found=bad_words, to_do=to_do, nodes=nodes)


def _names(answers: Answers) -> Iterator[Finding]:
    told = answers.of(lambda facts: facts.names)
    if not told:
        yield Finding(check="names", level="unknown", found="no node said in time what it resolves the names to")
        return
    is_good = True
    for name in answers.nodes:
        # To itself, a node's name may be the loopback: Debian's installer writes it so.
        views = {node: " ".join(_outside(names.get(name, ()))) for node, names in told.items() if node != name}
        if len({*views.values()}) < 2 and all(views.values()):
            continue
        is_good = False
        common, odd = odd_ones(views)
        unresolved = [node for node in views if not views[node]]
        to_do = f"compare `getent hosts {name}` on the nodes, and correct /etc/hosts or the DNS"
        blamed = tuple(odd) if common else ()
        seen = "; ".join(f"{node} resolves it to {views[node] or 'nothing'}" for node in odd or unresolved or views)
        others = f", the others to {common}" if common and odd else ""
        yield Finding(check="names", level="fail", found=f"{name}: {seen}{others}", to_do=to_do, nodes=blamed)
    if is_good:
        yield Finding(
            check="names", level="ok", found="each node resolves the names of the others to the same addresses"
        )
    slow = {
        node: seconds for node, seconds in answers.of(lambda facts: facts.reverse_s).items() if seconds > SLOW_LOOKUP_S
    }
    if slow:
        worst = max(slow, key=lambda node: slow[node])
        found = f"the name of an address takes {slow[worst]:.1f} s on {worst}, and more than {SLOW_LOOKUP_S:.0f} s on {_listed([*slow])}"
        to_do = (
            "the reverse DNS does not answer: each rank waits for it once for each peer; tell your cluster's support"
        )
        yield Finding(check="reverse DNS", level="warn", found=found, to_do=to_do, nodes=())


def _outside(addresses: Sequence[str]) -> list[str]:
    return [text for text in addresses if not ip_address(text.partition("%")[0]).is_loopback]


def _shared(answers: Answers) -> Iterator[Finding]:
    told = answers.of(lambda facts: facts.shared)
    cannot = {node: one.error for node, one in told.items() if one.error}
    if cannot:
        found = "; ".join(f"{node} cannot write there: {error}" for node, error in cannot.items())
        yield _judged("run directory", [*cannot], answers, found, "", to_do="mount it on this node, or check its quota")
    unseen = _unseen({node: one for node, one in told.items() if not one.error})
    if unseen:
        found = f"the files that {_listed(unseen)} wrote are not seen by the other nodes, or theirs not there"
        to_do = "it is another file system on this node: compare `findmnt --target DIR` on the nodes"
        yield _judged("run directory", unseen, answers, found, "", to_do=to_do)
    if told and not cannot and not unseen:
        write_s, seen_s = max(one.write_s for one in told.values()), max(one.seen_s for one in told.values())
        found = f"each node's file is seen by all; 1 MiB is on the disk after {write_s:.2f} s at most, and seen {seen_s:.2f} s later"
        yield Finding(check="run directory", level="warn" if write_s > SLOW_WRITE_S else "ok", found=found)
    if not told:
        yield Finding(check="run directory", level="unknown", found="no node said in time whether it can write there")


def _unseen(told: Mapping[str, Shared]) -> list[str]:
    """Return the nodes that are not of the largest group of nodes which all see each other's files."""
    sees = {node: {other for other in one.seen if other in told} | {node} for node, one in told.items()}
    mutual = {node: {other for other in sees[node] if node in sees[other]} for node in told}
    if all(len(group) == len(told) for group in mutual.values()):
        return []
    largest = max(mutual.values(), key=len)
    return [node for node in told if node not in largest] if len(largest) * 2 > len(told) else list(told)


def _paths(answers: Answers) -> Iterator[Finding]:
    told = answers.of(lambda facts: facts.paths)
    good = []
    for path in sorted({path for paths in told.values() for path in paths}):
        states = {node: paths[path] for node, paths in told.items() if path in paths}
        if THERE not in states.values():
            if {*states.values()} - {MISSING, EMPTY}:
                found = f"{path} cannot be read on any node: {next(iter(states.values()))}"
                yield Finding(
                    check="data", level="fail", found=found, to_do="check its permissions and its file system"
                )
            continue  # nothing is there on any node: perhaps the run writes it
        bad = [node for node, state in states.items() if state != THERE]
        if bad:
            found = f"{path} is {states[bad[0]]} on {_listed(bad)}, but there on the other nodes"
            yield Finding(
                check="data",
                level="fail",
                found=found,
                to_do=f"mount it there: compare `findmnt --target {path}`",
                nodes=(*bad,),
            )
        else:
            good.append(path)
    if good:
        yield Finding(check="data", level="ok", found=f"there on all nodes: {', '.join(good)}")


def _disks(answers: Answers) -> Iterator[Finding]:
    told = answers.of(lambda facts: facts.disks)
    is_good = bool(told)
    for label in sorted({label for disks in told.values() for label in disks}):
        disks = {node: found[label] for node, found in told.items() if label in found}
        full = {
            node: one.error or f"{(one.free_bytes or 0) >> 20} MiB free"
            for node, one in disks.items()
            if one.error or (one.free_bytes is not None and one.free_bytes < FULL_BYTES)
        }
        tight = {
            node: f"{(one.free_bytes or 0) >> 20} MiB and {'any number of' if one.free_files is None else one.free_files} files free"
            for node, one in disks.items()
            if node not in full
            and ((one.free_bytes or 0) < TIGHT_BYTES or (one.free_files is not None and one.free_files < FEW_FILES))
        }
        for level, few in (("fail", full), ("warn", tight)):
            if few:
                is_good = False
                path = disks[next(iter(few))].path
                found = f"the disk for {label}, {path}: {'; '.join(f'{node}: {text}' for node, text in few.items())}"
                to_do = "remove files there, or set TMPDIR to another disk (`env.TMPDIR`)"
                yield _judged("disk", [*few], answers, found, "", level=level, to_do=to_do)  # type: ignore[arg-type]  # of a literal
    if is_good:
        yield Finding(check="disk", level="ok", found="space for temporary files and shared memory on all nodes")
    if not told:
        yield Finding(check="disk", level="unknown", found="no node said in time how full its disks are")


def _limits(answers: Answers) -> Iterator[Finding]:
    told = answers.of(lambda facts: facts.limits)
    rdma = answers.of(lambda facts: facts.has_rdma or None)
    few = [node for node, one in told.items() if UNLIMITED < one.get("nofile", UNLIMITED) < FEW_OPEN_FILES]
    if few:
        found = f"only {min(told[node]['nofile'] for node in few)} open files on {_listed(few)}"
        to_do = f"raise it: `slurm.setup=['ulimit -n {FEW_OPEN_FILES * 64}']`"
        yield _judged("limits", few, answers, found, "", level="warn", to_do=to_do)
    locked = [node for node in rdma if told.get(node, {}).get("memlock", UNLIMITED) != UNLIMITED]
    if locked:
        found = f"the memory that a process may lock is limited on {_listed(locked)}, which InfiniBand needs"
        yield _judged("limits", locked, answers, found, "", level="warn", to_do="`slurm.setup=['ulimit -l unlimited']`")
    if told and not few and not locked:
        yield Finding(check="limits", level="ok", found="open files and locked memory suffice on all nodes")


def _network(answers: Answers) -> Iterator[Finding]:
    network = answers.network
    if network is None:
        if len(answers.nodes) > 1:
            yield Finding(check="network", level="unknown", found="the network between the nodes was not probed")
        return
    nodes = network.bad_nodes
    to_do = "leave the node out, and tell your cluster's support" if nodes else "tell your cluster's support"
    if network.is_faulty:
        yield Finding(check="network", level="fail", found=network.words, to_do=to_do, nodes=nodes)
    elif network.carries:
        level: Level = "warn" if network.lossy else "ok"
        yield Finding(check="network", level=level, found=network.words)
    else:
        yield Finding(check="network", level="unknown", found=network.words)
    yield from _clocks(network)
    yield from _speed(network)


def _interfaces(answers: Answers) -> Iterator[Finding]:
    """Find nodes without a kind of network that most have: the ranks would meet on a slower one, which all nodes share."""
    told = answers.of(lambda facts: facts.networks)
    kinds = sorted({kind for networks in told.values() for kind in networks}, key=speed_order)
    if not told:
        yield Finding(check="interfaces", level="unknown", found="no node said in time which networks it has")
        return
    is_good = True
    for kind in kinds:
        counts = {node: networks.get(kind, 0) for node, networks in told.items()}
        common, odd = odd_ones(counts)
        few = [node for node in odd if counts[node] < (common or 0)]
        if not few:
            continue
        is_good = False
        is_fastest_gone = kind == kinds[0] and not all(counts.values())
        has = ", ".join(f"{node} has {counts[node] or 'no'} interface of {kind} that is up" for node in few)
        yield Finding(
            check="interfaces",
            level="fail" if is_fastest_gone else "warn",
            found=f"{has}; the other nodes have {common}",
            to_do="leave the node out, and tell your cluster's support; else the ranks meet on a slower network",
            nodes=tuple(few),
        )
    common_kinds = [kind for kind in kinds if any(networks.get(kind) for networks in told.values())]
    if is_good:
        yield Finding(check="interfaces", level="ok", found=f"all nodes have: {', '.join(common_kinds) or 'none'}")


def _clocks(network: NetworkFindings) -> Iterator[Finding]:
    if not network.paces:
        yield Finding(check="clocks", level="unknown", found="the clocks were not compared, as no connection passed")
        return
    ahead = clocks_of(network)
    off = {node: seconds for node, seconds in ahead.items() if abs(seconds) > CLOCK_S}
    if not off:
        largest = max(map(abs, ahead.values()))
        yield Finding(check="clocks", level="ok", found=f"at most {largest * 1000:.0f} ms apart from the middle one")
        return
    found = ", ".join(
        f"{node}'s clock is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} the others"
        for node, seconds in off.items()
    )
    is_bad = any(abs(seconds) > CLOCK_FAIL_S for seconds in off.values())
    # Of two nodes, nobody can say which clock is wrong.
    nodes = tuple(off) if len(ahead) > 2 else ()
    to_do = "the time service does not run there (`chronyc tracking`); tell your cluster's support"
    yield Finding(check="clocks", level="fail" if is_bad else "warn", found=found, to_do=to_do, nodes=nodes)


def clocks_of(network: NetworkFindings) -> dict[str, float]:
    """Return by how many seconds each node's clock is ahead of the middle one."""
    nodes = sorted({pace.sender for pace in network.paces} | {pace.receiver for pace in network.paces})
    known = {nodes[0]: 0.0}
    # Along the links, as not each pair may have measured.
    for _ in nodes:
        for pace in network.paces:
            if pace.sender in known and pace.receiver not in known:
                known[pace.receiver] = known[pace.sender] + pace.ahead_s
            elif pace.receiver in known and pace.sender not in known:
                known[pace.sender] = known[pace.receiver] - pace.ahead_s
    middle = sorted(known.values())[(len(known) - 1) // 2]
    return {node: seconds - middle for node, seconds in known.items()}


def slow_ways(network: NetworkFindings) -> dict[tuple[str, str], float]:
    """Return the links, each way, that are much slower than the middle one: (sender, receiver) -> MB/s."""
    rates = {(pace.sender, pace.receiver): pace.mb_per_s for pace in network.paces}
    middle = sorted(rates.values())[len(rates) // 2] if rates else 0.0
    return {way: rate for way, rate in rates.items() if rate < middle * SLOW_SHARE}


def _speed(network: NetworkFindings) -> Iterator[Finding]:
    if not network.paces:
        yield Finding(check="speed", level="unknown", found="no link was measured, as no connection passed")
        return
    rates = sorted(pace.mb_per_s for pace in network.paces)
    middle, slow = rates[len(rates) // 2], slow_ways(network)
    if not slow:
        found = f"{rates[0]:.0f} to {rates[-1]:.0f} MB/s by one connection between two nodes"
        yield Finding(check="speed", level="ok", found=found)
        return
    nodes = slow_nodes(network, slow)
    ways = ", ".join(f"{sender} to {receiver} {rate:.1f}" for (sender, receiver), rate in sorted(slow.items())[:6])
    whose = f"{_listed(nodes)}: " if nodes else ""
    found = f"{whose}slow links, in MB/s: {ways}; the middle one has {middle:.0f}"
    to_do = (
        "leave the node out, and examine its link (`ethtool`, `ibstat`)" if nodes else "examine the switch between them"
    )
    yield Finding(check="speed", level="fail", found=found, to_do=to_do, nodes=tuple(nodes))


def slow_nodes(network: NetworkFindings, slow: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the nodes of which all links are slow in one direction, where others are not: two slow links at least."""
    ways = [(pace.sender, pace.receiver) for pace in network.paces]
    bad = []
    for node in sorted({node for way in slow for node in way}):
        for end in (0, 1):
            own = [way for way in ways if way[end] == node]
            if len(own) > 1 and all(way in slow for way in own):
                bad.append(node)
                break
    return bad


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes)


CHECKS: Sequence[Callable[[Answers], Iterator[Finding]]] = (
    _nodes,
    _interfaces,
    _network,
    _names,
    _shared,
    _paths,
    _disks,
    _software,
    _gpus,
    _cpus,
    _limits,
)
"""In the order in which a person should read them."""
