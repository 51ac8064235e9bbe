"""How often the slow rank is named: 24 trainings with a slow rank on this machine, 24 on the test cluster, 20 without one on a busy machine.

    python -m tests.campaigns.stragglers FOLDER [NUM_AT_ONCE]      # as root, for the cluster

Writes docs/results/stragglers.json and docs/results/stragglers.md. Runs that FOLDER holds already are not made again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ddp_hpc.base.durable import replace_text
from ddp_hpc.cluster.slow_ranks.judge import judge
from ddp_hpc.cluster.slow_ranks.summary import read_report
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import read_alarms
from tests.campaigns.command_line import folder_to_fill, parser_of
from tests.campaigns.written import RESULTS, stamp
from tests.slow_ranks.cases import Case, train
from tests.slurm.cluster import Cluster, booted, why_not

PLACES = ("data", "forward", "backward")
DELAYS = (0.05, 0.1, 0.2, 0.4)
MOST_STEPS = 50
NUM_HEALTHY = 20
BUSY = 2
"""How many processes use a CPU each beside the trainings without a slow rank."""
SLOW = [
    Case(where=where, slow=number % 3, delay=delay, is_script=is_script)
    for is_script in (False, True)
    for number, (where, delay) in enumerate((where, delay) for where in PLACES for delay in DELAYS)
]
ON_CLUSTER = [replace(case, launcher="srun" if case.is_script else "torchrun") for case in SLOW]
"""The same on three nodes, with a launcher that is not ours."""
HEALTHY = [
    Case(slow=-1 - number, base=0.1, work=20, steps=120, is_script=number % 2 == 1) for number in range(NUM_HEALTHY)
]


@dataclass(frozen=True)
class Answer:
    """What was to be named, and what was."""

    name: str
    slow: int | None
    named: list[int]
    step: int | None
    """The newest step when the first alarm came."""
    share: float | None
    cause: str
    load: float
    num_judged: int = 0
    """How many steps the last look judged; a look without a verdict is no proof of health."""
    commit: str = ""
    """Of the code under test."""

    @property
    def is_right(self) -> bool:
        return self.named == ([] if self.slow is None else [self.slow]) and (self.step or 0) <= MOST_STEPS


def answer_to(case: Case, folder: Path, cluster: Cluster | None = None) -> Answer:
    """Train, unless that was done, and read what the run's records say."""
    kept = folder / f"{case.name}.json"
    if kept.exists():
        return Answer(**json.loads(kept.read_text()))
    place = (folder if cluster is None else cluster.shared) / case.name
    with watched(RunDir(place / "runs" / case.name), case.ranks) as judged:
        run, printed = train(case, place, cluster)
    alarms = read_alarms(run)
    first = alarms[0] if alarms else None
    answer = Answer(
        name=case.name,
        slow=case.slow if case.slow >= 0 else None,
        named=sorted({one.rank for one in alarms}),
        step=_step_of_first(run, printed) if first else None,
        share=first.share if first else None,
        cause=first.cause if first else "",
        load=os.getloadavg()[0],
        num_judged=judged[-1] if judged else 0,
        commit=stamp()["commit"][:7],
    )
    replace_text(kept, json.dumps(asdict(answer)))
    return answer


@contextmanager
def watched(run: RunDir, ranks: int) -> Iterator[list[int]]:
    """Judge the reports while the training goes on, because they are removed at its end; give the number of steps of each look that could."""
    seen: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(2.0):
            reports = (read_report(run.launches(0, rank)) for rank in range(ranks))
            verdict = judge([one for one in reports if one is not None])
            if not verdict.unknown:
                seen.append(verdict.num_steps)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def _step_of_first(run: RunDir, printed: str) -> int | None:
    """Return the step at the first alarm: of a script, the last one that it had printed."""
    before = printed.partition("is slow:")[0]
    steps = re.findall(r"^step (\d+)$", before, flags=re.MULTILINE)
    return int(steps[-1]) if steps else read_alarms(run)[0].since_step


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Use this many CPUs."""
    pids = []
    for _ in range(number):
        pid = os.fork()
        if pid == 0:
            signal.alarm(3600)
            while True:
                pass
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _launcher_of(name: str) -> str:
    words = name.split("-")
    return f"{words[-1]} on the cluster" if words[-1] in {"srun", "torchrun"} else "agent on one machine"


def as_markdown(answers: Sequence[Answer], when: Mapping[str, str]) -> str:
    """Return the page."""
    slow = [one for one in answers if one.slow is not None]
    healthy = [one for one in answers if one.slow is None]
    recipes = [one for one in slow if one.name.startswith("recipe")]
    right_causes = sum(one.cause == one.name.split("-")[1] for one in recipes)
    wrong_causes = sum(one.cause not in ("", one.name.split("-")[1]) for one in recipes)
    steps = [one.step for one in slow if one.step is not None]
    rows = [
        f"| `{one.name}` | {'none' if one.slow is None else one.slow} | {', '.join(map(str, one.named)) or 'none'} | "
        f"{'' if one.step is None else one.step} | {'' if one.share is None else f'{one.share:.0%}'} | {one.cause} | {one.load:.0f} |"
        for one in answers
    ]
    launched = Counter(_launcher_of(one.name) for one in slow)
    right = Counter(_launcher_of(one.name) for one in slow if one.is_right)
    by_launcher = "; ".join(f"{name} {right[name]} of {launched[name]}" for name in launched)
    return "\n".join(
        [
            "# How often the slow rank is named",
            "",
            (
                f"Measured on {when['date']} by `python -m tests.campaigns.stragglers`, at the commits {', '.join(sorted({one.commit for one in answers}))}: trainings of three ranks, as "
                f"recipes and as scripts that know nothing of ddp_hpc, on one machine with {os.cpu_count()} CPUs, started by the agent, and on three nodes of the test cluster "
                "(which share these CPUs), recipes started by torchrun and scripts by srun. A step takes 0.3 s and more; one "
                "rank sleeps 50, 100, 200 or 400 ms longer in each step, while it loads data, in its forward pass, or in its backward pass."
            ),
            "",
            f"- Right rank within {MOST_STEPS} steps, and no other: {sum(one.is_right for one in slow)} of {len(slow)} ({by_launcher}); the alarm came at step {median(steps) if steps else 0:.0f} in the middle, {max(steps, default=0)} at the latest.",
            f"- Cause, of the {len(recipes)} recipes, when the alarm came: {right_causes} right, {wrong_causes} wrong, {len(recipes) - right_causes - wrong_causes} without one.",
            f"- Trainings without a slow rank, beside {BUSY} processes that use a CPU each: {sum(bool(one.named) for one in healthy)} of {len(healthy)} gave an alarm; in {sum(one.num_judged > 0 for one in healthy)} of them the last look could judge the ranks, by {min((one.num_judged for one in healthy if one.num_judged), default=0)} steps or more.",
            "",
            "| training | slow rank | named | at step | share of the step | cause | load of the machine |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "Not measured here: NCCL; nodes with clocks of their own. The delays are sleeps, not slow hardware. A commit is the one that holds the code that ran; some trainings ran shortly before it was made.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("tests.campaigns.stragglers", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=folder_to_fill, help="where the trainings are made and kept")
    parser.add_argument(
        "at_once", metavar="NUM_AT_ONCE", type=int, nargs="?", default=1, help="trainings at a time (default: 1)"
    )
    asked = parser.parse_args(argv)
    if asked.at_once < 1:
        parser.error(f"NUM_AT_ONCE is {asked.at_once}, but it must be 1 or more.")
    folder, at_once = asked.folder, asked.at_once
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        answers = [*pool.map(lambda case: answer_to(case, folder), SLOW)]
    assert not why_not(), why_not()
    with booted("stragglers") as cluster, ThreadPoolExecutor(at_once) as pool:
        answers += pool.map(lambda case: answer_to(case, folder, cluster), ON_CLUSTER)
    with busy(BUSY), ThreadPoolExecutor(at_once) as pool:
        answers += pool.map(lambda case: answer_to(case, folder), HEALTHY)
    when = stamp()
    rows: list[dict[str, Any]] = [asdict(one) for one in answers]
    replace_text(RESULTS / "stragglers.json", json.dumps({**when, "trainings": rows}, indent=1) + "\n")
    replace_text(RESULTS / "stragglers.md", as_markdown(answers, when))
    sys.stdout.write((RESULTS / "stragglers.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
