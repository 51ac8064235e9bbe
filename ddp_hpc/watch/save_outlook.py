"""How often the next attempt of a run would save, by what its earlier attempts have recorded (`checkpoint.every_steps=auto`)."""

from __future__ import annotations

from statistics import median

from ddp_hpc.run.checkpoints import save_interval
from ddp_hpc.run.checkpoints.failure_rate import between_failures_s
from ddp_hpc.run.checkpoints.past_saves import read_past
from ddp_hpc.run.checkpoints.save_interval import ASSUMED_STALL_S, Bounds, SaveCosts, choose
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.goodput import measured_cost


def outlook(run: RunDir, bounds: Bounds, *, num_nodes: int, now: float) -> str:
    """Return how often the next attempt of a run would save at first, and why; what has cost how much where attempts have been.

    Raises:
        OSError: if the file system does not answer.
    """
    past = read_past(run, before=None, num_nodes=num_nodes)
    is_measured = bool(past.stalls_s)
    costs = SaveCosts(
        stall_s=past.stalls_s[-1] if is_measured else ASSUMED_STALL_S,
        write_s=median(past.writes_s) if past.writes_s else 0.0,
        restart_s=past.restart_s or 0.0,
        between_failures_s=between_failures_s(
            num_failures=past.num_failures, trained_s=past.trained_s, num_nodes=num_nodes
        ),
    )
    chosen = choose(costs, bounds, is_measured=is_measured, first_within_s=past.first_within_s)
    why = save_interval.reason(costs, chosen, num_failures=past.num_failures, is_measured=is_measured)
    cost = measured_cost(read_times(run, now=now, is_alive=False))
    so_far = "" if cost is None else f", and have taken {cost:.1%} so far"
    often, expected = save_interval.roughly(chosen.seconds), costs.share(chosen.seconds)
    return (
        f"about every {often} at first: saves and failures take {expected:.1%} of the time by estimate{so_far}; {why}"
    )
