"""A pipeline from its steps' configurations to their ends, on Slurm and on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.config import Overlay, Resolved, render_resolved
from ddp_hpc.errors import ConfigError, DdpHpcError, WorkerError
from ddp_hpc.pipeline.resolving import ResolvedStep
from ddp_hpc.pipeline.steps import After
from ddp_hpc.run_dir.records import Awaited, read_awaited, write_awaited
from ddp_hpc.submission.backend import Backend, Description, Submission
from ddp_hpc.submission.chain import after_job, joined
from ddp_hpc.submission.run_dir_setup import is_finished

_KILL = "kill_on_invalid_dep"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the steps go."""

    backend: Backend
    import_paths: Sequence[Path]
    """Where the user's code is imported from."""
    environ: Mapping[str, str]
    """The caller's."""

    def submit(self, resolved: Resolved) -> Submission:
        """Start the run of a step."""
        text, paths = render_resolved(resolved), self.import_paths
        return self.backend.submit(text, resolved.spec, import_paths=paths, environ=self.environ)

    def describe(self, resolved: Resolved) -> Description:
        """Return what `submit` would do."""
        return self.backend.describe(resolved.spec, import_paths=self.import_paths, environ=self.environ)


@dataclass(frozen=True, kw_only=True)
class Started:
    """What became of a step."""

    step: ResolvedStep
    submission: Submission | None = None
    """None where the step is not started."""
    why_not: str = ""
    """Why it is not, or how it ended where its records do not say."""

    @property
    def has_finished(self) -> bool:
        """Whether its run has done all that it was asked for."""
        return self.submission is not None and is_finished(self.step.run, self.step.resolved.spec)


def check_steps(steps: Sequence[ResolvedStep], target: Target) -> None:
    """Check what can be checked before anything is made.

    Raises:
        ConfigError: for the first step that cannot be submitted; it names the step.
    """
    for step in steps:
        try:
            if target.backend.HAS_QUEUE:
                joined(step.resolved.spec.slurm.dependency, [f"the step {one.step!r}" for one in step.step.after])
            target.describe(step.resolved)
        except ConfigError as error:
            raise type(error)(f"The step {step.name!r} cannot be submitted: {error}") from error


def ask_about_steps(steps: Sequence[ResolvedStep], target: Target) -> None:
    """Ask the scheduler about each step that is to be submitted, before the first one is.

    Raises:
        ConfigError: for the first step that it would refuse; it names the step.
        SlurmUnavailableError: where Slurm does not answer; nothing is submitted then.
    """
    for step in steps:
        spec, environ = step.resolved.spec, target.environ
        if is_finished(step.run, spec) or target.backend.find_job(step.run, environ) is not None:
            continue  # it is left as it is, also where the cluster has changed since
        try:
            target.backend.refuse(spec, import_paths=target.import_paths, environ=environ)
        except ConfigError as error:
            raise type(error)(f"The step {step.name!r} cannot be submitted, so none was: {error}") from error


def submit_steps(steps: Sequence[ResolvedStep], target: Target) -> Iterator[Started]:
    """Put each step into the queue, behind those that it waits for; yield each as soon as it is there.

    A step that has finished, or whose job is there already, is left as it is.

    Raises:
        ConfigError: where a step is refused; those before it stay submitted.
        SlurmUnavailableError: where Slurm does not answer; those before it stay submitted.
    """
    started: dict[str, Started] = {}
    for step in steps:
        why_not = next(filter(None, (_is_in_vain(one, started[one.step]) for one in step.step.after)), "")
        if why_not:
            started[step.name] = Started(step=step, why_not=why_not)
        else:
            awaited = [one for after in step.step.after for one in _awaited(after, started[after.step])]
            _cancel_outdated(step, awaited, target)
            submission = target.submit(waiting_for(step.resolved, awaited, target.environ))
            if submission.state == "queued" and submission.job_id is not None:
                with suppress(OSError):  # the job is in the queue; only `status` would miss what it waits for
                    write_awaited(submission.run, submission.job_id, awaited)
            started[step.name] = Started(step=step, submission=submission)
        yield started[step.name]


def waiting_for(resolved: Resolved, awaited: Sequence[Awaited], environ: Mapping[str, str]) -> Resolved:
    """Return a configuration whose job waits for other jobs, and is cancelled once it could never start.

    Raises:
        ConfigError: where the user's own `slurm.dependency` cannot be combined with that.
    """
    if not awaited:
        return resolved
    slurm = resolved.spec.slurm
    settings = {"slurm.dependency": joined(slurm.dependency, [after_job(one.job_id, one.when) for one in awaited])}
    if not any(key.replace("-", "_") == _KILL for key in slurm.extra):
        # Else it would stay in the queue for ever: https://slurm.schedmd.com/sbatch.html#OPT_kill-on-invalid-dep
        settings[f"slurm.extra.{_KILL}"] = "yes"
    return Overlay(resolved, environ).resolved(settings, "pipeline")


def run_steps(
    steps: Sequence[ResolvedStep],
    *,
    begin: Callable[[ResolvedStep], Submission | None],
    stay: Callable[[Submission], None],
) -> Iterator[Started]:
    """Follow one step after another, each to its end; yield each when it has ended.

    `begin` starts a step, or finds what is in the queue already; `stay` waits for the end of a run.

    Raises:
        ConfigError: where `begin` refuses a step.
    """
    ended: dict[str, Started] = {}
    for step in steps:
        why_not = next(filter(None, (why_not_after(one, ended[one.step]) for one in step.step.after)), "")
        submission = None
        if not why_not:
            try:
                submission = begin(step)
                if submission is not None:
                    stay(submission)
            except WorkerError as error:  # the steps after it may be for that
                why_not = str(error)
        ended[step.name] = Started(step=step, submission=submission, why_not=why_not)
        yield ended[step.name]


def why_not_after(after: After, before: Started) -> str:
    """Return why a step does not start, given an earlier one that has ended; empty where it does."""
    if before.submission is None:
        return f"{before.step.run.name} did not start" if after.when == "ok" else ""
    if after.when == "any" or before.has_finished == (after.when == "ok"):
        return ""
    return f"{before.step.run.name} {'has finished' if before.has_finished else 'did not finish'}"


def _is_in_vain(after: After, before: Started) -> str:
    """Return why a step need not be submitted, given an earlier one that may wait or run; empty where it is."""
    is_over = before.submission is None or before.submission.state == "finished"
    return why_not_after(after, before) if is_over else ""


def _awaited(after: After, before: Started) -> Iterator[Awaited]:
    """Yield the job that a step has to wait for, where the earlier step has not ended."""
    submission = before.submission
    if submission is None or submission.state == "finished":
        return
    if submission.job_id is None:
        raise ConfigError(
            f"{submission.run.name} runs by {submission.backend}, outside of Slurm's queue, so no job can wait for it. Wait until it has "
            "ended, and submit again."
        )
    yield Awaited(path=str(submission.run.path), job_id=submission.job_id, when=after.when)


def _cancel_outdated(step: ResolvedStep, awaited: Sequence[Awaited], target: Target) -> None:
    """Cancel the job that a step has from an earlier submission, if it waits for a job that another one has followed."""
    there = target.backend.find_job(step.run, target.environ)
    if there is None or there.state != "waiting" or there.job_id is None:
        return
    jobs = {one.path: one.job_id for one in awaited}
    known = read_awaited(step.run, there.job_id)
    if any(jobs.get(one.path, one.job_id) != one.job_id for one in known):
        try:
            target.backend.cancel(step.run, target.environ)
        except DdpHpcError:  # also where it was cancelled, and a full disk does not take that down
            if target.backend.find_job(step.run, target.environ) is not None:
                raise
