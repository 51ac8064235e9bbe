"""Prove that your own script comes back: run it undisturbed, then stop and kill it at chosen moments, and compare the ends.

Each run has its own copy of the working directory, so nothing in it changes. KEY=VALUE sets any key (`resources.workers_per_node=4`).
The exit code is 0 if the script came back from every fault without a defect, otherwise 1.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base import processes
from ddp_hpc.cli.formatting import as_json, table
from ddp_hpc.cli.runs import add_runs_dir, add_site, chosen_runs_dir
from ddp_hpc.errors import ConfigError
from ddp_hpc.exit_codes import FAILED, FINISHED

if TYPE_CHECKING:
    from ddp_hpc.certify.certificate import Certificate, Plan
    from ddp_hpc.certify.verdicts import Finding

LONGEST_SEED = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from ddp_hpc.certify.faults import FAULTS

    parser.usage = "%(prog)s [KEY=VALUE ...] [options] -- COMMAND ..."
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="set a key of the configuration")
    parser.add_argument(
        "--faults",
        metavar="NAME,NAME",
        default="all",
        help="; ".join(f"{name}: {one.description}" for name, one in FAULTS.items()) + "; all (the default)",
    )
    parser.add_argument(
        "--cluster",
        choices=("local",),
        default="local",
        help="where to run: this machine (local), which is all there is yet",
    )
    parser.add_argument(
        "--random-seed",
        type=int,
        metavar="N",
        help="chooses the random moments; printed, so that a run can be repeated",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a run that prints, writes and computes nothing for this long hangs (default: 60)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the directories of all runs, not only of those with a complaint"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_site(parser)
    add_runs_dir(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Certify the script, and print the verdicts."""
    from ddp_hpc.certify.certificate import certify

    plan = _plan(args, environment)
    out = sys.stderr if args.json else sys.stdout

    def say(text: str) -> None:
        print(f"... {text}", file=out, flush=True)

    def show(finding: Finding) -> None:
        print(f"    {finding.words}{f' ({finding.reason})' if finding.reason else ''}", file=out, flush=True)

    say(f"random seed {plan.seed}, runs in {plan.folder}")
    with processes.ended_by_signals():
        certificate = certify(plan, environment, say, show)
    print(as_json(asdict(certificate) | {"is_good": certificate.is_good}) if args.json else as_text(certificate))
    return FINISHED if certificate.is_good else FAILED


def _plan(args: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    from ddp_hpc.certify.certificate import Plan
    from ddp_hpc.certify.faults import FAULTS
    from ddp_hpc.config import resolve
    from ddp_hpc.spec.script import program_of

    if not args.command:
        raise ConfigError("No script is named. Name one: `ddp-hpc certify -- python train.py`.")
    faults = list(FAULTS) if args.faults == "all" else args.faults.split(",")
    unknown = [name for name in faults if name not in FAULTS]
    if unknown:
        raise ConfigError(f"`--faults` names {unknown[0]!r}, but the faults are {', '.join(FAULTS)}.")
    if args.patience <= 0:
        raise ConfigError(f"`--patience` is {args.patience:g}, but it must be more than 0 seconds.")
    site = (
        []
        if args.site is None
        else [f"--site={Path(args.site).absolute() if Path(args.site).is_file() else args.site}"]
    )
    runs_dir = chosen_runs_dir(args.runs_dir, environment).absolute()
    resolve(None, [*args.settings, f"runs_dir={runs_dir}"], environment, site=args.site, command=args.command)
    name = program_of(args.command).name
    return Plan(
        command=args.command,
        settings=[*args.settings, *site],
        faults=faults,
        work_dir=Path.cwd(),
        folder=runs_dir / f"certify-{name}-{time.strftime('%m%d-%H%M%S')}",
        left_out=(runs_dir, *runs_dir.glob("certify-*")),
        cluster=args.cluster,
        seed=secrets.randbelow(LONGEST_SEED) if args.random_seed is None else args.random_seed,
        patience_s=args.patience,
        is_kept=args.keep,
    )


def as_text(certificate: Certificate) -> str:
    """Return the verdicts as text: what the script does, a table, and each defect with the lines that mend it."""
    files = ", ".join(certificate.saves[:3]) + (", ..." if len(certificate.saves) > 3 else "")
    counted = (
        f"{certificate.num_positions} {certificate.unit}s in its output"
        if certificate.unit
        else "no step in its output"
    )
    does = f"undisturbed: {certificate.seconds:g} s, {counted}; saves {files or 'nothing'}"
    rows = [(one.fault, one.words, one.reason) for one in certificate.findings]
    lines = ["", shlex.join(certificate.command), does, *(f"note: {note}" for note in certificate.notes), ""]
    lines += [table(("FAULT", "VERDICT", "REASON"), rows)]
    for text, faults in _notes(certificate).items():
        lines.append(f"note: {', '.join(faults)}: {text}")
    for (name, mend), (finding, number) in _defects(certificate).items():
        defect = finding.defects[number]
        lines += [
            "",
            f"{name}{'' if defect.is_sure else ' (possibly)'}: {defect.what}",
            f"  seen under {finding.fault}: {defect.evidence}",
        ]
        lines += [f"  {line}" for line in ("mend it:", *(f"  {line}" for line in mend.splitlines()))]
    if certificate.is_good:
        end = "It comes back from every fault that was tried."
    elif all(one.is_good for one in certificate.findings):
        end = "No fault could be tried, so nothing is proved. Try other faults (`--faults`), or a longer training with more saves."
    else:
        end = f"It does not come back from every fault as it should. Its runs: {certificate.folder}"
    return "\n".join([*lines, "", end])


def _notes(certificate: Certificate) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in certificate.findings:
        for note in finding.notes:
            found.setdefault(note, []).append(finding.fault)
    return found


def _defects(certificate: Certificate) -> dict[tuple[str, str], tuple[Finding, int]]:
    """Return each defect once, with the first finding that shows it; the sure ones stand for the possible ones."""
    found: dict[tuple[str, str], tuple[Finding, int]] = {}
    for finding in certificate.findings:
        for number, defect in enumerate(finding.defects):
            before = found.get((defect.name, defect.mend))
            if before is None or (defect.is_sure and not before[0].defects[before[1]].is_sure):
                found[defect.name, defect.mend] = (finding, number)
    return found
