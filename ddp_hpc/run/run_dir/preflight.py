"""The record of a check of nodes before training: what was asked, what was found, which nodes differ, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warn", "fail", "unknown"]
"""`fail`: a training would fail there, or be wrong or slow. `unknown`: nothing answered, which is never taken for `ok`."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str = field(default="", kw_only=True)
    """What was checked, in a word or two: `run directory`. The doctor's checks leave it to their table."""
    level: Level
    found: str
    to_do: str = ""
    """Empty where nothing has to be done."""
    nodes: tuple[str, ...] = ()
    """The nodes that differ from the others; none where no single node can be named."""


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What a check of some nodes found."""

    at: float
    """When it began, in seconds since the epoch."""
    seconds: float
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> Sequence[Finding]:
        """The findings of which a training would fail."""
        return [finding for finding in self.findings if finding.level == "fail"]

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """The nodes that failures name, in the job's order; none where they are all of its nodes."""
        named = {node for finding in self.failures for node in finding.nodes}
        return () if named.issuperset(self.nodes) else tuple(node for node in self.nodes if node in named)

    @property
    def has_failure_without_bad_nodes(self) -> bool:
        """Whether a failure remains where the bad nodes are left out."""
        bad = {*self.bad_nodes}
        return any(not finding.nodes or not bad.issuperset(finding.nodes) for finding in self.failures)

    @property
    def words(self) -> str:
        """The failures in one line, with what to do."""
        return "; ".join(f"{one.check}: {one.found}{one.to_do and f' ({one.to_do})'}" for one in self.failures)
