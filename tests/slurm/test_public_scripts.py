"""Scripts in the shapes of PyTorch's public examples, as they are: preempted, killed, and trained to their end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from tests.slurm.disturbed_scripts import SCRIPTS, Script, assert_came_back_once_each, preempt_and_kill
from tests.slurm.runs import LoginNode

Weights = dict[str, torch.Tensor]
EPOCHS = 4


@dataclass(frozen=True)
class Shape:
    """A script, and what its user finds afterwards."""

    script: Script
    weights: Callable[[Path], Weights]
    """Reads what it has trained, from the directory that it was submitted from."""
    resumed: str
    """How it says at which epoch it goes on."""
    is_exact: bool
    """Whether it comes to the bits of the undisturbed one. With four ranks, DDP adds in another order in each process's first step."""


def file(name: str, key: str) -> Callable[[Path], Weights]:
    def read(folder: Path) -> Weights:
        state: dict[str, Any] = torch.load(folder / name)
        # Each rank saves its own statistics of batch norm, to one file: whose they are is chance, with and without a disturbance.
        return {name: value for name, value in state[key].items() if "running_" not in name}

    return read


def newest_folder(folder: Path) -> Weights:
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    weights: Weights = torch.load(newest / "model_state_dict.pt")
    return weights


IMAGENET_OPTIONS = ("--dist-url", "env://", "--dist-backend", "gloo", "--seed", "1", "--resume", "checkpoint.pth.tar")
SHAPES = {
    "imagenet": Shape(
        Script(
            files=SCRIPTS / "imagenet.py",
            command=("python", "imagenet.py", "--dummy", "200", *IMAGENET_OPTIONS, "--epochs", str(EPOCHS)),
            saved="checkpoint.pth.tar",
            settle_s=0.2,
        ),
        weights=file("checkpoint.pth.tar", "state_dict"),
        resumed=r"loaded checkpoint 'checkpoint.pth.tar' \(epoch (\d+)\)",
        is_exact=True,
    ),
    "mingpt": Shape(
        Script(
            files=SCRIPTS / "mingpt",
            command=("python", "mingpt/main.py", "text.txt", str(EPOCHS)),
            saved="gpt_snapshot.pt",
            settle_s=0.2,
            data={"text.txt": "".join(topics[name] for name in sorted(topics))[:60_000]},
        ),
        weights=file("gpt_snapshot.pt", "model_state"),
        resumed=r"Resuming training from snapshot at Epoch (\d+)",
        is_exact=True,
    ),
    "fsdp2": Shape(
        Script(
            files=SCRIPTS / "fsdp2.py",
            command=("python", "fsdp2.py", "--rounds", str(EPOCHS), "--steps", "20"),
            saved="checkpoints/*/*",
            settle_s=0.2,
            workers_per_node=2,
        ),
        weights=newest_folder,
        resumed=r"Loaded (\d+) rounds",
        is_exact=True,
    ),
    "multinode": Shape(
        Script(
            files=SCRIPTS / "multinode.py",
            command=("python", "multinode.py", str(EPOCHS), "--epoch-s", "2"),
            saved="snapshot.pt",
            workers_per_node=2,
        ),
        weights=file("snapshot.pt", "MODEL_STATE"),
        resumed=r"Resuming training from snapshot at Epoch (\d+)",
        is_exact=False,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_a_public_script_that_is_preempted_and_killed_goes_on_from_its_last_epoch_to_the_weights_of_an_undisturbed_one(
    name: str, login: LoginNode
) -> None:
    shape = SHAPES[name]

    place, calm = preempt_and_kill(login, shape.script)

    attempts = assert_came_back_once_each(place)
    logs = [place.run("it").rank_log(one.attempt, 0).read_text() for one in attempts]
    epochs = [[int(epoch) for epoch in re.findall(shape.resumed, log)] for log in logs]
    assert epochs[0] == []
    [second], [third] = epochs[1:]
    assert 1 <= second < third < EPOCHS
    assert attempts[0].first_step < attempts[1].first_step < attempts[2].first_step < (attempts[2].last_step or 0)
    found, undisturbed = shape.weights(place.folder), shape.weights(calm.folder)
    assert found.keys() == undisturbed.keys()
    tolerance = 0.0 if shape.is_exact else 1e-5
    for key, value in found.items():
        torch.testing.assert_close(value, undisturbed[key], rtol=tolerance, atol=tolerance)
