"""The one place that runs Slurm's commands, in an environment that nothing inherited can bend."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import ConfigError, SlurmRefusalError, SlurmUnavailableError
from ddp_hpc.slurm import queries

TIMEOUT_S = 30.0
_INHERITED = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_"),
    *("PMI_", "PMI2_", "PMIX_"),
)
"""Options and leftovers of a job around us: inside one, sbatch would take them for wishes, and squeue write its own way."""
_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT"})
"""What says where the cluster is, and who we are."""
_NO_CLUSTER = re.compile(
    r"Could not establish a configuration source|Unable to process configuration file|unable to (stat|open) slurm.*conf",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(
    r"Unable to contact slurm controller|Unable to connect to database|Problem talking to the database"
    r"|Socket timed out|Connection refused|Zero Bytes were transmitted|backup controller"
    r"|Unexpected message received"  # what `scontrol requeue` says where the controller is away
    r"|slurm_load_\w+ error: (Unable|Socket)",
    re.IGNORECASE,
)
_NO_JOB = re.compile(r"Invalid job id", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


def inherited(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that would bend a submission."""
    return sorted(name for name in environ if name.startswith(_INHERITED) and name not in _KEPT)


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands: nothing inherited, and times as we read them."""
    dropped = set(inherited(environ))
    clean = {name: value for name, value in environ.items() if name not in dropped}
    return {**clean, "SLURM_TIME_FORMAT": "standard"}


def scrubbing(environ: Mapping[str, str]) -> list[str]:
    """Return a command's beginning that drops them: for who starts commands in an environment not ours to change."""
    return ["env", *(f"--unset={name}" for name in inherited(environ))]


def require(command: str, environ: Mapping[str, str]) -> None:
    """Check that a command is there.

    Raises:
        ConfigError: where it is not.
    """
    if shutil.which(command, path=environ.get("PATH", "")) is None:
        raise ConfigError(
            f"Slurm was asked for, but there is no `{command}` on PATH here. Go to a login node of the cluster, load its "
            "Slurm module, or run on this machine with `--cluster local`."
        )


def is_here(environ: Mapping[str, str]) -> bool:
    """Tell whether this is a host of a Slurm cluster, even of one that does not answer now."""
    path = environ.get("PATH", "")
    if shutil.which("sbatch", path=path) is None:
        return False
    if shutil.which("scontrol", path=path) is None:
        return True  # half a Slurm: what asks it says what is missing
    try:
        answer = _run(["scontrol", "ping"], environ, timeout_s=TIMEOUT_S)
    except SlurmUnavailableError:
        return True
    return _NO_CLUSTER.search(answer.stderr) is None


def is_no_answer(text: str) -> bool:
    """Tell whether a command's errors say that Slurm does not answer, rather than what it answered."""
    return _NO_ANSWER.search(text) is not None


def ask(argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run a command of Slurm's; what it says, good or bad, is the caller's to read.

    Raises:
        ConfigError: where the command is not there, or no cluster behind it.
        SlurmUnavailableError: where Slurm does not answer.
    """
    require(argv[0], environ)
    answer = _run(argv, environ, timeout_s=timeout_s)
    if answer.returncode != 0 and _NO_CLUSTER.search(answer.stderr):
        raise ConfigError(
            f"Slurm was asked for, but `{argv[0]}` finds no cluster here: {_line(answer, _NO_CLUSTER)}. Go to a login "
            "node, set SLURM_CONF, or run on this machine with `--cluster local`."
        )
    if answer.returncode != 0 and is_no_answer(answer.stderr):
        raise SlurmUnavailableError(f"Slurm does not answer: {argv[0]} says {_line(answer, _NO_ANSWER)!r}. Try again.")
    return answer


def _told(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what a command says; a failure is no answer."""
    answer = ask(argv, environ)
    if answer.returncode != 0:
        raise SlurmUnavailableError(f"Slurm gives no answer: {argv[0]} says {_line(answer)!r}.")
    return answer.stdout


def _run(argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float) -> Answer:
    try:
        done = subprocess.run(
            argv,
            env=clean_environ(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(
            f"Slurm does not answer: {argv[0]} said nothing in {timeout_s:.0f} s. Try again."
        ) from error
    return Answer(done.returncode, done.stdout, done.stderr)


_ANYTHING = re.compile(r"\S")


def _line(answer: Answer, pattern: re.Pattern[str] = _ANYTHING) -> str:
    """Return the first line of the errors that tells of something."""
    return next((line.strip() for line in answer.stderr.splitlines() if pattern.search(line)), "nothing")


def user_name() -> str:
    """Return the name that jobs of ours run under; the number, which Slurm takes too, where it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def queue(user: str, environ: Mapping[str, str]) -> list[queries.QueuedEntry]:
    """Return the jobs of a user that wait or run.

    Raises:
        SlurmUnavailableError: where Slurm does not tell.
    """
    return queries.parse_queue(_told(queries.queue_argv(user), environ))


def job(job_id: str, environ: Mapping[str, str]) -> queries.JobRecord | None:
    """Return a job from the controller, or from the database where it has forgotten it; None where both have.

    Raises:
        SlurmUnavailableError: where the controller does not tell whether it knows the job.
    """
    answer = ask(queries.job_argv(job_id), environ)
    if answer.returncode != 0 and not _NO_JOB.search(answer.stderr):
        raise SlurmUnavailableError(f"Slurm gives no answer on job {job_id}: {_line(answer)!r}.")
    return queries.parse_job(answer.stdout) or next(reversed(accounting([job_id], environ)), None)


def accounting(job_ids: Sequence[str], environ: Mapping[str, str]) -> list[queries.JobRecord]:
    """Return every start of some jobs by the database; nothing where accounting is off, or does not answer."""
    try:
        return queries.parse_accounting(_told(queries.accounting_argv(job_ids), environ))
    except (ConfigError, SlurmUnavailableError):
        return []


def test_only(script: Path, environ: Mapping[str, str]) -> queries.TestOnly:
    """Ask what would become of a script."""
    answer = ask(queries.test_only_argv(script), environ)
    return queries.parse_test_only(answer.returncode, answer.stderr)


test_only.__test__ = False  # type: ignore[attr-defined]  # pytest collects by name


def config(environ: Mapping[str, str]) -> queries.ClusterConfig:
    """Return what of the cluster's configuration matters to a run.

    Raises:
        SlurmUnavailableError: where Slurm does not tell.
    """
    return queries.parse_config(_told(queries.config_argv(), environ))


def partitions(environ: Mapping[str, str]) -> list[queries.Partition]:
    """Return the partitions of the cluster.

    Raises:
        SlurmUnavailableError: where Slurm does not tell.
    """
    return queries.parse_partitions(_told(queries.partitions_argv(), environ))


def shapes(environ: Mapping[str, str]) -> list[queries.NodeShape]:
    """Return what the nodes of each partition have.

    Raises:
        SlurmUnavailableError: where Slurm does not tell.
    """
    return queries.parse_shapes(_told(queries.shapes_argv(), environ))


def associations(environ: Mapping[str, str]) -> list[str]:
    """Return which accounts this user may use; nothing where accounting is off."""
    try:
        return queries.parse_associations(_told(queries.associations_argv(user_name()), environ))
    except (ConfigError, SlurmUnavailableError):
        return []


def cancel(job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel a job.

    Raises:
        ConfigError: where Slurm refuses.
        SlurmUnavailableError: where it does not answer.
    """
    _order(queries.cancel_argv(job_id), environ, f"to cancel job {job_id}")


def release(job_id: str, environ: Mapping[str, str]) -> None:
    """Let a held job go on.

    Raises:
        SlurmRefusalError: where Slurm refuses; its code is ESLURM_ACCESS_DENIED where an administrator holds the job.
        SlurmUnavailableError: where it does not answer.
    """
    _order(queries.release_argv(job_id), environ, f"to release job {job_id}")


def steps(job_id: str, environ: Mapping[str, str]) -> list[str]:
    """Return the steps of a job that run, without its batch script.

    Raises:
        SlurmUnavailableError: where Slurm does not tell.
    """
    return queries.parse_steps(_told(queries.steps_argv(job_id), environ))


def requeue(job_id: str, environ: Mapping[str, str]) -> None:
    """Put a job back into the queue, under its number.

    Slurm does it to a job that was cancelled, too, as long as its processes end (measured: 22.05): ask `job` first.

    Raises:
        ConfigError: where Slurm refuses: the job was submitted with `--no-requeue`, or is another's.
        SlurmUnavailableError: where it does not answer.
    """
    _order(queries.requeue_argv(job_id), environ, f"to requeue job {job_id}")


def update(job_id: str, environ: Mapping[str, str], **values: str) -> None:
    """Change fields of a job.

    Raises:
        ConfigError: where Slurm refuses; it lets the nodes of a running job be.
        SlurmUnavailableError: where it does not answer.
    """
    _order(queries.update_argv(job_id, **values), environ, f"to change job {job_id}")


def signal(job_id: str, signal_name: str, environ: Mapping[str, str], *, batch_only: bool = False) -> None:
    """Send a signal to all steps of a job, or to its batch shell alone.

    Raises:
        ConfigError: where Slurm refuses.
        SlurmUnavailableError: where it does not answer.
    """
    argv = queries.signal_argv(job_id, signal_name, batch_only=batch_only)
    _order(argv, environ, f"to signal job {job_id}")


def beside(job_id: str, node: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a command on a node of a job that runs, beside its steps; return what it printed.

    Raises:
        ConfigError: where Slurm refuses, or the command fails.
        SlurmUnavailableError: where Slurm does not answer.
    """
    return _order(queries.beside_argv(job_id, node, command), environ, f"a step beside job {job_id}")


def submit(script: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """Submit a script by sbatch alone, as from inside a job; return the job's number.

    Raises:
        ConfigError: where Slurm refuses.
        SlurmUnavailableError: where it does not answer.
    """
    return queries.parse_submitted(_order(queries.submit_argv(script, options), environ, "the job"))


def node_states(
    environ: Mapping[str, str], nodes: Sequence[str] = (), *, partition: str | None = None
) -> dict[str, str]:
    """Return the states of some nodes, or of a partition's, in Slurm's words; nothing where Slurm does not tell."""
    try:
        return queries.parse_nodes(_told(queries.nodes_argv(nodes, partition=partition), environ))
    except (ConfigError, SlurmUnavailableError):
        return {}


def _order(argv: Sequence[str], environ: Mapping[str, str], what: str) -> str:
    answer = ask(argv, environ)
    if answer.returncode != 0:
        raise SlurmRefusalError(f"Slurm refuses {what}: {_line(answer)}", queries.refusal_code(answer.stderr))
    return answer.stdout
