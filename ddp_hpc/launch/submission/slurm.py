"""The back end of Slurm: a job for each start of a run."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.base.errors import ConfigError, DdpHpcError, SlurmRefusalError, SlurmUnavailableError, WorkerError
from ddp_hpc.base.patience import await_answer
from ddp_hpc.cluster.slurm import client, states
from ddp_hpc.cluster.slurm.allocation import claimed_job_id
from ddp_hpc.cluster.slurm.exclude_nodes import nodes_to_exclude
from ddp_hpc.launch.render import render
from ddp_hpc.launch.submission import release_hold
from ddp_hpc.launch.submission.allocate import SENT_SCRIPT_PREFIX, submit_job_script
from ddp_hpc.launch.submission.backend import Submission, SubmissionPlan
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.run_dir_setup import (
    SubmissionLock,
    check_settings,
    find_existing_start,
    lock_submission,
    refuse_unusable_place,
)
from ddp_hpc.launch.submission.snapshot import (
    code_top,
    note_on_live_code,
    notes_on_copy,
    path_in_snapshot,
    take_snapshot,
    writable_import_dirs,
)
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.launch.submission.submit_checks.image import image_notes
from ddp_hpc.launch.submission.submit_checks.users_part import check_users_part
from ddp_hpc.run import requeue
from ddp_hpc.run.run_dir import ownership, poll_files
from ddp_hpc.run.run_dir.ledger import Attempt, End, Ending, Ledger, Next, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import (
    QueuedJob,
    ask_to_stop,
    read_queued_job,
    write_awaited,
    write_queued_job,
)
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.protocol import UsersCode
from ddp_hpc.run.workload.script_progress import find_saved_files, pattern_root
from ddp_hpc.run.workload.table import workload_of

NAME = "slurm"
HAS_QUEUE = True
_ASK_PAUSES_S = (2.0, 30.0)
"""How long to wait between questions to Slurm, at first and at most."""
_SUBMISSION_PATIENCE_S = 60.0
"""How long another process may take to submit the run."""
is_here = client.is_here
hasten = release_hold.hasten
_cluster_names: dict[str, str] = {}
"""PATH -> the ClusterName of the Slurm whose commands are there; asked for once, as a sweep may have a thousand points."""


def describe(request: SubmitRequest) -> SubmissionPlan:
    """Return what `submit` would do: the very text that sbatch would get. Make nothing."""
    refuse_unusable_place(request.run)
    script, notes = _job_script(request)
    return SubmissionPlan(
        script=script,
        notes=[*_note_on_own_job(request.environ), *check_dry_run(request, script), *notes],
        command=["sbatch", str(request.run.job_script)],
        import_paths=job_import_paths(request),
    )


def _job_script(request: SubmitRequest) -> tuple[str, list[str]]:
    """Return the job script, which leaves out nodes on which the run failed, and notes on these."""
    run, spec, paths = request.run, request.spec, job_import_paths(request)
    script = render(spec, run, paths, chdir=Path.cwd())
    bad = requeue.bad_nodes(Ledger.read(run).attempts, spec.restart, now=time.time())
    left_out, note = nodes_to_exclude(bad, spec, request.environ, script=script)
    notes = [note] if note else []
    if left_out:
        exclude = ",".join(filter(None, [spec.slurm.exclude, *left_out]))
        script = render(replace(spec, slurm=replace(spec.slurm, exclude=exclude)), run, paths, chdir=Path.cwd())
        within = f"in the last {spec.restart.forget_h} h (`restart.forget_h`)"
        notes.insert(0, f"the job excludes {', '.join(left_out)}, where the run failed {within}")
    return script, notes


def check_submission(request: SubmitRequest, points: Sequence[RunSpec] = ()) -> list[str]:
    """Check what can be checked before anything is made, of a run or of some `points` of a sweep; return notes."""
    spec, environ, path = request.spec, request.environ, request.run.path
    for place in job_import_paths(request):
        if os.pathsep in str(place):
            raise ConfigError(
                f"The job would import the code from {place}, but Python reads a `{os.pathsep}` in that path as its end. Rename that directory."
            )
    notes = [*check_settings(spec, path, environ), *capacity.notes_on_setup_files(spec)]
    notes += image_notes(spec, request.run, job_import_paths(request), environ, is_for_slurm=True)
    return [*notes, *check_users_part(points or [spec], _users_code(request), environ)]


def check_dry_run(request: SubmitRequest, script: str, points: Sequence[RunSpec] = ()) -> list[str]:
    """Check the same, and ask Slurm whether it would take the script, which is in no file yet; return notes."""
    if not client.is_here(request.environ):
        unasked = "note: this host has no Slurm, so ddp-hpc could not check whether the cluster accepts the job"
        return [*check_submission(request, points), unasked]
    capacity.refuse_node_local_path(request.run.path)
    with tempfile.TemporaryDirectory(prefix="ddp-hpc-") as folder:
        replace_text(Path(folder) / "job.sbatch", script)
        questions = capacity.SlurmQuestions(request.environ)
        questions.ask_about_script(Path(folder) / "job.sbatch")
        notes = check_submission(request, points)
        try:
            return [*notes, *questions.wait_for_notes(request.spec, request.run)]
        except SlurmUnavailableError as error:
            return [*notes, f"note: ddp-hpc could not ask Slurm whether it accepts the job: {error}"]


def _note_on_own_job(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield how to use the job that this shell is of, which `submit` does not."""
    if job_id := claimed_job_id(environ):
        yield (
            f"note: this shell is of job {job_id}, and the run gets a job of its own. To use the nodes of job {job_id} instead: `srun ddp-hpc "
            "join`, or `ddp-hpc render` and then `bash` with the script that it names."
        )


def prepare(request: SubmitRequest) -> list[str]:
    """Make the run directory with everything the job needs; return what the user should know."""
    with lock_submission(request.run, patience_s=_SUBMISSION_PATIENCE_S) as claim:
        notes = _fill_run_dir(request, claim)
        claim.is_to_stay = True
    return notes


def submit(request: SubmitRequest) -> Submission:
    """Put the run into Slurm's queue, or say that it is there, runs, or has finished."""
    run, spec, environ = request.run, request.spec, request.environ
    with lock_submission(run, patience_s=_SUBMISSION_PATIENCE_S) as claim:
        client.require("sbatch", environ)
        if not claim.is_new and (there := find_existing_start(request, NAME, find_job(run, environ))):
            return there
        questions = capacity.SlurmQuestions(environ)
        notes = [*_note_on_own_job(environ), *_fill_run_dir(request, claim)]
        questions.ask_about_script(run.job_script)
        notes += questions.wait_for_notes(spec, run)
        attempt, cluster = ownership.next_attempt(run), questions.config().name
        claim.is_to_stay = True  # first: whatever interrupts sbatch, Slurm may have the job
        try:
            job_id = submit_job_script(run, environ)
        except ConfigError as error:
            claim.is_to_stay = False
            raise questions.refusal(error.printed, spec) if isinstance(error, SlurmRefusalError) else error from error
        _record_job(run, job_id, attempt, cluster)
    if request.awaits:
        with contextlib.suppress(OSError):  # the job is in the queue; only `status` would miss what it waits for
            write_awaited(run, job_id, request.awaits)
    return Submission(run, NAME, "queued", attempt, is_new=claim.is_new, job_id=job_id, notes=tuple(notes))


def _fill_run_dir(request: SubmitRequest, claim: SubmissionLock) -> list[str]:
    """Check what can be checked; then make or renew the run directory, with the frozen code and the job script. Return notes."""
    script, notes = _job_script(request)
    capacity.refuse_node_local_path(request.run.path)
    notes = [*check_submission(request), *notes]
    claim.write(request.resolved)
    notes += freeze_code(request, request.run)
    replace_text(request.run.job_script, script)
    return notes


def find_job(run: RunDir, environ: Mapping[str, str]) -> Submission | None:
    """Return the run's job that waits or runs, if it has one."""
    job = _newest_job(run, environ)
    if job is None or job.cancelled_at is not None or not knows(run, job, environ) or not is_alive(job.job_id, environ):
        return None
    newest = Ledger.read(run).newest_number
    has_begun = newest >= job.attempt
    return Submission(
        run, NAME, "running" if has_begun else "waiting", newest if has_begun else job.attempt, job_id=job.job_id
    )


def _newest_job(run: RunDir, environ: Mapping[str, str]) -> QueuedJob | None:
    """Return the newest job that was submitted for the run, also where the answer of its sbatch was lost: then Slurm is asked."""
    job = read_queued_job(run)
    # Those that were answered are links by now.
    if all(path.is_symlink() for path in run.submitit.glob(f"{SENT_SCRIPT_PREFIX}*")) or not client.is_here(environ):
        return job
    lost = client.newest_job_of_script(
        run.submitit, f"/{SENT_SCRIPT_PREFIX}", environ, after=[job.job_id] if job else ()
    )
    if lost is not None:
        begun = (one.attempt for one in Ledger.read(run).attempts if one.job_id == lost)
        job = _record_job(run, lost, next(begun, ownership.next_attempt(run)), client.config(environ).name)
    return job


def _record_job(run: RunDir, job_id: str, attempt: int, cluster: str) -> QueuedJob:
    job = QueuedJob(job_id=job_id, attempt=attempt, at=time.time(), since=attempt, backend=NAME, slurm_cluster=cluster)
    write_queued_job(run, job)
    return job


def knows(run: RunDir, job: QueuedJob, environ: Mapping[str, str]) -> bool:
    """Return whether this host's Slurm is the one to ask about a job; False where another cluster had it, and the run has ended.

    Another cluster's Slurm does not know the job, which does not mean that the job is gone; and it may have another job of that
    number.
    """
    if not job.slurm_cluster:
        return True
    path = environ.get("PATH", "")
    if path not in _cluster_names:
        _cluster_names[path] = client.config(environ).name
    here = _cluster_names[path]
    if here in {"", job.slurm_cluster}:
        return True
    newest = Ledger.read(run).newest
    if newest is not None and newest.attempt >= job.attempt and newest.is_last:
        return False
    raise ConfigError(
        f"{run.name} was submitted as job {job.job_id} of the Slurm cluster {job.slurm_cluster}, but this host belongs to the cluster {here}, "
        f"so ddp-hpc cannot find out whether the job still waits or runs. Run the command on a login node of {job.slurm_cluster}."
    )


def is_alive(job_id: str, environ: Mapping[str, str]) -> bool:
    """Return whether Slurm still holds a job that waits or runs."""
    job = client.job(job_id, environ)
    return job is not None and not states.has_ended(job.state)


def why_in_use(run: RunDir, environ: Mapping[str, str]) -> str | None:
    """Return why the run's directory must not be moved: its job waits or runs, or that cannot be known; None where it may."""
    job, newest = _newest_job(run, environ), Ledger.read(run).newest
    if job is None:
        return None
    if client.is_here(environ):
        if knows(run, job, environ) and is_alive(job.job_id, environ):
            return f"Job {job.job_id} of {run.name} still waits or runs, so the run cannot be deleted or renamed. Cancel it first: `ddp-hpc cancel {run.word}`."
        return None
    if newest is not None and newest.attempt >= job.attempt and newest.ending is not None and not newest.next:
        return None
    return (
        f"{run.name} was submitted as Slurm job {job.job_id}, but this host has no Slurm, so ddp-hpc cannot find out whether the "
        "job still waits or runs. Run the command on a login node of its cluster."
    )


def job_import_paths(request: SubmitRequest) -> list[Path]:
    """Return where the job imports the user's code from: its frozen copy, or where it lies."""
    spec, code = request.spec, _users_code(request)
    if code is None:
        return []
    if not spec.snapshot.enabled:
        return [code.directory]
    top = code_top(code.directory)
    others = [path for path in writable_import_dirs({**request.environ, **spec.environ}) if path.is_relative_to(top)]
    return list(dict.fromkeys(path_in_snapshot(request.run, top, path) for path in [code.directory, *others]))


def _users_code(request: SubmitRequest) -> UsersCode | None:
    """Return the code that the job's Python finds, by PYTHONPATH only where the work tree of the first path holds it."""
    workload = workload_of(request.spec)
    code, first = workload.users_code(request.import_paths), next(iter(request.import_paths), None)
    if code is not None or first is None:
        return code
    code = workload.users_code(writable_import_dirs({**request.environ, **request.spec.environ}))
    if code is None or not code.directory.is_relative_to(code_top(first)):
        return None
    # Python looks in the first path before.
    return UsersCode(first, code.needed and Path(os.path.relpath(code.directory / code.needed, first)))


def freeze_code(request: SubmitRequest, run: RunDir) -> list[str]:
    """Copy the user's code into the directory of a run, or of a sweep; return notes on it."""
    spec, code = request.spec, _users_code(request)
    if not spec.snapshot.enabled:
        return []
    editable = writable_import_dirs({**request.environ, **spec.environ})
    if code is None:
        elsewhere = workload_of(spec).users_code(editable)
        return [] if elsewhere is None else [note_on_live_code([elsewhere.directory])]
    saved: list[Path] = []
    notes: list[str] = []
    if (pattern := spec.script.progress) is not None:
        saved = [Path(path).resolve() for path in find_saved_files(pattern, Path.cwd())]
        folder = pattern_root(pattern, Path.cwd()).resolve()
        if folder.is_relative_to(code_top(code.directory)):
            make_directories(folder)  # its link leads the files to where the pattern has them
            if folder.is_relative_to(run.path.parent.resolve()):  # of which a copy shows nothing: it would hold itself
                note = (
                    f"note: `script.progress` names files in {folder}, inside `runs_dir`. If the script makes that path from `__file__`, it saves into "
                    "the job's copy of the code, where ddp-hpc does not find them: have it save elsewhere, or set another `runs_dir`."
                )
                notes.append(note)
    snapshot = take_snapshot(
        code.directory, run, max_bytes=spec.snapshot.max_mb * 10**6, needed=code.needed, outputs=saved
    )
    outside = [path for path in editable if not path.is_relative_to(snapshot.source)]
    return [
        f"code: copied {snapshot.num_files} files of {snapshot.source}, {snapshot.num_bytes / 1e6:.1f} MB",
        *notes_on_copy(snapshot, run, outside),
        *notes,
    ]


def wait(run: RunDir, attempt: int, environ: Mapping[str, str]) -> Attempt:
    """Return the last attempt, of those from `attempt` on, once it has ended and no other follows.

    Raises:
        WorkerError: where the job will not start; or Slurm no longer has it, and it wrote nothing to the run's directory.
    """
    (pause, longest), files = _ASK_PAUSES_S, poll_files.ReadCache()
    asked_at, seen, saves, told = time.monotonic(), _queued_job(run), poll_files.SaveWatch(run, attempt, files), ""
    while True:
        newest = poll_files.newest_attempt(run, files)
        if newest is not None and newest.attempt >= attempt and newest.is_last:
            return newest
        queued = _queued_job(run)
        if queued != seen:
            (pause, _), seen = _ASK_PAUSES_S, queued
        if queued is not None and time.monotonic() - asked_at > pause:
            asked_at, pause = time.monotonic(), min(pause * 1.5, longest)
            held = _require_alive(run, attempt, queued, environ)
            if held not in {"", told}:
                sys.stderr.write(f"note: job {queued.job_id} of {run.name} waits: {held}\n")
            told = held
        saves.warn_of_failures()
        poll_files.await_next_poll(newest)


def _queued_job(run: RunDir) -> QueuedJob | None:
    return await_answer(str(run.submission), lambda: read_queued_job(run))


def _require_alive(run: RunDir, attempt: int, queued: QueuedJob, environ: Mapping[str, str]) -> str:
    """Return why the job waits for a person; empty where it does not.

    Raises:
        WorkerError: where it will not start; or it is gone, and wrote nothing.
    """
    try:
        job = client.job(queued.job_id, environ)
    except SlurmUnavailableError:
        return ""  # Slurm may answer again soon; the job continues meanwhile
    if job is not None:
        release_hold.require_startable(run, job.job_id, job.reason)
        if not states.has_ended(job.state):
            return states.explain_reason(job.reason) if states.is_held(job.reason) else ""
    newest = poll_files.newest_attempt(run, poll_files.ReadCache())
    has_ended = newest is not None and newest.attempt >= attempt and newest.is_last
    if has_ended or _queued_job(run) != queued:
        return ""
    if newest is not None and newest.job_id == queued.job_id and newest.ending is None:
        raise WorkerError(
            f"Job {queued.job_id} of {run.name} has ended, and ddp-hpc was killed before it could record how attempt {newest.attempt} "
            "ended, most likely with the job's shell. Submit the run again; it resumes from its newest checkpoint."
        )
    raise WorkerError(capacity.vanished_job_message(run, queued.job_id, job, queued.at))


def cancel(run: RunDir, environ: Mapping[str, str]) -> str:
    """Cancel the run's job, whether it waits or runs; return a message for the user.

    Slurm sends SIGTERM, and SIGKILL after the cluster's KillWait (30 s, usually): ranks that agree on a step in that time
    commit it, and the attempt counts as cancelled all the same.
    """
    job = _newest_job(run, environ)
    if job is None or not knows(run, job, environ) or not is_alive(job.job_id, environ):
        raise ConfigError(
            f"{run.name} has no job in the queue, so there is nothing to cancel. Start it with `ddp-hpc submit`."
        )
    unwritten: OSError | None = None
    try:
        write_queued_job(run, replace(job, cancelled_at=time.time()))  # first: a job that ends reads it
    except OSError as error:  # such as a full disk, which may be why the user cancels
        unwritten = error
    try:
        client.cancel(job.job_id, environ)
    except BaseException:
        with contextlib.suppress(OSError):
            write_queued_job(run, job)
        raise
    try:
        newest = Ledger.read(run).newest
        if newest is not None and newest.job_id == job.job_id and newest.ending is None:
            number, reason = newest.attempt, "cancelled by the user"
            record_end(run, number, End(ending=Ending.CANCELLED, exit_code=-9, reason=reason))
    except OSError as error:
        unwritten = error
    if unwritten is not None:
        raise DdpHpcError(
            f"Job {job.job_id} of {run.name} was cancelled, but ddp-hpc could not record that in {unwritten.filename or run.path}: "
            f"{unwritten.strerror}. `ddp-hpc status` may show another reason for its end. Make that path writable, then submit the run again."
        ) from unwritten
    from ddp_hpc.watch.status import effect_of_resubmitting  # late: only this command needs it

    return f"Job {job.job_id} of {run.name} was cancelled. Submit it again to go on: {effect_of_resubmitting(run)}."


def stop(run: RunDir, environ: Mapping[str, str], *, then: Literal["end", "requeue"] = "end") -> str:
    """Ask the run to commit a checkpoint and exit, for good or to be requeued; return a message for the user."""
    del environ
    job = read_queued_job(run)
    newest = Ledger.read(run).newest
    is_over = newest is None or (newest.ending is not None and newest.next != Next.IN_PLACE)
    waits = job is not None and (newest is None or newest.attempt < job.attempt or (is_over and bool(newest.next)))
    if job is None or waits or is_over:
        to_do = (
            f"Its job waits; to remove it from the queue: `ddp-hpc cancel {run.word}`."
            if waits
            else "Start it with `ddp-hpc submit`."
        )
        raise ConfigError(f"{run.name} is not running, so there is nothing to stop. {to_do}")
    ask_to_stop(run, then=then)
    from ddp_hpc.watch.status import stop_text  # late: as above

    return stop_text(run, then=then)
