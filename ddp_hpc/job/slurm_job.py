"""The Slurm job that a supervisor runs in: what Slurm says of it, and the orders to Slurm that concern it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddp_hpc.base.errors import ConfigError, DdpHpcError, SlurmRefusalError, SlurmUnavailableError
from ddp_hpc.cluster.slurm import client, states
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.cluster.slurm.exclude_nodes import nodes_to_exclude
from ddp_hpc.cluster.slurm.queries import JobRecord, is_lost
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.spec.launch import LaunchSpec

T = TypeVar("T")
SLURM_PAUSE_S = 2.0
"""How long to wait before the next try to reach Slurm."""
END_QUERY_TIMEOUT_S = 10.0
"""How long to wait for the answer when the job ends: signals to the job wait meanwhile."""
REUSED_JOB_ID_AFTER_S = 24 * 3600.0
"""A job that ended so long before the run's first attempt is another one: job ids start again after MaxJobId
(slurm.conf(5))."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One start of a job, as the process in it sees it."""

    allocation: Allocation
    environ: Mapping[str, str]

    @property
    def job_id(self) -> str:
        """`ARRAY_TASK` for a task of an array: the plain number of one task is that of the whole array, too."""
        return self.allocation.scontrol_id

    def query_record(self, *, timeout_s: float = client.TIMEOUT_S) -> JobRecord | None:
        """Return what Slurm knows of the job now, if it answers."""
        try:
            return client.job(self.job_id, self.environ, timeout_s=timeout_s)
        except (ConfigError, SlurmUnavailableError):
            return None

    def is_requeued(self) -> bool:
        """Tell whether Slurm has put the job back into the queue since this start of it; raise as `client.job` does."""
        job = client.job(self.job_id, self.environ)
        return job is not None and (job.restarts or 0) > self.allocation.restart_count

    def ends_at(self) -> float | None:
        """Return when Slurm says that the job ends, without a limit one year ahead; its time limit may have changed since it began."""
        job = self.query_record(timeout_s=END_QUERY_TIMEOUT_S)
        return None if job is None else job.ends_at

    def is_preempted(self) -> bool:
        job = self.query_record()
        return job is not None and job.preempted_at is not None

    def ledger_fields(self) -> dict[str, Any]:
        """Return what the ledger records of it, by fields of `Attempt`; older versions of Slurm set no SLURM_JOB_END_TIME and have to be asked."""
        allocation = self.allocation
        return {
            "cluster": "slurm",
            "nodes": [*allocation.node_names],
            "ends_at": allocation.end_time or self.ends_at(),
            "restart": allocation.restart_count,
        }

    def await_answer(self) -> None:
        """Wait until Slurm answers, because srun needs it to start the next job step.

        The same outage of the network may have killed the workers and cut Slurm off. Without this wait, attempts would fail
        one after another until `restart.max_no_progress` ends the run.
        """
        with suppress(ConfigError):
            await_slurm(lambda: client.job(self.job_id, self.environ))

    def is_running(self, other_id: str) -> bool:
        """Tell whether another job occupies nodes, as far as Slurm answers."""
        try:
            job = client.job(other_id, self.environ)
        except DdpHpcError:
            return False
        return job is not None and states.parse_state(job.state) in {"running", "suspended", "ending"}

    def accounted_end(self, ledger: Ledger) -> str:
        """Return the final state, by accounting, of the start of a job that the newest attempt ran in; empty where it is not known."""
        attempt = ledger.newest
        if attempt is None:
            return ""
        first = min(one.started_at for one in ledger.attempts if one.job_id == attempt.job_id)
        starts = [
            start
            for start in client.accounting([attempt.job_id], self.environ)
            if start.ends_at is None
            or start.ends_at > first - REUSED_JOB_ID_AFTER_S  # an older job had the same number
        ]
        state = starts[attempt.restart].state if len(starts) > attempt.restart else ""
        return state if states.has_ended(state) or states.parse_state(state) == "requeued" else ""

    def lost_nodes(self, nodes: Sequence[str] | None = None) -> list[str]:
        """Return which of these nodes, or of the job's, are down by Slurm; none if Slurm does not answer."""
        found = client.node_states(self.environ, self.allocation.node_names if nodes is None else nodes)
        return [node for node, state in found.items() if is_lost(state)]

    def suspects_to_exclude(self, suspects: Sequence[str], spec: LaunchSpec, script: Path) -> tuple[str, ...]:
        """Return the suspects that a job of this spec should not get; log those that it may use, as too few others are left."""
        partition = self.allocation.partition
        excluded, note = nodes_to_exclude(suspects, spec, self.environ, script=script, partition=partition)
        if note:
            sys.stderr.write(f"note: {note}\n")
        return excluded

    def cancel_steps(self) -> None:
        """Cancel the job steps that a supervisor which died has left, as far as Slurm answers."""
        with suppress(DdpHpcError):
            steps = client.steps(self.job_id, self.environ)
            if steps:
                sys.stderr.write(
                    "note: job steps from before the restart of ddp-hpc's supervisor process are still running; ddp-hpc cancels them\n"
                )
            for step in steps:
                client.cancel(step, self.environ)

    def requeue(self) -> None:
        """Put the job back into the queue; raise as `client.requeue` does."""
        client.requeue(self.allocation.scontrol_id, self.environ)

    def submit_next(self, script: Path, excluded: str, spec: LaunchSpec) -> str:
        """Submit a job that starts after this one, in the same place, unless an sbatch whose answer was lost has; return its id."""
        own = self.allocation.array_job_id or self.job_id
        if sent := client.newest_job_of_script(script.parent, f"/{script.name}", self.environ, after=[own]):
            return sent
        options = [f"--dependency=afterany:{self.job_id}", *([f"--exclude={excluded}"] if excluded else [])]
        job = self.query_record()
        place = [] if job is None else _changed_sbatch_options(job, spec)
        try:
            return client.submit(script, self.environ, [*options, *place])
        except SlurmRefusalError:  # such as of a time limit that an administrator alone may give
            if not place:
                raise
            return client.submit(script, self.environ, options)

    def exclude_nodes(self, nodes: str) -> None:
        """Set the nodes that the next start of the job does not get; raise as `client.update` does."""
        client.update(self.allocation.scontrol_id, self.environ, ExcNodeList=nodes)


def await_slurm(
    ask: Callable[[], T],
    patience_s: float = math.inf,
    *,
    errors: tuple[type[Exception], ...] = (SlurmUnavailableError,),
    note: str = "the job waits until Slurm answers; you need do nothing",
) -> T:
    """Return what `ask` returns once Slurm answers, as a controller that restarts ends no job; raise where it does not in this time."""
    deadline, is_noted = time.monotonic() + patience_s, False
    while True:
        try:
            return ask()
        except errors as error:
            if time.monotonic() >= deadline:
                raise
            if not is_noted:
                sys.stderr.write(f"note: {note}: {error}\n")
            is_noted = True
            time.sleep(SLURM_PAUSE_S)  # a stop signal is blocked and stays pending; the next attempt receives it


def _changed_sbatch_options(job: JobRecord, spec: LaunchSpec) -> list[str]:
    """Return the options that the job was given on the command line of sbatch, or since then, in the place of its script's."""
    asked, now = spec.slurm, {"partition": job.partition, "account": job.account, "qos": job.qos}
    changed = [
        f"--{key}={value}" for key, value in now.items() if value not in ("", *(getattr(asked, key) or "").split(","))
    ]
    minutes = job.time_limit_min
    is_same_time = minutes is None or minutes == spec.resources.time_limit_min
    return changed if is_same_time else [*changed, f"--time={minutes:.0f}"]
