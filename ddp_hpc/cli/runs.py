"""Arguments that several verbs declare, and the runs that they name."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.run.run_dir.paths import DEFAULT_RUNS_DIR, RunDir, is_folder, is_sweep_dir, settings_dirs

if TYPE_CHECKING:
    from ddp_hpc.watch.queue import AskSlurm, QueueStatus

ENVIRONMENT_PREFIX = "DDP_HPC_"
"""Of every variable that settings, or a profile of them, come from."""


def add_run_argument(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declare RUN and `--runs-dir`."""
    told = "a run's name, its directory, its Slurm job id, or SWEEP/POINT" + (
        "; default: the newest run" if optional else ""
    )
    parser.add_argument("run", metavar="RUN", nargs="?" if optional else None, help=told)
    add_runs_dir_option(parser)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare CONFIG, KEY=VALUE, `--site` and `--runs-dir`, before the command of a script."""
    parser.usage = "%(prog)s [CONFIG] [KEY=VALUE ...] [options] [-- COMMAND ...]"
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="the configuration file (YAML), or a run; not needed for a script"
    )
    add_setting_arguments(parser, "set a key; it overrides the file's value")


def add_setting_arguments(parser: argparse.ArgumentParser, told: str) -> None:
    """Declare KEY=VALUE, `--site` and `--runs-dir`."""
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=told)
    add_site_option(parser)
    add_runs_dir_option(parser)


def add_runs_dir_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--runs-dir`."""
    parser.add_argument(
        "--runs-dir",
        type=lambda text: Path(os.path.expanduser(text)),  # noqa: PTH111  a shell leaves the `~` of `--runs-dir=~/runs`
        metavar="DIR",
        help="the directory of all runs; default: the key `runs_dir`",
    )


def add_site_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--site`."""
    parser.add_argument(
        "--site",
        metavar="SITE",
        help="the name or file of a site profile (a cluster's default settings); default: the profile for this host",
    )


def add_patience_option(parser: argparse.ArgumentParser, seconds: float, told: str) -> None:
    """Declare `--patience`."""
    told = f"{told} (default: {seconds:g})"
    parser.add_argument("--patience", type=float, default=seconds, metavar="SECONDS", help=told)


def add_flag(parser: argparse.ArgumentParser, name: str, told: str) -> None:
    """Declare an option without a value."""
    parser.add_argument(name, action="store_true", help=told)


def positive_int(text: str) -> int:
    """Return a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def nonnegative_float(text: str) -> float:
    """Return a finite number from 0 on."""
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text} must be a number from 0 on, such as 0.001")
    return number


def chosen_run(args: argparse.Namespace, environment: Mapping[str, str]) -> RunDir:
    """Return the run that RUN names, or the newest."""
    from ddp_hpc.watch.find import find_run, newest_run  # late: `submit` names its run itself

    runs_dir = chosen_runs_dir(args.runs_dir, environment)
    return find_run(args.run, runs_dir) if args.run else newest_run(runs_dir)


def chosen_own_run(args: argparse.Namespace, environment: Mapping[str, str], name: str | None = None) -> RunDir:
    """Return the run that `name`, or RUN, names, for a verb that runs its code or ends its processes; another user's is refused."""
    from ddp_hpc.run.run_dir.write_permissions import refuse_strangers_dir  # late: the verbs that look need none of it
    from ddp_hpc.watch.find import find_run

    run = find_run(name or args.run, chosen_runs_dir(args.runs_dir, environment))
    refuse_strangers_dir(run.path)
    return run


def runs_dir_setting(option: Path | None) -> list[str]:
    """Return `--runs-dir` as a setting; the shell has filled in its variables."""
    from ddp_hpc.run.config.fill_paths import escape_dollars  # late: the spec's classes take 30 ms to make

    return [] if option is None else [f"runs_dir={escape_dollars(option)}"]


def chosen_runs_dir(option: Path | None, environment: Mapping[str, str]) -> Path:
    """Return where runs are looked for: the option, or the key from the environment, the site profile or its default."""
    if option is not None:
        return option
    is_set = any(name.startswith(ENVIRONMENT_PREFIX) for name in environment)
    if not is_set and not any(map(is_folder, settings_dirs(environment))):
        return Path(DEFAULT_RUNS_DIR)
    from ddp_hpc.run.config.resolve import resolve_key  # late: the spec's classes take 30 ms to make

    return Path(resolve_key("runs_dir", environment))


def slurm_asker(environment: Mapping[str, str]) -> AskSlurm:
    """Return what asks Slurm about a job, where a run's directory does not say all."""

    def ask(job_id: str, submitted_at: float) -> QueueStatus:
        from ddp_hpc.watch.queue import asker  # late: about most runs, nothing is asked

        return asker(environment, clock=time.time)(job_id, submitted_at)

    return ask


def typed_name(run: RunDir, environment: Mapping[str, str]) -> str:
    """Return what to type for a run: its name or `SWEEP/POINT` where that is enough, else its directory."""
    try:
        name = os.path.relpath(run.path, chosen_runs_dir(None, environment))
        is_point = name == os.path.join(run.path.parent.name, run.name) and is_sweep_dir(run.path.parent)  # noqa: PTH118
        return name if name == run.name or is_point else run.word
    except FileNotFoundError:  # the working directory was deleted
        return run.word
