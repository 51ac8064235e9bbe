"""Whole trainings of a few steps within this process, and the same by a plain PyTorch loop that knows nothing of ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    IntegritySpec,
    LogSpec,
    LrScheduleSpec,
    ResourcesSpec,
    RunSpec,
    TrainSpec,
)
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.training import Training, assemble_training
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.sealed_store import SealedStore
from ddp_hpc.train.state import training_state
from ddp_hpc.train.stop import StopConsensus, StopFlag

torch.optim.SGD([torch.zeros(1)])  # imports a thousand modules, once instead of in each forked rank

BATCH = 4
EPOCHS = 3
LR = 0.05


class StopAtMeeting(StopFlag):
    """Tells to stop when it is asked for the so-manieth time; the ranks meet after steps 1, 2, 4 and so on, or more often."""

    def __init__(self, run: RunDir, number: int) -> None:
        super().__init__(run.stop_request)
        self._left = number

    def is_set(self, *, look_at_file: bool) -> bool:
        self._left -= 1
        return self._left == 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, and the keys that it needs."""

    recipe: Callable[[], Recipe]
    train: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    log_every: int = 4
    save_every: int | Literal["auto"] = 5
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    compare_every: int | None = 50
    plain_calls_train: bool = False
    """Whether the plain loop calls `model.train()` first, as a model needs that freezes itself there."""

    def spec(self, world_size: int = 1) -> RunSpec:
        keys: dict[str, Any] = {"epochs": EPOCHS, "global_batch_size": BATCH, "lr": LR, "record_samples": True}
        return RunSpec(
            name="strange",
            train=TrainSpec(**(keys | dict(self.train))),
            lr_schedule=LrScheduleSpec(name="constant"),
            data=DataSpec(**self.data),
            eval=EvalSpec(batch_size=3),
            log=LogSpec(every_steps=self.log_every),
            checkpoint=CheckpointSpec(every_steps=self.save_every, **self.checkpoint),
            integrity=IntegritySpec(every_steps=self.compare_every),
            resources=ResourcesSpec(workers_per_node=world_size),
        )


def begin(case: Case, group: Group, path: Path, *, attempt: int = 0, stop_at: int = 0) -> Training:
    """Prepare an attempt, seeded as a worker is."""
    run = RunDir(path)
    if group.rank_info.is_rank_zero:
        path.mkdir(parents=True, exist_ok=True)
        run.config.touch()
        ownership.claim_run(run, attempt)
    spec = case.spec(group.rank_info.world_size)
    torch.manual_seed(1)
    recipe = case.recipe()
    t = assemble_training(
        spec, recipe, run, group_of(group, f"{path}/{attempt}"), attempt=attempt, stop=StopFlag(run.stop_request)
    )
    if stop_at:
        flag = StopAtMeeting(run, stop_at + 1)  # the ranks meet once before the first step, too
        t.stop_consensus = StopConsensus(t.group, flag, is_fenced=lambda: False)
    torch.manual_seed(100 + group.rank_info.rank)
    return t


def group_of(group: Group, prefix: str) -> Group:
    """Return the group with stores of an attempt's own, as processes that are started anew have: no word of another save is in them."""
    stores = [
        SealedStore(torch.distributed.PrefixStore(prefix, sealed._store), "")
        for sealed in (group.store, group.side_store)
    ]
    return Group(group.rank_info, group.device, *stores)


def walk(group: Group, case: Case, path: Path) -> dict[str, Any]:
    """Train in one go; return everything that a checkpoint of the end holds."""
    t = begin(case, group, path)
    assert train(t)
    return everything(t)


def walk_in_parts(group: Group, case: Case, path: Path) -> dict[str, Any]:
    """Train, be told to stop twice, and come back each time from the checkpoint with objects made anew."""
    for attempt, meeting in enumerate((2, 3)):
        t = begin(case, group, path, attempt=attempt, stop_at=meeting)
        assert not train(t), "the run was finished before it was told to stop"
        close(t)
    t = begin(case, group, path, attempt=2)
    assert train(t)
    return everything(t)


def close(t: Training) -> None:
    t.recorder.close()
    for observer in t.observers:
        observer.close()


def everything(t: Training) -> dict[str, Any]:
    """Close the records of a training; return all that a checkpoint of it holds now."""
    close(t)
    named = {name: tensor.detach().clone() for name, tensor, _ in training_state.tensors(t.state)}
    return {**named, "numbers": training_state.non_tensor_state(t.state)}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not the same to the bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or (not torch.equal(one[name], other[name]) if isinstance(one[name], Tensor) else one[name] != other[name])
    ]


def weights(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights and buffers, and what a rank has of its own in their place."""
    return {
        name.partition("model/")[2]: value for name, value in found.items() if re.match(r"(rank\.\d+/)?model/", name)
    }


def sample_ids(path: Path, world_size: int, *, attempt: int = 0) -> list[list[int]]:
    """Return the samples of every step as the run has written them down, those of all ranks dealt back together."""
    steps: dict[int, list[list[int]]] = {}
    for rank in range(world_size):
        for line in RunDir(path).rank_samples(attempt, rank).read_text().splitlines():
            record = json.loads(line)
            steps.setdefault(record["step"], []).append(record["samples"])
    return [_dealt_back(steps[step]) for step in sorted(steps)]


def _dealt_back(ranks: list[list[int]]) -> list[int]:
    longest = max(map(len, ranks))
    return [rank[place] for place in range(longest) for rank in ranks if place < len(rank)]


def in_plain_torch(case: Case, batches: list[list[int]]) -> nn.Module:
    """Train by the simplest loop there is, on the samples that are given; return the model."""
    torch.manual_seed(1)
    recipe = case.recipe()
    model = recipe.model
    if case.plain_calls_train:
        model.train()
    optimizer = (
        recipe.optimizer(model, LR)
        if recipe.optimizer
        else torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=LR)
    )
    torch.manual_seed(100)
    for ids in batches:
        inputs, targets = recipe.inputs_and_targets(default_collate([recipe.train_data[index] for index in ids]))
        model.zero_grad()
        recipe.loss(model(inputs), targets).backward()
        if "grad_clip_norm" in case.train:
            trained = [value for options in optimizer.param_groups for value in options["params"]]
            nn.utils.clip_grad_norm_(trained, case.train["grad_clip_norm"])
        optimizer.step()
    return model
