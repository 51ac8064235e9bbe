"""Convert one raw value to the type of its key, strictly."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.field_types import is_union, type_in_words, without_none
from ddp_hpc.run.config.keys import OF_A_VARIABLE, Key

_SCALARS = frozenset({bool, int, float, str})
_NOTHING = {"", "~", "null", "none"}


def convert(key: Key, value: Any, location: str) -> Any:
    """Return `value` as the key's type. Text is not converted to numbers, nor booleans to whole numbers, but 1 to 1.0."""
    if (plain := _plain(value, without_none(key.annotation))) is not None:
        return plain
    import msgspec  # late: most values of most files are plain, and it takes 10 ms to import

    try:
        return msgspec.convert(value, key.annotation, strict=True)
    except msgspec.ValidationError as error:
        quotes = " Put it in quotes." if key.is_text and isinstance(value, (int, float)) else ""
        raise ConfigError(
            f"`{key.name}` is {value!r} ({location}), but it must be {type_in_words(key.annotation)}.{quotes}"
        ) from error


def _plain(value: Any, wanted: Any) -> Any:
    """Return the value if no rule has to be looked up to see that it has the type: a scalar, or a list of texts; else None."""
    if type(value) is wanted and wanted in _SCALARS:
        return value
    if wanted is Any:
        return value if type(value) in _SCALARS else None
    if is_union(wanted):
        return next((one for arm in get_args(wanted) if (one := _plain(value, arm)) is not None), None)
    if get_origin(wanted) is Literal:
        return value if type(value) is str and value in get_args(wanted) else None
    is_list_of_texts = type(value) is list and wanted == tuple[str, ...] and all(type(item) is str for item in value)
    return tuple(value) if is_list_of_texts else None


def parse_text(key: Key | None, text: str, location: str) -> Any:
    """Return the value of a text from the command line or the environment, for this key (None: for a section).

    For a key of type text, it is the text itself. For others it is YAML: a scalar, or a list, mapping or quoted text.
    """
    from ddp_hpc.run.config.yaml_text import plain_scalar, read_yaml  # late: as above

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
