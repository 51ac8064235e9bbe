"""Tells which lines of a job's log Slurm has printed of another job step, or of another node. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.watch.why.lines import LogLine

_STEP = re.compile(r"\bStepId=(?P<job>\w+)\.(?P<step>\w+)")
_NODE = re.compile(
    r"(?:\[?\d[\d:.T-]*\]? )?(?:slurmstepd-(?P<daemon>[\w.-]+): |srun: error: (?P<node>[\w.-]+): tasks? )"
)


def lines_of_newest_step(lines: Sequence[LogLine], job_id: str, host: str) -> Sequence[LogLine]:
    """Return the lines that may be of the ranks' step of this job, and of this host; "" for a host that is not known.

    Ranks run in the newest numbered step: earlier ones are of the setup, and the batch script is a step without a number.
    """
    numbers = [int(found["step"]) for line in lines if (found := _STEP.search(line.text)) and found["step"].isdigit()]
    newest = str(max(numbers, default=0))
    kept = []
    for line in lines:
        found, node = _STEP.search(line.text), node_of(line)
        # A task of an array has a number of its own beside `ARRAY_INDEX`; the two cannot be compared.
        is_other = found and ("_" in found["job"]) == ("_" in job_id) and found["job"] != job_id
        is_elsewhere = node and host and node.partition(".")[0] != host.partition(".")[0]
        if not (is_other or is_elsewhere or (found and found["step"] != newest)):
            kept.append(line)
    return kept


def node_of(line: LogLine) -> str:
    """Return the node that a line names; empty where it names none."""
    found = _NODE.match(line.text)
    return (found["daemon"] or found["node"]) if found else ""
