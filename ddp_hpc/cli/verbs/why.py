"""Say why a run failed: the rank that failed first, the class of the failure, the evidence, and what to do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.runs import add_flag, add_run_argument, chosen_run, typed_name
from ddp_hpc.cli.why_text import as_record, as_text
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.watch.why.reading import chosen_attempt, read_facts
from ddp_hpc.watch.why.verdict import verdict_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, optional=True)
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="K",
        help="explain attempt K; default: the newest, but if that still runs and the one before failed, the one before",
    )
    add_flag(parser, "--json", "print JSON instead of text")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    run_dir = chosen_run(args, environment)
    ledger = Ledger.read(run_dir)
    attempt = chosen_attempt(run_dir, ledger, args.attempt)
    verdict = verdict_of(read_facts(run_dir, ledger, attempt))
    word = typed_name(run_dir, environment)
    print(
        as_json(as_record(run_dir, attempt, verdict, word=word))
        if args.json
        else as_text(run_dir, ledger, attempt, verdict, word=word)
    )
    return 0
