"""A run's `config.yaml` of version 0.1.0, with a value of its own for every key there was: tests/data/config."""

from __future__ import annotations

from pathlib import Path

import yaml

from ddp_hpc.config import flat, load_resolved, resolve
from ddp_hpc.config.keys import key_of

KEPT = Path(__file__).parents[1] / "data" / "config" / "every-key.yaml"
SINCE_THEN = {
    "script",
    "notify",
    "integrity",
    "debug",
    "preflight",
    "log.recorders",
    "log.grad_norm",
    "checkpoint.min_interval_s",
    "checkpoint.max_interval_s",
    "profile",
}
"""Sections and keys that version 0.1.0 did not have."""
CONFLICTING = {"stage.archive"}
"""Keys that the file leaves at their default: they exclude another that it sets."""


def test_a_run_directory_of_version_0_1_0_holds_the_values_that_it_held_then() -> None:
    values = flat(load_resolved(KEPT))

    written = yaml.safe_load(KEPT.read_text())
    for key, value in values.items():
        if {key, key.partition(".")[0]} & SINCE_THEN:
            continue
        of_file = written
        for part in key.split("."):
            of_file = of_file[part]
        assert value == (tuple(of_file) if isinstance(value, tuple) else of_file), key
        assert value != default_of(key) or key in CONFLICTING, f"{key} has its default: it shows nothing"


def default_of(key: str) -> object:
    """Return the default of a key; of one below an open key, that there is none."""
    found = key_of(key)
    assert found is not None, key
    return found.default


def test_it_can_be_submitted_again(tmp_path: Path) -> None:
    again = resolve(KEPT, [f"runs_dir={tmp_path}", "name=again"], {"DDP_HPC_SITE_PROFILE": ""}).spec

    assert (again.name, again.train, again.resources) == (
        "again",
        load_resolved(KEPT).train,
        load_resolved(KEPT).resources,
    )
