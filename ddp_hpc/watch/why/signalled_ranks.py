"""Finds in a job's log which ranks a signal ended, by what `srun` and `torchrun` print. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ddp_hpc.base.processes import signal_number
from ddp_hpc.watch.why.lines import LogLine

_SRUN = re.compile(
    r"(?:\d+: )?srun: error: (?P<node>[\w.-]+): tasks? (?P<tasks>[\d,-]+): (?P<how>[A-Z][A-Za-z ]*?)(?: \(core dumped\))?$"
)
_SIGKILL = signal_number("KILL")
_SIGNALS: Mapping[str, int] = {
    "Segmentation fault": signal_number("SEGV"),
    "Aborted": signal_number("ABRT"),
    "Bus error": signal_number("BUS"),
    "Illegal instruction": signal_number("ILL"),
    "Floating point exception": signal_number("FPE"),
    "Killed": _SIGKILL,
    "Out Of Memory": _SIGKILL,
}
"""As `srun` prints them -> the signal."""
_CRASH_SIGNALS = frozenset(_SIGNALS.values()) - {_SIGKILL}
_STEP_ENDS = re.compile(r"srun: .*(?:Terminating StepId|Force Terminated)|.*\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED")
"""From here on Slurm itself ends tasks by SIGKILL."""
_ROOT, _OTHERS = re.compile(r"Root Cause \(first observed failure\)"), re.compile(r"(?:Other )?Failures:$")
_HOST = re.compile(r"\s+host\s+: (?P<host>\S+)$")
_RANK = re.compile(r"\s+rank\s+: (?P<rank>\d+) \(local_rank: \d+\)$")
_CODE = re.compile(r"\s+exitcode\s+: -(?P<signal>\d+) \(pid: \d+\)")


Signalled = tuple[int, str, int, LogLine]
"""A rank, its host, the signal that ended it, and the line that says so."""


def signalled(console: Sequence[LogLine], nodes: Sequence[str], num_ranks: int) -> list[Signalled]:
    """Return the ranks that a signal ended which neither Slurm nor `torchrun` sends to end the others."""
    return [*_by_srun(console, nodes, num_ranks), *_by_torchrun(console)]


def _by_srun(console: Sequence[LogLine], nodes: Sequence[str], num_ranks: int) -> Iterator[Signalled]:
    """Return the ranks that are tasks of `srun`; a task may also be an agent or `torchrun`, which stands on another node."""
    per_node, rest = divmod(num_ranks, len(nodes)) if nodes else (0, 1)
    node_of = {rank: nodes[rank // per_node].partition(".")[0] for rank in range(0 if rest else num_ranks) if per_node}
    is_ending = False
    for line in console:
        is_ending = is_ending or _STEP_ENDS.match(line.text) is not None
        found = _SRUN.match(line.text)
        number = _SIGNALS.get(found["how"]) if found else None
        if found is None or number is None or (is_ending and number not in _CRASH_SIGNALS):
            continue
        for task in _parse_task_list(found["tasks"]):
            if node_of.get(task) == found["node"].partition(".")[0]:
                yield task, found["node"], number, line


def _parse_task_list(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last if last.isdigit() else first) + 1)


def _by_torchrun(console: Sequence[LogLine]) -> Iterator[Signalled]:
    """Return the ranks of the tables that `torchrun` prints at its end; of SIGKILL, only the first failure of a node."""
    is_root = False
    # The tables of two nodes may mix, so only three lines in a row are of one rank.
    for host_line, rank_line, line in zip(console, console[1:], console[2:], strict=False):
        if _ROOT.match(host_line.text) or _OTHERS.match(host_line.text):
            is_root = _ROOT.match(host_line.text) is not None
        host, rank, code = _HOST.match(host_line.text), _RANK.match(rank_line.text), _CODE.match(line.text)
        if host is None or rank is None or code is None:
            continue
        number = int(code["signal"])
        if number in _CRASH_SIGNALS or (is_root and number == _SIGKILL):
            yield int(rank["rank"]), host["host"].partition(".")[0], number, line
