"""What two failures have in common: the mechanism without its circumstances, and the file or sample that it concerns. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SAMPLE = re.compile(r"`((?:train|eval)_data\[-?\d+\])`")
_QUOTED_PATH = re.compile(r"""['"]((?:/|\.{1,2}/)?[^'"\s]*/[^'"]+|[^'"\s/]+\.\w{1,8})['"]""")
_MOST_SEARCHED = 2000
"""Characters of a message: the search for a path takes quadratic time, and a message may have a million."""
_TEMPORARY = re.compile(r"(?:/tmp|/var/tmp|/dev/shm)(?:/|$)|/torch_\d")
_CIRCUMSTANCES = (
    (re.compile(r"/(?:tmp|var/tmp|dev/shm)/[^\s'\":,;]*"), "<tmp>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"0x[0-9a-fA-F]+"), "<address>"),
    (re.compile(r"\[?(?:\d{1,3}\.){3}\d{1,3}\]?(?::\d+)?"), "<address>"),
    (re.compile(r"\[[0-9a-fA-F:]*::?[0-9a-fA-F:]*\]:\d+"), "<address>"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?"), "<time>"),
    (re.compile(r"(?<!Errno )(?<![A-Za-z_])\d+(?:\.\d+)?"), "<n>"),
)
"""What differs from rank to rank, from node to node and from time to time."""


def mechanism(text: str, *, hosts: tuple[str, ...] = ()) -> str:
    """Return a text without rank, node, time, addresses, temporary paths and counts."""
    if names := "|".join(map(re.escape, sorted({host for host in hosts if host}, key=len, reverse=True))):
        text = re.sub(rf"\b(?:{names})\b", "<node>", text)
    for pattern, word in _CIRCUMSTANCES:
        text = pattern.sub(word, text)
    return " ".join(text.split())


def fingerprint(failure: str, text: str, place: str, *, hosts: tuple[str, ...] = ()) -> str:
    """Return a short hash that two failures share if they are of one class, one text and one place in the code."""
    import hashlib  # late: agents and workers read error reports, but compute no hash

    whole = "\n".join([failure, mechanism(text[:_MOST_SEARCHED], hosts=hosts), place])
    return hashlib.sha256(whole.encode("utf-8", errors="replace")).hexdigest()[:12]


def entity(text: str) -> str:
    """Return the sample or the file that a message names; empty where it names none, or a temporary file."""
    if sample := _SAMPLE.search(text):
        return sample[1]
    return next(iter(quoted_files(text)), "")


def quoted_files(text: str) -> Sequence[str]:
    """Return the paths in quotation marks, each once, without temporary ones."""
    paths = (found[1] for found in _QUOTED_PATH.finditer(text[:_MOST_SEARCHED]))
    return list(dict.fromkeys(path for path in paths if not _TEMPORARY.match(path)))
