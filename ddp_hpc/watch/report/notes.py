"""One to three notes on a run: a number, why it matters, and the key to set. A table, which a site can extend."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from string import Formatter
from typing import Any

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.sources import read_mapping
from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.machines import facts_of_machines

MOST_NOTES = 3
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
_CONDITION = re.compile(
    r"\s*(?P<name>[a-z_]+)\s*(?P<sign>>=|<=|==|>|<)\s*(?P<number>-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?)\s*"
)


@dataclass(frozen=True, kw_only=True)
class NoteFacts:
    """The numbers of a run that conditions and texts of notes may name; NaN where a number is not known."""

    goodput: float = math.nan
    """Share of the nodes' time, without the queue, that was training that counts."""
    queued_share: float = math.nan
    """Time in the queue as a share of all time since the first submission that is known."""
    starting_share: float = math.nan
    """Share of the nodes' time before training began in each attempt."""
    saving_share: float = math.nan
    """Share of the nodes' time in which the loop waited for saves."""
    lost_share: float = math.nan
    """Share of the nodes' time that a later attempt repeated, or that led to nothing."""
    saving_less_lost: float = math.nan
    """`saving_share` minus `lost_share`: with the best interval, both are about equal."""
    node_hours: float = math.nan
    gpu_hours: float = math.nan
    attempts: float = math.nan
    failures: float = math.nan
    """Attempts that ended otherwise than by their own commit or a cancellation."""
    steps_repeated: float = math.nan
    every_steps: float = math.nan
    """The key `checkpoint.every_steps`; with `auto`, its newest choice."""
    chooses_interval: float = 0.0
    """1 if that key is `auto`, else 0."""
    interval_of_shortest: float = math.nan
    """The time between saves that `auto` has chosen, divided by `checkpoint.min_interval_s`."""
    interval_of_longest: float = math.nan
    """The same, divided by `checkpoint.max_interval_s`."""
    best_every_steps: float = math.nan
    """The interval with the least expected cost."""
    checkpoint_cost: float = math.nan
    """Expected share of the time that saves, repeated steps and restarts take, with the interval that is set."""
    best_checkpoint_cost: float = math.nan
    """The same with `best_every_steps`."""
    checkpoint_gain: float = math.nan
    """`checkpoint_cost` minus `best_checkpoint_cost`."""
    data_share: float = math.nan
    """Share of rank zero's steps in which it waits for samples."""
    host_to_device_share: float = math.nan
    evaluation_share: float = math.nan
    slow_rank: float = math.nan
    """The rank that was named as slow, and for which the others waited longest in all."""
    slow_rank_share: float = math.nan
    """The share of a step for which they did so: the mean of all comparisons."""
    not_finite: float = math.nan
    """Log lines whose loss was NaN or infinite."""
    not_finite_at_end: float = math.nan
    """1 if the newest of them all is one, else 0."""
    skipped_share: float = math.nan
    """Share of the updates that were skipped, as their gradients were NaN or infinite."""
    data_workers: float = math.nan
    """The key `data.num_workers`."""
    workers: float = math.nan
    """Ranks."""
    measured_s: float = math.nan
    """For how long a node's GPUs and CPUs were measured since training began, or since the workers began where that is not known."""
    gpu_busy: float = math.nan
    """Share of the time in which some kernel ran, on the mean of the GPUs since training began."""
    gpu_memory_share: float = math.nan
    """The most memory that was used, of the GPU that had the least left."""
    cpu_busy: float = math.nan
    """CPU seconds that were used, as a share of those that the job may use."""
    cpus_of_node: float = math.nan
    """CPUs that the job may use on a node."""
    memory_share: float = math.nan
    """The most memory that was used on a node, of what the job may use."""


NAMES = tuple(one.name for one in fields(NoteFacts))


@dataclass(frozen=True, kw_only=True)
class NoteRule:
    """A note, and when it is shown."""

    when: str
    """Comparisons such as `lost_share > 0.05`, joined by `and`. One with a number that is not known does not hold."""
    text: str
    """With numbers in braces: `{lost_share:.0%}`."""
    key: str
    """What to set, or to type."""
    topic: str = ""
    """Of the rules with one topic, the first that holds is shown."""


@dataclass(frozen=True)
class Note:
    """A note on one run."""

    text: str
    key: str


RULES: Sequence[NoteRule] = (
    NoteRule(
        when="not_finite_at_end > 0",
        text="The loss was NaN or infinite in {not_finite:.0f} log lines, the newest among them. Weights that have become NaN or infinite do not recover.",
        key="train.grad_clip_norm=1.0, or a lower train.lr",
    ),
    NoteRule(
        when="not_finite > 0 and not_finite_at_end == 0",
        text="The loss was NaN or infinite in {not_finite:.0f} log lines, and finite again later.",
        key="train.grad_clip_norm=1.0, or a lower train.lr",
    ),
    NoteRule(
        when="skipped_share >= 0.05",
        text="{skipped_share:.0%} of the updates were skipped, because gradients were NaN or infinite: these steps trained nothing. With fp16, a few at the start are usual.",
        key="train.precision=bf16, or a lower train.lr",
    ),
    NoteRule(
        when="slow_rank_share >= 0.10",
        text="The other ranks wait {slow_rank_share:.0%} of each step for rank {slow_rank:.0f}, as the mean of the run. If that rank were as fast as the others, steps would be shorter by this share.",
        key="slurm.exclude=NODE, or data.num_workers if the rank waits for its samples",
    ),
    NoteRule(
        when="chooses_interval == 0 and checkpoint_gain >= 0.01 and best_every_steps > 0 and failures > 0",
        text="With checkpoint.every_steps={every_steps:.0f}, saves, repeated steps and restarts are expected to take {checkpoint_cost:.1%} of the time; with {best_every_steps:.0f}, {best_checkpoint_cost:.1%}.",
        key="checkpoint.every_steps={best_every_steps:.0f}",
        topic="interval",
    ),
    NoteRule(
        when="chooses_interval == 0 and saving_share >= 0.05 and saving_less_lost > 0",
        text="Training waits for saves {saving_share:.0%} of the time. With fewer saves it waits less, but a failure loses more steps.",
        key="a larger checkpoint.every_steps",
        topic="interval",
    ),
    NoteRule(
        when="chooses_interval == 1 and saving_share >= 0.05 and saving_less_lost > 0 and interval_of_longest >= 0.95",
        text="Training waits for saves {saving_share:.0%} of the time, although the run saves as seldom as checkpoint.max_interval_s allows. With fewer saves it waits less, but a failure loses more steps.",
        key="a larger checkpoint.max_interval_s",
        topic="interval",
    ),
    NoteRule(
        when="memory_share >= 0.90",
        text="A node used {memory_share:.0%} of the memory that the job may use. At the limit, the kernel kills a process of the job.",
        key="a larger resources.mem_gb, or a smaller data.num_workers",
    ),
    NoteRule(
        when="gpu_busy < 0.70 and cpu_busy >= 0.90 and data_share >= 0.10 and cpus_of_node > 0 and measured_s >= 300",
        text="The GPUs are idle for much of the time: they are busy {gpu_busy:.0%} of the time, while the {cpus_of_node:.0f} CPUs of each node are {cpu_busy:.0%} busy, and rank zero waits for samples in {data_share:.0%} of its steps. More loader processes would not help without more CPUs.",
        key="a larger resources.cpus_per_worker",
        topic="data",
    ),
    NoteRule(
        when="gpu_busy < 0.70 and cpu_busy < 0.70 and data_share >= 0.10 and measured_s >= 300",
        text="The GPUs are idle for much of the time: they are busy {gpu_busy:.0%} of the time, and rank zero waits for samples in {data_share:.0%} of its steps, while the CPUs are only {cpu_busy:.0%} busy. With {data_workers:.0f} loader processes for each worker, too few samples are loaded at the same time, or the disk is slow.",
        key="a larger data.num_workers, or stage.*",
        topic="data",
    ),
    NoteRule(
        when="gpu_busy < 0.50 and cpu_busy >= 0.90 and cpus_of_node > 0 and measured_s >= 300",
        text="The GPUs are idle for much of the time: they are busy {gpu_busy:.0%} of the time, while the {cpus_of_node:.0f} CPUs of each node are {cpu_busy:.0%} busy.",
        key="a larger resources.cpus_per_worker",
        topic="data",
    ),
    NoteRule(
        when="data_share >= 0.20",
        text="Rank zero waits for samples in {data_share:.0%} of its steps, with {data_workers:.0f} loader processes. Meanwhile, its processor or GPU is idle.",
        key="data.num_workers, a faster disk, or stage.*",
        topic="data",
    ),
    NoteRule(
        when="gpu_busy < 0.05 and measured_s >= 300",
        text="The GPUs are busy {gpu_busy:.1%} of the time: the training may not use them at all.",
        key="resources.gpus_per_node=0, or change the script so that it uses its GPU",
    ),
    NoteRule(
        when="chooses_interval == 0 and lost_share >= 0.10 and steps_repeated > 0 and saving_less_lost <= 0",
        text="{lost_share:.0%} of the nodes' time was lost: {steps_repeated:.0f} steps were trained that no checkpoint kept.",
        key="a smaller checkpoint.every_steps",
        topic="interval",
    ),
    NoteRule(
        when="chooses_interval == 1 and lost_share >= 0.10 and steps_repeated > 0 and saving_less_lost <= 0 and interval_of_shortest <= 1.05",
        text="{lost_share:.0%} of the nodes' time was lost: {steps_repeated:.0f} steps were trained that no checkpoint kept, although the run saves as often as checkpoint.min_interval_s allows.",
        key="a smaller checkpoint.min_interval_s",
        topic="interval",
    ),
    NoteRule(
        when="starting_share >= 0.20 and attempts >= 2",
        text="{starting_share:.0%} of the nodes' time passed before training began, in {attempts:.0f} attempts. It goes into imports, building the recipe and reading the checkpoint.",
        key="ddp-hpc env capture, stage.*, or longer jobs (resources.time_limit_min)",
    ),
    NoteRule(
        when="evaluation_share >= 0.20",
        text="Evaluations take {evaluation_share:.0%} of the loop's time.",
        key="a larger eval.every_epochs",
    ),
    NoteRule(
        when="queued_share >= 0.5",
        text="The run spent {queued_share:.0%} of its time in the queue. Shorter jobs often start sooner, as they fit between other jobs.",
        key="a smaller resources.time_limit_min",
    ),
)
"""The most important first."""
NOTHING = Note("All numbers of this run are in their usual ranges: no setting needs a change.", "")


def facts_of(run: RunData) -> NoteFacts:
    """Return the numbers of a run."""
    hours = run.goodput.node_hours
    running = sum(value for kind, value in hours.items() if kind not in {"queued", "unknown"})
    total = running + hours["queued"] + hours["unknown"]
    phases, _ = run.phases
    loop_s = sum(phases.values())
    rank, rank_share = _slowest(run)
    cost = run.cost
    best = math.nan if cost is None else cost.best_every_steps
    now_cost = math.nan if cost is None else cost.share(cost.every_steps)
    best_cost = math.nan if cost is None else cost.share(cost.best_every_steps)
    saving_share, lost_share = _ratio(hours["saving"], running), _ratio(hours["lost"], running)
    interval_s = math.nan if run.save_interval is None else run.save_interval.seconds
    return NoteFacts(
        goodput=_or_nan(run.goodput.goodput),
        queued_share=_ratio(hours["queued"], total),
        starting_share=_ratio(hours["starting"], running),
        saving_share=saving_share,
        lost_share=lost_share,
        saving_less_lost=saving_share - lost_share,
        node_hours=running + hours["unknown"],
        gpu_hours=run.goodput.gpu_hours,
        attempts=len(run.times),
        failures=run.goodput.num_failures,
        steps_repeated=run.goodput.steps_repeated,
        every_steps=_or_nan(run.every_steps),
        chooses_interval=float(run.values.get("checkpoint.every_steps") == "auto"),
        interval_of_shortest=_ratio(interval_s, _or_nan(run.values.get("checkpoint.min_interval_s"))),
        interval_of_longest=_ratio(interval_s, _or_nan(run.values.get("checkpoint.max_interval_s"))),
        best_every_steps=best,
        checkpoint_cost=now_cost,
        best_checkpoint_cost=best_cost,
        checkpoint_gain=now_cost - best_cost,
        data_share=_ratio(phases.get("data", 0.0), loop_s),
        host_to_device_share=_ratio(phases.get("host to device", 0.0), loop_s),
        evaluation_share=_ratio(phases.get("evaluation", 0.0), loop_s),
        slow_rank=rank,
        slow_rank_share=rank_share,
        not_finite=run.series.num_not_finite,
        not_finite_at_end=float(run.series.ends_not_finite),
        skipped_share=_ratio(_or_nan(run.series.num_skipped), float(run.status.step)),
        data_workers=_or_nan(run.values.get("data.num_workers")),
        workers=max((mark.world_size or 0 for mark in run.marks), default=0) or math.nan,
        **facts_of_machines(run),
    )


def _slowest(run: RunData) -> tuple[float, float]:
    """Return which of the ranks that were named as slow cost the most, and for which share of a step the others waited for it, on the mean."""
    shares = {
        rank: fmean(look.lost_s.get(rank, 0.0) / (look.step_s or 1.0) for look in run.looks)
        for rank in {one.rank for one in run.alarms}
        if run.looks
    }
    worst = max(shares, key=lambda rank: shares[rank], default=None)
    return (math.nan, math.nan) if worst is None else (worst, shares[worst])


def _or_nan(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def notes_of(facts: NoteFacts, rules: Sequence[NoteRule]) -> list[Note]:
    """Return the first notes whose conditions hold; one that says so where none holds."""
    values = {name: getattr(facts, name) for name in NAMES}
    holding = [rule for rule in rules if _holds(rule.when, values)]
    first = {rule.topic: rule for rule in reversed(holding)}
    shown = [rule for rule in holding if not rule.topic or rule is first[rule.topic]]
    found = [Note(rule.text.format(**values), rule.key.format(**values)) for rule in shown]
    return found[:MOST_NOTES] or [NOTHING]


def _holds(when: str, values: Mapping[str, float]) -> bool:
    matches = [_CONDITION.fullmatch(part) for part in when.split(" and ")]
    return all(one is not None and _COMPARE[one["sign"]](values[one["name"]], float(one["number"])) for one in matches)


def read_rules(path: Path) -> list[NoteRule]:
    """Read a site's own notes: a list `notes` with `when`, `text` and `key`. They come before ours.

    Raises:
        ConfigError: if the file cannot be read, or a note names a number that there is not.
    """
    listed = read_mapping(path).get("notes")
    if not isinstance(listed, list):
        raise ConfigError(
            f"{path} has no list `notes`. Write `notes:`, and below it items with `when`, `text` and `key`."
        )
    return [_rule(path, number, one) for number, one in enumerate(listed, 1)]


def _rule(path: Path, number: int, plain: Any) -> NoteRule:
    where = f"Note {number} of {path}"
    if not isinstance(plain, dict) or set(plain) - {"topic"} != {"when", "text", "key"}:
        raise ConfigError(f"{where} must have the keys `when`, `text` and `key`, may have `topic`, and no others.")
    rule = NoteRule(**{key: str(value) for key, value in plain.items()})
    for part in rule.when.split(" and "):
        match = _CONDITION.fullmatch(part)
        if match is None or match["name"] not in NAMES:
            raise ConfigError(
                f"{where} has the condition {part!r}. Write NAME > NUMBER (or <, >=, <=, ==), where NAME is one of {', '.join(NAMES)}."
            )
    try:
        parts = [*Formatter().parse(rule.text), *Formatter().parse(rule.key)]
        unknown = {name for _, name, _, _ in parts if name is not None and name not in NAMES}
        if not unknown:
            (rule.text + rule.key).format(**dict.fromkeys(NAMES, 0.0))
    except (ValueError, LookupError, AttributeError) as error:
        unknown = {str(error)}
    if unknown:
        raise ConfigError(
            f"{where} has a text that cannot be filled in: {', '.join(sorted(unknown))}. Only these names may stand in braces: {', '.join(NAMES)}."
        )
    return rule
