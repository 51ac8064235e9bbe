"""Whether a run has come through a storm: as if nothing had happened, and with nothing left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.samples import read_steps_taken, used_twice
from tests.slurm.storm.deeds import Done

BELONGS = frozenset(
    {
        *(
            "config.yaml",
            "run.lock",
            "attempts.jsonl",
            "submission.json",
            "submission.lock",
            "job.sbatch",
            "snapshots",
            "snapshot",
        ),
        *(
            "submitit",
            "progress.json",
            "metrics.jsonl",
            "metrics.superseded.jsonl",
            "checkpoints",
            "logs",
            "errors",
            "samples",
            "digests.jsonl",
            "timeline.jsonl",
            "waits.jsonl",
            "slow_ranks.jsonl",
            "DONE",
        ),
    }
)
"""What may lie in the directory of a run that has finished."""


def problems_of(run: RunDir, undisturbed: RunDir, done: Sequence[Done]) -> list[str]:
    """Return what is wrong with a finished run's records and files, one line each; its bits are looked at elsewhere."""
    return [*_metrics(run, undisturbed), *_samples(run, undisturbed), *_files(run), *_ledger(run, done)]


def _metrics(run: RunDir, undisturbed: RunDir) -> Iterator[str]:
    mine, theirs = (
        [(line["kind"], line["step"]) for line in read_json_lines(one.metrics)] for one in (run, undisturbed)
    )
    twice = sorted(key for key, count in Counter(mine).items() if count > 1)
    missing = sorted({*theirs} - {*mine})
    more = sorted({*mine} - {*theirs})
    for what, keys in (("twice", twice), ("missing", missing), ("not in the undisturbed run", more)):
        if keys:
            yield f"metrics.jsonl: {what}: {_few(keys)}"
    if mine != sorted(mine, key=lambda key: key[1]):
        yield "metrics.jsonl: steps are not in order"
    losses, expected = _losses(run), _losses(undisturbed)
    other = [step for step in expected if step in losses and losses[step] != expected[step]]
    if other:
        first = other[0]
        yield f"metrics.jsonl: another loss at {_few(other)} (at {first}: {losses[first]}, not {expected[first]})"


def _losses(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_json_lines(run.metrics) if line["kind"] == "train"}


def _samples(run: RunDir, undisturbed: RunDir) -> Iterator[str]:
    taken, expected = read_steps_taken(run), read_steps_taken(undisturbed)
    other = [
        step for step in sorted({*taken.steps, *expected.steps}) if taken.steps.get(step) != expected.steps.get(step)
    ]
    if other:
        yield f"samples: other ones than the undisturbed run's in the steps {_few(other)}"
    if twice := used_twice(taken):
        yield f"samples: used twice in an epoch: {_few(twice)}"


def _files(run: RunDir) -> Iterator[str]:
    odd = [path.name for path in run.checkpoints.iterdir() if not path.name.startswith("step-")]
    odd += [path.name for path in run.path.iterdir() if path.name not in BELONGS]
    odd += [str(path.relative_to(run.path)) for path in run.path.rglob("*.tmp")]
    if odd:
        yield f"left behind: {_few(sorted({*odd}))}"


def _ledger(run: RunDir, done: Sequence[Done]) -> Iterator[str]:
    for attempt in Ledger.read(run).attempts:
        if attempt.ended_at is None:
            yield f"attempts.jsonl: attempt {attempt.attempt} has no end"
            continue
        hit = {one.node for one in done if one.may_be_blamed in {"*", run.name} and one.at <= attempt.ended_at}
        if innocent := sorted({*attempt.failed_nodes} - hit):
            told = f"{attempt.cause}: {attempt.reason}"[:200]
            yield f"attempts.jsonl: attempt {attempt.attempt} blames {', '.join(innocent)}, where nothing was done ({told})"


def _few(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return shown if len(items) <= 5 else f"{shown} and {len(items) - 5} more"
