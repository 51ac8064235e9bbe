"""What launching asks of a workload, and what it calls in each worker process.

Training by a recipe is one workload (`recipe`). To add another, write a module with a subclass of `Workload`, write
its worker module, and add a line to `table.WORKLOADS`. Submission, supervisor, launchers and containers read no key of a
workload: they ask here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

if TYPE_CHECKING:
    from ddp_hpc.run.run_dir.ledger import Ledger
    from ddp_hpc.run.run_dir.paths import RunDir
    from ddp_hpc.run.spec import RunSpec


@dataclass(frozen=True)
class UsersCode:
    """Code of the user's own that workers import."""

    directory: Path
    """Where Python finds it."""
    needed: Path | None = None
    """The file below that directory without which no worker can start."""


@dataclass(frozen=True)
class Workload(ABC):
    """What the workers of a run do, made of the run's spec."""

    spec: RunSpec

    worker: ClassVar[str]
    """The dotted name of the module that each worker process runs: a `WorkerModule`."""
    stop_signal: ClassVar[str] = "USR2"
    """The signal by which agents and torchrun's node process ask a worker to save its state and exit: `USR2`, `TERM`.

    With `launcher=srun`, workers get SIGUSR2 in any case: srun passes that on, but ends its step at SIGTERM."""
    teardown_s: ClassVar[float | None] = None
    """How long a node's other workers may run on, after the first has exited with one of `exit_codes.GOOD_CODES`; None: no limit."""
    goes_on_here: ClassVar[bool] = False
    """Whether on one machine, too, another attempt follows a failure, where the failed one has made progress."""

    @property
    @abstractmethod
    def cpus_per_worker(self) -> int:
        """CPUs of each worker to ask a scheduler for: what the user set, or what the workload needs."""

    @property
    @abstractmethod
    def goal(self) -> Mapping[str, Any]:
        """What the run was asked to reach, as JSON has it. A run that reached it is done until it is asked for another goal."""

    @property
    @abstractmethod
    def without_progress(self) -> str:
        """What attempts have in common that made no progress, as a text: `ended without a new checkpoint`."""

    @property
    def counts_files(self) -> bool:
        """Whether files that change are progress, also where an attempt starts over and saves the same again."""
        return False

    @property
    def hash_seed(self) -> int | None:
        """The seed of Python's hashes, on which the order of sets depends, where nothing else sets PYTHONHASHSEED; None: leave it open."""
        return None

    @property
    def ends_at_nan(self) -> bool:
        """Whether a NaN in a gradient means that the run has diverged, so that it may be searched for."""
        return False

    @abstractmethod
    def progress(self, run: RunDir, ledger: Ledger, *, is_patient: bool = True) -> int:
        """Return a number that grows whenever an attempt has achieved something that the next one builds on; 0 at first.

        Failures count until it grows (`restart.max_no_progress`). Where the file system does not answer for long, the answer
        comes from `ledger` and the run's other records; without `is_patient`, where it does not answer at once.
        """

    @abstractmethod
    def progress_on_disk(self, run: RunDir) -> int | None:
        """Return the same number as the file system shows it now; None where it does not answer, or nothing shows it."""

    @abstractmethod
    def users_code(self, import_paths: Sequence[Path]) -> UsersCode | None:
        """Return the user's code, by the directories that Python may import it from; None where none is there."""

    @abstractmethod
    def input_paths(self, work_dir: Path) -> Iterator[Path]:
        """Yield the absolute paths of this host that workers may read, besides the run's directory; not all need to exist."""


class WorkerModule(Protocol):
    """The module that a worker process runs.

    It may set `OUTLIVED = True`: processes that a worker starts do not end with it, so the process that kills it has to kill them, too.
    """

    def check(self, spec: RunSpec, environ: Mapping[str, str], /) -> Iterator[str]:
        """Yield what the host that a run is submitted from cannot say, and why; start and build nothing."""

    def preload(self, run_path: str, /) -> str:
        """Import what every worker needs; return why workers must not be forked from this process, or an empty text.

        A node agent calls it once, before it starts workers; tasks and spawned workers call it each.
        """

    def main(self, run_path: str, environ: Mapping[str, str], /, *, attempt: int, listen_fd: int | None) -> int:
        """Run one worker to its end; return its exit code, one of `exit_codes`.

        The stop signals are blocked when it is called: it installs its handlers, and then unblocks them
        (`processes.unblock_signals`). Rank zero opens its log (`RunDir.rank_log`) once it handles them, and writes to it as
        long as the workers make progress. A worker that fails writes an error report first (`failure_reports.report`). `listen_fd` is the socket of rank zero that the ranks meet at; None for others.
        """


def load_worker(name: str) -> WorkerModule:
    """Import a worker's module by its dotted name."""
    return cast("WorkerModule", import_module(name))
