"""The supervisor of a job: acquires the run, runs one attempt after another, and decides what follows each.

    python -m ddp_hpc.job.supervisor RUN_DIR [--cluster slurm]

On Slurm, the job script starts it, and it starts a job step on all nodes. Without Slurm, it starts one agent on this
machine. It alone decides whether the job goes back into the queue: agents and workers know nothing of the queue.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.discretion import is_shown
from ddp_hpc.base.durable import make_directories, private_mode
from ddp_hpc.base.errors import ConfigError, DdpHpcError, WorkerError
from ddp_hpc.cluster.containers import CommandWrapper, HostPaths
from ddp_hpc.cluster.rendezvous.worker_env import for_debug, for_nan_check, giving, of_user
from ddp_hpc.cluster.slurm.allocation import of_outer_job, read_allocation
from ddp_hpc.cluster.slurm.directives import sent_options
from ddp_hpc.job import preflight
from ddp_hpc.job.choose_endpoint import endpoints
from ddp_hpc.job.ending import last_resort, network_probe, node_probe, stale_attempts, takeover
from ddp_hpc.job.ending.best_effort import best_effort, diagnosis
from ddp_hpc.job.ending.evidence import has_trained
from ddp_hpc.job.ending.requeue_job import ENDED_BY_USER
from ddp_hpc.job.job_context import JobContext, Outcome, given_world, misfit
from ddp_hpc.job.joining import Joining
from ddp_hpc.job.launcher import Launch
from ddp_hpc.job.monitor import Monitor
from ddp_hpc.job.node.cpus import take_back_cpus
from ddp_hpc.job.node.python_environ import IMPORT_PATH
from ddp_hpc.job.notify import Notifier
from ddp_hpc.job.run_records import LOCK_PATIENCE_S, RunRecords, in_use
from ddp_hpc.job.slow_rank_monitor import SlowRankMonitor
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.job.staging import moved, stage, unstage, wrapper_of
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.job.workers import Workers, workers_of
from ddp_hpc.run.config import dropped_from, load_resolved
from ddp_hpc.run.run_dir.joining import write_meeting
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ledger, Next
from ddp_hpc.run.run_dir.machine_use import in_words, merged, read_uses
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, is_done, read_queued_job, read_stop_request, since_submission
from ddp_hpc.run.workload.table import workload_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run attempts until one ends the run or the job; return the exit code of the last one."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.supervisor", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--cluster", choices=("local", "slurm"), default="local")
    # `--told`: the name in job scripts of older versions, which may still be pending in Slurm's queue.
    parser.add_argument(
        "--stop-requested", "--told", action="store_true", help="a stop signal arrived before this process started"
    )
    parser.add_argument("--import-path", action="append", default=[], help="where workers find the user's code")
    parser.add_argument("--guarded", action="store_true", help="a guardian starts another supervisor if this one dies")
    parser.add_argument("--after", type=int, help="the exit code of the supervisor before this one")
    parser.add_argument(
        "--since", type=int, default=0, help="the first attempt that a supervisor of the guardian may have begun"
    )
    parser.add_argument("--lock-fd", type=int, help="file descriptor of the run's lock, which the guardian holds")
    arguments = parser.parse_args(argv)
    code = _main(arguments)
    if arguments.guarded:
        return exit_codes.GAVE_UP if code == exit_codes.FAILED else code
    return exit_codes.FAILED if code == exit_codes.UNDECIDED else code


def _main(arguments: argparse.Namespace) -> int:
    run, is_for_slurm = RunDir(arguments.run), arguments.cluster == "slurm"
    # Blocked signals stay pending until `await_signal` takes them, so none is lost between two attempts, when no worker is
    # there to get it (signal(7), https://man7.org/linux/man-pages/man7/signal.7.html). First of all, because threads and
    # children inherit the mask of whoever starts them.
    processes.block_awaited_signals()
    processes.restore_stop_signals()
    if arguments.stop_requested:
        processes.request_stop([os.getpid()])
    job: SlurmJob | None = None
    try:
        _clean_environ(arguments.import_path, is_for_slurm=is_for_slurm)
        if is_for_slurm:
            with suppress(OSError):  # there is no log, or the file system has no modes
                run.console.chmod(private_mode(run.console))  # Slurm has made it by the umask
            allocation = read_allocation(os.environ)
            job = SlurmJob(allocation=allocation, environ=os.environ) if allocation else None
        return _work(arguments, run, job)
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        if error.exit_code == exit_codes.FAILED:
            return _note_escaped(run, job, str(error), is_guarded=arguments.guarded)
        return error.exit_code
    except OSError as error:  # a full disk, a quota, an unmounted file system: then the ledger cannot be written
        is_last = not is_for_slurm and error.errno in _LASTING
        then = f"Repair that, and submit {run.name} again." if is_last else "Check its file system."
        is_runs = not isinstance(error.filename, str) or Path(error.filename).is_relative_to(run.path)
        what = f"the run's directory {run.path}" if is_runs else f"{error.filename} on {socket.gethostname()}"
        sys.stderr.write(f"error: ddp-hpc cannot use {what}: {error}. {then}\n")
        return exit_codes.FAILED if is_last else exit_codes.UNDECIDED
    except Exception as error:  # noqa: BLE001  an error in this program: the ledger has to record it
        return _note_escaped(run, job, last_resort.print_error(error), is_guarded=arguments.guarded)


_LASTING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR})
"""Errors of a file system that last until a person repairs them."""


def _work(arguments: argparse.Namespace, run: RunDir, job: SlurmJob | None) -> int:
    """Acquire the run, and run its attempts."""
    if arguments.after is not None and job is not None:
        takeover.end_leftover_steps(run, job)
    lock_fds = _lock(run, job) if arguments.lock_fd is None else [arguments.lock_fd]
    if arguments.after is not None:
        code = takeover.take_over(run, job, how=exit_codes.described(arguments.after), since=arguments.since)
        if code is not None:
            return code
    records, queued = RunRecords(run), read_queued_job(run)
    attempts = since_submission(Ledger.read(run), queued)
    decision = _user_decision(run, job, queued, is_back=bool(attempts))
    if arguments.after is None or decision is not None:  # a stop request to the supervisor that died holds for this one
        run.stop_request.unlink(missing_ok=True)
    if decision is not None:
        reason = f"{ENDED_BY_USER[decision]} while the job waited in the queue"
        records.note_unbegun(job, decision, reason, exit_codes.STOPPED)
        sys.stderr.write(f"ended: {reason}\n")
        return exit_codes.STOPPED
    context: JobContext | None = None
    try:
        context = _context(run, job, is_for_slurm=arguments.cluster == "slurm")
        here = Path.cwd()
        paths = HostPaths(
            work_dir=here,
            import_paths=[Path(path) for path in arguments.import_path],
            inputs=[*context.workload.input_paths(here)],
        )
        wrapper = wrapper_of(context.spec, run, paths, os.environ, is_for_slurm=context.is_for_slurm)
    except ConfigError as error:
        if context is not None and job is not None and has_trained(attempts):
            return _leave_node(context, error)
        records.note_unbegun(job, Cause.REFUSED, str(error), exit_codes.REFUSED)
        raise
    os.environ.update(wrapper.environ)  # for whatever starts there: no command line may show values
    return _supervise(context, wrapper, lock_fds)


def _note_escaped(run: RunDir, job: SlurmJob | None, reason: str, *, is_guarded: bool) -> int:
    """Record an unexpected error as the end of the attempt; return the exit code that says whether another may follow."""
    try:
        ledger = Ledger.read(run)
        newest = ledger.newest
        if newest is None or newest.ending is not None or newest.pid != os.getpid():
            RunRecords(run).begin_without_workers(job)
            ledger = Ledger.read(run)
        end = takeover.write_down_death(run, ledger, job, reason, may_go_on=is_guarded)
    except Exception as error:  # noqa: BLE001  the guardian counts what the ledger cannot
        last_resort.print_error(error)
        return exit_codes.UNDECIDED
    return exit_codes.UNDECIDED if end.next else exit_codes.FAILED


def _clean_environ(import_path: Sequence[str], *, is_for_slurm: bool) -> None:
    """Take away what a rank of another run was given, from whose script this run was submitted; say where workers import from."""
    if not is_for_slurm:
        take_back_cpus(os.environ)
    users = of_user(os.environ)
    for name in os.environ.keys() - users.keys():
        del os.environ[name]
    os.environ.update(users)
    if import_path:
        os.environ[IMPORT_PATH] = os.pathsep.join(import_path)


def _context(run: RunDir, job: SlurmJob | None, *, is_for_slurm: bool) -> JobContext:
    """Read what the run asks for; set the variables for every process that is started here, without those of an outer job."""
    spec = load_resolved(run.config, is_patient=True)
    workload = workload_of(spec)
    sys.stderr.writelines(f"{note}\n" for note in dropped_from(run.config))
    if libraries := for_debug(spec.debug.nccl, run.nccl_logs):
        make_directories(run.nccl_logs)
        sys.stderr.write(f"NCCL logs into {run.nccl_logs}, because `debug.nccl` is {spec.debug.nccl}\n")
        os.environ.update(giving(libraries, os.environ))  # a variable that the run sets itself wins
    _set_variables(spec.environ)
    for name in of_outer_job(os.environ, sent_options(spec)) if is_for_slurm else ():
        del os.environ[name]
    if workload.hash_seed is not None and "PYTHONHASHSEED" not in os.environ:
        os.environ.update(giving({"PYTHONHASHSEED": str(workload.hash_seed)}, os.environ))
    rule = nan_check_rule(spec.debug.nan, Ledger.read(run).newest, ends_at_nan=workload.ends_at_nan)
    if rule:
        sys.stderr.write(f"workers check gradients for NaN, because {rule}\n")
    os.environ.update(for_nan_check(rule))
    allocation = job.allocation if job else None
    return JobContext(
        run=run,
        spec=spec,
        workload=workload,
        world=given_world(spec, allocation),
        allocation=allocation,
        is_for_slurm=is_for_slurm,
        environ=dict(os.environ),
        is_supervised=True,
    )


def nan_check_rule(asked: Literal["auto", "always", "never"], newest: Attempt | None, *, ends_at_nan: bool) -> str:
    """Return why they do, as a text; empty where they do not. `newest` is the run's newest attempt before the job's."""
    if asked == "always":
        return "`debug.nan` is `always`"
    if asked == "auto" and ends_at_nan and newest is not None and newest.cause == Cause.DIVERGED:
        return f"attempt {newest.attempt} ended because the loss was not finite (`debug.nan`): this names the rank"
    return ""


def _set_variables(variables: Mapping[str, str]) -> None:
    """Set the run's own variables, and log them."""
    for name, value in variables.items():
        before = os.environ.get(name)
        if not is_shown(name):
            sys.stderr.write(f"{name} is set by the key `env.{name}`; its value is not shown\n")
            continue
        was = "" if before in (None, value) else f" (it was {before!r})"
        sys.stderr.write(f"{name}={value!r} is set by the key `env.{name}`{was}\n")
    os.environ.update(variables)


def _lock(run: RunDir, job: SlurmJob | None) -> list[int]:
    """Lock the run; return the file descriptors that child processes have to inherit.

    An earlier start of the same job may still hold the lock, on a node that Slurm cannot reach. Then this start goes on
    without the lock: its first attempt fences the older one (`ownership`).
    """
    # The lock belongs to the open file description, which all processes share that inherit the descriptor. So the run is
    # locked until the last of them has exited, whichever is killed first (flock(2),
    # https://man7.org/linux/man-pages/man2/flock.2.html).
    lock_fd = processes.take_lock(run.lock, patience_s=LOCK_PATIENCE_S)
    newest = Ledger.read(run).newest
    if newest is not None and job is not None and stale_attempts.is_anothers(newest, job):
        raise ConfigError(in_use(run, f"job {newest.job_id}"))
    if lock_fd is not None:
        return [lock_fd]
    if newest is None or job is None or newest.job_id != job.job_id:
        raise ConfigError(in_use(run))
    sys.stderr.write(
        f"note: attempt {newest.attempt} is still running on {newest.host}; this start of the job replaces it, and the old "
        "one can write no more checkpoints\n"
    )
    return []


def _user_decision(run: RunDir, job: SlurmJob | None, queued: QueuedJob | None, *, is_back: bool) -> Cause | None:
    """Return whether the user cancelled or stopped the run while its job was in the queue again.

    Slurm may requeue a job that is cancelled at the same moment. A request from before the user's newest submission is not
    for this job.
    """
    if job is None or queued is None or queued.job_id != job.job_id:
        return None
    if queued.cancelled_at is not None:
        return Cause.CANCELLED
    return Cause.STOP_ASKED if is_back and read_stop_request(run) == "end" else None


def _leave_node(context: JobContext, error: ConfigError) -> int:
    """Requeue the job to get other nodes: this node lacks something that earlier attempts had, such as a mount."""
    attempt = context.records.begin(context.workload, context.job)
    reason = f"{socket.gethostname()}: {error}"
    node = context.nodes[:1]  # the supervisor's node
    outcome = Outcome(code=exit_codes.FAILED, reason=reason, avoided_nodes=node)
    conclusion = last_resort.conclude(context, attempt, outcome)
    last_resort.leave(context, conclusion)
    return conclusion.end.exit_code


def _supervise(context: JobContext, wrapper: CommandWrapper, lock_fds: Sequence[int]) -> int:
    """Run attempts while the next one is to begin on the same nodes."""
    run, workload = context.run, context.workload
    if context.job is not None:
        stale_attempts.close_stale(context.records, workload, context.job)
    if is_done(run, workload.goal):
        sys.stderr.write(f"note: {run.name} has finished already, so this job has nothing to do\n")
        return exit_codes.FINISHED
    staged = stage(context.spec, run, context.allocation, context.environ)
    inside = moved(wrapper, staged, context.environ)
    launch = Launch(spec=context.spec, run=run, workload=workload, world=context.world, wrapper=inside)
    workers = workers_of(launch, lock_fds, is_for_slurm=context.is_for_slurm)
    notifier = Notifier(context=context)
    try:
        while True:
            attempt = context.records.begin(workload, context.job, image=wrapper.image)
            notifier.begun(attempt)
            outcome = preflight.checked(context, wrapper, attempt) or _run_workers(context, workers, attempt, notifier)
            if context.allocation is not None:
                with diagnosis("the nodes"):
                    outcome = node_probe.explain_by_nodes(context, wrapper, attempt, outcome)
                outcome = network_probe.explain_by_network(context, attempt, outcome)
            conclusion = last_resort.conclude(context, attempt, outcome)
            notifier.ended(conclusion)
            if conclusion.end.next != Next.IN_PLACE:
                break
            sys.stderr.write(f"note: {conclusion.end.reason}; ddp-hpc starts the workers again\n")
            if context.job is not None and conclusion.is_slurm_away:
                context.job.await_answer()
    finally:
        workers.close()
        unstage(staged, context.allocation, context.environ)
    notifier.leave(goes_on=bool(conclusion.end.next))
    last_resort.leave(context, conclusion)
    if not conclusion.end.next:  # a job that goes on is ended by Slurm at any moment from here
        with suppress(OSError):  # it is for readers only
            if use := merged(read_uses(run, attempt)):
                words = "; ".join(in_words(use))
                sys.stderr.write(f"note: machine use of the attempt, on average (memory: at most): {words}\n")
    return conclusion.end.exit_code


def _run_workers(context: JobContext, workers: Workers, attempt: int, notifier: Notifier) -> Outcome:
    """Start the workers and wait for their end; where another process uses the port, try the next one."""
    try:
        ledger = Ledger.read(context.run)
        begun = ledger.attempt(attempt)
        assert begun is not None  # noqa: S101  its start has just been written
        if not context.is_for_slurm:
            return _wait_for_workers(context, workers, begun, None, notifier)
        job = _fitting_job(context)
        avoided = stale_attempts.nodes_to_avoid(context, job, ledger)
        if avoided:
            reason = f"{', '.join(avoided)} failed before, so the job asks for other nodes"
            return Outcome(code=exit_codes.FAILED, reason=reason, avoided_nodes=avoided)
        preferred = context.spec.network.interfaces
        for endpoint in endpoints(job.allocation, attempt=attempt, environ=context.environ, preferred=preferred):
            outcome = _wait_for_workers(context, workers, begun, endpoint, notifier)
            if outcome.code != exit_codes.PORT_TAKEN:
                return outcome
            sys.stderr.write(f"note: another process listens at {endpoint.netloc}; ddp-hpc tries another port\n")
        raise WorkerError(_NO_FREE_PORT)  # noqa: TRY301  the handler below records it
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        return Outcome(code=error.exit_code, reason=str(error))
    except Exception as error:  # noqa: BLE001  an error in this program ends the attempt, not the job
        return last_resort.outcome_of(error, workers)


def _fitting_job(context: JobContext) -> SlurmJob:
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
    problem = misfit(context.spec, job.allocation)
    if problem is not None:
        raise ConfigError(problem)
    return job


def _wait_for_workers(
    context: JobContext, workers: Workers, begun: Attempt, endpoint: Endpoint | None, notifier: Notifier
) -> Outcome:
    """Start the workers and wait for their end; ask them to stop, or kill them, when it is time."""
    monitor = _monitor(context, begun)
    met_at = "" if endpoint is None else endpoint.address
    joining = Joining(context=context, attempt=begun.attempt, met_at=met_at, probe=network_probe.probe)
    if endpoint is not None:
        with suppress(OSError):  # it is for readers only
            write_meeting(context.run, begun.attempt, endpoint.netloc, endpoint.why)
    workers.begin(begun.attempt, endpoint)
    slow_ranks = SlowRankMonitor(run=context.run, attempt=begun.attempt, world_size=context.world.world_size)
    slow_ranks.start()
    with closing(slow_ranks):
        while (code := workers.poll()) is None:
            number = processes.await_signal(min(monitor.patience_s(time.time()), workers.patience_s()))
            match monitor.look(number, time.time()):
                case "stop":
                    workers.stop()
                case "end":
                    workers.end()
            # It may probe the network, which takes so long.
            if not monitor.ends_within(network_probe.MOST_S, time.time()):
                joining.look(time.monotonic())
            if monitor.silence_s > context.spec.restart.hang_timeout_s / 2:
                notifier.silent(begun.attempt, monitor.silence_s)
            notifier.look(begun.attempt)
    if code == exit_codes.PORT_TAKEN and (monitor.is_signalled or monitor.is_out_of_time):
        code = exit_codes.STOPPED_EARLY  # the job has to end, so no other port is tried
    return Outcome(
        code=code,
        step_code=workers.step_code,
        reason=_CUT_SHORT if monitor.is_cut_short and code not in (exit_codes.STOPPED, exit_codes.FINISHED) else "",
        is_out_of_time=monitor.is_out_of_time,
        was_signalled=monitor.is_signalled,
        is_unresponsive=monitor.is_unresponsive,
        was_suspended=monitor.was_just_suspended(time.time()),
        lost_nodes=tuple(context.nodes[rank] for rank in workers.silent_nodes() if rank < len(context.nodes)),
        met_at=met_at,
    )


_NO_FREE_PORT = (
    "Other processes listen at every port of rank zero's node that ddp-hpc tried for MASTER_PORT. If you set MASTER_PORT, unset it, "
    "or set it to a free port. Then submit the run again."
)
_CUT_SHORT = "the job reached its time limit before the workers had written a checkpoint; raise `slurm.signal_lead_s`"


def _monitor(context: JobContext, begun: Attempt) -> Monitor:
    run, spec, job, attempt = context.run, context.spec, context.job, begun.attempt

    def note_end(ends_at: float) -> None:
        with best_effort():
            context.records.note(attempt, ends_at=ends_at)

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


if __name__ == "__main__":
    sys.exit(main())
