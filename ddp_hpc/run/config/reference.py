"""The reference of all keys: type, default, and meaning. The meaning is the docstring below each field of the spec."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from itertools import pairwise

from ddp_hpc.base.field_types import type_in_words
from ddp_hpc.run.config.keys import Key, all_keys, is_below, is_below_open_key, is_section, unknown_key_error
from ddp_hpc.run.config.yaml_text import dump_value

NAME_DEFAULT_TEXT = "the file's name"
"""The default of `name`, the one key without a default in the spec."""


def reference_rows() -> list[dict[str, str]]:
    """Return a row for every key, in the order of the spec: its `key`, `type`, `default` and `meaning`."""
    return [
        {
            "key": name,
            "type": type_in_words(key.annotation),
            "default": NAME_DEFAULT_TEXT if key.default is MISSING else dump_value(key.default),
            "meaning": _meaning(key),
        }
        for name, key in all_keys().items()
    ]


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a key, or of a section."""
    if name and not is_section(name) and name not in all_keys() and not is_below_open_key(name):
        raise unknown_key_error(name, "the command line")
    return [
        row
        for row in reference_rows()
        if is_below(row["key"], name) or (is_below_open_key(name) and is_below(name, row["key"]))
    ]


def as_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the rows as tables for docs/, one a section."""
    lines: list[str] = []
    opened = None
    for row in rows:
        section = row["key"].rpartition(".")[0]
        if section != opened:
            lines += ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
            opened = section
        default = row["default"] if row["default"] == NAME_DEFAULT_TEXT else f"`{row['default']}`"
        meaning = row["meaning"].replace("|", chr(92) + "|")
        lines.append(f"| `{row['key']}` | {row['type']} | {default} | {meaning} |")
    return "\n".join(lines).strip() + "\n"


def _meaning(key: Key) -> str:
    # A field's text stands in the source of the class that declares the field.
    homes: list[type] = [base for base in (key.section or object).__mro__ if is_dataclass(base)]
    texts = [_field_docstrings(base.__module__).get(base.__name__, {}) for base in homes]
    return ChainMap(*texts).get(key.name.rpartition(".")[2], "")


@cache
def _field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> the docstring below the field in the module's source."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found: dict[str, dict[str, str]] = {}
    for section in [one for one in tree.body if isinstance(one, ast.ClassDef)]:
        for field, text in pairwise(section.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found.setdefault(section.name, {})[name] = " ".join(words.split())
    return found
