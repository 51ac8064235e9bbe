"""One to three notes on a run: a number, why it matters, and the key to set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.machines import facts_of_machines

MOST_NOTES = 3


@dataclass(frozen=True, kw_only=True)
class NoteFacts:
    """The numbers of a run that conditions and texts of notes name. NaN where a number is not known: no comparison with it holds."""

    queued_share: float = math.nan
    """Time in the queue as a share of all time since the first submission that is known."""
    starting_share: float = math.nan
    """Share of the nodes' time before training began in each attempt."""
    saving_share: float = math.nan
    """Share of the nodes' time in which the loop waited for saves."""
    lost_share: float = math.nan
    """Share of the nodes' time that a later attempt repeated, or that led to nothing. With the best interval, it is about `saving_share`."""
    attempts: float = math.nan
    failures: float = math.nan
    """Attempts that ended otherwise than by their own commit or a cancellation."""
    steps_repeated: float = math.nan
    every_steps: float = math.nan
    """The key `checkpoint.every_steps`; with `auto`, its newest choice."""
    is_auto: bool = False
    """Whether that key is `auto`."""
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
    data_share: float = math.nan
    """Share of rank zero's steps in which it waits for samples."""
    evaluation_share: float = math.nan
    slow_rank: float = math.nan
    """The rank that was named as slow, and for which the others waited longest in all."""
    slow_rank_share: float = math.nan
    """The share of a step for which they did so: the mean of all comparisons."""
    not_finite: float = math.nan
    """Log lines whose loss was NaN or infinite."""
    is_not_finite_at_end: bool = False
    """Whether the newest of them all is one."""
    skipped_share: float = math.nan
    """Share of the updates that were skipped, as their gradients were NaN or infinite."""
    data_workers: float = math.nan
    """The key `data.num_workers`."""
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


@dataclass(frozen=True, kw_only=True)
class NoteRule:
    """A note, and when it is shown."""

    when: Callable[[NoteFacts], bool]
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
        when=lambda run: run.is_not_finite_at_end,
        text="The loss was NaN or infinite in {not_finite:.0f} log lines, the newest among them. Weights that have become NaN or infinite do not recover.",
        key="train.grad_clip_norm=1.0, or a lower train.lr",
    ),
    NoteRule(
        when=lambda run: run.not_finite > 0 and not run.is_not_finite_at_end,
        text="The loss was NaN or infinite in {not_finite:.0f} log lines, and finite again later.",
        key="train.grad_clip_norm=1.0, or a lower train.lr",
    ),
    NoteRule(
        when=lambda run: run.skipped_share >= 0.05,
        text="{skipped_share:.0%} of the updates were skipped, because gradients were NaN or infinite: these steps trained nothing. With fp16, a few at the start are usual.",
        key="train.precision=bf16, or a lower train.lr",
    ),
    NoteRule(
        when=lambda run: run.slow_rank_share >= 0.10,
        text="The other ranks wait {slow_rank_share:.0%} of each step for rank {slow_rank:.0f}, as the mean of the run. If that rank were as fast as the others, steps would be shorter by this share.",
        key="slurm.exclude=NODE, or data.num_workers if the rank waits for its samples",
    ),
    NoteRule(
        when=lambda run: (
            not run.is_auto
            and run.checkpoint_cost - run.best_checkpoint_cost >= 0.01
            and run.best_every_steps > 0
            and run.failures > 0
        ),
        text="With checkpoint.every_steps={every_steps:.0f}, saves, repeated steps and restarts are expected to take {checkpoint_cost:.1%} of the time; with {best_every_steps:.0f}, {best_checkpoint_cost:.1%}.",
        key="checkpoint.every_steps={best_every_steps:.0f}",
        topic="interval",
    ),
    NoteRule(
        when=lambda run: not run.is_auto and run.saving_share >= 0.05 and run.saving_share > run.lost_share,
        text="Training waits for saves {saving_share:.0%} of the time. With fewer saves it waits less, but a failure loses more steps.",
        key="a larger checkpoint.every_steps",
        topic="interval",
    ),
    NoteRule(
        when=lambda run: (
            run.is_auto
            and run.saving_share >= 0.05
            and run.saving_share > run.lost_share
            and run.interval_of_longest >= 0.95
        ),
        text="Training waits for saves {saving_share:.0%} of the time, although the run saves as seldom as checkpoint.max_interval_s allows. With fewer saves it waits less, but a failure loses more steps.",
        key="a larger checkpoint.max_interval_s",
        topic="interval",
    ),
    NoteRule(
        when=lambda run: run.memory_share >= 0.90,
        text="A node used {memory_share:.0%} of the memory that the job may use. At the limit, the kernel kills a process of the job.",
        key="a larger resources.mem_gb, or a smaller data.num_workers",
    ),
    NoteRule(
        when=lambda run: (
            run.gpu_busy < 0.70
            and run.cpu_busy >= 0.90
            and run.data_share >= 0.10
            and run.cpus_of_node > 0
            and run.measured_s >= 300
        ),
        text="The GPUs are idle for much of the time: they are busy {gpu_busy:.0%} of the time, while the {cpus_of_node:.0f} CPUs of each node are {cpu_busy:.0%} busy, and rank zero waits for samples in {data_share:.0%} of its steps. More loader processes would not help without more CPUs.",
        key="a larger resources.cpus_per_worker",
        topic="data",
    ),
    NoteRule(
        when=lambda run: (
            run.gpu_busy < 0.70 and run.cpu_busy < 0.70 and run.data_share >= 0.10 and run.measured_s >= 300
        ),
        text="The GPUs are idle for much of the time: they are busy {gpu_busy:.0%} of the time, and rank zero waits for samples in {data_share:.0%} of its steps, while the CPUs are only {cpu_busy:.0%} busy. With {data_workers:.0f} loader processes for each worker, too few samples are loaded at the same time, or the disk is slow.",
        key="a larger data.num_workers, or stage.*",
        topic="data",
    ),
    NoteRule(
        when=lambda run: (
            run.gpu_busy < 0.50 and run.cpu_busy >= 0.90 and run.cpus_of_node > 0 and run.measured_s >= 300
        ),
        text="The GPUs are idle for much of the time: they are busy {gpu_busy:.0%} of the time, while the {cpus_of_node:.0f} CPUs of each node are {cpu_busy:.0%} busy.",
        key="a larger resources.cpus_per_worker",
        topic="data",
    ),
    NoteRule(
        when=lambda run: run.data_share >= 0.20,
        text="Rank zero waits for samples in {data_share:.0%} of its steps, with {data_workers:.0f} loader processes. Meanwhile, its processor or GPU is idle.",
        key="data.num_workers, a faster disk, or stage.*",
        topic="data",
    ),
    NoteRule(
        when=lambda run: run.gpu_busy < 0.05 and run.measured_s >= 300,
        text="The GPUs are busy {gpu_busy:.1%} of the time: the training may not use them at all.",
        key="resources.gpus_per_node=0, or change the script so that it uses its GPU",
    ),
    NoteRule(
        when=lambda run: (
            not run.is_auto and run.lost_share >= 0.10 and run.steps_repeated > 0 and run.saving_share <= run.lost_share
        ),
        text="{lost_share:.0%} of the nodes' time was lost: {steps_repeated:.0f} steps were trained that no checkpoint kept.",
        key="a smaller checkpoint.every_steps",
        topic="interval",
    ),
    NoteRule(
        when=lambda run: (
            run.is_auto
            and run.lost_share >= 0.10
            and run.steps_repeated > 0
            and run.saving_share <= run.lost_share
            and run.interval_of_shortest <= 1.05
        ),
        text="{lost_share:.0%} of the nodes' time was lost: {steps_repeated:.0f} steps were trained that no checkpoint kept, although the run saves as often as checkpoint.min_interval_s allows.",
        key="a smaller checkpoint.min_interval_s",
        topic="interval",
    ),
    NoteRule(
        when=lambda run: run.starting_share >= 0.20 and run.attempts >= 2,
        text="{starting_share:.0%} of the nodes' time passed before training began, in {attempts:.0f} attempts. It goes into imports, building the recipe and reading the checkpoint.",
        key="ddp-hpc env capture, stage.*, or longer jobs (resources.time_limit_min)",
    ),
    NoteRule(
        when=lambda run: run.evaluation_share >= 0.20,
        text="Evaluations take {evaluation_share:.0%} of the loop's time.",
        key="a larger eval.every_epochs",
    ),
    NoteRule(
        when=lambda run: run.queued_share >= 0.5,
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
        queued_share=_ratio(hours["queued"], total),
        starting_share=_ratio(hours["starting"], running),
        saving_share=saving_share,
        lost_share=lost_share,
        attempts=len(run.times),
        failures=run.goodput.num_failures,
        steps_repeated=run.goodput.steps_repeated,
        every_steps=_or_nan(run.every_steps),
        is_auto=run.values.get("checkpoint.every_steps") == "auto",
        interval_of_shortest=_ratio(interval_s, _or_nan(run.values.get("checkpoint.min_interval_s"))),
        interval_of_longest=_ratio(interval_s, _or_nan(run.values.get("checkpoint.max_interval_s"))),
        best_every_steps=best,
        checkpoint_cost=now_cost,
        best_checkpoint_cost=best_cost,
        data_share=_ratio(phases.get("data", 0.0), loop_s),
        evaluation_share=_ratio(phases.get("evaluation", 0.0), loop_s),
        slow_rank=rank,
        slow_rank_share=rank_share,
        not_finite=run.series.num_not_finite,
        is_not_finite_at_end=run.series.ends_not_finite,
        skipped_share=_ratio(_or_nan(run.series.num_skipped), float(run.status.step)),
        data_workers=_or_nan(run.values.get("data.num_workers")),
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


def notes_of(facts: NoteFacts) -> list[Note]:
    """Return the first notes whose conditions hold; one that says so where none holds."""
    found: dict[str, NoteRule] = {}
    for rule in RULES:
        if rule.when(facts):
            found.setdefault(rule.topic or rule.text, rule)
    values = asdict(facts)
    notes = [Note(rule.text.format(**values), rule.key.format(**values)) for rule in found.values()]
    return notes[:MOST_NOTES] or [NOTHING]
