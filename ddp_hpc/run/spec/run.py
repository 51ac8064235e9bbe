"""One run: all keys of its configuration, and the checks that need both sides of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.spec.checked import require
from ddp_hpc.run.spec.launch import LaunchSpec
from ddp_hpc.run.spec.script import ScriptedSpec
from ddp_hpc.run.spec.training import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainingSpec, ScriptedSpec, LaunchSpec):
    """One run: how it is launched, and what it trains or runs. A function that only launches takes a `LaunchSpec`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_profile()
        if self.script.is_set:
            # The signal before the time limit goes to the batch shell alone, which has the supervisor ask the script. To a job's
            # steps, Slurm sends it to every process, and most scripts, and all loader processes, die of it.
            object.__setattr__(self, "slurm", replace(self.slurm, signal_to="batch"))
            return  # the script reads none of the keys below, whose defaults need not fit the world
        self._check_batch()
        on_cpus = self.resources.num_gpus == 0 and self.resources.world_size > 1
        require(
            not (self.train.sync_batch_norm and on_cpus),
            "`train.sync_batch_norm` is true, but PyTorch synchronises batch norm on GPUs only and "
            "`resources.gpus_per_node` is 0. Set `train.sync_batch_norm=false`, or ask for GPUs.",
        )

    def _check_profile(self) -> None:
        """Refuse a profile that nobody would record."""
        require(
            self.profile.kind == "off" or not self.script.is_set,
            f"`profile.kind` is {self.profile.kind!r}, but a script's steps are its own, so ddp-hpc cannot record them. Unset it, and use "
            "`torch.profiler` in the script.",
        )
        world_size = self.resources.world_size
        absent = [rank for rank in self.profile.ranks if rank >= world_size]
        require(
            self.profile.kind == "off" or not absent,
            f"`profile.ranks` is {list(self.profile.ranks)}, but the run has {world_size} rank{'' if world_size == 1 else 's'}, counted from 0. "
            "Name ranks below that.",
        )

    def _check_batch(self) -> None:
        """Refuse a global batch that cannot be split evenly among the workers."""
        share = self.resources.world_size * (self.train.micro_batch_size or 1)
        asked = self.train.global_batch_size
        if asked % share == 0:
            return
        below, above = asked // share * share, (asked // share + 1) * share
        micro = f" x `train.micro_batch_size` {self.train.micro_batch_size}" if self.train.micro_batch_size else ""
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"`train.global_batch_size` is {asked}, but {self.resources.world_size} workers "
            f"(`resources.nodes` {self.resources.nodes} x `resources.workers_per_node` {self.resources.local_world_size}){micro} "
            f"need a multiple of {share}. Set `train.global_batch_size` to {nearest}."
        )

    @property
    def cpus_per_task(self) -> int:
        """CPUs of each worker to ask Slurm for: what the user set, or one, and one more for each loader process."""
        return self.resources.cpus_per_worker or 1 + self.data.num_workers

    @property
    def micro_batch_size(self) -> int:
        """Samples in one pass of a worker in the world that was asked for; for users' templates of the job script."""
        return self.train.micro_batch_size_in(self.resources.world_size)
