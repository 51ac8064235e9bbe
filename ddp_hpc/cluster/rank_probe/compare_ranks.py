"""Compares what the ranks were doing in a hang: which one is behind, who calls something else, or that nobody is behind. Pure.

Each rank numbers the collectives of each process group, so the numbers of all ranks can be compared. With gloo only the launch
and the end on the rank itself are recorded; a point-to-point operation is not. A rank that may wait in one is not called behind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from ddp_hpc.base.names import shorten_names
from ddp_hpc.run.run_dir.failure_reports import HangKind
from ddp_hpc.run.run_dir.hang_records import DUMPING_STATE, RankInHang

_EQUAL_SIZE_OPS = frozenset({"all_reduce", "allreduce", "broadcast", "allreduce_coalesced"})
"""Operations to which every rank gives as many elements of the same type. To a gather or a scatter, ranks may give different ones."""
_THREAD = re.compile(r"^(?:Current thread|Thread) .*?:\n((?:  .*\n?)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_THREAD_FILES = ("threading.py", "concurrent/futures/thread.py")
_LIBRARY_PATHS = ("/torch/", "/ddp_hpc/", "/lib/python", "<frozen")
_MOST_NAMED = 4
_LOADER = "torch/utils/data"
_WAIT_CALLS = re.compile(
    r"\b(?:wait(?!pid)\w*|synchronize|item|tolist|cpu|numpy|cuda|to|i?recv\w*|i?send\w*|barrier|join|result|get|acquire)\s*\("
)
"""Calls in which a rank may wait for another one, or for a GPU that does. They are methods of C, which have no frame of their own."""

GroupId = tuple[str, str]
"""The name of a process group, and the backend by which its ranks meet."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One entry of a flight record."""

    group: GroupId
    title: str
    """What the user has called the group, or PyTorch."""
    number: int
    """Of the collectives of this group on this rank."""
    operation: str
    elements: tuple[int, ...]
    """Of each tensor."""
    dtypes: tuple[str, ...]
    is_over: bool

    def is_incompatible(self, other: Collective) -> bool:
        """Tell whether two ranks cannot mean the same by it."""
        if self.operation != other.operation:
            return True
        return self.operation in _EQUAL_SIZE_OPS and (self.elements, self.dtypes) != (other.elements, other.dtypes)

    @property
    def words(self) -> str:
        what = " and ".join(map(str, self.elements))
        return f"{self.operation} of {what} {'/'.join(sorted(set(self.dtypes)))} elements" if what else self.operation


@dataclass(frozen=True, kw_only=True)
class ComparedRanks:
    """Who hangs, as far as records of collectives and the states of processes show it."""

    kind: HangKind = ""
    """Empty where the records do not say it."""
    ranks: Sequence[int] = ()
    """Those that are behind, or call different operations; of `network`, those that wait; without a kind, those that may be behind."""
    how: str = ""
    """What the first of them does, as a predicate, where it is behind; else a whole sentence."""


_UNKNOWN = ComparedRanks()


@dataclass(frozen=True, kw_only=True)
class _RankCollectives:
    """What one rank's record says of its collectives."""

    newest: Mapping[GroupId, int] = field(default_factory=dict)
    """The number of the newest collective of each group."""
    by_number: Mapping[tuple[GroupId, int], Collective] = field(default_factory=dict)
    members: Mapping[str, Collection[int]] = field(default_factory=dict)
    """The ranks of a group, where the record lists them."""


def compare(records: Sequence[RankInHang], world_size: int) -> ComparedRanks:
    """Compare the records of one hang. A rank that has crashed explains it alone."""
    by_rank = {record.rank: record for record in records}
    if crashed := [rank for rank, record in sorted(by_rank.items()) if record.state == DUMPING_STATE]:
        return ComparedRanks(kind="crashed", ranks=crashed, how=_say_doing(by_rank[crashed[0]]))
    # A flight record without entries is of a rank that has not launched a collective.
    known = {rank: record.flight_record for rank, record in by_rank.items() if record.flight_record is not None}
    ranks = {rank: _read(one) for rank, one in known.items() if isinstance(one.get("entries", []), list)}
    return _Comparison(by_rank, ranks).compare(world_size)


@dataclass(frozen=True)
class _Comparison:
    """The records of one hang, and what those that have collectives say of these."""

    by_rank: Mapping[int, RankInHang]
    ranks: Mapping[int, _RankCollectives]

    @cached_property
    def waits(self) -> Mapping[int, Sequence[Collective]]:
        """The ranks that wait in collectives, and in which: those that they have launched and that are not over on them."""
        launched = ((rank, found.by_number.values()) for rank, found in self.ranks.items())
        left = {rank: [one for one in several if not one.is_over] for rank, several in launched}
        return {rank: several for rank, several in left.items() if several}

    def compare(self, world_size: int) -> ComparedRanks:
        """Compare the ranks' collectives, and how they wait."""
        held = [
            rank for rank, record in sorted(self.by_rank.items()) if rank not in self.ranks and _is_kernel_held(record)
        ]
        by_kernel = (
            ComparedRanks(kind="behind", ranks=held, how=_say_doing(self.by_rank[held[0]])) if held else _UNKNOWN
        )
        if not self.waits or world_size == 1:
            return by_kernel if len(held) < len(self.by_rank) == world_size else _UNKNOWN
        if (different := self._find_difference()) is not None:
            return different
        missing = self._find_missing()
        free = sorted(self.ranks.keys() - self.waits.keys())
        late = [rank for rank in free if any(rank in others for others in missing.values())]
        working = [rank for rank in late or free if not _may_wait(self.by_rank[rank])]
        # Of several, one may wait for another by what is not recorded, so that each must be known not to wait.
        if len(late or free) > 1:
            working = [rank for rank in working if not _is_unclear(self.by_rank[rank])]
        if working:
            return self._say_behind(working)
        if held or late:
            return by_kernel if held else self._say_undecided(late)
        if len(self.ranks) < world_size or free:
            return _UNKNOWN  # somebody is not known, so that nobody may be called behind, and nobody is cleared
        return self._judge_nobody([rank for rank in sorted(self.waits) if not missing[rank]])

    def _judge_nobody(self, complete: Sequence[int]) -> ComparedRanks:
        """Return what all ranks do that wait for each other; for those in `complete`, all ranks have launched what they wait in."""
        if not complete:
            first = [(rank, self.waits[rank][0]) for rank in sorted(self.waits)[:_MOST_NAMED]]
            named = "; ".join(f"rank {rank} waits in {_op_words(one)}{_at(self.by_rank[rank])}" for rank, one in first)
            how = f"ranks wait for each other in different groups: {named}. All ranks must use their groups in the same order"
            return ComparedRanks(kind="different", ranks=sorted(self.waits), how=how)
        one = self.waits[complete[0]][0]
        how = f"no rank is behind: all have launched the same collectives, up to {_op_words(one)}, which does not end"
        return ComparedRanks(kind="network", ranks=sorted(self.ranks), how=how)

    def _find_difference(self) -> ComparedRanks | None:
        """Return the first collective that is not the same on all ranks, among those that are not over."""
        for number, group in sorted({(one.number, one.group) for several in self.waits.values() for one in several}):
            there = {rank: found for rank, one in self.ranks.items() if (found := one.by_number.get((group, number)))}
            first = min(there)
            other = next((rank for rank in sorted(there) if there[rank].is_incompatible(there[first])), None)
            if other is not None:
                said = [f"rank {rank} calls {there[rank].words}{_at(self.by_rank[rank])}" for rank in (first, other)]
                how = f"{', '.join(said)}; collective {number} of {_group_words(there[first])} must be the same on all its ranks"
                return ComparedRanks(kind="different", ranks=[first, other], how=how)
        return None

    def _find_missing(self) -> Mapping[int, set[int]]:
        """Return for each waiting rank the ranks that have not launched what it waits in."""
        late: dict[tuple[GroupId, int], set[int]] = {}  # most ranks wait in the same one
        for one in (one for several in self.waits.values() for one in several):
            if (one.group, one.number) not in late:
                late[one.group, one.number] = {
                    rank for rank in self._members(one.group) if self.ranks[rank].newest.get(one.group, 0) < one.number
                }
        awaited = {rank: [late[one.group, one.number] for one in several] for rank, several in self.waits.items()}
        return {rank: set[int]().union(*missing) for rank, missing in awaited.items()}

    def _members(self, group: GroupId) -> Collection[int]:
        """Return the ranks of a group that have answered; where no record lists them, those that have used it."""
        name, _ = group
        listed = next((one.members[name] for one in self.ranks.values() if name in one.members), None)
        if listed is not None:
            return [rank for rank in listed if rank in self.ranks]
        # The first group of a process has this name and all ranks. Of another one, a rank that has not used it may not be in it.
        return [rank for rank, one in self.ranks.items() if name == "0" or group in one.newest]

    def _say_behind(self, behind: Sequence[int]) -> ComparedRanks:
        newest, how = self.ranks[behind[0]].newest, _say_doing(self.by_rank[behind[0]])
        for awaited in (one for several in self.waits.values() for one in several):
            if newest.get(awaited.group, 0) < awaited.number:
                how += f": it has launched {newest.get(awaited.group, 0)} collectives of {_group_words(awaited)}, and others wait in collective {awaited.number}, {awaited.words}"
                break
        if len(behind) > 1:
            others = shorten_names([*map(str, behind[1:])], _MOST_NAMED - 1)
            how += f" (so do ranks {others})" if len(behind) > 2 else f" (so does rank {others})"
        return ComparedRanks(kind="behind", ranks=behind, how=how)

    def _say_undecided(self, late: Sequence[int]) -> ComparedRanks:
        named = [f"rank {rank} {_say_doing(self.by_rank[rank])}" for rank in late]
        how = "others wait for what these have not launched, but these may wait for a rank themselves: "
        return ComparedRanks(ranks=late, how=how + shorten_names(named, _MOST_NAMED, between="; "))


def _say_doing(record: RankInHang) -> str:
    """Say what a rank does that no other one waits with."""
    if record.state.startswith("stopped"):
        return f"is {record.state} (SIGSTOP)" if record.state == "stopped" else f"is {record.state}"
    if record.state == DUMPING_STATE:
        return "has crashed, and the kernel still writes its core file (a limit of 0 for core files, `ulimit -c 0`, prevents that)"
    if record.state.startswith("in the kernel"):
        where = f", at {place_in_code(record)}" if place_in_code(record) else ""
        return f"waits {record.state}, as for a file system that does not answer{where}"
    if record.holds_interpreter:
        return "is in a call that holds Python's interpreter (GIL), so that its line is not known"
    if not record.answers:
        return "does not answer"
    return f"is in {place_in_code(record) or 'code without a Python frame'}"


def _is_kernel_held(record: RankInHang) -> bool:
    """Tell whether the kernel says that a process which does not answer cannot."""
    return record.state.startswith(("stopped", "in the kernel"))


def _may_wait(record: RankInHang) -> bool:
    """Tell whether a rank waits for others, or may: by its stack, as not all that ranks wait in is recorded."""
    if _is_kernel_held(record):
        return False
    if record.stacks is None:
        return not record.holds_interpreter
    return is_in_distributed(record.stacks) or (bool(_WAIT_CALLS.search(record.line)) and not _is_loading_data(record))


def _is_unclear(record: RankInHang) -> bool:
    """Tell whether a rank that sleeps in a line that is not known may wait in it for another one."""
    if _is_kernel_held(record) or record.holds_interpreter or record.state == "running" or record.line:
        return False
    return not _is_loading_data(record)


def _is_loading_data(record: RankInHang) -> bool:
    """Tell whether a rank waits for its samples."""
    return any(_LOADER in frame for frame in main_thread_frames(record.stacks or "")[:8])


def is_in_distributed(stacks: str) -> bool:
    """Tell whether the main thread is in PyTorch's calls that wait for other ranks."""
    return any("torch/distributed/" in frame or "sealed_store.py" in frame for frame in main_thread_frames(stacks)[:4])


def place_in_code(record: RankInHang) -> str:
    """Return the innermost line of the user's code in the main thread, or else the innermost line."""
    frames = main_thread_frames(record.stacks or "")
    return next((frame for frame in frames if not any(part in frame for part in _LIBRARY_PATHS)), "".join(frames[:1]))


def main_thread_frames(stacks: str) -> list[str]:
    """Return the frames of the main thread: the one whose outermost frame is not in `threading`."""
    for thread in _THREAD.finditer(stacks):
        frames = [f"{match['file']}:{match['line']} in {match['function']}" for match in _FRAME.finditer(thread[1])]
        if frames and not any(part in frames[-1] for part in _THREAD_FILES):
            return frames
    return []


def _at(record: RankInHang) -> str:
    return f" at {place_in_code(record)}" if place_in_code(record) else ""


def _op_words(one: Collective) -> str:
    return f"{one.operation} (number {one.number} of {_group_words(one)})"


def _group_words(one: Collective) -> str:
    return f"group {one.group[0]}{f' ({one.title})' if one.title not in ('', 'undefined') else ''}"


# --- flight records ----------------------------------------------------------------------------------------------------


def _read(flight_record: Mapping[str, Any]) -> _RankCollectives:
    """Read one flight record; an entry that is not as expected is left out."""
    newest: dict[GroupId, int] = {}
    by_number: dict[tuple[GroupId, int], Collective] = {}
    for one in _collectives(flight_record.get("entries")):
        newest[one.group] = max(newest.get(one.group, 0), one.number)
        by_number[one.group, one.number] = one
    config = flight_record.get("pg_config")
    groups = config.items() if isinstance(config, dict) else ()
    texts = {str(name): group.get("ranks") for name, group in groups if name and isinstance(group, dict)}
    members = {name: [*map(int, re.findall(r"\d+", text))] for name, text in texts.items() if isinstance(text, str)}
    listed = {name: ranks for name, ranks in members.items() if ranks}
    return _RankCollectives(newest=newest, by_number=by_number, members=listed)


def _collectives(entries: object) -> Iterator[Collective]:
    for entry in entries if isinstance(entries, list) else []:
        match entry:
            case {
                "process_group": [str(name), str(title)],
                "collective_seq_id": int(number),
                "profiling_name": str(called),
                "is_p2p": False,
                **rest,
            }:
                backend, _, operation = called.partition(":")
                values = (rest.get(key) for key in ("input_sizes", "input_dtypes"))
                sizes, dtypes = (value if isinstance(value, list) else [] for value in values)
                yield Collective(
                    group=(name, backend),
                    title=title,
                    number=number,
                    operation=operation or called,
                    # [2, 4] and [8] may be one collective.
                    elements=tuple(
                        prod(one)
                        for one in sizes
                        if isinstance(one, list) and all(isinstance(size, int) for size in one)
                    ),
                    dtypes=tuple(map(str, dtypes)),
                    is_over=bool(rest.get("retired")) or rest.get("state") == "completed",
                )
