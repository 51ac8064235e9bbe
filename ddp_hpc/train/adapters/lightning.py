"""Lightning: the ranks that the launcher gave, and a callback that saves, stops after an agreed step, and comes back once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback

from ddp_hpc.train.attached.run import AttachedRun
from ddp_hpc.train.attached.step_sampler import StepSampler

CKPT_NAME = "lightning.ckpt"
_KEY = "ddp_hpc"
"""Our part of Lightning's checkpoint."""


def cluster_environment() -> ClusterEnvironment:
    """Return the environment for `Trainer(plugins=[...])`: what the launcher says, or Lightning's own where there is none.

    Given by hand, Lightning looks for no other. Within a Slurm job it would find its own (`SLURMEnvironment`), which requeues the job, too; then every preemption would requeue it twice.
    """
    return TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()


class AgreedStop(Callback):  # type: ignore[misc]  # Lightning is not installed where types are checked
    """Saves every `save_every` optimizer steps, and when the run is asked to stop; then it ends the process to come back.

    Pass `latest()` to `trainer.fit(..., ckpt_path=...)`. With `order` (`run.order`), a resumed training goes on with the very next
    samples: Lightning alone begins the epoch's data anew.
    """

    def __init__(
        self, run: AttachedRun, *, save_every: int | None = None, keep_last: int = 2, order: StepSampler | None = None
    ) -> None:
        self._run = run
        self._save_every = save_every
        self._keep_last = keep_last
        self._order = order
        self._num_batches = 0
        self._step = 0
        self._saved = -1

    def latest(self) -> str | None:
        """Return the newest committed checkpoint; None where there is none."""
        path = self._run.latest()
        return None if path is None else str(path / CKPT_NAME)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        # Lightning has wrapped the handler of SIGTERM into its own, which runs a collective at the moment when the signal
        # comes: at another one on each rank, between any two of the training's own.
        self._run.listen()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        self._run.listen()  # where there was no sanity check
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del pl_module, batch, batch_idx
        self._num_batches += 1
        step = trainer.global_step
        if step == self._step:  # gradients are accumulated: there is nothing new to save
            return
        # Not by `step % save_every`: with several optimizers, a batch counts as several steps.
        is_due = self._save_every is not None and step // self._save_every > self._step // self._save_every
        self._step = step
        self._run.report(step, loss=outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        stops = self._run.should_stop(step)
        if stops or is_due:
            self._save(trainer)
        if stops:
            for logger in trainer.loggers:
                logger.finalize("finished")
            self._run.exit_for_requeue()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        if self._saved != self._step:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        folder = self._run.checkpoint_dir / f"step-{self._step}.tmp"
        folder.mkdir(exist_ok=True)
        trainer.save_checkpoint(folder / CKPT_NAME)
        self._run.commit(folder, keep_last=self._keep_last)
        self._saved = self._step

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        del trainer, pl_module
        order = None if self._order is None else self._order.state_dict(self._num_batches)
        checkpoint[_KEY] = {"num_batches": self._num_batches, "order": order}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        del trainer, pl_module
        state = checkpoint.get(_KEY)
        if state is None:
            return
        self._num_batches = state["num_batches"]
        if self._order is not None and state["order"] is not None:
            self._order.load_state_dict(state["order"])
