"""Having a job begin that nothing but its past holds back."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from ddp_hpc.base.errors import ConfigError, SlurmRefusalError, SlurmUnavailableError, WorkerError
from ddp_hpc.cluster.slurm import client, states
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.cluster.slurm.nodes import Exclusions, nodes_to_exclude
from ddp_hpc.cluster.slurm.queries import ESLURM_ACCESS_DENIED, JobRecord
from ddp_hpc.run import requeue
from ddp_hpc.run.config import load_resolved
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, End, Ending, Ledger, Next, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, newest_committed, read_queued_job, write_queued_job
from ddp_hpc.run.spec import LaunchSpec

_SAFE_AFTER_S = 2
"""A node that is given a job in the very second in which its former start was ended takes it for that one, and does not
launch it: then Slurm fails the job for good (measured: 22.05, "Job credential revoked"). So Slurm holds requeued ones back."""
_NODES_GONE = "ReqNodeNotAvail"
_LAUNCH_FAILED = "launch_failed_requeued_held"
_KILLED = ":9"
"""The end of a job's `ExitCode` where its shell was killed by SIGKILL."""
MOST_RELEASES = 3
"""How often a job is released that Slurm could not launch and holds: a prolog or a node may fail once."""


def hasten(run: RunDir, environ: Mapping[str, str], *, is_asked: bool = False) -> bool:
    """Have the run's job begin, if nothing but its past holds it back; return whether anything was changed in it.

    Either it was requeued a moment ago, which holds it back for two minutes, usually (`cred_expire`); or nodes are left out,
    where the run failed, and of the others too few are in order by now. The job's own user may change both while it waits.
    Or Slurm holds it, as it could not launch it: it is released a few times, and each time that the user asks (`is_asked`).
    """
    queued = read_queued_job(run)
    if queued is None:
        return False
    try:
        job = client.job(queued.job_id, environ)
    except SlurmUnavailableError:
        return False
    if job is None:
        return False
    require_start(run, job)
    return hasten_job(run, queued, job, environ, is_asked=is_asked)


def require_start(run: RunDir, job: JobRecord) -> None:
    """Check that a job that a command waits for may start.

    Raises:
        WorkerError: where Slurm says that it will not.
    """
    if why := states.why_never(job.reason):
        raise WorkerError(f"Job {job.job_id} of {run.name} never starts: {why}.")


def hastening(queued: QueuedJob, job: JobRecord, now: float) -> dict[str, str]:
    """Return what to change in a job so that it starts; nothing where no change is needed, or not yet.

    The first change sets its start to two seconds later. Once these have passed, a second one sets it to now, as Slurm itself
    looks only every half minute or so.
    """
    if queued.attempt == queued.since or states.parse_state(job.state) != "pending" or job.reason != "BeginTime":
        return {}
    wait_s = float("inf") if job.eligible_at is None else job.eligible_at - now
    if wait_s > _SAFE_AFTER_S:
        return {"StartTime": f"now+{_SAFE_AFTER_S}"}
    return {"StartTime": "now"} if wait_s < 0 else {}


def letting_in(job: JobRecord, let_in: Collection[str]) -> dict[str, str]:
    """Return what to change in a job that waits for nodes that are gone, so that it may get some that it excludes."""
    is_stuck = states.parse_state(job.state) == "pending" and job.reason.startswith(_NODES_GONE)
    excluded = {*expand_hostlist(job.excluded_nodes)}
    if not is_stuck or excluded.isdisjoint(let_in):
        return {}
    return {"ExcNodeList": ",".join(sorted(excluded.difference(let_in)))}


def is_to_be_released(job: JobRecord, newest: Attempt | None, *, is_asked: bool = False) -> bool:
    """Return whether Slurm holds a job because it could not launch it, a few times at the most since it last started."""
    is_held = states.parse_state(job.state) == "pending" and job.reason.lower().replace(" ", "_") == _LAUNCH_FAILED
    return is_held and (is_asked or (job.restarts or 0) - (newest.restart if newest else 0) <= MOST_RELEASES)


def _nodes_to_let_in(run: RunDir, job: JobRecord, environ: Mapping[str, str]) -> set[str]:
    """Return the nodes on which the run failed, but that it cannot do without as the cluster is now, or need not."""
    spec = load_resolved(run.config)
    if spec.slurm.partition is None:
        spec = replace(spec, slurm=replace(spec.slurm, partition=job.partition or None))
    left_out = {*expand_hostlist(spec.slurm.exclude or ""), *spared_nodes(run, spec, environ).excluded}
    return {node for attempt in Ledger.read(run).attempts for node in attempt.failed_nodes} - left_out


def hasten_job(
    run: RunDir, queued: QueuedJob, job: JobRecord, environ: Mapping[str, str], *, is_asked: bool = False
) -> bool:
    """Have a job begin, of which this is known; return whether anything was changed in it.

    Unless the user asks, nothing is changed where `slurm.hasten` is `never`: by the user's choice, or by the site's profile.

    Raises:
        ConfigError: where the user has asked for it, and Slurm refuses to release it.
    """
    is_held = False
    try:
        change = hastening(queued, job, time.time())
        if not change and job.excluded_nodes and job.reason.startswith(_NODES_GONE):
            change = letting_in(job, _nodes_to_let_in(run, job, environ))
        is_held = is_to_be_released(job, Ledger.read(run).newest, is_asked=is_asked)
        if (is_held or change) and not is_asked and load_resolved(run.config).slurm.hasten == "never":
            return False
        if is_held:
            client.release(queued.job_id, environ)
            return True
        if change:
            client.update(queued.job_id, environ, **change)
    except SlurmRefusalError as error:
        if not is_asked or not is_held:
            return False
        if error.code != ESLURM_ACCESS_DENIED:
            raise
        # The job is ours, so it is the hold that is another's. Slurm's `Reason` does not tell: it goes on to say
        # `launch failed requeued held` of a job that an administrator has held since (measured: 22.05).
        raise ConfigError(f"{error}. An administrator holds the job, and only they can release it.") from error
    except (ConfigError, SlurmUnavailableError):
        return False
    return bool(change)


def call_back(run: RunDir, queued: QueuedJob, job: JobRecord, environ: Mapping[str, str]) -> bool:
    """Requeue a job that ended because its shell, which is the guardian, was killed; return whether that was done.

    Slurm calls such a job FAILED, and knows it for some minutes more (`MinJobAge`). Deaths without progress are limited, as
    those of a supervisor are: a site's watchdog may kill the shell each time.
    """
    ledger = Ledger.read(run)
    attempts = ledger.since(queued.since)
    newest = attempts[-1] if attempts else None
    if newest is None or newest.ending is not None or newest.job_id != queued.job_id:
        return False
    if states.parse_state(job.state) != "failed" or not job.exit_code.endswith(_KILLED):
        return False
    num_deaths = requeue.num_without_progress(attempts, newest_committed(run, ledger), Cause.UNEXPLAINED)
    if num_deaths >= load_resolved(run.config).restart.max_no_progress:
        return False
    # Slurm was asked for a while: meanwhile the user may have cancelled the job, or submitted the run again.
    if read_queued_job(run) != queued:
        return False
    try:
        client.requeue(queued.job_id, environ)
    except (ConfigError, SlurmUnavailableError):
        return False
    # Accounting will call this start REQUEUED, as if somebody had wanted its end. The ledger says how it ended.
    end = End(cause=Cause.SUPERVISOR_DIED, last_step=newest_committed(run, ledger), next=Next.REQUEUE)
    record_end(run, attempt=newest.attempt, ending=Ending.FAILED, exit_code=-9, reason=_SHELL_KILLED, end=end)
    if read_queued_job(run) == queued:
        write_queued_job(run, replace(queued, attempt=newest.attempt + 1, at=time.time()))
    return True


_SHELL_KILLED = (
    "signal 9 killed the job's shell and ddp-hpc in it, and a process that waited for the run, such as "
    "`ddp-hpc submit --wait`, put the job back into the queue"
)


def spared_nodes(run: RunDir, spec: LaunchSpec, environ: Mapping[str, str]) -> Exclusions:
    """Return the nodes that the run's ledger remembers as failing, as far as the job can do without them."""
    bad = requeue.bad_nodes(Ledger.read(run).attempts, spec.restart, now=time.time())
    return nodes_to_exclude(bad, spec, environ)
