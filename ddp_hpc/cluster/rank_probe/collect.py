"""Asks ranks that make no progress what they do, and keeps the answers in the run directory, before anybody kills them."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ddp_hpc.base.processes import host_name, kernel_text
from ddp_hpc.cluster.rank_probe.client import ANSWER_S, NoAnswerError, NoHandlerError, RankProbe
from ddp_hpc.cluster.rank_probe.compare_ranks import is_in_distributed, main_thread_frames
from ddp_hpc.run.run_dir.hang_records import DUMPING_STATE, RankInHang, write_hang_record
from ddp_hpc.run.run_dir.paths import RunDir

_AT_ONCE = 16
_MOST_LINE_CHARS = 200
_STATES = {"R": "running", "S": "sleeping", "T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended"}
"""Letters of proc_pid_stat(5)."""


def keep_hang_records(run: RunDir, attempt: int, ranks: Mapping[int, Path], *, answer_s: float = ANSWER_S) -> None:
    """Ask these ranks, whose sockets are given, all at once; write a record of each. A rank that does not answer has one, too."""

    def keep(rank: int) -> None:
        record = ask_rank(rank, RankProbe(path=ranks[rank], answer_s=answer_s))
        with suppress(OSError):  # a full disk: then the report of the hang has what the logs say
            write_hang_record(run, attempt, record)

    # The pool ends here, so nobody forks beside its threads. Signals are blocked in them, as in the thread that starts them.
    with ThreadPoolExecutor(min(_AT_ONCE, len(ranks) or 1)) as pool:
        list(pool.map(keep, ranks))


def ask_rank(rank: int, probe: RankProbe, *, pid: int | None = None, with_stacks: bool = True) -> RankInHang:
    """Ask one rank everything; `pid` is its process, where that is known without asking."""
    unknown: dict[str, str] = {}
    try:
        pid = probe.ping()
    except NoAnswerError as error:
        pid = error.pid or pid
        unknown["ping"] = str(error)

    def ask(name: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except NoAnswerError as error:
            unknown[name] = str(error)
            return None

    answers = "ping" not in unknown
    state = process_state(pid)
    # The stacks come last: where a thread holds the interpreter, that question stays with the server, and takes one of its threads.
    flight_record = ask("flight_record", partial(merged_flight_record, probe)) if answers else None
    stacks = ask("stacks", probe.stacks) if answers and with_stacks else None
    return RankInHang(
        rank=rank,
        host=host_name(),
        at=time.time(),
        pid=pid,
        state=state,
        answers=answers,
        line="" if stacks is None or state.startswith("in the kernel") else _innermost_line(stacks),
        flight_record=flight_record,
        stacks=stacks,
        unknown=unknown,
    )


def merged_flight_record(probe: RankProbe) -> dict[str, Any]:
    """Return the collectives of gloo and NCCL in one record, by the time of their launch.

    Raises:
        NoAnswerError: if one of both is not known: without it, a rank would look as if it had launched less than it has.
    """
    record = probe.flight_record()
    try:
        nccl = probe.nccl_flight_record()
    except NoHandlerError:  # a PyTorch without NCCL
        return record
    entries = [*_collectives_of(record), *_collectives_of(nccl)]
    keys = [key for key in ("pg_config", "pg_status") if all(isinstance(one.get(key), dict) for one in (record, nccl))]
    groups = {key: {**nccl[key], **record[key]} for key in keys}
    return {**nccl, **record, **groups, "entries": sorted(entries, key=_launched_at)}


def _collectives_of(record: Mapping[str, Any]) -> list[Any]:
    entries = record.get("entries", [])
    if not isinstance(entries, list):
        raise NoAnswerError("the flight record has no list of collectives")
    return entries


def _launched_at(entry: object) -> float:
    at = entry.get("time_created_ns") if isinstance(entry, dict) else None
    return at if isinstance(at, int) else 0


def _innermost_line(stacks: str) -> str:
    """Return the source in which the main thread is, where it may show a wait that has no frame of its own."""
    frames = main_thread_frames(stacks)
    if not frames or is_in_distributed(stacks):
        return ""
    path, _, number = frames[0].partition(" in ")[0].rpartition(":")
    return linecache.getline(path, int(number)).strip()[:_MOST_LINE_CHARS]


def process_state(pid: int | None) -> str:
    """Return what the kernel says of a process's main thread; empty where it is not known."""
    if pid is None:
        return ""
    process = Path(f"/proc/{pid}")
    # Its letter is that of a process that runs. proc_pid_status(5), since Linux 4.15.
    if "CoreDumping:\t1" in kernel_text(process / "status"):
        return DUMPING_STATE
    letter = kernel_text(process / "stat").rpartition(")")[2].split()[:1]
    if letter != ["D"]:
        return _STATES.get("".join(letter), "")
    where = kernel_text(process / "wchan").strip("0\n")  # not on every kernel
    return f"in the kernel{f' ({where})' if where else ''}"
