"""What was seen of a run: its attempts, its output, its files. Plain values, from which all verdicts are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddp_hpc.prove.certify.output_lines import PrintedLine
from ddp_hpc.prove.certify.saved_files import Contents

SignalAction = Literal["", "default", "ignored", "caught"]
"""What a script does with a signal, as the kernel says; empty where no signal was sent."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """A saved state was written to its end."""

    path: str
    num_lines: int
    """How many lines rank zero had printed before."""
    at: float
    contents: Contents | None = None
    """None where it was gone again when it was to be read."""
    in_place: bool = False
    """Whether it was written under its own name, and not under another one and renamed."""


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One attempt of a run."""

    ending: str = ""
    """As in the ledger: finished, stopped, failed; `hung` where certify ended it."""
    reason: str = ""
    lines: tuple[PrintedLine, ...] = ()
    """What rank zero printed."""
    logs: Mapping[int, str] = field(default_factory=dict)
    """The end of each rank's log."""
    failed_ranks: Mapping[int, str] = field(default_factory=dict)
    """The exceptions of ranks that failed."""
    lost_ranks: frozenset[int] = frozenset()
    """Ranks that failed because they lost the connection to another."""
    reads: tuple[str, ...] = ()
    """Saved states that were read before this attempt wrote them, and before the first position was printed."""
    saves: tuple[Save, ...] = ()
    left_behind: tuple[str, ...] = ()
    """Command lines of processes that outlived the attempt."""
    script_s: float = 0.0
    """How long the script's processes were there."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault at the moment at which it was injected."""

    attempt: int
    """The number of the attempt."""
    at_line: int
    """How many lines rank zero had printed."""
    at: float = 0.0
    signal_action: SignalAction = ""
    half_written: tuple[str, ...] = ()
    """Saved states that ended before their end when the ranks had gone."""
    present: tuple[str, ...] = ()
    """Saved states that were whole then, the oldest first."""
    was_in_save: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, from its first attempt to its end."""

    outcome: Literal["finished", "failed", "hung", "untouched"]
    """`untouched`: it finished before the moment of the fault came."""
    attempts: tuple[AttemptRecord, ...] = ()
    injected: InjectedFault | None = None
    final: Mapping[str, Contents] = field(default_factory=dict)
    """The files that it has made or changed."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Of a run that hung: each rank's, innermost frame first."""
    seconds: float = 0.0
    longest_silence_s: float = 0.0
