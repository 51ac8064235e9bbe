"""What the nodes see of shared directories and data, and how full their own disks are. Pure."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from ddp_hpc.base.mounts import AUTOMOUNT
from ddp_hpc.cluster.node_checks.answers import NodeAnswers, judge_nodes, odd_nodes, unknown_finding
from ddp_hpc.cluster.node_checks.facts import EMPTY, MISSING, THERE, SharedDir, neighbours
from ddp_hpc.run.run_dir.preflight import Finding

FULL_BYTES, TIGHT_BYTES = 64 << 20, 1 << 30
FEW_FILES = 1000
SLOW_WRITE_S = 2.0
_ADVICE_FOR_ALL = {
    os.strerror(errno.EDQUOT): "free space of your quota, in bytes and files: `quota -s`, `lfs quota -h -u $USER DIR`",
    os.strerror(errno.ENOSPC): "remove files: the file system is full (on Lustre, one of its parts: `lfs df -h DIR`)",
}
"""Why a file cannot be written -> what to do, where it is the same for all nodes, though some of them have still written theirs."""
_STALE, _DENIED = os.strerror(errno.ESTALE), os.strerror(errno.EACCES)
_NODE_ADVICE = {
    _STALE: "the file system has to be mounted again on the node (stale mount); tell your cluster's support",
    os.strerror(errno.EIO): "the file system fails on this node (`dmesg`); tell your cluster's support",
    os.strerror(errno.EROFS): "the file system is mounted read-only on the node; tell your cluster's support",
    _DENIED: "compare `ls -ld DIR` and `id` on the node and on another one: permissions, or your groups, differ",
}
_MOUNT_ADVICE = "compare `findmnt --target DIR` on the nodes; if a mount is missing on one, tell your cluster's support"


def check_shared_dir(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes that cannot write into the shared directory, or do not see there what the others have written."""
    told = answers.by_node(lambda facts: facts.shared)
    cannot = {node: one.error for node, one in told.items() if one.error}
    for error in dict.fromkeys(cannot.values()):
        few = [node for node in cannot if cannot[node] == error]
        found = f"{', '.join(few)} cannot write into the run directory: {error}"
        if error in _ADVICE_FOR_ALL:
            yield Finding(check="run directory", level="fail", found=found, to_do=_ADVICE_FOR_ALL[error])
        else:
            yield judge_nodes("run directory", few, answers, found, "", to_do=_NODE_ADVICE.get(error, _MOUNT_ADVICE))
    unseen = _outside_majority({node: one for node, one in told.items() if not one.error}, answers.nodes)
    if unseen:
        found = f"files in the run directory do not pass between {', '.join(unseen)} and the other nodes"
        to_do = "the nodes have different file systems there: compare `findmnt --target DIR` on them"
        yield judge_nodes("run directory", unseen, answers, found, "", to_do=to_do)
    if told and not cannot and not unseen:
        write_s, seen_s = max(one.write_s for one in told.values()), max(one.seen_s for one in told.values())
        found = f"each node sees the others' files; writing 1 MiB takes {write_s:.2f} s at most, and other nodes see it {seen_s:.2f} s later"
        yield Finding(check="run directory", level="warn" if write_s > SLOW_WRITE_S else "ok", found=found)
    if not told:
        yield unknown_finding("run directory", "no node answered in time whether it can write into the run directory")


def _outside_majority(told: Mapping[str, SharedDir], nodes: Sequence[str]) -> list[str]:
    """Return the nodes that share no file system with most; all of them where there is no such majority.

    Of two nodes on one file system, the later one sees the file of the earlier one, however late it starts: only two of
    which neither sees the other's file are on two.
    """
    pairs = [
        (one, other) for at, one in enumerate(nodes) if one in told for other in neighbours(at, nodes) if other in told
    ]
    apart = {(one, other) for one, other in pairs if other not in told[one].seen and one not in told[other].seen}
    group_of = {node: {node} for node in told}
    for one, other in pairs:
        if (one, other) not in apart and group_of[one] is not group_of[other]:
            smaller, larger = sorted((group_of[one], group_of[other]), key=len)
            larger |= smaller
            group_of.update(dict.fromkeys(smaller, larger))
    largest = max(group_of.values(), key=len, default=set())
    if not any(group_of[one] is not group_of[other] for one, other in apart):
        return []
    if len(largest) * 2 <= len(told):
        return list(told)
    beside_largest = {one for one, other in apart if other in largest}
    return [node for node in told if node not in largest and node in beside_largest]


def check_paths(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes on which a path that workers read is missing or empty, though others have it."""
    told = answers.by_node(lambda facts: facts.paths)
    local = {"/tmp", "/var/tmp", "/dev/shm"}  # noqa: S108  each node has its own there
    local |= {disk.path for disks in answers.by_node(lambda facts: facts.disks).values() for disk in disks.values()}
    good = []
    for path in sorted({path for paths in told.values() for path in paths}):
        states = {node: paths[path] for node, paths in told.items() if path in paths}
        if THERE not in states.values():
            if {*states.values()} - {MISSING, EMPTY}:
                found = f"{path} cannot be read on any node: {next(iter(states.values()))}"
                yield Finding(
                    check="data", level="warn", found=found, to_do="check the path's permissions, and its file system"
                )
            continue  # nothing is there on any node: perhaps the run writes it
        bad = [node for node, state in states.items() if state != THERE]
        if not bad:
            good.append(path)
            continue
        # What few nodes have may be an output, or a cache that a former run left on its own disk.
        is_of_most = len(bad) * 2 < len(states) and local.isdisjoint({path, *map(str, PurePosixPath(path).parents)})
        there = answers.by_node(lambda facts: facts.mounts)
        mounts = {node: of_node[path] for node, of_node in there.items() if path in of_node}
        yield _judge_path(path, states, bad, mounts, is_of_most=is_of_most)
    if good:
        yield Finding(check="data", level="ok", found=f"all nodes have: {', '.join(good)}")


def _judge_path(
    path: str,
    states: Mapping[str, str],
    bad: Sequence[str],
    mounts: Mapping[str, tuple[str, str, str]],
    *,
    is_of_most: bool,
) -> Finding:
    """Return what it means that some nodes do not have what others have.

    An empty directory is proof of a missing mount only where it lies on another file system than on most nodes: else the
    file server shows this node less, or the file system is one of the node's own.
    """
    good = {node: mounts[node] for node in states if states[node] == THERE and node in mounts}
    common, _ = odd_nodes({**good, **{node: mounts[node] for node in bad if node in mounts}})
    elsewhere = [node for node in bad if common is not None and mounts.get(node, common) != common]
    empty = [node for node in bad if states[node] == EMPTY]
    found = f"{path} is {states[bad[0]]} on {', '.join(bad)}, but exists on the other nodes"
    if elsewhere and common is not None:
        node = elsewhere[0]
        found += f": it lies on {_mount_words(common)} on most, and on {_mount_words(mounts[node])} on {', '.join(elsewhere)}"
    waits = [node for node in empty if node in mounts and mounts[node][1] == AUTOMOUNT]
    is_proof = is_of_most and all(node in elsewhere for node in empty) and not waits
    to_do = f"compare `findmnt --target {path}` on these nodes and the others; if a mount is missing, tell your cluster's support"
    if waits:
        to_do = f"an automounter on these nodes has mounted nothing within some seconds: run `ls` below {path} on them"
    elif empty and not elsewhere:
        to_do = f"these nodes have the same file system, but see it empty: run `ls {path}` on them again, and tell your cluster's support"
    nodes = (*bad,) if is_proof else ()
    return Finding(check="data", level="fail" if is_proof else "warn", found=found, to_do=to_do, nodes=nodes)


def _mount_words(mount: tuple[str, str, str]) -> str:
    point, fs_type, source = mount
    return f"{point} ({fs_type}{f' of {source}' if source not in ('', 'none', fs_type) else ''})"


_DISK_ADVICE = "remove files from this disk, or set TMPDIR to another disk (`env.TMPDIR`)"
_SHM_ADVICE = "remove files from /dev/shm, use fewer loader processes (`data.num_workers`), or give the container more (`--shm-size`)"


def check_disks(answers: NodeAnswers) -> Iterator[Finding]:
    """Find disks of nodes that are full, or nearly so."""
    told = answers.by_node(lambda facts: facts.disks)
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
                # Only loader processes use much of it, and containers have 64 MiB by default.
                told_as = "warn" if label == "shared memory" else level
                path = disks[next(iter(few))].path
                found = f"the disk for {label}, {path}: {'; '.join(f'{node}: {text}' for node, text in few.items())}"
                to_do = _SHM_ADVICE if label == "shared memory" else _DISK_ADVICE
                yield judge_nodes("disk", [*few], answers, found, "", level=told_as, to_do=to_do)  # type: ignore[arg-type]  # of a literal
    if is_good:
        yield Finding(check="disk", level="ok", found="space for temporary files and shared memory on all nodes")
    if not told:
        yield unknown_finding("disk", "no node answered in time how full its disks are")
