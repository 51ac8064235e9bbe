"""What `survival.py` has its peers train: a loop as their documentation shows it, with a checkpoint now and then.

torchrun starts it as a script; submitit calls `Training`, whose `checkpoint` is what submitit asks for when it is told to
make room.

    survival_peer.py FOLDER               # train; under torchrun
    survival_peer.py FOLDER --submit      # send it to the queue through submitit; prints the job's number
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

EVERY_STEPS = 10
STEP_S = 0.024
"""As long as a step of the drill's recipe."""


def train(folder: Path, *, every_steps: int | None = EVERY_STEPS) -> Training:
    """Train until somebody ends it; the group is joined by the environment."""
    return Training(folder, every_steps=every_steps)()


class Training:
    """A small network, trained for ever; submitit pickles it."""

    def __init__(self, folder: Path, *, every_steps: int | None = None) -> None:
        self.folder = folder
        self.every_steps = every_steps
        self.state: Any = None

    def __call__(self) -> Training:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        if "RANK" not in os.environ:  # under submitit, which brings this
            from submitit.helpers import TorchDistributedEnvironment

            TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.state = {"model": network, "optimizer": optimizer, "step": 0}
        if (self.folder / "last.pt").exists():
            found = torch.load(self.folder / "last.pt")
            network.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            self.state["step"] = found["step"]
        is_first = True
        while True:
            time.sleep(STEP_S)
            loss = nn.functional.cross_entropy(model(torch.randn(6, 16)), torch.randint(3, (6,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.state["step"] += 1
            if dist.get_rank() == 0:
                if self.every_steps and self.state["step"] % self.every_steps == 0:
                    self.save()
                if is_first:
                    (self.folder / f"stepped-{time.time_ns()}").touch()
            is_first = False

    def save(self) -> None:
        """Write a checkpoint that is on the disk, whole, when this returns."""
        import torch

        beside = self.folder / "last.tmp"
        with beside.open("wb") as file:
            torch.save(
                {
                    "model": self.state["model"].state_dict(),
                    "optimizer": self.state["optimizer"].state_dict(),
                    "step": self.state["step"],
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / "last.pt")

    def checkpoint(self) -> Any:
        """Save, and say what is to be called when the job comes back; submitit asks rank zero."""
        from submitit.helpers import DelayedSubmission

        self.save()
        return DelayedSubmission(Training(self.folder))


def submit(folder: Path) -> str:
    """Send it to the queue; return the job's number."""
    import submitit

    from benchmarks.survival_peer import Training  # not `__main__`'s: the job imports it by this name

    executor = submitit.AutoExecutor(folder / "submitit", slurm_python=sys.executable)
    executor.update_parameters(
        nodes=2, tasks_per_node=2, cpus_per_task=1, mem_gb=8, timeout_min=30, slurm_partition="batch", name="peer"
    )
    return str(executor.submit(Training(folder)).job_id)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if "--submit" in sys.argv:
        sys.stdout.write(submit(folder))
    else:
        train(folder)
