"""Take a PyTorch training from a laptop to a Slurm cluster, and survive what the cluster does to it."""

from __future__ import annotations

import sys

# `python -m ddp_hpc...` puts the working directory first, where a `json.py` would be imported in the place of Python's. This
# is the first line of ours that runs, so nothing of that can have happened. (From Python 3.11 on, the option -P does the same.)
_words = {word.partition(".")[0] for word in sys.orig_argv} if sys.argv[:1] == ["-m"] else set()
if "ddp_hpc" in _words and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from ddp_hpc.moved import Forward  # noqa: E402  after the line above

sys.meta_path.insert(0, Forward)

__version__ = "0.9.0"

TYPE_CHECKING = False
"""Type checkers take it as true. `typing` is not imported for it: a command that is interrupted meanwhile would print a traceback."""
if TYPE_CHECKING:
    from typing import Any

    from ddp_hpc.base.errors import ConfigError, DdpHpcError
    from ddp_hpc.launch.api import Job, load, submit
    from ddp_hpc.run.spec import (
        CheckpointSpec,
        ContainerSpec,
        DataSpec,
        DebugSpec,
        EvalSpec,
        IntegritySpec,
        LogSpec,
        LrScheduleSpec,
        NetworkSpec,
        NotifySpec,
        OptimizerSpec,
        PreflightSpec,
        ProfileSpec,
        RecipeSpec,
        ResourcesSpec,
        RestartSpec,
        RunSpec,
        ScriptSpec,
        SlurmSpec,
        SnapshotSpec,
        StageSpec,
        TorchrunSpec,
        TrainSpec,
    )
    from ddp_hpc.train.attached.run import attach
    from ddp_hpc.train.recipe import Recipe
    from ddp_hpc.train.state.loading import Checkpoint, load_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointSpec",
    "ConfigError",
    "ContainerSpec",
    "DataSpec",
    "DebugSpec",
    "DdpHpcError",
    "EvalSpec",
    "IntegritySpec",
    "Job",
    "LogSpec",
    "LrScheduleSpec",
    "NetworkSpec",
    "NotifySpec",
    "OptimizerSpec",
    "PreflightSpec",
    "ProfileSpec",
    "Recipe",
    "RecipeSpec",
    "ResourcesSpec",
    "RestartSpec",
    "RunSpec",
    "ScriptSpec",
    "SlurmSpec",
    "SnapshotSpec",
    "StageSpec",
    "TorchrunSpec",
    "TrainSpec",
    "attach",
    "load",
    "load_checkpoint",
    "submit",
]

_HOMES = {
    **dict.fromkeys(("Job", "load", "submit"), "ddp_hpc.launch.api"),
    **dict.fromkeys(("ConfigError", "DdpHpcError"), "ddp_hpc.base.errors"),
    "Recipe": "ddp_hpc.train.recipe",
    **dict.fromkeys(("Checkpoint", "load_checkpoint"), "ddp_hpc.train.state.loading"),
    "attach": "ddp_hpc.train.attached.run",
}
"""Name -> its module, where that is not `ddp_hpc.run.spec`."""


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `ddp-hpc --help` waits for none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "ddp_hpc.run.spec")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
