"""Show a run's state, step, loss, time left and newest checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace

from ddp_hpc.cli.details import status_details
from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import add_run_argument, chosen_run, slurm_asker, typed_name
from ddp_hpc.cli.status_text import as_text
from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.status import read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, optional=True)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON instead of text")
    how.add_argument(
        "--watch",
        action="store_true",
        help="draw a screen every 2 s until the run ends; Ctrl-C ends this command, not the run",
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    now = time.time()
    run_dir = chosen_run(args, environment)
    if args.watch:
        from ddp_hpc.cli.follow_run import show_status_live  # late: only here

        show_status_live(run_dir, sys.stdout, ask=slurm_asker(environment))
        return 0
    status = read_status(run_dir, now=now, ask=slurm_asker(environment))
    if status.state in {"failed", "cancelled", "stopped"} and status.attempt is not None:
        status = replace(status, reason=_end_reason(run_dir, status.attempt, status.reason))
    word = typed_name(run_dir, environment)
    record, rows = status_details(run_dir, status, now=now)
    print(as_json({**asdict(status), **record}) if args.json else as_text(status, now=now, word=word, details=rows))
    return 0


def _end_reason(run_dir: RunDir, attempt: int, reason: str) -> str:
    """Return the reason of an attempt's end, behind what its ranks' logs say where no report does, or where the end followed from that."""
    from ddp_hpc.watch.why.reading import chosen_attempt, read_facts  # late: most runs have not failed
    from ddp_hpc.watch.why.verdict import EFFECTS_BY_CAUSE, verdict_of

    ledger = Ledger.read(run_dir)
    ended = chosen_attempt(run_dir, ledger, attempt)
    has_no_report = ended.ending == Ending.FAILED and not ended.root.fingerprint
    if ended.reason != reason or not (has_no_report or ended.cause in EFFECTS_BY_CAUSE):
        return reason
    verdict = verdict_of(read_facts(run_dir, ledger, ended))
    is_before = verdict.end or (verdict.basis == "log" and has_no_report)
    return f"{verdict.failure_class.title}: {verdict.detail}; then: {reason}" if is_before else reason
