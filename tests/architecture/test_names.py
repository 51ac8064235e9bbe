"""A class name stands once, so that a search for it finds one thing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import ddp_hpc

PACKAGE = Path(ddp_hpc.__file__).parent


def classes_in(texts: list[str]) -> Counter[str]:
    return Counter(name for text in texts for name in re.findall(r"^\s*class (\w+)", text, re.MULTILINE))


def test_a_class_name_stands_once() -> None:
    found = classes_in([path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")])

    # Lightning's users and Transformers' import theirs from the adapter of their own library.
    assert {name for name, count in found.items() if count > 1} == {"AgreedStop"}


def test_a_name_that_stands_twice_is_found() -> None:
    assert classes_in(["class Plan: ...", "def f():\n    class Plan: ..."]) == {"Plan": 2}
