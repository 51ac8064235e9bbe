"""Certify accuses no good script, and praises none of which it has seen nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_hpc.cli.verbs.certify import as_text
from ddp_hpc.prove.certify.certificate import Certificate
from ddp_hpc.prove.certify.evidence import Baseline, TrialEvidence
from ddp_hpc.prove.certify.faults import FAULTS
from ddp_hpc.prove.certify.output_lines import PrintedLine, parse
from ddp_hpc.prove.certify.records import RunRecord, Save
from ddp_hpc.prove.certify.saved_files import MOST_BYTES, Contents, is_saved_state, read
from ddp_hpc.prove.certify.verdicts import FaultResult, judge, needs_second_run
from tests.certify.made_records import faulty, lines_of, text, undisturbed, values

OTHER = {"step_10.pt": values({"model.weight": "tensor FloatStorage [1] other"})}
LOADED = {"reads": ("step_4.pt",)}
WEIGHTS = Contents(kind="values", values={"weight": "tensor FloatStorage [1] x"}, digest="w")


def found(fault: str, record: RunRecord, baseline: Baseline) -> FaultResult:
    return judge(fault, TrialEvidence(FAULTS[fault], record, baseline))


def names(finding: FaultResult) -> set[str]:
    return {one.name for one in finding.defects}


def printed(*texts: str) -> tuple[PrintedLine, ...]:
    found: list[PrintedLine] = []
    for number, one in enumerate(texts, start=1):
        epochs = [line.epoch for line in found if line.epoch is not None]
        found.append(parse(one, float(number), *epochs[-1:]))
    return tuple(found)


def baseline_of(
    lines: Sequence[PrintedLine], *, saves: Sequence[Save] | None = None, final: Mapping[str, Contents] | None = None
) -> Baseline:
    """Return an undisturbed run with other lines, or other saves."""
    base = undisturbed(final=final)
    attempt = replace(base.attempt, lines=tuple(lines), saves=base.attempt.saves if saves is None else tuple(saves))
    return replace(base, record=replace(base.record, attempts=(attempt,)))


# --- steps -------------------------------------------------------------------------------------------------------------


def test_steps_that_are_counted_from_the_resume_on_are_no_start_from_the_beginning() -> None:
    finding = found("kill-at-random", faulty(then=lines_of(1, 6), later=LOADED), undisturbed())

    assert (finding.verdict, names(finding)) == ("comes back", set())


def test_steps_that_are_counted_from_the_resume_on_end_no_random_script_too_early() -> None:
    baseline = undisturbed()
    second = replace(baseline.record, final={"step_10.pt": values({"model.weight": "tensor 3"})})
    record = faulty(then=lines_of(1, 4), final=OTHER, later=LOADED)

    finding = found("kill-at-random", record, replace(baseline, second=second))

    assert (finding.verdict, names(finding)) == ("comes back", set())


def test_a_script_that_prints_its_last_epoch_alone_and_saves_all_again_starts_over() -> None:
    """Lightning's progress bar, and Hydra's directory of the day, which holds nothing to resume from after a restart."""
    baseline = undisturbed()
    end = (parse("Epoch 7/7 16/16 0:00:00 24.56it/s"),)
    attempt = replace(baseline.attempt, lines=end)
    baseline = replace(baseline, record=replace(baseline.record, attempts=(attempt,)))
    record = faulty((), end, later={"saves": attempt.saves})

    finding = found("kill-after-save", record, baseline)

    assert (finding.verdict, finding.reason) == ("does not come back", "starts over")


def test_a_script_that_obeyed_a_stop_and_reads_an_older_state_resumes_from_the_wrong_file() -> None:
    saves = tuple(Save(path=f"step_{step}.pt", num_lines=step, at=float(step), in_place=True) for step in (2, 4, 5))
    record = faulty(
        then=lines_of(5, 10),
        attempt={"saves": saves, "ending": "stopped"},
        later={"reads": ("step_4.pt",)},
        present=("step_2.pt", "step_4.pt", "step_5.pt"),
        signal_action="caught",
    )

    assert "resumes from the wrong file" in names(found("term", record, undisturbed()))


def test_a_higher_number_that_is_printed_at_the_start_hides_no_early_end() -> None:
    def epochs(first: int, last: int) -> tuple[PrintedLine, ...]:
        return tuple(
            parse(f"epoch {epoch} loss {1 / (epoch + 1):.4f}", float(epoch)) for epoch in range(first, last + 1)
        )

    plan = (parse("no checkpoint: training from scratch to epoch 10"),)
    baseline = undisturbed()
    attempt = replace(baseline.attempt, lines=(*plan, *epochs(0, 9)))
    baseline = replace(baseline, record=replace(baseline.record, attempts=(attempt,)))

    finding = found("kill-at-random", faulty((*plan, *epochs(0, 3)), epochs(4, 5)), baseline)

    assert finding.verdict == "does not come back"


def test_a_step_done_again_is_one_also_where_its_line_has_no_loss_yet() -> None:
    again = (parse("step 5 loss n/a"), *lines_of(6, 10))

    assert found("kill-at-random", faulty(then=again), undisturbed()).verdict == "loses"


@pytest.mark.parametrize(
    ("file", "mine", "undisturbeds"),
    [
        (
            "sampler.json",
            text('{"rank": 0, "consumed": 35}', '{"rank": 1}'),
            text('{"rank": 0, "consumed": 40}', '{"rank": 1}'),
        ),
        ("more.pt", values({"config.resume_samples_seen": "35"}), values({"config.resume_samples_seen": "40"})),
    ],
)
def test_state_that_looks_like_records_or_arguments_is_compared(
    file: str, mine: Contents, undisturbeds: Contents
) -> None:
    whole = {"step_10.pt": values()}
    record = faulty(
        then=lines_of(6, 10),
        final={**whole, file: mine},
        attempt={"ending": "stopped"},
        signal_action="caught",
    )

    assert found("term", record, undisturbed(final={**whole, file: undisturbeds})).verdict == "differs"


def test_a_script_that_prints_at_other_steps_after_the_resume_has_not_ended_early() -> None:
    """As one that prints an episode's return does: its steps are those at which episodes end."""
    then = tuple(parse(f"global_step={step}, episodic_return=3.0") for step in (51, 74, 99))
    first = tuple(parse(f"global_step={step}, episodic_return=3.0") for step in range(10, 60, 10))
    whole = tuple(parse(f"global_step={step}, episodic_return=3.0") for step in range(10, 110, 10))
    baseline = undisturbed()
    record = replace(baseline.record, attempts=(replace(baseline.attempt, lines=whole),))

    finding = found("kill-after-save", faulty(first, then), replace(baseline, record=record))

    assert finding.verdict == "exact"


def test_a_script_that_reads_its_state_and_does_all_steps_again_starts_over() -> None:
    finding = found("kill-at-random", faulty(then=lines_of(1, 10), later=LOADED), undisturbed())

    assert (finding.verdict, finding.is_good) == ("does not come back", False)


# --- losses (5) --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True], ids=["printed", "logged"])
def test_a_running_mean_that_begins_anew_is_a_note_where_the_weights_are_the_same(log: bool) -> None:
    rows = [f"{step},{1 / step:.3f}" for step in range(1, 11)]
    smoothed = [*rows[:6], "7,0.111", *rows[7:]]
    ends = [{"step_10.pt": values(), **({"log.csv": text(*lines)} if log else {})} for lines in (rows, smoothed)]
    baseline = undisturbed(final=ends[0])
    record = faulty(then=lines_of(5, 10, loss=2.0), final=ends[1], later=LOADED)

    finding = found("kill-at-random", record, baseline)

    assert (finding.verdict, finding.is_good, names(finding)) == ("loses", True, set())
    assert any("probably a running mean that starts again" in note for note in finding.notes)
    assert not needs_second_run(TrialEvidence(FAULTS["kill-at-random"], record, baseline))


def test_another_result_beside_the_same_weights_is_a_difference() -> None:
    ends = [{"step_10.pt": values(), "result.json": text(f'{{"best accuracy": {best}}}')} for best in (0.9, 0.8)]

    assert found("kill-at-random", faulty(final=ends[1]), undisturbed(final=ends[0])).verdict == "differs"


def test_a_script_that_never_ends_the_same_gets_no_defect_by_its_bits() -> None:
    baseline = undisturbed()
    other = replace(baseline.record, final={"step_10.pt": values({"model.weight": "tensor 3"})})
    record = faulty(then=lines_of(5, 10, loss=2.0), final=OTHER, later=LOADED)

    finding = found("kill-at-random", record, replace(baseline, second=other))

    assert (finding.is_good, names(finding)) == (True, set())
    assert any("two undisturbed runs differ" in note for note in finding.notes)


def test_where_undisturbed_runs_differ_it_is_said_which_verdicts_are_not_possible_and_what_is_not_saved() -> None:
    """Such a script hides a missing optimizer."""
    saved = values(without="optimizer")
    baseline = undisturbed(saved)
    other = replace(baseline.record, final={"step_10.pt": values({"model.weight": "tensor 3"}, without="optimizer")})
    record = faulty(then=lines_of(5, 10, loss=2.0), final=OTHER, later=LOADED)

    finding = found("kill-at-random", record, replace(baseline, second=other))

    assert (finding.verdict, finding.at_most, names(finding)) == ("comes back", 2, set())
    assert finding.words == "comes back, and repeats at most 2 steps"
    (note,) = [note for note in finding.notes if "two undisturbed runs differ" in note]
    assert "`exact`, `loses at most N steps` and `differs` are not possible" in note
    assert "no state of an optimizer" in note
    assert "no state of a random generator" not in note


@pytest.mark.parametrize(
    "ends",
    [
        [values({"model.weight": f"tensor FloatStorage [1] {end}"}) for end in ("one", "two", "mine")],
        [Contents(kind="bytes", digest=end) for end in ("one", "two", "mine")],
        [Contents(kind="bytes", num_bytes=MOST_BYTES + 1)] * 3,
    ],
    ids=["the other tensors differ in any two runs", "the other file does", "the other file is too large to be read"],
)
def test_states_of_which_only_a_part_was_compared_are_not_said_to_be_the_same(ends: list[Contents]) -> None:
    """Of an unseeded script, the constants alone are the same in two runs."""
    constant = Contents(kind="bytes", digest="constant")
    one, two, mine = ({"step/__0_0.distcp": end, "step/__1_0.distcp": constant} for end in ends)
    saves = [Save(path=path, num_lines=4, at=4.0) for path in one]
    baseline = baseline_of(lines_of(1, 10), saves=saves, final=one)
    baseline = replace(baseline, second=replace(baseline.record, final=two))

    finding = found("kill-at-random", faulty(then=lines_of(5, 10, loss=2.0), final=mine, later=LOADED), baseline)

    assert finding.is_good
    said = " ".join(finding.notes)
    assert "same states" not in said
    assert "so the resume is right" not in said
    assert "is not known whether the resume is right" in said or "would not be found" in said


def test_an_unseeded_script_whose_states_cannot_be_read_is_not_called_exact() -> None:
    one, two, mine = ({"state.npz": Contents(kind="bytes", digest=end)} for end in ("one", "two", "mine"))
    baseline = baseline_of(lines_of(1, 10), saves=[Save(path="state.npz", num_lines=4, at=4.0)], final=one)
    record = faulty(then=lines_of(5, 10), final=mine, later=LOADED)

    finding = found("kill-at-random", record, replace(baseline, second=replace(baseline.record, final=two)))

    assert finding.verdict == "comes back"
    assert any("two undisturbed runs differ" in note for note in finding.notes)


# --- exports beside the state (6) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("export", ["best.pt", "ema.pt", "model_4.pt"])
def test_an_export_that_is_newer_than_the_state_is_not_the_file_to_resume_from(export: str) -> None:
    saves = [
        Save(path="last.pt", num_lines=2, at=2.0, contents=values()),
        Save(path=export, num_lines=4, at=4.0, contents=WEIGHTS),
    ]
    record = faulty(
        then=lines_of(3, 10),
        attempt={"saves": tuple(saves)},
        later={"reads": ("last.pt",)},
        present=("last.pt", export),
    )

    finding = found("kill-at-random", record, baseline_of(lines_of(1, 10), saves=saves))

    assert (finding.verdict, names(finding)) == ("loses", set())


def test_a_script_that_has_saved_only_an_export_does_not_start_over_wrongly() -> None:
    best = Save(path="best.pt", num_lines=2, at=2.0, contents=WEIGHTS)
    last = Save(path="last.pt", num_lines=8, at=8.0, contents=values())
    record = faulty(then=lines_of(1, 10), attempt={"saves": (best,)}, present=("best.pt",))

    finding = found("kill-at-random", record, baseline_of(lines_of(1, 10), saves=[best, last]))

    assert (finding.verdict, names(finding)) == ("loses", set())


def test_data_and_pretrained_weights_in_the_directory_are_no_states_of_the_script() -> None:
    record = faulty(
        then=lines_of(1, 10),
        attempt={"saves": ()},
        later={"reads": ("pretrained.pt",)},
        present=("data.npy", "pretrained.pt"),
    )

    assert found("kill-first-steps", record, undisturbed()).verdict == "loses"


def test_a_script_that_resumes_from_its_best_weights_resumes_from_the_wrong_file() -> None:
    best = Save(path="best.pt", num_lines=1, at=1.0, contents=WEIGHTS)
    last = Save(path="last.pt", num_lines=4, at=4.0, contents=values())
    record = faulty(
        then=lines_of(2, 10),
        attempt={"saves": (best, last)},
        later={"reads": ("best.pt",)},
        present=("best.pt", "last.pt"),
    )

    assert names(found("kill-at-random", record, baseline_of(lines_of(1, 10), saves=[best, last]))) == {
        "resumes from the wrong file"
    }


# --- scripts that never load (7) ---------------------------------------------------------------------------------------

QUIET = printed("loading data", "training", "done")
TUTORIAL = printed(
    *(
        line
        for epoch in (1, 2, 3)
        for line in (f"Epoch {epoch}", *(f"batch {batch} loss 0.{epoch}{batch}" for batch in (1, 2, 3)))
    )
)


@pytest.mark.parametrize(("lines", "cut"), [(QUIET, 2), (TUTORIAL, 7)], ids=["quiet", "steps begin anew in each epoch"])
def test_a_script_that_never_loads_starts_over_whatever_it_prints(lines: tuple[PrintedLine, ...], cut: int) -> None:
    baseline = baseline_of(lines)
    record = faulty(lines[:cut], lines, later={"saves": baseline.attempt.saves})

    finding = found("kill-at-random", record, baseline)

    assert (finding.verdict, names(finding)) == ("does not come back", {"starts over"})
    assert finding.read_back_text == "not step_4.pt"


def test_a_quiet_script_that_loads_comes_back_and_nothing_is_said_of_its_steps() -> None:
    baseline = baseline_of(QUIET)
    finding = found("kill-at-random", faulty(QUIET[:2], QUIET, later=LOADED), baseline)

    assert (finding.verdict, finding.is_good) == ("comes back", True)


def test_a_quiet_script_that_had_all_done_may_end_without_reading_its_state() -> None:
    finding = found("kill-at-random", faulty(QUIET, ()), baseline_of(QUIET))

    assert (finding.verdict, names(finding)) == ("comes back", set())


def test_steps_that_begin_anew_without_an_epoch_say_nothing_of_where_it_went_on() -> None:
    lines = printed(*(f"batch {batch} loss 0.{batch}" for _ in range(3) for batch in (1, 2, 3)))
    named = printed("epoch 2 batch 1 loss 0.1", "epoch 3 batch 1 loss 0.2")

    assert found("kill-at-random", faulty(lines[:4], named, later=LOADED), baseline_of(lines)).verdict == "comes back"


def test_an_epoch_above_its_steps_says_where_the_training_is() -> None:
    baseline = baseline_of(TUTORIAL)

    assert len({baseline.scale.position(line) for line in baseline.attempt.lines} - {None}) == 9
    finding = found("kill-at-random", faulty(TUTORIAL[:7], TUTORIAL[4:], later=LOADED), baseline)
    assert (finding.verdict, finding.at_most is not None and finding.at_most >= 2) == ("loses", True)


def test_a_script_that_saves_nothing_and_begins_again_is_not_good() -> None:
    baseline = baseline_of(lines_of(1, 10), saves=[])
    record = faulty(then=lines_of(1, 10), attempt={"saves": ()}, present=())

    finding = found("kill-at-random", record, baseline)

    assert (finding.verdict, finding.words, finding.is_good) == ("saves nothing", "saves nothing", False)


def test_a_script_that_goes_on_from_a_file_of_an_unknown_kind_is_not_said_to_save_nothing() -> None:
    baseline = baseline_of(lines_of(1, 10), saves=[])
    record = faulty(then=lines_of(5, 10), attempt={"saves": ()}, present=())

    assert found("kill-at-random", record, baseline).verdict == "loses"


@pytest.mark.parametrize(
    ("num_saved", "then", "final", "verdict"),
    [(4, lines_of(9, 10), None, "loses"), (5, (), None, "not tried"), (5, (), OTHER, "differs")],
)
def test_a_fault_after_which_nothing_is_left_to_train_proves_nothing_unless_the_result_is_another(
    num_saved: int, then: Sequence[PrintedLine], final: Mapping[str, Contents] | None, verdict: str
) -> None:
    saves = undisturbed().attempt.saves[:num_saved]
    record = faulty(lines_of(1, 10), then, attempt={"saves": saves}, at=11.0, final=final)

    finding = found("kill-after-save", record, undisturbed())

    assert finding.verdict == verdict
    assert finding.was_tried == (verdict != "not tried")


def test_parts_of_epochs_count_as_parts() -> None:
    """Transformers prints `'epoch': 0.25`, and saves each 50 steps."""

    def quarters(first: int, last: int) -> tuple[PrintedLine, ...]:
        return printed(*(f"{{'loss': {1 / part:.4f}, 'epoch': {part / 4}}}" for part in range(first, last + 1)))

    saves = [Save(path=f"checkpoint-{part}/optimizer.pt", num_lines=part, at=float(part)) for part in (5, 10, 15, 20)]
    baseline = baseline_of(quarters(1, 24), saves=saves)

    finding = found("kill-at-random", faulty(quarters(1, 8), quarters(6, 24), attempt={"saves": saves[:1]}), baseline)

    assert (baseline.scale.stride, finding.words) == (0.25, "loses at most 1.25 epochs")


UNTRIED = FaultResult(fault="kill-in-save", description="", verdict="not tried", words="not tried: no save")
EXACT = FaultResult(fault="term", description="", verdict="exact", words="exact")
HANGS = FaultResult(fault="undisturbed", description="", verdict="hangs", words="hangs")
MISSED = found("kill-after-save", replace(faulty(), injected=None, outcome="untouched"), undisturbed())
BAD = replace(EXACT, fault="usr2", verdict="differs")


@pytest.mark.parametrize(
    ("findings", "is_good", "said"),
    [
        (
            [EXACT, UNTRIED],
            True,
            "comes back from every fault that certify tried. Not tried, so nothing is known of them: kill-in-save.",
        ),
        (
            [EXACT, MISSED],
            False,
            "comes back from every fault that certify tried. Not tried, so nothing is known of them: kill-after-save. To try them, let the script train for longer after its last save, or save fewer files at a time.",
        ),
        ([BAD, MISSED], False, "does not resume correctly after usr2. The files of its runs: runs/c. Not tried"),
        (
            [MISSED],
            False,
            "could try no fault, so nothing is proven. Not tried, so nothing is known of them: kill-after-save. To",
        ),
        (
            [UNTRIED],
            False,
            "could try no fault, so nothing is proven. Not tried, so nothing is known of them: kill-in-save. Try other faults",
        ),
        ([HANGS], False, "The script hangs without a fault, so certify tried none. The files of its run: runs/c."),
    ],
)
def test_nothing_is_said_of_faults_that_were_not_tried_but_what_to_change(
    findings: list[FaultResult], is_good: bool, said: str
) -> None:
    certificate = Certificate(command=["python", "t.py"], seed=0, folder="runs/c", findings=findings)

    assert certificate.is_good == is_good
    assert said in as_text(certificate).splitlines()[-1]


def test_a_state_that_a_script_came_back_by_is_not_said_to_be_unread_where_no_read_was_seen() -> None:
    assert replace(EXACT, newest_state="state.npz").read_back_text == ""
    assert replace(BAD, newest_state="state.npz").read_back_text == "not state.npz"


def test_a_run_that_finished_before_its_fault_is_not_tried() -> None:
    assert (MISSED.verdict, MISSED.is_good, MISSED.was_tried) == ("untouched", False, False)
    assert MISSED.words == "not tried: the run finished before the moment of the fault"


@pytest.mark.parametrize("name", ["__0_0.distcp", "weights.h5", "state.msgpack"])
def test_files_of_other_libraries_are_saved_states(name: str) -> None:
    assert is_saved_state(Path(name))


@pytest.mark.parametrize("pattern", ["ck/*.dat", "./ck/*.dat", "ck/**/*.dat", "ck/", "**/step-*"])
def test_a_pattern_means_what_it_means_to_submit(pattern: str) -> None:
    found = {name for name in ("ck/step-1.dat", "ck/deep/step-1.dat", "out.dat") if is_saved_state(Path(name), pattern)}

    assert "ck/step-1.dat" in found
    assert "out.dat" not in found


def test_a_file_of_many_archives_is_compared_by_its_bytes_and_one_too_large_to_read_is_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "__0_0.distcp"
    with file.open("wb") as both:
        for number in range(2):
            torch.save(torch.full((4,), float(number)), both)
    assert read(file).kind == "bytes"
    with (tmp_path / "large.pt").open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    end = {"large.pt": read(tmp_path / "large.pt")}

    finding = found("kill-at-random", faulty(final=end), undisturbed(final=end))

    assert any("no file was compared" in note for note in finding.notes)


# --- logs (8) ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("train.log", "INFO step {} loss 0.5", set()),
        ("train.txt", "2026-01-01 12:00:{:02d} step {} loss 0.5", set()),
        ("metrics.csv", "{},0.5", {"metrics doubled"}),
        ("metrics.jsonl", '{{"step": {}, "loss": 0.5}}', {"metrics doubled"}),
    ],
)
def test_a_log_for_readers_may_have_a_step_twice_but_a_table_may_not(file: str, line: str, expected: set[str]) -> None:
    rows = [line.format(step, step) for step in range(1, 6)]
    ends = [{"step_10.pt": values(), file: text(*lines)} for lines in (rows, [*rows[:4], rows[3], rows[4]])]

    assert names(found("kill-at-random", faulty(final=ends[1]), undisturbed(final=ends[0]))) == expected


# --- files cut off (10) ------------------------------------------------------------------------------------------------


def test_an_export_that_was_cut_off_and_written_again_is_no_defect() -> None:
    saves = (*undisturbed().attempt.saves, Save(path="final.pt", num_lines=10, at=11.0, contents=WEIGHTS))
    end = {"step_10.pt": values(), "final.pt": WEIGHTS}
    record = faulty(
        lines_of(1, 10), (), final=end, later={"reads": ("step_10.pt",)}, half_written=("final.pt",), was_in_save=True
    )

    finding = found("kill-in-save", record, baseline_of(lines_of(1, 10), saves=saves, final=end))

    assert (finding.verdict, names(finding)) == ("exact", set())


@pytest.mark.parametrize(
    ("paths", "was_in_save", "is_named"),
    [
        (("step_2.pt", "step_4.pt"), False, True),
        (("step_2.pt", "step_4.pt"), True, False),  # a kill has cut off one of the kind, and the script came back
        (("step_4.pt", "step_4.pt"), True, True),  # but another file than the one that each save writes again
        (("step_2/__0_0.distcp", "step_4/__0_0.distcp"), False, False),  # `.metadata` commits it
    ],
)
def test_a_file_that_is_written_in_place_is_a_defect_though_no_kill_has_cut_it_off(
    paths: tuple[str, str], was_in_save: bool, is_named: bool
) -> None:
    saves = tuple(
        Save(path=name, num_lines=at, at=float(at), in_place=True) for at, name in zip((2, 4), paths, strict=True)
    )
    record = faulty(attempt={"saves": saves}, later={"reads": paths[1:]}, was_in_save=was_in_save)
    baseline = baseline_of(lines_of(1, 10), saves=saves, final={"step_10.pt": values()})

    finding = found("kill-in-save", record, baseline)

    assert finding.verdict == "loses"
    assert names(finding) == ({"half-written file used"} if is_named else set())
    assert all("no kill came while the file was open" in defect.evidence for defect in finding.defects)


def test_an_export_that_stays_cut_off_is_a_half_written_file_that_was_used() -> None:
    saves = (*undisturbed().attempt.saves, Save(path="final.pt", num_lines=10, at=11.0, contents=WEIGHTS))
    cut_off = Contents(kind="bytes", digest="half")
    record = faulty(
        lines_of(1, 10), (), final={"step_10.pt": values(), "final.pt": cut_off}, half_written=("final.pt",)
    )
    baseline = baseline_of(lines_of(1, 10), saves=saves, final={"step_10.pt": values(), "final.pt": WEIGHTS})

    finding = found("kill-in-save", record, baseline)

    assert (finding.verdict, names(finding)) == ("differs", {"half-written file used"})


@pytest.mark.parametrize(
    ("here", "other", "is_same"), [("resume: a.pt", "resume: None", True), ("rate: 1", "rate: 2", False)]
)
def test_a_text_with_the_arguments_of_the_resume_is_the_same(here: str, other: str, is_same: bool) -> None:
    end, mine = ({"params.txt": text("epochs: 3", line)} for line in (other, here))

    finding = found("kill-at-random", faulty(final=mine), undisturbed(final=end))

    assert (finding.verdict != "differs") is is_same


@pytest.mark.parametrize(
    ("cut_off", "whole"),
    [("last_checkpoint", "last_checkpoint"), ("checkpoint-4/trainer_state.json", "checkpoint-10/trainer_state.json")],
)
def test_a_text_without_which_a_state_is_not_found_is_half_written_where_a_kill_left_it_empty(
    cut_off: str, whole: str
) -> None:
    end = {"step_10.pt": values(), whole: text("step_10.pt"), "notes.txt": text()}
    failure = "torch.multiprocessing.spawn.ProcessRaisedException:\n\n-- Process 1 terminated:\nFileNotFoundError: ''"
    record = faulty(
        then=(),
        later={"ending": "failed", "failed_ranks": {0: failure}},
        half_written=(cut_off, "notes.txt"),
    )

    finding = found("kill-after-save", record, baseline_of(lines_of(1, 10), final=end))

    assert [one.evidence for one in finding.defects] == [
        (
            f"{cut_off} was cut off by a kill while the script wrote it under its final name, and the script did not resume: "
            "FileNotFoundError: ''"
        )
    ]


def test_a_script_that_reads_a_half_written_state_and_begins_again_in_silence_has_used_it() -> None:
    saves = (Save(path="last.pt", num_lines=4, at=4.0, contents=values(), in_place=True),)
    record = faulty(
        then=lines_of(1, 10),
        attempt={"saves": saves},
        later={"reads": ("last.pt",)},
        present=(),
        half_written=("last.pt",),
    )

    finding = found("kill-in-save", record, baseline_of(lines_of(1, 10), saves=saves))

    assert (finding.verdict, names(finding)) == ("does not come back", {"half-written file used"})


# --- names with times (12) ---------------------------------------------------------------------------------------------


def stamped(folder: str, weight: str) -> dict[str, Contents]:
    return {f"{folder}/last.pt": values({"model.weight": f"tensor FloatStorage [1] {weight}"})}


@pytest.mark.parametrize(
    "folders",
    [
        ("run-20260101-1200", "run-20260101-1201", "run-20260101-1205"),
        ("0b8c41d2-77aa", "9f0c11e7-12bd", "5e0a7b3c-99f1"),
    ],
)
def test_directories_with_a_time_or_an_id_in_their_names_are_compared(folders: tuple[str, str, str]) -> None:
    one, two, mine = folders
    baseline = undisturbed(final=stamped(one, "x"))
    baseline = replace(baseline, second=replace(baseline.record, final=stamped(two, "x")))

    same, other = (found("kill-at-random", faulty(final=stamped(mine, weight)), baseline) for weight in ("x", "y"))

    assert (same.verdict, same.is_good) == ("loses", True)
    assert (other.verdict, other.is_good) == ("differs", False)


def test_a_logger_that_makes_another_directory_for_each_attempt_is_compared_over_both() -> None:
    rows = [f"{step},{1 / step:.3f}" for step in range(1, 11)]
    whole = {"version_0/last.ckpt": values(), "version_0/metrics.csv": text(*rows)}
    split = {
        "version_0/metrics.csv": text(*rows[:4]),
        "version_1/last.ckpt": values(),
        "version_1/metrics.csv": text(*rows[4:]),
    }
    baseline = undisturbed(final=whole)

    same = found("kill-at-random", faulty(final=split), baseline)
    other = found("kill-at-random", faulty(final={**split, "version_1/last.ckpt": OTHER["step_10.pt"]}), baseline)

    assert (same.verdict, other.verdict) == ("loses", "differs")


def test_of_two_such_directories_the_one_that_was_written_last_is_compared() -> None:
    baseline = undisturbed(final=stamped("run-11", "x"))
    baseline = replace(baseline, second=replace(baseline.record, final=stamped("run-12", "x")))
    later = {"saves": (Save(path="run-13/last.pt", num_lines=5, at=9.0),)}
    record = faulty(later=later, final={**stamped("run-13", "x"), **stamped("run-14", "old")})

    assert found("kill-at-random", record, baseline).is_good


def test_it_is_said_where_no_file_could_be_compared() -> None:
    baseline = undisturbed(final=stamped("wise-otter", "x"))
    baseline = replace(baseline, second=replace(baseline.record, final=stamped("calm-fox", "x")))
    record = faulty(
        then=lines_of(6, 10), signal_action="caught", attempt={"ending": "stopped"}, final=stamped("red-kite", "y")
    )

    finding = found("term", record, baseline)

    assert finding.verdict == "comes back"
    assert "no file was compared" in finding.notes[0]
