"""The table of keys, one for each leaf of the spec; what their values may be; and suggestions for a key that does not exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, get_origin

import msgspec

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.field_types import annotations_of, is_optional, type_in_words, without_none
from ddp_hpc.base.names import nearest
from ddp_hpc.run.spec import RunSpec

EnvVariableValue = str | int | None
"""The type of the values in `env`: a file may leave out the quotes around whole numbers."""


@dataclass(frozen=True)
class Key:
    """One leaf of the spec, by its dotted name."""

    name: str
    annotation: Any
    default: Any
    """MISSING if the user must set the key."""
    section: type | None = None
    """The class whose field it is; None for a key that the user has invented."""

    @property
    def is_open(self) -> bool:
        """Whether users may invent keys below it (`recipe.args`)."""
        return get_origin(self.annotation) is Mapping

    @property
    def is_text(self) -> bool:
        """Whether its values are text, so that an unquoted `3` is text, too."""
        wanted = without_none(self.annotation)
        return wanted in (str, without_none(EnvVariableValue)) or get_origin(wanted) is Literal


@cache
def all_keys() -> Mapping[str, Key]:
    """Return every key by its name, in the order of the spec."""
    return {key.name: key for key in _keys_of_section(RunSpec, "")}


def _keys_of_section(section: type, prefix: str) -> Iterator[Key]:
    annotations = annotations_of(section)
    for field in dataclasses.fields(section):
        name, annotation = prefix + field.name, annotations[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from _keys_of_section(annotation, f"{name}.")  # type: ignore[arg-type]  # mypy thinks it may be an instance
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield Key(name, annotation, default, section)


def key_of(name: str) -> Key | None:
    """Return the key with this name. Below an open key, every name is a key: of any type, or of a variable's below `env`."""
    if name in all_keys():
        return all_keys()[name]
    if not is_below_open_key(name):
        return None
    return Key(name, EnvVariableValue if is_below(name, "env") else Any, MISSING)


def is_below_open_key(name: str) -> bool:
    """Return whether the name lies below an open key (`recipe.args.width`)."""
    return name.startswith(_open_key_prefixes())


def is_section(name: str) -> bool:
    """Return whether this name is a section: keys may be below it."""
    return name in _section_names()


# A process asks these two hundreds of times for one configuration, so what they look up is computed once.


@cache
def _open_key_prefixes() -> tuple[str, ...]:
    return tuple(f"{key.name}." for key in all_keys().values() if key.is_open)


@cache
def _section_names() -> frozenset[str]:
    parents = (name.split(".")[:depth] for name in all_keys() for depth in range(1, name.count(".") + 1))
    return frozenset({*map(".".join, parents), *(key.name for key in all_keys().values() if key.is_open)})


def is_below(name: str, section: str) -> bool:
    """Return whether `name` is `section` or is in it; all keys are in the section without a name."""
    return not section or name == section or name.startswith(f"{section}.")


def unknown_key_error(name: str, location: str) -> ConfigError:
    """Return the error for an unknown key, with the nearest key and all keys of its section; or with what replaces it."""
    from ddp_hpc.run.config.removed import removed_key_error  # late: only an error needs the table

    if gone := removed_key_error(name, location):
        return gone
    section = name.rpartition(".")[0]
    if not is_section(section):
        section = ""
    below = (key[len(section) + 1 if section else 0 :] for key in all_keys() if is_below(key, section))
    valid = ", ".join(dict.fromkeys(rest.partition(".")[0] for rest in below))
    heading = f"Keys of `{section}`" if section else "Keys and sections"
    return ConfigError(f"`{name}` ({location}) is not a key.{did_you_mean(name)} {heading}: {valid}.")


def did_you_mean(name: str) -> str:
    """Return ` Did you mean ...?`, or the empty string if no key is near."""
    meant = " or ".join(f"`{key}`" for key in _likely_keys(name))
    return f" Did you mean {meant}?" if meant else ""


def _likely_keys(name: str) -> list[str]:
    """Return the keys that a name may mean: another tool's name, a key of another section, or the nearest spelling."""
    from ddp_hpc.run.config.foreign import our_key_for  # late: only an error needs the table

    if ours := our_key_for(name):
        return [ours]
    near, leaf = nearest(name, all_keys()), _last_part(name.lower())
    if near is not None and _last_part(near) == leaf:
        return [near]
    elsewhere = [key for key in all_keys() if _last_part(key) == leaf]
    if elsewhere or near is not None:
        return elsewhere or [str(near)]
    close = nearest(leaf, map(_last_part, all_keys()))
    return [key for key in all_keys() if _last_part(key) == close]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


_NULL_WORDS = {"", "~", "null", "none"}


def convert_value(key: Key, value: Any, location: str) -> Any:
    """Return `value` as the key's type. Text is not converted to numbers, nor booleans to whole numbers, but 1 to 1.0."""
    try:
        return msgspec.convert(value, key.annotation, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the second: text that no file can hold
        quotes = " Put it in quotes." if key.is_text and isinstance(value, (int, float)) else ""
        raise ConfigError(
            f"`{key.name}` is {value!r} ({location}), but it must be {type_in_words(key.annotation)}.{quotes}"
        ) from error


def parse_text(key: Key | None, text: str, location: str) -> Any:
    """Return the value of a text from the command line or the environment, for this key (None: for a section).

    For a key of type text, it is the text itself. For others it is YAML: a scalar, or a list, mapping or quoted text.
    """
    from ddp_hpc.run.config.yaml_text import parse_plain_scalar, read_yaml  # late: `status` reads no YAML

    stripped = text.strip()
    is_variable = key is not None and key.annotation is EnvVariableValue
    if (
        key is not None
        and is_optional(key.annotation)
        and stripped.lower() in ({"~", "null"} if is_variable else _NULL_WORDS)
    ):
        return None
    if key is not None and key.is_text:
        return text
    if stripped[:1] in {"[", "{", '"', "'"}:
        return read_yaml(stripped, f"{text!r} ({location})")
    value = parse_plain_scalar(stripped)
    return text if isinstance(value, str) else value
