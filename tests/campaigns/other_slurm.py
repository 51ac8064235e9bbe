"""Run the tests on Slurm with another Debian's Slurm, and keep what came of it.

python -m tests.campaigns.other_slurm .slurm-lab/rootfs/trixie [pytest's arguments]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from tests.campaigns.command_line import folder_that_exists, parser_of
from tests.campaigns.written import RESULTS, ROOT, add_row, stamp

RESULT = RESULTS / "other-slurm.json"
NUM_SLOWEST = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Return pytest's exit code; a run of all tests is written down, a choice of them is not."""
    parser = parser_of("tests.campaigns.other_slurm", __doc__)
    parser.add_argument(
        "rootfs", metavar="ROOTFS", type=folder_that_exists, help="the root directory of the other Debian"
    )
    parser.add_argument(
        "chosen", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of pytest; without one, all tests run"
    )
    asked = parser.parse_args(argv)
    rootfs, chosen = asked.rootfs, asked.chosen
    if not (rootfs / "var/lib/dpkg").is_dir():
        parser.error(f"{rootfs} is not the root directory of a Debian: it has no var/lib/dpkg.")
    began_at = stamp()
    with tempfile.TemporaryDirectory(prefix="ddp_hpc-other-slurm-") as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "not campaign", "tests/slurm", f"--junitxml={report}", *chosen]
        environ = {**os.environ, "DDP_HPC_SLURM_ROOTFS": str(rootfs)}
        code = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environ, check=False).returncode
        if not chosen:
            add_row(RESULT, {"slurm": version(rootfs), **began_at, **read(report)}, key="slurm")
    return code


def version(rootfs: Path) -> str:
    """Return the version of Slurm that a Debian's root directory holds, by its package."""
    argv = [
        "dpkg-query",
        f"--admindir={rootfs.resolve()}/var/lib/dpkg",
        "--show",
        "--showformat=${Version}",
        "slurmctld",
    ]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def read(report: Path) -> dict[str, Any]:
    """Return what pytest's report says: how many tests ended how, in all how long, which failed, which took longest."""
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314  written by our own pytest
    ends = {f"{case.get('classname')}::{case.get('name')}": _end_of(case) for case in cases}
    seconds = {f"{case.get('classname')}::{case.get('name')}": float(case.get("time", "0")) for case in cases}
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:NUM_SLOWEST]
    return {
        "verdict": "PASS" if ends and not {"failed", "error"} & {*ends.values()} else "FAIL",
        "tests": dict(sorted(Counter(ends.values()).items())),
        "minutes": round(sum(seconds.values()) / 60, 1),
        "failed": sorted(name for name, end in ends.items() if end in {"failed", "error"}),
        "slowest_s": {name: round(seconds[name], 1) for name in slowest},
    }


def _end_of(case: ET.Element) -> str:
    kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return next((end for kind, end in kinds.items() if case.find(kind) is not None), "passed")


if __name__ == "__main__":
    sys.exit(main())
