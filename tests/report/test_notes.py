"""Notes: a number, why it matters, and the key to set."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.timeline import Alarm, read_alarms, record
from ddp_hpc.watch.report.notes import MOST_NOTES, NOTHING, RULES, NoteFacts, NoteRule, facts_of, notes_of
from ddp_hpc.watch.report.reading import read_run
from tests.report.made import BEGIN, Plan, large_run, line_of, made_run


def test_a_run_of_which_no_number_stands_out_has_one_note_that_says_so() -> None:
    assert notes_of(NoteFacts(lost_share=0.0)) == [NOTHING]


def test_numbers_that_are_not_known_make_no_note() -> None:
    assert notes_of(NoteFacts()) == [NOTHING]


@pytest.mark.parametrize(
    ("facts", "beginning", "key"),
    [
        (NoteFacts(measured_s=600, gpu_busy=0.35, cpu_busy=0.97, cpus_of_node=8, data_share=0.4), "The GPUs are idle for much of the time: they are busy 35% of the time, while the 8 CPUs of each node are 97% busy, and rank zero waits", "a larger resources.cpus_per_worker"),
        (NoteFacts(measured_s=600, gpu_busy=0.35, cpu_busy=0.2, data_share=0.4, data_workers=1), "The GPUs are idle for much of the time: they are busy 35% of the time, and rank zero waits", "a larger data.num_workers, or stage.*"),
        (NoteFacts(measured_s=600, gpu_busy=0.35, cpu_busy=0.97, cpus_of_node=8), "The GPUs are idle for much of the time: they are busy 35% of the time, while the 8 CPUs of each node are 97% busy.", "a larger resources.cpus_per_worker"),
        (NoteFacts(data_share=0.4, data_workers=0), "Rank zero waits for samples in 40% of its steps", "data.num_workers, a faster disk, or stage.*"),
    ],
    ids=["CPUs are the reason", "loader processes are", "a script", "no GPUs"],
)  # fmt: skip
def test_of_what_is_known_of_waiting_for_data_one_note_is_made_with_one_advice(
    facts: NoteFacts, beginning: str, key: str
) -> None:
    [note] = notes_of(facts)

    assert note.text.startswith(beginning)
    assert note.key == key


@pytest.mark.parametrize(
    "facts",
    [
        NoteFacts(measured_s=30, gpu_busy=0.01, cpu_busy=0.2, data_share=0.15),
        NoteFacts(measured_s=30, gpu_busy=0.01, cpu_busy=0.99, cpus_of_node=8),
        NoteFacts(measured_s=600, gpu_busy=0.35, cpu_busy=0.99),
    ],
)
def test_gpus_that_were_measured_for_a_moment_and_cpus_that_nobody_counted_make_no_note(facts: NoteFacts) -> None:
    """A script's first half minute is imports."""
    assert notes_of(facts) == [NOTHING]


@pytest.mark.parametrize(
    "facts", [NoteFacts(cpu_busy=1.0, data_share=0.1), NoteFacts(gpu_busy=0.9, cpu_busy=1.0, data_share=0.1)]
)
def test_gpus_that_are_busy_or_not_known_do_not_wait(facts: NoteFacts) -> None:
    assert notes_of(facts) == [NOTHING]


def test_the_most_important_notes_come_first_and_are_at_most_three() -> None:
    facts = NoteFacts(
        not_finite=3,
        is_not_finite_at_end=True,
        slow_rank=5,
        slow_rank_share=0.2,
        saving_share=0.3,
        data_share=0.4,
        lost_share=0.5,
    )

    found = notes_of(facts)

    assert len(found) == MOST_NOTES
    assert found[0].text.startswith("The loss was NaN or infinite in 3 log lines")
    assert "wait 20% of each step for rank 5" in found[1].text


@pytest.mark.parametrize(("saving", "lost", "word"), [(0.3, 0.2, "larger"), (0.12, 0.2, "smaller")])
def test_saves_are_never_too_many_and_too_few_at_once(saving: float, lost: float, word: str) -> None:
    facts = NoteFacts(saving_share=saving, lost_share=lost, steps_repeated=50)

    assert [one.key for one in notes_of(facts)] == [f"a {word} checkpoint.every_steps"]


def test_the_note_on_checkpoints_names_both_costs_and_the_key(tmp_path: Path) -> None:
    plans = [
        Plan(first=0, reached=900),
        Plan(first=500, reached=1400),
        Plan(first=1000, reached=1500, ending="finished"),
    ]
    run = made_run(tmp_path / "run", plans, every=500)

    facts = facts_of(read_run(run, now=BEGIN))

    (note,) = [one for one in notes_of(facts) if one.key.startswith("checkpoint.every_steps=")]
    assert note.key == f"checkpoint.every_steps={facts.best_every_steps:.0f}"
    assert facts.best_every_steps < 500
    assert facts.best_checkpoint_cost < facts.checkpoint_cost


def test_a_rank_that_was_named_as_slow_counts_by_the_mean_of_the_whole_run(tmp_path: Path) -> None:
    run = large_run(tmp_path / "run")
    alarm = Alarm(
        attempt=0, rank=5, node="node00", lost_s=0.05, share=0.25, num_waiting=63, cause="", at=1.0, since_step=1
    )
    record(run, [alarm])

    facts = facts_of(read_run(run, now=BEGIN))

    assert facts.slow_rank == 5
    assert facts.slow_rank_share == pytest.approx(0.0246, abs=0.005)  # a quarter of a step, in 500 of 5,000 steps
    assert not any("slurm.exclude" in note.key for note in notes_of(facts))


@pytest.mark.parametrize(("last", "said"), [(None, "do not recover"), (0.5, "finite again later")])
def test_all_losses_that_are_not_finite_are_counted_and_weights_given_up_only_if_the_last_one_is_not(
    last: float | None, said: str, tmp_path: Path
) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=50)])
    odd = [line_of(kind="train", step=step, loss=None, at=1.0) for step in range(1, 1001)]
    run.metrics.write_text("".join([*odd, line_of(kind="train", step=1001, loss=last, at=1.0)]))

    facts = facts_of(read_run(run, now=BEGIN))

    assert facts.not_finite == (1001 if last is None else 1000)
    assert said in notes_of(facts)[0].text


def test_updates_that_were_skipped_are_counted_before_lines_are_thinned_out(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=5000)])
    lines = [line_of(kind="train", step=step, loss=0.5, skipped_updates=step % 2, at=1.0) for step in range(1, 4001)]
    run.metrics.write_text("".join([line_of(kind="train", step=0, loss=0.5, skipped_updates=None, at=1.0), *lines]))

    facts = facts_of(read_run(run, now=BEGIN))

    assert facts.skipped_share == pytest.approx(2000 / 5000)
    assert notes_of(facts)[0].text.startswith("40% of the updates were skipped")


def test_an_odd_line_of_a_slow_rank_is_skipped(tmp_path: Path) -> None:
    run = large_run(tmp_path / "run")
    alarm = Alarm(attempt=0, rank=5, node="n", lost_s=0.05, share=0.2, num_waiting=63, cause="", at=1.0, since_step=1)
    run.slow_ranks.write_text("".join(line_of(**{**asdict(alarm), key: "y"}) for key in ("share", "at", "rank")))
    record(run, [alarm])

    assert read_alarms(run) == [alarm]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.text)
def test_the_text_and_the_key_of_each_rule_can_be_filled_in(rule: NoteRule) -> None:
    values = asdict(NoteFacts())

    assert rule.when(NoteFacts()) is False
    assert "{" not in rule.text.format(**values) + rule.key.format(**values)
