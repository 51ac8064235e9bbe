"""Convert one raw value to the type of its key, strictly."""

from __future__ import annotations

from typing import Any

import msgspec

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.field_types import type_in_words
from ddp_hpc.run.config.keys import OF_A_VARIABLE, Key

_NOTHING = {"", "~", "null", "none"}


def convert(key: Key, value: Any, location: str) -> Any:
    """Return `value` as the key's type. Text is not converted to numbers, nor booleans to whole numbers, but 1 to 1.0."""
    try:
        return msgspec.convert(value, key.annotation, strict=True)
    except msgspec.ValidationError as error:
        quotes = " Put it in quotes." if key.is_text and isinstance(value, (int, float)) else ""
        raise ConfigError(
            f"`{key.name}` is {value!r} ({location}), but it must be {type_in_words(key.annotation)}.{quotes}"
        ) from error


def parse_text(key: Key | None, text: str, location: str) -> Any:
    """Return the value of a text from the command line or the environment, for this key (None: for a section).

    For a key of type text, it is the text itself. For others it is YAML: a scalar, or a list, mapping or quoted text.
    """
    from ddp_hpc.run.config.yaml_text import plain_scalar, read_yaml  # late: `status` reads no YAML

    stripped = text.strip()
    is_variable = key is not None and key.annotation is OF_A_VARIABLE
    if key is not None and key.is_optional and stripped.lower() in ({"~", "null"} if is_variable else _NOTHING):
        return None
    if key is not None and key.is_text:
        return text
    if stripped[:1] in {"[", "{", '"', "'"}:
        return read_yaml(stripped, f"{text!r} ({location})")
    value = plain_scalar(stripped)
    return text if isinstance(value, str) else value
