"""Start a run. If a run of that name exists, resume it from its newest checkpoint.

After `--` stands the command of your own script, which each worker runs: `ddp-hpc submit -- python train.py --lr 0.1`.

KEY=VALUE or --KEY=VALUE sets any key of the configuration, such as `train.lr=0.1`; `ddp-hpc config` lists the keys.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from ddp_hpc.base.discretion import is_key_shown, value_or_hidden
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.base.patience import ask_once, await_answer
from ddp_hpc.cli import INTERRUPTED_CODE
from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import add_config_arguments, add_flag, chosen_runs_dir, runs_dir_setting, slurm_asker, typed_name
from ddp_hpc.cli.sweeps import add_sweep_options, requested_points, start_sweep, sweep_dry_run_text
from ddp_hpc.run.run_dir.paths import RunDir

if TYPE_CHECKING:
    from ddp_hpc.launch.submission.backend import Backend, Submission
    from ddp_hpc.launch.submission.request import SubmitRequest
    from ddp_hpc.run.spec import RunSpec

_SETTING_START = re.compile(r"[A-Za-z_][\w.-]*=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ddp_hpc.launch.submission.backend import (  # late: `render` and the first word of a line need none
        AUTO,
        BACKENDS,
    )

    parser.add_argument(
        "--cluster",
        choices=(AUTO, *sorted(BACKENDS)),
        default=AUTO,
        help="where to run: this machine (local) or Slurm; auto (the default): Slurm if this host has its commands",
    )
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--wait", action="store_true", help="wait until the run ends, and exit with its exit code")
    until.add_argument("--follow", action="store_true", help="like --wait, and show the run's progress")
    until.add_argument("--dry-run", action="store_true", help="print what would be started; start and write nothing")
    add_flag(
        parser,
        "--explain",
        "with --dry-run: also print the commands that the job runs and the workers' environment variables",
    )
    add_flag(
        parser,
        "--fresh",
        "start over from step 0; the existing run of that name is renamed to NAME.old-1, and what a script has saved elsewhere stays",
    )
    parser.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="RUN[:ok|notok|any]",
        help="on Slurm: start when another run, or all points of a sweep, has finished (ok, the default), failed (notok) or ended (any); may be repeated",
    )
    add_sweep_options(parser)
    add_flag(parser, "--json", "print JSON instead of text")
    add_config_arguments(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Resolve the configuration, start the run and print the result; with `--wait` or `--follow`, stay until it ends."""
    from ddp_hpc.launch.submission.backend import choose_backend

    if args.explain and not args.dry_run:
        raise ConfigError("`--explain` works only with `--dry-run`. Add `--dry-run`, or leave out `--explain`.")
    path, settings = config_and_settings(args, environment)
    here = runs_dir_setting(args.runs_dir)
    backend = choose_backend(args.cluster, environment)
    points = requested_points(args)
    request = _make_request(args, path, [*settings, *here], backend, environment)
    if args.dry_run:
        text = (
            _dry_run_text(request, backend, is_explained=args.explain, is_json=args.json)
            if points is None
            else sweep_dry_run_text(request, points, backend, is_json=args.json)
        )
        print(text, end="")
        return 0
    if points is not None:
        stays: Literal["wait", "follow"] | None = "follow" if args.follow else "wait" if args.wait else None
        return start_sweep(request, points, backend, args, stays=stays)
    run_dir = request.run
    changed = _config_changes(run_dir, request.spec)
    changed += _notes_on_earlier_saves(request.spec, None if args.fresh or not run_dir.config.exists() else run_dir)
    _note_stopping(run_dir, backend)
    from ddp_hpc.launch.submission.removal import rename_aside  # late: a dry run writes nothing

    with rename_aside(run_dir, environment) if args.fresh else nullcontext() as aside:
        submission = _submit(request, backend)
    if aside is not None:
        changed.append(f"the earlier run {run_dir.name} was renamed to {aside}")
    out = sys.stderr if args.json else sys.stdout
    news = [*changed, *submission.notes] if submission.state in {"started", "queued"} else []
    word = typed_name(submission.run, environment)
    print("\n".join([_outcome_text(submission, word), *news]), file=out, flush=True)
    try:
        _watch_run(args, submission, environment, out)
    except KeyboardInterrupt:
        print(
            f"\n{submission.run.name} continues without this command. Follow it: ddp-hpc logs -f {word}; stop it: ddp-hpc stop {word}",
            file=sys.stderr,
        )
        return INTERRUPTED_CODE
    file, command = [] if path is None else [str(path)], ["--", *args.command] if args.command else []
    there = [] if args.cluster == "auto" else ["--cluster", args.cluster]
    again = shlex.join(["ddp-hpc", "submit", *file, *map(_mask_setting, settings), *here, *there, *command])
    return _print_status(submission.run, environment, word=word, again=None if args.json else again)


def _make_request(
    args: argparse.Namespace, path: Path | None, words: Sequence[str], backend: Backend, environment: Mapping[str, str]
) -> SubmitRequest:
    """Return what the command line asks for: from here on, nothing reads its arguments to know what is to be started."""
    from ddp_hpc.launch.submission.request import request_of_config

    request = request_of_config(
        path,
        words,
        environment,
        site=args.site,
        is_for_slurm=backend.HAS_QUEUE,
        command=args.command or (),
        is_fresh=args.fresh,
    )
    if not args.after:
        return request
    from ddp_hpc.launch.sweep.chain import add_dependency  # late: most runs wait for none

    return add_dependency(request, args.after, backend)


def _notes_on_earlier_saves(spec: RunSpec, known: RunDir | None) -> list[str]:
    """Return a line where a new run's script finds files that another run has saved, or the script of a run that is known not its own."""
    # Late: recipes need none.
    from ddp_hpc.run.workload.script_progress import MOST_FILES, absolute_glob, find_saved_files, read_seen_files

    if (pattern := spec.script.progress) is None:
        return []
    files, here = [*find_saved_files(pattern, Path.cwd())], absolute_glob(pattern, Path.cwd())
    if known and (seen := read_seen_files(known)).num_changes and seen.pattern != here:
        return [f"the script saved to {seen.pattern}, and this time to {here}: it starts over, unless it looks there"]
    if len(files) >= MOST_FILES:
        raise ConfigError(
            f"`script.progress` is {pattern!r}, which names {MOST_FILES:,} files or more, so ddp-hpc would see no save among them. "
            "Name the files that the script saves its state to, and no data."
        )
    if known or not files:
        return []
    return [f"{shorten_names(files, 3)}: there already; if the script looks for that, it goes on from it"]


def _note_stopping(run_dir: RunDir, backend: Backend) -> None:
    from ddp_hpc.launch.submission.backend import backend_of  # late: as below
    from ddp_hpc.watch.status import read_status  # late: a dry run looks at no run

    is_asked = ask_once(run_dir.stop_request, run_dir.stop_request.exists, unknown=False)
    if is_asked and read_status(run_dir, now=time.time()).state == "stopping":
        is_queued = backend.HAS_QUEUE or backend_of(run_dir).HAS_QUEUE
        follows = (
            "submit it again when it has stopped"
            if is_queued
            else "this command waits until it has stopped, then submits it again"
        )
        print(f"{run_dir.name} is stopping, because a user asked it to; {follows}", file=sys.stderr)


def _print_status(run_dir: RunDir, environment: Mapping[str, str], *, word: str, again: str | None) -> int:
    """Print the status, as JSON if there is no command that submits the run `again`; return the exit code that it means."""
    from ddp_hpc.cli.summary import exit_code, print_summary  # late: a dry run looks at no run
    from ddp_hpc.watch.status import read_status

    status = await_answer(
        str(run_dir.path), lambda: read_status(run_dir, now=time.time(), ask=slurm_asker(environment))
    )
    if again is None:
        print(as_json(asdict(status)))
    else:
        print_summary(run_dir, status, word=word, again=again)
    return exit_code(status)


def _submit(request: SubmitRequest, backend: Backend) -> Submission:
    from ddp_hpc.base.leftovers import remove_leftovers  # late: a dry run writes nothing

    run_dir = request.run
    remove_leftovers(run_dir.path.parent)
    try:
        return backend.submit(request)
    except KeyboardInterrupt:
        word = typed_name(run_dir, request.environ)
        print(f"\n{run_dir.name} may have been started. Check it: ddp-hpc status {word}", file=sys.stderr)
        raise


def _watch_run(args: argparse.Namespace, submission: Submission, environment: Mapping[str, str], out: TextIO) -> None:
    """With `--wait`, wait for the run's end; with `--follow`, show its progress."""
    from ddp_hpc.launch.submission.backend import load_backend

    if submission.state == "finished":
        return
    backend = load_backend(submission.backend)  # another than was asked for, where the run was there already
    if args.follow:
        from ddp_hpc.cli.follow_run import show_run  # late: a dry run looks at no run

        show_run(submission.run, submission.attempt, out, ask=slurm_asker(environment))
    if args.wait:
        backend.wait(submission.run, submission.attempt, environment)


def _mask_setting(setting: str) -> str:
    """Return a setting as it may stand on a terminal."""
    key, _, value = setting.partition("=")
    if is_key_shown(key, value):
        return setting
    return f'{key}="${name}"' if (name := key.partition("env.")[2]) else f"{key}=..."


def config_and_settings(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Path | None, list[str]]:
    """Return the configuration's path, which a script can do without, and the settings; of a run that is named: its own."""
    words = [*([] if args.config is None else [args.config]), *args.settings]
    if args.command is not None and not args.command:
        raise ConfigError(
            "`--` stands at the end, but no command follows it. Name one: `ddp-hpc submit -- python train.py`."
        )
    if args.command and all(_SETTING_START.match(word) for word in words):
        return None, words
    if not words:
        raise ConfigError(
            "Neither a configuration file nor a script is named. Name one: `ddp-hpc submit CONFIG`, or "
            "`ddp-hpc submit -- python train.py`."
        )
    path, settings = split_config_words(words)
    kept = [RunDir(place / path).config for place in (Path(), chosen_runs_dir(args.runs_dir, environment))]
    # Not `Path.is_file`, which raises what reading the file is going to tell: a name that is too long, a closed directory.
    return next((one for one in (path, *kept) if os.path.isfile(one)), path), settings  # noqa: PTH113


def split_config_words(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the configuration's path and the settings, in whichever order they came."""
    paths = [word for word in words if not _SETTING_START.match(word)]
    if not paths:
        raise ConfigError(
            f"{words[0]!r} is a setting, but the configuration file is missing. Name it: `ddp-hpc submit CONFIG KEY=VALUE ...`."
        )
    return Path(paths[0]), [word for word in words if word != paths[0]]


def _dry_run_text(request: SubmitRequest, backend: Backend, *, is_explained: bool, is_json: bool) -> str:
    """Return what would be run: on Slurm the very text that sbatch would get, and nothing besides."""
    from ddp_hpc.run.config.resolve import flat_spec, render_resolved

    resolved, description = request.resolved, backend.describe(request)
    print("".join(f"{note}\n" for note in description.notes), end="", file=sys.stderr)
    argv, script = description.command, description.script
    plan = None
    if is_explained:
        from ddp_hpc.cli.plan import make_launch_plan  # late: only `--explain` needs what starts workers

        plan = make_launch_plan(request, backend.NAME, description.import_paths)
    if is_json:
        values = {
            key: {"value": value_or_hidden(key, value), "source": resolved.sources[key]}
            for key, value in flat_spec(resolved.spec).items()
        }
        how = {"command": argv} if script is None else {"script": script}
        return as_json({"config": values, **how, **({"plan": asdict(plan)} if plan else {})}) + "\n"
    told = f"{render_resolved(resolved, for_eyes=True)}# would run: {shlex.join(argv)}\n" if script is None else script
    return f"{told}\n{plan.as_text()}" if plan else told


def _config_changes(run_dir: RunDir, spec: RunSpec) -> list[str]:
    """Return a line for each key that differs from what the run's directory holds, or that was removed since."""
    from ddp_hpc.run.config.resolve import changed_keys, load_resolved, removed_key_notes

    if not run_dir.config.exists():
        return []
    try:
        old, dropped = load_resolved(run_dir.config), removed_key_notes(run_dir.config)
    except ConfigError as error:
        return [
            f"note: the run's earlier configuration cannot be read, so this command cannot list what has changed; the new one replaces it. {error}"
        ]
    return [*dropped, *(f"changed: {change}" for change in changed_keys(old, spec).values())]


def _outcome_text(submission: Submission, word: str) -> str:
    name = submission.run.name
    if submission.state == "finished":
        return f"{name} has finished already, so nothing was started. Start it over with `--fresh`, or a new run with `name=...`."
    job = "" if submission.job_id is None else f", job {submission.job_id}"
    if submission.state == "running":
        return f"{name} is running already (attempt {submission.attempt}{job}), so nothing was started or changed. To change its settings, stop it first: `ddp-hpc stop {word}`."
    if submission.state == "waiting":
        return f"{name} waits in Slurm's queue already{job}, so nothing was started or changed. To change its settings, cancel it first: `ddp-hpc cancel {word}`."
    if submission.state == "queued":
        return f"{name}: job {submission.job_id} submitted{'' if submission.is_new else ', to resume the run'}"
    return f"{name}: {'started' if submission.is_new else f'resumed, attempt {submission.attempt}'}"
