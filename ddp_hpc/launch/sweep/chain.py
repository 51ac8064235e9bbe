"""What a new job has to wait for where it starts after runs and sweeps (`--after`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.launch.submission.backend import Backend, backend_of, find_job_elsewhere
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.run_dir_setup import is_finished
from ddp_hpc.launch.sweep import array
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, lock_sending, points_in_queue, read_sweep, sweep_named
from ddp_hpc.run.config.overlay import Overlay
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.config.sources import COMMAND_LINE
from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import AwaitedRun, EndCondition
from ddp_hpc.watch.find import find_run

_SBATCH_CONDITIONS: Mapping[EndCondition, str] = {"ok": "afterok", "notok": "afternotok", "any": "afterany"}
"""How another run has to end -> what sbatch calls it (`--dependency`, https://slurm.schedmd.com/sbatch.html#OPT_dependency)."""


def split_end_condition(text: str) -> tuple[str, EndCondition]:
    """Return the run that `RUN:notok` names, and how it has to end; `ok` where it does not say."""
    name, colon, when = text.rpartition(":")
    return (name, cast("EndCondition", when)) if colon and when in _SBATCH_CONDITIONS else (text, "ok")


def add_dependency(request: SubmitRequest, words: Sequence[str], backend: Backend) -> SubmitRequest:
    """Return the request of a job that waits for the runs and sweeps that `--after` names."""
    if not backend.HAS_QUEUE:
        raise ConfigError(
            "`--after` lets a job wait in Slurm's queue, but this run would start on this machine, which has no queue. "
            "Start one run after the other there: `ddp-hpc submit A --wait && ddp-hpc submit B`."
        )
    environ, runs_dir, users = request.environ, request.run.path.parent, request.spec.slurm.dependency
    parts, awaits = list[str](), list[AwaitedRun]()
    for name, when in map(split_end_condition, words):
        if (sweep_dir := sweep_named(name, runs_dir)) is not None:
            parts += filter(None, [sweep_dependency(sweep_dir, when, environ)])
        elif awaited := _awaited_job(find_run(name, runs_dir), when, backend, environ):
            parts.append(f"{_SBATCH_CONDITIONS[when]}:{awaited.job_id}")
            awaits.append(awaited)
    if not parts:
        return request
    if users and "?" in users:
        raise ConfigError(
            f"`slurm.dependency` is {users!r}, which asks for one of several jobs (`?`), but the job also has to wait for {','.join(parts)}; "
            "Slurm cannot combine the two. Leave out one of them."
        )
    found = ",".join([*([users] if users else []), *parts])
    resolved = Overlay(request.resolved, environ).resolve({"slurm.dependency": found}, COMMAND_LINE.source)
    return replace(request, resolved=resolved, awaits=awaits)


def _awaited_job(run: RunDir, when: EndCondition, backend: Backend, environ: Mapping[str, str]) -> AwaitedRun | None:
    """Return the job of a run that is to be waited for; None where the run has ended as asked for."""
    spec = load_resolved(run.config)
    there = backend.find_job(run, environ)
    if there is not None and there.job_id is not None:
        if spec.restart.by != "requeue":
            raise ConfigError(
                f"`--after {run.name}` waits for job {there.job_id}, but that run may go on in a new job after it (`restart.by` is "
                f"{spec.restart.by!r}). Wait until it has ended, or give it `restart.by=requeue`, which keeps the job's number."
            )
        return AwaitedRun(path=str(run.path), job_id=there.job_id, when=when)
    if find_job_elsewhere(run, backend.NAME, environ) is not None:
        raise ConfigError(
            f"`--after {run.name}` asks Slurm to wait for a run outside of its queue: it runs by {backend_of(run).NAME}. Wait "
            f"until it has ended, and submit again."
        )
    has_finished = is_finished(run, spec)
    if when == "any" or has_finished == (when == "ok"):
        return None
    newest = Ledger.read(run).newest
    how = (
        "has finished"
        if has_finished
        else "has not begun"
        if newest is None
        else f"is {newest.ending or 'not running'}"
    )
    raise ConfigError(
        f"`--after {run.name}:{when}` waits for a run that {how}, and that has no job in Slurm's queue, so the new run would never start. "
        f"Submit {run.name} first, or ask for `{run.name}:any`."
    )


def sweep_dependency(sweep_dir: SweepDir, when: EndCondition, environ: Mapping[str, str]) -> str:
    """Return what the job waits for, as sbatch takes it; empty where the whole sweep has ended as asked for."""
    name = sweep_dir.name
    if read_sweep(sweep_dir).backend != "slurm":
        raise ConfigError(
            f"`--after {name}` asks Slurm to wait for a sweep, but this one runs on one machine, without Slurm. Wait until it has ended: `ddp-hpc sweep follow {sweep_dir.word}`."
        )
    busy = f"Another process is submitting points of {name} at this moment. Submit again when it has ended."
    with lock_sending(sweep_dir, busy):
        sweep = array.settle_sent_arrays(sweep_dir, environ)
    queued = client.queue(environ)
    waiting = {one.job_id: points_in_queue(one, queued) for one in sweep.arrays}
    live = {number for numbers in waiting.values() for number in numbers}
    newest = {one.number: Ledger.read(sweep_dir.run(one)).newest for one in sweep.points if one.number not in live}
    ended = {number: one.ending for number, one in newest.items() if one is not None and one.is_last}
    unsent = [point for point in sweep.points if point.number not in live and point.number not in ended]
    if unsent:
        raise ConfigError(
            f"`--after {name}` waits for the jobs of all points, but {len(unsent)} of {len(sweep.points)} points have none (the first: {unsent[0].name}). "
            f"Send them first: `ddp-hpc sweep continue {sweep_dir.word}`."
        )
    others = [number for number, ending in ended.items() if ending != Ending.FINISHED]
    if when == "ok" and others:
        raise ConfigError(
            f"`--after {name}` waits for a sweep of which all points finish, but {len(others)} points have ended otherwise (the first: "
            f"{sweep.points[others[0]].name}). Start them again with `ddp-hpc sweep continue {sweep_dir.word} --failed`, or ask for `{name}:any`."
        )
    if when == "notok" and not live and not others:
        raise ConfigError(
            f"`--after {name}:notok` waits for a sweep of which a point fails, but all of its points have finished without a failure, so nothing is to be submitted."
        )
    if not live:
        return ""
    # Where a point has failed already, the sweep is not ok whatever follows.
    how: EndCondition = "any" if when == "notok" and others else when
    return f"{_SBATCH_CONDITIONS[how]}:{':'.join(_arrays_in_queue(sweep, waiting))}"


def _arrays_in_queue(sweep: Sweep, waiting: Mapping[str, set[int]]) -> list[str]:
    """Return the arrays that have tasks in the queue; a job that depends on an array waits for all of its tasks."""
    names = []
    for one in sweep.arrays:
        here = waiting[one.job_id]
        # A point that has failed here runs again in another array, or has run there: its task here stays a failed one.
        run_elsewhere = any(not {*one.numbers}.isdisjoint(other.numbers) for other in sweep.arrays if other is not one)
        if here and run_elsewhere:
            names += [f"{one.job_id}_{number - one.offset}" for number in sorted(here)]
        elif here:
            names.append(one.job_id)
    return names
