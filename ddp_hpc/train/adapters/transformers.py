"""Hugging Face's Trainer: a callback that stops after an agreed step, commits its checkpoints, and comes back once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.attached.run import AttachedRun


class AgreedStop(TrainerCallback):  # type: ignore[misc]  # Transformers is not installed where types are checked
    """Commits each checkpoint that the Trainer saves; asked to stop, has it save after an agreed step, and ends the process.

    Pass `latest()` to `trainer.train(resume_from_checkpoint=...)`. The Trainer saves every `save_steps` as its arguments say.
    Its own `enable_jit_checkpoint` has no effect with this callback: it would save on each rank alone.
    """

    def __init__(self, run: AttachedRun, *, keep_last: int = 2) -> None:
        self._run = run
        self._keep_last = keep_last
        self._stops = False

    def latest(self) -> str | None:
        """Return the newest committed checkpoint; None where there is none."""
        path = self._run.latest()
        return None if path is None else str(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        del state, control, others
        if args.world_size != self._run.world_size:
            raise ConfigError(
                f"This is one of {self._run.world_size} ranks, but the Trainer trains on {args.world_size}, so each rank would train "
                "a model of its own. On a machine without GPUs, pass `use_cpu=True` to TrainingArguments."
            )
        self._run.listen()  # `enable_jit_checkpoint` has put its own handler of SIGTERM in the place of ours

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        del args, others
        self._run.report(state.global_step)
        if self._run.should_stop(state.global_step):
            self._stops = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        del args, state, others
        if self._stops:  # the step has saved; `save_strategy="epoch"` asks for more, though the epoch is not at its end
            control.should_save = control.should_evaluate = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        del args, control, others
        self._run.report(state.global_step, loss=(logs or {}).get("loss"))

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        del control, others
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # The Trainer deletes old ones of its own directory, and reads its best one there. So ours are copies.
        self._run.commit(folder, keeps_folder=True, keep_last=self._keep_last)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        del args, state, control, others
        if self._stops:
            self._run.exit_for_requeue()
