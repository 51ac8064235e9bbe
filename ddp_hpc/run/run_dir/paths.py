"""The paths of a run. No other module names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_RUNS_DIR = "runs"
"""Default of `runs_dir`, below the working directory."""


def settings_dirs(environment: Mapping[str, str]) -> list[Path]:
    """Return the settings directories, with site profiles: the user's, then the machine's."""
    home = environment.get("HOME")
    return [*([Path(home, ".config/ddp_hpc")] if home else []), Path("/etc/ddp_hpc")]


def is_folder(path: Path) -> bool:
    """Tell whether a directory exists and can be read."""
    try:
        return path.is_dir()
    except OSError:  # no permission, for instance without a Kerberos ticket
        return False


SWEEP_LEDGER = "sweep.jsonl"
"""In a sweep's directory: its points, and the arrays of them that were sent."""


def holds_sweep(path: Path) -> bool:
    """Return whether this is the directory of a sweep, which has no run of its own but holds its points' runs."""
    return (path / SWEEP_LEDGER).is_file()


@dataclass(frozen=True)
class RunDir:
    """The directory of one run, which may have several jobs."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def word(self) -> str:
        """What to type for this run after `ddp-hpc VERB`, in a message: right in whatever directory it is, and whatever `runs_dir` is set."""
        import shlex  # late: no command needs it otherwise (cli/quick_start.py)

        return shlex.quote(str(self.path))

    @property
    def config(self) -> Path:
        """The resolved configuration, with the source of each value."""
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        """Locked (flock) while any process of the run runs on this host."""
        return self.path / "run.lock"

    @property
    def attempts(self) -> Path:
        """The ledger: one line for each attempt's start, one for its end."""
        return self.path / "attempts.jsonl"

    @property
    def submission(self) -> Path:
        """The newest job of this run."""
        return self.path / "submission.json"

    @property
    def awaited(self) -> Path:
        """The runs whose end the newest job waits for."""
        return self.path / "awaited.json"

    @property
    def submission_lock(self) -> Path:
        """Held, by flock, by the process that submits the run."""
        return self.path / "submission.lock"

    @property
    def job_script(self) -> Path:
        """The job script; `sbatch job.sbatch` submits it again."""
        return self.path / "job.sbatch"

    @property
    def snapshots(self) -> Path:
        """Copies of the user's code, one for each submission with changed code."""
        return self.path / "snapshots"

    @property
    def snapshot(self) -> Path:
        """A link to the newest copy, from which jobs import."""
        return self.path / "snapshot"

    @property
    def copies(self) -> list[Path]:
        """Where the job's copy of the code may lie: in the run's directory; for a point, in its sweep's."""
        return [place for run in (self, RunDir(self.path.parent)) for place in (run.snapshot, run.snapshots)]

    @property
    def submitit(self) -> Path:
        """Files that submitit keeps for its jobs."""
        return self.path / "submitit"

    @property
    def progress(self) -> Path:
        """Newest step, loss and rate; rank zero replaces the file every few seconds."""
        return self.path / "progress.json"

    @property
    def script_progress(self) -> Path:
        """The files that a script has saved, and how often they have changed."""
        return self.path / "script_progress.json"

    @property
    def script_report(self) -> Path:
        """What a script says of itself by `attach`: newest step, loss and rate."""
        return self.path / "script_report.json"

    @property
    def metrics(self) -> Path:
        """One line for each log interval or evaluation; steps repeated after a resume are in it once."""
        return self.path / "metrics.jsonl"

    @property
    def superseded_metrics(self) -> Path:
        """The first lines of `metrics` for steps that a later attempt repeated."""
        return self.path / "metrics.superseded.jsonl"

    @property
    def digests(self) -> Path:
        """Digests of the training state after some steps; steps repeated after a resume are in it again."""
        return self.path / "digests.jsonl"

    @property
    def timeline(self) -> Path:
        """When training began in each attempt, its saves and evaluations, and the time in each phase of the loop, as rank zero notes them."""
        return self.path / "timeline.jsonl"

    @property
    def waits(self) -> Path:
        """How late each rank was in each comparison of all ranks."""
        return self.path / "waits.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def mlflow(self) -> Path:
        """MLflow's database, where the user names no other."""
        return self.path / "mlflow"

    @property
    def recorded_as(self) -> Path:
        """By which id other recorders know the run."""
        return self.path / "recorded_as.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def console(self) -> Path:
        """The log of supervisor, agents and rank zero, for all attempts."""
        return self.path / "logs" / "console.log"

    @property
    def stop_request(self) -> Path:
        """If it exists, the run commits a checkpoint and stops."""
        return self.path / "STOP"

    @property
    def gave_up(self) -> Path:
        """If it exists, no supervisor could work in the job's last start, and none has begun an attempt since."""
        return self.path / "supervisor-gave-up"

    @property
    def notified(self) -> Path:
        """The events for which the user's command (`notify.command`) was started: one line for each."""
        return self.path / "notified.jsonl"

    @property
    def slow_ranks(self) -> Path:
        """Which ranks the others had to wait for: a line at the beginning and one at the end of each such time."""
        return self.path / "slow_ranks.jsonl"

    @property
    def done(self) -> Path:
        """If it exists, the run has finished; it holds the last step."""
        return self.path / "DONE"

    def attempt_logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def allowance(self, attempt: int) -> Path:
        """While rank zero builds its recipe: a file whose modification time is the deadline for that.

        It holds the worker's phase (`failure_reports.Phase`).
        """
        return self.attempt_logs(attempt) / "building"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt_logs(attempt) / f"rank-{rank}.log"

    def recorder_log(self, attempt: int, recorder: str) -> Path:
        """What the process says that sends the metrics to a recorder."""
        return self.attempt_logs(attempt) / f"recorder-{recorder}.log"

    def recorder_lock(self, recorder: str) -> Path:
        """Locked by the one process that sends the metrics to a recorder."""
        return self.console.with_name(f"recorder-{recorder}.lock")

    def launches(self, attempt: int, rank: int) -> Path:
        """When a rank has launched its newest collectives, to find slow ranks."""
        return self.attempt_logs(attempt) / f"rank-{rank}.launches.json"

    def machine_use(self, attempt: int, node_rank: int) -> Path:
        """How busy the GPUs and CPUs of a node are, and how much memory is used: a record a minute."""
        return self.attempt_logs(attempt) / f"node-{node_rank}.machine.jsonl"

    def machine_uses(self, attempt: int) -> list[Path]:
        """Those files of all nodes."""
        return sorted(self.attempt_logs(attempt).glob("node-*.machine.jsonl"))

    def remark(self, attempt: int, rank: int) -> Path:
        """What a rank has to say of a run that has finished."""
        return self.attempt_logs(attempt) / f"rank-{rank}.remark"

    def script_asked(self, attempt: int, rank: int) -> Path:
        """There if this rank's script exited with a code that asks for another attempt, and had not been asked to stop."""
        return self.attempt_logs(attempt) / f"rank-{rank}.asked"

    def script_ended(self, attempt: int, rank: int) -> Path:
        """There when this rank's script has ended, so that it needs the store at rank zero no more."""
        return self.attempt_logs(attempt) / f"rank-{rank}.ended"

    def rank_end(self, attempt: int, rank: int) -> Path:
        """How this rank's process ended, where it ended badly (`rank_ends`)."""
        return self.attempt_logs(attempt) / f"rank-{rank}.end.json"

    def torch_error(self, attempt: int, rank: int) -> Path:
        """Where `torch.distributed.elastic` writes the exception of a script (TORCHELASTIC_ERROR_FILE)."""
        return self.attempt_logs(attempt) / f"rank-{rank}.error.json"

    def environment(self, attempt: int) -> Path:
        """What rank zero ran on: versions, driver, modules, packages."""
        return self.attempt_logs(attempt) / "environment.json"

    def inputs(self, attempt: int) -> Path:
        """What an attempt computed with: its world, its configuration, its code."""
        return self.attempt_logs(attempt) / "inputs.json"

    def environments(self) -> list[Path]:
        """The recorded environments of all attempts."""
        return list(self.path.glob("logs/attempt-*/environment.json"))

    def rendezvous_token(self, attempt: int) -> Path:
        """The secret that the ranks of an attempt share. No other user can read it."""
        return self.attempt_logs(attempt) / "rendezvous.token"

    @property
    def joining_token(self) -> Path:
        """The secret by which the workers of a foreign launcher know each other before they know the attempt."""
        return self.path / "joining.token"

    def rank_zero_exit(self, attempt: int) -> Path:
        """Rank zero's exit code, for launchers (srun, torchrun) that do not pass it on unchanged."""
        return self.attempt_errors(attempt) / "rank_zero_exit.json"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    def attempt_errors(self, attempt: int) -> Path:
        return self.errors / f"attempt-{attempt}"

    def rank_error(self, attempt: int, rank: int) -> Path:
        return self.attempt_errors(attempt) / f"rank-{rank}.json"

    def stacks(self, attempt: int) -> Path:
        """The stacks of all ranks when an attempt hung."""
        return self.attempt_errors(attempt) / "stacks.txt"

    def missing_ranks(self, attempt: int) -> Path:
        """Which ranks the others wait for, while an attempt begins; it stays where they never come."""
        return self.attempt_logs(attempt) / "missing-ranks.json"

    def meeting(self, attempt: int) -> Path:
        """Where the ranks of an attempt meet, and why there."""
        return self.attempt_logs(attempt) / "meeting.json"

    def network(self, attempt: int) -> Path:
        """What a probe of the network between the nodes found at the end of an attempt."""
        return self.attempt_logs(attempt) / "network.json"

    @property
    def nccl_logs(self) -> Path:
        """What NCCL logs where `debug.nccl` is set: one file for each process."""
        return self.path / "logs" / "nccl"

    def preflight(self, attempt: int) -> Path:
        """What the check of the job's nodes found before an attempt."""
        return self.attempt_logs(attempt) / "preflight.json"

    def preflight_files(self, attempt: int) -> Path:
        """Where each node writes a file during that check, which all others read."""
        return self.attempt_logs(attempt) / "preflight"

    def hang_record(self, attempt: int, rank: int) -> Path:
        """What a rank was doing when it made no progress."""
        return self.attempt_errors(attempt) / "hang" / f"rank-{rank}.json"

    def difference(self, attempt: int) -> Path:
        """What the ranks had after a step at which all must be equal, and were not."""
        return self.attempt_errors(attempt) / "ranks-differ.json"

    def attempts_that_differed(self) -> list[int]:
        """The attempts of which there is such a record."""
        names = (path.parent.name for path in self.errors.glob("attempt-*/ranks-differ.json"))
        numbers = (name.removeprefix("attempt-") for name in names)
        return [int(number) for number in numbers if number.isdecimal()]

    def agent_error(self, attempt: int, node_rank: int) -> Path:
        return self.attempt_errors(attempt) / f"agent-{node_rank}.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def rank_samples(self, attempt: int, rank: int) -> Path:
        """The sample ids of every step of this rank in this attempt."""
        return self.samples / f"attempt-{attempt}" / f"rank-{rank}.jsonl"

    @property
    def profile(self) -> Path:
        """What a profiler has recorded of some steps (`profile.kind`)."""
        return self.path / "profile"

    def profile_trace(self, attempt: int, rank: int) -> Path:
        """A rank's trace, for Perfetto and chrome://tracing."""
        return self.profile / f"attempt-{attempt}.rank-{rank}.trace.json.gz"

    def profile_table(self, attempt: int, rank: int) -> Path:
        """The operators of these steps by the time that they took, as text."""
        return self.profile / f"attempt-{attempt}.rank-{rank}.operators.txt"

    def profile_note(self, attempt: int, rank: int) -> Path:
        """That a rank was to record some steps, and why it has not."""
        return self.profile / f"attempt-{attempt}.rank-{rank}.asked.json"

    def nsys_report(self, attempt: int, rank: int) -> Path:
        """What Nsight Systems has recorded of a rank; where nsys lacks its importer, `.qdstrm` stands in the place of `.nsys-rep`."""
        return self.profile / f"attempt-{attempt}.rank-{rank}.nsys-rep"

    @property
    def replay_request(self) -> Path:
        """In the private directory of a replay: which step it ends at, and what its workers write down."""
        return self.path / "replay.json"

    def rank_trace(self, rank: int) -> Path:
        """What a rank of a replay has written down of its steps."""
        return self.path / "trace" / f"rank-{rank}.jsonl"
