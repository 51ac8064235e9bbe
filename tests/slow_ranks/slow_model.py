"""A small training in which one rank is slow in one place: as a recipe, and as a script that knows nothing of ddp_hpc."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset


class Sleepy(torch.autograd.Function):
    """Sleeps in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Data(Dataset[Any]):
    """Samples that take a while to load."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return torch.full((32,), index % 7 / 100), torch.ones(4)


class Net(nn.Module):
    """Waits in place of a GPU's work in its forward and its backward pass, and computes a little on top."""

    def __init__(self, forward_s: float, backward_s: float, work: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 4)
        self._forward_s, self._backward_s, self._work = forward_s, backward_s, work

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward_s)
        for _ in range(self._work):
            torch.mm(torch.ones(192, 192), torch.ones(192, 192))
        hidden: Tensor = Sleepy.apply(self.first(x), self._backward_s)
        out: Tensor = self.last(hidden)
        return out


def seconds_of(place: str, rank: int, *, where: str, slow: int, delay: float, base: float) -> float:
    return base / 3 + (delay if rank == slow and place == where else 0.0)


def parts(where: str, slow: int, delay: float, base: float, work: int) -> tuple[Data, Net]:
    rank = int(os.environ["RANK"])
    data, forward, backward = (
        seconds_of(place, rank, where=where, slow=slow, delay=delay, base=base)
        for place in ("data", "forward", "backward")
    )
    return Data(data), Net(forward, backward, work)


def build(**args: Any) -> Any:
    from ddp_hpc.train.recipe import Recipe

    data, model = parts(
        args["where"], int(args["slow"]), float(args["delay"]), float(args["base"]), int(args.get("work", 0))
    )
    return Recipe(model=model, train_data=data, loss=nn.functional.mse_loss)


def main() -> None:
    where, slow, delay, base, work, steps = sys.argv[1:7]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, net = parts(where, int(slow), float(delay), float(base), int(work))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(int(steps)):
        inputs, targets = data[step]
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step + 1}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
