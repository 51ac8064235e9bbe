"""The parts of certify: it reads lines, saved files and sources, sees files being written, and chooses the moments of faults."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from ddp_hpc.cli.verbs.certify import as_text
from ddp_hpc.prove.certify.certificate import Certificate
from ddp_hpc.prove.certify.faults import FAULTS, trigger_of
from ddp_hpc.prove.certify.file_events import FileEvents, Kind
from ddp_hpc.prove.certify.live_files import LiveFiles, LiveOutput
from ddp_hpc.prove.certify.live_processes import end_all_below
from ddp_hpc.prove.certify.output_lines import ProgressScale, losses, parse, positions, scale_from_lines
from ddp_hpc.prove.certify.outside import texts_in_source
from ddp_hpc.prove.certify.records import Save
from ddp_hpc.prove.certify.saved_files import is_half_written, read, read_in_copy
from ddp_hpc.prove.certify.verdicts import FaultResult
from ddp_hpc.run.spec.script import parse_program
from tests.certify.made_records import lines_of, undisturbed
from tests.certify.planted import PLANTED

# --- lines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "epoch", "step", "loss"),
    [
        ("step 12 loss 0.5", None, 12, 0.5),
        ("[RANK 0] Epoch 3 | Batchsize: 32 | Steps: 8", 3, None, None),
        ('{"iter": 40, "loss": 1.5e-3, "lr": 0.1}', None, 40, 1.5e-3),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.294", 1, None, 2.294),
        ("Epoch [2/10], Step [100/600], Loss: 0.1234", 2, 100, 0.1234),
        ("{'loss': nan, 'epoch': 0.5}", 0.5, None, float("nan")),
        ("{'loss': '1.386', 'learning_rate': '4.844e-05', 'epoch': '0.125'}", 0.125, None, 1.386),
        (" 12%|#2        | 12/100 [00:01<00:09,  9.51it/s, loss=0.25]", None, None, 0.25),
        ("12it [00:01,  9.51it/s]", None, None, None),
        ("\x1b[31mstep: 10  \x1b[32mloss:  0.7386  \x1b[38;5;208mgrad_norm:  0.5\x1b[39m", None, 10, 0.7386),
        ('{"epoch": 2, "update": 1.667, "loss": "3.802", "num_updates": "10"}', 2, 10, 3.802),
        ("mmengine - INFO - Epoch(train)  [1][ 5/10]  lr: 1.7e-02  loss: 1.6235", 1, None, 1.6235),
        ("mmengine - INFO - Iter(train) [  100/40000]  lr: 1.7e-02  loss: 1.6235", None, 100, 1.6235),
        ("Train: 3 [  50/1251 (  4%)]  Loss: 6.91 (6.92)", 3, None, 6.91),
        ("step 2.5 of 10 is half done", None, None, None),
        ("Namespace(epochs=6, start_epoch=0, warmup_epoch=1, max_iter=90)", None, None, None),
        ("{'max_epoch': 5, 'save_interval_updates': 15, 'max-step': 7}", None, None, None),
        ("\x1b[2KEpoch 1/3 loss 0.5", 1, None, 0.5),
        ("total_step: 5 loss: 0.5", None, 5, 0.5),
        ("step: 5.0 loss: 0.5", None, 5, 0.5),
        ("time/epoch(s): 12.31, step(ms): 120", None, None, None),
        ("Iter(val) [ 50/100] time: 0.1", None, None, None),
        ("global_step=7 train_loss=inf", None, 7, float("inf")),
        ("2026-01-01 12:00:00 INFO nothing to see", None, None, None),
        ('fit(ckpt_path="last") -> version_0/epoch=3-step=40.ckpt', None, None, None),
        ("Epoch 4: 10/10 saved to 'out/step=50-loss=0.25.pt'", 4, None, None),
        ('{"epoch":4,"file":"epoch=3.pth","step":50,"loss":0.5}', 4, 50, 0.5),
    ],
)
def test_a_line_says_where_the_training_is(
    text: str, epoch: float | None, step: int | None, loss: float | None
) -> None:
    line = parse(text)

    assert (line.epoch, line.step) == (epoch, step)
    assert line.loss == (None if loss is None else repr(loss))


def test_a_line_that_tells_from_which_epoch_the_script_goes_on_is_printed_before_it_has_resumed(tmp_path: Path) -> None:
    """Lightning prints it, and reads the file then."""
    output = LiveOutput(tmp_path / "rank-0.log", 0.0)
    output.log.write_text("Restoring states from the checkpoint of epoch 3\n")

    assert (output.read(), output.has_position()) == (True, False)
    output.log.write_text("Restoring states from the checkpoint of epoch 3\nEpoch 4: loss 0.5\n")
    assert (output.read(), output.has_position()) == (True, True)


def test_a_file_may_stand_beside_the_word_that_makes_a_line_a_mention() -> None:
    assert parse("resume=out/last.ckpt step 50").is_mention


def test_steps_that_begin_anew_in_each_epoch_are_told_apart_by_it() -> None:
    lines = [parse(f"epoch {epoch} step {step} loss {epoch + step}") for epoch in range(2) for step in (0, 10, 20)]

    assert scale_from_lines(lines) == ProgressScale("step", has_epochs=True, stride=10)
    assert positions(lines, scale_from_lines(lines))[2:4] == [(0, 20), (1, 0)]
    assert losses(lines, scale_from_lines(lines))[1, 10] == "11.0"


def test_a_loss_that_is_not_a_number_is_the_same_as_one_that_is_not_either() -> None:
    one, other = ([parse(f"step {step} loss nan") for step in (1, 2)] for _ in range(2))

    assert losses(one, scale_from_lines(one)) == losses(other, scale_from_lines(other))


def test_the_loss_of_an_evaluation_counts_only_where_the_training_prints_none() -> None:
    lines = [parse(text) for text in ("Eval Epoch: 1 loss 0.7", "Train Epoch: 1 loss 0.3", "Eval Epoch: 2 loss 0.6")]

    assert losses(lines, scale_from_lines(lines)) == {(1,): "0.3", (2,): "0.6"}


@pytest.mark.parametrize("setting", ["accum_iter=1", "print_iter: 4"])
def test_a_setting_that_is_named_as_a_step_hides_no_epochs(setting: str) -> None:
    lines = [parse(setting), *(parse(f"Epoch: [{epoch}]  [ {batch}/12]") for epoch in range(4) for batch in (0, 5, 10))]

    assert scale_from_lines(lines) == ProgressScale("epoch")
    assert positions(lines, scale_from_lines(lines)) == [(0,), (1,), (2,), (3,)]


# --- saved files -------------------------------------------------------------------------------------------------------


def test_two_files_with_the_same_tensors_hold_the_same_though_their_bytes_differ(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "opt": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "at": Path("x"),
    }
    torch.save(state, tmp_path / "one.pt")
    torch.save(state, tmp_path / "another_name.pt")
    state["opt"]["param_groups"][0]["lr"] = 0.5
    torch.save(state, tmp_path / "other.pt")

    one, another, other = (read(tmp_path / f"{name}.pt") for name in ("one", "another_name", "other"))

    assert one.digest != another.digest
    assert one.values == another.values
    assert {path for path in one.values if one.values[path] != other.values[path]} == {"opt.param_groups.0.lr"}
    assert (one.has_optimizer, one.has_rng, one.has_lr_scheduler) == (True, True, False)


def test_an_optimizer_that_is_saved_whole_keeps_the_state_of_each_parameter_apart(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]  # equal bytes: each is a key of the state
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def saved(*gradients: float) -> dict[str, str]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), gradient)
        torch.save({"opt": optimizer}, tmp_path / "whole.pt")
        return dict(read(tmp_path / "whole.pt").values)

    one, other = saved(1.0, 2.0), saved(1.0, 3.0)
    with torch.no_grad():
        parameters[0].add_(1.0)
    moved = saved(1.0, 2.0)

    assert one.keys() == other.keys() == moved.keys()
    assert [path.rpartition(".")[2] for path in one if one[path] != other[path]] == ["momentum_buffer"]


def test_reading_a_file_runs_none_of_its_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (exec, ("raise SystemExit",))

    torch.save({"x": Evil()}, tmp_path / "evil.pt")

    assert "x.__class__" in read(tmp_path / "evil.pt").values


def test_a_file_that_was_cut_off_is_half_written(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1000)}, tmp_path / "whole.pt")
    save_file({"x": torch.zeros(1000)}, tmp_path / "whole.safetensors")
    for name in ("whole.pt", "whole.safetensors"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / f"half-{name}").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.pt").touch()

    half = {path.name for path in tmp_path.iterdir() if is_half_written(path)}

    assert half == {"half-whole.pt", "half-whole.safetensors", "empty.pt"}
    assert read(tmp_path / "whole.safetensors").kind == "values"


def test_a_directory_of_distributed_checkpoint_counts_as_a_state_once_its_metadata_is_there(tmp_path: Path) -> None:
    for step in (40, 60):
        (tmp_path / f"step-{step}").mkdir()
        torch.save({"x": torch.zeros(9)}, tmp_path / f"step-{step}" / "__0_0.distcp")
    (tmp_path / "step-40" / ".metadata").write_bytes(b"which tensors lie where")

    half, whole = LiveFiles(tmp_path).states_now()

    assert half == ()
    assert whole == ["step-40/__0_0.distcp"]


def test_a_line_of_our_own_logger_is_no_evaluation() -> None:
    assert parse("eval loss 0.3").is_evaluation
    assert not parse(
        "ddp_hpc.train.late_compiler - INFO - importing torch._dynamo because torch._dynamo.eval_frame is used"
    ).is_evaluation


# --- directories -------------------------------------------------------------------------------------------------------


def test_a_file_is_seen_from_its_first_byte_to_its_name(tmp_path: Path) -> None:
    events = FileEvents(tmp_path)
    (tmp_path / "new").mkdir()
    with (tmp_path / "new" / "a.tmp").open("w") as file:
        file.write("x")
        file.flush()
        begun = [path.name for kind, path in events.wait(5.0) if kind == "begun"]
    (tmp_path / "new" / "a.tmp").rename(tmp_path / "new" / "a.pt")
    (tmp_path / "new" / "a.pt").read_text()
    rest = [(kind, path.name) for kind, path in events.wait(5.0)]
    events.close()

    assert begun[0] == "a.tmp"
    assert [one for one in rest if one[1] == "a.pt"] == [("named", "a.pt"), ("read", "a.pt")]


def test_a_file_that_was_written_before_its_new_directory_is_watched_is_seen_once(tmp_path: Path) -> None:
    """A checkpoint of several small files is written within a millisecond."""
    events = FileEvents(tmp_path)
    folder = tmp_path / "out" / "checkpoint-7"
    folder.mkdir(parents=True)
    torch.save({}, folder / "model.pt")
    torch.save({}, folder / "optimizer.pt")
    (folder / "half.pt").write_bytes((folder / "model.pt").read_bytes()[:100])
    first = [(kind, path.name) for kind, path in [*events.wait(5.0), *events.wait(0.1)] if kind != "read"]
    torch.save({"again": 1}, folder / "model.pt")
    again = {kind for kind, _ in events.wait(5.0) if kind != "read"}
    events.close()

    assert sorted(first) == [
        *(("begun", name) for name in ("half.pt", "model.pt", "optimizer.pt")),
        *(("named", name) for name in ("model.pt", "optimizer.pt")),
    ]
    assert again == {"begun", "done"}


def test_what_an_attempt_reads_after_it_wrote_it_is_not_read_back() -> None:
    files = LiveFiles(Path("/data"))
    events: list[tuple[Kind, str]] = [
        ("read", "a.pt"),
        ("read", "b.txt"),
        ("done", "b.pt"),
        ("read", "b.pt"),
        ("read", "a.pt"),
    ]
    for kind, name in events:
        files.note(kind, Path("/data", name), lambda: False)
    files.note("read", Path("/data/late.pt"), lambda: True)

    assert files.reads == ["a.pt", "a.pt"]
    assert files.written == {Path("/data/b.pt")}


def test_a_file_with_two_names_is_read_by_both(tmp_path: Path) -> None:
    (tmp_path / "epoch_3.pt").write_bytes(b"state")
    (tmp_path / "last.pt").hardlink_to(tmp_path / "epoch_3.pt")
    files = LiveFiles(tmp_path)

    files.note("read", tmp_path / "last.pt", lambda: False)

    assert files.reads == ["last.pt", "epoch_3.pt"]


def test_a_file_of_no_save_that_a_kill_left_empty_is_told_of(tmp_path: Path) -> None:
    files = LiveFiles(tmp_path)
    for name, held in (("latest", ""), ("log.txt", "step 1"), ("step_1.pt", "")):
        (tmp_path / name).write_text(held)
        files.note("begun", tmp_path / name, lambda: True)

    assert [*files.empty_files()] == ["latest"]


def test_a_state_that_is_moved_here_whole_was_begun() -> None:
    files = LiveFiles(Path("/data"))

    for name in ("a.pt", "b.pt"):
        files.note("named", Path("/data", name), lambda: False)

    assert files.num_begun == 2


def test_the_place_of_a_copy_is_no_value_of_what_is_saved_in_it(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        torch.save({"best_k_models": {f"{folder}/a.ckpt": torch.ones(1)}, "dirpath": str(folder)}, folder / "last.ckpt")
        (folder / "log.txt").write_text(f"saves in {folder}")
        found.append([read_in_copy(folder, folder / file) for file in ("last.ckpt", "log.txt")])

    (state, log), (other_state, other_log) = found
    assert (state.values, log.lines) == (other_state.values, other_log.lines)
    assert {"best_k_models../a.ckpt", "dirpath"} == {*state.values}


# --- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["python", "train.py"], ["python", "-m", "pkg.train"]], ids=["script", "module"])
def test_the_texts_of_a_script_and_of_what_it_imports_are_read(command: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "train.py").write_text("import saving\nfrom pkg import data\n")
    (tmp_path / "pkg" / "train.py").write_text("import saving, pkg.data\n")
    (tmp_path / "pkg" / "data.py").write_text("FOLDER = '/data/in'\n")
    (tmp_path / "saving.py").write_text("import os.path, broken\ndef keep(): torch.save({}, '/data/out.pt')\n")
    (tmp_path / "broken.py").write_text("def '/data/broken'\n")
    (tmp_path / "other.py").write_text("FOLDER = '/data/other'\n")

    assert texts_in_source(parse_program(command), tmp_path) == {"/data/in", "/data/out.pt"}


def test_each_planted_defect_changes_the_good_script() -> None:
    sources = {planted.name: planted.source for planted in PLANTED}

    assert len(set(sources.values())) == len(sources) == len(PLANTED)
    assert all(compile(source, name, "exec") for name, source in sources.items())


# --- moments -----------------------------------------------------------------------------------------------------------


def test_the_same_seed_chooses_the_same_moments() -> None:
    baseline = undisturbed()

    chosen = [[trigger_of(fault, baseline.record, random.Random(3)) for fault in FAULTS.values()] for _ in range(2)]

    assert chosen[0] == chosen[1]


def test_a_moment_that_a_run_has_not_is_said() -> None:
    baseline = undisturbed()
    no_saves = replace(baseline.record, attempts=(replace(baseline.attempt, saves=()),))

    assert "names an evaluation" in str(trigger_of(FAULTS["kill-in-evaluation"], baseline.record, random.Random(0)))
    assert "no saved state" in str(trigger_of(FAULTS["kill-in-save"], no_saves, random.Random(0)))
    assert trigger_of(FAULTS["kill-after-save"], baseline.record, random.Random(0)) == ("save done", 3, 0.0)


def test_a_kill_after_a_save_comes_before_the_files_of_the_last_one_as_the_run_may_end_with_them() -> None:
    """A Trainer writes five files at once."""
    baseline = undisturbed()
    saves = [
        Save(path=f"checkpoint-{step}/{n}.pt", num_lines=step, at=float(step)) for step in (4, 7, 10) for n in range(5)
    ]
    record = replace(baseline.record, attempts=(replace(baseline.attempt, saves=tuple(saves)),))

    assert trigger_of(FAULTS["kill-after-save"], record, random.Random(0)) == ("save done", 10, 0.0)


def test_saves_of_a_script_that_prints_nothing_between_them_are_saves_of_their_own() -> None:
    baseline = undisturbed()
    silent = tuple(Save(path="last.pt", num_lines=0, at=float(number)) for number in range(10))
    record = replace(baseline.record, attempts=(replace(baseline.attempt, saves=silent),))

    assert trigger_of(FAULTS["kill-after-save"], record, random.Random(0)) == ("save done", 8, 0.0)


def test_a_kill_in_an_evaluation_comes_before_its_result_is_printed() -> None:
    baseline = undisturbed()
    lines = (*lines_of(1, 5), parse("validation accuracy 0.5", 9.0))
    record = replace(baseline.record, attempts=(replace(baseline.attempt, lines=lines),))

    trigger = trigger_of(FAULTS["kill-in-evaluation"], record, random.Random(0))

    assert not isinstance(trigger, str)
    assert trigger[:2] == ("line", 5)
    assert 0 < trigger[2] < 4


# --- the certificate ---------------------------------------------------------------------------------------------------


def test_a_reason_that_several_faults_share_stands_once_in_the_table() -> None:
    results = [
        FaultResult(fault=fault, description="", verdict="differs", words="differs", reason=reason)
        for fault, reason in (
            ("term", "no seed"),
            ("usr2", ""),
            ("preempt", "no seed"),
            ("kill-at-random", "no loader"),
        )
    ]

    table = as_text(Certificate(command=["python", "t.py"], seed=0, folder="runs/c", findings=results)).splitlines()

    shown = {line.split()[0]: line.rpartition("differs")[2].strip() for line in table if " differs" in line}
    assert shown == {"term": "no seed", "usr2": "", "preempt": "as for term", "kill-at-random": "no loader"}


# --- processes ---------------------------------------------------------------------------------------------------------


def test_a_script_is_killed_also_where_the_system_lists_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> list[psutil.Process]:
        raise psutil.AccessDenied  # as /proc with hidepid does

    monkeypatch.setattr(psutil.Process, "children", refuse)
    with subprocess.Popen(["sleep", "600"]) as script:
        try:
            end_all_below(script.pid)

            assert script.wait(10) == -9
        finally:
            script.kill()
