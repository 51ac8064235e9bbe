"""The record of the training state's digests: what counts of it after a resume, and what of a damaged file."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import read_digests, record_digest


def write(run: RunDir, *lines: tuple[int, int, str]) -> None:
    for attempt, step, digest in lines:
        record_digest(run, attempt=attempt, step=step, world_size=2, digest=digest)


def read(run: RunDir) -> dict[int, str]:
    return {step: one.digest for step, one in read_digests(run).items()}


def test_a_run_without_a_record_has_no_digests(tmp_path: Path) -> None:
    assert read_digests(RunDir(tmp_path)) == {}


def test_a_resumed_attempt_replaces_what_came_after_its_first_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    write(run, (0, 0, "a"), (0, 50, "b"), (0, 100, "c"), (0, 150, "d"), (1, 50, "b"), (1, 100, "x"))

    assert read(run) == {0: "a", 50: "b", 100: "x"}


def test_workers_that_start_again_within_an_attempt_replace_it_as_well(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    write(run, (0, 0, "a"), (0, 50, "b"), (0, 100, "c"), (0, 0, "a"), (0, 50, "y"))

    assert read(run) == {0: "a", 50: "y"}


def test_a_line_that_a_crash_left_incomplete_is_skipped(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run, (0, 0, "a"))
    with run.digests.open("a") as file:
        file.write('{"attempt":0,"step":50,"wor')

    write(run, (0, 100, "c"))

    assert read(run) == {0: "a", 100: "c"}
