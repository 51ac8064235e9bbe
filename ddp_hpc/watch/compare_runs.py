"""Compares runs: filters and sorts them, and finds the keys in which their configurations differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.keys import key_of, parse_text, unknown_key_error
from ddp_hpc.run.config.resolve import flat_spec, load_resolved
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.status import RunStatus, State

_IDENTITY_KEYS = frozenset({"name", "runs_dir"})
"""Keys that differ between any two runs, and say nothing about the training."""
_STATES = get_args(State)
_COLUMNS: Mapping[str, Callable[[RunStatus], Any]] = {
    "name": lambda status: status.run,
    "state": lambda status: status.state,
    "step": lambda status: status.step,
    "loss": lambda status: status.loss,
    "checkpoint": lambda status: status.last_checkpoint,
    "attempt": lambda status: status.attempt,
    "age": lambda status: status.age_s,
}


def config_values(run: RunDir) -> dict[str, Any]:
    """Return a run's configuration, key by key; empty if it cannot be read."""
    try:
        return flat_spec(load_resolved(run.config))
    except ConfigError:
        return {}


@cache
def values_of(path: str) -> Mapping[str, Any]:
    """Return the same of a run's directory, read once: that takes longer than all else of a run."""
    return config_values(RunDir(Path(path)))


def filter_runs(runs: Sequence[RunStatus], conditions: Sequence[str]) -> list[RunStatus]:
    """Return the runs that meet all conditions: `state=running`, `train.lr=0.1`."""
    tests = [_parse_filter(condition) for condition in conditions]
    return [run for run in runs if all(test(run) for test in tests)]


def _parse_filter(condition: str) -> Callable[[RunStatus], bool]:
    name, equals, text = condition.partition("=")
    if not equals:
        raise ConfigError(
            f"`--filter {condition}` is not a condition. Write KEY=VALUE or state=STATE, such as `train.lr=0.1`."
        )
    if name == "state":
        if text not in _STATES:
            raise ConfigError(f"`--filter {condition}` names an unknown state. The states are {', '.join(_STATES)}.")
        return lambda run: run.state == text
    key = key_of(name)
    if key is None:
        raise unknown_key_error(name, f"--filter {condition}")
    wanted = parse_text(key, text, f"--filter {condition}")
    return lambda run: name in values_of(run.path) and _comparable(values_of(run.path)[name]) == _comparable(wanted)


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def sort_runs(runs: Sequence[RunStatus], by: str, *, is_reversed: bool) -> list[RunStatus]:
    """Return the runs, sorted by a column, an evaluation metric or a key; those without a value come last."""
    is_metric = any(by in run.metrics for run in runs)
    if by not in _COLUMNS and not is_metric and key_of(by) is None:
        metrics = sorted({name for run in runs for name in run.metrics})
        raise ConfigError(
            f"`--sort {by}` names no column, metric or key. Use one of {', '.join([*_COLUMNS, *metrics])}, or a key such as "
            "`train.lr`."
        )

    def value(run: RunStatus) -> Any:
        of_run = run.metrics if is_metric else {} if by in _COLUMNS else values_of(run.path)
        found = _COLUMNS[by](run) if by in _COLUMNS else of_run.get(by)
        return None if isinstance(found, float) and math.isnan(found) else found

    known = [run for run in runs if value(run) is not None]
    is_numeric = all(isinstance(value(run), (int, float)) for run in known)
    ordered = sorted(known, key=lambda run: value(run) if is_numeric else str(value(run)), reverse=is_reversed)
    return [*ordered, *(run for run in runs if value(run) is None)]


def differing_keys(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all these configurations; those that cannot be read, and are empty, do not count."""
    known = [values for values in configurations if values]
    names = dict.fromkeys(name for values in known for name in values if name not in _IDENTITY_KEYS)
    return [name for name in names if any(values.get(name) != known[0].get(name) for values in known)]
