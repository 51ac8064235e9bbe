"""A sweep on Slurm: job arrays of one script, of as many points as Slurm accepts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from ddp_hpc.base.durable import replace_text
from ddp_hpc.base.errors import ConfigError, SlurmBusyError, SlurmRefusalError, SlurmUnavailableError
from ddp_hpc.base.patience import ask_once, is_there
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.directives import directives
from ddp_hpc.cluster.slurm.hostlist import ranges_text
from ddp_hpc.cluster.slurm.queries import ClusterConfig
from ddp_hpc.launch.render import packaged_template_path, render_template
from ddp_hpc.launch.submission import slurm
from ddp_hpc.launch.submission.allocate import submit_job_array
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.launch.sweep.point_configs import specs_to_check
from ddp_hpc.launch.sweep.points import Point
from ddp_hpc.launch.sweep.sweep_dir import (
    SentArray,
    Sweep,
    SweepDir,
    append_record,
    load_base,
    make_sweep,
    points_in_queue,
    read_sweep,
    refuse_existing,
)
from ddp_hpc.run.run_dir.records import QueuedJob
from ddp_hpc.run.spec import RunSpec

TEMPLATE_NAME = "sweep.sbatch.j2"
DEFAULT_MAX_ARRAY_SIZE = 1001
"""slurm.conf(5), for a controller that does not say."""


def array_script(base: RunSpec, sweep_dir: SweepDir) -> str:
    """Return the script of the sweep's arrays."""
    if base.slurm.template is not None:
        raise ConfigError(
            "`slurm.template` is set, but ddp-hpc starts a sweep's tasks by a template of its own. Unset it."
        )
    # Slurm opens the log before any of our code runs, when the run's own directory may not exist.
    log = f"{str(sweep_dir.logs).replace('%', '%%')}/%A_%a.log"
    # A dependency is an option of each sbatch: Slurm may have forgotten its jobs when later arrays are sent.
    asked = directives(base, sweep_dir, chdir=Path.cwd(), cpus_per_worker=base.cpus_per_task)
    made = {flag: value for flag, value in asked.items() if flag != "dependency"}
    more = {"python": sys.executable, "base": sweep_dir.base, "sweep": sweep_dir.path}
    return render_template(packaged_template_path(TEMPLATE_NAME), base, {**made, "output": log}, more)


def describe(base: SubmitRequest, points: Sequence[Point]) -> tuple[str, list[str]]:
    """Return the script of the sweep's arrays, and what the user should know; make nothing."""
    script = array_script(base.spec, SweepDir(base.spec.path))
    return script, slurm.check_dry_run(base, script, specs_to_check(base.resolved, points, base.environ))


def make_for_slurm(
    base: SubmitRequest, sweep: Sweep, questions: capacity.SlurmQuestions, *, until_sent: ExitStack
) -> list[str]:
    """Make the sweep's directory with all that its tasks need; return notes. Nothing is left where it fails.

    From the moment when the directory exists, no other process sends its points before `until_sent` is closed.
    """
    spec, sweep_dir, environ = base.spec, sweep.dir, base.environ
    client.require("sbatch", environ)
    refuse_existing(sweep_dir)
    script = array_script(spec, sweep_dir)
    capacity.refuse_node_local_path(sweep_dir.path)
    notes = slurm.check_submission(base, specs_to_check(base.resolved, sweep.points, environ))

    def fill(beside: SweepDir) -> None:
        """Write the rest into the directory before it has its name: a process that is killed leaves no sweep without it."""
        replace_text(beside.job_script, script)
        questions.ask_about_script(beside.job_script)
        notes.extend(slurm.freeze_code(base, beside))
        notes.extend(questions.wait_for_notes(spec, beside))

    cluster = questions.config().name
    sweep = replace(sweep, import_paths=tuple(slurm.job_import_paths(base)), slurm_cluster=cluster)
    make_sweep(sweep, base.resolved, fill, until_sent=until_sent)
    return notes


def send_points(
    sweep: Sweep, numbers: Sequence[int], cluster: ClusterConfig, environ: Mapping[str, str]
) -> tuple[dict[str, int], str]:
    """Send points to Slurm, in as few arrays as it accepts; record each array. The caller has locked the sweep's ledger.

    Returns how many points each array has, and what Slurm printed where it did not accept all of them.
    With `sweep.at_most`, each array starts when those before it have ended, so that all together keep the limit.
    """
    jobs: dict[str, int] = {}
    size = cluster.max_array_size or DEFAULT_MAX_ARRAY_SIZE
    users, last = _find_dependencies(sweep, environ)
    # The numbers of an array's tasks end below MaxArraySize: https://slurm.schedmd.com/slurm.conf.html#OPT_MaxArraySize
    for chunk, group in groupby(sorted(numbers), key=lambda number: number // size):
        rest = list(group)
        count = len(rest)
        while rest:
            # A small array would hold back those after it below the limit of points at once.
            fewest = sweep.at_most if sweep.at_most and last else 1
            count = min(max(count, fewest), len(rest))
            sent = SentArray(numbers=tuple(rest[:count]), offset=chunk * size)
            try:
                job_id = _send_array(sweep, sent, _dependency_option(users, last), environ)
            except (SlurmRefusalError, SlurmBusyError) as error:
                count = _reduced_array_size(count, fewest, error)
                if count < fewest:
                    return jobs, str(error)
                continue
            jobs[job_id], rest = count, rest[count:]
            last = [job_id] if sweep.at_most else []  # it waits for all others, so the next one waits for it alone
    return jobs, ""


def _reduced_array_size(count: int, fewest: int, error: SlurmRefusalError | SlurmBusyError) -> int:
    """Return how many points to send where Slurm has not accepted `count` for a limit; fewer than `fewest`: none now."""
    if isinstance(error, SlurmBusyError):  # each try takes as long as sbatch may
        return max(count // 8, fewest) if count > fewest else 0
    if client.LIMIT_PATTERN.search(error.printed) is None:
        raise error
    return count // 2


def _find_dependencies(sweep: Sweep, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the user's dependency, and the arrays that share a limit of points at once with the next one, which waits for them."""
    # A point that has begun shows that the user's dependency was met.
    runs = (sweep.dir.run(sweep.points[number]).config for array in sweep.arrays for number in array.numbers)
    has_begun = any(ask_once(config, lambda: is_there(config), unknown=False) for config in runs)  # noqa: B023  called at once
    users = "" if has_begun else load_base(sweep.dir).spec.slurm.dependency or ""
    if sweep.at_most is None or not sweep.arrays:
        return users, []
    queued = client.queue(environ)
    return users, [array.job_id for array in sweep.arrays if points_in_queue(array, queued)]


def _dependency_option(users: str, last: Sequence[str]) -> list[str]:
    """Return the option of sbatch by which an array waits for the user's jobs, and for the arrays before it."""
    # `afterany` of an array waits for all of its tasks: https://slurm.schedmd.com/job_array.html#dependencies
    parts = [part for part in (users, f"afterany:{':'.join(last)}" if last else "") if part]
    if last and "?" in users:
        raise ConfigError(
            f"`slurm.dependency` is {users!r}, which asks for one of several jobs, and with `--at-most` an array has to wait for the "
            "array before it, too; Slurm cannot combine the two. Leave out one of them."
        )
    return [f"--dependency={','.join(parts)}"] if parts else []


def refuse_other_cluster(sweep: Sweep, environ: Mapping[str, str]) -> None:
    """Refuse to do anything to a sweep whose arrays another cluster's Slurm has."""
    jobs = ", ".join(one.job_id for one in sweep.arrays) or "?"
    slurm.knows(sweep.dir, QueuedJob(job_id=jobs, attempt=0, at=0.0, slurm_cluster=sweep.slurm_cluster), environ)


def settle_sent_arrays(sweep_dir: SweepDir, environ: Mapping[str, str]) -> Sweep:
    """Return the sweep once it is known of each array that was sent whether Slurm has it. The caller has locked the ledger."""
    sweep = read_sweep(sweep_dir)
    refuse_other_cluster(sweep, environ)
    if sweep.unanswered is None:
        return sweep
    job_id = _lost_array_id(sweep, environ)
    append_record(sweep_dir, **({"refused": True} if job_id is None else {"array": job_id}))
    return read_sweep(sweep_dir)


def _lost_array_id(sweep: Sweep, environ: Mapping[str, str]) -> str | None:
    """Return the newest array in the queue that has this sweep's script and that its ledger does not have; None where there is none."""
    try:
        # By the script's directory, as another sweep or run may have the same name.
        known = {array.job_id for array in sweep.arrays}
        return client.newest_job_of_script(sweep.dir.path, "/job.sbatch", environ, after=known)
    except SlurmUnavailableError as error:
        raise SlurmUnavailableError(
            f"An earlier sbatch for points of {sweep.dir.name} got no answer, so ddp-hpc must ask Slurm whether their jobs exist before it submits "
            f"any. Nothing was submitted now. {error}"
        ) from error


def throttle_waiting(sweep: Sweep, environ: Mapping[str, str]) -> None:
    """Give the arrays that still have tasks in the queue the sweep's limit of points at once."""
    queued = client.queue(environ)
    waiting = {entry.job_id.partition("_")[0] for entry in queued if "[" in entry.job_id}
    for one in sweep.arrays:
        if one.job_id in waiting:
            client.update(one.job_id, environ, ArrayTaskThrottle=str(sweep.at_most or 0))


def cancel_waiting(sweep: Sweep, environ: Mapping[str, str]) -> None:
    """Cancel the tasks that wait, of those arrays that Slurm still has."""
    queued = client.queue(environ)
    for one in sweep.arrays:
        if points_in_queue(one, queued):
            client.cancel_pending(one.job_id, environ)


def _send_array(sweep: Sweep, sent: SentArray, options: Sequence[str], environ: Mapping[str, str]) -> str:
    """Send one array. A line is written first, so that the next command asks Slurm for an array whose answer is lost."""
    tasks = ranges_text(number - sent.offset for number in sent.numbers)
    throttle = "" if sweep.at_most is None else f"%{sweep.at_most}"
    sweep_dir, name, count = sweep.dir, sweep.dir.name, len(sent.numbers)
    append_record(sweep_dir, sending=ranges_text(sent.numbers), offset=sent.offset)
    try:
        job_id = submit_job_array(
            sweep_dir.job_script, environ, tasks=f"{tasks}{throttle}", options=options, arguments=[str(sent.offset)]
        )
    except ConfigError:
        with suppress(OSError):  # a full disk; what Slurm has said is worth more
            append_record(sweep_dir, refused=True)
        raise
    except SlurmBusyError:
        # sbatch was ended while it waited or while it asked again, so Slurm may have accepted the array.
        found = _lost_array_id(read_sweep(sweep_dir), environ)
        if found is None:
            append_record(sweep_dir, refused=True)
            raise
        job_id = found
    except SlurmUnavailableError as error:
        raise SlurmUnavailableError(
            f"The answer of sbatch was lost, so Slurm may have accepted {count} points of {name}. Look for jobs of this name: `squeue --me "
            f"--name={name}`. `ddp-hpc sweep continue {sweep_dir.word}` asks Slurm for them before it submits any again. {error}"
        ) from error
    append_record(sweep_dir, array=job_id)
    return job_id
