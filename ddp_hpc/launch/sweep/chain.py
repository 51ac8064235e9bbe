"""What a new job has to wait for where it starts after runs and sweeps (`--after`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_hpc.base.errors import ConfigError, RunBusyError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.launch.submission.backend import Backend
from ddp_hpc.launch.submission.chain import after_job, dependency, split_when
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.sweep import array
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, find_sweep, points_in_queue, read_sweep, sending_alone
from ddp_hpc.run.config import Overlay
from ddp_hpc.run.config.sources import COMMAND_LINE
from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.paths import RunDir, holds_sweep
from ddp_hpc.run.run_dir.records import When
from ddp_hpc.watch.find import find_run


def after_others(request: SubmitRequest, words: Sequence[str], backend: Backend, *, is_single: bool) -> SubmitRequest:
    """Return the request of a job that waits for the runs and sweeps that `--after` names; `is_single`: and for jobs of its own name."""
    spec, environ = request.spec, request.environ
    parts, befores = [spec.slurm.dependency], list[tuple[RunDir, When]]()
    for name, when in map(split_when, words) if backend.HAS_QUEUE else ():
        runs_dir = spec.path.parent
        if holds_sweep(runs_dir / name) or holds_sweep(Path(name)):
            parts.append(after_sweep(find_sweep(name, runs_dir), when, environ))
        else:
            befores.append((find_run(name, runs_dir), when))
    users = ",".join(filter(None, parts)) or None
    found, awaits = dependency(befores, backend, environ, is_single=is_single, users=users)
    if found is None:
        return request
    resolved = Overlay(request.resolved, environ).resolved({"slurm.dependency": found}, COMMAND_LINE.source)
    return replace(request, resolved=resolved, awaits=awaits)


def after_sweep(sweep_dir: SweepDir, when: When, environ: Mapping[str, str]) -> str:
    """Return what the job waits for, as sbatch takes it; empty where the whole sweep has ended as asked for."""
    name = sweep_dir.name
    if read_sweep(sweep_dir).backend != "slurm":
        raise ConfigError(
            f"`--after {name}` asks Slurm to wait for a sweep, but this one runs on one machine, without Slurm. Wait until it has ended: `ddp-hpc sweep follow {name}`."
        )
    with sending_alone(sweep_dir) as is_alone:
        if not is_alone:
            raise RunBusyError(
                f"Another process is submitting points of {name} at this moment. Submit again when it has ended."
            )
        sweep = array.settled(sweep_dir, environ)
    queued = client.queue(client.user_name(), environ)
    waiting = {one.job_id: points_in_queue(one, queued) for one in sweep.arrays}
    live = {number for numbers in waiting.values() for number in numbers}
    newest = {one.number: Ledger.read(sweep_dir.run(one)).newest for one in sweep.points if one.number not in live}
    ended = {number: one.ending for number, one in newest.items() if one is not None and one.is_last}
    unsent = [point for point in sweep.points if point.number not in live and point.number not in ended]
    if unsent:
        raise ConfigError(
            f"`--after {name}` waits for the jobs of all points, but {len(unsent)} of {len(sweep.points)} points have none (the first: {unsent[0].name}). "
            f"Send them first: `ddp-hpc sweep continue {name}`."
        )
    others = [number for number, ending in ended.items() if ending != Ending.FINISHED]
    if when == "ok" and others:
        raise ConfigError(
            f"`--after {name}` waits for a sweep of which all points finish, but {len(others)} points have ended otherwise (the first: "
            f"{sweep.points[others[0]].name}). Start them again with `ddp-hpc sweep continue {name} --failed`, or ask for `{name}:any`."
        )
    if when == "notok" and not live and not others:
        raise ConfigError(
            f"`--after {name}:notok` waits for a sweep of which a point fails, but all of its points have finished without a failure, so nothing is to be submitted."
        )
    if not live:
        return ""
    # Where a point has failed already, the sweep is not ok whatever follows.
    how: When = "any" if when == "notok" and others else when
    return after_job(":".join(_jobs(sweep, waiting, live)), how)


def _jobs(sweep: Sweep, waiting: Mapping[str, set[int]], live: set[int]) -> list[str]:
    """Return the arrays that have tasks in the queue; a job that depends on an array waits for all of its tasks."""
    names = []
    for one in sweep.arrays:
        here = waiting[one.job_id]
        run_elsewhere = not live.isdisjoint(
            set(one.numbers) - here
        )  # a point that has failed here runs again in another array
        if here and run_elsewhere:
            names += [f"{one.job_id}_{number - one.offset}" for number in sorted(here)]
        elif here:
            names.append(one.job_id)
    return names
