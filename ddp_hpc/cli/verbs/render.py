"""Make a run's directory and a job script for `sbatch`, and submit nothing.

With `--target pbs`: a job script for `qsub` (PBS Professional). With `--target trainjob`: a TrainJob for Kubeflow Trainer v2, as
YAML, and no directory.

KEY=VALUE or --KEY=VALUE sets any key of the configuration, such as `train.lr=0.1`; `ddp-hpc config` lists the keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.cli.runs import add_runs_dir, add_site, runs_dir_setting
from ddp_hpc.cli.verbs.submit import sorted_words
from ddp_hpc.errors import ConfigError

if TYPE_CHECKING:
    from ddp_hpc.config import Resolved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "%(prog)s [CONFIG] [KEY=VALUE ...] [options] [-- COMMAND ...]"
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="the configuration file (YAML); not needed for a script"
    )
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="set a key; it overrides the file's value")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the job script to this file")
    parser.add_argument(
        "--target", choices=("slurm", "pbs", "trainjob"), default="slurm", help="what to write (default: slurm)"
    )
    parser.add_argument(
        "--claim", metavar="NAME", help="with `trainjob`: the PersistentVolumeClaim that is mounted at `runs_dir`"
    )
    add_site(parser)
    add_runs_dir(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Make both; say where they are."""
    from ddp_hpc.config import resolve

    if args.claim is not None and args.target != "trainjob":
        raise ConfigError(
            f"`--claim` names a volume of Kubernetes, but the target is {args.target}. Leave it out, or add `--target trainjob`."
        )
    path, settings = sorted_words(args)
    here, write = (
        runs_dir_setting(args.runs_dir),
        {"slurm": _for_slurm, "pbs": _for_pbs, "trainjob": _train_job}[args.target],
    )
    is_for_slurm = write is _for_slurm
    command = args.command or ()
    resolved = resolve(
        path, [*settings, *here], environment, site=args.site, is_for_slurm=is_for_slurm, command=command
    )
    return write(args, resolved, path, environment)


def _for_slurm(args: argparse.Namespace, resolved: Resolved, path: Path | None, environment: Mapping[str, str]) -> int:
    from ddp_hpc.base.durable import output_at
    from ddp_hpc.config import render_resolved
    from ddp_hpc.submission.backend import load_backend

    import_paths = [Path.cwd(), *([] if path is None else [path.absolute().parent])]
    with nullcontext() if args.output is None else output_at(args.output) as output:
        run_dir, notes = load_backend("slurm").prepare(  # whose script plain sbatch takes
            render_resolved(resolved), resolved.spec, import_paths=import_paths, environ=environment
        )
        if output is not None:
            output.write_text(run_dir.job_script.read_text(encoding="utf-8"), encoding="utf-8")
    script = args.output or run_dir.job_script
    print("\n".join([*notes, f"run     {run_dir.path}", f"script  {script}", f"start   sbatch {script}"]))
    return 0


def _for_pbs(args: argparse.Namespace, resolved: Resolved, path: Path | None, environment: Mapping[str, str]) -> int:
    from ddp_hpc.submission.elsewhere import prepare_pbs

    del environment
    if args.output is not None:
        raise ConfigError(
            "`--output` works only with `--target slurm` and `--target trainjob`: the script for PBS starts itself on each node by its path in the run's directory, so it must stay there. Leave `--output` out."
        )
    run_dir = prepare_pbs(resolved, None if path is None else path.absolute().parent)
    script = run_dir.pbs_script
    note = (
        "note: this script was tried with a stand-in for PBS only, never on a cluster of PBS; read it before you use it"
    )
    print(
        "\n".join([note, f"run     {run_dir.path}", f"script  {script}", f"start   qsub -q QUEUE -A ACCOUNT {script}"])
    )
    return 0


def _train_job(args: argparse.Namespace, resolved: Resolved, path: Path | None, environment: Mapping[str, str]) -> int:
    from ddp_hpc.base.durable import output_at
    from ddp_hpc.submission.elsewhere import train_job

    del path, environment
    text = train_job(resolved, claim=args.claim)
    if args.output is None:
        print(text, end="")
        return 0
    with output_at(args.output) as output:
        output.write_text(text, encoding="utf-8")
    print(f"script  {args.output}\nstart   kubectl create -f {args.output}")
    return 0
