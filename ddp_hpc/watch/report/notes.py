"""One to three notes on a run: a number, why it matters, and the key to set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from ddp_hpc.watch.report.data import RunData

MOST_NOTES = 3
_MEASURED_S = 300.0
"""Before, what was measured of the machines may be of imports alone."""


NOTHING = ("All numbers of this run are in their usual ranges: no setting needs a change.", "")


def notes_of(run: RunData) -> list[tuple[str, str]]:
    """Return the most important notes, each with what to set or to type; one that says so where no number stands out."""
    notes = [note for rule in RULES if (note := rule(run)) is not None]
    return notes[:MOST_NOTES] or [NOTHING]


def _about_losses(run: RunData) -> tuple[str, str] | None:
    count, key = run.series.num_not_finite, "train.grad_clip_norm=1.0, or a lower train.lr"
    if run.series.ends_not_finite:
        text = "the newest among them. Weights that have become NaN or infinite do not recover."
    else:
        text = "and finite again later."
    return (f"The loss was NaN or infinite in {count} log lines, {text}", key) if count else None


def _about_skipped(run: RunData) -> tuple[str, str] | None:
    share = (run.series.num_skipped or 0) / run.status.step if run.status.step else 0.0
    text = f"{share:.0%} of the updates were skipped, because gradients were NaN or infinite: these steps trained nothing. With fp16, a few at the start are usual."
    return (text, "train.precision=bf16, or a lower train.lr") if share >= 0.05 else None


def _about_slow_rank(run: RunData) -> tuple[str, str] | None:
    """Take the mean of the whole run, of the ranks that were named as slow."""
    shares = {
        rank: fmean(look.lost_s.get(rank, 0.0) / (look.step_s or 1.0) for look in run.looks)
        for rank in {one.rank for one in run.alarms}
        if run.looks
    }
    worst = max(shares, key=lambda rank: shares[rank], default=None)
    if worst is None or shares[worst] < 0.10:
        return None
    text = f"The other ranks wait {shares[worst]:.0%} of each step for rank {worst}, as the mean of the run. If that rank were as fast as the others, steps would be shorter by this share."
    return text, "slurm.exclude=NODE, or data.num_workers if the rank waits for its samples"


def _about_saves(run: RunData) -> tuple[str, str] | None:
    """Compare what saves cost with what failures cost: there are never too many saves and too few at once."""
    saves, saving, lost = run.saves, run.share_of("saving"), run.share_of("lost")
    is_auto = run.values.get("checkpoint.every_steps") == "auto"
    chosen_s = math.nan if saves is None else saves.seconds
    if saving >= 0.05 and saving > lost:
        is_seldom = chosen_s >= 0.95 * run.number("checkpoint.max_interval_s")
        limit = ", although the run saves as seldom as checkpoint.max_interval_s allows" if is_auto else ""
        text = f"Training waits for saves {saving:.0%} of the time{limit}. With fewer saves it waits less, but a failure loses more steps."
        key = "a larger checkpoint.max_interval_s" if is_auto else "checkpoint.every_steps=auto, or a larger number"
        return (text, key) if is_seldom or not is_auto else None
    repeated = run.goodput.steps_repeated
    if lost < 0.10 or not repeated:
        return None
    is_often = chosen_s <= 1.05 * run.number("checkpoint.min_interval_s")
    limit = ", although the run saves as often as checkpoint.min_interval_s allows" if is_auto else ""
    text = f"{lost:.0%} of the nodes' time was lost: {repeated} steps were trained that no checkpoint kept{limit}."
    key = "a smaller checkpoint.min_interval_s" if is_auto else "checkpoint.every_steps=auto, or a smaller number"
    return (text, key) if is_often or not is_auto else None


def _about_memory(run: RunData) -> tuple[str, str] | None:
    share = max((use.memory_share or 0.0 for uses in run.machines.values() for use in uses), default=0.0)
    text = f"A node used {share:.0%} of the memory that the job may use. At the limit, the kernel kills a process of the job."
    return (text, "a larger resources.mem_gb, or a smaller data.num_workers") if share >= 0.90 else None


def _about_data(run: RunData) -> tuple[str, str] | None:
    """Find what the GPUs wait for; where they are not known, how long rank zero waits for samples."""
    use, waits, workers = run.use_in_training, run.phase_share("data"), run.values.get("data.num_workers", "unknown")
    busy = 1.0 if use is None or use.gpu_busy is None or use.seconds < _MEASURED_S else use.gpu_busy
    idle = f"The GPUs are idle for much of the time: they are busy {busy:.0%} of the time, "
    waiting = f"rank zero waits for samples in {waits:.0%} of its steps"
    if use is not None and use.cpu_busy is not None and busy < 0.70:
        full = f"while the {use.num_cpus or 0:.0f} CPUs of each node are {use.cpu_busy:.0%} busy"
        if use.cpu_busy >= 0.90 and use.num_cpus and (waits >= 0.10 or busy < 0.50):
            more = f", and {waiting}. More loader processes would not help without more CPUs." if waits >= 0.10 else "."
            return f"{idle}{full}{more}", "a larger resources.cpus_per_worker"
        if use.cpu_busy < 0.70 and waits >= 0.10:
            why = f"With {workers} loader processes for each worker, too few samples are loaded at the same time, or the disk is slow."
            text = f"{idle}and {waiting}, while the CPUs are only {use.cpu_busy:.0%} busy. {why}"
            return text, "a larger data.num_workers, or stage.*"
    if waits < 0.20:
        return None
    text = f"Rank zero waits for samples in {waits:.0%} of its steps, with {workers} loader processes. Meanwhile, its processor or GPU is idle."
    return text, "data.num_workers, a faster disk, or stage.*"


def _about_unused_gpus(run: RunData) -> tuple[str, str] | None:
    use = run.use_in_training
    if use is None or use.gpu_busy is None or use.gpu_busy >= 0.05 or use.seconds < _MEASURED_S:
        return None
    text = f"The GPUs are busy {use.gpu_busy:.1%} of the time: the training may not use them at all."
    return text, "resources.gpus_per_node=0, or change the script so that it uses its GPU"


def _about_starts(run: RunData) -> tuple[str, str] | None:
    share, count = run.share_of("starting"), len(run.times)
    text = f"{share:.0%} of the nodes' time passed before training began, in {count} attempts. It goes into imports, building the recipe and reading the checkpoint."
    key = "ddp-hpc env capture, stage.*, or longer jobs (resources.time_limit_min)"
    return (text, key) if share >= 0.20 and count >= 2 else None


def _about_evaluations(run: RunData) -> tuple[str, str] | None:
    share = run.phase_share("evaluation")
    text = f"Evaluations take {share:.0%} of the loop's time."
    return (text, "a larger eval.every_epochs") if share >= 0.20 else None


def _about_queue(run: RunData) -> tuple[str, str] | None:
    hours = run.goodput.node_hours
    share = hours["queued"] / (sum(hours.values()) or 1.0)
    text = f"The run spent {share:.0%} of its time in the queue. Shorter jobs often start sooner, as they fit between other jobs."
    return (text, "a smaller resources.time_limit_min") if share >= 0.5 else None


RULES: Sequence[Callable[[RunData], tuple[str, str] | None]] = (
    _about_losses,
    _about_skipped,
    _about_slow_rank,
    _about_saves,
    _about_memory,
    _about_data,
    _about_unused_gpus,
    _about_starts,
    _about_evaluations,
    _about_queue,
)
"""The most important first."""
