"""The table of docs/troubleshooting.md, from the registry. `python docs/tools/failures.py` prints it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ddp_hpc.watch.why.signatures import REGISTRY, FailureClass, match_exception, match_line
from tests.failure_texts import TEXTS

_ROLES = {"root": "", "either": "", "cascade": " (follows from another rank's end)", "confirmation": " (confirms it)"}


def as_markdown() -> str:
    """Return one section a class: its texts, what it means, and what to do."""
    return "\n".join(line for name, failure in REGISTRY.items() for line in _section(name, failure))


def _section(name: str, failure: FailureClass) -> list[str]:
    texts = [f"- `{' '.join(text.replace('`', chr(39)).split())}`{_role(text)}" for text in TEXTS.get(name, ())]
    filled = failure.to_do.format(run="RUN", attempt="K", rank="N", again="it continues from step S")
    return [
        f"## {failure.title[0].upper()}{failure.title[1:]}",
        "",
        f"`{name}`",
        "",
        *texts,
        *([""] if texts else []),
        failure.means,
        "",
        f"**To do.** {filled}",
        "",
    ]


def _role(text: str) -> str:
    match = match_exception(text) or match_line(text)
    return _ROLES[match.role] if match else ""


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
