"""Rank zero's records of a run: metrics, progress, console; other recorders follow the metrics."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from ddp_hpc.base.errors import FencedError
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, write_progress
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.data.sample_order import Position, SampleOrder
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recording.beside import Followers
from ddp_hpc.train.recording.metrics_file import MetricsFile
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.recording.recorders import Ending
from ddp_hpc.train.recording.time_marks import Timeline

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0


class RunRecorder:
    """Writes the records on rank zero; on other ranks every method does nothing.

    After a resume, lines of steps that will be repeated are first moved to another file, so that each step is in
    `metrics.jsonl` once.
    """

    def __init__(  # noqa: PLR0913  what the records of an attempt need
        self,
        run: RunDir,
        spec: RunSpec,
        group: Group,
        phases: PhaseTimes,
        *,
        attempt: int,
        total_steps: int,
        order: SampleOrder,
    ) -> None:
        self._is_writer = group.rank_info.is_rank_zero
        if self._is_writer:
            spec.log.require_recorders()
        self._run = run
        self.timeline = Timeline(run, attempt, group, phases)
        self.total_steps = total_steps
        self._order = order
        self._file = MetricsFile(run, attempt)
        self._followers = Followers(run, attempt, tuple(dict.fromkeys(spec.log.recorders)))
        self._known: dict[str, Any] = {"attempt": attempt, "epochs": spec.train.epochs}
        """The fields of `Progress` that do not follow from the position; the checkpoint writer's thread sets some of them."""
        self._is_rate_new = False
        """Whether the rate was measured after the last line of the log."""
        self._taken_at = Position()
        self._num_taken = 0
        self._began_at: tuple[float, int] | None = None
        """When the first step had ended, and its number: what comes after it is the pace of the time left, with all pauses."""
        self._clock = time.monotonic
        self._measured_at: tuple[float, Position] | None = None
        self._paused_s = self._newest_pause_s = 0.0
        self._written_at = 0.0
        self._failing: set[str] = set()

    def open(self, position: Position) -> None:
        """Open the records at `position`: where the run resumes, or step zero."""
        self._taken_at = position
        if not self._is_writer:
            return
        try:
            self._load_newest(self._file.open(position.step))
        except FencedError as error:  # before the first step, the ranks agree to stop
            log.warning("%s", error)
            self._is_writer = False
            return
        self._followers.start()
        self.timeline.note_begin(position.step)
        self._write_progress(position)

    def flush(self) -> None:
        """Have the metrics so far on the disk; the checkpoint writer's thread calls this before it commits."""
        self._file.flush()

    def _load_newest(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Load the newest loss and evaluation, so that `status` shows them before there are new ones."""
        for line in lines:
            numbers = {key: value for key, value in line.items() if isinstance(value, float) and key != "at"}
            if line.get("kind") == "train":
                self._known["loss"] = numbers.get("loss")
            elif line.get("kind") == "eval":
                self._known["metrics"] = numbers

    def take_num_samples(self, position: Position) -> int:
        """Return how many samples were used since the last call: those of the next line's interval."""
        self._num_taken = self._order.samples_between(self._taken_at, position)
        self._taken_at = position
        return self._num_taken

    @contextmanager
    def exclude_from_rates(self) -> Iterator[None]:
        """Exclude the time of an evaluation or a save from the rates."""
        began = self._clock()
        try:
            yield
        finally:
            self._newest_pause_s = self._clock() - began
            self._paused_s += self._newest_pause_s

    def record_training(
        self,
        position: Position,
        *,
        loss: float,
        lr: float | None,
        more: Mapping[str, float | None] = MappingProxyType({}),
        num_tokens: int | None = None,
    ) -> None:
        """Write the mean loss of a log interval, and more numbers; `num_tokens` counts the interval's tokens, over all ranks."""
        if not self._is_writer:
            return
        self._known["loss"] = loss
        self._measure_rate(position)
        if num_tokens is not None and (samples_per_s := self._known.get("samples_per_s")) is not None:
            self._known["tokens_per_s"] = samples_per_s * (
                num_tokens / self._num_taken if self._num_taken else math.nan
            )
        names = ["samples_per_s", *([] if num_tokens is None else ["tokens_per_s"])]
        rates = {name: self._known.get(name) if self._is_rate_new else None for name in names}
        self._is_rate_new = False
        self._write("train", position, {"loss": loss, "lr": lr, **more, **rates})
        words = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
        shown = "".join(f"  {rate:.0f} {words[name]}" for name, rate in rates.items() if rate is not None)
        rate = "" if lr is None else f"  lr {lr:.4g}"
        log.info("step %d/%d  loss %.4f%s%s", position.step, self.total_steps, loss, rate, shown)
        if not math.isfinite(loss):
            log.warning(
                "the loss is %s at step %d; `train.on_nonfinite` (stop, skip or ignore) says whether the run continues; a lower `train.lr` may help",
                loss,
                position.step,
            )

    def record_evaluation(self, position: Position, metrics: Mapping[str, float]) -> None:
        if not self._is_writer or not metrics:
            return
        self.timeline.note_duration("evaluation", position.step, self._newest_pause_s)
        self._known["metrics"] = dict(metrics)
        self._write("eval", position, metrics)
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info("evaluation at step %d  %s", position.step, numbers)
        self._write_progress(position)

    def record_save(self, step: int, seconds: float, error: str | None) -> None:
        """Record how a save ended; the checkpoint writer's thread calls this."""
        self._known["save_error"] = error
        if error is not None:
            log.warning(
                "the checkpoint of step %d could not be written: %s. Earlier checkpoints are not affected. While the training goes on, each save tries again.",
                step,
                error,
            )
            return
        self._known.update(last_checkpoint=step, save_s=seconds, last_checkpoint_at=time.time())
        self.timeline.note_duration("save", step, seconds)
        log.info("checkpoint of step %d committed in %.2f s", step, seconds)

    def record_save_bytes(self, num_bytes: Mapping[str, int]) -> None:
        """Record how much memory a save takes; the checkpoint writer's thread calls this."""
        self._known["save_bytes"] = dict(num_bytes)

    def record_resume(self, step: int) -> None:
        manifest = checkpoint_names.checkpoint_path(self._run, step) / checkpoint_names.MANIFEST_NAME
        self._known["last_checkpoint"] = step
        with suppress(OSError):  # the file system does not answer: leave the time unknown
            self._known["last_checkpoint_at"] = manifest.stat().st_mtime

    def record_progress(self, position: Position, *, now: bool = False) -> None:
        """Replace progress.json, at most about once a second; nothing before `open`. The loop also calls this after its first step."""
        if not self._is_writer or not self._written_at:
            return
        if self._measured_at is None:
            self._measure_rate(position)
        if now or time.monotonic() - self._written_at > PROGRESS_INTERVAL_S:
            self._measure_rate(position)
            self.timeline.note_phases(position.step, now=now)
            self._write_progress(position)

    def close(self, ending: Ending = "finished") -> None:
        """Close the records; wait for the other recorders, within a bound that `ending` decides."""
        num_lost = self._file.close()
        if num_lost:
            log.warning("%d lines of metrics.jsonl are lost: the disk did not take them before the end.", num_lost)
        self._followers.close(ending)
        self.timeline.close()

    def _measure_rate(self, position: Position) -> None:
        """Measure how fast the training is since the last measurement; the first call only begins, as the first step is slower."""
        now = self._clock() - self._paused_s
        if self._measured_at is None:
            self._measured_at, self._began_at = (now, position), (self._clock(), position.step)
        seconds, before = now - self._measured_at[0], self._measured_at[1]
        if seconds >= PROGRESS_INTERVAL_S / 2 and position.step > before.step:
            self._known["samples_per_s"] = self._order.samples_between(before, position) / seconds
            self._is_rate_new = True
            self._measured_at = now, position

    def _write(self, kind: str, position: Position, numbers: Mapping[str, float | None]) -> None:
        record = {"kind": kind, "step": position.step, "epoch": _epoch_of(position), **numbers, "at": time.time()}
        with self._log_errors("metrics"):
            self._file.append(record)

    def _write_progress(self, position: Position) -> None:
        self._written_at = time.monotonic()
        began, first = self._began_at or (0.0, position.step)
        pace_s = (self._clock() - began) / (position.step - first) if position.step > first else None
        progress = Progress(
            step=position.step,
            total_steps=self.total_steps,
            epoch=_epoch_of(position),
            eta_s=None if pace_s is None else (self.total_steps - position.step) * pace_s,
            at=time.time(),
            **self._known,
        )
        with self._log_errors("progress"), suppress(FencedError):  # the ranks learn of it when they agree to stop
            write_progress(self._run, progress)

    @contextmanager
    def _log_errors(self, what: str) -> Iterator[None]:
        """Keep the training running on a full disk, and log the first of the errors in a row."""
        try:
            yield
        except OSError as error:
            if what not in self._failing:
                log.warning(
                    "the %s of the run cannot be written: %s. The training goes on; what is missing is kept in memory, and written as "
                    "soon as it can be.",
                    what,
                    error,
                )
            self._failing.add(what)
        else:
            self._failing.discard(what)


def _epoch_of(position: Position) -> int:
    """Return the epoch of the last step, counted from one."""
    return position.epoch + (1 if position.samples_in_epoch or position.step == 0 else 0)
