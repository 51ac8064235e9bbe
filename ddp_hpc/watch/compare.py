"""Runs beside each other: which of them, in what order, and by which keys their configurations differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ddp_hpc.config import flat, load_resolved
from ddp_hpc.config.keys import key_of, unknown_key
from ddp_hpc.config.values import parse_text
from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir import RunDir
from ddp_hpc.watch.status import RunStatus, State

_OWN_KEYS = frozenset({"name", "runs_dir"})
"""Keys that differ from run to run anyhow."""
_STATES = tuple(word for arm in get_args(State) for word in (get_args(arm) or (arm,)))
_COLUMNS: Mapping[str, Callable[[RunStatus], Any]] = {
    "name": lambda status: status.run,
    "state": lambda status: status.state,
    "step": lambda status: status.step,
    "loss": lambda status: status.loss,
    "checkpoint": lambda status: status.last_checkpoint,
    "attempt": lambda status: status.attempt,
    "age": lambda status: status.age_s,
}


@dataclass(frozen=True)
class Listed:
    """A run's status, and its configuration."""

    status: RunStatus
    values: Mapping[str, Any]
    """Key -> value; empty where the configuration cannot be read."""


def values_of(run: RunDir) -> dict[str, Any]:
    """Return a run's configuration, key by key; nothing where it cannot be read."""
    try:
        return flat(load_resolved(run.config))
    except ConfigError:
        return {}


def chosen(runs: Sequence[Listed], conditions: Sequence[str]) -> list[Listed]:
    """Return the runs that meet all conditions: `state=running`, `train.lr=0.1`.

    Raises:
        ConfigError: where a condition names neither a state nor a key.
    """
    tests = [_test(condition) for condition in conditions]
    return [run for run in runs if all(test(run) for test in tests)]


def _test(condition: str) -> Callable[[Listed], bool]:
    name, equals, text = condition.partition("=")
    if not equals:
        raise ConfigError(
            f"`--filter {condition}` is no condition: write KEY=VALUE or state=STATE, such as `train.lr=0.1`."
        )
    if name == "state":
        if text not in _STATES:
            raise ConfigError(f"`--filter {condition}` names no state. States: {', '.join(_STATES)}.")
        return lambda run: run.status.state == text
    key = key_of(name)
    if key is None:
        raise unknown_key(name, f"--filter {condition}")
    wanted = parse_text(key, text, f"--filter {condition}")
    return lambda run: name in run.values and _plain(run.values[name]) == _plain(wanted)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def in_order(runs: Sequence[Listed], by: str, *, is_reversed: bool) -> list[Listed]:
    """Return the runs by a column, a metric of their evaluation or a key; those that have none at the end.

    Raises:
        ConfigError: where there is no such thing.
    """
    is_metric = any(by in run.status.metrics for run in runs)
    if by not in _COLUMNS and not is_metric and key_of(by) is None:
        metrics = sorted({name for run in runs for name in run.status.metrics})
        raise ConfigError(
            f"`--sort {by}` names nothing to sort by: take one of {', '.join([*_COLUMNS, *metrics])}, or a key such as "
            "`train.lr`."
        )

    def value(run: Listed) -> Any:
        if by in _COLUMNS:
            return _COLUMNS[by](run.status)
        return run.status.metrics.get(by) if is_metric else run.values.get(by)

    known = [run for run in runs if value(run) is not None]
    is_numeric = all(isinstance(value(run), (int, float)) for run in known)
    ordered = sorted(known, key=lambda run: value(run) if is_numeric else str(value(run)), reverse=is_reversed)
    return [*ordered, *(run for run in runs if value(run) is None)]


def differing(runs: Sequence[Listed]) -> list[str]:
    """Return the keys whose values are not the same in all these runs."""
    known = [run for run in runs if run.values]
    names = dict.fromkeys(name for run in known for name in run.values if name not in _OWN_KEYS)
    return [name for name in names if any(run.values.get(name) != known[0].values.get(name) for run in known)]
