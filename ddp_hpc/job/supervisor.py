"""The supervisor of a job: acquires the run, runs one attempt after another, and decides what follows each.

    python -m ddp_hpc.job.supervisor RUN_DIR [--cluster slurm]

On Slurm, the job script starts it, and it starts a job step on all nodes. Without Slurm, it starts one agent on this
machine. It alone decides whether the job goes back into the queue: agents and workers know nothing of the queue.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.discretion import is_env_shown
from ddp_hpc.base.durable import make_directories, new_file_mode
from ddp_hpc.base.errors import ConfigError, DdpHpcError
from ddp_hpc.cluster.containers import HostPaths
from ddp_hpc.cluster.rendezvous.worker_env import (
    nan_check_variables,
    nccl_debug_variables,
    users_environ,
    with_undo_record,
)
from ddp_hpc.cluster.slurm.allocation import outer_job_variables, read_allocation
from ddp_hpc.cluster.slurm.directives import sent_options
from ddp_hpc.job import attempt_start
from ddp_hpc.job.attempt import run_attempt
from ddp_hpc.job.ending import last_resort, stale_attempts, takeover
from ddp_hpc.job.ending.evidence import has_trained
from ddp_hpc.job.ending.requeue_job import USER_END_TEXTS
from ddp_hpc.job.job_context import JobContext, Outcome, read_context
from ddp_hpc.job.node.cpus import restore_cpu_affinity
from ddp_hpc.job.node.python_environ import IMPORT_PATH_NAME
from ddp_hpc.job.notify import Notifier
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.job.staging import job_command_wrapper, stage, unstage, with_staged_paths
from ddp_hpc.job.workers import make_workers
from ddp_hpc.run.config.resolve import removed_key_notes
from ddp_hpc.run.requeue import MESSAGE_BY_NEXT
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ledger, Next
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, attempts_of_submission, is_done, read_queued_job, read_stop_request


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
    return exit_codes.FAILED if code == exit_codes.RESTART_SUPERVISOR else code


def _main(arguments: argparse.Namespace) -> int:
    run, is_for_slurm = RunDir(arguments.run), arguments.cluster == "slurm"
    # Blocked signals stay pending until `await_signal` takes them, so none is lost between two attempts, when no worker is
    # there to get it (signal(7)).
    processes.block_awaited_signals()
    processes.restore_stop_signals()
    if arguments.stop_requested:
        processes.request_stop([os.getpid()])
    job: SlurmJob | None = None
    try:
        _drop_outer_run_env(arguments.import_path, is_for_slurm=is_for_slurm)
        if is_for_slurm:
            with suppress(OSError):  # there is no log, or the file system has no modes
                run.console.chmod(new_file_mode(run.console))  # Slurm has made it by the umask
            allocation = read_allocation(os.environ)
            job = SlurmJob(allocation=allocation, environ=os.environ) if allocation else None
        return _run_job(arguments, run, job)
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        if error.exit_code == exit_codes.FAILED:
            return _record_own_failure(run, job, str(error), is_guarded=arguments.guarded)
        return error.exit_code
    except OSError as error:  # a full disk, a quota, an unmounted file system: then the ledger cannot be written
        is_last = not is_for_slurm and error.errno in _LASTING
        then = f"Repair that, and submit {run.name} again." if is_last else "Check its file system."
        is_runs = not isinstance(error.filename, str) or Path(error.filename).is_relative_to(run.path)
        what = f"the run's directory {run.path}" if is_runs else f"{error.filename} on {socket.gethostname()}"
        sys.stderr.write(f"error: ddp-hpc cannot use {what}: {error}. {then}\n")
        return exit_codes.FAILED if is_last else exit_codes.RESTART_SUPERVISOR
    except Exception as error:  # noqa: BLE001  an error in this program: the ledger has to record it
        return _record_own_failure(run, job, last_resort.print_error(error), is_guarded=arguments.guarded)


_LASTING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR})
"""Errors of a file system that last until a person repairs them."""


def _run_job(arguments: argparse.Namespace, run: RunDir, job: SlurmJob | None) -> int:
    """Acquire the run, and run its attempts."""
    if arguments.after is not None and job is not None:
        attempt_start.refuse_older_start(run, Ledger.read(run), job)  # the steps of the job would be the newer start's
        takeover.end_leftover_steps(run, job)
    lock_fds = _lock_run(run, job) if arguments.lock_fd is None else [arguments.lock_fd]
    if arguments.after is not None:
        code = takeover.take_over_attempt(run, job, how=exit_codes.describe_end(arguments.after), since=arguments.since)
        if code is not None:
            return code
    queued = read_queued_job(run)
    attempts = attempts_of_submission(Ledger.read(run), queued)
    decision = _cause_if_user_ended(run, job, queued, is_back=bool(attempts))
    if arguments.after is None or decision is not None:  # a stop request to the supervisor that died holds for this one
        run.stop_request.unlink(missing_ok=True)
    if decision is not None:
        reason = f"{USER_END_TEXTS[decision]} while the job waited in the queue"
        attempt_start.record_unbegun_attempt(run, job, decision, reason, exit_codes.STOPPED)
        sys.stderr.write(f"ended: {reason}\n")
        return exit_codes.STOPPED
    context: JobContext | None = None
    try:
        context = _prepare_context(run, job, is_for_slurm=arguments.cluster == "slurm")
        here = Path.cwd()
        paths = HostPaths(
            work_dir=here,
            import_paths=[Path(path) for path in arguments.import_path],
            inputs=[*context.workload.input_paths(here)],
        )
        wrapper = job_command_wrapper(context.spec, run, paths, os.environ, is_for_slurm=context.is_for_slurm)
    except ConfigError as error:
        if context is not None and job is not None and has_trained(attempts):
            return _requeue_for_other_nodes(context, error)
        attempt_start.record_unbegun_attempt(run, job, Cause.REFUSED, str(error), exit_codes.REFUSED)
        raise
    os.environ.update(wrapper.environ)  # for whatever starts there: no command line may show values
    return _run_attempts(replace(context, wrapper=wrapper), lock_fds)


def _run_attempts(context: JobContext, lock_fds: Sequence[int]) -> int:
    """Run attempts while the next one is to begin on the same nodes."""
    run, job = context.run, context.job
    if job is not None:
        stale_attempts.close_stale_attempt(run, context.workload, job)
        if why := stale_attempts.why_no_attempt(context, job):
            attempt_start.record_unbegun_attempt(run, job, Cause.NODE_FAILED, why, exit_codes.FAILED)
            sys.stderr.write(f"ended: {why}\n")
            return exit_codes.FAILED
    if is_done(run, context.workload.goal):
        sys.stderr.write(f"note: {run.name} has finished already, so this job has nothing to do\n")
        return exit_codes.FINISHED
    staged = stage(context.spec, run, context.allocation, context.environ)
    inside = with_staged_paths(context.wrapper, staged, context.environ)
    workers = make_workers(replace(context, wrapper=inside), lock_fds)
    notifier = Notifier(context=context)
    try:
        while (conclusion := run_attempt(context, workers, notifier)).end.next == Next.IN_PLACE:
            sys.stderr.write(f"note: {conclusion.end.reason}; {MESSAGE_BY_NEXT[Next.IN_PLACE]}\n")
            if job is not None and conclusion.is_slurm_away:
                job.await_answer()
    finally:
        workers.close()
        unstage(staged, context.allocation, context.environ)
    notifier.wait_for_commands(goes_on=bool(conclusion.end.next))
    last_resort.carry_out_in_any_case(context, conclusion)
    return conclusion.end.exit_code


def _record_own_failure(run: RunDir, job: SlurmJob | None, reason: str, *, is_guarded: bool) -> int:
    """Record an unexpected error as the end of the attempt; return the exit code that says whether another may follow."""
    try:
        ledger = Ledger.read(run)
        newest = ledger.newest
        if newest is None or newest.ending is not None or newest.pid != os.getpid():
            attempt_start.record_start_without_workers(run, job)
            ledger = Ledger.read(run)
        end = takeover.record_death(run, ledger, job, reason, may_go_on=is_guarded)
    except Exception as error:  # noqa: BLE001  the guardian counts what the ledger cannot
        last_resort.print_error(error)
        return exit_codes.RESTART_SUPERVISOR
    return exit_codes.RESTART_SUPERVISOR if end.next else exit_codes.FAILED


def _drop_outer_run_env(import_path: Sequence[str], *, is_for_slurm: bool) -> None:
    """Take away what a rank of another run was given, from whose script this run was submitted; say where workers import from."""
    if not is_for_slurm:
        restore_cpu_affinity(os.environ)
    users = users_environ(os.environ)
    for name in os.environ.keys() - users.keys():
        del os.environ[name]
    os.environ.update(users)
    if import_path:
        os.environ[IMPORT_PATH_NAME] = os.pathsep.join(import_path)


def _prepare_context(run: RunDir, job: SlurmJob | None, *, is_for_slurm: bool) -> JobContext:
    """Read what the run asks for; set the variables for every process that is started here, without those of an outer job."""
    context = read_context(run, job)
    spec, workload = context.spec, context.workload
    sys.stderr.writelines(f"{note}\n" for note in removed_key_notes(run.config))
    if libraries := nccl_debug_variables(spec.debug.nccl, run.nccl_logs):
        make_directories(run.nccl_logs)
        sys.stderr.write(f"NCCL logs into {run.nccl_logs}, because `debug.nccl` is {spec.debug.nccl}\n")
        os.environ.update(with_undo_record(libraries, os.environ))  # a variable that the run sets itself wins
    _set_variables(spec.environ)
    for name in outer_job_variables(os.environ, sent_options(spec)) if is_for_slurm else ():
        del os.environ[name]
    if workload.hash_seed is not None and "PYTHONHASHSEED" not in os.environ:
        os.environ.update(with_undo_record({"PYTHONHASHSEED": str(workload.hash_seed)}, os.environ))
    rule = why_check_nan(spec.debug.nan, Ledger.read(run).newest, ends_at_nan=workload.ends_at_nan)
    if rule:
        sys.stderr.write(f"workers check gradients for NaN, because {rule}\n")
    os.environ.update(nan_check_variables(rule))
    return replace(context, is_for_slurm=is_for_slurm, environ=dict(os.environ), is_supervised=True)


def why_check_nan(asked: Literal["auto", "always", "never"], newest: Attempt | None, *, ends_at_nan: bool) -> str:
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
        if not is_env_shown(name):
            sys.stderr.write(f"{name} is set by the key `env.{name}`; its value is not shown\n")
            continue
        was = "" if before in (None, value) else f" (it was {before!r})"
        sys.stderr.write(f"{name}={value!r} is set by the key `env.{name}`{was}\n")
    os.environ.update(variables)


def _lock_run(run: RunDir, job: SlurmJob | None) -> list[int]:
    """Lock the run; return the file descriptors that child processes have to inherit.

    An earlier start of the same job may still hold the lock, on a node that Slurm cannot reach. Then this start goes on
    without the lock: its first attempt fences the older one (`ownership`).
    """
    # The run is locked until the last process that inherits the descriptor has exited, whichever is killed first.
    lock_fd = processes.take_lock(run.lock, patience_s=ownership.LOCK_PATIENCE_S)
    newest = Ledger.read(run).newest
    if newest is not None and job is not None and stale_attempts.is_used_by_other_job(newest, job):
        raise ConfigError(ownership.busy_message(run, f"job {newest.job_id}"))
    if lock_fd is not None:
        return [lock_fd]
    if newest is None or job is None or newest.job_id != job.job_id:
        raise ConfigError(ownership.busy_message(run))
    sys.stderr.write(
        f"note: attempt {newest.attempt} is still running on {newest.host}; this start of the job replaces it, and the old one can write no more checkpoints\n"
    )
    return []


def _cause_if_user_ended(run: RunDir, job: SlurmJob | None, queued: QueuedJob | None, *, is_back: bool) -> Cause | None:
    """Return whether the user cancelled or stopped the run while its job was in the queue again.

    Slurm may requeue a job that is cancelled at the same moment. A request from before the user's newest submission is not
    for this job.
    """
    if job is None or queued is None or queued.job_id != job.job_id:
        return None
    if queued.cancelled_at is not None:
        return Cause.CANCELLED
    return Cause.STOP_ASKED if is_back and read_stop_request(run) == "end" else None


def _requeue_for_other_nodes(context: JobContext, error: ConfigError) -> int:
    """Requeue the job to get other nodes: this node lacks something that earlier attempts had, such as a mount."""
    attempt = attempt_start.begin_attempt(context.run, context.workload, context.job)
    reason = f"{socket.gethostname()}: {error}"
    node = context.nodes[:1]  # the supervisor's node
    outcome = Outcome(code=exit_codes.FAILED, reason=reason, avoided_nodes=node)
    conclusion = last_resort.conclude_in_any_case(context, attempt, outcome)
    last_resort.carry_out_in_any_case(context, conclusion)
    return conclusion.end.exit_code


if __name__ == "__main__":
    sys.exit(main())
