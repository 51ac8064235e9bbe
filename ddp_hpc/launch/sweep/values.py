"""The values of one swept key, as `--sweep KEY=VALUES` lists them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_hpc.base.discretion import is_key_shown
from ddp_hpc.base.errors import ConfigError

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?", re.ASCII)
_KEY = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_OPENING, _CLOSING, _QUOTES = "[{", "]}", "'\""
MOST_POINTS = 100_000
"""A range or a product of more is an error of the user's, and would fill this process's memory."""


@dataclass(frozen=True)
class Axis:
    """A key, and the texts of its values in the order of the sweep."""

    key: str
    texts: tuple[str, ...]


def parse_axis(word: str) -> Axis:
    """Return the key and the values of `train.lr=0.1,0.01`, `seed=0..4` (with both ends) or `batch=32..128..32` (with a step).

    A comma within brackets or quotes divides nothing: `train.betas=[0.9,0.99],[0.8,0.99]` has two values.
    """
    key, equals, text = word.partition("=")
    if equals and not is_key_shown(key, text):
        word = f"{key}=..."  # in errors: the values may be secrets
    if not equals or _KEY.fullmatch(key) is None:
        raise ConfigError(f"`--sweep {word}` is not of the form KEY=VALUE,VALUE,... such as `train.lr=0.1,0.01`.")
    texts = [each for part in _divided(text) for each in _range(part, word)]
    if any(not each for each in texts):
        raise ConfigError(
            f"`--sweep {word}` has an empty value. Remove the comma that is too much; write `''` for a text without characters."
        )
    return Axis(key, tuple(texts))


def _divided(text: str) -> list[str]:
    """Return the parts between the commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES and (depth or not parts[-1].strip()):  # else an apostrophe within a text
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]


def _range(part: str, word: str) -> list[str]:
    """Return the whole numbers of a range, its end included; another text as it is."""
    match = _RANGE.fullmatch(part)
    if match is None:
        return [part]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if last < first or step == 0:
        raise ConfigError(
            f"`--sweep {word}` has the range {part!r}, which holds no number. Write FIRST..LAST or FIRST..LAST..STEP, with FIRST "
            "not above LAST and a STEP of at least 1."
        )
    if (last - first) // step >= MOST_POINTS:
        raise ConfigError(
            f"`--sweep {word}` has the range {part!r}, which holds more than {MOST_POINTS} numbers. Sweep fewer values."
        )
    return [str(number) for number in range(first, last + 1, step)]
