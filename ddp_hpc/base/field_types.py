"""Describe a field's annotation in plain English, and check a value against it."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_TYPE_NAMES: Mapping[Any, tuple[str, str]] = {
    float: ("a number", "numbers"),
    int: ("a whole number", "whole numbers"),
    bool: ("true or false", "booleans"),
    str: ("text", "texts"),
    Any: ("any value", "values"),
    str | int: ("text", "texts"),
}
"""Type -> its singular and plural."""


@cache
def annotations_of(section: type) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields, as types; cached, as it takes Python 0.3 ms for each class."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


@cache
def is_optional(annotation: Any) -> bool:
    """Return whether None is a valid value. `X | None` is a `types.UnionType` or a `typing.Union`, by the version of Python."""
    return get_origin(annotation) is not Literal and type(None) in get_args(annotation)


@cache
def without_none(annotation: Any) -> Any:
    """Return `X` for `X | None`; other annotations are returned unchanged."""
    if not is_optional(annotation):
        return annotation
    return Union[tuple(arm for arm in get_args(annotation) if arm is not type(None))]  # noqa: UP007  # arms are data


def type_in_words(annotation: Any) -> str:
    """Return what a value must be: `a whole number, or null`."""
    if is_optional(annotation):
        return f"{type_in_words(without_none(annotation))}, or null"
    origin, arms = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType} and annotation not in _TYPE_NAMES:
        return " or ".join(map(type_in_words, arms))
    if origin is Literal:
        return arms[0] if len(arms) == 1 else f"one of {', '.join(arms)}"
    if origin is tuple:
        count = "" if arms[-1] is Ellipsis else f"{len(arms)} "
        is_of_words = get_origin(arms[0]) is Literal
        return f"a list of {count}{f'words, each {type_in_words(arms[0])}' if is_of_words else _TYPE_NAMES[arms[0]][1]}"
    if is_dataclass(annotation):
        return f"a {getattr(annotation, '__name__', annotation)}"
    return "a mapping" if origin is Mapping else _TYPE_NAMES[annotation][0]


def as_field_value(value: Any, annotation: Any) -> Any:
    """Return a value from Python as the value that its field holds: 1.0 for 1, a tuple for a list, text for a path.

    Raises:
        TypeError: if it has another type; the caller makes the message for users.
    """
    # The first is so nearly always, and a sweep of 1,000 points asks 50,000 times.
    if annotation is type(value) or annotation is Any or (value is None and is_optional(annotation)):
        return value
    kind = get_origin(annotation) or annotation
    is_section = kind is Mapping or is_dataclass(kind)
    try:
        if isinstance(value, AbstractSet) or (is_section and not isinstance(value, kind)):
            raise TypeError(repr(value))
        return value if is_section else msgspec.convert(_builtin_value(value), annotation)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the second: text that no file can hold
        raise TypeError(repr(value)) from error


def _builtin_value(value: Any) -> Any:
    """Return lists, paths, and numbers of other libraries (`numpy.float32`), as what can be written to a file."""
    if isinstance(value, (list, tuple)):
        return [*map(_builtin_value, value)]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, (bool, str)) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)
