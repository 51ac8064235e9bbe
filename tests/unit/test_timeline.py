"""The lines of timeline.jsonl and waits.jsonl: what is damaged is skipped, whatever it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import MOST_COMPARISONS, Mark, RankComparison, as_line, read_comparisons, read_marks

MARK = Mark(kind="phases", attempt=0, at=5.0, step=3, num_steps=3, phases={"data": 0.5})
LOOK = RankComparison(attempt=0, at=5.0, step=3, step_s=0.1, lost_s={0: 0.0, 1: 0.02})


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, "true", "null", '"3"'])
@pytest.mark.parametrize("name", ["attempt", "at", "step"])
def test_a_line_whose_number_is_none_is_skipped(name: str, value: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    odd = as_line(MARK).replace(
        *{"attempt": (b": 0,", f": {value},".encode()), "at": (b": 5.0", f": {value}".encode())}.get(
            name, (b'"step": 3', f'"step": {value}'.encode())
        )
    )
    run.timeline.write_bytes(odd + as_line(MARK))

    assert read_marks(run) == [MARK]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", "null", '"0.5"'])
def test_a_line_with_a_value_that_is_not_a_number_is_skipped(value: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.timeline.write_bytes(as_line(MARK).replace(b"0.5", value.encode()) + as_line(MARK))
    run.waits.write_bytes(as_line(LOOK).replace(b"0.02", value.encode()) + as_line(LOOK))

    assert (read_marks(run), read_comparisons(run)) == ([MARK], [LOOK])


@pytest.mark.long
def test_of_very_many_comparisons_evenly_spaced_ones_are_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lines = [b"\n" + as_line(replace(LOOK, step=step)) for step in range(3 * MOST_COMPARISONS)]
    run.waits.write_bytes(b"".join(lines))

    steps = [look.step for look in read_comparisons(run)]

    assert steps == [*range(0, 3 * MOST_COMPARISONS, 4)]


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\0\0",
        b'{"kind": "phases"',
        b"[1]",
        b'{"kind": "other", "attempt": 0, "at": 1.0, "step": 1}',
        b"[" * 99_999,
        b"\xff\xfe",
    ],
)
def test_lines_are_found_among_odd_ones(odd: bytes, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    by_hand = b'\0{"kind": "save", "attempt": 1, "at": 7, "step": 9, "seconds": 1, "more": 1}'
    run.timeline.write_bytes(b"\n".join([as_line(MARK).strip(), odd, by_hand, odd]))

    assert [(one.kind, one.attempt, one.step) for one in read_marks(run)] == [("phases", 0, 3), ("save", 1, 9)]
