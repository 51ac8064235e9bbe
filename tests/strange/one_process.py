"""Whole trainings in the test's own process: real loop, loader, checkpoints and records, a world of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec, DataSpec, EvalSpec, LogSpec, RunSpec, TrainSpec
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.training import Training, assemble_training
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state import rng
from ddp_hpc.train.stop import StopFlag
from tests.unit.made_state import alone

_SECTIONS = {"train": TrainSpec, "checkpoint": CheckpointSpec, "data": DataSpec, "eval": EvalSpec, "log": LogSpec}


def prepared(folder: Path, recipe: Recipe, **keys: Any) -> Training:
    """Return the next attempt of the run in `folder`; a key is written `train__lr=0.1`."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    sections["train"] |= {"global_batch_size": 4, "epochs": 1000, "max_steps": 12}
    sections["log"] |= {"every_steps": 1}
    plain = {}
    for key, value in keys.items():
        section, _, name = key.partition("__")
        if name:
            sections[section][name] = value
        else:
            plain[key] = value
    made: dict[str, Any] = {name: kind(**sections[name]) for name, kind in _SECTIONS.items()}
    spec = RunSpec(name=folder.name, runs_dir=str(folder.parent), **made, **plain)
    run = RunDir(folder)
    run.console.parent.mkdir(parents=True, exist_ok=True)
    run.config.write_text(f"name: {run.name}\n")
    attempt = ownership.next_attempt(run)
    ownership.claim_run(run, attempt)
    rng.seed_everything("rank", spec.seed, 0, 0)
    return assemble_training(spec, recipe, run, alone(), attempt=attempt, stop=StopFlag(run.stop_request))


def trained(folder: Path, recipe: Recipe, *, change: Callable[[Training], object] = id, **keys: Any) -> Training:
    """Train to the last step, or until it is told to stop, and return what it came to; `change` it first."""
    training = prepared(folder, recipe, **keys)
    change(training)
    try:
        train(training)
    finally:
        training.recorder.close()
    return training
