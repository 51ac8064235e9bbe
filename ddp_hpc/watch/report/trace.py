"""A run as a trace that ui.perfetto.dev and chrome://tracing open: a row for each rank. Pure, but for `trace_of`.

Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Perfetto reads it more strictly than Chrome does: it names a row by `tid` alone (https://github.com/google/perfetto/issues/363), and leaves out
a slice that begins within another one and ends after it (https://github.com/google/perfetto/issues/4280).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ddp_hpc.base.shown_text import masked_record
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, read_failures
from ddp_hpc.run.run_dir.hang_records import HangRecord, read_hang_records
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Mark
from ddp_hpc.watch.attempt_times import AttemptTime
from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.timeline import parts_of

Event = dict[str, Any]
RUN, RANKS, COLLECTIVES, SAVES = 1, 2, 3, 4
"""Process numbers of the trace: groups of rows."""
_ROWS, _LANES = 1_000_000, 100_000
"""A row's number in the file is `group * _ROWS + lane * _LANES + rank`: unlike all others, and never 0."""
_GROUPS = {
    RUN: "run",
    RANKS: "ranks",
    COLLECTIVES: "collectives before a hang",
    SAVES: "checkpoint writer",
}


def trace_of(run: RunData) -> dict[str, Any]:
    """Return the trace of a run, as what is written as JSON."""
    files = RunDir(run.path)
    numbers = [one.attempt.attempt for one in run.times]
    events = [
        *_attempts(run.times),
        *_ranks(run),
        *_marks(run.marks),
        *_waits(run),
        *(event for number in numbers for event in _failures(number, read_failures(files, number))),
        *(event for number in numbers for event in _hangs(read_hang_records(files, number))),
    ]
    begin = min((event["ts"] for event in events), default=0.0)
    for event in events:
        start = round((event["ts"] - begin) * 1e6)
        if "dur" in event:  # from the rounded ends, so that a slice ends where the next one begins
            event["dur"] = max(1, round((event["ts"] + event["dur"] - begin) * 1e6) - start)
        event["ts"] = start
    # Of two slices that begin together, the viewer puts the second one into the first, so the longer one comes first.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    rows = _placed(events)
    for event in events:
        event["args"] = masked_record(event["args"], run.secrets)
    return {
        "traceEvents": [*_names(rows), *events],
        "displayTimeUnit": "ms",
        "otherData": {"run": run.status.run, "begin": f"{begin:.6f} s since the epoch"},
    }


def _placed(events: Sequence[Event]) -> list[tuple[int, int, int]]:
    """Give each event the number of its row; return all rows, as group, rank and lane.

    Slices that only overlap, as those of two attempts do if a clock was set back, are put into lanes of their own.
    """
    ends: dict[tuple[int, int, int], list[int]] = {}
    for event in events:
        row = (event["pid"], event["tid"], 0)
        while "dur" in event and not _fits(event, ends.setdefault(row, [])):
            row = (*row[:2], row[2] + 1)
        ends.setdefault(row, [])
        event["tid"] = _number(*row)
    return sorted(ends)


def _fits(slice_: Event, ends: list[int]) -> bool:
    """Tell whether a slice stands within, or after, those of a row that have not ended, `ends`; if so, add it to them."""
    while ends and ends[-1] <= slice_["ts"]:
        ends.pop()
    end = slice_["ts"] + slice_["dur"]
    if ends and end > ends[-1]:
        return False
    ends.append(end)
    return True


def _number(group: int, rank: int, lane: int) -> int:
    return group * _ROWS + lane * _LANES + rank


def _slice(pid: int, tid: int, name: str, begin: float, end: float, **args: Any) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": max(0.0, end - begin), "args": args}


def _instant(pid: int, tid: int, name: str, at: float, **args: Any) -> Event:
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": at, "args": args}


def _counter(name: str, at: float, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "pid": RUN, "tid": 0, "name": name, "ts": at, "args": dict(values)}


def _names(rows: Sequence[tuple[int, int, int]]) -> Iterator[Event]:
    """Name the rows, and keep the groups and the ranks in order."""
    for group, rank, lane in {row[0]: row for row in reversed(rows)}.values():
        first = {"ph": "M", "pid": group, "tid": _number(group, rank, lane)}
        yield {**first, "name": "process_name", "args": {"name": _GROUPS[group]}}
        yield {**first, "name": "process_sort_index", "args": {"sort_index": group}}
    for number, (group, rank, lane) in enumerate(rows):
        row = {"ph": "M", "pid": group, "tid": _number(group, rank, lane)}
        name = ("attempts" if group == RUN else f"rank {rank}") + (f" ({lane + 1})" if lane else "")
        yield {**row, "name": "thread_name", "args": {"name": name}}
        yield {**row, "name": "thread_sort_index", "args": {"sort_index": number}}


def _attempts(times: Sequence[AttemptTime]) -> Iterator[Event]:
    for one in times:
        attempt = one.attempt
        for kind, begin, end in parts_of(one):
            if kind == "queued":
                yield _slice(RUN, 0, "queued", begin, end)
        about = {"job": attempt.job_id, "nodes": list(attempt.nodes) or [attempt.host], "reason": attempt.reason}
        steps = {"first_step": one.first_step, "reached_step": one.reached_step, "kept_step": one.kept_step}
        ending = "goes on" if one.is_open else str(attempt.cause or attempt.ending or "killed")
        yield _slice(RUN, 0, f"attempt {attempt.attempt}: {ending}", attempt.started_at, one.ended_at, **about, **steps)


def _ranks(run: RunData) -> Iterator[Event]:
    """Draw what all ranks did at the same time: starting, training, what was lost; and on rank zero the evaluations."""
    worlds = {mark.attempt: mark.world_size for mark in run.marks if mark.world_size}
    usual = max(worlds.values(), default=1)
    for one in run.times:
        number = one.attempt.attempt
        evaluations = [mark for mark in run.marks if mark.attempt == number and mark.kind == "evaluation"]
        for rank in range(worlds.get(number) or usual):
            parts = [part for part in parts_of(one) if part[0] != "queued"]
            for kind, begin, end in parts:
                yield _slice(RANKS, rank, kind, begin, end, attempt=number)
            for mark in evaluations if rank == 0 else []:  # noted of rank zero
                begin = mark.at - (mark.seconds or 0.0)
                if any(low <= begin and mark.at <= high for _, low, high in parts):
                    yield _slice(RANKS, rank, "evaluation", begin, mark.at, step=mark.step)


def _marks(marks: Sequence[Mark]) -> Iterator[Event]:
    """Draw the saves, and the time in each phase between two notes as counters: how long each took is known, not when."""
    for mark in marks:
        if mark.kind == "save":
            yield _slice(
                SAVES, 0, f"save of step {mark.step}", mark.at - (mark.seconds or 0.0), mark.at, step=mark.step
            )
    phases = [mark for mark in marks if mark.kind == "phases" and mark.phases and mark.num_steps]
    for before, mark in pairwise(phases):
        steps = (mark.num_steps or 0) - (before.num_steps or 0)
        if mark.attempt == before.attempt and steps > 0:
            spent = {name: one - before.phases.get(name, 0.0) for name, one in mark.phases.items()}
            yield _counter(
                "phases of rank 0, ms a step",
                before.at,
                {name: round(one / steps * 1000, 3) for name, one in spent.items()},
            )


def _waits(run: RunData) -> Iterator[Event]:
    for look in run.looks:
        late = {f"rank {rank}": round(max(0.0, lost) * 1000, 3) for rank, lost in look.lost_s.items()}
        yield _counter("time that other ranks wait for this rank, ms a step", look.at, late)
    for alarm in run.alarms:
        known = {"lost_ms_a_step": round(alarm.lost_s * 1000, 1), "share": round(alarm.share, 3), "cause": alarm.cause}
        yield _instant(RANKS, alarm.rank, "slow", alarm.at, **known)
        if alarm.ended_at is not None:
            yield _instant(RANKS, alarm.rank, "not slow any more", alarm.ended_at)


def _failures(attempt: int, failures: Sequence[WorkerFailure]) -> Iterator[Event]:
    for one in failures:
        yield _instant(RANKS, one.rank, "failed", one.at, attempt=attempt, step=one.step, exception=one.exception)


def _hangs(records: Sequence[HangRecord]) -> Iterator[Event]:
    """Draw the newest collectives of each rank, and the oldest one that has not ended as a slice until the rank was asked."""
    for record in records:
        yield _instant(RANKS, record.rank, "hangs", record.at, state=record.state, stacks=record.stacks or "")
        entries = (record.flight_record or {}).get("entries")
        is_open = False
        for entry in entries if isinstance(entries, list) else []:
            created = entry.get("time_created_ns") if isinstance(entry, dict) else None
            if not isinstance(created, (int, float)) or not 0 < created / 1e9 <= record.at + 1:
                continue
            name = f"{entry.get('profiling_name', 'collective')} {entry.get('collective_seq_id', '')}".strip()
            about = {key: entry.get(key) for key in ("state", "input_sizes", "output_sizes", "process_group")}
            if entry.get("state") == "completed" or is_open:
                yield _instant(COLLECTIVES, record.rank, name, created / 1e9, **about)
            else:
                is_open = True
                yield _slice(COLLECTIVES, record.rank, f"{name}: not completed", created / 1e9, record.at, **about)
