"""Every path of a run, named once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_RUNS_DIR = "runs"
"""Where runs live unless the user says otherwise: in the working directory."""


def settings_dirs(environment: Mapping[str, str]) -> list[Path]:
    """Return where site profiles are kept: the user's own, then the machine's."""
    home = environment.get("HOME")
    return [*([Path(home, ".config/ddp_hpc")] if home else []), Path("/etc/ddp_hpc")]


def is_folder(path: Path) -> bool:
    """Tell whether there is a folder; what cannot be looked at is none."""
    try:
        return path.is_dir()
    except OSError:  # another's home, or one without a ticket
        return False


@dataclass(frozen=True)
class RunDir:
    """The directory of one run; it outlives the jobs that work on it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration, every value with its source."""
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        """Held, by flock, as long as any process of the run lives on this host."""
        return self.path / "run.lock"

    @property
    def attempts(self) -> Path:
        """The ledger: one line an attempt's start, one its end."""
        return self.path / "attempts.jsonl"

    @property
    def submission(self) -> Path:
        """The newest job that was submitted for this run."""
        return self.path / "submission.json"

    @property
    def submission_lock(self) -> Path:
        """Held, by flock, by the process that submits the run to a queue."""
        return self.path / "submission.lock"

    @property
    def job_script(self) -> Path:
        """What sbatch got; plain `sbatch` runs it again."""
        return self.path / "job.sbatch"

    @property
    def snapshots(self) -> Path:
        """Copies of the user's code, one a submission of other code than before."""
        return self.path / "snapshots"

    @property
    def snapshot(self) -> Path:
        """A link to the newest of them, which jobs import from."""
        return self.path / "snapshot"

    @property
    def submitit(self) -> Path:
        """What submitit keeps of its jobs."""
        return self.path / "submitit"

    @property
    def progress(self) -> Path:
        """Newest step, loss, rate; replaced atomically every few seconds by rank zero."""
        return self.path / "progress.json"

    @property
    def metrics(self) -> Path:
        """One line a log interval or an evaluation, without duplicates after a resume."""
        return self.path / "metrics.jsonl"

    @property
    def superseded_metrics(self) -> Path:
        """Lines of `metrics` of steps that a later attempt had to take again, as they were."""
        return self.path / "metrics.superseded.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def console(self) -> Path:
        """What the supervisor, the agent and rank zero's logger say, of all attempts."""
        return self.path / "logs" / "console.log"

    @property
    def stop_request(self) -> Path:
        """Present: commit a checkpoint and leave."""
        return self.path / "STOP"

    @property
    def gave_up(self) -> Path:
        """Present: no supervisor could work in the last start of the job, and none has begun an attempt since."""
        return self.path / "supervisor-gave-up"

    @property
    def done(self) -> Path:
        """Present: the run has finished; holds its last step."""
        return self.path / "DONE"

    def attempt_logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def allowance(self, attempt: int) -> Path:
        """Dated to when rank zero has to move again, while it builds its recipe; holds what it is at (`failure_reports.Phase`)."""
        return self.attempt_logs(attempt) / "building"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt_logs(attempt) / f"rank-{rank}.log"

    def environment(self, attempt: int) -> Path:
        """What rank zero ran on: versions, driver, modules, packages."""
        return self.attempt_logs(attempt) / "environment.json"

    def environments(self) -> list[Path]:
        """Those that were written, of all attempts."""
        return list(self.path.glob("logs/attempt-*/environment.json"))

    def rendezvous_token(self, attempt: int) -> Path:
        """The secret that the ranks of an attempt share; no other user can read it."""
        return self.attempt_logs(attempt) / "rendezvous.token"

    def verdict(self, attempt: int) -> Path:
        """What rank zero's processes ended with, where their exit code passes through others' hands."""
        return self.attempt_errors(attempt) / "verdict.json"

    def attempt_errors(self, attempt: int) -> Path:
        return self.path / "errors" / f"attempt-{attempt}"

    def rank_error(self, attempt: int, rank: int) -> Path:
        return self.attempt_errors(attempt) / f"rank-{rank}.json"

    def stacks(self, attempt: int) -> Path:
        """Where every rank stood when an attempt hung."""
        return self.attempt_errors(attempt) / "stacks.txt"

    def agent_error(self, attempt: int, node_rank: int) -> Path:
        return self.attempt_errors(attempt) / f"agent-{node_rank}.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def rank_samples(self, attempt: int, rank: int) -> Path:
        """The sample ids of every step this rank took in this attempt."""
        return self.samples / f"attempt-{attempt}" / f"rank-{rank}.jsonl"
