"""Make a run's directory and a job script for `sbatch`, and submit nothing.

KEY=VALUE or --KEY=VALUE sets any key of the configuration, such as `train.lr=0.1`; `ddp-hpc config` lists the keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from ddp_hpc.cli.runs import add_config_arguments, runs_dir_setting
from ddp_hpc.cli.verbs.submit import config_and_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the job script to this file")
    add_config_arguments(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.base.durable import atomic_output
    from ddp_hpc.launch.submission.backend import load_backend
    from ddp_hpc.launch.submission.request import request_of_config

    path, settings = config_and_settings(args, environment)
    settings += runs_dir_setting(args.runs_dir)
    command = args.command or ()
    request = request_of_config(path, settings, environment, site=args.site, is_for_slurm=True, command=command)
    with nullcontext() if args.output is None else atomic_output(args.output) as output:
        notes = load_backend("slurm").prepare(request)  # whose script plain sbatch takes
        if output is not None:
            output.write_bytes(request.run.job_script.read_bytes())
    script = args.output or request.run.job_script
    print("\n".join([*notes, f"run     {request.run.path}", f"script  {script}", f"start   sbatch {script}"]))
    return 0
