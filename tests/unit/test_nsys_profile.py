"""At which steps a rank tells nsys to begin and to end its record."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ddp_hpc.run.run_dir.profile_notes import read_profiles
from ddp_hpc.run.spec.training import ProfileSpec
from ddp_hpc.train.recording.step_profile import NsysProfile, phase_timer
from tests.made_run import make_run
from tests.unit.test_step_profile import OfRank


class Loop:
    """The phases of the loop around a timer, and what the timer calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int], *, done: int = 0) -> None:
        self.done = done
        self.calls: list[str] = []
        self.depth = 0
        self.notes: list[str] = []
        monkeypatch.setattr(torch.cuda.profiler, "start", lambda: self.calls.append(f"start at {self.done + 1}"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: self.calls.append(f"stop after {self.done}"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", self._push)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", self._pop)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.calls.append("synchronize"))
        self.timer = NsysProfile(steps, torch.device("cuda"), lambda: self.done + 1, note=self.notes.append)

    def _push(self, name: str) -> None:
        self.calls.append(name)
        self.depth += 1

    def _pop(self) -> None:
        self.depth -= 1

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for phase in ("forward", "optimizer", "other"):
                self.timer.enter(phase)
            self.done += 1
            self.timer.enter("data")

    @property
    def bounds(self) -> list[str]:
        return [call for call in self.calls if call.startswith(("start", "stop", "synchronize"))]


def test_the_chosen_steps_are_recorded_each_in_a_range_with_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, (3, 4))

    loop.run(7)
    loop.timer.close()

    assert loop.bounds == ["start at 3", "synchronize", "stop after 4"]
    assert [name for name in loop.calls if name.startswith("step")] == ["step 3", "step 4"]
    assert {"forward", "optimizer"} <= set(loop.calls)
    assert loop.depth == 0
    assert loop.notes == []


@pytest.mark.parametrize(("done", "bounds"), [(0, "start at 3"), (3, "start at 4")])
def test_a_training_that_begins_or_ends_among_these_steps_records_its_part(
    done: int, bounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch, (3, 9), done=done)

    loop.run(4)
    loop.timer.close()

    assert loop.bounds == [bounds, "synchronize", f"stop after {done + 4}"]
    assert loop.depth == 0


def test_a_save_after_a_step_begins_no_record_and_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loop = Loop(monkeypatch, (3, 9), done=1)

    loop.timer.enter("forward")
    loop.done += 1
    loop.timer.enter("checkpoint")
    before = list(loop.calls)
    loop.timer.enter("data")
    loop.timer.enter("forward")
    loop.done += 1
    loop.timer.enter("checkpoint")
    loop.timer.close()

    assert before == []
    assert loop.calls == [
        "start at 3",
        "step 3",
        "data",
        "forward",
        "checkpoint",
        "synchronize",
        "stop after 3",
    ]
    assert "nsys has recorded steps 3 to 3" in caplog.text


@pytest.mark.parametrize(
    ("done", "num_steps", "why"),
    [(4, 3, "the attempt began behind these steps"), (0, 1, "the attempt ended before step 3")],
)
def test_a_training_without_these_steps_records_nothing_and_says_why(
    done: int, num_steps: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch, (3, 4), done=done)

    loop.run(num_steps)
    loop.timer.close()

    assert loop.calls == []
    [note] = loop.notes
    assert note.startswith(why)


def test_a_failure_of_cuda_that_ends_the_training_is_no_second_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, (3, 9))
    loop.run(4)

    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    loop.timer.close()

    assert loop.depth == 0
    assert loop.notes == []


@pytest.mark.parametrize(
    ("program", "why"), [(None, "there is no program 'nsys' on the PATH of"), ("/opt/nsys", "which takes a GPU")]
)
def test_a_rank_without_nsys_or_without_a_gpu_trains_on_and_says_why(
    program: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: program)
    run = make_run(tmp_path)
    asked = ProfileSpec(kind="nsys", steps=(2, 3))

    timer = phase_timer(asked, run, OfRank(0), attempt=0, next_step=lambda: 2)  # type: ignore[arg-type]
    timer.enter("forward")
    timer.close()

    assert why in caplog.text
    [noted] = read_profiles(run, is_alive=True)
    assert why in noted.why
    assert timer.so_far().seconds["other"] > 0
