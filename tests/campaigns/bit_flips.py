"""The campaign of flipped bits: 500 of them, one a training, and who is named; then many steps in which nothing is wrong.

    python -m tests.campaigns.bit_flips [--flips 500] [--others 50] [--healthy 100000]    # writes docs/results/bit-flips.{json,md}

`--others` more are of each of two kinds: exponents that lead to a loss that is not finite, and two ranks of three that are wrong alike.

Each training has 2 or 3 real processes, joined by gloo. After a difference, the run goes on from its newest checkpoint to the end.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import read_digests
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.campaigns.command_line import parser_of
from tests.campaigns.written import RESULTS, stamp
from tests.distributed.bit_flips import (
    BEFORE_A_COMPARISON,
    CASE,
    EVERY,
    LAST,
    Flip,
    Outcome,
    Where,
    attempted,
    random_flip,
    try_flips,
)
from tests.distributed.processes import in_group
from tests.strange.walks import Case

JSON, TABLE = RESULTS / "bit-flips.json", RESULTS / "bit-flips.md"
PLACES: Sequence[Where] = get_args(Where)
SHARES = {"weight": 0.3, "moment": 0.3, "gradient": 0.3, "local gradient": 0.1}
OF_THREE = 0.75
"""The share of trainings with three ranks; the others have two."""
A_GROUP = 25
"""Trainings of one set of processes."""
HEALTHY_RANKS = 2
HEALTHY_BATCH = 4


Part = Literal["one bit", "exponent", "alike"]
PARTS: dict[Part, str] = {
    "one bit": "",
    "exponent": "the highest bit of an exponent; plain gradient descent on squares, compared where it saves, every 20 steps",
    "alike": "the same bit on two of three ranks",
}
CASES: dict[Part, Case] = {"one bit": CASE, "exponent": BEFORE_A_COMPARISON, "alike": CASE}


def planned(num: int, others: int) -> Iterator[tuple[Part, int, list[Flip]]]:
    """Yield the kind of flips, the number of ranks, and the flips; the same each time."""
    chosen = random.Random(14)
    flips: dict[int, list[Flip]] = {3: [], 2: []}
    for where in PLACES:
        for number in range(round(num * SHARES[where])):
            world_size = 3 if number < round(num * SHARES[where] * OF_THREE) else 2
            flips[world_size].append(random_flip(chosen, world_size=world_size, where=where))
    for some in flips.values():
        chosen.shuffle(some)
    yield from (("one bit", world_size, some) for world_size, some in flips.items())
    for world_size, num_others in ((3, others - others // 2), (2, others // 2)):
        some = _some(chosen, ("weight", "gradient"), world_size, num_others)
        yield "exponent", world_size, [replace(one, bit=30) for one in some]
    some = _some(chosen, ("weight", "moment", "gradient"), 3, others)
    yield "alike", 3, [replace(one, num_alike=2) for one in some]


def _some(chosen: random.Random, places: Sequence[Where], world_size: int, num: int) -> list[Flip]:
    return [random_flip(chosen, world_size=world_size, where=places[number % len(places)]) for number in range(num)]


def verdict(one: Outcome, part: Part = "one bit") -> str:
    """Say what became of a flip, in one of the words of `VERDICTS`."""
    if one.end == "diverged":
        return "diverged"
    if one.end == "finished":
        return "no effect" if one.is_same else "not found"
    assert one.found_at is not None
    most = CASES[part].compare_every if part == "one bit" else LAST
    is_right = one.end_after == "finished" and one.is_same and 0 <= one.found_at - one.flip.step <= (most or LAST)
    wrong = one.flip.ranks(one.world_size)
    if is_right and part == "alike" and one.told_by == "vote" and not {*one.named} & {*wrong}:
        return "outvoted"
    if not is_right or one.named not in ((), wrong):
        return "WRONG"
    return "named" if one.named else "found"


VERDICTS = {
    "named": "found, the wrong ranks named, and the run ended with the same bits as undisturbed",
    "found": "the same, but no rank named",
    "outvoted": "found and undone, too; but the values of the next attempt did not tell enough to correct the vote, so the right rank was named",
    "diverged": "the loss became NaN on all ranks before a comparison, and the run ended as diverged",
    "no effect": "no comparison differed, and the run ended with the same bits as undisturbed",
    "not found": "no comparison differed, and the run ended with other bits",
    "WRONG": "found late, another rank named, or other bits at the end",
}


def tried(plan: Iterator[tuple[Part, int, list[Flip]]]) -> Iterator[tuple[Part, Outcome]]:
    for part, world_size, some in plan:
        for begin in range(0, len(some), A_GROUP):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder)
                function: Callable[[Group], list[Outcome]] = partial(
                    try_flips, path=path / "runs", flips=some[begin : begin + A_GROUP], case=CASES[part]
                )
                yield from ((part, one) for one in in_group(world_size, function, path / "ranks")[0])


def small() -> Recipe:
    rows = torch.randn(1000, 4, generator=torch.Generator().manual_seed(5))
    return Recipe(
        model=nn.Linear(4, 2),
        train_data=TensorDataset(rows, rows[:, :2].argmax(1)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
    )


def healthy(group: Group, path: Path, num_steps: int) -> str:
    train = {
        "epochs": num_steps * HEALTHY_BATCH // 1000 + 1,
        "max_steps": num_steps,
        "global_batch_size": HEALTHY_BATCH,
    }
    case = replace(
        CASE, recipe=small, train={**train, "lr": 1e-3, "record_samples": False}, log_every=10_000, save_every=num_steps
    )
    end, _ = attempted(group, path, attempt=0, case=case)
    return end


def main(argv: Sequence[str] | None = None) -> int:
    """Try all; write the results."""
    parser = parser_of("tests.campaigns.bit_flips", __doc__)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--others", type=int, default=50)
    parser.add_argument("--healthy", type=int, default=100_000)
    asked = parser.parse_args(argv)
    began, outcomes = time.monotonic(), []
    for part, one in tried(planned(asked.flips, asked.others)):
        outcomes.append({**asdict(one), "part": part, "verdict": verdict(one, part)})
        sys.stdout.write(f"{len(outcomes):4d} {one.world_size} ranks, {one.flip}: {outcomes[-1]['verdict']}\n")
        sys.stdout.flush()
    seconds, began = time.monotonic() - began, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ends = in_group(
            HEALTHY_RANKS, partial(healthy, path=Path(folder, "run"), num_steps=asked.healthy), Path(folder, "ranks")
        )
        compared = len(read_digests(RunDir(Path(folder, "run"))))
    result = {
        **stamp(),
        "every_steps": EVERY,
        "steps": LAST,
        "seconds": round(seconds),
        "healthy": {
            "steps": asked.healthy,
            "comparisons": compared,
            "alarms": sum(end != "finished" for end in set(ends)),
            "seconds": round(time.monotonic() - began),
        },
        "outcomes": outcomes,
    }
    JSON.write_text(json.dumps(result, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    TABLE.write_text(as_text(result), encoding="utf-8")
    return 0 if all(one["verdict"] != "WRONG" for one in outcomes) and set(ends) == {"finished"} else 1


def as_text(result: dict[str, Any]) -> str:
    """Return the page of a result."""
    outcomes, well = result["outcomes"], result["healthy"]
    heads = [name for name in VERDICTS if name != "WRONG" or any(one["verdict"] == "WRONG" for one in outcomes)]
    rows = []
    kinds = dict.fromkeys((one["part"], one["world_size"], one["flip"]["where"]) for one in outcomes)
    for part, world_size, where in sorted(
        kinds, key=lambda one: ([*PARTS].index(one[0]), -one[1], PLACES.index(one[2]))
    ):
        some = [
            one["verdict"]
            for one in outcomes
            if (one["part"], one["world_size"], one["flip"]["where"]) == (part, world_size, where)
        ]
        more = f": {PARTS[part]}" if PARTS[part] else ""
        rows.append(
            f"| {world_size} | {where}{more} | {len(some)} | "
            + " | ".join(str(some.count(name)) for name in heads)
            + " |"
        )
    plain = [one for one in outcomes if one["part"] == "one bit"]
    late = [one["found_at"] - one["flip"]["step"] for one in plain if one["found_at"] is not None]
    return (
        "# Flipped bits: found, named, and undone\n\n"
        f"{len(plain)} trainings of {result['steps']} steps, in each of which one random bit of one random 32-bit number is wrong once, on one random "
        f"rank: of a weight, of a moment of AdamW, of a gradient after the all-reduce, or (`local gradient`) before it. The ranks are "
        f"compared every {result['every_steps']} steps; {len(late)} flips were found, at most {max(late, default=0)} steps after they happened. "
        f"{len(outcomes) - len(plain)} more trainings are of two other kinds, as the table says. "
        f"In {well['steps']} steps of a small model in which nothing was wrong, none of {well['comparisons']} comparisons differed"
        f"{'' if not well['alarms'] else ' (WRONG: ALARMS)'}. Commit {result['commit'][:12]}, {result['date']}, by `python -m tests.campaigns.bit_flips`, "
        f"in {result['seconds'] + well['seconds']} s on a machine of two cores, while other work ran.\n\n"
        f"| ranks | what is wrong | flips | {' | '.join(heads)} |\n| --- | --- | --- |{' --- |' * len(heads)}\n"
        + "\n".join(rows)
        + "\n\n"
        + "\n".join(f"* **{name}**: {VERDICTS[name]}." for name in heads)
        + "\n\nA local gradient that is wrong reaches all ranks by the all-reduce: all have the same wrong weights, so no comparison can find it.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
