"""Say whether this site is ready for a run: Slurm's settings, the directories, and with `--nodes` the nodes themselves.

Each line is ok, warn, fail or unknown: what does not answer is never taken for ok. The exit code is 1 where a check fails. With
`--nodes`, a short job checks them (inside of a job: on its own nodes): the network between them, names, clocks, disks, software,
and whether all see the directory of the runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.exit_codes import FAILED, FINISHED
from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import add_flag, add_patience_option, add_setting_arguments, runs_dir_setting

if TYPE_CHECKING:
    from ddp_hpc.run.run_dir.preflight import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="check for a run of this configuration, with its data")
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="PATH",
        help="with `--nodes`: check that this path exists on each node; may be repeated",
    )
    parser.add_argument(
        "--nodes", metavar="N|LIST", help="also check this number of nodes, or these (`node[1-4]`), by a short job"
    )
    add_patience_option(parser, 600.0, "how many seconds that job may wait and run")
    add_flag(parser, "--json", "print JSON instead of text")
    add_setting_arguments(parser, "set a key, such as `slurm.partition=gpu`")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.run.config.resolve import resolve
    from ddp_hpc.watch.diagnose.doctor import login, on_nodes

    settings = ["name=doctor", *args.settings, *runs_dir_setting(args.runs_dir)]
    if args.config is None:
        is_number = args.nodes is not None and args.nodes.isdecimal()
        settings = [*([f"resources.nodes={args.nodes}"] if is_number else []), *settings]
    # Without a configuration, a job of any command stands for the run: of a training, the batch would have to fit the nodes.
    command = ("true",) if args.config is None else ()
    resolved = resolve(args.config, settings, environment, site=args.site, command=command)
    site = login.LoginSite(resolved, environment)
    findings = login.findings_of(site)
    if not args.json:
        print(as_text(findings), flush=True)
    found, problem = None, None
    why_not = login.why_no_job(site, findings) if args.nodes is not None else ""
    if args.nodes is not None and not why_not:
        try:
            found = on_nodes.check_nodes(
                resolved.spec,
                args.nodes,
                environment,
                is_in_job=site.job_standing[0] == "runs",
                paths=args.path,
                patience_s=args.patience,
            )
        except DdpHpcError as error:
            problem = error  # what was found before is shown all the same
    exclude = f"--exclude={','.join(found.bad_nodes)}" if found and found.bad_nodes else ""
    if args.json:
        record = {
            "host": os.uname().nodename,
            "site": [asdict(one) for one in findings],
            "checked": None
            if found is None
            else {"nodes": found.nodes, "seconds": found.seconds, "findings": [asdict(one) for one in found.findings]},
            "exclude": exclude,
            "not_checked": str(problem or why_not),
        }
        print(as_json(record))
    elif found is not None:
        print(f"\n{len(found.nodes)} nodes, checked in {found.seconds:.0f} s: {', '.join(found.nodes)}")
        print(as_text(found.findings))
        if exclude:
            print(f"\nTo leave the bad nodes out: sbatch {exclude}, or `slurm.exclude={exclude.partition('=')[2]}`")
    elif why_not:
        print(f"\nddp-hpc did not check the nodes, because {why_not}.")
    if problem is not None:
        raise problem
    all_findings = [*findings, *(found.findings if found else ())]
    return FAILED if why_not or any(one.level == "fail" for one in all_findings) else FINISHED


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line for each finding, and one for what to do."""
    width = max((len(one.check) for one in findings), default=0)
    lines = []
    for one in findings:
        lines.append(f"{one.level:<8} {one.check:<{width}}  {one.found}")
        if one.to_do:
            lines.append(f"{'':<8} {'':<{width}}  -> {one.to_do}")
    return "\n".join(lines)
