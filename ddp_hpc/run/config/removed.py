"""The table of keys that earlier versions had: since when each is gone, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_hpc.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RemovedKey:
    """A key that no longer exists."""

    since: str
    """The date from which on versions do not have it."""
    instead: str
    """What to do instead: one or more sentences."""
    default: Any = None
    """Its default until then."""


_REMOVED_SBATCH_FLAGS = ("mail_type", "mail_user", "comment", "reservation")
"""Keys of `slurm` that are flags of sbatch."""
REMOVED_KEYS: Mapping[str, RemovedKey] = {
    "integrity.recompute_every_steps": RemovedKey(
        since="2026-11-26",
        instead="`ddp-hpc audit RUN` computes steps of a run again afterwards and says whether it computed right; the ranks' weights "
        "are compared as before (`integrity.every_steps`).",
    ),
    "preflight.all_reduce": RemovedKey(
        since="2026-11-26",
        default=False,
        instead="`preflight.enabled` still checks that the nodes reach each other, as `ddp-hpc doctor --nodes` does; NVIDIA's nccl-tests "
        "measure how fast an all-reduce is, and whether its sums are right (docs/doctor.md).",
    ),
    "slurm.hasten": RemovedKey(
        since="2026-11-27",
        default="auto",
        instead="commands that wait for a run change nothing in its job; `ddp-hpc requeue RUN --now` starts a requeued job before "
        "Slurm's delay is over.",
    ),
    "steps": RemovedKey(
        since="2026-11-26",
        instead="`ddp-hpc submit CONFIG --after RUN` submits a run that waits for another one; on one machine, use "
        "`ddp-hpc submit A --wait && ddp-hpc submit B`.",
    ),
    "profile.command": RemovedKey(
        since="2026-11-26", default="nsys", instead="`profile.kind=torch` records the kernels of a GPU, too."
    ),
    **{
        f"slurm.{flag}": RemovedKey(
            since="2026-11-27",
            instead=f"`slurm.extra.{flag}` takes the same value (in quotes where it looks like a number), as it does for each flag of sbatch that has no key.",
        )
        for flag in _REMOVED_SBATCH_FLAGS
    },
    "log.tensorboard": RemovedKey(
        since="2026-11-27", default=False, instead="`log.recorders=[tensorboard]` does the same."
    ),
    "site.report_notes": RemovedKey(
        since="2026-11-27",
        instead="`ddp-hpc status RUN --json` has the numbers for a program of the site; reports have our notes alone.",
    ),
}
"""By name."""


def removed_key_error(name: str, location: str) -> ConfigError | None:
    """Return the error for a key that a source sets although it was removed; None for any other name."""
    one = REMOVED_KEYS.get(name)
    if one is None:
        return None
    return ConfigError(f"`{name}` ({location}) is no longer a key, since {one.since}. Leave it out: {one.instead}")


def drop_removed(content: dict[Any, Any]) -> dict[str, Any]:
    """Take removed keys out of what a run's own configuration holds; return the values of those that were not at their default.

    Flags of sbatch go to `slurm.extra`, where they mean the same.
    """
    dropped: dict[str, Any] = {}
    for name, one in REMOVED_KEYS.items():
        *sections, leaf = name.split(".")
        holder: Any = content
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and leaf in holder:
            value = holder.pop(leaf)
            if value != one.default and leaf in _REMOVED_SBATCH_FLAGS:
                holder["extra"] = {leaf: value, **(holder.get("extra") or {})}
            elif value != one.default:
                dropped[name] = value
    return dropped
