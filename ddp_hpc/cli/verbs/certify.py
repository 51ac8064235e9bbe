"""Test that your own script resumes correctly: run it undisturbed, then stop and kill it at chosen moments, and compare the results.

Each run has its own copy of the working directory, so nothing in it changes. KEY=VALUE sets any key (`resources.workers_per_node=4`).
All of it takes place on this machine; on a cluster's login node, put srun before it. The exit code is 0 if the script came back from every
fault that was tried without a defect, and no run ended before its fault; 1 if not, and 2 if no fault could be tried.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base import processes
from ddp_hpc.base.durable import replace_text
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.exit_codes import FAILED, FINISHED, REFUSED
from ddp_hpc.base.names import shorten_names
from ddp_hpc.cli.formatting import as_json, table
from ddp_hpc.cli.runs import add_flag, add_patience_option, add_setting_arguments, chosen_runs_dir, runs_dir_setting

if TYPE_CHECKING:
    from ddp_hpc.prove.certify.certificate import Certificate, Certification

SEED_BOUND = 1 << 20
SRUN_EXAMPLE = "srun --nodes=1 --ntasks=1 --cpus-per-task=8 ddp-hpc certify ..."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ddp_hpc.prove.certify.faults import FAULTS

    parser.usage = "%(prog)s [KEY=VALUE ...] [options] -- COMMAND ..."
    parser.add_argument(
        "--faults",
        metavar="NAME,NAME",
        default="all",
        help="; ".join(f"{name}: {one.description}" for name, one in FAULTS.items()) + "; all (the default)",
    )
    parser.add_argument(
        "--random-seed",
        type=int,
        metavar="N",
        help="the seed of the random moments; certify prints it, so that you can repeat them",
    )
    add_patience_option(parser, 60.0, "a run hangs if it prints, writes and computes nothing for so long")
    parser.add_argument(
        "--may-change",
        action="append",
        default=[],
        type=lambda text: Path(os.path.abspath(os.path.expanduser(text))),  # noqa: PTH100, PTH111  links stay, and no error for `~nobody`
        metavar="PATH",
        help="a path outside of the working directory that the script or another program may change, such as a cache or a log; may be repeated",
    )
    add_flag(parser, "--keep", "keep the directories of all runs, not only of those that show a defect")
    add_flag(parser, "--json", "print JSON instead of text")
    add_setting_arguments(parser, "set a key of the configuration")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.cluster.slurm.allocation import is_in_job
    from ddp_hpc.cluster.slurm.own_job import without_ended_job
    from ddp_hpc.prove.certify.certificate import CERTIFICATE

    out = sys.stderr if args.json else sys.stdout

    def show(text: str) -> None:
        print(text, file=out, flush=True)

    with processes.signals_as_ctrl_c():
        environment, note = without_ended_job(environment)
        if note:
            show(note)
        asked = _make_certification(args, environment, lambda text: show(f"... {text}"))
        if shutil.which("srun", path=environment.get("PATH", "")) and not is_in_job(environment):
            show(f"... all runs take place on this machine; to have them on a compute node: `{SRUN_EXAMPLE}`")
        show(f"... random seed {asked.seed}, runs in {asked.folder}")
        certificate = asked.certify(lambda one: show(f"    {one.words}{f' ({one.reason})' if one.reason else ''}"))
        text = as_json(asdict(certificate) | {"is_good": certificate.is_good})
        replace_text(asked.folder / CERTIFICATE, f"{text}\n")
        print(text if args.json else as_text(certificate))
    if not certificate.tried_faults:
        return REFUSED
    return FINISHED if certificate.is_good else FAILED


def _make_certification(
    args: argparse.Namespace, environment: Mapping[str, str], say: Callable[[str], None]
) -> Certification:
    from ddp_hpc.prove.certify.certificate import Certification, rank_settings, values_of
    from ddp_hpc.prove.certify.faults import FAULTS
    from ddp_hpc.run.config.resolve import resolve
    from ddp_hpc.run.spec.script import parse_program

    if not args.command:
        raise ConfigError("No script is named. Name one: `ddp-hpc certify -- python train.py`.")
    faults = list(FAULTS) if args.faults == "all" else [*dict.fromkeys(args.faults.split(","))]
    unknown = [name for name in faults if name not in FAULTS]
    if unknown:
        raise ConfigError(f"`--faults` names {unknown[0]!r}, but the faults are {', '.join(FAULTS)}.")
    if args.patience <= 0:
        raise ConfigError(f"`--patience` is {args.patience:g}, but it must be more than 0 seconds.")
    asked_dir = values_of(args.settings).get("runs_dir")
    runs_dir = (args.runs_dir or Path(asked_dir or chosen_runs_dir(None, environment))).absolute()
    words = [*args.settings, *rank_settings(args.settings), *runs_dir_setting(runs_dir)]
    resolved = resolve(None, words, environment, site=args.site, is_for_slurm=False, command=args.command)
    if resolved.spec.resources.nodes > 1:
        raise ConfigError(
            f"`resources.nodes` is {resolved.spec.resources.nodes}, but certify runs the script on one node, whose files and processes "
            "it watches. Set `resources.nodes=1`. To try faults on several nodes, use `ddp-hpc drill`."
        )
    site = Path(args.site).absolute() if args.site and Path(args.site).is_file() else args.site
    return Certification(
        command=args.command,
        settings=[*args.settings, *([f"--site={site}"] if site else [])],
        faults=faults,
        work_dir=Path.cwd(),
        folder=runs_dir / f"certify-{parse_program(args.command).name}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}",
        left_out=(runs_dir, *runs_dir.glob("certify-*")),
        may_change=args.may_change,
        seed=secrets.randbelow(SEED_BOUND) if args.random_seed is None else args.random_seed,
        patience_s=args.patience,
        is_kept=args.keep,
        progress=resolved.spec.script.progress,
        environ=environment,
        say=say,
    )


def as_text(certificate: Certificate) -> str:
    """Return the verdicts as text: what the script does, a table, and each defect with the lines that mend it."""
    files = shorten_names(certificate.saves, 3)
    counted = (
        f"{certificate.num_positions} {certificate.unit}s in its output"
        if certificate.unit
        else "no step in its output"
    )
    does = f"undisturbed: {certificate.seconds:g} s, {counted}; saves {files or 'nothing'}"
    rows, as_for = [], {"": ""}
    for one in certificate.findings:
        rows.append((one.fault, one.words, one.read_back_text, as_for.get(one.reason, one.reason)))
        as_for.setdefault(one.reason, f"as for {one.fault}")
    lines = ["", shlex.join(certificate.command), does, *(f"note: {note}" for note in certificate.notes), ""]
    lines += [table(("FAULT", "VERDICT", "READ BACK", "REASON"), rows)]
    notes: dict[str, list[str]] = {}
    for finding in certificate.findings:
        for note in finding.notes:
            notes.setdefault(note, []).append(finding.fault)
    lines += [f"note: {', '.join(faults)}: {text}" for text, faults in notes.items()]
    told = set()
    for fault, defect in ((one.fault, defect) for one in certificate.findings for defect in one.defects):
        if defect.name not in told:  # of several faults that show it, the first
            told.add(defect.name)
            lines += ["", f"{defect.name}: {defect.what}", f"  seen under {fault}: {defect.evidence}"]
            lines += [f"  {line}" for line in ("to mend it:", *(f"  {line}" for line in defect.mend.splitlines()))]
    return "\n".join([*lines, "", _closing_sentences(certificate)])


def _closing_sentences(certificate: Certificate) -> str:
    """Say what the tried faults have shown, and of the others only that they were not tried, and what to change."""
    tried = certificate.tried_faults
    bad = ", ".join(one.fault for one in tried if not one.is_good)
    untried = [one for one in certificate.findings if not one.was_tried]
    if bad:
        said = f"The script does not resume correctly after {bad}. The files of its runs: {certificate.folder}."
    elif tried:
        unsure = ", but whether to the same result is not known: two undisturbed runs differ"
        said = f"The script comes back from every fault that certify tried{unsure if certificate.is_deterministic is False else ''}."
    elif certificate.findings and not untried:
        said = f"The script hangs without a fault, so certify tried none. The files of its run: {certificate.folder}."
    else:
        said = "Certify could try no fault, so nothing is proven."
    if untried:
        said += f" Not tried, so nothing is known of them: {', '.join(one.fault for one in untried)}."
    if any(one.verdict == "untouched" for one in untried):
        said += " To try them, let the script train for longer after its last save, or save fewer files at a time. While any is not tried, the exit code is not 0."
    elif untried and not tried:
        said += " Try other faults (`--faults`), or a longer training with more saves."
    return said
