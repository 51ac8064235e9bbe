"""Compares what all ranks must have equal, and records its digest, at steps that depend on the step's number alone."""

from __future__ import annotations

import logging

from ddp_hpc.run_dir.digests import record_digest
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state import digests
from ddp_hpc.train.state.training_state import TrainingState

log = logging.getLogger(__name__)

_NEVER = 2**62


class Replicas:
    """The ranks' copies of the training state, as one rank sees them."""

    def __init__(self, run: RunDir, group: Group, *, attempt: int, every_steps: int | None) -> None:
        self._run = run
        self._group = group
        self._attempt = attempt
        self._every = every_steps
        self._next_step = _NEVER if every_steps is None else 0
        self._compared: int | None = None
        self._is_losing = False

    def is_due(self, step: int) -> bool:
        """Tell whether to compare after this step."""
        return step >= self._next_step

    def compare(self, state: TrainingState) -> None:
        """Compare the state of all ranks after this step, if that is switched on, and record its digest."""
        step = state.position.step
        if self._every is None or step == self._compared:
            return
        self._compared, self._next_step = step, (step // self._every + 1) * self._every
        self._record(step, digests.of_all(digests.of_state(state)))

    def _record(self, step: int, digest: str) -> None:
        rank_info = self._group.rank_info
        if not rank_info.is_rank_zero:
            return
        try:
            record_digest(self._run, attempt=self._attempt, step=step, world_size=rank_info.world_size, digest=digest)
            self._is_losing = False
        except OSError as error:
            if not self._is_losing:
                log.warning("the state's digest cannot be recorded: %s. The training goes on without it.", error)
            self._is_losing = True
