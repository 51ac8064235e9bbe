"""What the checks train: a small network with one fault or one question, by name (`recipe.args.how`)."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from ddp_hpc.train.recipe import Recipe

NUM_SAMPLES, WIDTH, NUM_CLASSES = 640, 16, 10


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples that can be learned, one of them slow for rank 1 if asked."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
        self.targets = self.inputs[:, :NUM_CLASSES].argmax(dim=1)
        if how == "label":
            self.targets[333] = 77

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int | range) -> tuple[Tensor, Tensor]:
        if self._how == "slow data" and _rank() == 1:
            time.sleep(0.0015)
        return self.inputs[index], self.targets[index]


class Faulty(nn.Module):
    """Two layers; its forward does what `how` says."""

    def __init__(self, how: str, report: str) -> None:
        super().__init__()
        self._how, self._report, self._step = how, report, 0
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, NUM_CLASSES))
        self.embedding = nn.Embedding(100, NUM_CLASSES) if how == "index" else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self._how in FORWARDS:
            self._step += 1
            FORWARDS[self._how](self, inputs)
        outputs: Tensor = self.layers(inputs)
        if self.embedding is not None:
            outputs = outputs + self.embedding((inputs[:, 0] * 0).long() + 100)
        return outputs

    def sleep(self, _: Tensor, *, seconds: float, after: int = 0, ranks: Collection[int] = (1,)) -> None:
        if _rank() in ranks and self._step > after:
            time.sleep(seconds)

    def flip(self, _: Tensor) -> None:
        """Flip one bit of one weight, as a faulty memory does."""
        if _rank() == 1 and self._step == 60:
            with torch.no_grad():
                self.layers[0].weight.view(torch.int32)[3, 5] ^= 1 << 21  # type: ignore[operator]

    def use_up(self, inputs: Tensor) -> None:
        self.kept = [torch.empty(16 << 30, dtype=torch.uint8, device=inputs.device) for _ in range(12)]

    def report_flags(self, inputs: Tensor) -> None:
        if self._step == 1:
            _write(self._report, {**tf32_flags(), "device": inputs.device.type})


FORWARDS: Mapping[str, Callable[[Faulty, Tensor], None]] = {
    "hang": partial(Faulty.sleep, seconds=1000.0, after=40),
    "paced": partial(Faulty.sleep, seconds=0.01, ranks=(0, 1)),
    "slow host": partial(Faulty.sleep, seconds=0.01),
    "flip": Faulty.flip,
    "memory": Faulty.use_up,
    "flags": Faulty.report_flags,
}


def build(how: str = "", report: str = "", fused: bool | None = None) -> Recipe:
    """What `recipe.target` names."""
    if how == "forked":
        _report_worker(report)
    torch.manual_seed(0)
    model: nn.Module = Faulty(how, report)
    data: Dataset[Any] = Numbers(how)
    loss: Any = functional.cross_entropy
    optimizer: Any = None
    if how == "on device":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        numbers = Numbers(how)
        data = TensorDataset(numbers.inputs.to(device), numbers.targets.to(device))
    elif how == "compiled":
        model, loss = model.layers, partial(_loss_that_counts_graphs, report=report)  # type: ignore[assignment]
    elif how == "sgd":
        # The first losses are so large that their gradients overflow in fp16 at the first loss scale.
        loss = _large_loss
        optimizer = partial(_sgd, fused=fused)
    held_out = TensorDataset(*Numbers("")[range(64)])
    return Recipe(model=model, train_data=data, eval_data=held_out, loss=loss, optimizer=optimizer)


def tf32_flags() -> dict[str, Any]:
    """Return what PyTorch is set to for products and convolutions in fp32."""
    return {"matmul": torch.get_float32_matmul_precision(), "convolutions": torch.backends.cudnn.allow_tf32}


def _large_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.float(), targets) * 64


def _sgd(model: nn.Module, lr: float, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr / 64, momentum=0.9, fused=fused)


def _loss_that_counts_graphs(outputs: Tensor, targets: Tensor, *, report: str) -> Tensor:
    """Write down how many graphs this worker has compiled so far."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    _write(f"{report}.{_rank()}", {"graphs": counters["stats"]["unique_graphs"]})
    return functional.cross_entropy(outputs, targets)


def _report_worker(report: str) -> None:
    """Write down what this worker is, once it has all-reduced on its device."""
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    began = time.monotonic()
    values = torch.full((1 << 20,), 2.0, device=device)
    dist.all_reduce(values)
    seen = {
        "all_reduced": values.unique().tolist(),
        "first_all_reduce_s": time.monotonic() - began,
        "backend": dist.get_backend_config(),
        "process": " ".join(psutil.Process().cmdline()),
    }
    _write(report, seen)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _write(path: str, content: dict[str, Any]) -> None:
    beside = Path(f"{path}.tmp")
    beside.write_text(json.dumps(content))
    beside.replace(path)
