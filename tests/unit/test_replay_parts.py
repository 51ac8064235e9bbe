"""What is decided before and after steps are computed again."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, NotReplayedError, UnreadableError
from ddp_hpc.base.processes import take_lock
from ddp_hpc.base.record import read_record, write_record
from ddp_hpc.cli import main
from ddp_hpc.cli.formatting import as_json, spell_nonfinite_floats
from ddp_hpc.cli.replay_text import audit_text, replay_text
from ddp_hpc.cli.verbs.replay import raise_not_replayed
from ddp_hpc.launch.submission import local
from ddp_hpc.prove.replay import auditing
from ddp_hpc.prove.replay.auditing import (
    AuditReport,
    Segment,
    audit,
    choose_segments,
    judge_segment,
    segments_of,
    verdict_of,
)
from ddp_hpc.prove.replay.bisecting import narrow_range, read_known_range
from ddp_hpc.prove.replay.history import History, environ_of, numeric_variables, read_history
from ddp_hpc.prove.replay.private_run import WantedSteps, _run_supervised, compute_again, num_gpus_here, replay_spec
from ddp_hpc.prove.replay.record import StepRecords, compare
from ddp_hpc.prove.replay.replaying import ReplayReport, check_range
from ddp_hpc.run.run_dir.ledger import Ending, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import AttemptInputs, ReplayRequest, read_inputs, write_inputs
from ddp_hpc.run.run_dir.software_versions import environment_here, write_environment
from ddp_hpc.run.spec import NotifySpec, ResourcesSpec, RunSpec, TrainSpec
from ddp_hpc.train.data.sample_order import Position
from ddp_hpc.train.engine.replay_trace import set_up_replay
from tests.made_run import add_attempt, add_checkpoint, add_metrics, make_run


def inputs(attempt: int, world_size: int = 1, **more: Any) -> AttemptInputs:
    return AttemptInputs(attempt=attempt, world_size=world_size, config=more.pop("config", "name: digits\n"), **more)


def history(*begun: tuple[int, AttemptInputs], committed: tuple[int, ...] = (), last_step: int = 100) -> History:
    return History(run=RunDir(Path("runs/digits")), begun=begun, committed=committed, last_step=last_step)


def test_in_json_a_number_that_is_not_finite_is_a_text_that_says_which() -> None:
    difference = {"recorded": math.nan, "computed": 1.0, "error": (math.inf, -math.inf, 0.5)}

    told = json.loads(as_json(spell_nonfinite_floats(difference)))

    assert told == {"recorded": "nan", "computed": 1.0, "error": ["inf", "-inf", 0.5]}


@pytest.mark.parametrize(
    "error", [UnreadableError("away"), CorruptCheckpointError("damaged"), OSError(5, "I/O error", "p")]
)
def test_what_could_not_be_compared_has_another_exit_code_than_what_differs(error: Exception) -> None:
    with pytest.raises(NotReplayedError) as raised, raise_not_replayed():
        raise error

    assert raised.value.exit_code == 2


def test_a_failed_audit_says_what_may_have_changed_and_keeps_each_segment_on_one_line() -> None:
    parted = Segment(start=0, end=10, verdict="different")
    failed = Segment(start=10, end=20, verdict="failed", problem="The data is gone.\nThe log is there.")
    told = AuditReport(
        run="r", verdict="FAIL", segments=[parted, failed], num_segments=2, num_steps=0, last_step=20, seed=1
    )

    lines = audit_text(told).splitlines()

    assert len(lines) == 5
    assert "The data is gone. The log is there." in lines[2]
    assert "code, data or environment has changed" in lines[4]


def test_attempts_that_computed_alike_are_one_stretch() -> None:
    told = history((0, inputs(0)), (20, inputs(1)), (40, inputs(2)))

    assert [(start, end) for start, end, _ in told.ranges_computed_alike(10, 50)] == [(10, 50)]


def test_another_world_or_configuration_begins_another_stretch() -> None:
    told = history((0, inputs(0, 2)), (20, inputs(1, 4)), (40, inputs(2, 4, config="name: digits\nseed: 1\n")))

    parts = told.ranges_computed_alike(0, 50)

    assert [(start, end, one.attempt) for start, end, one in parts] == [(0, 20, 0), (20, 40, 1), (40, 50, 2)]


def test_another_number_of_threads_begins_another_stretch(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_metrics(run, [{"kind": "train", "step": 60, "loss": 1.0}])
    for attempt, threads in enumerate(("2", "2", "1")):
        record_start(run, attempt=attempt, job_id="", first_step=20 * attempt)
        write_inputs(run, inputs(attempt))
        write_environment(run, attempt, environment_here({"OMP_NUM_THREADS": threads, "NCCL_DEBUG": str(attempt)}))

    parts = read_history(run).ranges_computed_alike(0, 60)

    assert [(start, end, one.attempt) for start, end, one in parts] == [(0, 40, 0), (40, 60, 2)]


def test_variables_that_decide_how_numbers_are_added_are_those_of_the_run_and_no_others(tmp_path: Path) -> None:
    run, here = make_run(tmp_path), {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HOME": "/home/a"}
    write_environment(run, 0, environment_here({"OMP_NUM_THREADS": "2"}))

    assert environ_of(numeric_variables(run, inputs(0)), here) == {"OMP_NUM_THREADS": "2", "HOME": "/home/a"}
    assert environ_of(numeric_variables(run, inputs(1)), here) == here


def test_of_attempts_that_took_the_same_step_the_newest_counts() -> None:
    told = history((0, inputs(0, 1)), (30, inputs(1, 2)), (20, inputs(2, 4)))

    assert [told.inputs_at(step).world_size for step in (20, 21, 31)] == [1, 4, 4]


def test_a_run_without_a_record_of_its_inputs_is_told_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending=Ending.FINISHED)
    add_checkpoint(run, 20)
    add_metrics(run, [{"kind": "train", "step": 30, "loss": 1.0}])

    told = read_history(run)

    assert (told.last_step, told.committed, told.inputs_at(5).world_size) == (30, [20], 1)
    assert "newest configuration is used" in told.notes[0]


def test_what_an_attempt_computed_with_is_read_back_and_nobody_else_reads_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    written = inputs(3, 8, import_paths=("/code",), work_dir="/home/a", code={"/code/recipe.py": "00ff"})

    write_inputs(run, written)

    assert read_inputs(run, 3) == written
    assert read_inputs(run, 2) is None
    assert run.inputs(3).stat().st_mode & 0o077 == 0


def test_an_ordinary_run_asks_for_no_replay_and_a_replay_is_read_back(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert read_record(run.replay_request, ReplayRequest) is None
    asked = ReplayRequest(end_step=9, state_steps=(4, 8), digest_steps=(2,), trace_from=5)

    write_record(run.replay_request, asked)

    assert read_record(run.replay_request, ReplayRequest) == asked
    assert [asked.is_traced(step) for step in (4, 5, 9)] == [False, True, True]


@pytest.mark.parametrize(
    ("start", "end", "words"), [(5, 5, "no step"), (7, 3, "steps 1 to 100"), (0, 101, "newest step on record")]
)
def test_steps_that_the_run_has_not_taken_are_refused(start: int, end: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_range(history((0, inputs(0))), start, end)


def test_a_replay_evaluates_saves_notifies_and_restarts_nothing(tmp_path: Path) -> None:
    spec = RunSpec(
        name="digits",
        resources=ResourcesSpec(nodes=4, workers_per_node=2, time_limit_min=10),
        notify=NotifySpec(command=("mail",)),
        train=TrainSpec(max_steps=100, init_from="other"),
    )
    (tmp_path / "other").mkdir()

    private = replay_spec(spec, RunDir(tmp_path / "private" / "digits"), runs_dir=tmp_path, world=8, gpus=0)

    assert private.path == tmp_path / "private" / "digits"
    assert (private.notify.command, private.checkpoint.every_steps, private.restart.in_place) == ((), None, False)
    assert (private.resources.nodes, private.resources.world_size) == (1, 8)
    assert private.train == TrainSpec(max_steps=100, init_from=str(tmp_path / "other"))
    assert private.eval.every_epochs > 10**9


def test_a_checkpoint_that_goes_away_before_the_replay_begins_ends_it_instead_of_beginning_at_step_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr(History, "sound_checkpoint", lambda _, step: (step, []))  # it is there a moment before
    told = History(run=run, begun=[(0, inputs(0))], committed=(20,), last_step=30)
    wanted = WantedSteps(history=told, start=20, request=ReplayRequest(end_step=30))
    with pytest.raises(UnreadableError, match=r"checkpoint of step 20 of .* was deleted meanwhile"):
        compute_again(wanted, {}, folder=tmp_path / "private", say=print)

    write_record(run.replay_request, ReplayRequest(start_step=20, end_step=30))
    from_the_beginning = cast(
        "Any",
        SimpleNamespace(
            run=run,
            state=SimpleNamespace(position=Position()),
            group=SimpleNamespace(rank_info=SimpleNamespace(rank=0)),
        ),
    )
    set_up_replay(from_the_beginning)
    from_the_beginning.state.position = Position(step=1)
    with pytest.raises(ConfigError, match=r"begins after step 20, .* that of step 0"):
        from_the_beginning.after_step()
    from_the_beginning.after_step.__self__.close()


def test_where_the_machine_lists_no_gpus_those_count_that_the_variable_names(tmp_path: Path) -> None:
    assert num_gpus_here({}, proc=tmp_path) == 0
    assert num_gpus_here({"CUDA_VISIBLE_DEVICES": "0,1"}, proc=tmp_path) == 2


def test_the_gpus_of_this_process_are_those_that_it_may_use(tmp_path: Path) -> None:
    for card in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "driver/nvidia/gpus" / card).mkdir(parents=True)

    assert num_gpus_here({}, proc=tmp_path) == 2
    assert num_gpus_here({"CUDA_VISIBLE_DEVICES": "1"}, proc=tmp_path) == 1
    assert num_gpus_here({"CUDA_VISIBLE_DEVICES": ""}, proc=tmp_path) == 0
    assert num_gpus_here({"CUDA_VISIBLE_DEVICES": "-1"}, proc=tmp_path) == 0
    assert num_gpus_here({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, proc=tmp_path) == 1


def losses(**by_step: float | None) -> StepRecords:
    return StepRecords(losses={int(step[1:]): {"loss": loss} for step, loss in by_step.items()})


def test_the_first_difference_counts_and_only_steps_that_both_know() -> None:
    found = compare(losses(s5=1.0, s10=2.0, s15=3.0), losses(s10=2.5, s15=3.5, s20=1.0))

    assert found.first is not None
    assert (found.num_losses, found.first.step, found.first.recorded, found.first.computed) == (2, 10, 2.0, 2.5)


def test_a_loss_that_is_not_a_number_in_both_is_the_same() -> None:
    assert compare(losses(s5=math.nan), losses(s5=math.nan)).first is None
    assert compare(losses(s5=math.nan), losses(s5=1.0)).first is not None


@pytest.mark.parametrize(("recorded", "computed"), [(None, 1.0), (1.0, None), (None, 0.0)])
def test_a_loss_that_is_finite_in_one_only_differs_by_more_than_any_tolerance(
    recorded: float | None, computed: float | None
) -> None:
    found = compare(losses(s5=recorded), losses(s5=computed), tolerance=1e9)

    assert found.first is not None
    assert found.largest_error == math.inf
    assert compare(losses(s5=None), losses(s5=None)).first is None


def test_with_a_tolerance_losses_may_differ_a_little_and_states_are_not_compared() -> None:
    one, other = losses(s5=1.0), losses(s5=1.0005)
    one.states, other.states = {5: {"model/w": "a"}}, {5: {"model/w": "b"}}

    assert compare(one, other, tolerance=1e-3).first is None
    assert compare(one, other, tolerance=1e-4).first is not None
    assert compare(one, one, tolerance=1e-3).checkpoints == []


def test_a_checkpoint_that_differs_names_its_tensors_and_numbers() -> None:
    one = StepRecords(states={5: {"model/w": "a", "model/b": "a", "loss_steps": 1}})
    other = StepRecords(states={5: {"model/w": "b", "model/b": "a", "loss_steps": 2}})

    first = compare(one, other).first

    assert first is not None
    assert first.names == ("model/w", "loss_steps")


def test_nothing_in_common_is_not_the_same() -> None:
    assert compare(losses(s5=1.0), losses(s6=1.0)).num_losses == 0


def test_equal_states_count_only_before_the_first_difference() -> None:
    assert narrow_range([10, 20, 60], [40, 50]) == (20, 40)


def test_losses_are_compared_where_they_are_means_over_the_same_steps(tmp_path: Path) -> None:
    logged = {"one": {4: 1.0, 8: 2.0, 12: 3.0, 18: 5.0}, "other": {4: 1.0, 8: 9.0, 18: 6.0}}
    for name, losses in logged.items():
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        add_metrics(run, ({"kind": "train", "step": step, "loss": loss} for step, loss in losses.items()))
    one, other = (replace(history(), run=RunDir(tmp_path / name)) for name in logged)

    assert read_known_range(one, other, 20)[1] == 8
    assert read_known_range(one, other, 7)[1] is None
    add_metrics(one.run, [{"kind": "train", "step": 8, "loss": 9.0}])
    assert read_known_range(one, other, 20)[1] is None  # step 18: a mean over six steps, and over ten


def test_without_an_equal_state_not_even_the_beginning_is_known() -> None:
    assert narrow_range([], []) == (None, None)


def test_segments_lie_between_the_states_on_record_and_a_seed_chooses_the_same_ones() -> None:
    segments = segments_of(history((0, inputs(0)), committed=(40, 60, 80)), digests=[10, 90, 100])

    assert segments == [(0, 40), (40, 60), (60, 80), (80, 100)]
    assert choose_segments(segments, 2, seed=5) == choose_segments(segments, 2, seed=5)
    assert choose_segments(segments, 9, seed=5) == segments


def test_steps_after_the_newest_state_on_record_are_in_no_segment() -> None:
    assert segments_of(history((0, inputs(0)), committed=(40,)), digests=[10]) == [(0, 40)]
    assert segments_of(history((0, inputs(0)))) == []


def segment(verdict: Any) -> Segment:
    return Segment(start=0, end=10, verdict=verdict)


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        ((), "UNKNOWN"),
        (("the same", "the same"), "PASS"),
        (("the same", "losses only"), "UNKNOWN"),
        (("the same", "unreadable"), "UNKNOWN"),
        (("failed", "not compared"), "UNKNOWN"),
        (("the same", "not compared", "different"), "FAIL"),
        (("the same", "failed", "damaged"), "FAIL"),
    ],
)
def test_an_audit_passes_only_if_the_state_at_the_end_of_every_segment_is_the_same(
    verdicts: tuple[str, ...], together: str
) -> None:
    assert verdict_of([segment(one) for one in verdicts]) == together


def report(**fields: Any) -> ReplayReport:
    known: dict[str, Any] = {"verdict": "the same", "tolerance": 0.0, "same_state_at": 30, "first": None}
    counts = {"num_losses": 9, "num_steps_with_samples": 0, "num_digests": 0, "checkpoints": [], "largest_error": 0.0}
    steps = {"run": "runs/digits", "from_step": 20, "to_step": 30, "started_at": 20, "world_sizes": [1]}
    return ReplayReport(**{**steps, **counts, **known, **fields})


@pytest.mark.parametrize("fields", [{"tolerance": 1e-3, "same_state_at": None}, {"same_state_at": None}])
def test_a_segment_of_which_only_losses_were_compared_does_not_count_as_the_same(fields: dict[str, Any]) -> None:
    assert judge_segment(report(**fields)).verdict == "losses only"
    assert judge_segment(report()).verdict == "the same"


def test_only_what_a_digest_or_a_checkpoint_shows_is_called_the_same_to_the_bit() -> None:
    assert replay_text(report()).startswith("the same to the bit: steps 21 to 30")
    assert replay_text(report(same_state_at=24)).startswith(
        "the same to the bit up to step 24, and after it the losses"
    )
    assert replay_text(report(same_state_at=None)).startswith("the losses are the same; no state was compared")


def test_a_state_counts_as_the_same_only_before_the_first_difference() -> None:
    one = StepRecords(losses={15: {"loss": 1.0}}, digests={10: "a", 20: "b"})
    other = StepRecords(losses={15: {"loss": 2.0}}, digests={10: "a", 20: "b"})

    assert compare(one, other).same_state_at == 10
    assert compare(one, one).same_state_at == 20
    assert compare(losses(s5=1.0), losses(s5=1.0)).same_state_at is None


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("audit", ["--segments", "0"]),
        ("audit", ["--segments", "-1"]),
        ("replay", ["--world", "0"]),
        ("replay", ["--world", "-1"]),
        ("replay", ["--tolerance", "nan"]),
        ("replay", ["--tolerance", "inf"]),
        ("replay", ["--tolerance", "-1"]),
    ],
)
def test_numbers_with_which_nothing_would_be_compared_are_refused(
    verb: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb, "digits", *words])

    assert f"{words[1]} must be" in capsys.readouterr().err


def test_an_audit_goes_on_where_a_checkpoint_was_pruned_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(wanted: WantedSteps, *_: Any, **__: Any) -> Any:
        if (end := wanted.request.end_step) == 40:
            raise UnreadableError("the checkpoint has gone")
        return report(from_step=wanted.start, to_step=end, same_state_at=end)

    monkeypatch.setattr(auditing, "replay", gone)
    told = History(run=RunDir(tmp_path), begun=[(0, inputs(0))], committed=(40, 60), last_step=60)

    found = audit(told, {}, number=9, seed=1)

    assert [one.verdict for one in found.segments] == ["unreadable", "the same"]
    assert (found.verdict, found.num_steps) == ("UNKNOWN", 20)


def test_a_replay_whose_records_cannot_be_read_or_written_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads to itself stands for a disk that is broken: each use of the ledger is an error."""
    sleep = "import time; time.sleep(600)"
    guardian = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid, flush=True); {sleep}"
    )
    monkeypatch.setattr(local, "guardian_argv", lambda _run: [sys.executable, "-c", guardian])
    run = make_run(tmp_path)
    run.console.parent.mkdir(exist_ok=True)
    run.attempts.symlink_to(run.attempts)
    lock_fd = take_lock(run.lock)
    assert lock_fd is not None
    ended = threading.Event()

    def end_it_once_it_runs() -> None:
        _await(lambda: run.console.exists() and run.console.read_text())
        ended.set()

    stops = threading.Thread(target=end_it_once_it_runs)
    stops.start()

    with pytest.raises(KeyboardInterrupt):
        _run_supervised(run, [], os.environ, None, ended)

    stops.join()
    os.close(lock_fd)
    supervisor = int(run.console.read_text())
    _await(lambda: not psutil.pid_exists(supervisor) or psutil.Process(supervisor).status() == psutil.STATUS_ZOMBIE)


def _await(condition: Callable[[], object], *, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
