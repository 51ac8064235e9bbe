"""Take a PyTorch training from a laptop to a Slurm cluster, and survive what the cluster does to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ddp_hpc.api import Job, submit
    from ddp_hpc.spec import RecipeSpec, ResourcesSpec, RunSpec, SlurmSpec, TrainSpec

__all__ = ["Job", "RecipeSpec", "ResourcesSpec", "RunSpec", "SlurmSpec", "TrainSpec", "submit"]

_HOMES = {"Job": "ddp_hpc.api", "submit": "ddp_hpc.api"}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `ddp-hpc --help` waits for none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "ddp_hpc.spec")), name)
