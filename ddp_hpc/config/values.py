"""One raw value to the type its key wants, strictly; and the types in words."""

from __future__ import annotations

from typing import Any

from ddp_hpc.config.keys import OF_A_VARIABLE, Key
from ddp_hpc.errors import ConfigError
from ddp_hpc.field_types import type_in_words

_NOTHING = {"", "~", "null", "none"}


def convert(key: Key, value: Any, place: str) -> Any:
    """Return `value` as the key's type: no text for numbers, no booleans for whole numbers, but 1 for 1.0.

    Raises:
        ConfigError: naming the key, the value, the wanted type, and `place`, where the value came from.
    """
    import msgspec  # late: only what reads a configuration waits for it

    try:
        return msgspec.convert(value, key.annotation, strict=True)
    except msgspec.ValidationError as error:
        quotes = " Put it in quotes." if key.is_text and isinstance(value, (int, float)) else ""
        raise ConfigError(
            f"`{key.name}` is {value!r} ({place}), but it must be {type_in_words(key.annotation)}.{quotes}"
        ) from error


def parse_text(key: Key | None, text: str, place: str) -> Any:
    """Return what a word of the command line or of the environment means for this key (None: for a section).

    Where the key wants text, it is the text. Elsewhere it is YAML: a scalar, or a list, mapping or quoted text.
    """
    from ddp_hpc.config.yaml_text import plain_scalar, read_yaml  # late: as above

    stripped = text.strip()
    is_variable = key is not None and key.annotation is OF_A_VARIABLE
    if key is not None and key.is_optional and stripped.lower() in ({"~", "null"} if is_variable else _NOTHING):
        return None
    if key is not None and key.is_text:
        return text
    if stripped[:1] in {"[", "{", '"', "'"}:
        return read_yaml(stripped, f"{text!r} ({place})")
    value = plain_scalar(stripped)
    return text if isinstance(value, str) else value
