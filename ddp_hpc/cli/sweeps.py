"""A sweep on the command line: the flags of `submit`, and what became of the points."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import plural
from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import add_flag, positive_int, typed_name

if TYPE_CHECKING:
    from ddp_hpc.launch.submission.backend import Backend
    from ddp_hpc.launch.submission.request import SubmitRequest
    from ddp_hpc.launch.sweep.manage_sweep import SweepStart
    from ddp_hpc.launch.sweep.points import Point
    from ddp_hpc.launch.sweep.sweep_dir import SweepDir

_MOST_SHOWN = 20


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Declare what makes a submission a sweep."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="submit a run for each value (`train.lr=0.1,0.01`, `seed=0..4`); given several times, for each combination",
    )
    add_flag(
        parser,
        "--zip",
        "with several --sweep: combine their first values, their second values, and so on, instead of all combinations",
    )
    parser.add_argument(
        "--points", type=Path, metavar="FILE", help="submit a run for each item of this file, a YAML list of settings"
    )
    add_limit_options(parser)


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Declare how many points may run at once, or fail."""
    parser.add_argument("--at-most", type=positive_int, metavar="N", help="run at most N points of the sweep at once")
    parser.add_argument(
        "--stop-after-failures", type=positive_int, metavar="N", help="start no other point once N points have failed"
    )


def requested_points(args: argparse.Namespace) -> list[Point] | None:
    """Return the points of the sweep that the command line asks for; None where it asks for one run."""
    if not args.sweep and args.points is None:
        alone = {"--zip": args.zip, "--at-most": args.at_most, "--stop-after-failures": args.stop_after_failures}
        for flag in (flag for flag, value in alone.items() if value):
            raise ConfigError(f"`{flag}` is for sweeps. Add `--sweep KEY=VALUES`, or leave it out.")
        return None
    for flag in (flag for flag, value in {"--fresh": args.fresh, "--explain": args.explain}.items() if value):
        raise ConfigError(
            f"`{flag}` is for one run, but `--sweep` and `--points` submit several. Leave it out; `ddp-hpc list NAME` shows the points."
        )
    from ddp_hpc.launch.sweep.points import make_points, parse_axis, read_points  # late: most are of one run

    listed = [] if args.points is None else read_points(args.points)
    return make_points([parse_axis(word) for word in args.sweep], listed, is_zipped=args.zip)


def start_sweep(
    base: SubmitRequest,
    points: Sequence[Point],
    backend: Backend,
    args: argparse.Namespace,
    *,
    stays: Literal["wait", "follow"] | None,
) -> int:
    """Start the sweep, on this machine until its points have ended; return the exit code. `stays`: how this command goes on then."""
    from ddp_hpc.base.leftovers import remove_leftovers
    from ddp_hpc.launch.sweep.manage_sweep import submit_sweep
    from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, refuse_existing

    environment, sweep_dir, is_json = base.environ, SweepDir(base.spec.path), args.json
    limits = {"at_most": args.at_most, "stop_after_failures": args.stop_after_failures}
    sweep = Sweep(dir=sweep_dir, points=points, backend=backend.NAME, **limits)
    remove_leftovers(sweep_dir.path.parent)
    refuse_existing(sweep_dir)  # first: what is found there after Ctrl-C is of this submission
    try:
        started = submit_sweep(base, sweep, backend)
    except KeyboardInterrupt:
        print(f"\n{_interrupted_message(sweep_dir, environment)}", file=sys.stderr)
        raise
    code = print_jobs(started, environment, is_json=is_json, is_followed=stays is not None)
    if stays is None and not started.runs_here:
        return code
    from ddp_hpc.cli.sweep_follow import follow_sweep

    word, here = typed_name(sweep_dir, environment), started.numbers if started.runs_here else ()
    return follow_sweep(sweep_dir, environment, word=word, here=here, is_json=is_json, is_quiet=stays == "wait")


def _interrupted_message(sweep_dir: SweepDir, environment: Mapping[str, str]) -> str:
    """Return what a submission that the user has interrupted has left, and how to go on."""
    from ddp_hpc.launch.sweep.sweep_dir import read_sweep
    from ddp_hpc.run.run_dir.paths import is_sweep_dir

    name = sweep_dir.name
    if not is_sweep_dir(sweep_dir.path):
        return f"{name}: nothing was submitted"
    sweep, word = read_sweep(sweep_dir), typed_name(sweep_dir, environment)
    parts = [f"job {array.job_id} ({plural(len(array.numbers), 'point')}) submitted" for array in sweep.arrays]
    if sweep.unanswered is not None:
        parts.append(f"{plural(len(sweep.unanswered_numbers), 'point')} may have been submitted")
    if sweep.never_sent:
        parts.append(f"{plural(len(sweep.never_sent), 'point')} not submitted")
    return (
        f"{name}: {', '.join(parts)}. To find out and start the rest: ddp-hpc sweep continue {word}; to end it: "
        f"ddp-hpc sweep cancel {word}"
    )


def sweep_dry_run_text(base: SubmitRequest, points: Sequence[Point], backend: Backend, *, is_json: bool) -> str:
    """Return what would be started: on Slurm the text that sbatch would get, and the first points."""
    from ddp_hpc.launch.sweep.array import describe
    from ddp_hpc.launch.sweep.point_configs import check_points

    check_points(base.resolved, points, base.environ, is_array=backend.HAS_QUEUE)
    script, notes = describe(base, points) if backend.HAS_QUEUE else (None, [])
    print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
    if is_json:
        listed = [{"name": point.name, "set": point.shown_settings} for point in points]
        return as_json({"points": listed, **({} if script is None else {"script": script})}) + "\n"
    shown = "".join(f"# {point.name}\n" for point in points[:_MOST_SHOWN])
    more = f"# and {len(points) - _MOST_SHOWN} more\n" if len(points) > _MOST_SHOWN else ""
    after = (
        f", with `sbatch --dependency={base.spec.slurm.dependency}`" if script and base.spec.slurm.dependency else ""
    )
    return f"{script or ''}# would start {len(points)} points in {base.spec.path}{after}:\n{shown}{more}"


def print_jobs(started: SweepStart, environment: Mapping[str, str], *, is_json: bool, is_followed: bool = False) -> int:
    """Print what became of the points; return 0, also where Slurm's limit leaves some, and 1 where it has accepted none.

    `is_followed`: this command goes on, and JSON is left to its end.
    """
    code = exit_codes.FAILED if started.num_not_submitted and not started.jobs else exit_codes.FINISHED
    if is_json and not (is_followed or started.runs_here):
        record = {"sweep": started.sweep_dir.name, "path": str(started.sweep_dir.path), "points": len(started.numbers)}
        print(as_json({**record, "jobs": started.jobs, "not_submitted": started.num_not_submitted}))
        return code
    print(
        "\n".join(_started_lines(started, typed_name(started.sweep_dir, environment))),
        file=sys.stderr if is_json else sys.stdout,
        flush=True,
    )
    for note in started.notes:
        print(note, file=sys.stderr)
    return code


def _started_lines(started: SweepStart, word: str) -> list[str]:
    name = started.sweep_dir.name
    if not started.numbers:
        return [f"{name}: no point is left to start"]
    see = f"See them: ddp-hpc list {word}"
    if started.runs_here:
        return [
            f"{name}: {plural(len(started.numbers), 'point')} to run on this machine while this command lives. {see}"
        ]
    jobs = ", ".join(f"job {job} ({plural(number, 'point')})" for job, number in started.jobs.items()) or "no job"
    lines = [f"{name}: {jobs} submitted. {see}"]
    if started.num_not_submitted:
        lines.append(f"{plural(started.num_not_submitted, 'point')} not submitted: {started.refusal}")
        lines.append(f"Once other jobs have ended, submit them: ddp-hpc sweep continue {word}")
    return lines
