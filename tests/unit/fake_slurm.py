"""Slurm's commands as shell scripts: each notes its words, and says what a test has it say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

JOB = (
    "JobId={job} JobName=x UserId=ada(1) JobState={state} Reason={reason} Restarts={restarts} PreemptTime={preempted} "
    "Command=x"
)


class FakeSlurm:
    """A folder of commands; those that were not given anything to do say nothing, and succeed."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self._bin.mkdir()
        self._called = folder / "called"
        for name in ("scontrol", "sacct", "sinfo", "sbatch", "squeue", "scancel"):
            self.has(name, "true")

    @property
    def environ(self) -> Mapping[str, str]:
        return {"PATH": f"{self._bin}:/usr/bin:/bin"}

    def has(self, name: str, text: str) -> None:
        """Make a command of shell text."""
        path = self._bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self._called}\n{text}\n', encoding="utf-8")
        path.chmod(0o755)

    def knows(
        self,
        *,
        state: str = "RUNNING",
        reason: str = "None",
        restarts: int = 0,
        preempted: str = "None",
        orders: str = "true",
        restarts_then: int | None = None,
    ) -> None:
        """Have scontrol show a job; `orders` is what it does when it is told something, after which it may have restarted."""
        shown = JOB.format(job=7, state=state, reason=reason, restarts="$n", preempted=preempted)
        ordered = self._bin / "ordered"
        count = f"n={restarts}; [ -e {ordered} ] && n={restarts if restarts_then is None else restarts_then}"
        does = f"touch {ordered}; {orders}"
        self.has("scontrol", f'if [ "$2" = show ]; then {count}; echo "{shown}"; else {does}; fi')

    def knows_nodes(self, **states: str) -> None:
        """Have sinfo list nodes."""
        self.has("sinfo", "\n".join(f"printf '{node}\\037{state}\\037none\\036\\n'" for node, state in states.items()))

    def accounts(self, *ends: str) -> None:
        """Have sacct list how the starts of job 7 ended."""
        rows = [
            f"7|{state}|2099-01-01T00:00:0{number}|2099-01-01T00:00:0{number}|10|node1|None"
            for number, state in enumerate(ends)
        ]
        self.has("sacct", "\n".join(f"printf '%s\\n' '{row}' | tr '|' '\\037'" for row in rows))

    def orders(self, first_word: str = "") -> list[str]:
        """Return what was asked for, but for questions."""
        lines = self._called.read_text().removesuffix("\n").split("\n") if self._called.exists() else []
        questions = ("scontrol --oneliner show", "sacct", "sinfo", "squeue", "sbatch --test-only")
        return [line for line in lines if not line.startswith(questions) and line.startswith(first_word)]
