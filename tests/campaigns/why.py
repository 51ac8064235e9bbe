"""How often `ddp-hpc why` is right: each death of `tests.distributed.deaths`, really, and a table of the answers.

    python -m tests.campaigns.why [FOLDER]

Writes docs/results/why.json and docs/results/why.md. Runs that FOLDER holds already are not made again: `why` is asked about them, as
it reads the run directory alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.durable import replace_text
from tests.campaigns.written import RESULTS, stamp
from tests.distributed.deaths import DEATHS, Death, ask, happen

ABSTAINED = "unknown"


@dataclass(frozen=True)
class Answer:
    """What was asked, and what was said."""

    name: str
    expected: str
    said: str
    is_right_rank: bool

    @property
    def is_right(self) -> bool:
        return self.said == self.expected


def answer_to(death: Death, folder: Path) -> Answer:
    """Let it happen, unless it has, and ask."""
    if not folder.exists():
        happen(death, folder)
    said = ask(folder)
    is_right_rank = death.rank in (None, said["rank"])
    return Answer(death.name, death.failure, str(said["failure"]), is_right_rank)


def as_markdown(answers: Sequence[Answer], when: Mapping[str, str], made: Mapping[str, str]) -> str:
    """Return the page: the rates, and expected against said."""
    num_right = sum(one.is_right for one in answers)
    of_one_rank = {death.name for death in DEATHS if death.rank is not None}
    ranks = [one.is_right_rank for one in answers if one.name in of_one_rank]
    num_abstained = sum(one.said == ABSTAINED for one in answers)
    pairs = Counter((one.expected, one.said) for one in answers)
    rows = [f"| {expected} | {said} | {count} |" for (expected, said), count in sorted(pairs.items())]
    wrong = [f"- `{one.name}`: {one.said} instead of {one.expected}" for one in answers if not one.is_right]
    wrong += [f"- `{one.name}`: another rank" for one in answers if one.is_right and not one.is_right_rank]
    return "\n".join(
        [
            "# How often `ddp-hpc why` is right",
            "",
            (
                f"Measured on {when['date']} at commit `{when['commit']}` by `python -m tests.campaigns.why`: {len(answers)} runs on one machine, each of two ranks, "
                "that really ended badly (`tests/distributed/deaths.py`): recipes, scripts that are forked, and scripts that are new processes."
            ),
            f"The runs were made at commit `{made['commit']}`. Classes and cases are from the same authors, so this is no blind trial.",
            "",
            f"- Class right: {num_right} of {len(answers)}. Abstained (`unknown`): {num_abstained}. Wrong: {len(answers) - num_right - num_abstained}.",
            f"- Rank right, where one rank is the root: {sum(ranks)} of {len(ranks)}. In the others no rank is expected beforehand.",
            "",
            "| happened | said | runs |",
            "| --- | --- | --- |",
            *rows,
            "",
            *(["Wrong or abstained:", "", *wrong, ""] if wrong else []),
            (
                "Not measured here: anything of a GPU, of NCCL, of Slurm or of a container; their texts are only compared with the registry "
                "(`tests/unit/test_why_signatures.py`)."
            ),
            "",
        ]
    )


def main() -> int:
    """Run all, and write the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    when, answers = stamp(), []
    made = folder / "made.json"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(when))
    for death in DEATHS:
        answers.append(answer_to(death, folder / death.name))
        print(answers[-1], flush=True)  # noqa: T201  a campaign is watched
    record: dict[str, Any] = {**when, "answers": [vars(one) for one in answers]}
    replace_text(RESULTS / "why.json", json.dumps(record, indent=1) + "\n")
    replace_text(RESULTS / "why.md", as_markdown(answers, when, json.loads(made.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
