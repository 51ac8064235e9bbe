"""Print every variable that PyTorch reads of a Slurm job: its value, where that is from, and why; or export them.

srun bash -c 'eval "$(ddp-hpc env --export)"; exec python train.py'
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from ddp_hpc.cli.words import as_json, or_dash, table

if TYPE_CHECKING:
    from ddp_hpc.rendezvous.derive import Derivation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print a JSON object")
    how.add_argument(
        "--export", action="store_true", help="print lines for the shell's `eval`: what is known and not set already"
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print them."""
    from ddp_hpc.rendezvous.address import this_host
    from ddp_hpc.rendezvous.derive import derive
    from ddp_hpc.slurm.allocation import read_allocation

    found = derive(environment, read_allocation(environment), this_host())
    if args.json:
        print(as_json(asdict(found)))
    elif args.export:
        _export(found)
    else:
        _explain(found)
    return 0


def _export(found: Derivation) -> None:
    for name, value in found.to_export.items():
        print(f"export {name}={_quoted(value)}")
    for one in found.variables:
        if one.name in {"MASTER_ADDR", "MASTER_PORT"} and one.value is None:  # the only ones that nobody can do without
            print(f"note: {one.name} is not known: {one.rule}", file=sys.stderr)


def _quoted(value: str) -> str:
    """Return the value in quotes, plain ones too: a line should not look otherwise for what stands in it."""
    quoted = shlex.quote(value)
    return quoted if quoted != value else f"'{value}'"


def _explain(found: Derivation) -> None:
    print(f"{found.place}\n")
    rows = [(one.name, or_dash(one.value), one.source, one.rule) for one in found.variables]
    print(table(("NAME", "VALUE", "SOURCE", "WHY"), rows))
    refused = [(one.name, other.name, other.why) for one in found.variables for other in one.refused]
    if refused:
        print()
        print(table(("FOR", "NOT TAKEN", "WHY"), refused))
