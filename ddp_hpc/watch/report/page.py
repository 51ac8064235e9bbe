"""The report as one page of HTML that loads nothing. No other module but `render` uses jinja2."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc import __version__
from ddp_hpc.base.discretion import escape_controls, mask_secrets, value_or_hidden
from ddp_hpc.base.names import plural, shorten_names
from ddp_hpc.run.run_dir.machine_use import merge_uses, use_texts
from ddp_hpc.run.run_dir.software_versions import Environment, change_texts
from ddp_hpc.watch.attempt_times import KINDS
from ddp_hpc.watch.checkpoints import CheckpointInfo
from ddp_hpc.watch.compare_runs import differing_keys
from ddp_hpc.watch.report import charts
from ddp_hpc.watch.report.attempt_rows import rows_of
from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.notes import notes_of
from ddp_hpc.watch.report.series import finite_points
from ddp_hpc.watch.report.words import compact, duration, hours, milliseconds, moment, share

_CODE = re.compile(r"`([^`]*)`")
_PHRASE_BY_STATE = {
    "finished": "Finished at",
    "stopped": "Stopped at",
    "failed": "Failed at",
    "running": "Now at",
    "starting": "Starting; it was at",
    "stopping": "Stopping at",
    "waiting": "In the queue; it was at",
    "cancelled": "Cancelled at",
    "interrupted": "Killed at",
}
_MOST_CHANGES = 12


def page_of(run: RunData, *, now: float, against: RunData | None = None) -> str:
    """Return the page of one run, with another run beside it."""
    view = {**view_of(run), "against": None if against is None else _comparison_view(run, against)}
    return render_page("run.html.j2", view, now=now, secrets=[*run.secrets, *(against.secrets if against else ())])


def view_of(run: RunData) -> dict[str, Any]:
    """Return what the page of one run shows: texts and charts."""
    rows, time_ticks = rows_of(run.times, run.marks)
    seconds, num_steps = run.phases
    by_length = sorted(seconds.items(), key=lambda item: -item[1])
    return {
        "title": f"{run.status.run}: report",
        "path": run.path,
        "run": run,
        "lead": summary_text(run),
        "figures": headline_numbers(run),
        "attempts": rows,
        "time_ticks": time_ticks,
        "kinds": time_shares(run),
        "charts": charts.charts_of(run.series, run.starts),
        "phases": [
            (name, one / num_steps * 1000, run.phase_share(name)) for name, one in by_length if one > 0 and num_steps
        ],
        "phases_about": _about_phases(num_steps, run),
        "machines": _about_machines(run),
        "checkpoints": [_checkpoint(one) for one in run.checkpoints],
        "cost": f"`checkpoint.every_steps=auto` saves {run.saves.sentence()}." if run.saves else "",
        "environment": _environment(run),
        "changed": list(_changes(run)),
        "notes": notes_of(run),
    }


def summary_text(run: RunData) -> str:
    """Say in a few sentences where the run stands, and what it took."""
    status, good = run.status, run.goodput.goodput
    if not run.times:
        return _sentence(status.reason) if status.reason else "No attempt has begun."
    reason = "" if not status.reason or (run.failure and run.is_failure_newest) else f" {_sentence(status.reason)}"
    took = f"{plural(len(run.times), 'attempt')} took {hours(run.goodput.running_h)} of node time"
    useful = f", of which {share(good)} was training whose steps the run has kept." if good is not None else "."
    return f"{_progress_text(run)}{reason} {took[0].upper()}{took[1:]}{useful}"


def _progress_text(run: RunData) -> str:
    status = run.status
    if status.saves is not None and not status.step:
        return f"The script has {'saved its state' if status.saves else 'reported no save of its state'}."
    total = "" if status.total_steps is None else f" of {status.total_steps:,}"
    verb = _PHRASE_BY_STATE.get(status.state, "Ended at")
    return f"{verb} step {status.step:,}{total}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def headline_numbers(run: RunData) -> list[tuple[str, str, str]]:
    """Return the numbers at the head of the page: name, value, and what stands below it."""
    status, goodput = run.status, run.goodput
    found: list[tuple[str, str, str]] = []
    if status.loss is not None:
        found.append(("training loss", compact(status.loss), ""))
    found += [(f"{name}, evaluation", compact(value), "") for name, value in list(status.metrics.items())[:3]]
    rates = sorted(point.value for point in finite_points(run.series.numbers.get("samples_per_s", ())))
    if rates:
        found.append(("throughput", compact(rates[len(rates) // 2]), "samples/s"))
    if goodput.goodput is not None:
        found.append(("goodput", share(goodput.goodput), "of node time"))
    if run.times:
        queued_h = goodput.node_hours["queued"]
        found.append(("node time", hours(goodput.running_h), f"+ {hours(queued_h)} queued" if queued_h else ""))
    if goodput.gpu_hours:
        found.append(("GPU time", hours(goodput.gpu_hours), ""))
    if goodput.steps_repeated:
        found.append(("steps repeated", f"{goodput.steps_repeated:,}", ""))
    if status.eta_s is not None:
        found.append(("time left", duration(status.eta_s), ""))
    if status.last_checkpoint is not None:
        found.append(("newest checkpoint", f"{status.last_checkpoint:,}", "step"))
    return found


def time_shares(run: RunData) -> list[tuple[str, float, str]]:
    """Return what the nodes' time was spent on: kind, share, and a text with both; kinds without any are left out."""
    spent, running = run.goodput.node_hours, run.goodput.running_h
    parts = [(kind, spent[kind] / running if running else 0.0) for kind in KINDS if spent[kind] > 0]
    return [
        (kind, part, f"{kind} {hours(spent[kind])}{'' if kind == 'queued' else f', {share(part)}'}")
        for kind, part in parts
    ]


def _about_phases(num_steps: int, run: RunData) -> str:
    text = f"The times of rank zero, over {num_steps:,} steps of all attempts. The wait for other ranks is part of backward, where the ranks exchange gradients."
    if any(mark.num_gpus for mark in run.marks):
        text += " On a GPU these are times of the host, which starts kernels and does not wait for them."
    return text


def _about_machines(run: RunData) -> str:
    """Return how busy the machines were, in one sentence; empty where nothing was measured."""
    use = run.use_in_training or merge_uses([use for uses in run.machines.values() for use in uses])
    since = "Since training began" if run.use_in_training and run.marks else "While the workers ran"
    return "" if use is None else f"{since}, on average (memory: at most): {'; '.join(use_texts(use))}."


def _checkpoint(one: CheckpointInfo) -> dict[str, str]:
    metrics = "  ".join(f"{name} {compact(value)}" for name, value in one.metrics.items())
    return {
        "step": f"{one.step:,}",
        "committed": "-" if one.committed_at is None else moment(one.committed_at),
        "size": "-" if one.num_bytes is None else f"{compact(one.num_bytes / 2**20)} MiB",
        "workers": "-" if one.world_size is None else str(one.world_size),
        "note": one.problem or metrics,
    }


def _environment(run: RunData) -> list[tuple[str, str]]:
    if not run.environments:
        return []
    newest = run.environments[max(run.environments)]
    named = {
        "Python": newest.python,
        "PyTorch": newest.torch,
        "CUDA": newest.cuda,
        "HIP": newest.hip,
        "NCCL": newest.nccl,
        "GPU driver": newest.driver,
        "GPUs": ", ".join(newest.gpus),
        "CPU": newest.cpu,
        "system": newest.machine,
        "modules": ", ".join(newest.modules),
        "variables": ", ".join(f"{name}={value}" for name, value in newest.variables.items()),
        "packages": plural(len(newest.packages), "package") if newest.packages else "",
    }
    return [(name, value) for name, value in named.items() if value]


def _changes(run: RunData) -> Iterable[tuple[int, str]]:
    before: Environment | None = None
    for attempt, one in sorted(run.environments.items()):
        if before is not None and (changes := [*change_texts(before, one)]):
            yield attempt, shorten_names(changes, _MOST_CHANGES, between="; ")
        before = one


def _comparison_view(run: RunData, other: RunData) -> dict[str, Any]:
    name = other.path.name if other.path.name != run.path.name else str(other.path)
    theirs = charts.Line("other", other.series.loss, f"loss of {name}")
    ours = [line for line in charts.loss_lines(run.series) if line.kind != "lost"]
    has_loss = bool(ours or finite_points(other.series.loss))
    loss = ""
    if other.status.loss is not None and run.status.loss is not None:
        loss = f" Its loss is {compact(other.status.loss)}; this run's is {compact(run.status.loss)}."
    keys = differing_keys([run.values, other.values])
    newest = [one.environments[max(one.environments)] for one in (other, run) if one.environments]
    return {
        "name": name,
        "missing": other.missing,
        "lead": f"{name} is at step {other.status.step:,}.{loss} {plural(len(keys), 'key')} of the configuration {'differs' if len(keys) == 1 else 'differ'}.",
        "chart": charts.chart_of(f"Loss, and dotted: {name}", [theirs, *ours], may_be_log=True) if has_loss else None,
        "differences": [(key, _value_text(key, run), _value_text(key, other)) for key in keys],
        "environment": [*change_texts(*newest)] if len(newest) == 2 else [],
    }


def _value_text(key: str, run: RunData) -> str:
    value = value_or_hidden(key, run.values.get(key))
    return "unset" if value is None else str(value)


# --- templates ---------------------------------------------------------------------------------------------------------


def render_page(template: str, view: dict[str, Any], *, now: float, secrets: Sequence[str] = ()) -> str:
    """Return a page: a template of ours, filled in. All text is escaped; of secrets and control characters, none is in it."""
    from jinja2 import Environment as Templates
    from jinja2 import FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    def shown(value: Any) -> Any:
        return escape_controls(mask_secrets(value, secrets)) if type(value) is str else value

    templates = Templates(
        autoescape=True,
        finalize=shown,
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["code"] = lambda text: Markup(_CODE.sub(r"<code>\1</code>", str(escape(shown(text)))))  # noqa: S704  escaped
    templates.filters.update(percent="{:.2%}".format, flex="{:.5f}".format, share=share, ms=milliseconds)
    written = moment(now, "%d %b %Y, %H:%M %Z")
    text: str = templates.get_template(template).render(version=__version__, written=written, **view)
    return text
