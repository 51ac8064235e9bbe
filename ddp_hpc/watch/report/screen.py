"""A run as one screen of text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.run.run_dir.machine_use import MachineUse, in_words, merged
from ddp_hpc.run.run_dir.timeline import Look
from ddp_hpc.watch.attempt_times import KINDS
from ddp_hpc.watch.goodput import Goodput
from ddp_hpc.watch.report.series import ChartPoint
from ddp_hpc.watch.report.words import compact, duration, hours, milliseconds, moment, plural, share
from ddp_hpc.watch.status import RunStatus

LEVELS, PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.-=*#"
_LABEL = 12


@dataclass(frozen=True, kw_only=True)
class RunScreen:
    """What is shown of a run."""

    status: RunStatus
    goodput: Goodput | None
    """None where the records that it needs cannot be read."""
    loss: Sequence[ChartPoint]
    phases: Mapping[str, float]
    """Seconds in each phase of rank zero since the newest attempt began to train."""
    look: Look | None
    """The newest comparison of the ranks of the newest attempt."""
    nodes: Mapping[int, str]
    """Rank -> its node."""
    now: float
    machines: Sequence[MachineUse] = ()
    """The newest record of each node, in the newest attempt."""
    unread: Sequence[str] = ()
    """Files that cannot be read now, each with the error."""


def screen(seen: RunScreen, *, width: int, height: int, is_plain: bool = False) -> list[str]:
    """Return at most `height` lines of at most `width` characters, the most important ones first; `is_plain`: in ASCII."""
    lines = [
        *_head(seen, width),
        *(_labelled("not read", text) for text in seen.unread),
        *_progress(seen, width, is_plain=is_plain),
        *_time(seen, width),
        *_machines(seen),
        *_ranks(seen, width),
    ]
    return [_cut(line, width) for line in lines[:height]]


def _head(seen: RunScreen, width: int) -> list[str]:
    status = seen.status
    attempt = "" if status.attempt is None else f"attempt {status.attempt}"
    job = f"job {status.job_id} on {status.host}" if status.job_id and status.host else ""
    left = "  ".join(filter(None, [status.run, status.state, attempt, job]))
    clock = moment(seen.now, "%H:%M:%S")
    lines = [f"{_cut(left, width - len(clock) - 2):<{max(0, width - len(clock))}}{clock}"]
    return [*lines, *([f"{'':<{_LABEL}}{status.reason}"] if status.reason else [])]


def _progress(seen: RunScreen, width: int, *, is_plain: bool) -> list[str]:
    status = seen.status
    room = max(10, width - _LABEL)
    lines = []
    if status.total_steps:
        done = min(1.0, status.step / status.total_steps)
        text = f" {status.step:,} of {status.total_steps:,}, {share(done)}" + (
            "" if status.eta_s is None else f", {duration(status.eta_s)} left"
        )
        text += "" if status.epoch is None else f", epoch {status.epoch} of {status.epochs}"
        bar = max(8, min(40, room - len(text)))
        filled = round(done * bar)
        lines.append(_labelled("step", f"{'#' * filled}{'-' * (bar - filled)}{text}"))
    elif status.saves is not None:
        age = "" if status.checkpoint_age_s is None else f"{duration(status.checkpoint_age_s)} ago"
        lines.append(_labelled("saved", age if status.saves and age else "nothing yet"))
    elif status.step:
        lines.append(_labelled("step", f"{status.step:,}"))
    if status.loss is not None:
        number = f"{compact(status.loss):<10}"
        lines.append(
            _labelled("loss", number + sparkline(seen.loss, room - len(number), PLAIN_LEVELS if is_plain else LEVELS))
        )
    if status.metrics:
        lines.append(
            _labelled("evaluation", "  ".join(f"{name} {compact(one)}" for name, one in status.metrics.items()))
        )
    if status.samples_per_s is not None:
        lines.append(_labelled("rate", f"{compact(status.samples_per_s)} samples/s"))
    if status.last_checkpoint is not None:
        age = "" if status.checkpoint_age_s is None else f", {duration(status.checkpoint_age_s)} ago"
        lines.append(_labelled("checkpoint", f"step {status.last_checkpoint:,}{age}"))
    if status.save_error:
        lines.append(_labelled("save error", status.save_error))
    lines += [_labelled("slow", alarm.sentence()) for alarm in status.slow_ranks]
    return lines


def _time(seen: RunScreen, width: int) -> list[str]:
    spent = dict.fromkeys(KINDS, 0.0) if seen.goodput is None else seen.goodput.node_hours
    running = sum(value for kind, value in spent.items() if kind != "queued")
    lines = []
    if running:
        parts = [f"{kind} {share(spent[kind] / running)}" for kind in KINDS[1:] if spent[kind] > 0]
        lines.append(_labelled("node time", f"{hours(running)}: {', '.join(parts)}"))
    if spent["queued"]:
        lines.append(_labelled("queued", hours(spent["queued"])))
    total = sum(seen.phases.values())
    if total > 0:
        shares = sorted(((one / total, name) for name, one in seen.phases.items()), reverse=True)
        text = "  ".join(f"{name} {share(one)}" for one, name in shares if one >= 0.005)
        lines.append(_labelled("phases", _cut(text, width - _LABEL)))
    return lines


def _machines(seen: RunScreen) -> list[str]:
    use = merged(seen.machines)
    if use is None:
        return []
    *told, last = in_words(use)
    told.append(f"{last}, {duration(max(0.0, seen.now - use.at))} ago")
    return [_labelled("" if number else "machines", text) for number, text in enumerate(told)]


def _ranks(seen: RunScreen, width: int) -> list[str]:
    """Return the ranks that the others wait for longest, as bars of a share of the step."""
    if seen.look is None:
        return []
    look = seen.look
    late = sorted(look.lost_s.items(), key=lambda item: -item[1])
    age = duration(max(0.0, seen.now - look.at))
    lines = [
        "",
        f"the others wait for, of a step of {milliseconds(look.step_s * 1000)} ({plural(len(late), 'rank')}, {age} ago)",
    ]
    for rank, lost_s in late:
        part = max(0.0, lost_s) / look.step_s if look.step_s else 0.0
        label = f"rank {rank}"
        text = f" {share(part)}, {milliseconds(max(0.0, lost_s) * 1000)}  {seen.nodes.get(rank, '')}"
        bar = "#" * round(min(1.0, part) * max(0, min(40, width - _LABEL - len(text))))
        lines.append(_labelled(label, f"{bar}{text}"))
    return lines


def sparkline(points: Sequence[ChartPoint], width: int, levels: str = LEVELS) -> str:
    """Return a line of characters whose height is the mean of the points below them, from the lowest to the highest."""
    if not points or width < 1:
        return ""
    count = min(width, len(points))
    parts = [points[number * len(points) // count : (number + 1) * len(points) // count] for number in range(count)]
    means = [sum(point.value for point in part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((one - low) * scale)] for one in means)


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."[: max(0, width)]
