"""Notes: a number, why it matters, and the key to set."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.run.run_dir.machine_use import MachineUse
from ddp_hpc.run.run_dir.timeline import Mark, SlowRankAlarm, read_alarms, record_alarms
from ddp_hpc.watch.attempt_times import KINDS
from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.notes import MOST_NOTES, NOTHING, notes_of
from ddp_hpc.watch.report.reading import read_run
from tests.report.made import BEGIN, Plan, large_run, line_of, made_run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    run = made_run(tmp_path_factory.mktemp("runs") / "run", [Plan(first=0, reached=300, ending="finished")])
    return replace(read_run(run, now=BEGIN), saves=None)


def changed(
    plain: RunData,
    *,
    spent: dict[str, float] | None = None,
    waits: float = 0.0,
    use: MachineUse | None = None,
    **more: Any,
) -> RunData:
    """Return the run with other numbers. `spent`: kind -> hours of one; `waits`: the share of each step for which it waits for samples."""
    hours = dict.fromkeys(KINDS, 0.0) | (spent or {})
    hours["training"] = 1.0 - sum(hours.values())
    goodput = replace(plain.goodput, node_hours=hours, steps_repeated=50)
    phases = {"data": waits, "forward": 1.0 - waits}
    mark = Mark(kind="phases", attempt=0, at=BEGIN, step=300, phases=phases, num_steps=300)
    machines = {} if use is None else {0: [use]}
    return replace(plain, goodput=goodput, marks=[mark], machines=machines, **more)


def use_of(seconds: float = 600.0, num_cpus: float | None = 8.0, **more: Any) -> MachineUse:
    return MachineUse(node_rank=0, node="n", at=BEGIN + 900, seconds=seconds, num_cpus=num_cpus, **more)


def test_a_run_of_which_no_number_stands_out_has_one_note_that_says_so(plain: RunData) -> None:
    assert notes_of(changed(plain)) == [NOTHING]


@pytest.mark.parametrize(
    ("use", "waits", "beginning", "key"),
    [
        (use_of(gpu_busy=0.35, cpu_busy=0.97), 0.4, "The GPUs are idle for much of the time: they are busy 35% of the time, while the 8 CPUs of each node are 97% busy, and rank zero waits", "a larger resources.cpus_per_worker"),
        (use_of(gpu_busy=0.35, cpu_busy=0.2), 0.4, "The GPUs are idle for much of the time: they are busy 35% of the time, and rank zero waits", "a larger data.num_workers, or stage.*"),
        (use_of(gpu_busy=0.35, cpu_busy=0.97), 0.0, "The GPUs are idle for much of the time: they are busy 35% of the time, while the 8 CPUs of each node are 97% busy.", "a larger resources.cpus_per_worker"),
        (None, 0.4, "Rank zero waits for samples in 40% of its steps", "data.num_workers, a faster disk, or stage.*"),
        (use_of(gpu_busy=0.01), 0.0, "The GPUs are busy 1.0% of the time", "resources.gpus_per_node=0, or change the script so that it uses its GPU"),
        (use_of(memory_gib=95.0, memory_limit_gib=100.0), 0.0, "A node used 95% of the memory", "a larger resources.mem_gb, or a smaller data.num_workers"),
    ],
    ids=["CPUs are the reason", "loader processes are", "a script", "no GPUs", "unused GPUs", "memory"],
)  # fmt: skip
def test_of_the_machines_one_note_is_made_with_one_advice(
    use: MachineUse | None, waits: float, beginning: str, key: str, plain: RunData
) -> None:
    [(text, to_set)] = notes_of(changed(plain, use=use, waits=waits))

    assert text.startswith(beginning)
    assert to_set == key


@pytest.mark.parametrize(
    ("use", "waits"),
    [
        (use_of(30.0, gpu_busy=0.01, cpu_busy=0.2), 0.15),
        (use_of(30.0, gpu_busy=0.01, cpu_busy=0.99), 0.0),
        (use_of(num_cpus=None, gpu_busy=0.35, cpu_busy=0.99), 0.0),
        (use_of(cpu_busy=1.0), 0.1),
        (use_of(gpu_busy=0.9, cpu_busy=1.0), 0.1),
    ],
)
def test_machines_that_were_measured_for_a_moment_or_in_part_and_gpus_that_are_busy_make_no_note(
    use: MachineUse, waits: float, plain: RunData
) -> None:
    """A script's first half minute is imports."""
    assert notes_of(changed(plain, use=use, waits=waits)) == [NOTHING]


def test_the_most_important_notes_come_first_and_are_at_most_three(plain: RunData) -> None:
    series = replace(plain.series, num_not_finite=3, ends_not_finite=True)
    spent = {"saving": 0.3, "lost": 0.1, "starting": 0.2}
    found = notes_of(changed(plain, spent=spent, waits=0.4, series=series, times=[*plain.times, *plain.times]))

    assert len(found) == MOST_NOTES
    assert found[0][0].startswith("The loss was NaN or infinite in 3 log lines, the newest among them.")
    assert found[1][0].startswith("Training waits for saves 30% of the time.")
    assert found[2][0].startswith("Rank zero waits for samples in 40% of its steps")


@pytest.mark.parametrize(
    ("spent", "key"),
    [
        ({"saving": 0.3, "lost": 0.2}, "checkpoint.every_steps=auto, or a larger number"),
        ({"saving": 0.12, "lost": 0.2}, "checkpoint.every_steps=auto, or a smaller number"),
        ({"queued": 0.6}, "a smaller resources.time_limit_min"),
    ],
)
def test_saves_are_never_too_many_and_too_few_at_once(spent: dict[str, float], key: str, plain: RunData) -> None:
    assert [to_set for _, to_set in notes_of(changed(plain, spent=spent))] == [key]


def test_a_rank_that_was_named_as_slow_counts_by_the_mean_of_the_whole_run(tmp_path: Path) -> None:
    run = large_run(tmp_path / "run")
    alarm = SlowRankAlarm(
        attempt=0, rank=5, node="node00", lost_s=0.05, share=0.25, num_waiting=63, cause="", at=1.0, since_step=1
    )
    record_alarms(run, [alarm])

    read = read_run(run, now=BEGIN)  # a quarter of a step, in 500 of 5,000 steps
    always = replace(read, looks=[replace(one, lost_s={5: 0.05}, step_s=0.25) for one in read.looks])

    assert not any("slurm.exclude" in key for _, key in notes_of(read))
    assert "wait 20% of each step for rank 5" in " ".join(text for text, _ in notes_of(always))


@pytest.mark.parametrize(("last", "said"), [(None, "do not recover"), (0.5, "finite again later")])
def test_all_losses_that_are_not_finite_are_counted_and_weights_given_up_only_if_the_last_one_is_not(
    last: float | None, said: str, tmp_path: Path
) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=50)])
    odd = [line_of(kind="train", step=step, loss=None, at=1.0) for step in range(1, 1001)]
    run.metrics.write_text("".join([*odd, line_of(kind="train", step=1001, loss=last, at=1.0)]))

    text = notes_of(read_run(run, now=BEGIN))[0][0]

    assert f"in {1001 if last is None else 1000} log lines" in text
    assert said in text


def test_updates_that_were_skipped_are_counted_before_lines_are_thinned_out(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=5000)])
    lines = [line_of(kind="train", step=step, loss=0.5, skipped_updates=step % 2, at=1.0) for step in range(1, 4001)]
    run.metrics.write_text("".join([line_of(kind="train", step=0, loss=0.5, skipped_updates=None, at=1.0), *lines]))

    assert notes_of(read_run(run, now=BEGIN))[0][0].startswith("40% of the updates were skipped")


def test_an_odd_line_of_a_slow_rank_is_skipped(tmp_path: Path) -> None:
    run = large_run(tmp_path / "run")
    alarm = SlowRankAlarm(
        attempt=0, rank=5, node="n", lost_s=0.05, share=0.2, num_waiting=63, cause="", at=1.0, since_step=1
    )
    run.slow_ranks.write_text("".join(line_of(**{**asdict(alarm), key: "y"}) for key in ("share", "at", "rank")))
    record_alarms(run, [alarm])

    assert read_alarms(run) == [alarm]
