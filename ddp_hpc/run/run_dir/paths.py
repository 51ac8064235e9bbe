"""The paths of a run. No other module names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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


ATTEMPT, RANK_LOG = re.compile(r"attempt-(\d+)"), re.compile(r"rank-(\d+)\.log")
"""Names of the directory of an attempt, and of a log in it."""
SWEEP_LEDGER = "sweep.jsonl"
"""In a sweep's directory: its points, and the arrays of them that were sent."""


def is_sweep_dir(path: Path) -> bool:
    """Return whether this is the directory of a sweep, which has no run of its own but holds its points' runs."""
    return (path / SWEEP_LEDGER).is_file()


class RunPath:
    """Where one thing of a run lies, below its directory."""

    def __init__(self, below: str) -> None:
        self._below = below

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self._below


class _AttemptPath(RunPath):
    """The same of each attempt, or of each rank of the only one."""

    def __get__(self, run: RunDir, _: type[RunDir]) -> Callable[[int], Path]:  # type: ignore[override]
        return lambda number: run.path / self._below.format(number)


class _RankPath(RunPath):
    """The same of each rank of an attempt, or of each node."""

    def __get__(self, run: RunDir, _: type[RunDir]) -> Callable[[int, int], Path]:  # type: ignore[override]
        return lambda attempt, rank: run.path / self._below.format(attempt, rank)


@dataclass(frozen=True)
class RunDir:
    """The directory of one run, which may have several jobs."""

    path: Path

    config = RunPath("config.yaml")
    """The resolved configuration, with the source of each value."""
    lock = RunPath("run.lock")
    """Locked (flock) while any process of the run runs on this host."""
    attempts = RunPath("attempts.jsonl")
    """The ledger: one line for each attempt's start, one for its end."""
    submission = RunPath("submission.json")
    """The newest job of this run."""
    awaited = RunPath("awaited.json")
    """The runs whose end the newest job waits for."""
    submission_lock = RunPath("submission.lock")
    """Held, by flock, by the process that submits the run."""
    job_script = RunPath("job.sbatch")
    """The job script; `sbatch job.sbatch` submits it again."""
    snapshots = RunPath("snapshots")
    """Copies of the user's code, one for each submission with changed code."""
    snapshot = RunPath("snapshot")
    """A link to the newest copy, from which jobs import."""
    submitit = RunPath("submitit")
    """Files that submitit keeps for its jobs."""
    progress = RunPath("progress.json")
    """Newest step, loss and rate; rank zero replaces the file every few seconds."""
    script_progress = RunPath("script_progress.json")
    """The files that a script has saved, and how often they have changed."""
    script_report = RunPath("script_report.json")
    """What a script says of itself by `attach`: newest step, loss and rate."""
    metrics = RunPath("metrics.jsonl")
    """One line for each log interval or evaluation; steps repeated after a resume are in it once."""
    superseded_metrics = RunPath("metrics.superseded.jsonl")
    """The first lines of `metrics` for steps that a later attempt repeated."""
    digests = RunPath("digests.jsonl")
    """Digests of the training state after some steps; steps repeated after a resume are in it again."""
    timeline = RunPath("timeline.jsonl")
    """When training began in each attempt, its saves and evaluations, and the time in each phase of the loop, as rank zero notes them."""
    waits = RunPath("waits.jsonl")
    """How late each rank was in each comparison of all ranks."""
    tensorboard = RunPath("tensorboard")
    mlflow = RunPath("mlflow")
    """MLflow's database, where the user names no other."""
    recorded_as = RunPath("recorded_as.json")
    """By which id other recorders know the run."""
    console = RunPath("logs/console.log")
    """The log of supervisor, agents and rank zero, for all attempts."""
    stop_request = RunPath("STOP")
    """If it exists, the run commits a checkpoint and stops."""
    gave_up = RunPath("supervisor-gave-up")
    """If it exists, no supervisor could work in the job's last start, and none has begun an attempt since."""
    notified = RunPath("notified.jsonl")
    """The events for which the user's command (`notify.command`) was started: one line for each."""
    slow_ranks = RunPath("slow_ranks.jsonl")
    """Which ranks the others had to wait for: a line at the beginning and one at the end of each such time."""
    done = RunPath("DONE")
    """If it exists, the run has finished; it holds the last step."""
    joining_token = RunPath("joining.token")
    """The secret by which the workers of a foreign launcher know each other before they know the attempt."""
    errors = RunPath("errors")
    nccl_logs = RunPath("logs/nccl")
    """What NCCL logs where `debug.nccl` is set: one file for each process."""
    samples = RunPath("samples")
    checkpoints = RunPath("checkpoints")
    profile = RunPath("profile")
    """What a profiler has recorded of some steps (`profile.kind`)."""

    attempt_logs = _AttemptPath("logs/attempt-{}")
    allowance = _AttemptPath("logs/attempt-{}/building")
    """While rank zero builds its recipe: a file whose modification time is the deadline for that.

    It holds the worker's phase (`failure_reports.Phase`)."""
    rank_log = _RankPath("logs/attempt-{}/rank-{}.log")
    launches = _RankPath("logs/attempt-{}/rank-{}.launches.json")
    """When a rank has launched its newest collectives, to find slow ranks."""
    machine_use = _RankPath("logs/attempt-{}/node-{}.machine.jsonl")
    """How busy the GPUs and CPUs of a node are, and how much memory is used: a record a minute."""
    remark = _RankPath("logs/attempt-{}/rank-{}.remark")
    """What a rank has to say of a run that has finished."""
    script_asked = _RankPath("logs/attempt-{}/rank-{}.asked")
    """There if this rank's script exited with a code that asks for another attempt, and had not been asked to stop."""
    script_ended = _RankPath("logs/attempt-{}/rank-{}.ended")
    """There when this rank's script has ended, so that it needs the store at rank zero no more."""
    rank_end = _RankPath("logs/attempt-{}/rank-{}.end.json")
    """How this rank's process ended, where it ended badly (`failure_reports.RankEnd`)."""
    torch_error = _RankPath("logs/attempt-{}/rank-{}.error.json")
    """Where `torch.distributed.elastic` writes the exception of a script (TORCHELASTIC_ERROR_FILE)."""
    environment = _AttemptPath("logs/attempt-{}/environment.json")
    """What rank zero ran on: versions, driver, modules, packages."""
    inputs = _AttemptPath("logs/attempt-{}/inputs.json")
    """What an attempt computed with: its world, its configuration, its code."""
    rendezvous_token = _AttemptPath("logs/attempt-{}/rendezvous.token")
    """The secret that the ranks of an attempt share. No other user can read it."""
    missing_ranks = _AttemptPath("logs/attempt-{}/missing-ranks.json")
    """Which ranks the others wait for, while an attempt begins; it stays where they never come."""
    meeting = _AttemptPath("logs/attempt-{}/meeting.json")
    """Where the ranks of an attempt meet, and why there."""
    network = _AttemptPath("logs/attempt-{}/network.json")
    """What a probe of the network between the nodes found at the end of an attempt."""
    preflight = _AttemptPath("logs/attempt-{}/preflight.json")
    """What the check of the job's nodes found before an attempt."""
    preflight_files = _AttemptPath("logs/attempt-{}/preflight")
    """Where each node writes a file during that check, which all others read."""
    rank_zero_exit = _AttemptPath("errors/attempt-{}/rank_zero_exit.json")
    """Rank zero's exit code, for launchers (srun, torchrun) that do not pass it on unchanged."""
    attempt_errors = _AttemptPath("errors/attempt-{}")
    rank_error = _RankPath("errors/attempt-{}/rank-{}.json")
    stacks = _AttemptPath("errors/attempt-{}/stacks.txt")
    """The stacks of all ranks when an attempt hung."""
    hang_record = _RankPath("errors/attempt-{}/hang/rank-{}.json")
    """What a rank was doing when it made no progress."""
    difference = _AttemptPath("errors/attempt-{}/ranks-differ.json")
    """What the ranks had after a step at which all must be equal, and were not."""
    agent_error = _RankPath("errors/attempt-{}/agent-{}.json")
    rank_samples = _RankPath("samples/attempt-{}/rank-{}.jsonl")
    """The sample ids of every step of this rank in this attempt."""
    profile_trace = _RankPath("profile/attempt-{}.rank-{}.trace.json.gz")
    """A rank's trace, for Perfetto and chrome://tracing."""
    profile_table = _RankPath("profile/attempt-{}.rank-{}.operators.txt")
    """The operators of these steps by the time that they took, as text."""

    replay_request = RunPath("replay.json")
    """In the private directory of a replay: which step it ends at, and what its workers write down."""

    rank_trace = _AttemptPath("trace/rank-{}.jsonl")
    """What a rank of a replay has written down of its steps, in their order (`train.engine.replay_trace`)."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def word(self) -> str:
        """What to type for this run after `ddp-hpc VERB`, in a message: right in whatever directory it is, and whatever `runs_dir` is set."""
        import shlex  # late: no command needs it otherwise (cli/__init__.py)

        return shlex.quote(str(self.path))

    @property
    def code_copies(self) -> list[Path]:
        """Where the job's copy of the code may lie: in the run's directory; for a point, in its sweep's."""
        return [place for run in (self, RunDir(self.path.parent)) for place in (run.snapshot, run.snapshots)]

    def recorder_log(self, attempt: int, recorder: str) -> Path:
        """What the process says that sends the metrics to a recorder."""
        return self.attempt_logs(attempt) / f"recorder-{recorder}.log"

    def recorder_lock(self, recorder: str) -> Path:
        """Locked by the one process that sends the metrics to a recorder."""
        return self.console.with_name(f"recorder-{recorder}.lock")

    def machine_use_paths(self, attempt: int) -> list[Path]:
        """Those files of all nodes."""
        return sorted(self.attempt_logs(attempt).glob("node-*.machine.jsonl"))

    def environment_paths(self) -> list[Path]:
        """The recorded environments of all attempts."""
        return list(self.path.glob("logs/attempt-*/environment.json"))
