"""DDP on Slurm with PyTorch, submitit and torch.distributed.checkpoint alone: docs/comparison.md says when that suffices.

torchrun --nproc-per-node 2 by_hand.py              # on one machine
python by_hand.py --submit --nodes 2 --workers 4    # on a login node; returns at once
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Training:
    """What submitit pickles, and calls in each task of the job, again after each requeue."""

    folder: Path
    epochs: int
    save_every: int

    def __call__(self) -> None:
        """Train from the newest checkpoint to the end, or to the signal that asks the job to make room."""
        if "RANK" not in os.environ:  # not under torchrun, so in a task of submitit
            from submitit.helpers import TorchDistributedEnvironment

            TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        # Slurm sends USR2 before the time limit; submitit's own handler would requeue at once, on rank zero alone.
        asked = []
        signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))  # preemption; the site's GraceTime has to suffice
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1)).to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = torch.randn(4096, 20)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=0)
        loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
        step, loss = self.load(model, optimizer), torch.tensor(0.0)
        for epoch in range(step // len(loader), self.epochs):
            sampler.set_epoch(epoch)
            for source, target in itertools.islice(loader, step % len(loader), None):
                loss = nn.functional.mse_loss(model(source.to(device)), target.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                must_leave = torch.tensor(float(bool(asked)), device=device)
                dist.all_reduce(must_leave)  # all ranks leave after the same step, or none
                if must_leave or step % self.save_every == 0:
                    self.save(model, optimizer, step)
                if must_leave:
                    self.requeue()
                    return
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        self.save(model, optimizer, step)
        dist.destroy_process_group()

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write a checkpoint, give it its name when all ranks have written, and keep two."""
        place = self.folder / f"step-{step:08}"
        if place.exists():
            return
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=f"{place}.tmp")
        if dist.get_rank() == 0:
            Path(f"{place}.tmp").rename(place)
            for old in sorted(self.folder.glob("step-????????"))[:-2]:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest checkpoint; return its step, 0 without one."""
        found = sorted(self.folder.glob("step-????????"))
        if not found:
            return 0
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=str(found[-1]))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["step"])

    def requeue(self) -> None:
        """Put the job back into the queue; Slurm then ends its processes."""
        if dist.get_rank() == 0 and "SLURM_JOB_ID" in os.environ:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        signal.pause()  # a task that ended first would have submitit call the job done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("by-hand"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--submit", action="store_true")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="of each node")
    parser.add_argument("--gpus", type=int, default=0, help="of each node")
    parser.add_argument("--mem-gb", type=int, default=8, help="of each node")
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--interface", default="", help="of the network between the nodes, such as ib0")
    parser.add_argument("--partition")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    training = Training(args.folder.absolute(), args.epochs, args.save_every)
    if not args.submit:
        training()
        return
    import submitit

    # A job could not unpickle a class of `__main__`.
    job = import_module("by_hand").Training(training.folder, args.epochs, args.save_every)
    executor = submitit.AutoExecutor(args.folder / "submitit", slurm_python=sys.executable)
    executor.update_parameters(
        name="by-hand",
        nodes=args.nodes,
        tasks_per_node=args.workers,
        mem_gb=args.mem_gb,
        timeout_min=args.minutes,
        slurm_partition=args.partition,
        slurm_signal_delay_s=120,
        slurm_setup=[f"export GLOO_SOCKET_IFNAME={args.interface} NCCL_SOCKET_IFNAME={args.interface}"],
        **({"gpus_per_node": args.gpus} if args.gpus else {}),
    )
    print(executor.submit(job).job_id)


if __name__ == "__main__":
    main()
