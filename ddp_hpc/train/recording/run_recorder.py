"""Rank zero's records of a run: metrics, progress, TensorBoard, console."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

import msgspec

from ddp_hpc.base.durable import make_directories, open_private, read_json_lines, replace_text
from ddp_hpc.base.patience import patiently
from ddp_hpc.checkpoints import checkpoint_names
from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.records import Progress, write_progress
from ddp_hpc.spec import RunSpec
from ddp_hpc.train.data.sample_order import Position
from ddp_hpc.train.recording.timeline import Timeline
from ddp_hpc.train.state.checkpoint import SaveResult

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
        *,
        is_writer: bool,
        attempt: int,
        total_steps: int,
        timeline: Timeline | None = None,
    ) -> None:
        self._run = run
        self._is_writer = is_writer
        self._attempt = attempt
        self._timeline = timeline
        self._total_steps = total_steps
        self._epochs = spec.train.epochs
        self._wants_tensorboard = spec.log.tensorboard
        self._board: Any = None
        self._file: IO[bytes] | None = None
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}
        self._saved: SaveResult | None = None
        self._save_error: str | None = None
        self._saved_at: float | None = None
        self._rate: float | None = None
        self._steps_per_s: float | None = None
        self._samples = 0
        self._steps = 0
        self._clock = time.monotonic
        self._measured_at = (self._clock(), 0, 0)
        self._paused_s = self._newest_pause_s = 0.0
        self._written_at = 0.0
        self._is_losing = False
        self._is_torn = False

    def open(self, position: Position) -> None:
        """Open the records at `position`: where the run resumes, or step zero."""
        if not self._is_writer:
            return
        text = patiently(str(self._run.metrics), self._read_metrics)
        lines = list(read_json_lines(self._run.metrics)) if text else []
        kept = [line for line in lines if _step_of(line) <= position.step]
        if _as_lines(kept) != text:
            if len(kept) < len(lines):  # otherwise only an incomplete line is removed
                self._set_aside([line for line in lines if _step_of(line) > position.step])
            replace_text(self._run.metrics, _as_lines(kept))
        self._recall(kept)
        self._file = open_private(self._run.metrics, "ab", buffering=0)
        if self._wants_tensorboard:
            self._board = _open_tensorboard(self._run, purge_step=position.step + 1)
        if self._timeline is not None:
            self._timeline.begin(position.step)
        self._write_progress(position)

    def plan_steps(self, total_steps: int) -> None:
        """Change the number of the last step."""
        self._total_steps = total_steps

    def _read_metrics(self) -> str:
        try:
            return self._run.metrics.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def _set_aside(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Keep the lines of steps that will be repeated, in case they never are."""
        with open_private(self._run.superseded_metrics, "a") as file:
            file.write(_as_lines(lines))
            file.flush()
            os.fsync(file.fileno())

    def _recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Load the newest loss and evaluation, so that `status` shows them before there are new ones."""
        for line in lines:
            numbers = {key: value for key, value in line.items() if isinstance(value, float) and key != "at"}
            if line.get("kind") == "train":
                self._loss = numbers.get("loss")
            elif line.get("kind") == "eval":
                self._metrics = numbers

    def count(self, num_samples: int) -> None:
        """Count a step and its samples, for the rates; the first step, which is slower, is left out of them."""
        self._samples += num_samples
        self._steps += 1
        if self._steps == 1:
            self._measured_at = (self._clock() - self._paused_s, self._samples, self._steps)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of an evaluation or a save from the rates."""
        began = self._clock()
        try:
            yield
        finally:
            self._newest_pause_s = self._clock() - began
            self._paused_s += self._newest_pause_s

    def train(self, position: Position, *, loss: float, lr: float) -> None:
        """Write the mean loss of a log interval."""
        if not self._is_writer:
            return
        self._loss = loss
        self._measure_rate()
        self._write("train", position, {"loss": loss, "lr": lr}, {"samples_per_s": self._rate})
        rate = "" if self._rate is None else f"  {self._rate:.0f} samples/s"
        log.info("step %d/%d  loss %.4f  lr %.4g%s", position.step, self._total_steps, loss, lr, rate)
        if not math.isfinite(loss):
            log.warning(
                "the loss is %s at step %d; `train.on_nonfinite` (stop, skip or ignore) says whether the run continues; a lower `train.lr` may help",
                loss,
                position.step,
            )

    def evaluated(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation."""
        if not self._is_writer or not metrics:
            return
        if self._timeline is not None:
            self._timeline.evaluated(position.step, seconds=self._newest_pause_s)
        self._metrics = dict(metrics)
        self._write("eval", position, metrics, {})
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info("evaluation at step %d  %s", position.step, numbers)
        self._write_progress(position)

    def saved(self, result: SaveResult) -> None:
        """Record how a save ended; the checkpoint writer's thread calls this."""
        if result.error is not None:
            self._save_error = result.error
            log.warning(
                "the checkpoint of step %d could not be written: %s. Earlier checkpoints are not affected. While the training goes on, each save tries again.",
                result.step,
                result.error,
            )
            return
        self._save_error, self._saved, self._saved_at = None, result, time.time()
        if self._timeline is not None:
            self._timeline.saved(result.step, seconds=result.seconds)
        log.info("checkpoint of step %d committed in %.2f s", result.step, result.seconds)

    def resumed(self, step: int) -> None:
        """Record the checkpoint from which the run resumes."""
        manifest = checkpoint_names.checkpoint_path(self._run, step) / checkpoint_names.MANIFEST
        self._saved = SaveResult(step, 0.0)
        with suppress(OSError):  # the file system does not answer: leave the time unknown
            self._saved_at = manifest.stat().st_mtime

    def progress(self, position: Position, *, now: bool = False) -> None:
        """Replace progress.json, at most about once a second."""
        if self._is_writer and (now or time.monotonic() - self._written_at > PROGRESS_INTERVAL_S):
            self._measure_rate()
            if self._timeline is not None:
                self._timeline.look(position.step, now=now)
            self._write_progress(position)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._timeline is not None:
            self._timeline.close()
        if self._file is not None:
            self._file.close()

    def _measure_rate(self) -> None:
        now = self._clock() - self._paused_s
        then, samples, steps = self._measured_at
        if now - then >= PROGRESS_INTERVAL_S / 2 and self._steps > steps:
            self._rate = (self._samples - samples) / (now - then)
            self._steps_per_s = (self._steps - steps) / (now - then)
            self._measured_at = (now, self._samples, self._steps)

    def _write(
        self, kind: str, position: Position, numbers: Mapping[str, float], more: Mapping[str, float | None]
    ) -> None:
        record = {"kind": kind, "step": position.step, "epoch": _epoch_of(position), **numbers, **more}
        line = msgspec.json.encode({**record, "at": time.time()}) + b"\n"
        with self._errors_logged():
            self._append(line)
            if self._board is not None:
                for name, value in numbers.items():
                    self._board.add_scalar(f"{kind}/{name}", value, position.step)

    def _append(self, line: bytes) -> None:
        assert self._file is not None  # noqa: S101  `open` comes first
        # On a full disk, write(2) may write only a part, or fail: https://man7.org/linux/man-pages/man2/write.2.html
        # The next line then first ends the incomplete one, so that only that one is lost.
        whole = b"\n" + line if self._is_torn else line
        self._is_torn = True
        written = self._file.write(whole)
        if written < len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._run.metrics))
        self._is_torn = False

    def _write_progress(self, position: Position) -> None:
        self._written_at = time.monotonic()
        steps_left = self._total_steps - position.step
        progress = Progress(
            attempt=self._attempt,
            step=position.step,
            total_steps=self._total_steps,
            epoch=_epoch_of(position),
            epochs=self._epochs,
            loss=self._loss,
            samples_per_s=self._rate,
            eta_s=None if self._steps_per_s is None else steps_left / self._steps_per_s,
            metrics=self._metrics,
            last_checkpoint=self._saved.step if self._saved else None,
            last_checkpoint_at=self._saved_at,
            save_s=(self._saved.seconds or None) if self._saved else None,
            save_error=self._save_error,
            at=time.time(),
        )
        with self._errors_logged():
            write_progress(self._run, progress)

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        """Keep the training running on a full disk: skip records that cannot be written, and log the first of them."""
        try:
            yield
        except OSError as error:
            if not self._is_losing:
                log.warning("metrics and progress cannot be written: %s. The training goes on without them.", error)
            self._is_losing = True
        else:
            self._is_losing = False


def _step_of(line: Mapping[str, Any]) -> int:
    step = line.get("step", 0)
    return step if isinstance(step, int) else 0


def _as_lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(msgspec.json.encode(record).decode() + "\n" for record in records)


def _epoch_of(position: Position) -> int:
    """Return the epoch of the last step, counted from one."""
    return position.epoch + (1 if position.samples_in_epoch or position.step == 0 else 0)


def _open_tensorboard(run: RunDir, *, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "`log.tensorboard` is true, but TensorBoard is not installed on this node. "
            "Install it with `pip install ddp_hpc[tensorboard]`, or leave out `log.tensorboard`."
        ) from error
    make_directories(run.tensorboard)  # made here with the run's permissions; TensorBoard would use the umask
    return SummaryWriter(str(run.tensorboard), purge_step=purge_step)
