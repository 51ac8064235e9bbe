"""Says in the job's log, while the ranks of an attempt meet, which of them the others wait for, and whether the network is why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.cluster.rendezvous.links.rounds import ALL_PAIRS_UP_TO
from ddp_hpc.job.ending import network_probe
from ddp_hpc.job.ending.best_effort import best_effort, best_effort_diagnosis
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.run.run_dir.joined_ranks import read_missing, started_ranks, write_missing
from ddp_hpc.run.run_dir.network import NetworkFindings, write_network
from ddp_hpc.run.run_dir.records import read_progress

NAMED_AFTER_S = 30.0
"""How long the first rank may wait for the others before they are named."""
ABSENT_AFTER_S = 75.0
"""How long until a rank that has no log is taken for absent, unless rank zero misses it, too.

A directory as this node sees it may be a minute old (nfs(5), "acdirmax", https://man7.org/linux/man-pages/man5/nfs.5.html)."""
_MOST_NAMED = 8

WATCH_DURATION_S = 660.0
"""How long to look: longer than the ranks wait for each other."""


@dataclass(kw_only=True)
class JoiningRanks:
    """The ranks of one attempt while they meet."""

    context: JobContext
    attempt: int
    met_at: str
    _began: float | None = None
    """When the first rank was there."""
    _have_all_started: bool = False
    _has_failed: bool = False
    """Whether looking has failed: it would fail each second again."""
    _said: tuple[int, ...] | None = None

    def name_missing(self, now: float) -> None:
        """Look who is missing; name them in the job's log, once for each set of ranks."""
        if self._has_failed:
            return
        self._has_failed = True
        with best_effort_diagnosis("which ranks have joined"):
            self._name_missing(now)
            self._has_failed = False

    def _name_missing(self, now: float) -> None:
        if self.context.world.world_size < 2 or (self._began is not None and now - self._began > WATCH_DURATION_S):
            return
        listed = self._absent_ranks(now)
        if listed is None or self._began is None or now - self._began < NAMED_AFTER_S or self._may_have_all_joined():
            return
        record = read_missing(self.context.run, self.attempt)
        is_listing_fresh = now - self._began >= ABSENT_AFTER_S
        absent = [rank for rank in listed if is_listing_fresh or (record and rank in record.ranks)]
        if absent and 0 in absent:  # rank zero, which would write the record, is not there
            with best_effort():
                workers_per_node = self.context.world.workers_per_node
                write_missing(self.context.run, self.attempt, absent, workers_per_node=workers_per_node)
        missing = tuple(sorted({*absent, *(record.ranks if record else ())}))
        if (record is None and not absent) or missing == self._said:
            return
        is_first, self._said = self._said is None, missing
        sys.stderr.write(f"note: {self._missing_text(missing, absent)}\n")
        if is_first and len(self.context.nodes) > 1 and self.met_at:
            findings = network_probe.probe_network(self.context.nodes, self.met_at)
            with best_effort():
                write_network(self.context.run, self.attempt, findings)
            nodes = list(dict.fromkeys(node for rank in missing if (node := self.context.node_of(rank)) is not None))
            sys.stderr.write(f"note: {reachability_text(findings, nodes, self.context.nodes[0])}\n")

    def _may_have_all_joined(self) -> bool:
        """Tell whether a recipe's rank zero may report its steps: then all have joined. A script's reports that it was started."""
        try:
            progress = read_progress(self.context.run)
        except (OSError, UnreadableError, ValueError):
            return True
        return progress is not None and progress.attempt == self.attempt and progress.saves is None

    def _absent_ranks(self, now: float) -> list[int] | None:
        """Return the ranks that have no log, None where that is not known; note when the first one was there."""
        if self._have_all_started:
            return []
        started = started_ranks(self.context.run, self.attempt)
        if started is None:
            return None
        if started and self._began is None:
            self._began = now
        absent = [rank for rank in range(self.context.world.world_size) if rank not in started]
        self._have_all_started = not absent
        return absent

    def _missing_text(self, missing: Sequence[int], absent: Sequence[int]) -> str:
        began = f"the first rank has waited for {NAMED_AFTER_S:.0f} s or more"
        if not missing:
            return f"{began}: all ranks have reached rank zero, but they have not all connected to each other"
        named = []
        for rank in missing:
            node = self.context.node_of(rank)
            how = "has not started" if rank in absent else "runs, but has not reached rank zero"
            named.append(f"rank {rank}{f' on {node}' if node else ''} (its process {how})")
        return f"{began} for {shorten_names(named, _MOST_NAMED)}; all ranks wait until they have joined"


def reachability_text(findings: NetworkFindings, nodes: Sequence[str], zero: str) -> str:
    """Say whether these nodes reach rank zero's, as a probe found, and what else it found."""
    if findings.is_faulty or findings.problem or not findings.num_pairs:
        return findings.words
    known = [node for node in nodes if node not in findings.silent and node != zero]
    if not known or len(findings.pairs) or findings.num_nodes > ALL_PAIRS_UP_TO:
        return findings.words
    return f"{', '.join(known)} {'reaches' if len(known) == 1 else 'reach'} the node of rank zero; {findings.words}"
