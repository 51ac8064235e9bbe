"""Words in braces in a configuration's texts, which stand for values that are known when runs are submitted. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
"""`${word}` belongs to a shell, or to Hydra."""


def names_in_braces(text: str) -> list[str]:
    """Return the words that stand in braces: `lr` for `--lr={lr}`."""
    return _BRACES.findall(text)


def fill_braces(text: str, values: Mapping[str, str]) -> str:
    """Return the text with each word in braces replaced that has a value; others stay as they are."""
    return _BRACES.sub(lambda match: values.get(match[1], match[0]), text)
