"""What `status` shows of a run beside its status: how often it saves, its machines, its profiles, and where its node time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_hpc.base.patience import ask_once
from ddp_hpc.cli.formatting import duration
from ddp_hpc.run.checkpoints.save_interval import SaveInterval
from ddp_hpc.run.run_dir.machine_use import MachineUse, merge_uses, newest_uses, read_uses, use_texts, uses_as_json
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import read_marks
from ddp_hpc.watch.attempt_times import KINDS, read_times
from ddp_hpc.watch.goodput import Goodput, goodput_of, newest_interval
from ddp_hpc.watch.status import RunStatus


def status_details(run: RunDir, status: RunStatus, *, now: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the details as keys of `status --json`, and as rows of text, without those whose records are not readable now."""
    goodput, interval = goodput_and_saves(run, status, now=now)
    traces: list[Path] = ask_once(run.profile, lambda: sorted(run.profile.glob("*.trace.json.gz")), unknown=[])
    profiles = [str(path) for path in traces]
    machines, machine_words = _machine_use(run, status, now)
    record = {
        "goodput": None if goodput is None else asdict(goodput),
        "save_interval": None if interval is None else asdict(interval),
        "machines": machines,
        "profile": profiles,
    }
    rows = {
        "saves": "" if interval is None else interval.sentence(),
        "machines": machine_words,
        "profile": ", ".join(profiles),
        "node time": goodput_line(goodput),
    }
    return record, rows


def goodput_and_saves(run: RunDir, status: RunStatus, *, now: float) -> tuple[Goodput | None, SaveInterval | None]:
    """Return where the node time of a run went, and how often it saves where it chooses that itself; None for what is not readable now."""

    def read() -> tuple[Goodput | None, SaveInterval | None]:
        marks = read_marks(run)
        times = read_times(run, now=now, is_alive=status.is_alive, marks=marks)
        return goodput_of(times), newest_interval(marks, times)

    unknown: tuple[Goodput | None, SaveInterval | None] = (None, None)
    return ask_once(run.timeline, read, unknown=unknown)


def _machine_use(run: RunDir, status: RunStatus, now: float) -> tuple[Mapping[str, Any] | None, str]:
    """Return how busy the machines of the newest attempt are, as JSON and as text; None where nothing was measured."""
    attempt = status.attempt
    if attempt is None:
        return None, ""
    read = newest_uses if status.is_alive else read_uses
    uses: Sequence[MachineUse] = ask_once(run.attempt_logs(attempt), lambda: read(run, attempt), unknown=[])
    use = merge_uses(uses)
    if use is None:
        return None, ""
    ago, long = duration(max(0.0, now - use.at)), duration(use.seconds)
    when = f"{ago} ago" if status.is_alive else f"the mean of the last {long} of the newest attempt"
    return uses_as_json(uses), f"{'; '.join(use_texts(use))}, {when}"


def goodput_line(goodput: Goodput | None) -> str:
    """Return `3.20 h: training 82%, starting 10%, lost 8%; queued 0.50 h`; empty where nothing is known."""
    if goodput is None:
        return ""
    spent = goodput.node_hours
    running = goodput.running_h
    if goodput.goodput is None:
        return f"queued {hours_text(spent['queued'])}" if spent["queued"] else ""
    parts = ", ".join(f"{kind} {spent[kind] / running:.0%}" for kind in KINDS[1:] if spent[kind] > 0)
    gpus = f"; {hours_text(goodput.gpu_hours)} of GPUs" if goodput.gpu_hours else ""
    queued = f"; queued {hours_text(spent['queued'])}" if spent["queued"] else ""
    return f"{hours_text(running)}: {parts}{gpus}{queued}"


def hours_text(value: float) -> str:
    """Return `3 s`, `0.03 h`, or `120 h`."""
    if value < 0.01:
        return duration(3600 * value)
    return f"{value:.3g} h" if value < 100 else f"{value:.0f} h"
