"""Start a job that nothing but its past holds back: its user asks for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from ddp_hpc.base.errors import ConfigError, SlurmRefusalError, SlurmUnavailableError, WorkerError
from ddp_hpc.cluster.slurm import client, states
from ddp_hpc.cluster.slurm.exclude_nodes import nodes_to_exclude
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.cluster.slurm.queries import ESLURM_ACCESS_DENIED, JobRecord
from ddp_hpc.run import requeue
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job

_SAFE_START_DELAY_S = 2
"""A node that is given a job in the very second in which its former start was ended takes it for that one, and does not
launch it: then Slurm fails the job for good (measured: 22.05, "Job credential revoked"). So Slurm holds requeued ones back."""
_NODES_GONE_REASONS = ("ReqNodeNotAvail", "BadConstraints")
"""Why a job waits where those of its nodes are gone that it does not exclude: nodes of another kind are left, or none."""
_LAUNCH_HELD = "launch_failed_requeued_held"


def hasten(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Have the run's job begin, if nothing but its past holds it back; return whether anything was changed in it.

    Either it was requeued a moment ago, which holds it back for two minutes, usually (`cred_expire`); or nodes are left out,
    where the run failed, and of the others too few are in order by now; or Slurm holds it, as it could not launch it. The
    job's own user may change all three while it waits.
    """
    queued = read_queued_job(run)
    is_held = False
    try:
        job = None if queued is None else client.job(queued.job_id, environ)
        if queued is None or job is None:
            return False
        is_held = states.parse_state(job.state) == "pending" and job.reason.lower().replace(" ", "_") == _LAUNCH_HELD
        if is_held:
            client.release(queued.job_id, environ)
            return True
        change = changes_to_start(queued, job, time.time())
        if not change and job.excluded_nodes and job.reason.startswith(_NODES_GONE_REASONS):
            change = changes_to_let_in(job, _nodes_to_let_in(run, job, environ))
        if change:
            client.update(queued.job_id, environ, **change)
    except SlurmRefusalError as error:
        if not is_held:
            return False
        if error.code != ESLURM_ACCESS_DENIED:
            raise
        # The job is ours, so it is the hold that is another's. Slurm's `Reason` does not tell: it goes on to say
        # `launch failed requeued held` of a job that an administrator has held since (measured: 22.05).
        raise ConfigError(f"{error}. An administrator holds the job, and only they can release it.") from error
    except (ConfigError, SlurmUnavailableError):
        return False
    if not change:
        require_startable(run, job.job_id, job.reason)
    return bool(change)


def require_startable(run: RunDir, job_id: str | None, reason: str) -> None:
    """Check that a job that a command waits for may start, by Slurm's reason or what it means.

    Raises:
        WorkerError: where it will not.
    """
    if why := states.why_never(reason):
        raise WorkerError(f"Job {job_id} of {run.name} never starts: {why}.")


def changes_to_start(queued: QueuedJob, job: JobRecord, now: float) -> dict[str, str]:
    """Return what to change in a job so that it starts; nothing where no change is needed, or not yet.

    The first change sets its start to two seconds later. Once these have passed, a second one sets it to now, as Slurm itself
    looks only every half minute or so.
    """
    if queued.attempt == queued.since or states.parse_state(job.state) != "pending" or job.reason != "BeginTime":
        return {}
    wait_s = float("inf") if job.eligible_at is None else job.eligible_at - now
    if wait_s > _SAFE_START_DELAY_S:
        return {"StartTime": f"now+{_SAFE_START_DELAY_S}"}
    return {"StartTime": "now"} if wait_s < 0 else {}


def changes_to_let_in(job: JobRecord, let_in: Collection[str]) -> dict[str, str]:
    """Return what to change in a job that waits for nodes that are gone, so that it may get some that it excludes."""
    is_stuck = states.parse_state(job.state) == "pending" and job.reason.startswith(_NODES_GONE_REASONS)
    excluded = {*expand_hostlist(job.excluded_nodes)}
    if not is_stuck or excluded.isdisjoint(let_in):
        return {}
    return {"ExcNodeList": ",".join(sorted(excluded.difference(let_in)))}


def _nodes_to_let_in(run: RunDir, job: JobRecord, environ: Mapping[str, str]) -> set[str]:
    """Return the nodes on which the run failed, but that it cannot do without as the cluster is now, or need not."""
    spec = load_resolved(run.config)
    attempts = Ledger.read(run).attempts
    bad = requeue.bad_nodes(attempts, spec.restart, now=time.time())
    failed, _ = nodes_to_exclude(bad, spec, environ, script=run.job_script, partition=job.partition)
    left_out = {*expand_hostlist(spec.slurm.exclude or ""), *failed}
    return {node for attempt in attempts for node in attempt.failed_nodes} - left_out
