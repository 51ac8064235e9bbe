"""What `status` says of a profile that was asked for: where it is, or why it is missing and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ddp_hpc.cli import main
from ddp_hpc.cli.details import about_profiles
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.profile_notes import note_profile, read_profiles
from ddp_hpc.run.spec.training import ProfileSpec
from ddp_hpc.train.recording.step_profile import phase_timer
from tests.full_disk import no_file_larger_than
from tests.made_run import add_attempt, make_run
from tests.unit.test_step_profile import OfRank


def note(run: RunDir, attempt: int = 0, rank: int = 0, *, kind: str = "torch", why_not: str = "") -> None:
    note_profile(run, attempt, rank, kind=kind, steps=(11, 15), why_not=why_not)


def shown(run: RunDir, *, is_alive: bool = False) -> str:
    return about_profiles(read_profiles(run, is_alive=is_alive), "digits")


def test_a_run_that_was_asked_for_none_has_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="finished")

    assert main(["status", str(run.path)]) == 0
    assert "profile" not in capsys.readouterr().out
    assert main(["status", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == []


def test_a_profile_that_is_there_is_named_also_where_a_later_attempt_began_behind_its_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    note(run)
    run.profile_trace(0, 0).touch()
    note(run, attempt=1, why_not="the attempt began behind these steps")

    assert shown(run) == f"torch, steps 11 to 15: rank 0 is in {run.profile_trace(0, 0)}"


def test_each_rank_has_a_profile_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for rank in (0, 3, 10):
        note(run, rank=rank)
    run.profile_trace(0, 3).touch()

    assert [(one.rank, one.state) for one in read_profiles(run, is_alive=True)] == [
        (0, "awaited"),
        (3, "found"),
        (10, "awaited"),
    ]
    assert [one.state for one in read_profiles(run, is_alive=False)] == ["missing", "found", "missing"]


def test_a_rank_that_was_killed_has_not_said_why(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    note(run, attempt=2)

    assert "rank 0 is missing: attempt 2 ended before it was written. Its log: `ddp-hpc logs" in shown(run)


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"kind": 1, "steps": [1, 2], "why_not": ""}', '{"kind": "torch"}'])
def test_a_damaged_note_counts_as_none(record: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    note(run)
    run.profile_note(0, 0).write_text(record)

    assert shown(run) == ""


def test_a_note_is_read_between_the_zero_bytes_that_a_crashed_file_system_leaves(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    note(run, why_not="no GPU")
    path = run.profile_note(0, 0)
    path.write_bytes(b"\0\0" + path.read_bytes() + b"\0" * 512)

    assert "no GPU" in shown(run)


def test_a_full_disk_is_no_reason_to_end_a_training(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    with no_file_larger_than(0):
        timer = phase_timer(ProfileSpec(kind="torch"), run, OfRank(0), attempt=0, next_step=lambda: 99)  # type: ignore[arg-type]
        timer.enter("forward")

    assert list(run.profile.iterdir()) == []


@pytest.mark.parametrize(
    ("steps", "at", "why"),
    [
        ((1, 2), 9, "the attempt began behind these steps"),
        ((50, 60), 1, "the attempt ended before step 50"),
        ((1, 2), 1, ""),
    ],
)
def test_a_rank_notes_why_it_records_nothing(steps: tuple[int, int], at: int, why: str, tmp_path: Path) -> None:
    run, spec = make_run(tmp_path), ProfileSpec(kind="torch", steps=steps)
    timer = phase_timer(spec, run, OfRank(0), attempt=0, next_step=lambda: at)  # type: ignore[arg-type]

    timer.enter("forward")
    torch.ones(2).sum()
    timer.close()

    (one,) = read_profiles(run, is_alive=False)
    assert one.why.startswith(why)
    assert one.state == ("missing" if why else "found")
