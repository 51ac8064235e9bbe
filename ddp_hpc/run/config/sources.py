"""Read settings from defaults, files, environment variables and the command line; `site` finds site profiles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.base.slurm_times import parse_seconds
from ddp_hpc.run.config.foreign import our_key_for
from ddp_hpc.run.config.keys import all_keys, is_below_open_key, is_section, key_of, parse_text, unknown_key_error
from ddp_hpc.run.config.removed import drop_removed

ENVIRONMENT_PREFIX = "DDP_HPC__"
_KEY_BY_SBATCH_VARIABLE = {
    **{f"SBATCH_{name.upper()}": f"slurm.{name}" for name in ("partition", "account", "qos", "constraint")},
    "SBATCH_RESERVATION": "slurm.extra.reservation",
    "SBATCH_TIMELIMIT": "resources.time_limit_min",
}
"""Variables by which a user's shell gives defaults to sbatch -> our keys."""
_JOB_ID_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID")
_KEY_PART_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

_MOST_BYTES = 4 << 20
"""Of a file of keys: YAML of this size takes seconds to read."""


@dataclass(frozen=True)
class Origin:
    """The source of a value."""

    source: str
    """The source as the resolved configuration names it: `file run.yaml`."""
    location: str
    """The source as an error names it: `run.yaml`."""
    line: int | None = None

    def __str__(self) -> str:
        return self.location if self.line is None else f"{self.location}, line {self.line}"


DEFAULT = Origin("default", "the default")
COMMAND_LINE = Origin("command line", "the command line")


@dataclass(frozen=True)
class Setting:
    """One value that a source sets for one key."""

    key: str
    value: Any
    origin: Origin


def from_defaults() -> list[Setting]:
    """Return the defaults of all keys that have a default."""
    return [Setting(key.name, key.default, DEFAULT) for key in all_keys().values() if key.default is not MISSING]


def from_file(path: Path, *, is_of_run: bool) -> list[Setting]:
    """Read a YAML file of sections and keys; `train.lr: 0.1` may stand for `train: {lr: 0.1}`.

    The file that a run keeps has all keys of the version that wrote it: those that were removed since are left out.
    """
    content = read_mapping(path)
    if is_of_run:
        drop_removed(content)
    return settings_in(content, Origin(f"file {path.name.encode(errors='replace').decode()}", str(path)))


def read_mapping(path: Path) -> dict[Any, Any]:
    """Read a YAML file of keys and values; the result knows the line of each key."""
    from ddp_hpc.run.config.yaml_text import read_yaml  # late: `status` reads no YAML

    content = read_yaml(_read_bytes(path), str(path))
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"The file {path} has {content!r:.60}, but it must have keys and values, such as `seed: 1`.")
    return content or {}


def settings_in(mapping: Mapping[Any, Any], origin: Origin) -> list[Setting]:
    """Return the settings in a file's mapping, or in a part of it."""
    return list(_refuse_repeats(_flatten_mapping("", mapping, origin)))


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:  # also a pipe of the shell's, such as <(command)
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        names = sorted(other.name for pattern in ("*.yaml", "*.yml") for other in path.parent.glob(pattern))
        beside = f"Correct the path; the directory {str(path.parent)!r} has {shorten_names(names, 10)}."
        to_do = beside if names else "Check the path."
        raise ConfigError(f"The configuration file {str(path)!r} does not exist. {to_do}") from error
    except OSError as error:
        raise ConfigError(
            f"The configuration file {str(path)!r} cannot be read: {error.strerror}. Check its permissions."
        ) from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(
            f"The configuration file {str(path)!r} has more than {_MOST_BYTES / 1e6:.0f} MB. Name another file."
        )
    return content


def from_environment(environ: Mapping[str, str]) -> list[Setting]:
    """Read variables such as `DDP_HPC__TRAIN__LR=0.1`; their case does not matter."""
    settings: list[Setting] = []
    for variable, text in sorted(environ.items()):
        if variable.upper().startswith(ENVIRONMENT_PREFIX):
            source = f"environment {variable}"
            settings += _from_text(_env_var_key(variable), text, Origin(source, source))
    return list(_refuse_repeats(settings))


def from_sbatch_variables(environ: Mapping[str, str]) -> list[Setting]:
    """Return what a user's shell sets for sbatch; nothing inside of a job, where the variables may be those of that job.

    A time that is not a length, such as `UNLIMITED`, stays as it is, so that an error names it where no other source sets the key.
    """
    if any(environ.get(name) for name in _JOB_ID_VARIABLES):
        return []
    settings = []
    for variable, key in _KEY_BY_SBATCH_VARIABLE.items():
        if text := environ.get(variable, "").strip():
            length_s = parse_seconds(text) if variable == "SBATCH_TIMELIMIT" else None
            source = f"environment {variable}"
            settings.append(Setting(key, text if length_s is None else -(-length_s // 60), Origin(source, source)))
    return settings


def _env_var_key(variable: str) -> str:
    """Return the key that a variable names, in lower case.

    A key that the user invented (`recipe.args.*`) keeps its case, unless the whole name is in capitals. A key below `env`
    is a variable itself, and always keeps its case.
    """
    name = variable[len(ENVIRONMENT_PREFIX) :].replace("__", ".")
    section, dot, rest = name.partition(".")
    if dot and section.lower() == "env":
        return f"env.{rest}"
    if name.isupper() or not is_below_open_key(name.lower()):
        return name.lower()
    opened = next(key.name for key in all_keys().values() if key.is_open and name.lower().startswith(f"{key.name}."))
    return opened + name[len(opened) :]


def from_overrides(words: Sequence[str]) -> list[Setting]:
    """Read `train.lr=0.1` and `--train.lr=0.1`; of two settings for one key the later counts."""
    settings: list[Setting] = []
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not a setting. Write KEY=VALUE, such as `train.lr=0.1`.")
        settings += _from_text(name.strip(), text, COMMAND_LINE)
    return settings


def _from_text(name: str, text: str, origin: Origin) -> list[Setting]:
    """Read the text of one key, or of a section, which is a mapping (`train={lr: 0.1}`)."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"`{name}` is {text!r} ({origin}), but that is not UTF-8. Use a UTF-8 locale, or set the key in the configuration file."
            ) from error
    key = None if is_section(name) else key_of(name)
    if key is None and not is_section(name):
        raise unknown_key_error(name, str(origin))
    return list(_flatten(name, _plain_value(parse_text(key, text, str(origin))), origin))


def _flatten_mapping(section: str, mapping: Mapping[Any, Any], origin: Origin) -> Iterator[Setting]:
    lines = getattr(mapping, "lines", {})
    for key, value in mapping.items():
        here = replace(origin, line=lines.get(key, origin.line))
        if not isinstance(key, str):
            raise ConfigError(
                f"{section or 'The file'} has the key {key!r} ({here}), but a key must be text. Put it in quotes."
            )
        yield from _flatten(f"{section}.{key}" if section else key, value, here)


def _flatten(name: str, value: Any, origin: Origin) -> Iterator[Setting]:
    """Yield the settings of the leaves at or below `name`."""
    if is_section(name):
        yield from _flatten_section(name, value, origin)
    elif key_of(name) is None:
        raise unknown_key_error(name, str(origin))
    elif is_below_open_key(name) and not all(map(_KEY_PART_PATTERN.fullmatch, name.split("."))):
        raise ConfigError(f"`{name}` ({origin}) is not a key: only letters, digits, `_` and `-` may follow a `.`.")
    elif is_below_open_key(name) and _is_mergeable(value):
        yield from _flatten_mapping(name, value, origin)
    else:
        yield Setting(name, _plain_value(value), origin)


def _flatten_section(name: str, value: Any, origin: Origin) -> Iterator[Setting]:
    if value is None:
        return  # an empty section: `train:` with nothing below it
    if not isinstance(value, dict):
        ours = our_key_for(name) or ""
        such = f", such as `{ours}`" if ours.startswith(f"{name}.") else ""
        raise ConfigError(f"`{name}` is {value!r} ({origin}), but it must be a section: set the keys below it{such}.")
    if not value and name in all_keys():
        yield Setting(name, {}, origin)  # `recipe.args={}` removes what earlier sources set there
    yield from _flatten_mapping(name, value, origin)


def _is_mergeable(value: Any) -> bool:
    """Return whether an invented key's value is a mapping that is merged key by key, rather than replaced as a whole."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(key, str) and _KEY_PART_PATTERN.fullmatch(key) for key in value)
    )


def _plain_value(value: Any) -> Any:
    """Return the value as plain dictionaries and lists, without line numbers."""
    if isinstance(value, dict):
        return {key: _plain_value(item) for key, item in value.items()}
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def _refuse_repeats(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield the settings of one source, and refuse a key that is set twice."""
    seen: dict[str, Origin] = {}
    for setting in settings:
        if setting.key in seen:
            raise ConfigError(f"`{setting.key}` is set twice: {seen[setting.key]}; {setting.origin}. Remove one.")
        seen[setting.key] = setting.origin
        yield setting


def flatten_open_key(name: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of an open key's value, by key."""
    return {setting.key: setting.value for setting in _flatten(name, dict(mapping), DEFAULT)}
