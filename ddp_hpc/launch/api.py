"""The Python interface: `ddp_hpc.submit(spec) -> Job`, the same as the command line does.

>>> import ddp_hpc
>>> spec = ddp_hpc.RunSpec(name="digits", train=ddp_hpc.TrainSpec(epochs=5))
>>> job = ddp_hpc.submit(spec, cluster="slurm")  # doctest: +SKIP
>>> job.result()["accuracy"]  # doctest: +SKIP
0.99
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import WorkerError
from ddp_hpc.launch.submission.backend import AUTO, backend_of, choose_backend, load_backend
from ddp_hpc.launch.submission.fill_unset import fill_unset
from ddp_hpc.launch.submission.removal import rename_aside
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.run.config.resolve import Resolved, flat_spec, resolve
from ddp_hpc.run.config.sources import DEFAULT
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.watch.logs import LogSelection, read_lines
from ddp_hpc.watch.queue import asker
from ddp_hpc.watch.status import RunStatus, State, read_status

_SETTINGS_SOURCE = "Python"


@dataclass(frozen=True)
class Job:
    """A run that was submitted: on this machine, or as a job of Slurm."""

    run: RunDir
    cluster: str
    """The name of the back end that holds it: `local`, `slurm`."""
    attempt: int
    job_id: str | None = None
    """Slurm's; None on this machine."""

    @property
    def state(self) -> State:
        """Where the run stands now, in the word that `ddp-hpc status` uses."""
        return self.status().state

    def status(self) -> RunStatus:
        """Return everything that `ddp-hpc status --json` prints."""
        return read_status(self.run, now=time.time(), ask=asker(os.environ, clock=time.time))

    def wait(self) -> State:
        """Return once the run has ended, with how.

        Raises:
            WorkerError: where it ended without an error report: it was killed, or never started.
        """
        if self.state not in {"finished", "cancelled"}:
            load_backend(self.cluster).wait(self.run, self.attempt, os.environ)
        return self.state

    def result(self) -> Mapping[str, float]:
        """Wait, and return the numbers of the last evaluation.

        Raises:
            WorkerError: where the run did not finish.
        """
        if self.wait() != "finished":
            status = self.status()
            raise WorkerError(
                f"The run {self.run.name} did not finish. Its state is {status.state!r}, at step {status.step}: "
                f"{status.reason or 'no reason is known'} (more in `ddp-hpc logs {self.run.path}`)"
            )
        return self.status().metrics

    def logs(self, *, rank: int | None = None, attempt: int | None = None) -> Iterator[str]:
        """Yield the lines that the run has written so far, oldest first.

        Args:
            rank: What this rank printed; unset: what the supervisor, the agent and rank zero's logger say.
            attempt: Of this attempt only, counted from 0 (without a rank: what its rank zero printed); unset: of all.

        Raises:
            ConfigError: where there is no such attempt or rank.
        """
        return read_lines(self.run, LogSelection(rank=rank, attempt=attempt))

    def stop(self) -> None:
        """Ask the run to commit a checkpoint and exit; `wait` returns once it has. Submit it again to go on.

        Raises:
            ConfigError: where it is not running.
        """
        backend_of(self.run).stop(self.run, os.environ)

    def cancel(self) -> None:
        """End the run at once, without a checkpoint; what is committed stays.

        Raises:
            ConfigError: where there is nothing to cancel.
        """
        backend_of(self.run).cancel(self.run, os.environ)


def load(
    path: str | Path, settings: Mapping[str, Any] | None = None, *, cluster: str = AUTO, site: str | None = None
) -> RunSpec:
    """Return the spec of a configuration file, by the sources and the precedence of `ddp-hpc submit`.

    Args:
        path: The YAML file.
        settings: Values that win over all others, by key: `{"train.lr": 0.05, "recipe.args.width": 8}`.
        cluster: Where the run is to go: `auto`, `local`, `slurm`; on Slurm, what a site profile says of its partition counts.
        site: A site profile, or its file; unset: the one for this host.

    Raises:
        ConfigError: for the first invalid value, with its key, its source and what it must be.
    """
    plain = {name: os.fspath(one) if isinstance(one, os.PathLike) else one for name, one in (settings or {}).items()}
    backend = choose_backend(cluster, os.environ)
    return resolve(Path(path), plain, os.environ, site=site, is_for_slurm=backend.HAS_QUEUE).spec


def submit(
    spec: RunSpec, *, cluster: str = AUTO, import_paths: Sequence[Path] | None = None, fresh: bool = False
) -> Job:
    """Start a run, or go on with it where one of that name exists.

    It starts one run. Many runs as one job array are made on the command line (`ddp-hpc submit --sweep`); a sweep's name is refused here.
    A point of a sweep is a run, so `spec` may be one with `runs_dir` set to the sweep's directory.

    Args:
        spec: What to train, and on what.
        cluster: Where to run: `local`, `slurm`; `auto` is Slurm where there is one.
        import_paths: Where the recipe's module is looked for before the installed ones; unset: the working directory.
        fresh: Start over: put what there is of the run aside, as `NAME.old-1`, and begin at step 0.

    Raises:
        ConfigError: where the input is invalid; a new run then leaves no directory behind.
        SlurmUnavailableError: where Slurm does not answer.
    """
    paths = [Path.cwd()] if import_paths is None else list(import_paths)
    backend = choose_backend(cluster, os.environ)
    sources = {key: DEFAULT.source if value is None else _SETTINGS_SOURCE for key, value in flat_spec(spec).items()}
    resolved = fill_unset(Resolved(spec, sources), os.environ, is_for_slurm=backend.HAS_QUEUE, is_fresh=fresh)
    request = SubmitRequest(resolved=resolved, import_paths=paths, environ=os.environ)
    with rename_aside(request.run, os.environ) if fresh else nullcontext():
        submission = backend.submit(request)
    return Job(submission.run, submission.backend, submission.attempt, submission.job_id)
