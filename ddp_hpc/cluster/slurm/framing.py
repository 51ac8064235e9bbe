"""Send one answer of each node of a job step through srun's standard output.

srun passes on the output of a task in lines of at most 1,024 bytes, and mixes the lines of all tasks. A TaskProlog or an
environment module may print to the same output. So each node splits its answer into short lines. Each line carries a mark
(a random word that the caller chose), the node's name and the line's number. The reader ignores all other text.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from typing import Any

_CHUNK = 640
"""Characters of an answer in one line; with the mark, the name and the numbers it stays below srun's 1,024 bytes."""
_LINE = re.compile(
    r"<ddp-hpc (?P<mark>\w+) (?P<node>[^\s<>]+) (?P<number>\d{1,9})/(?P<count>\d{1,9}) (?P<chunk>[\w+/=]*)>", re.ASCII
)


def framed(answer: Any, *, node: str, mark: str) -> str:
    """Return the lines that a node prints as its answer. They begin with a line break: the text before may lack one."""
    text = base64.b64encode(zlib.compress(json.dumps(answer).encode())).decode("ascii")
    chunks = [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)]
    lines = (f"<ddp-hpc {mark} {node} {number}/{len(chunks)} {chunk}>\n" for number, chunk in enumerate(chunks))
    return "\n" + "".join(lines)


def read_answers(printed: str, mark: str) -> dict[str, Any]:
    """Return the answer of each node. A node is left out if a part of its answer is missing or damaged."""
    parts: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in _LINE.finditer(printed):
        if line["mark"] == mark:
            parts.setdefault(line["node"], {})[int(line["number"])] = line["chunk"]
            counts[line["node"]] = int(line["count"])
    whole = {node: found for node, found in parts.items() if len(found) == counts[node] == max(found) + 1}
    answers = {}
    for node, found in whole.items():
        try:
            text = base64.b64decode("".join(found[number] for number in sorted(found)), validate=True)
            answers[node] = json.loads(zlib.decompress(text))
        except (binascii.Error, zlib.error, ValueError):
            continue
    return answers
