"""The text that says how often a run saves, and why. Pure."""

from __future__ import annotations

from ddp_hpc.run.checkpoints.save_interval import Interval, SaveCosts

_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def roughly(seconds: float) -> str:
    """Return `40 ms`, `1.2 s`, `9 min`, `11 h` or `154 d`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    unit, name = next((unit, name) for unit, name in _UNITS if seconds >= (1.5 * unit if unit > 1 else unit))
    count = seconds / unit
    return f"{count:.1f} {name}" if count < 9.95 and name != "min" else f"{count:.0f} {name}"


def every(steps: int, seconds: float) -> str:
    """Return `every 340 steps (about 9 min)`."""
    return f"every {'step' if steps == 1 else f'{steps} steps'} (about {roughly(seconds)})"


def numbers(costs: SaveCosts, *, num_failures: int, is_measured: bool = True) -> str:
    """Return the numbers that an interval follows from."""
    often = roughly(costs.between_failures_s)
    failures = f"one failure every {often} is expected ({num_failures} so far)"
    if num_failures == 0:
        failures = f"no failure so far, one every {often} is assumed"
    start = f"a start takes {roughly(costs.restart_s)}, " if costs.restart_s else ""
    return f"a save {'stops' if is_measured else 'is assumed to stop'} training for {roughly(costs.stall_s)}, {start}{failures}"


def reason(costs: SaveCosts, interval: Interval, *, num_failures: int, is_measured: bool = True) -> str:
    """Return why the interval is as long as it is."""
    if interval.why == "failed before":
        return "the attempt before failed before its first save, so the first save comes early"
    limit = {
        "shortest": "; not more often, because of `checkpoint.min_interval_s`",
        "longest": "; not less often, because of `checkpoint.max_interval_s`",
        "written": f"; not more often, because a save takes {roughly(costs.write_s)} to be written",
    }
    return numbers(costs, num_failures=num_failures, is_measured=is_measured) + limit.get(interval.why, "")
