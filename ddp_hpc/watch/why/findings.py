"""What is known of one attempt, and the verdict on its ranks and on itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddp_hpc.run.run_dir.differences import Difference
from ddp_hpc.run.run_dir.failure_reports import RankEnd, WorkerFailure
from ddp_hpc.run.run_dir.joined_ranks import MissingRanks
from ddp_hpc.run.run_dir.ledger import Attempt
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.run_dir.preflight import PreflightReport
from ddp_hpc.watch.why.lines import LogLine
from ddp_hpc.watch.why.signatures import REGISTRY, FailureClass, Role

Basis = Literal["record", "log", "none"]
"""What the verdict rests on: a field of a record, a text in a log, or nothing."""


@dataclass(frozen=True)
class EvidenceLine:
    """A line that the verdict rests on."""

    role: Role
    rank: int | None
    """None for the log of the job."""
    text: str
    line: LogLine | None = None
    """Where it stands; None for a record."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """What is known of one attempt."""

    attempt: Attempt
    failures: Sequence[WorkerFailure] = ()
    logs: Mapping[int, Sequence[LogLine]] = field(default_factory=dict)
    """The end of each rank's log."""
    console: Sequence[LogLine] = ()
    """What the job's log says of this attempt."""
    missing: MissingRanks | None = None
    """Which ranks the others waited for at the beginning; None where nobody waited for long, or all have joined."""
    network: NetworkFindings | None = None
    """What a probe of the network between the nodes found at the end; None without one."""
    difference: Difference | None = None
    """What the ranks had that differed; None where they did not."""
    preflight: PreflightReport | None = None
    """What the check of the nodes found before the workers started; None without one."""
    ends: Mapping[int, RankEnd] = field(default_factory=dict)
    """How the process of a rank ended that nobody had asked to end."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why a rank ended; or why an attempt did: the verdict on the rank that failed first, with what follows from all of them."""

    failure: str
    """A name of the registry; empty where nothing failed."""
    role: Role = "root"
    basis: Basis = "record"
    rank: int | None = None
    """That failed first, where one is known."""
    host: str = ""
    at: float = float("inf")
    step: int | None = None
    detail: str = ""
    """The exception, the signal or the exit code."""
    place: str = ""
    """The line of the user's code that raised it."""
    evidence: tuple[EvidenceLine, ...] = ()
    has_report: bool = False
    """Whether the rank left an error report."""
    is_traceback: bool = False
    """Whether it rests on a traceback in a log."""
    end: str = ""
    """How the attempt ended then, a name of the registry, where that only followed from the failure."""
    in_short: str = ""
    """What the texts of its GPU add up to."""
    entity: str = ""
    """The sample or the file that it concerns."""
    fingerprint: str = ""
    num_cascades: int = 0
    """Other ranks that lost their connection to another one."""
    num_alike: int = 0
    """Other ranks that failed in the same way."""

    @property
    def failure_class(self) -> FailureClass:
        """What the registry says of the failure, if there is one."""
        return REGISTRY[self.failure]

    @property
    def root_text(self) -> str:
        """The rank that failed first, its host and its step, as far as they are known: `rank 1 on node1, at step 7`."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        where = " ".join(filter(None, [rank, self.host and f"on {self.host}"]))
        return f"{where}, at step {self.step}" if rank and self.step else where

    @property
    def is_from_log(self) -> bool:
        """Whether it rests on a traceback in the log of a rank that left no report."""
        return self.is_traceback and not self.has_report

    @property
    def sort_key(self) -> tuple[int, float, int]:
        """The root comes first: by role, then by time."""
        strength = {"root": 0, "either": 1, "confirmation": 2, "cascade": 3}[self.role]
        return strength, self.at, -1 if self.rank is None else self.rank
