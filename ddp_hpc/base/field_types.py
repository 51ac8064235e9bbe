"""Describe a field's annotation in plain English, and check a value against it."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: Mapping[Any, tuple[str, str]] = {
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


def is_union(annotation: Any) -> bool:
    """Return whether values of several types are valid: `int | Literal["auto"]`."""
    return get_origin(annotation) in {Union, UnionType}


@cache
def _parts(annotation: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return `tuple[str, ...] | None` without its None, and what it is made of."""
    wanted = without_none(annotation)
    return wanted, get_origin(wanted), get_args(wanted)


def type_in_words(annotation: Any) -> str:
    """Return what a value must be: `a whole number, or null`."""
    if is_optional(annotation):
        return f"{type_in_words(without_none(annotation))}, or null"
    origin, arms = get_origin(annotation), get_args(annotation)
    if is_union(annotation) and annotation not in _NAMES:
        return " or ".join(map(type_in_words, arms))
    if origin is Literal:
        return arms[0] if len(arms) == 1 else f"one of {', '.join(arms)}"
    if origin is tuple:
        return _list_in_words(arms)
    if is_dataclass(annotation):
        return f"a {getattr(annotation, '__name__', annotation)}"
    return "a mapping" if origin is Mapping else _NAMES[annotation][0]


def _list_in_words(arms: tuple[Any, ...]) -> str:
    count = "" if arms[-1] is Ellipsis else f"{len(arms)} "
    if get_origin(arms[0]) is Literal:
        return f"a list of {count}words, each {type_in_words(arms[0])}"
    return f"a list of {count}{_NAMES[arms[0]][1]}"


def as_field(value: Any, annotation: Any) -> Any:
    """Return a value from Python as the value that its field holds: 1.0 for 1, a tuple for a list, text for a path.

    Raises:
        TypeError: if it has another type; the caller makes the message for users.
    """
    # The first is so nearly always, and a sweep of 1,000 points asks 50,000 times.
    if annotation is type(value) or annotation is Any or (value is None and is_optional(annotation)):
        return value
    wanted, origin, arms = _parts(annotation)
    if is_union(wanted):
        return _as_member_of_union(value, arms)
    if origin is tuple:
        return _as_tuple(value, arms)
    if origin is Literal:
        return _require(value, isinstance(value, str) and value in arms)
    if origin is Mapping or is_dataclass(wanted):
        return _require(value, isinstance(value, origin or wanted))
    return _as_plain(value, wanted)


def _as_member_of_union(value: Any, arms: tuple[Any, ...]) -> Any:
    *firsts, last = arms
    for arm in firsts:
        with suppress(TypeError):
            return as_field(value, arm)
    return as_field(value, last)


def _as_tuple(value: Any, arms: tuple[Any, ...]) -> tuple[Any, ...]:
    _require(value, isinstance(value, (list, tuple)))
    wanted = [arms[0]] * len(value) if arms[-1] is Ellipsis else arms
    _require(value, len(value) == len(wanted))
    return tuple(as_field(item, annotation) for item, annotation in zip(value, wanted, strict=True))


def _as_plain(value: Any, wanted: Any) -> Any:
    """Convert numbers of other libraries (`numpy.float32`) to Python's, which can be written to a file."""
    if wanted is float:
        return float(_require(value, isinstance(value, numbers.Real) and not isinstance(value, bool)))
    if wanted is int:
        return int(_require(value, isinstance(value, numbers.Integral) and not isinstance(value, bool)))
    if wanted is str and isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return _require(value, isinstance(value, wanted))


def _require(value: Any, condition: bool) -> Any:
    if not condition:
        raise TypeError(repr(value))
    return value
