"""A pipeline on the command line: what `submit` does with a file that has steps."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import slurm_asker, word_for
from ddp_hpc.errors import ConfigError, DdpHpcError

if TYPE_CHECKING:
    from ddp_hpc.pipeline.resolving import ResolvedStep
    from ddp_hpc.pipeline.start import Started, Target
    from ddp_hpc.pipeline.steps import Pipeline
    from ddp_hpc.submission.backend import Submission


def submit_pipeline(
    args: argparse.Namespace, pipeline: Pipeline, target: Target, *, stay: Callable[[Submission], None]
) -> int:
    """Start the steps, or with `--dry-run` print what would be started; with `--wait` or `--follow`, stay until all have ended."""
    from ddp_hpc.pipeline.resolving import resolve_steps
    from ddp_hpc.pipeline.start import ask_about_steps, check_steps

    environment, has_queue = target.environ, target.backend.HAS_QUEUE

    _refuse_flags(args)
    steps = resolve_steps(pipeline, environment, site=args.site, is_for_slurm=has_queue)
    check_steps(steps, target)
    if args.dry_run:
        print(_dry_run(steps, target, is_json=args.json), end="")
        return 0
    if not has_queue:
        return _run_here(args, steps, target, stay)
    ask_about_steps(steps, target)
    started = _submit(args, steps, target)
    if not (args.wait or args.follow):
        if args.json:
            print(as_json([_as_record(one) for one in started]))
        else:
            words = [word_for(one.step.run, environment) for one in started if _is_there(one)]
            if words:
                print(
                    f"See them:     ddp-hpc list{'' if args.runs_dir is None else f' --runs-dir {shlex.quote(str(args.runs_dir))}'}"
                )
                print(f"Cancel them:  ddp-hpc cancel {shlex.join(reversed(words))}")
        return 0
    submissions = {one.step.name: one.submission for one in started}
    return _to_the_end(args, steps, lambda step: submissions[step.name], stay, environment)


def _refuse_flags(args: argparse.Namespace) -> None:
    unfit = {
        "--sweep": args.sweep,
        "--points": args.points,
        "--after": args.after,
        "--singleton": args.singleton,
        "--fresh": args.fresh,
        "--explain": args.explain,
        "-- COMMAND": args.command,
    }
    for flag, value in unfit.items():
        if value:
            raise ConfigError(
                f"`{flag}` is for one run, but the configuration has `steps`, each of which is a run of its own. Leave it out, or put what "
                "it says into the file."
            )


def _submit(args: argparse.Namespace, steps: Sequence[ResolvedStep], target: Target) -> list[Started]:
    from ddp_hpc.pipeline.start import submit_steps

    out = sys.stderr if args.json else sys.stdout
    started: list[Started] = []
    try:
        for one in submit_steps(steps, target):
            started.append(one)
            notes = one.submission.notes if one.submission is not None and one.submission.state == "queued" else ()
            print("\n".join([_said(one), *(f"  {note}" for note in notes)]), file=out, flush=True)
    except DdpHpcError as error:
        raise type(error)(_half_submitted(error, started, steps, target.environ)) from error
    except BaseException:  # the user interrupts it, or the disk is full
        parts = [_what_is_there(started, target.environ)]
        if len(started) < len(steps):
            run = steps[len(started)].run
            word = word_for(run, target.environ)
            parts.append(f"{run.name} may have been submitted, too: see `ddp-hpc status {word}`.")
        print("\n" + " ".join(filter(None, parts)), file=sys.stderr)
        raise
    return started


def _half_submitted(
    error: DdpHpcError, started: Sequence[Started], steps: Sequence[ResolvedStep], environment: Mapping[str, str]
) -> str:
    """Return the text of an error after which some of the steps are in the queue."""
    text = f"The step {steps[len(started)].name!r} was not submitted: {error}"
    return " ".join(filter(None, [text, _what_is_there(started, environment)]))


def _what_is_there(started: Sequence[Started], environment: Mapping[str, str]) -> str:
    queued = [one for one in started if one.submission is not None and one.submission.state == "queued"]
    if not queued:
        return ""
    jobs = ", ".join(
        f"{one.step.run.name} (job {one.submission.job_id})" for one in queued if one.submission is not None
    )
    words = shlex.join(word_for(one.step.run, environment) for one in reversed(queued))
    return (
        f"These were submitted, and stay in Slurm's queue: {jobs}. Submit the pipeline again to add the other steps, or cancel these: "
        f"`ddp-hpc cancel {words}`."
    )


def _is_there(one: Started) -> bool:
    return one.submission is not None and one.submission.state != "finished"


def _said(one: Started) -> str:
    """Return what became of a step."""
    name, submission = one.step.run.name, one.submission
    if submission is None:
        return f"{name}: not started, because {one.why_not}"
    if submission.state == "finished":
        return f"{name}: has finished already; to have it done again, delete it first: ddp-hpc delete {name}"
    job = "" if submission.job_id is None else f"job {submission.job_id} "
    if submission.state in {"running", "waiting"}:
        return f"{name}: {job}{'runs' if submission.state == 'running' else 'waits'} already, and was not changed"
    after = ", ".join(each.step if each.when == "ok" else f"{each.step}:{each.when}" for each in one.step.step.after)
    what = (
        "submitted"
        if submission.state == "queued"
        else "started"
        if submission.is_new
        else f"resumed, attempt {submission.attempt}"
    )
    return f"{name}: {job}{what}{f', after {after}' if after else ''}"


def _as_record(one: Started) -> dict[str, Any]:
    submission = one.submission
    return {
        "step": one.step.name,
        "run": one.step.run.name,
        "path": str(one.step.run.path),
        "after": [{"step": each.step, "when": each.when} for each in one.step.step.after],
        "state": "not started" if submission is None else submission.state,
        "reason": one.why_not,
        "job_id": None if submission is None else submission.job_id,
    }


def _run_here(
    args: argparse.Namespace, steps: Sequence[ResolvedStep], target: Target, stay: Callable[[Submission], None]
) -> int:
    """Run one step after another in the foreground."""
    from ddp_hpc.pipeline.start import Started

    if not (args.wait or args.follow):
        raise ConfigError(
            f"On this machine, which has no queue, the steps ({', '.join(step.name for step in steps)}) run one after another while this "
            "command waits. Add `--wait`, or `--follow` to see their progress."
        )

    def begin(step: ResolvedStep) -> Submission:
        try:
            submission = target.submit(step.resolved)
        except ConfigError as error:
            raise type(error)(f"The step {step.name!r} cannot be started: {error}") from error
        print(
            _said(Started(step=step, submission=submission)), file=sys.stderr if args.json else sys.stdout, flush=True
        )
        return submission

    return _to_the_end(args, steps, begin, stay, target.environ)


def _to_the_end(
    args: argparse.Namespace,
    steps: Sequence[ResolvedStep],
    begin: Callable[[ResolvedStep], Submission | None],
    stay: Callable[[Submission], None],
    environment: Mapping[str, str],
) -> int:
    """Follow the steps until all have ended; return the exit code of the first that has not finished, or 0."""
    from ddp_hpc.cli.summary import exit_code, headline
    from ddp_hpc.pipeline.start import run_steps
    from ddp_hpc.watch.status import read_status

    records, codes = [], [0]
    out = sys.stderr if args.json else sys.stdout
    for one in run_steps(steps, begin=begin, stay=stay):
        record = _as_record(one)
        if one.submission is None:
            print(f"{one.step.run.name}: not started, because {one.why_not}", file=out, flush=True)
        else:
            status = read_status(one.step.run, now=time.time(), ask=slurm_asker(environment))
            codes.append(exit_code(status))
            record |= {"state": status.state, "reason": status.reason or one.why_not, "status": asdict(status)}
            why = "" if status.state == "finished" else f": {status.reason or one.why_not}"
            print(f"{headline(status)}{why}", file=out, flush=True)
        records.append(record)
    if args.json:
        print(as_json(records))
    return next((code for code in codes if code), 0)


def _dry_run(steps: Sequence[ResolvedStep], target: Target, *, is_json: bool) -> str:
    """Return what would be started; in the place of a job's number, which is not known yet, stands the name of its run."""
    from ddp_hpc.base.discretion import is_key_shown
    from ddp_hpc.config import HIDDEN, flat, render_resolved
    from ddp_hpc.pipeline.start import waiting_for
    from ddp_hpc.run_dir.records import Awaited

    runs = {step.name: step.run for step in steps}
    texts, records = [], []
    for step in steps:
        awaited = [
            Awaited(path=str(runs[one.step].path), job_id=f"JOB-OF-{runs[one.step].name}", when=one.when)
            for one in (step.step.after if target.backend.HAS_QUEUE else ())
        ]
        resolved = waiting_for(step.resolved, awaited, target.environ)
        description = target.describe(resolved)
        print("".join(f"{note}\n" for note in description.notes), end="", file=sys.stderr)
        how = f"# would run: {shlex.join(description.command)}\n"
        texts.append(f"# step {step.name}\n{description.script or render_resolved(resolved, for_eyes=True) + how}")
        values = {
            key: {"value": value if is_key_shown(key, value) else HIDDEN, "source": resolved.sources[key]}
            for key, value in flat(resolved.spec).items()
        }
        started = {"command": description.command} if description.script is None else {"script": description.script}
        after = [{"step": one.step, "when": one.when} for one in step.step.after]
        records.append({"step": step.name, "run": step.run.name, "after": after, "config": values, **started})
    return as_json(records) + "\n" if is_json else "\n".join(texts)
