"""Runs that wait for others: what a new job of Slurm has to wait for, by the run's records and the jobs that Slurm has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.launch.submission.backend import Backend, backend_of, find_job_elsewhere
from ddp_hpc.launch.submission.run_dir_setup import is_finished
from ddp_hpc.run.config import load_resolved
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Awaited, When

_WORDS: Mapping[When, str] = {"ok": "afterok", "notok": "afternotok", "any": "afterany"}
"""How another run has to end -> what sbatch calls it (`--dependency`, https://slurm.schedmd.com/sbatch.html#OPT_dependency)."""


def split_when(text: str) -> tuple[str, When]:
    """Return the run that `RUN:notok` names, and how it has to end; `ok` where it does not say."""
    name, colon, when = text.rpartition(":")
    return (name, cast("When", when)) if colon and when in _WORDS else (text, "ok")


def after_job(job_id: str, when: When) -> str:
    """Return what sbatch has to be asked for so that a job waits for the end of another."""
    return f"{_WORDS[when]}:{job_id}"


def dependency(
    befores: Sequence[tuple[RunDir, When]],
    backend: Backend,
    environ: Mapping[str, str],
    *,
    is_single: bool,
    users: str | None,
) -> tuple[str | None, list[Awaited]]:
    """Return what the job has to wait for, as sbatch takes it, and the runs among it; None where nothing is left to wait for.

    `is_single`: it also waits for each earlier job of the user that has its name. `users` is what the configuration asks for.
    """
    if not backend.HAS_QUEUE:
        raise ConfigError(
            "`--after` and `--singleton` let a job wait in Slurm's queue, but this run would start on this machine, which has no queue. "
            "Start one run after the other there: `ddp-hpc submit A --wait && ddp-hpc submit B`."
        )
    awaited = [one for run, when in befores if (one := _awaited(run, when, backend, environ))]
    parts = [*(after_job(one.job_id, one.when) for one in awaited), *(["singleton"] if is_single else [])]
    if users and "?" in users and parts:
        raise ConfigError(
            f"`slurm.dependency` is {users!r}, which asks for one of several jobs (`?`), but the job also has to wait for {','.join(parts)}; "
            "Slurm cannot combine the two. Leave out one of them."
        )
    return ",".join([*([users] if users else []), *parts]) or None, awaited


def _awaited(run: RunDir, when: When, backend: Backend, environ: Mapping[str, str]) -> Awaited | None:
    """Return the job of a run that is to be waited for; None where the run has ended as asked for."""
    spec = load_resolved(run.config)
    there = backend.find_job(run, environ)
    if there is not None and there.job_id is not None:
        if spec.restart.by != "requeue":
            raise ConfigError(
                f"`--after {run.name}` waits for job {there.job_id}, but that run may go on in a new job after it (`restart.by` is "
                f"{spec.restart.by!r}). Wait until it has ended, or give it `restart.by=requeue`, which keeps the job's number."
            )
        return Awaited(path=str(run.path), job_id=there.job_id, when=when)
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
