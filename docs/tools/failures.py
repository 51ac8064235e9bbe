"""The table of docs/troubleshooting.md, from the registry. `python docs/tools/failures.py` prints it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ddp_hpc.watch.why.signatures import REGISTRY, FailureClass

_ROLES = {"root": "", "either": "", "cascade": " (follows from another rank's end)", "confirmation": " (confirms it)"}


def as_markdown(registry: Mapping[str, FailureClass] = REGISTRY) -> str:
    """Return one section a class: its texts, what it means, and what to do."""
    return "\n".join(line for name, failure in registry.items() for line in _section(name, failure))


def _section(name: str, failure: FailureClass) -> list[str]:
    examples = [(" ".join(one.example.replace("`", "'").split()), _ROLES[one.role]) for one in failure.patterns]
    texts = [f"- `{text}`{role}" for text, role in examples]
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


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
