"""Merge all sources into one spec by precedence, convert values strictly, and keep the source of each value."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ddp_hpc.base.discretion import HIDDEN, is_key_shown
from ddp_hpc.base.errors import ConfigError, UnreadableError
from ddp_hpc.base.field_types import annotations_of
from ddp_hpc.base.patience import await_answer
from ddp_hpc.run.config.fill_paths import escape_dollars, fill_settings
from ddp_hpc.run.config.keys import all_keys, convert_value, key_of
from ddp_hpc.run.config.removed import REMOVED_KEYS, drop_removed
from ddp_hpc.run.config.site import Profile, find_profile, refuse_forbidden_dir
from ddp_hpc.run.config.sources import (
    COMMAND_LINE,
    DEFAULT,
    Origin,
    Setting,
    flatten_open_key,
    from_defaults,
    from_environment,
    from_file,
    from_overrides,
    from_sbatch_variables,
    read_mapping,
    settings_in,
)
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec, parse_program


@dataclass(frozen=True)
class Resolved:
    """A spec, and the source of each of its values."""

    spec: RunSpec
    sources: Mapping[str, str]
    """Key -> `default`, `site profile PATH`, `file NAME`, `environment VARIABLE`, `command line`."""
    profile: Profile | None = None
    """The site profile, if one was used."""


def resolve(  # noqa: PLR0913  the parts of a command line, and what decides which of them count
    path: Path | None,
    overrides: Sequence[str] | Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    site: str | None = None,
    is_for_slurm: bool = True,
    command: Sequence[str] = (),
) -> Resolved:
    """Read a configuration: defaults < site profile < file < environment < command line.

    For runs on Slurm, variables for sbatch such as SBATCH_PARTITION come right after the defaults.

    `command` is the script that the command line asks for; with it, there need be no file.

    For runs on Slurm, a profile's values for the chosen partition win over its values for all runs; of several partitions,
    those on which all agree. `site` names the profile; None means the one for this host.
    """
    profile = find_profile(environ, site)
    stem = path.stem if path is not None else parse_program(command).name if command else ""
    asked: list[Setting] = []
    of_file: list[Setting] = []
    run = RunDir(Path() if path is None else path.parent)
    if path is not None:
        # A run keeps its configuration, with a value for every key of the version that wrote it.
        of_file = from_file(path, is_of_run=path == run.config and run.attempts.exists())
    asked += from_environment(environ)
    is_of_run = path == run.config and run.submission_lock.exists()
    if path is not None and is_of_run:  # a run goes on where it lies, from any directory
        told = {one.key: str(one.value) for one in [*of_file, *asked]}
        if os.path.realpath(run.path) != os.path.realpath(Path(told.get("runs_dir", ""), told.get("name", ""))):
            place, of_run = Path(os.path.abspath(run.path)), Origin(f"file {path.name}", str(path))  # noqa: PTH100  as `find_run` does
            asked += [Setting("name", place.name, of_run), Setting("runs_dir", escape_dollars(place.parent), of_run)]
    if isinstance(overrides, Mapping):
        asked += settings_in(overrides, Origin("Python", "Python"))
    else:
        asked += from_overrides(overrides)
    if command:
        asked += settings_in({"script": {"command": list(command)}}, COMMAND_LINE)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:128] or "run"
    if not (stem.isascii() or re.search(r"[A-Za-z0-9]", stem) or any(one.key == "name" for one in [*of_file, *asked])):
        raise ConfigError(
            f"A run is called like its file, but {stem!r} has no letter or digit that a run's name may have (A-Z, a-z, 0-9). Set `name=...`."
        )
    of_shell = from_sbatch_variables(environ) if is_for_slurm else []
    before = [*from_defaults(), Setting("name", name, DEFAULT), *of_shell, *(profile.settings if profile else ())]
    # The paths in a run's own file are filled in already.
    after = [*of_file, *fill_settings(asked, environ)] if is_of_run else fill_settings([*of_file, *asked], environ)
    between: Sequence[Setting] = ()
    if is_for_slurm and profile is not None:
        partition = [setting.value for setting in [*before, *after] if setting.key == "slurm.partition"][-1]
        listed = str(partition).split(",")
        of_each = [{one.key: one for one in profile.partitions.get(name, ())} for name in listed]
        between = [
            one for key, one in of_each[0].items() if all(key in of and of[key].value == one.value for of in of_each)
        ]
    resolved = replace(_build_config([*before, *between, *after]), profile=profile)
    refuse_forbidden_dir(resolved.spec.path, profile)
    return resolved


def load_resolved(path: Path, *, is_patient: bool = False, patience_s: float | None = None) -> RunSpec:
    """Read the resolved configuration of a run, as `render_resolved` wrote it, without any other source.

    `is_patient` is for processes of the run: the file exists, so they wait for a file system that does not show it yet,
    for `patience_s`, or as long as `patience` says.
    """
    return await_answer(str(path), lambda: _load_spec(path, is_known=not is_patient), patience_s=patience_s)


def _load_spec(path: Path, *, is_known: bool) -> RunSpec:
    try:
        return _build_config([*from_defaults(), *from_file(path, is_of_run=True)]).spec
    except ConfigError as error:
        if is_known or not isinstance(error.__cause__, OSError):
            raise
        raise UnreadableError(str(error)) from error


def removed_key_notes(path: Path) -> list[str]:
    """Return a line for each key that is removed, but that the configuration of a run sets to something else than its default then."""
    return [
        f"note: `{name}` is {value!r} in {path}, but since {REMOVED_KEYS[name].since} it is no longer a key, and it has no effect. {REMOVED_KEYS[name].instead}"
        for name, value in drop_removed(read_mapping(path)).items()
    ]


def resolve_key(name: str, environ: Mapping[str, str]) -> Any:
    """Return one key's value for commands without a run: default < site profile < environment."""
    profile = find_profile(environ)
    own = fill_settings(from_environment(environ), environ)
    given = [*from_defaults(), *(profile.settings if profile else ()), *own]
    return _converted_value([setting for setting in given if setting.key == name][-1])


def _build_config(settings: Iterable[Setting]) -> Resolved:
    chosen = _merge_settings(settings)
    values = {key: _converted_value(setting) for key, setting in chosen.items()}
    try:
        spec = _make_section(RunSpec, "", values)
    except ConfigError as error:
        raise type(error)(f"{error}{_origins_text(str(error), chosen)}") from error
    return Resolved(spec, {key: setting.origin.source for key, setting in chosen.items()})


def _merge_settings(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Keep the last setting of each key. Below an open key, a setting also replaces earlier ones above and below it."""
    chosen: dict[str, Setting] = {}
    for setting in settings:
        new = setting.key
        for old in [] if setting.origin is DEFAULT else list(chosen):  # defaults come first, and no two overlap
            if old.startswith(f"{new}.") or new.startswith(f"{old}."):
                del chosen[old]
        chosen[new] = setting
    return chosen


def _converted_value(setting: Setting) -> Any:
    if setting.origin is DEFAULT:
        return setting.value
    key = key_of(setting.key)
    assert key is not None  # noqa: S101  # sources yield known keys only
    return convert_value(key, setting.value, str(setting.origin))


def _make_section(section: type[Any], prefix: str, values: Mapping[str, Any]) -> Any:
    """Make a section, and the sections in it, from the values of its keys."""
    annotations = annotations_of(section)  # type: ignore[arg-type]  # a class has a hash
    made: dict[str, Any] = {}
    for field in fields(section):
        name, annotation = prefix + field.name, annotations[field.name]
        if is_dataclass(annotation):
            made[field.name] = _make_section(annotation, f"{name}.", values)  # type: ignore[arg-type]  # it is a class
        elif name in values:
            made[field.name] = values[name]
        elif all_keys()[name].is_open:
            made[field.name] = unflatten(name, values)
        elif all_keys()[name].default is MISSING:
            raise ConfigError(
                f"`{name}` is not set, and it has no default. Set it in the configuration file, or on the command line with `{name}=VALUE`."
            )
    return section(**made)


def unflatten(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of an open key, a mapping, from its leaves."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith(f"{name}."):
            *branches, leaf = key[len(name) + 1 :].split(".")
            node = tree
            for branch in branches:
                node = node.setdefault(branch, {})
            node[leaf] = value
    return tree


def _origins_text(message: str, chosen: Mapping[str, Setting]) -> str:
    """Return the sources of the keys that a message names, except for defaults."""
    named = dict.fromkeys(re.findall(r"`([a-z_.]+)`", message))
    sources = [
        f"`{key}` came from {chosen[key].origin}"
        for key in named
        if key in chosen and chosen[key].origin is not DEFAULT
    ]
    return f" ({'; '.join(sources)}.)" if sources else ""


def flat_spec(spec: RunSpec) -> dict[str, Any]:
    """Return every leaf of a spec by its key, in the order of the spec."""
    leaves: dict[str, Any] = {}
    for name, key in all_keys().items():
        value: Any = spec
        for part in name.split("."):
            value = getattr(value, part)
        leaves |= flatten_open_key(name, value) if key.is_open else {name: value}
    return leaves


def changed_keys(old: RunSpec, new: RunSpec) -> dict[str, str]:
    """Return the keys that differ, in the order of the spec, each with a text: `train.lr 0.1 -> 0.2`.

    None is also the value of a key that a spec lacks. Values that may be secrets are hidden.
    """
    before, after = flat_spec(old), flat_spec(new)
    found: dict[str, str] = {}
    for key in dict.fromkeys([*after, *before]):
        values = before.get(key), after.get(key)
        if values[0] != values[1] and not _is_empty_in_one(key, before, after):
            told = (
                (shlex.join(map(str, value)) if isinstance(value, tuple) else repr(value))
                if is_key_shown(key, value)
                else HIDDEN
                for value in values
            )
            found[key] = f"{key} {' -> '.join(told)}"
    return found


def _is_empty_in_one(key: str, *leaves: Mapping[str, Any]) -> bool:
    """Tell whether a section is empty in one spec and has keys in the other: these keys are the changes then."""
    is_empty = any(of_spec.get(key) == {} for of_spec in leaves)
    return is_empty and any(other.startswith(f"{key}.") for of_spec in leaves for other in of_spec)


def render_resolved(resolved: Resolved, *, for_eyes: bool = False) -> str:
    """Return the whole configuration as YAML, one line for each value with its source; `load_resolved` reads it back.

    With `for_eyes`, values that may be secrets are left out, and comments at the end name their keys.
    """
    from ddp_hpc.run.config.yaml_text import dump_value  # late: `status` reads no YAML

    lines: list[tuple[str, str]] = []
    opened: list[str] = []
    leaves = flat_spec(resolved.spec)
    hidden = [key for key, value in leaves.items() if for_eyes and not is_key_shown(key, value)]
    for key, value in leaves.items():
        if key in hidden:
            continue
        *sections, leaf = key.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != opened[: depth + 1]:
                lines.append((f"{'  ' * depth}{dump_value(section)}:", ""))
        opened = sections
        source = " ".join(resolved.sources[key].split())
        lines.append((f"{'  ' * len(sections)}{dump_value(leaf)}: {dump_value(value)}", f"  # {source}"))
    width = max(len(text) for text, source in lines if source and len(text) <= 60)
    notes = (f"# {key}: {HIDDEN}  # {' '.join(resolved.sources[key].split())}\n" for key in hidden)
    return "".join([*(f"{text:<{width if source else 0}}{source}\n" for text, source in lines), *notes])


_RENDERED_LINE_PATTERN = re.compile(r"( *)([^ :][^:]*):(?:| .*  # (.*))")


def keys_of_source(path: Path, source: str) -> list[str]:
    """Return the keys whose values came from a source, by the comments of a configuration that `render_resolved` wrote."""
    sections: list[str] = []
    found: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := _RENDERED_LINE_PATTERN.fullmatch(line):
            indent, leaf, origin = match.groups()
            sections[len(indent) // 2 :] = [leaf]
            if origin and origin.startswith(source):
                found.append(".".join(sections))
    return found
