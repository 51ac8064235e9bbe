"""Whether two attempts of a run compute the same: with the same data, settings and code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_hpc.config.yaml_text import read_yaml
from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir.inputs import CHANGES_NO_NUMBER, AttemptInputs


def what_differs(before: AttemptInputs | None, after: AttemptInputs | None) -> str:
    """Return what differs between the inputs of two attempts, as a text; empty if nothing that may change a number does."""
    if before is None or after is None:
        return "what one of them computed with is not recorded"
    if before.world_size != after.world_size:
        return f"{before.world_size} and {after.world_size} ranks"
    try:
        mine, others = _settings(before.config), _settings(after.config)
    except (ConfigError, AttributeError):  # another version wrote it, or it is damaged
        return "the recorded configuration of one of them cannot be read"
    keys = sorted(key for key in {*mine, *others} if mine.get(key) != others.get(key))
    if keys:
        return f"`{keys[0]}` of the configuration"
    # A job's copy of the code lies in a directory of its own, so files are known by what is in them.
    return "" if sorted(before.code.values()) == sorted(after.code.values()) else "the user's code"


def _settings(config: str) -> Mapping[str, Any]:
    """Return the sections of a configuration that may change a number."""
    found = read_yaml(config, "the configuration of an attempt") or {}
    return {key: value for key, value in found.items() if key not in CHANGES_NO_NUMBER}
