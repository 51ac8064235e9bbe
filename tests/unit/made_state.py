"""Small training states, and groups of ranks that live in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore

from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.data.sample_order import Position
from ddp_hpc.train.process_group import Group, RankInfo
from ddp_hpc.train.sealed_store import SealedStore
from ddp_hpc.train.state import rng
from ddp_hpc.train.state.checkpoint import Checkpointer
from ddp_hpc.train.state.moving_average import MovingAverage
from ddp_hpc.train.state.optimizer_state import SavedTensor
from ddp_hpc.train.state.training_state import Restoration, TrainingState

CPU = torch.device("cpu")
SEED = 7


class Net(nn.Module):
    """A few parameters, and buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(rows)).square().mean()  # type: ignore[no-any-return]  # a Tensor


def make_state(*, rank: int = 0, world_size: int = 1, steps: int = 0, optimizer: str = "adamw", **more: Any) -> Any:
    """Return the state of a model that has been trained for so many steps; `ema=True` averages its weights."""
    torch.manual_seed(0)
    model = Net()
    made: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=0.1)
    )
    ema = MovingAverage(model, 0.9) if more.pop("ema", False) else None
    state = TrainingState(
        model=model,
        optimizer=made,
        device=CPU,
        rank=rank,
        world_size=world_size,
        loss_meter=torch.zeros(()),
        ema=ema,
        **more,
    )
    for _ in range(steps):
        take_step(state)
    return state


def put_back(state: TrainingState, saved: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    """Restore `state` from tensors and numbers as a checkpoint holds them."""
    kinds = {name: SavedTensor(tensor.shape, tensor.dtype) for name, tensor in saved.items()}
    restoration = Restoration(state, kinds, plain, seed=SEED)
    for name, tensor in restoration.into.items():
        tensor.detach().copy_(saved[name])
    restoration.finish()


def take_step(state: TrainingState) -> None:
    """Train on random rows, so that the generators are part of what happens."""
    loss = state.model(torch.randn(5, 3))
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.loss_meter.add_(loss.detach())
    if state.ema is not None:
        state.ema.update(state.model)
    state.position = Position(step=state.position.step + 1, samples_in_epoch=5 * (state.position.step + 1))


def make_group(store: HashStore, *, rank: int = 0, world_size: int = 1) -> Group:
    """Return what one rank knows of the others."""
    place = RankInfo(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
    )
    return Group(place, CPU, SealedStore(store, ""), SealedStore(store, ""))


def alone() -> Group:
    return make_group(HashStore())


def make_checkpointers(
    run: RunDir,
    *,
    world_size: int = 1,
    attempt: int = 0,
    on_result: Callable[..., object] = lambda *_: None,
    **keep: Any,
) -> list[Checkpointer]:
    """Return the checkpointers of all ranks of one attempt, which claims the run if it has not yet."""
    if attempt not in ownership.claiming_attempts(run):
        ownership.claim_run(run, attempt)
    store = HashStore()
    return [
        Checkpointer(
            run,
            make_group(store, rank=rank, world_size=world_size),
            attempt=attempt,
            keep=CheckpointSpec(**{"keep_last": 100, **keep}),
            on_result=on_result,
        )
        for rank in range(world_size)
    ]


def save(run: RunDir, *steps: int, world_size: int = 1, attempt: int = 0, **more: Any) -> None:
    """Train, and commit a checkpoint after each of `steps`, with a shard a rank."""
    checkpointers = make_checkpointers(run, world_size=world_size, attempt=attempt)
    states = [make_state(rank=rank, world_size=world_size, **more) for rank in range(world_size)]
    for step in steps:
        for state in states:
            rng.seed_everything("made", step)
            while state.position.step < step:
                take_step(state)
        for checkpointer, state in zip(checkpointers, states, strict=True):
            checkpointer.save(state)
        for checkpointer, state in reversed(list(zip(checkpointers, states, strict=True))):
            checkpointer.save_and_wait(state)  # rank zero last: it stays until the others know
