"""How often `ddp-hpc why` is right: every death that was made, asked again, and a page of the answers beside those of NVRx.

    python -m tests.campaigns.deaths.on_machine FOLDER
    python -m tests.campaigns.deaths.on_cluster FOLDER
    python -m tests.campaigns.deaths.blind FOLDER
    python -m tests.campaigns.why FOLDER [PYTHON-OF-NVRX SOURCE-OF-NVRX COMMIT-OF-NVRX]

Writes docs/results/why.json and docs/results/why.md. `why` reads run directories alone, so that the page can be made anew by later code
from deaths that were made once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.durable import replace_text
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.why.reading import chosen_attempt, read_facts
from ddp_hpc.watch.why.verdict import verdict_of
from tests.campaigns.command_line import folder_that_exists, parser_of
from tests.campaigns.deaths.blind import BLIND
from tests.campaigns.deaths.on_machine import WHOLE
from tests.campaigns.deaths.peer import MEANS, Peer, Said, one_log
from tests.campaigns.deaths.table import ON_CLUSTER, ON_MACHINE, Death
from tests.campaigns.written import RESULTS, stamp

ABSTAINED = "unknown"
BEFORE = "By the code before these mends (`a6fea36`), of the same runs 93.2% (machine), 91.3% (Slurm) and 80.4% (blind) were right."


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was asked, and what was said."""

    death: Death
    said: str
    rank: int | None
    made: str
    """The commit that the death was made at."""
    peer: Said | None = None

    @property
    def grade(self) -> str:
        if self.said == ABSTAINED:
            return "abstained"
        return "right" if self.said in self.death.true else "wrong"

    @property
    def rank_grade(self) -> str:
        """Of a death that one rank has begun."""
        if self.rank is None:
            return "abstained"
        return "right" if self.rank == self.death.rank else "wrong"


def answer_to(death: Death, folder: Path) -> Answer:
    """Ask `why` about the first attempt in this folder."""
    run = RunDir(folder / "runs" / "dying")
    ledger = Ledger.read(run)
    attempt = chosen_attempt(run, ledger, 0)
    found = verdict_of(read_facts(run, ledger, attempt))
    # Where nothing has failed, because the run stopped as it was asked to, `why` prints the cause that the ledger has.
    said = found.failure or str(attempt.cause or "nothing").replace(" ", "-")
    return Answer(death=death, said=said, rank=found.rank, made=(folder / WHOLE).read_text().strip()[:7])


def _counts(grades: Sequence[str]) -> str:
    count = Counter(grades)
    whole = f"right {count['right']}, abstained {count['abstained']}, wrong {count['wrong']}, of {len(grades)}"
    return f"{whole} ({count['right'] / len(grades):.1%} right)" if grades else "none"


def _row(name: str, answers: Sequence[Answer]) -> str:
    of_one_rank = [one.rank_grade for one in answers if one.death.rank is not None]
    peers = [one.peer.grade(one.death) for one in answers if one.peer is not None]
    return f"| {name} | {_counts([one.grade for one in answers])} | {_counts(of_one_rank)} | {_counts(peers)} |"


def _confusion(answers: Sequence[Answer]) -> list[str]:
    ours = Counter((one.death.failure, one.said) for one in answers)
    names = sorted({one.death.failure for one in answers})
    rows = []
    for name in names:
        said = ", ".join(f"{other} {count}" for (failure, other), count in sorted(ours.items()) if failure == name)
        theirs = Counter(
            (one.peer.failure or "abstained", one.peer.grade(one.death))
            for one in answers
            if one.peer is not None and one.death.failure == name
        )
        peer = ", ".join(f"{other} {count} ({grade})" for (other, grade), count in sorted(theirs.items()))
        rows.append(f"| {name} | {said} | {peer} |")
    return rows


def as_markdown(answers: Sequence[Answer], when: Mapping[str, str], peer: str) -> str:
    """Return the page."""
    fitted = [one for one in answers if not one.death.is_blind]
    blind = [one for one in answers if one.death.is_blind]
    made = ", ".join(f"`{commit}` {count}" for commit, count in sorted(Counter(one.made for one in answers).items()))
    stops = sum(one.peer is not None and one.peer.decision == "STOP" for one in answers)
    asked = {one.death.name for one in answers}
    missing = [one.name for one in (*ON_MACHINE, *ON_CLUSTER, *BLIND) if one.name not in asked]
    peers = [(one.peer, one.death) for one in answers if one.peer is not None]
    num_wrong = sum(said.grade(death) == "wrong" for said, death in peers)
    lost = sum(said.grade(death) == "wrong" and said.quotes_lost_connection for said, death in peers)
    num_less = sum(one.said in one.death.true - {one.death.failure} for one in blind)
    amiss = [
        one for one in answers if one.grade != "right" or (one.death.rank is not None and one.rank_grade != "right")
    ]
    return "\n".join(
        [
            "# How often `ddp-hpc why` is right",
            "",
            (
                f"Measured on {when['date']} at commit `{when['commit']}` by `python -m tests.campaigns.why`: {len(answers)} runs that really "
                f"ended badly, on this machine and on the test cluster of Slurm. They were made once, at these commits: {made}; `why` was then asked "
                f"about the first attempt of each, by the code of `{when['commit']}`, from the run directory alone."
            ),
            "",
            (
                "The first two rows and the registry are from the same authors, and the rules were mended by the first two rows: by the lines of srun and "
                "torchrun, by the kernel's count of what it killed for memory, by what an agent saw of a rank without a report, and by the step and the node of a "
                "line of Slurm. The third row was written after the last change of the rules, from texts in public threads (`tests/campaigns/deaths/blind.py`), and "
                f"no rule was changed after it but one, which it has no case of: an exit code above 128 of a rank without a report is a signal. {BEFORE}"
            ),
            "",
            "| deaths | class | rank, where one began it | NVRx's class |",
            "| --- | --- | --- | --- |",
            _row("this machine, 3 ranks", [one for one in fitted if one.death.place == "machine"]),
            _row("Slurm, 2 nodes x 2 ranks", [one for one in fitted if one.death.place == "cluster"]),
            _row("blind", blind),
            _row("all", answers),
            "",
            (
                "`why` abstains by `unknown`. For a rank that hangs, `hang` counts as right for `hang-behind`; the column of the rank then says "
                f"that it abstained. In the blind row, {num_less} answers are a wider class that is true, too (`less` in the table). `why` never ends a run, so it has no wrong `stop` to give."
            ),
            "",
            "## What happened, and what was said",
            "",
            "| happened | `ddp-hpc why` | NVRx |",
            "| --- | --- | --- |",
            *_confusion(answers),
            "",
            "## Beside NVRx",
            "",
            (
                f"NVRx is the restart agent of nvidia-resiliency-ext at commit `{peer}`, by itself, without a language model: its first failure and its "
                "decision for a job's first failure. It reads one log and no run directory, so it got each rank's log, with the rank in front of the "
                "line and the rank that ended first before the others, and then the job's console, which has ddp_hpc's own sentence on the end. The run's name was "
                "taken out, because NVRx takes a word such as `segfault` in a path for the cause. Its classes are wider than ours; each answer that "
                "is not wrong counts as right:"
            ),
            "",
            "| its class | right for |",
            "| --- | --- |",
            *(f"| {name} | {', '.join(sorted(ours))} |" for name, ours in sorted(MEANS.items())),
            "",
            (
                "An `observed_exception` that quotes a lost connection is wrong: it follows from another rank's end. One for a rank without an exception "
                f"(a crash, a signal, an exit code) is right if it quotes a signal or an exit code. Of its wrong answers, "
                f"{lost} quote a lost connection: a crash, a signal and an exit code leave no line of their own in a rank's log, and ddp_hpc's own sentence on "
                f"them is no pattern of NVRx's. If these count as abstained instead, it is wrong {num_wrong - lost} times. It said STOP {stops} times, so none "
                "of its answers ends a job at the first failure."
            ),
            "",
            "## Abstained, wrong, or of another rank",
            "",
            *(
                f"- `{one.death.name}`: {one.said}, rank {one.rank}; it was {one.death.failure}, rank {one.death.rank}"
                for one in amiss
                if one.grade != "right" or one.rank_grade == "wrong"
            ),
            f"- `hang` without a rank: {sum(one.grade == 'right' and one.rank_grade == 'abstained' for one in amiss)} runs",
            "",
            (
                "Not measured here: faults of a GPU and real ones of NCCL (the blind row has their texts only), containers, and a recipe's SIGTERM and "
                "SIGINT, by which nothing fails."
            ),
            "",
            *(
                [f"Of the table, these were not made: {', '.join(f'`{name}`' for name in missing)}.", ""]
                if missing
                else []
            ),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Ask about all, and write the page."""
    parser = parser_of("tests.campaigns.why", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=folder_that_exists, help="where the deaths were made")
    parser.add_argument("nvrx", metavar="OF-NVRX", nargs="*", help="its Python, its source and its commit")
    asked = parser.parse_args(argv)
    folder, when = asked.folder, stamp()
    if len(asked.nvrx) not in {0, 3}:
        parser.error("of NVRx, give its Python, its source and its commit, or nothing.")
    deaths = [one for one in (*ON_MACHINE, *ON_CLUSTER, *BLIND) if (folder / one.name / WHOLE).exists()]
    if not deaths:
        parser.error(f"{folder} holds no death. Make them first: python -m tests.campaigns.deaths.on_machine FOLDER")
    answers = [answer_to(death, folder / death.name) for death in deaths]
    commit = ""
    if asked.nvrx:
        python, source, commit = asked.nvrx
        logs = [
            one_log(one, folder / one.name / "runs" / "dying", folder / "logs" / f"{one.name}.log") for one in deaths
        ]
        said = Peer(python=Path(python), source=Path(source)).ask(logs)
        answers = [Answer(**{**vars(one), "peer": peer}) for one, peer in zip(answers, said, strict=True)]
    lines = ",\n".join(json.dumps(_record(one)) for one in answers)
    head = json.dumps({**when, "nvrx": commit}).removesuffix("}")
    replace_text(RESULTS / "why.json", f'{head}, "answers": [\n{lines}\n]}}\n')
    replace_text(RESULTS / "why.md", as_markdown(answers, when, commit))
    return 0


def _record(answer: Answer) -> dict[str, Any]:
    peer = {} if answer.peer is None else {**asdict(answer.peer), "grade": answer.peer.grade(answer.death)}
    ours = {"said": answer.said, "said_rank": answer.rank, "grade": answer.grade, "made": answer.made}
    return {"name": answer.death.name, "failure": answer.death.failure, "rank": answer.death.rank, **ours, "nvrx": peer}


if __name__ == "__main__":
    sys.exit(main())
