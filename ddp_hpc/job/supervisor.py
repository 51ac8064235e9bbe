"""The supervisor of one attempt: takes the run, starts the workers, waits, and writes down how it ended.

    python -m ddp_hpc.job.supervisor RUN_DIR [--cluster slurm]

On Slurm it is the last line of the job script, and starts one step on all nodes; else, one agent on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc import exit_codes, processes
from ddp_hpc.config import load_resolved
from ddp_hpc.durable import replace_text
from ddp_hpc.errors import ConfigError, DdpHpcError, WorkerError
from ddp_hpc.job.children import see_through
from ddp_hpc.job.launcher import LAUNCHERS, Start, agent_argv
from ddp_hpc.job.meeting_place import meetings
from ddp_hpc.records import (
    Attempt,
    Cluster,
    Ending,
    JobFacts,
    QueuedJob,
    first_failure,
    read_attempts,
    read_queued_job,
    record_end,
    record_start,
    take_verdict,
    write_queued_job,
)
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client, states
from ddp_hpc.slurm.allocation import Allocation, read_allocation, shape_problem
from ddp_hpc.spec import RunSpec

LOCK_PATIENCE_S = 10.0
"""How long the processes of a killed attempt may take to vanish."""

ENDINGS: Mapping[int, Ending] = {
    exit_codes.FINISHED: "finished",
    exit_codes.STOPPED: "stopped",
    exit_codes.REFUSED: "refused",
}
"""How an attempt ended, by the workers' exit code; every other code is a failure."""


_LAST_WORDS = frozenset({exit_codes.STOPPED, exit_codes.PORT_TAKEN})
"""Rank zero's words that stand though srun reports a failure: what others did after them does not matter."""


@dataclass(frozen=True)
class Outcome:
    """How the workers ended."""

    code: int
    reason: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one attempt; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.supervisor", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--cluster", choices=("local", "slurm"), default="local")
    arguments = parser.parse_args(argv)
    run = RunDir(arguments.run)
    processes.block_awaited_signals()
    lock_fd = processes.take_lock(run.lock, patience_s=LOCK_PATIENCE_S)
    if lock_fd is None:
        sys.stderr.write(f"error: {run.path} is being worked on by another process.\n")
        return exit_codes.REFUSED
    return _supervise(run, arguments.cluster, lock_fd)


def _supervise(run: RunDir, cluster: Cluster, lock_fd: int) -> int:
    attempts = read_attempts(run)
    attempt = len(attempts)
    allocation = read_allocation(os.environ) if cluster == "slurm" else None
    if allocation is not None and attempts and _is_anothers(attempts[-1], allocation):
        sys.stderr.write(f"error: {run.path} is being worked on by job {attempts[-1].job_id}.\n")
        return exit_codes.REFUSED
    run.stop_request.unlink(missing_ok=True)
    job_id = allocation.job_id if allocation else str(os.getpid())
    record_start(run, attempt=attempt, job_id=job_id, job=_facts(allocation) if allocation else None)
    if allocation is not None:
        _note_job(run, job_id, attempt)
    outcome = _work(run, attempt, cluster, allocation, lock_fd)
    ending = ENDINGS.get(outcome.code, "failed")
    record_end(run, attempt=attempt, ending=ending, exit_code=outcome.code, reason=outcome.reason)
    return outcome.code if ending != "failed" else exit_codes.FAILED


def _is_anothers(newest: Attempt, allocation: Allocation) -> bool:
    """Tell whether another job works on the run: file systems that lock each node by itself do not say."""
    if newest.ending is not None or newest.cluster != "slurm" or newest.job_id == allocation.job_id:
        return False
    try:
        job = client.job(newest.job_id, os.environ)
    except DdpHpcError:
        return False
    return job is not None and states.word(job.state) in {"running", "suspended", "ending"}


def _facts(allocation: Allocation) -> JobFacts:
    """Return what the ledger keeps of a job; older versions of Slurm tell its end only when asked."""
    try:
        job = None if allocation.end_time else client.job(allocation.job_id, os.environ)
    except DdpHpcError:
        job = None
    return JobFacts(allocation.node_names, job.ends_at if job else allocation.end_time)


def _note_job(run: RunDir, job_id: str, attempt: int) -> None:
    """Note a job that plain sbatch has submitted, as `submit` notes its own."""
    noted = read_queued_job(run)
    if noted is None or noted.job_id != job_id:
        write_queued_job(run, QueuedJob(job_id=job_id, attempt=attempt, at=time.time()))


def _work(run: RunDir, attempt: int, cluster: Cluster, allocation: Allocation | None, lock_fd: int) -> Outcome:
    """Start the workers and see them through, whatever it takes."""
    try:
        spec = load_resolved(run.config)
        if cluster == "slurm":
            code = _run_on_slurm(spec, run, attempt, allocation, lock_fd)
        else:
            code = see_through(agent_argv(spec, run, attempt=attempt), lock_fd, on_stop=_pass_on)
    except DdpHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        return Outcome(error.exit_code, str(error))
    if code == exit_codes.FINISHED:
        done = {"epochs": spec.train.epochs, "max_steps": spec.train.max_steps, "at": time.time()}
        replace_text(run.done, json.dumps(done))
    return Outcome(code, _reason(run, attempt, code))


def _pass_on(pid: int, number: int) -> None:
    processes.send([pid], number)


def _run_on_slurm(spec: RunSpec, run: RunDir, attempt: int, allocation: Allocation | None, lock_fd: int) -> int:
    """Start the job's one step where the ranks can meet; go on to the next port where one is taken."""
    if allocation is None:
        raise ConfigError(
            "The job script was started outside of a Slurm job. Submit it with `sbatch`, run it under `salloc`, or "
            "start the run on this machine with `ddp-hpc submit --cluster local`."
        )
    problem = shape_problem(allocation, num_nodes=spec.resources.nodes, tasks_per_node=spec.resources.local_world_size)
    if problem is not None:
        raise ConfigError(problem)
    for meeting in meetings(allocation, attempt=attempt, environ=os.environ):
        start = Start(spec=spec, run=run, attempt=attempt, job_id=allocation.job_id, meeting=meeting)
        code = see_through(LAUNCHERS[spec.launcher](start), lock_fd, on_stop=lambda *_: run.stop_request.touch())
        verdict = _verdict(run, attempt, code)
        if verdict != exit_codes.PORT_TAKEN:
            return verdict
        sys.stderr.write(f"note: {meeting.endpoint} is taken; the ranks meet at another port\n")
    raise WorkerError("Every port that the ranks tried to meet at was taken.")


def _verdict(run: RunDir, attempt: int, code: int) -> int:
    """Return what a step's end means: rank zero's word, or else whose fault the first failure was."""
    word = take_verdict(run, attempt)
    if word is not None and (code == exit_codes.FINISHED or word in _LAST_WORDS):
        return word
    failure = first_failure(run, attempt)
    if failure is not None:
        return exit_codes.REFUSED if failure.is_input_error else exit_codes.FAILED
    return code or exit_codes.FAILED


def _reason(run: RunDir, attempt: int, code: int) -> str:
    if code in (exit_codes.FINISHED, exit_codes.STOPPED):
        return ""
    failure = first_failure(run, attempt)
    if failure is not None:
        is_plain = failure.is_input_error or failure.rank < 0
        return failure.exception if is_plain else f"rank {failure.rank}: {failure.exception}"
    return f"the workers were ended by signal {-code}" if code < 0 else f"the workers ended with code {code}"


if __name__ == "__main__":
    sys.exit(main())
