"""Whether two attempts of a run compute the same: with the same data, settings and code, on the same kind of processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.yaml_text import read_yaml
from ddp_hpc.run.run_dir.differences import Difference
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import NUMERICALLY_NEUTRAL_KEYS, AttemptInputs, read_inputs
from ddp_hpc.run.run_dir.software_versions import cpu_name


def why_not_comparable(run: RunDir, before: Difference, *, attempt: int, world_size: int, processor: str) -> str:
    """Return what this attempt computes with that the attempt of a difference had not; empty if both have the same."""
    num = len(before.digests)
    if num != world_size:
        return f"attempt {before.attempt} had {num} ranks, this attempt has {world_size}"
    if processor not in before.processors:
        return f"this attempt runs on another kind of processor ({processor})"
    differs = what_differs(*(read_inputs(run, number) for number in (before.attempt, attempt)))
    return f"compared with attempt {before.attempt}, {differs}" if differs else ""


def processor_of(device: torch.device) -> str:
    """Return the kind of processor that this rank computes on; processors of several kinds may round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def what_differs(before: AttemptInputs | None, after: AttemptInputs | None) -> str:
    """Return what differs between the inputs of two attempts, as a text; empty if nothing that may change a number does."""
    if before is None or after is None:
        return "the inputs of one of the two attempts are not recorded"
    if before.world_size != after.world_size:
        return f"the number of ranks differs: {before.world_size} and {after.world_size}"
    try:
        mine, others = _settings(before.config), _settings(after.config)
    except (ConfigError, AttributeError):  # another version wrote it, or it is damaged
        return "the recorded configuration of one of the two attempts cannot be read"
    keys = sorted(key for key in {*mine, *others} if mine.get(key) != others.get(key))
    if keys:
        return f"`{keys[0]}` of the configuration differs"
    # A job's copy of the code lies in a directory of its own, so files are known by what is in them.
    return "" if sorted(before.code.values()) == sorted(after.code.values()) else "the user's code differs"


def _settings(config: str) -> Mapping[str, Any]:
    """Return the sections of a configuration that may change a number."""
    found = read_yaml(config, "the configuration of an attempt") or {}
    return {key: value for key, value in found.items() if key not in NUMERICALLY_NEUTRAL_KEYS}
