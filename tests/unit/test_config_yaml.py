"""YAML by the rules of 1.2, and errors that say where."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config import yaml_text
from ddp_hpc.run.config.yaml_text import DictWithLines, dump_value, parse_plain_scalar, read_yaml

SCALARS: list[tuple[str, Any]] = [
    ("1e-3", 1e-3),
    ("1E5", 1e5),
    (".5", 0.5),
    ("1.", 1.0),
    ("-0.25", -0.25),
    (".inf", math.inf),
    ("-.inf", -math.inf),
    ("12:30", "12:30"),
    ("010", 10),
    ("0o10", 8),
    ("0x10", 16),
    ("+3", 3),
    ("1_000", "1_000"),
    ("yes", "yes"),
    ("off", "off"),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("2026-01-31", "2026-01-31"),
    ("1.2.3", "1.2.3"),
    ("e5", "e5"),
    (".", "."),
    ("-", "-"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_a_plain_scalar_means_what_yaml_1_2_says(text: str, value: Any) -> None:
    assert parse_plain_scalar(text) == value
    assert type(parse_plain_scalar(text)) is type(value)
    if text != "-":  # alone, it begins a list
        assert read_yaml(f"key: {text}", "t") == {"key": value}


def test_not_a_number_is_a_number() -> None:
    assert math.isnan(parse_plain_scalar(".nan"))


@pytest.mark.parametrize(
    "text", [text for text, _ in SCALARS] + ["a: b", "# x", "x #y", "[1", "two\nlines", "\x07", " x"]
)
def test_text_that_looks_like_something_else_is_written_so_that_it_stays_text(text: str) -> None:
    written = dump_value(text)

    assert read_yaml(f"key: {written}  # a comment", "t") == {"key": text}
    assert "\n" not in written


def test_merge_keys_are_taken_in_and_own_keys_win() -> None:
    value = read_yaml("base: &b {lr: 1, epochs: 2}\nmine:\n  <<: *b\n  lr: 3\n", "t")

    assert value["mine"] == {"lr": 3, "epochs": 2}


def test_mappings_know_the_lines_of_their_keys() -> None:
    value = read_yaml("a: 1\n\nb:\n  c: 2\n", "t")

    assert isinstance(value, DictWithLines)
    assert value.lines == {"a": 1, "b": 3}
    assert value["b"].lines == {"c": 4}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2", r"t\.yaml, line 2, column 1: .*'a' is already set on line 1"),
        ("x:\n  a: 1\n  b: 2\n  a: 3", r"line 4, column 3: .*is already set on line 2"),
        ("a: [1, 2", r"line 1, column 9|line 2, column 1"),
        ("a:\n\tb: 1", r"line 2, column 1"),
        ("a: 1\n---\nb: 2", r"line 2, column 1: .*another document"),
        ("a: !!python/object/apply:os.getcwd []", r"line 1, column 4: .*tag .* is not supported"),
        ("a: !!binary aGk=", r"tag .* is not supported"),
        ("a: !!seq b", r"tag .* is not supported"),
        ("a: !!map b", r"tag .* is not supported"),
        ("a: !!str [1]", r"tag .* is not supported"),
        ("a: !!bool yes", r"t\.yaml.*: this is not valid YAML"),
        ("a: !!int x", r"line 1, column 4"),
        ("a: &x [*x]", r"line 1, column \d+: .*recursive"),
        ("? [1]\n: 2", r"a key must be text or a number"),
        ("a: \x07", r"t\.yaml: this is not valid YAML"),
        (b"a: \xff\xfe", r"t\.yaml.*: this is not valid YAML"),
    ],
)
def test_what_is_not_our_yaml_is_refused_with_its_place(text: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_yaml(text, "t.yaml")


@given(
    text=st.from_regex(r"[A-Za-z][A-Za-z0-9_./-]{0,12}", fullmatch=True)
    | st.sampled_from(["null", "No", "y", "e1", "Inf", "TRUE", "a.b/"])
)
def test_a_simple_value_is_written_as_pyyaml_writes_it(text: str) -> None:
    """Words, whole numbers, booleans and null are written without PyYAML, and must come out the same."""
    values: list[Any] = [text, 3, -1, 0, 10**30, True, False, None, [], ()]
    for value in values:
        whole = yaml.dump([value], Dumper=yaml_text._Dumper, default_flow_style=True, width=float("inf"))

        assert whole == f"[{dump_value(value)}]\n"
