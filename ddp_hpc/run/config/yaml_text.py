"""Convert YAML text to plain values and back, by the rules of YAML 1.2: `1e-3` is a number, `12:30` and `no` are text.

PyYAML follows YAML 1.1. This module uses its parser, with the scalars of YAML 1.2 (https://yaml.org/spec/1.2.2, 10.3.2).
It reads the types of JSON only: null, booleans, numbers, text, lists, mappings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import yaml

from ddp_hpc.base.errors import ConfigError

try:
    from yaml import CSafeLoader as _BaseLoader
except ImportError:  # PyYAML was built without its C parser
    from yaml import SafeLoader as _BaseLoader  # type: ignore[assignment]  # the same class, slower

_TAG = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_TAG}merge"


class DictWithLines(dict[Any, Any]):
    """A mapping that remembers the line of each of its keys."""

    lines: dict[Any, int]


_BOOLEANS = {"true": True, "false": False}
_SCALAR_BY_TAG: dict[str, tuple[re.Pattern[str], str, Callable[[str], Any]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), "~nN", lambda _: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), "tTfF", lambda text: _BOOLEANS[text.lower()]),
    "int": (
        re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
        "-+0123456789",
        lambda text: int(text, 0 if text[:2] in {"0o", "0x"} else 10),
    ),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
        lambda text: float(re.sub(r"\.(?=[iInN])", "", text)),  # `.inf`, which Python writes `inf`
    ),
}
"""Tag -> pattern of such a scalar, characters with which it may begin, and conversion to its value."""


class _Loader(_BaseLoader):
    """Knows only the tags and scalars that `_register_scalars` adds."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
        return True


def _scalar_constructor(value_of: Callable[[str], Any]) -> Callable[[Any, yaml.ScalarNode], Any]:
    def construct(_: Any, node: yaml.ScalarNode) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            _refuse_tag(_, node)
        try:
            return value_of(node.value)
        except (ValueError, KeyError) as error:  # an explicit tag, `!!int x`; or too many digits
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error

    return construct


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> DictWithLines:
    if not isinstance(node, yaml.MappingNode):
        _refuse_tag(loader, node)
    has_merge = any(key_node.tag == _MERGE_TAG for key_node, _ in node.value)
    if has_merge:
        _refuse_duplicates(loader, node)
        loader.flatten_mapping(node)  # `<<: *defaults`
    mapping = DictWithLines()
    mapping.lines = {}
    for key_node, value_node in node.value:
        key = _construct_key(loader, key_node)
        mapping[key] = _construct(loader, value_node)
        mapping.lines[key] = key_node.start_mark.line + 1
    if len(mapping) < len(node.value) and not has_merge:  # what merges may set a key twice
        _refuse_duplicates(loader, node)
    return mapping


def _construct(loader: Any, node: yaml.Node) -> Any:
    """Return a node's value; that of a scalar without the steps that PyYAML needs for values that hold others."""
    constructor = _Loader.yaml_constructors.get(node.tag) if isinstance(node, yaml.ScalarNode) else None
    return loader.construct_object(node, deep=True) if constructor is None else constructor(loader, node)


def _refuse_tag(_: Any, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(
        None, None, f"the tag {node.tag!r} is not supported; remove it", node.start_mark
    )


def _construct_key(loader: Any, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key must be text or a number", node.start_mark)
    return _construct(loader, node)


def _refuse_duplicates(loader: Any, node: yaml.MappingNode) -> None:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == _MERGE_TAG:
            continue
        key, line = _construct_key(loader, key_node), key_node.start_mark.line + 1
        if key in seen:
            problem = f"the key {key!r} is already set on line {seen[key]}; remove one of the two"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen[key] = line


def _register_scalars() -> None:
    """Give the same table of scalars to the loader and the dumper, so that a dumped value reads back as the same value."""
    _Loader.yaml_constructors = {}
    for cls in (_Loader, _Dumper):
        cls.yaml_implicit_resolvers = {}
    for tag, (pattern, first, value_of) in _SCALAR_BY_TAG.items():
        starts = [*first, ""] if pattern.match("") else list(first)
        for cls in (_Loader, _Dumper):
            cls.add_implicit_resolver(f"{_TAG}{tag}", pattern, starts)
        _Loader.add_constructor(f"{_TAG}{tag}", _scalar_constructor(value_of))
    for cls in (_Loader, _Dumper):
        cls.add_implicit_resolver(f"{_TAG}merge", re.compile(r"(?:<<)$"), ["<"])
    _Loader.add_constructor(f"{_TAG}str", _scalar_constructor(str))
    _Loader.add_constructor(
        f"{_TAG}seq",
        lambda loader, node: (
            [loader.construct_object(item, deep=True) for item in node.value]
            if isinstance(node, yaml.SequenceNode)
            else _refuse_tag(loader, node)
        ),
    )
    _Loader.add_constructor(f"{_TAG}map", _construct_mapping)
    _Loader.add_constructor(None, _refuse_tag)
    _Dumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')
    )


_register_scalars()


def read_yaml(text: str | bytes, name: str) -> Any:
    """Return the value in `text`; mappings know the lines of their keys. `name` names the text in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # a subclass of SafeLoader with fewer tags
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{name}{place}: this is not valid YAML; correct it: {problem}.") from error
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{name}: this is not valid YAML; correct it: {problem}.") from error


def parse_plain_scalar(text: str) -> Any:
    """Return the value of `text` as an unquoted scalar: a number, a boolean, null, or the text itself."""
    for pattern, _, value_of in _SCALAR_BY_TAG.values():
        if pattern.match(text):
            try:
                return value_of(text)
            except ValueError:  # more digits than Python converts
                return text
    return text


_PLAIN_WORD_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
"""Text that needs no quotes, unless it reads as a number, a boolean or null."""


def _dump_simple(value: Any) -> str | None:
    """Return what PyYAML writes of a simple value, in a hundredth of its time; None for any other value."""
    if value is None:
        return "null"
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    if type(value) in {list, tuple} and not value:
        return "[]"
    is_word = type(value) is str and _PLAIN_WORD_PATTERN.fullmatch(value) and parse_plain_scalar(value) is value
    return value if is_word else None


def dump_value(value: Any) -> str:
    """Return the value as YAML on one line."""
    simple = _dump_simple(value)
    if simple is not None:
        return simple
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
