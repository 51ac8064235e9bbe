"""Print the type, default and meaning of every key of the configuration, or of one key or section."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict

from ddp_hpc.cli.formatting import as_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "key", metavar="KEY", nargs="?", default="", help="print only this key (`train.lr`) or section (`train`)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print a JSON list")
    how.add_argument("--markdown", action="store_true", help="print the tables of docs/configuration.md")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:  # noqa: ARG001  # every verb's signature
    """Print the rows."""
    from ddp_hpc.run.config.reference import as_markdown, rows_of

    rows = rows_of(args.key)
    if args.json:
        print(as_json([asdict(row) for row in rows]))
    elif args.markdown:
        print(as_markdown(rows), end="")
    else:
        print(table(("KEY", "TYPE", "DEFAULT", "MEANING"), [(r.key, r.type, r.default, r.meaning) for r in rows]))
    return 0
