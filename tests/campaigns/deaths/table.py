"""Each death of the campaign: how a rank ends, in what workload, started by which launcher, and the right answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Workload = Literal["recipe", "loaders", "script", "process"]
"""A recipe; one with loader processes; a script that is forked; a script that is a new process."""
Place = Literal["machine", "cluster"]
NUM_RANKS = 3
"""On one machine; on the cluster two nodes have two each."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """One way to end, and the right answer."""

    how: str
    workload: Workload
    failure: str
    rank: int | None
    """That ends first; None where no rank is the only one."""
    victim: int = 0
    """The rank that the program is told to end."""
    launcher: str = "agent"
    place: Place = "machine"
    less: str = ""
    """Classes that are true, too, and say less than `failure`; with commas."""
    is_blind: bool = False
    """Whether it was written after the last change of the rules."""

    @property
    def true(self) -> set[str]:
        """All classes that are not wrong."""
        return {self.failure, *filter(None, self.less.split(","))}

    @property
    def name(self) -> str:
        return f"{self.place}-{self.launcher}-{self.workload}-{self.how}-{self.victim}"


KINDS = {
    "exception": "user-exception",
    "decoy": "user-exception",
    "thread-exception": "user-exception",
    "signal-exception": "user-exception",
    "segfault": "native-crash",
    "abort": "native-crash",
    "gil": "hang-behind",
    "sigint": "signal",
    "sigkill": "killed",
    "sigterm": "signal",
    "sigstop": "hang-behind",
    "exit": "exit-code",
    "caught": "exit-code",
    "import": "import",
    "disk": "disk-full",
    "memory": "host-memory",
    "cgroup": "host-memory",
    "port": "port",
    "dns": "dns",
    "data": "data",
    "nan": "nan",
    "hang": "hang-behind",
}
"""How a rank ends -> the class."""
OF_LOADERS = {"loader-kill": "killed", "loader-crash": "native-crash", "data": "data"}
_LESS = {"hang-behind": "hang"}
_NO_SUCH = {("recipe", "sigterm"), ("recipe", "sigint")}
"""A recipe's worker takes SIGTERM for a request to save and stop, and leaves SIGINT to the supervisor: nothing fails."""


def _made(
    how: str, failure: str, workload: Workload, victim: int, *, launcher: str = "agent", place: Place = "machine"
) -> Death:
    is_of_all = workload in {"recipe", "loaders"} and how == "nan"  # all ranks share the loss
    return Death(
        how=how,
        workload=workload,
        failure=failure,
        rank=None if is_of_all else victim,
        victim=victim,
        launcher=launcher,
        place=place,
        less=_LESS.get(failure, ""),
    )


def _on_machine() -> list[Death]:
    workloads: Sequence[Workload] = ("recipe", "script", "process")
    found = [
        _made(how, failure, workload, victim)
        for victim in range(NUM_RANKS)
        for how, failure in KINDS.items()
        for workload in workloads
        if (workload, how) not in _NO_SUCH
    ]
    loaders: Sequence[Workload] = ("loaders", "script")
    more = [
        _made(how, failure, workload, victim)
        for victim in range(NUM_RANKS)
        for how, failure in OF_LOADERS.items()
        for workload in loaders
        if (workload, how) != ("script", "data")
    ]
    return [*found, *more]


ON_MACHINE: Sequence[Death] = tuple(_on_machine())


LAUNCHERS = ("agent", "srun", "torchrun")
_ON_CLUSTER = tuple(how for how in KINDS if how not in {"disk", "decoy", "signal-exception", "caught"})
_OF_SLURM = {
    "preempt": "preempted",
    "time-limit": "time-limit",
    "node-failure": "node-failed",
    "scancel": "cancelled",
    "cancel": "cancelled",
}
_OF_CLUSTER: Sequence[tuple[Workload, int]] = (("recipe", 1), ("script", 3))
_HANGS = {how for how, failure in KINDS.items() if failure == "hang-behind"}


def _on_cluster() -> list[Death]:
    found = [
        _made(how, KINDS[how], workload, victim, launcher=launcher, place="cluster")
        for how in _ON_CLUSTER
        for launcher in LAUNCHERS
        for workload, victim in _OF_CLUSTER
        if (workload, how) not in _NO_SUCH and not (how in _HANGS and workload == "script" and launcher != "agent")
    ]
    of_slurm = [
        Death(how=how, workload="script", failure=failure, rank=None, launcher=launcher, place="cluster")
        for how, failure in _OF_SLURM.items()
        for launcher in LAUNCHERS
    ]
    return [*found, *of_slurm]


ON_CLUSTER: Sequence[Death] = tuple(_on_cluster())
