"""The steps of a pipeline, as its file and the command line have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from ddp_hpc.config.keys import nearest
from ddp_hpc.config.sources import read_mapping
from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir.records import When
from ddp_hpc.submission.chain import split_when

STEPS, AFTER = "steps", "after"
"""The two keys that only a pipeline has."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*", re.ASCII)


@dataclass(frozen=True)
class After:
    """An earlier step, and how it has to end."""

    step: str
    when: When = "ok"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One run of a pipeline."""

    name: str
    after: tuple[After, ...] = ()
    settings: Mapping[Any, Any] = field(default_factory=dict)
    """What the file sets for this step alone; it knows the lines of its keys."""
    words: tuple[str, ...] = ()
    """What the command line sets for this step alone: `train.lr=0.1`."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What a pipeline's file and the command line say."""

    path: Path
    shared: Mapping[Any, Any]
    """What the file sets for all steps."""
    words: tuple[str, ...]
    """What the command line sets for all steps."""
    steps: Sequence[Step]
    """Each stands behind those that it waits for, else as in the file."""

    def before(self, name: str) -> set[str]:
        """Return the steps that a step waits for, and those that these wait for."""
        after = {step.name: [one.step for one in step.after] for step in self.steps}
        found: set[str] = set()
        rest = list(after[name])
        while rest:
            step = rest.pop()
            rest += [] if step in found else after[step]
            found.add(step)
        return found


def read_pipeline(path: Path, words: Sequence[str]) -> Pipeline | None:
    """Return the pipeline in a configuration's file, with the settings of the command line; None where the file has no steps.

    Raises:
        ConfigError: where a step's name, or what it waits for, cannot be used.
    """
    mapping = read_mapping(path)
    if STEPS not in mapping:
        return None
    listed = mapping[STEPS]
    if not isinstance(listed, dict) or not listed:
        raise ConfigError(
            f"`{STEPS}` in {path} is {listed!r:.60}, but it must have a name and settings for each step, such as "
            "`evaluate: {after: train, script: {command: [python, evaluate.py]}}`."
        )
    for name in listed:
        _check_name(name, path)
    shared_words, of_steps = _divided(words, list(listed))
    read = [_step(name, settings, of_steps[name], path) for name, settings in listed.items()]
    return Pipeline(path=path, shared=_without(mapping, STEPS), words=tuple(shared_words), steps=_ordered(read, path))


def _check_name(name: object, path: Path) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"`{STEPS}` in {path} has a step {name!r}, but a step's name is a part of its run's name: use letters, digits, `_` and "
            "`-`, and begin with a letter."
        )


def _divided(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the settings for all steps, and those of each step: `train.lr=0.1` for `steps.fit.train.lr=0.1`."""
    shared: list[str] = []
    of_steps: dict[str, list[str]] = {name: [] for name in names}
    for word in words:
        plain = word.removeprefix("--")
        if not plain.partition("=")[0].startswith(f"{STEPS}."):
            shared.append(word)
            continue
        name, dot, setting = plain.removeprefix(f"{STEPS}.").partition(".")
        if not dot or "=" in name:
            raise ConfigError(
                f"{word!r} sets no key of a step. Write `{STEPS}.STEP.KEY=VALUE`, such as `{STEPS}.{names[0]}.seed=1`."
            )
        if name not in of_steps:
            raise ConfigError(f"{word!r} names the step {name!r}, but {_there_are(name, names)}")
        of_steps[name].append(setting)
    return shared, of_steps


def _step(name: str, settings: Any, words: Sequence[str], path: Path) -> Step:
    if settings is not None and not isinstance(settings, dict):
        raise ConfigError(
            f"`{STEPS}.{name}` in {path} is {settings!r:.60}, but it must have keys and values, such as `seed: 1`."
        )
    mapping: Mapping[Any, Any] = settings or {}
    after, others = mapping.get(AFTER), [word for word in words if not word.startswith(f"{AFTER}=")]
    if len(others) < len(words):
        from ddp_hpc.config.yaml_text import read_yaml  # late: few command lines change what a step waits for

        after = read_yaml([word for word in words if word not in others][-1].partition("=")[2], "the command line")
    is_named = "name" in mapping or any(word.startswith("name=") for word in others)
    if is_named:
        raise ConfigError(
            f"`{STEPS}.{name}.name` is set ({path}), but the pipeline names the run of each step: PIPELINE-{name}. Rename the step, or "
            "set `name` for the whole pipeline."
        )
    return Step(name=name, after=_read_after(name, after, path), settings=_without(mapping, AFTER), words=tuple(others))


def _read_after(name: str, value: Any, path: Path) -> tuple[After, ...]:
    texts = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"`{STEPS}.{name}.{AFTER}` is {value!r:.60} ({path}), but it must be the name of a step, or a list of names; each may end "
            "with `:ok` (the default), `:notok` or `:any`."
        )
    return tuple(After(*split_when(text)) for text in texts)


def _ordered(steps: Sequence[Step], path: Path) -> list[Step]:
    """Return the steps, each behind those that it waits for."""
    by_name = {step.name: step for step in steps}
    for step in steps:
        _check_after(step, list(by_name), path)
    sorter = TopologicalSorter({step.name: [one.step for one in step.after] for step in steps})
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " waits for ".join(reversed(error.args[1]))
        raise ConfigError(
            f"The steps in {path} wait for each other, so none of them could start: {cycle}. Remove one of these `{AFTER}`."
        ) from error
    return [by_name[name] for name in _as_listed(sorter, list(by_name))]


def _as_listed(sorter: TopologicalSorter[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the names, of those that wait for no other the first in the file."""
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=names.index)
        first = ready.pop(0)
        yield first
        sorter.done(first)


def _check_after(step: Step, names: Sequence[str], path: Path) -> None:
    seen: set[str] = set()
    for one in step.after:
        if one.step not in names:
            raise ConfigError(
                f"`{STEPS}.{step.name}.{AFTER}` names the step {one.step!r} ({path}), but {_there_are(one.step, names)}"
            )
        if one.step in seen:
            raise ConfigError(f"`{STEPS}.{step.name}.{AFTER}` names the step {one.step!r} twice ({path}). Remove one.")
        seen.add(one.step)


def _there_are(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f"there is no such step.{f' Did you mean {near!r}?' if near else ''} Steps: {', '.join(names)}."


def _without(mapping: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    """Return a mapping of a file without one key; it still knows the line of each key."""
    from ddp_hpc.config.yaml_text import DictWithLines  # late: the module that reads the file has imported it

    copy = DictWithLines((name, value) for name, value in mapping.items() if name != key)
    copy.lines = getattr(mapping, "lines", {})
    return copy
