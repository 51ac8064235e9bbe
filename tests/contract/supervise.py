"""The real supervisor, where the table of workloads has one line more: `python -m tests.contract.supervise RUN_DIR ...`."""

from __future__ import annotations

import sys

from ddp_hpc.job import supervisor
from ddp_hpc.run.workload.table import WORKLOADS
from tests.contract import counting_workload


def add_counting() -> None:
    """Put the line first: the workload that every spec asks for stands last."""
    others = {name: kind for name, kind in WORKLOADS.items() if name != "counting"}
    WORKLOADS.clear()
    WORKLOADS.update({"counting": counting_workload.LINE, **others})


if __name__ == "__main__":
    add_counting()
    sys.exit(supervisor.main(sys.argv[1:]))
