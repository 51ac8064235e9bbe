"""Test that your own script resumes correctly: run it undisturbed, then stop and kill it at chosen moments, and compare the results.

Each run has its own copy of the working directory, so nothing in it changes. KEY=VALUE sets any key (`resources.workers_per_node=4`).
With `--cluster slurm`, all of it takes place in one job on one node, which this command submits and follows. The exit code is 0 if the script came back from every fault without a defect, otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hpc.base import processes
from ddp_hpc.base.durable import replace_text
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.exit_codes import FAILED, FINISHED
from ddp_hpc.cli.formatting import as_json, table
from ddp_hpc.cli.runs import add_runs_dir, add_site, chosen_runs_dir, runs_dir_setting

if TYPE_CHECKING:
    from ddp_hpc.launch.submission.backend import Backend
    from ddp_hpc.prove.certify.certificate import Certificate, CertifyPlan
    from ddp_hpc.prove.certify.verdicts import FaultResult
    from ddp_hpc.run.config import Resolved

LONGEST_SEED = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from ddp_hpc.launch.submission.backend import BACKENDS
    from ddp_hpc.prove.certify.faults import FAULTS

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
        choices=sorted(BACKENDS),
        default="local",
        help="where to run: this machine (local, the default), or in one job on one node of Slurm",
    )
    parser.add_argument(
        "--plan", type=Path, help=argparse.SUPPRESS
    )  # in a job: what the command that sent it was asked
    parser.add_argument(
        "--random-seed",
        type=int,
        metavar="N",
        help="the seed of the random moments; certify prints it, so that you can repeat them",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a run that prints, writes and computes nothing for this long hangs (default: 60)",
    )
    parser.add_argument(
        "--may-change",
        action="append",
        default=[],
        type=lambda text: Path(os.path.abspath(os.path.expanduser(text))),  # noqa: PTH100, PTH111  links stay, and no error for `~nobody`
        metavar="PATH",
        help="a path outside of the working directory that the script or another program may change, such as a cache or a log; may be repeated",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the directories of all runs, not only of those that show a defect"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_site(parser)
    add_runs_dir(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Certify the script here or in a job, and print the verdicts."""
    out = sys.stderr if args.json else sys.stdout

    def show(text: str) -> None:
        print(text, file=out, flush=True)

    with processes.ended_by_signals():
        if args.plan is not None:
            from ddp_hpc.prove.certify.in_job import read_plan

            return _certify(read_plan(args.plan), environment, show, is_json=False)
        from ddp_hpc.cluster.slurm.own_job import without_ended_job
        from ddp_hpc.launch.submission.backend import choose_backend

        environment, note = without_ended_job(environment)
        if note:
            show(note)
        backend = choose_backend(args.cluster, environment)
        if backend.HAS_QUEUE:
            return _certify_in_job(args, backend, environment, show)
        plan, _ = _planned(args, backend, environment)
        _hint_at_queues(environment, show)
        return _certify(plan, environment, show, is_json=args.json)


def _certify(plan: CertifyPlan, environment: Mapping[str, str], show: Callable[[str], None], *, is_json: bool) -> int:
    """Certify the script on this machine."""
    from ddp_hpc.prove.certify.certificate import CERTIFICATE, certify

    def show_finding(finding: FaultResult) -> None:
        show(f"    {finding.words}{f' ({finding.reason})' if finding.reason else ''}")

    show(f"... random seed {plan.seed}, runs in {plan.folder}")
    certificate = certify(plan, environment, lambda text: show(f"... {text}"), show_finding)
    text = as_json(asdict(certificate) | {"is_good": certificate.is_good})
    replace_text(plan.folder / CERTIFICATE, f"{text}\n")
    print(text if is_json else as_text(certificate))
    return FINISHED if certificate.is_good else FAILED


def _certify_in_job(
    args: argparse.Namespace, backend: Backend, environment: Mapping[str, str], show: Callable[[str], None]
) -> int:
    """Have a job certify the script; what it prints is shown, and its certificate lies where that of a local one would."""
    from ddp_hpc.cluster.slurm.allocation import read_allocation
    from ddp_hpc.prove.certify.certificate import CERTIFICATE
    from ddp_hpc.prove.certify.in_job import certify_in_job

    allocation = read_allocation(environment)
    if allocation is not None and allocation.process_kind != "shell outside":
        raise ConfigError(
            f"This command runs on a node of job {allocation.job_id} already, and would wait for another job. Leave out "
            "`--cluster`: certify then runs the script here, in this job."
        )
    plan, resolved = _planned(args, backend, environment)
    code = certify_in_job(plan, resolved.spec, environment, lambda text: show(f"... {text}"), show)
    if args.json and code in {FINISHED, FAILED}:
        print((plan.folder / CERTIFICATE).read_text(encoding="utf-8"), end="")
    return code


def _hint_at_queues(environment: Mapping[str, str], show: Callable[[str], None]) -> None:
    from ddp_hpc.cluster.slurm.allocation import is_in_job
    from ddp_hpc.launch.submission.backend import BACKENDS

    path = environment.get("PATH", "")
    found = [name for name, place in BACKENDS.items() if place.command and shutil.which(place.command, path=path)]
    if found and not is_in_job(environment):
        show(
            f"... all runs take place on this machine; to have them in a job on a compute node: `--cluster {found[0]}`"
        )


def _planned(
    args: argparse.Namespace, backend: Backend, environment: Mapping[str, str]
) -> tuple[CertifyPlan, Resolved]:
    from ddp_hpc.prove.certify.certificate import CertifyPlan, ranks_of
    from ddp_hpc.prove.certify.faults import FAULTS
    from ddp_hpc.run.config import resolve
    from ddp_hpc.run.spec.script import program_of

    if not args.command:
        raise ConfigError("No script is named. Name one: `ddp-hpc certify -- python train.py`.")
    faults = list(FAULTS) if args.faults == "all" else args.faults.split(",")
    unknown = [name for name in faults if name not in FAULTS]
    if unknown:
        raise ConfigError(f"`--faults` names {unknown[0]!r}, but the faults are {', '.join(FAULTS)}.")
    if args.patience <= 0:
        raise ConfigError(f"`--patience` is {args.patience:g}, but it must be more than 0 seconds.")
    runs_dir = chosen_runs_dir(args.runs_dir, environment).absolute()
    words = [*args.settings, *ranks_of(args.settings), *runs_dir_setting(runs_dir)]
    is_for_slurm = backend.HAS_QUEUE
    resolved = resolve(None, words, environment, site=args.site, is_for_slurm=is_for_slurm, command=args.command)
    if resolved.spec.resources.nodes > 1:
        raise ConfigError(
            f"`resources.nodes` is {resolved.spec.resources.nodes}, but certify runs the script on one node, whose files and processes "
            "it watches. Set `resources.nodes=1`. To try faults on several nodes, use `ddp-hpc drill`."
        )
    name = program_of(args.command).name
    of_partition = _of_partition(resolved, args.settings) if is_for_slurm else []
    plan = CertifyPlan(
        command=args.command,
        settings=[*of_partition, *args.settings, *_site(args, resolved)],
        faults=faults,
        work_dir=Path.cwd(),
        folder=runs_dir / f"certify-{name}-{time.strftime('%m%d-%H%M%S')}",
        left_out=(runs_dir, *runs_dir.glob("certify-*")),
        may_change=tuple(args.may_change),
        seed=secrets.randbelow(LONGEST_SEED) if args.random_seed is None else args.random_seed,
        patience_s=args.patience,
        is_kept=args.keep,
    )
    return plan, resolved


def _site(args: argparse.Namespace, resolved: Resolved) -> list[str]:
    """Return the option for the site profile, also where it was chosen by the name of this host: a job runs on another one."""
    if args.site is None:
        return [] if resolved.profile is None else [f"--site={resolved.profile.path.absolute()}"]
    return [f"--site={Path(args.site).absolute() if Path(args.site).is_file() else args.site}"]


def _of_partition(resolved: Resolved, settings: Sequence[str]) -> Iterator[str]:
    """Yield what a site profile sets for the job's partition alone: runs that are started in the job do not read that."""
    given = {setting.partition("=")[0] for setting in settings}
    for key, source in resolved.sources.items():
        if ", partition " in source and key not in given:
            value: Any = resolved.spec
            for part in key.split("."):
                value = value[part] if isinstance(value, Mapping) else getattr(value, part)
            yield f"{key}={json.dumps(value)}"


def as_text(certificate: Certificate) -> str:
    """Return the verdicts as text: what the script does, a table, and each defect with the lines that mend it."""
    files = ", ".join(certificate.saves[:3]) + (", ..." if len(certificate.saves) > 3 else "")
    counted = (
        f"{certificate.num_positions} {certificate.unit}s in its output"
        if certificate.unit
        else "no step in its output"
    )
    does = f"undisturbed: {certificate.seconds:g} s, {counted}; saves {files or 'nothing'}"
    rows, as_for = [], {"": ""}
    for one in certificate.findings:
        rows.append((one.fault, one.words, one.read_words, as_for.get(one.reason, one.reason)))
        as_for.setdefault(one.reason, f"as for {one.fault}")
    lines = ["", shlex.join(certificate.command), does, *(f"note: {note}" for note in certificate.notes), ""]
    lines += [table(("FAULT", "VERDICT", "READ BACK", "REASON"), rows)]
    for text, faults in _notes(certificate).items():
        lines.append(f"note: {', '.join(faults)}: {text}")
    told = set()
    for fault, defect in ((one.fault, defect) for one in certificate.findings for defect in one.defects):
        if defect.name not in told:  # of several faults that show it, the first
            told.add(defect.name)
            lines += ["", f"{defect.name}: {defect.what}", f"  seen under {fault}: {defect.evidence}"]
            lines += [f"  {line}" for line in ("to mend it:", *(f"  {line}" for line in defect.mend.splitlines()))]
    if certificate.is_good:
        end = "The script comes back from every fault that certify tried."
        if certificate.is_deterministic is False:
            end = f"{end[:-1]}, but whether to the same result is not known: two undisturbed runs differ."
    elif all(one.is_good for one in certificate.findings):
        end = "Certify could try no fault, so nothing is proven. Try other faults (`--faults`), or a longer training with more saves."
    else:
        end = (
            f"The script does not come back from every fault as it should. The files of its runs: {certificate.folder}"
        )
    return "\n".join([*lines, "", end])


def _notes(certificate: Certificate) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in certificate.findings:
        for note in finding.notes:
            found.setdefault(note, []).append(finding.fault)
    return found
