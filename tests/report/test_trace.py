"""The trace follows the Trace Event Format, so that Perfetto and Chrome open it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.hang_records import HangRecord, write_hang_record
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.report.reading import read_run
from ddp_hpc.watch.report.trace import COLLECTIVES, RANKS, RUN, SAVES, trace_of
from tests.made_run import add_failure, make_run
from tests.report.made import BEGIN, Plan, large_run, made_run

_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "ts": int, "pid": int, "tid": int, "s": str, "args": dict},
    "C": {"name": str, "ts": int, "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
"""Kind of event -> the fields that it must have."""


def traced(run: RunDir) -> list[dict[str, Any]]:
    """Return the events of a run's trace, as JSON gives them back."""
    events: list[dict[str, Any]] = json.loads(json.dumps(trace_of(read_run(run, now=BEGIN)), allow_nan=False))[
        "traceEvents"
    ]
    return events


def check(events: list[dict[str, Any]]) -> None:
    """Hold events to the format: fields, order, counters that are numbers, and slices that stand within each other."""
    for event in events:
        for name, kind in _FIELDS[event["ph"]].items():
            assert isinstance(event[name], kind), event
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] in "Xi":
            assert event["ts"] >= 0
            assert event.get("dur", 1) > 0
        assert event["tid"] > 0
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    check_rows(events)
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            ends = rows[event["pid"], event["tid"]]
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1], event
            ends.append(event["ts"] + event["dur"])


def check_rows(events: list[dict[str, Any]]) -> None:
    """Hold rows to what Perfetto makes of them: a `tid` names one row of all, is no `pid`, and has one name, without a time."""
    groups = {event["tid"]: event["pid"] for event in events}
    assert {(event["pid"], event["tid"]) for event in events} == {(pid, tid) for tid, pid in groups.items()}
    assert not {*groups} & {*groups.values()}
    named = {kind: [event for event in events if event["name"] == kind] for kind in ("thread_name", "process_name")}
    assert sorted(event["tid"] for event in named["thread_name"]) == sorted(groups)
    assert sorted(event["pid"] for event in named["process_name"]) == sorted({*groups.values()})
    assert all("ts" not in event for event in events if event["ph"] == "M")


def row_names(events: list[dict[str, Any]]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def rank_of(event: dict[str, Any]) -> int:
    rank: int = event["tid"] % 100_000
    return rank


def test_attempts_that_overlap_since_the_clock_was_set_back_are_drawn_in_rows_of_their_own(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=300), Plan(first=200, reached=400, ending="finished")])
    lines = [json.loads(line) for line in run.attempts.read_text().splitlines()]
    for line in lines:
        if line["attempt"] == 1:
            line.update({key: line[key] - 60 for key in ("started_at", "ended_at") if key in line})
    run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    events = traced(run)

    check(events)
    assert {"attempts", "attempts (2)", "rank 1", "rank 1 (2)"} <= {*row_names(events).values()}
    assert len([event for event in events if event["ph"] == "X" and event["pid"] == RUN]) == 2


def test_a_slice_ends_where_the_next_one_begins_whatever_is_rounded(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=300)] * 3)
    text = run.attempts.read_text()
    run.attempts.write_text(text.replace(f"{BEGIN}", f"{BEGIN + 0.0000004:.7f}"))

    check(traced(run))


def test_a_large_run_has_a_row_for_each_rank(tmp_path: Path) -> None:
    events = traced(large_run(tmp_path / "large"))

    check(events)
    assert {rank_of(event) for event in events if event["ph"] == "X" and event["pid"] == RANKS} == {*range(64)}
    assert {*row_names(events).values()} == {"attempts", *(f"rank {rank}" for rank in range(64))}


def test_times_are_microseconds_from_the_first_event_on(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=300, ending="finished")])

    (starting,) = [event for event in traced(run) if event["name"] == "starting" and rank_of(event) == 0]

    assert (starting["ts"], starting["dur"]) == (0, 40_000_000)


def test_saves_failures_and_phases_are_in_the_trace(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=340), Plan(first=300, reached=400, ending="finished")])
    add_failure(run, rank=1, at=BEGIN + 100)

    events = traced(run)

    check(events)
    assert [event["name"] for event in events if event["pid"] == SAVES and event["ph"] == "X"] == [
        f"save of step {step}" for step in (100, 200, 300, 400)
    ]
    assert [rank_of(event) for event in events if event["name"] == "failed"] == [1]
    assert any(event["name"] == "lost" for event in events)
    assert {key for event in events if event["name"].startswith("phases") for key in event["args"]} >= {
        "forward",
        "backward",
    }


def test_the_collectives_before_a_hang_show_which_one_has_not_ended(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=300)])
    at = BEGIN + 90.0
    entries = [
        {
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": number,
            "time_created_ns": (at - 10 + number) * 1e9,
            "state": state,
        }
        for number, state in enumerate(["completed", "completed", "scheduled", "scheduled"])
    ]
    odd = [None, {}, {"time_created_ns": "x"}, {"time_created_ns": -1}]
    write_hang_record(run, 0, HangRecord(rank=1, host="node00", at=at, flight_record={"entries": [*odd, *entries]}))
    write_hang_record(run, 0, HangRecord(rank=0, host="node00", at=at, flight_record={"entries": 7}))

    events = traced(run)

    check(events)
    shown = [(event["ph"], event["name"]) for event in events if event["pid"] == COLLECTIVES and event["ph"] in "Xi"]
    assert shown == [
        ("i", "gloo:all_reduce 0"),
        ("i", "gloo:all_reduce 1"),
        ("X", "gloo:all_reduce 2: not completed"),
        ("i", "gloo:all_reduce 3"),
    ]
    assert [rank_of(event) for event in events if event["name"] == "hangs"] == [0, 1]


def test_the_verb_writes_json_and_refuses_a_run_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs" / "one", [Plan(first=0, reached=300, ending="finished")])
    make_run(tmp_path / "runs", "two")

    assert main(["trace", "one", "-o", "t.json"]) == 0
    assert main(["trace", "two"]) != 0

    check(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert "has not begun an attempt" in capsys.readouterr().err
