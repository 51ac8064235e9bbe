"""The real supervisor, where the table of workloads has one line more: `python -m tests.contract.supervise RUN_DIR ...`."""

from __future__ import annotations

import sys

from ddp_hpc.job import supervisor
from ddp_hpc.run.workload.table import WORKLOADS
from tests.contract import counting_workload


def add_counting() -> None:
    """Put the line first: the workload that every spec asks for stands last."""
    others = {name: asked for name, asked in WORKLOADS.items() if name != counting_workload.__name__}
    WORKLOADS.clear()
    WORKLOADS.update({counting_workload.__name__: counting_workload.is_asked_for, **others})


if __name__ == "__main__":
    add_counting()
    sys.exit(supervisor.main(sys.argv[1:]))
