"""Evidence is turned into verdicts, and each rule names its defect and no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ddp_hpc.prove.certify.evidence import Baseline, TrialEvidence
from ddp_hpc.prove.certify.faults import FAULTS
from ddp_hpc.prove.certify.output_lines import PrintedLine, parse
from ddp_hpc.prove.certify.records import RunRecord, Save
from ddp_hpc.prove.certify.rules import RULES
from ddp_hpc.prove.certify.saved_files import Contents
from ddp_hpc.prove.certify.verdicts import FaultResult, judge, needs_second_run
from tests.certify.made_records import faulty, lines_of, text, undisturbed, values

OTHER = {"step_10.pt": values({"model.weight": "tensor FloatStorage [1] other"})}


def found(fault: str, record: RunRecord, baseline: Baseline) -> FaultResult:
    return judge(fault, TrialEvidence(FAULTS[fault], record, baseline))


def test_the_same_bits_without_a_repeated_step_are_exact() -> None:
    finding = found(
        "term", faulty(then=lines_of(6, 10), signal_action="caught", attempt={"ending": "stopped"}), undisturbed()
    )

    assert (finding.verdict, finding.is_good, finding.defects, finding.notes) == ("exact", True, [], [])


def test_repeated_steps_with_the_same_end_are_lost_ones_and_at_most_what_lies_between_two_saves() -> None:
    finding = found("kill-at-random", faulty(), undisturbed())

    assert (finding.verdict, finding.words, finding.is_good) == ("loses", "loses at most 2 steps", True)


def test_a_line_that_names_the_step_that_was_loaded_is_no_step_done_again() -> None:
    then = (parse("resumed from step_5.pt at step 5"), *lines_of(6, 10))

    finding = found("term", faulty(then=then, signal_action="caught", attempt={"ending": "stopped"}), undisturbed())

    assert finding.verdict == "exact"


@pytest.mark.parametrize(("num_printed", "is_blamed"), [(4, False), (5, True)])
def test_a_state_counts_as_the_newest_once_the_script_has_gone_on_after_it(num_printed: int, is_blamed: bool) -> None:
    """A kill may come before the file that names it: Megatron's `latest_checkpointed_iteration.txt`, DeepSpeed's `latest`."""
    saves = tuple(Save(path=f"step_{step}.pt", num_lines=step, at=float(step), in_place=True) for step in (2, 4))
    first, then = lines_of(1, num_printed), lines_of(3, 10)
    record = faulty(first, then, attempt={"saves": saves}, later={"reads": ("step_2.pt",)})

    names = [one.name for one in found("kill-after-save", record, undisturbed()).defects]

    assert names == (["resumes from the wrong file"] if is_blamed else [])


def test_a_script_without_a_handler_is_not_at_fault_but_the_cost_is_noted() -> None:
    finding = found("usr2", faulty(signal_action="default"), undisturbed())

    assert finding.is_good
    assert "no handler for SIGUSR2" in finding.notes[0]


def test_another_result_without_a_known_reason_says_what_differs_first() -> None:
    record = faulty(final=OTHER, later={"reads": ("step_4.pt",)})

    finding = found("kill-at-random", record, undisturbed())

    assert (finding.verdict, finding.is_good, finding.defects) == ("differs", False, [])
    first = "the tensor model.weight in step_10.pt has other values"
    assert (finding.first_difference, finding.reason) == (
        first,
        f"certify does not know why; what differs first: {first}",
    )
    assert (finding.newest_state, finding.read_back, finding.read_back_text) == (
        "step_4.pt",
        ["step_4.pt"],
        "step_4.pt",
    )


def test_a_script_that_always_ends_otherwise_is_not_blamed_for_it() -> None:
    baseline = undisturbed()
    baseline = replace(
        baseline, second=replace(baseline.record, final={"step_10.pt": values({"model.weight": "tensor 3"})})
    )

    finding = found("kill-at-random", faulty(final=OTHER), baseline)

    assert finding.verdict == "comes back"
    assert "two undisturbed runs differ" in finding.notes[0]


def test_a_time_of_day_in_a_result_is_no_difference_once_two_undisturbed_runs_differ_in_it() -> None:
    baseline = undisturbed(values({"saved_at": "1"}))
    record = faulty(final={"step_10.pt": values({"saved_at": "2"})})

    assert needs_second_run(TrialEvidence(FAULTS["kill-at-random"], record, baseline))
    again = replace(baseline.record, final={"step_10.pt": values({"saved_at": "3"})})
    assert found("kill-at-random", record, replace(baseline, second=again)).verdict == "loses"


def test_another_file_of_a_stop_and_a_note_in_a_log_are_no_differences() -> None:
    log = ["step,loss", "1,0.5", "2,0.4"]
    baseline = undisturbed(final={"step_10.pt": values(), "log.csv": text(*log)})
    record = faulty(
        final={"step_10.pt": values(), "step_5.pt": values(), "log.csv": text(*log[:2], "resumed at 1", log[2])}
    )

    assert found("kill-at-random", record, baseline).is_good


def test_a_save_in_the_middle_of_an_epoch_under_the_name_of_its_end_is_no_difference() -> None:
    middle = values({"lr_scheduler.last_epoch": "5"})
    baseline = undisturbed(final={"step_4.pt": values(), "step_10.pt": values()})
    saves = (Save(path="step_4.pt", num_lines=4, at=4.0), Save(path="step_4.pt", num_lines=5, at=6.0))
    record = faulty(
        then=lines_of(6, 10),
        signal_action="caught",
        attempt={"ending": "stopped", "saves": saves},
        final={"step_4.pt": middle, "step_10.pt": values()},
    )

    assert found("term", record, baseline).verdict == "exact"


LATER_DIFFER = (*lines_of(5, 5), *lines_of(6, 10, loss=2.0))
ALL_DIFFER = lines_of(5, 10, loss=2.0)
LOST = {"failed_ranks": {0: "Connection closed by peer"}, "lost_ranks": frozenset({0})}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "loader workers die first": (
        "preempt",
        {
            "signal_action": "caught",
            "attempt": {
                "failed_ranks": {0: "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. "}
            },
        },
        {},
    ),
    "ranks do not agree on the step of the stop": ("term", {"signal_action": "caught", "attempt": LOST}, {}),
    "half-written file used": (
        "kill-in-save",
        {
            "half_written": ("step_4.pt",),
            "then": (),
            "later": {
                "ending": "failed",
                "failed_ranks": {0: "RuntimeError: PytorchStreamReader failed reading zip archive"},
            },
        },
        {},
    ),
    "half-written directory used": (
        "kill-in-save",
        {
            "present": ("out/checkpoint-4/model.safetensors", "out/checkpoint-8/model.safetensors"),
            "half_written": ("out/checkpoint-8/step_8.pt",),
            "then": (),
            "later": {
                "ending": "failed",
                "failed_ranks": {0: "FileNotFoundError: [Errno 2] ...: '/w/out/checkpoint-8/trainer_state.json'"},
            },
        },
        {
            "final": {
                "out/checkpoint-10/trainer_state.json": text("{}"),
                "out/checkpoint-10/model.safetensors": values(),
            }
        },
    ),
    "optimizer not restored": (
        "kill-at-random",
        {"then": LATER_DIFFER, "final": OTHER},
        {"saved": values(without="optimizer")},
    ),
    "scheduler not restored": (
        "kill-at-random",
        {
            "then": LATER_DIFFER,
            "final": {"step_10.pt": values({"lr_scheduler.last_epoch": "11", "model.weight": "other"})},
        },
        {},
    ),
    "ignores the stop signal": ("term", {"signal_action": "ignored", "first": lines_of(1, 10), "at_line": 5}, {}),
    "resumes from the wrong file": (
        "kill-after-save",
        {"then": lines_of(3, 10), "later": {"reads": ("step_2.pt",)}},
        {},
    ),
    "metrics doubled": (
        "kill-at-random",
        {"final": {"step_10.pt": values(), "log.csv": text("1,0.5", "2,0.4", "2,0.4")}},
        {"final": {"step_10.pt": values(), "log.csv": text("1,0.5", "2,0.4")}},
    ),
    "goes on at the wrong step": (
        "term",
        {
            "signal_action": "caught",
            "final": {"step_10.pt": values({"step": "11", "lr_scheduler.last_epoch": "11"})},
        },
        {"saved": values({"step": "10"})},
    ),
    "starts over": ("kill-at-random", {"then": lines_of(1, 10)}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_defect_is_named_by_its_evidence_and_no_other_is(name: str) -> None:
    fault, seen, base = CASES[name]

    finding = found(fault, faulty(**seen), undisturbed(base.get("saved"), final=base.get("final")))

    assert {defect.name for defect in finding.defects} == {name}, finding
    assert not finding.is_good
    assert all(defect.evidence and defect.mend and defect.what for defect in finding.defects)


@pytest.mark.parametrize(
    ("missing", "name"),
    [(".metadata", "half-written directory used"), ("__1_0.distcp", "half-written file used")],
)
def test_a_file_that_a_kill_kept_from_being_written_is_looked_for_in_the_whole_exception(
    missing: str, name: str
) -> None:
    """torch.distributed.checkpoint names it below the exceptions of all ranks; what was cut off is there, and is not missing."""
    saved = [f"out/step-{step}/__{rank}_0.distcp" for step in (4, 8) for rank in (0, 1)]
    end = {
        f"out/step-12/{one}": Contents(kind="bytes", digest=one)
        for one in ("__0_0.distcp", "__1_0.distcp", ".metadata")
    }
    failure = f"CheckpointException: ranks:dict_keys([0, 1])\nTraceback (most recent call last): (RANK 0)\nOSError: 'out/step-8/{missing}'"
    record = faulty(
        then=(),
        attempt={"saves": [Save(path=path, num_lines=4, at=4.0) for path in saved[:3]]},
        later={"ending": "failed", "failed_ranks": {0: failure}},
        present=saved[:2],
        half_written=saved[3:] if missing in saved[3] else (),
    )
    saves = [Save(path=path, num_lines=12, at=12.0) for path in end if path.endswith(".distcp")]
    baseline = undisturbed(final=end)
    attempt = replace(baseline.attempt, saves=tuple(saves))

    finding = found("kill-in-save", record, replace(baseline, record=replace(baseline.record, attempts=(attempt,))))

    assert [one.name for one in finding.defects] == [name]
    assert missing in finding.defects[0].evidence


def test_an_exception_without_a_message_is_named_without_a_colon() -> None:
    record = faulty(then=(), later={"ending": "failed", "failed_ranks": {0: "EOFError: "}}, half_written=("step_4.pt",))

    (defect,) = found("kill-in-save", record, undisturbed()).defects

    assert defect.evidence.endswith(", and the script did not resume: EOFError")


def test_a_counter_that_ends_elsewhere_is_the_reason_of_a_learning_rate_that_does() -> None:
    """As in fairseq's checkpoints, whose schedule is a function of the number of updates."""
    counted, rate = "optimizer_history.0.num_updates", "last_optimizer_state.param_groups.0.lr"
    here, whole = values({counted: "22", rate: "0.0151"}), values({counted: "20", rate: "0.0158"})

    finding = found(
        "kill-at-random",
        faulty(then=LATER_DIFFER, final={"step_10.pt": here}),
        undisturbed(final={"step_10.pt": whole}),
    )

    assert {defect.name for defect in finding.defects} == {"goes on at the wrong step"}


def test_every_defect_of_the_table_has_a_case() -> None:
    assert set(RULES) == set(CASES)


@pytest.mark.parametrize(("then", "which"), [(ALL_DIFFER, "the first loss"), (LATER_DIFFER, "a later loss")])
def test_of_losses_that_differ_without_a_known_reason_it_is_said_which_and_what_the_saved_state_lacks(
    then: Sequence[PrintedLine], which: str
) -> None:
    whole = found("kill-at-random", faulty(then=then, final=OTHER), undisturbed())
    without = found("kill-at-random", faulty(then=then, final=OTHER), undisturbed(values(without="rng")))

    assert (whole.verdict, whole.defects, without.defects) == ("differs", [], [])
    assert f"what differs first: {which} after the resume" in whole.reason
    assert "no state of" not in whole.reason
    assert without.reason == f"{whole.reason}; its saved state has no state of a random generator"


def test_the_step_of_an_optimizers_moments_is_no_counter_of_the_script() -> None:
    path = "optimizer.state.0.step"
    ends = [values({path: f"tensor FloatStorage [] {count}", "model.weight": f"tensor {count}"}) for count in "ab"]
    baseline = undisturbed(values(without="optimizer"), final={"step_10.pt": ends[0]})

    finding = found("kill-at-random", faulty(then=LATER_DIFFER, final={"step_10.pt": ends[1]}), baseline)

    assert finding.reason == "optimizer not restored"


def test_a_state_that_lies_in_several_files_is_seen_as_one() -> None:
    parts = {name: values(without=name) for name in ("optimizer", "rng")}
    saves = tuple(Save(path=f"{name}.pt", num_lines=2, at=2.0, contents=one) for name, one in parts.items())
    attempt = replace(undisturbed().attempt, saves=saves)
    saved = replace(undisturbed(), record=replace(undisturbed().record, attempts=(attempt,))).saved_contents

    assert saved is not None
    assert (saved.has_optimizer, saved.has_rng) == (True, True)


def test_a_number_in_an_older_state_changes_no_result_where_the_newest_has_it_right() -> None:
    final = {"step_8.pt": values({"scheduler.best": "10.7"}), "step_10.pt": values({"scheduler.best": "9.1"})}
    mine = {**final, "step_8.pt": values({"scheduler.best": "None"})}

    finding = found("kill-at-random", faulty(final=mine), undisturbed(final=final))

    assert finding.verdict == "loses"
    assert "the saved states are the same, but scheduler.best in step_8.pt is 'None'" in "".join(finding.notes)


def test_a_run_that_only_began_anew_is_told_from_one_that_resumed() -> None:
    begun, resumed = (
        found("kill-at-random", faulty(lines_of(1, 5), lines_of(6, 10), present=present), undisturbed())
        for present in ((), ("step_4.pt",))
    )

    assert (begun.verdict, resumed.verdict) == ("exact", "exact")
    assert begun.notes == ["the fault came before the first save, so no resume was tested"]
    assert resumed.notes == []


def test_an_older_state_of_another_step_is_no_fault_of_the_scheduler() -> None:
    final = {"step_10.pt": values(), "best.pt": values({"lr_scheduler.last_epoch": "4"})}
    best = values({"lr_scheduler.last_epoch": "6", "model.weight": "tensor FloatStorage [1] z"})

    finding = found("kill-at-random", faulty(final={**final, "best.pt": best}), undisturbed(final=final))

    assert (finding.verdict, finding.defects) == ("differs", [])
    assert "best.pt" in finding.first_difference


def test_a_scheduler_that_is_not_saved_is_shown_by_the_learning_rate_at_the_end() -> None:
    record = faulty(final={"step_10.pt": values({"optimizer.param_groups.0.lr": "0.2"}, without="lr_")})

    (defect,) = found("kill-at-random", record, undisturbed(values(without="lr_"))).defects

    assert defect.name == "scheduler not restored"
    assert defect.evidence == (
        "its saved states have no `last_epoch` of a scheduler; optimizer.param_groups.0.lr in step_10.pt is 0.2 at the end, "
        "and 0.1 in the undisturbed run"
    )


def test_a_script_that_ends_too_early_does_not_come_back() -> None:
    finding = found("kill-at-random", faulty(then=(), final={}), undisturbed())

    assert (finding.verdict, finding.defects) == ("does not come back", [])
    assert finding.reason == "the script ended with exit code 0 at step 5, but the undisturbed run goes on after that"


def test_a_file_in_place_that_no_kill_has_cut_off_is_not_why_a_result_differs() -> None:
    saves = (Save(path="step_4.pt", num_lines=4, at=4.0, in_place=True),)
    record = faulty(then=ALL_DIFFER, final=OTHER, attempt={"saves": saves}, later={"reads": ("step_4.pt",)})

    finding = found("kill-in-save", record, undisturbed())

    assert finding.verdict == "differs"
    assert finding.reason.startswith(
        "certify does not know why; what differs first: the first loss after the resume, at step 5"
    )
    assert finding.reason.endswith("; not the reason, but to be mended, too: half-written file used")


@pytest.mark.parametrize(("file", "is_told"), [("train.log", False), ("metrics.csv", True)])
def test_lines_of_a_log_that_differ_are_told_only_where_they_are_a_table(file: str, is_told: bool) -> None:
    here, whole = ({"step_10.pt": values(), file: text(f"{hour}:00 step 1", "step 2")} for hour in (1, 2))

    finding = found("kill-at-random", faulty(final=here), undisturbed(final=whole))

    assert finding.verdict == "loses"
    assert any(f"in {file} is '1:00 step 1'" in note for note in finding.notes) is is_told


def test_a_log_with_times_of_day_is_not_compared() -> None:
    def final(hour: int, *more: str) -> dict[str, Contents]:
        return {"step_10.pt": values(), "train.log": text(*(f"{hour}:0{second} step" for second in range(3)), *more)}

    baseline = undisturbed(final=final(1))
    baseline = replace(baseline, second=replace(baseline.record, final=final(2)))

    assert found("kill-at-random", faulty(final=final(3, "resumed")), baseline).verdict == "loses"


def test_records_that_a_logger_begins_anew_in_each_attempt_do_not_make_another_result() -> None:
    def final(folder: str, first: int) -> dict[str, Contents]:
        records = text(*(f'{{"loss": 1.0, "step": {step}}}' for step in range(first, 11)))
        return {"step_10.pt": values(), f"work/{folder}/vis_data/scalars.json": records}

    record = faulty(final={**final("20261128_02", 5), **final("20261128_01", 6)})

    assert found("kill-at-random", record, undisturbed(final=final("20261128_00", 1))).verdict == "loses"


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ("args.__state__.resume", "loses"),
        ("args.__state__.start_epoch", "loses"),
        ("start_epoch", "differs"),
        ("args.lr", "differs"),
    ],
)
def test_a_saved_argument_for_the_resume_is_no_other_result(path: str, verdict: str) -> None:
    whole, resumed = ({"step_10.pt": values({path: text})} for text in ("''", "'out/checkpoint.pth'"))

    assert found("kill-at-random", faulty(final=resumed), undisturbed(final=whole)).verdict == verdict


def test_a_state_in_json_that_differs_is_another_result() -> None:
    def final(step: int) -> dict[str, Contents]:
        return {"step_10.pt": values(), "trainer_state.json": text("{", f'  "seen": {step},', '  "best": 1', "}")}

    assert found("kill-at-random", faulty(final=final(9)), undisturbed(final=final(10))).verdict == "differs"


def test_a_hang_shows_the_rank_that_hangs() -> None:
    record = faulty(then=None, attempt={"ending": "hung"}, signal_action="default")
    record = replace(
        record, stacks={0: '  File "train.py", line 12 in wait_for_data\n  File "train.py", line 40 in main'}
    )

    finding = found("kill-at-random", record, undisturbed())

    assert (finding.verdict, finding.is_good) == ("hangs", False)
    assert "rank 0: train.py, line 12 in wait_for_data < train.py, line 40 in main" in finding.reason
