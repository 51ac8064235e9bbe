"""Where the node time of a run went, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddp_hpc.base.patience import known
from ddp_hpc.cli.formatting import DASH
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import read_marks
from ddp_hpc.watch.attempt_times import KINDS, read_times
from ddp_hpc.watch.goodput import Goodput, goodput_of
from ddp_hpc.watch.status import RunStatus

if TYPE_CHECKING:
    from ddp_hpc.watch.save_interval import SaveInterval


def goodput_of_run(run: RunDir, status: RunStatus, *, now: float) -> Goodput | None:
    """Return where the node time of a run went; None if its records cannot be read now."""
    return known(run.timeline, lambda: goodput_of(read_times(run, now=now, is_alive=status.is_alive)), unknown=None)


def interval_of_run(run: RunDir, status: RunStatus, *, now: float) -> SaveInterval | None:
    """Return how often a run saves, where it chooses that itself; None also if its records cannot be read now."""

    def read() -> SaveInterval | None:
        if not any(mark.kind == "interval" for mark in read_marks(run)):
            return None
        from ddp_hpc.watch.save_interval import read_save_interval  # late: most runs have a fixed interval

        return read_save_interval(run, now=now, is_alive=status.is_alive)

    return known(run.timeline, read, unknown=None)


def as_record(goodput: Goodput | None) -> Mapping[str, Any] | None:
    """Return what `--json` prints as `goodput`."""
    return None if goodput is None else asdict(goodput)


def as_line(goodput: Goodput | None) -> str:
    """Return `3.20 h: training 82%, starting 10%, lost 8%; queued 0.50 h`; empty before a run has nodes."""
    if goodput is None:
        return ""
    spent = goodput.node_hours
    running = running_hours(goodput)
    if running <= 0:
        return f"queued {in_hours(spent['queued'])}" if spent["queued"] else ""
    parts = ", ".join(f"{kind} {spent[kind] / running:.0%}" for kind in KINDS[1:] if spent[kind] > 0)
    gpus = f"; {in_hours(goodput.gpu_hours)} of GPUs" if goodput.gpu_hours else ""
    queued = f"; queued {in_hours(spent['queued'])}" if spent["queued"] else ""
    return f"{in_hours(running)}: {parts}{gpus}{queued}"


def running_hours(goodput: Goodput) -> float:
    """Return the hours of all nodes, without the queue."""
    return sum(value for kind, value in goodput.node_hours.items() if kind != "queued")


def in_hours(value: float) -> str:
    """Return `0.03 h`, or `120 h`."""
    return f"{value:.3g} h" if value < 100 else f"{value:.0f} h"


def columns(goodput: Goodput | None) -> tuple[str, str]:
    """Return the hours of nodes, and the share that was training that counts; dashes where that is not known."""
    if goodput is None or goodput.goodput is None:
        return DASH, DASH
    return in_hours(running_hours(goodput)), f"{goodput.goodput:.0%}"
