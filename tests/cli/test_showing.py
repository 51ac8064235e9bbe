"""What is shown while a run goes, and said at its end."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.cli.details import goodput_line
from ddp_hpc.cli.follow_run import LINE_INTERVAL_S, show_progress_lines
from ddp_hpc.cli.formatting import duration, number, size, table
from ddp_hpc.cli.live import draw_screens, screen
from ddp_hpc.cli.status_text import as_text
from ddp_hpc.cli.summary import cause_text, exit_code, headline, next_commands
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import SlowRankAlarm
from ddp_hpc.watch.attempt_times import KINDS
from ddp_hpc.watch.follow import FollowUpdate
from ddp_hpc.watch.goodput import Goodput
from ddp_hpc.watch.status import RunStatus, State
from tests.made_run import add_failure, add_log, make_run

EVALUATION = {"kind": "eval", "step": 20, "epoch": 1, "loss": 0.25, "accuracy": 0.9833, "at": 1.0}


def status(state: State = "running", step: int = 20, *, last_checkpoint: int | None = 20) -> RunStatus:
    """Return the status of a run of 100 steps."""
    return RunStatus(
        run="digits",
        path="/runs/digits",
        state=state,
        reason="",
        attempt=0,
        job_id="7",
        host="node1",
        step=step,
        total_steps=100,
        saves=None,
        epoch=1 + step // 10,
        epochs=10,
        loss=0.5,
        samples_per_s=640.0,
        eta_s=65.0 if state == "running" else None,
        limit_s=None,
        slurm_state=None,
        starts_at=None,
        metrics={"loss": 0.25, "accuracy": 0.9833},
        last_checkpoint=last_checkpoint,
        checkpoint_age_s=None,
        save_error=None,
        slow_ranks=[],
        source="run directory",
        age_s=1.0,
    )


def ticks(interval_s: float) -> Iterator[float]:
    """Yield times of a clock that is asked now and then."""
    now = 0.0
    while True:
        now += interval_s
        yield now


def shown(looks: list[FollowUpdate], *, interval_s: float) -> list[str]:
    """Return the lines that are shown of these looks, taken at such intervals."""
    out, times = io.StringIO(), ticks(interval_s)
    show_progress_lines(looks, out, clock=lambda: next(times))
    return out.getvalue().splitlines()


def test_status_shows_what_memory_a_save_takes() -> None:
    on_gpu = {"host": 964_000_000, "gpu": 963_000_000}

    assert "save takes" not in as_text(status(), now=0.0)
    assert "\nsave takes  0.96 GB of each worker's memory, and 0.96 GB of its GPU's while it copies\n" in as_text(
        replace(status(), save_bytes=on_gpu), now=0.0
    )
    assert "\nsave takes  1.5 MB of each worker's memory\n" in as_text(
        replace(status(), save_bytes={"host": 1_500_000}), now=0.0
    )


def test_a_line_tells_all_that_moves() -> None:
    (line,) = shown([FollowUpdate(status(), [])], interval_s=1)

    assert line == "running  step 20 of 100  epoch 3 of 10  loss 0.5000  640 samples/s, 1:05 left"


def test_steps_are_told_every_few_seconds_and_states_and_evaluations_at_once() -> None:
    looks = [
        FollowUpdate(status("starting", 0), []),
        FollowUpdate(status("running", 0), []),
        FollowUpdate(status("running", 10), []),
        FollowUpdate(status("running", 20), [EVALUATION]),
        FollowUpdate(status("finished", 100), []),
    ]

    hasty = shown(looks, interval_s=0.01)
    leisurely = shown(looks, interval_s=LINE_INTERVAL_S)

    assert [line.split()[0] for line in hasty] == ["starting", "running", "evaluation", "finished"]
    assert hasty[2] == "evaluation  step 20  loss 0.2500  accuracy 0.9833"
    assert [line.split()[0] for line in leisurely].count("running") == 3


def test_a_slow_rank_is_told_once_in_lines_and_stays_in_the_live_view_and_in_the_status() -> None:
    alarm = SlowRankAlarm(
        attempt=0, rank=5, node="n7", lost_s=0.023, share=0.18, num_waiting=7, cause="data", at=1.0, since_step=20
    )
    slow = replace(status(), slow_ranks=[alarm])
    sentence = "rank 5 on n7 is slow: the other 7 ranks wait 23 ms (18%) of each step for it; cause: data"

    lines = shown([FollowUpdate(status(), []), *[FollowUpdate(slow, [])] * 3], interval_s=0.01)

    assert [line for line in lines if "slow" in line] == [f"warning: {sentence}"]
    assert sentence in as_text(slow, now=0.0)
    assert f"slow        {sentence}" in screen(slow, {}, "", now=0.0, word="digits")


def test_the_first_of_the_saves_that_fail_in_a_row_is_told_at_once() -> None:
    failing = replace(status(), save_error="rank 0: OSError: [Errno 28] No space left on device")

    looks = [status(), failing, failing, status(), failing]
    lines = shown([FollowUpdate(look, []) for look in looks], interval_s=0.01)

    assert [line.split(":")[0] for line in lines] == [
        "running  step 20 of 100  epoch 3 of 10  loss 0.5000  640 samples/s, 1",
        "warning",
        "warning",
    ]
    assert lines[1].startswith("warning: the newest save failed: rank 0: OSError: [Errno 28] No space")


def test_the_screen_shows_each_line_of_a_reason_that_has_several() -> None:
    lines = screen(
        replace(status("failed"), reason="it failed:\nrun  train.py\nstate  lost"), {}, "", now=0.0, word="digits"
    )

    assert {"it failed:", "run  train.py", "state  lost"} <= {line.removeprefix("reason      ") for line in lines}


def test_the_screen_shows_the_newest_numbers() -> None:
    text = "\n".join(screen(status(), {}, "", now=0.0, word="digits"))

    for told in ("digits  running", "20%", "20 of 100, epoch 3 of 10", "0.5", "640 samples/s, 1:05 left"):
        assert told in text
    assert "loss 0.2500  accuracy 0.9833" in text


def test_evaluations_stay_as_lines_above_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    looks = [FollowUpdate(status(), [EVALUATION]), FollowUpdate(status("finished"), [])]

    draw_screens(make_run(tmp_path), looks, out, is_kept=False)

    assert "evaluation  step 20  loss 0.2500  accuracy 0.9833\n" in out.getvalue()


def test_where_the_node_time_is_not_known_no_line_tells_of_it() -> None:
    spent = dict.fromkeys(KINDS, 0.0) | {"unknown": 0.5}
    unknown = Goodput(goodput=None, node_hours=spent, gpu_hours=0.5, steps_repeated=0, num_failures=0)

    assert goodput_line(unknown) == ""
    assert goodput_line(replace(unknown, node_hours=spent | {"queued": 0.1})) == "queued 0.1 h"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("finished", 0),
        ("running", 0),
        ("stopped", 99),
        ("refused", 2),
        ("failed", 1),
        ("cancelled", 1),
        ("interrupted", 1),
    ],
)
def test_the_exit_code_follows_from_the_state(state: State, code: int) -> None:
    assert exit_code(status(state)) == code


@pytest.mark.parametrize(
    ("state", "commands"),
    [
        ("running", ["status digits", "logs -f digits", "stop digits"]),
        ("finished", ["status digits", "logs digits", "checkpoints digits --digest", "export digits -o digits.st"]),
        ("stopped", ["submit run.yaml  # continues from step 20", "status digits"]),
        ("failed", ["submit run.yaml  # continues from step 20", "why digits"]),
    ],
)
def test_the_summary_ends_with_what_to_try_next(state: State, commands: list[str]) -> None:
    told = "\n".join(next_commands(status(state), word="digits", again="ddp-hpc submit run.yaml"))

    for command in commands:
        assert f"ddp-hpc {command.replace('.st', '.safetensors')}" in told


def test_without_a_checkpoint_nothing_is_said_of_exporting_one() -> None:
    told = next_commands(status("failed", last_checkpoint=None), word="digits", again="ddp-hpc submit run.yaml")

    assert told[0].endswith("# has no checkpoint, so it starts from the beginning")
    assert not any("export" in line for line in told)


def test_the_headline_has_the_newest_metrics() -> None:
    told = headline(status("stopped"))

    assert (
        told
        == "digits stopped after it wrote a checkpoint: step 20 of 100; training loss 0.5000; evaluation: loss 0.2500  accuracy 0.9833"
    )


def test_the_cause_names_the_first_to_fail_and_ends_its_log(tmp_path: Path) -> None:
    run: RunDir = make_run(tmp_path)
    failure = add_failure(run, rank=3)
    add_log(run, "".join(f"line {count}\n" for count in range(100)), rank=3)

    told = cause_text(run, failure).splitlines()

    assert told[0] == "rank 3 on node1 failed first, at step 7: ValueError: rank 3 is out of luck"
    assert told[1] == f"the last lines of {run.rank_log(0, 3)}:"
    assert told[-1] == "  line 99"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(None, "-"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3661, "1:01:01"), (float("inf"), "-")],
)
def test_durations_are_told_as_a_clock_would(seconds: float | None, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("value", "told"), [(None, "-"), (0.98333, "0.9833"), (1e-5, "1e-05"), (123456.0, "1.235e+05"), (0.0, "0.0000")]
)
def test_numbers_keep_the_digits_that_count(value: float | None, told: str) -> None:
    assert number(value) == told


@pytest.mark.parametrize(("num_bytes", "told"), [(None, "-"), (0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")])
def test_sizes_are_told_in_binary_units(num_bytes: int | None, told: str) -> None:
    assert size(num_bytes) == told


def test_columns_are_aligned_and_have_no_blanks_at_the_end() -> None:
    assert table(("A", "B"), [("long", "x"), ("", "yy")]) == "A     B\nlong  x\n      yy"
