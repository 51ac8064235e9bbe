"""One attempt, from its claim of the run to its end in the ledger: starts the workers, waits, and finds out why they ended."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import closing, suppress

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import ConfigError, DdpHpcError, WorkerError
from ddp_hpc.job import preflight
from ddp_hpc.job.attempt_start import begin_attempt
from ddp_hpc.job.choose_endpoint import endpoints_to_try
from ddp_hpc.job.ending import last_resort, network_probe, node_probe, stale_attempts
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.ending.best_effort import best_effort, best_effort_diagnosis
from ddp_hpc.job.job_context import JobContext, Outcome, why_job_misfits
from ddp_hpc.job.missing_ranks import JoiningRanks
from ddp_hpc.job.monitor import Monitor
from ddp_hpc.job.notify import Notifier
from ddp_hpc.job.slow_rank_monitor import SlowRankMonitor
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.job.workers import Workers
from ddp_hpc.run.run_dir.joined_ranks import write_rendezvous
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger, record_addition


def run_attempt(context: JobContext, workers: Workers, notifier: Notifier) -> Conclusion:
    """Begin an attempt, run its workers to their end, and decide what follows."""
    attempt = begin_attempt(context.run, context.workload, context.job, image=context.wrapper.image)
    notifier.notify_start(attempt)
    outcome = preflight.check_new_nodes(context, attempt) or _run_workers(context, workers, attempt, notifier)
    if context.allocation is not None:
        with best_effort_diagnosis("the nodes"):
            outcome = node_probe.explain_by_nodes(context, attempt, outcome)
        outcome = network_probe.explain_by_network(context, attempt, outcome)
    conclusion = last_resort.conclude_in_any_case(context, attempt, outcome)
    notifier.notify_end(conclusion)
    return conclusion


def _run_workers(context: JobContext, workers: Workers, attempt: int, notifier: Notifier) -> Outcome:
    """Start the workers and wait for their end; where another process uses the port, try the next one."""
    try:
        ledger = Ledger.read(context.run)
        begun = ledger.attempt(attempt)
        assert begun is not None  # noqa: S101  its start has just been written
        if not context.is_for_slurm:
            return _wait_for_workers(context, workers, begun, None, notifier)
        job = _checked_job(context)
        avoided = stale_attempts.bad_nodes_of_job(context, job, ledger)
        if avoided:
            reason = f"{', '.join(avoided)} failed before, so the job asks for other nodes"
            return Outcome(code=exit_codes.FAILED, reason=reason, avoided_nodes=avoided)
        preferred = context.spec.network.interfaces
        for endpoint in endpoints_to_try(job.allocation, attempt=attempt, environ=context.environ, preferred=preferred):
            outcome = _wait_for_workers(context, workers, begun, endpoint, notifier)
            if outcome.code != exit_codes.PORT_TAKEN:
                return outcome
            sys.stderr.write(f"note: another process listens at {endpoint.netloc}; ddp-hpc tries another port\n")
        raise WorkerError(_NO_FREE_PORT_MESSAGE)  # noqa: TRY301  the handler below records it
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        return Outcome(code=error.exit_code, reason=str(error))
    except Exception as error:  # noqa: BLE001  an error in this program ends the attempt, not the job
        return last_resort.end_workers_after_error(error, workers)


def _checked_job(context: JobContext) -> SlurmJob:
    """Return the job, if its allocation has the nodes and tasks that the run needs; refuse the run where it does not."""
    job = context.job
    if job is None:
        raise ConfigError(
            "The job script was started outside of a Slurm job. Submit it with `sbatch`, run it under `salloc`, or "
            "start the run on this machine with `ddp-hpc submit --cluster local`."
        )
    if shutil.which("srun", path=context.environ.get("PATH")) is None:
        raise ConfigError(
            f"PATH in the job, {context.environ.get('PATH')}, has no `srun`, so no worker can be started. Add Slurm's directory to it: "
            "`slurm.modules` with the site's module of Slurm, or a line of `slurm.setup`."
        )
    problem = why_job_misfits(context.spec, job.allocation)
    if problem is not None:
        raise ConfigError(problem)
    return job


def _wait_for_workers(
    context: JobContext, workers: Workers, begun: Attempt, endpoint: Endpoint | None, notifier: Notifier
) -> Outcome:
    """Start the workers and wait for their end; ask them to stop, or kill them, when it is time."""
    monitor = _make_monitor(context, begun)
    met_at = "" if endpoint is None else endpoint.address
    joining = JoiningRanks(context=context, attempt=begun.attempt, met_at=met_at)
    if endpoint is not None:
        with suppress(OSError):  # it is for readers only
            write_rendezvous(context.run, begun.attempt, endpoint.netloc, endpoint.why)
    workers.begin(begun.attempt, endpoint)
    slow_ranks = SlowRankMonitor(run=context.run, attempt=begun.attempt, world_size=context.world.world_size)
    slow_ranks.start()
    with closing(slow_ranks):
        while (code := workers.poll()) is None:
            number = processes.await_signal(min(monitor.patience_s(time.time()), workers.patience_s()))
            match monitor.next_action(number, time.time()):
                case "stop":
                    workers.stop()
                case "end":
                    workers.end()
            # It may probe the network, which takes so long.
            if not monitor.is_stopping_within(network_probe.PROBE_TIMEOUT_S, time.time()):
                joining.name_missing(time.monotonic())
            if monitor.silence_s > context.spec.restart.hang_timeout_s / 2:
                notifier.notify_silence(begun.attempt, monitor.silence_s)
            notifier.notify_failed_save(begun.attempt)
    if code == exit_codes.PORT_TAKEN and (monitor.is_signalled or monitor.is_out_of_time):
        code = exit_codes.STOPPED_BEFORE_START  # the job has to end, so no other port is tried
    return Outcome(
        code=code,
        step_code=workers.step_code,
        reason=_LIMIT_TEXT if monitor.is_cut_short and code not in (exit_codes.STOPPED, exit_codes.FINISHED) else "",
        is_out_of_time=monitor.is_out_of_time,
        was_signalled=monitor.is_signalled,
        is_unresponsive=monitor.is_unresponsive,
        was_suspended=monitor.was_just_suspended(time.time()),
        lost_nodes=tuple(context.nodes[rank] for rank in workers.silent_nodes() if rank < len(context.nodes)),
        met_at=met_at,
    )


_NO_FREE_PORT_MESSAGE = (
    "Other processes listen at every port of rank zero's node that ddp-hpc tried for MASTER_PORT. If you set MASTER_PORT, unset it, "
    "or set it to a free port. Then submit the run again."
)
_LIMIT_TEXT = "the job reached its time limit before the workers had written a checkpoint; raise `slurm.signal_lead_s`"


def _make_monitor(context: JobContext, begun: Attempt) -> Monitor:
    run, spec, job, attempt = context.run, context.spec, context.job, begun.attempt

    def note_end(ends_at: float) -> None:
        with best_effort():
            record_addition(run, attempt=attempt, ends_at=ends_at)

    return Monitor(
        ends_at=begun.ends_at,
        lead_s=spec.slurm.signal_lead_s,
        hang_timeout_s=spec.restart.hang_timeout_s,
        signs_of_life=(run.progress, run.rank_log(attempt, 0), run.allowance(attempt)),
        first_sign=run.rank_log(attempt, 0),
        ask_end=lambda: None if job is None else job.ends_at(),
        note_end=note_end,
        ask_preempted=lambda: job is not None and job.is_preempted(),
    )
