"""The one place that runs Slurm's commands, in an environment that nothing inherited can bend."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.slurm import queries

TIMEOUT_S = 30.0
_INHERITED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|PMI|PMI2|PMIX)_|SLURM_?JOBID")
"""Options and leftovers of a job around us: inside one, sbatch would take them for wishes."""
_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT"})
"""What says where the cluster is, and who we are."""
_NO_CLUSTER = re.compile(r"Could not establish a configuration source|unable to (stat|open) slurm.*conf", re.IGNORECASE)
_NO_ANSWER = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were transmitted"
    r"|backup controller|slurm_load_\w+ error: (Unable|Socket)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


def inherited(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that would bend a submission."""
    return sorted(name for name in environ if _INHERITED.match(name) and name not in _KEPT)


def scrubbing(environ: Mapping[str, str]) -> list[str]:
    """Return a command's beginning that drops them: for who starts commands in an environment not ours to change."""
    return ["env", *(f"--unset={name}" for name in inherited(environ))]


def require(command: str, environ: Mapping[str, str]) -> None:
    """Check that a command is there.

    Raises:
        ConfigError: where it is not.
    """
    if shutil.which(command, path=environ.get("PATH")) is None:
        raise ConfigError(
            f"Slurm was asked for, but there is no `{command}` on PATH here. Go to a login node of the cluster, load its "
            "Slurm module, or run on this machine with `--cluster local`."
        )


def is_here(environ: Mapping[str, str]) -> bool:
    """Tell whether this is a host of a Slurm cluster, even of one that does not answer now."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        return False
    answer = _run(["scontrol", "ping"], environ)
    return _NO_CLUSTER.search(answer.stderr) is None


def ask(argv: Sequence[str], environ: Mapping[str, str]) -> Answer:
    """Run a command of Slurm's; what it says, good or bad, is the caller's to read.

    Raises:
        ConfigError: where the command is not there, or no cluster behind it.
        SlurmUnavailableError: where Slurm does not answer.
    """
    require(argv[0], environ)
    answer = _run(argv, environ)
    if answer.returncode != 0 and _NO_CLUSTER.search(answer.stderr):
        raise ConfigError(
            f"Slurm was asked for, but `{argv[0]}` finds no cluster here: {_first_line(answer.stderr)}. Go to a login node, "
            "set SLURM_CONF, or run on this machine with `--cluster local`."
        )
    if answer.returncode != 0 and _NO_ANSWER.search(answer.stderr):
        raise SlurmUnavailableError(f"Slurm does not answer: {argv[0]} says {_first_line(answer.stderr)!r}. Try again.")
    return answer


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> Answer:
    clean = {name: value for name, value in environ.items() if name not in set(inherited(environ))}
    try:
        done = subprocess.run(
            argv,
            env={**clean, "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(
            f"Slurm does not answer: {argv[0]} said nothing in {TIMEOUT_S:.0f} s. Try again."
        ) from error
    return Answer(done.returncode, done.stdout, done.stderr)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")


def user_name() -> str:
    """Return the name that jobs of ours run under."""
    return getpass.getuser()


def queue(user: str, environ: Mapping[str, str]) -> list[queries.QueuedEntry]:
    """Return the jobs of a user that wait or run."""
    answer = ask(queries.queue_argv(user), environ)
    if answer.returncode != 0:
        raise SlurmUnavailableError(f"squeue failed: {_first_line(answer.stderr)}")
    return queries.parse_queue(answer.stdout)


def job(job_id: str, environ: Mapping[str, str]) -> queries.JobRecord | None:
    """Return a job from the controller, or from the database where it has forgotten it; None where both have."""
    known = queries.parse_job(ask(queries.job_argv(job_id), environ).stdout)
    return known or next(reversed(accounting(job_id, environ)), None)


def accounting(job_id: str, environ: Mapping[str, str]) -> list[queries.JobRecord]:
    """Return every start of a job by the database; nothing where accounting is off, or does not answer."""
    try:
        return queries.parse_accounting(ask(queries.accounting_argv(job_id), environ).stdout)
    except (ConfigError, SlurmUnavailableError):
        return []


def test_only(script: Path, environ: Mapping[str, str]) -> queries.TestOnly:
    """Ask what would become of a script."""
    answer = ask(queries.test_only_argv(script), environ)
    return queries.parse_test_only(answer.returncode, answer.stderr)


def config(environ: Mapping[str, str]) -> queries.ClusterConfig:
    """Return what of the cluster's configuration matters to a run."""
    return queries.parse_config(ask(queries.config_argv(), environ).stdout)


def partitions(environ: Mapping[str, str]) -> list[queries.Partition]:
    """Return the partitions of the cluster."""
    return queries.parse_partitions(ask(queries.partitions_argv(), environ).stdout)


def associations(environ: Mapping[str, str]) -> list[str]:
    """Return which accounts this user may use; nothing where accounting is off."""
    try:
        return queries.parse_associations(ask(queries.associations_argv(user_name()), environ).stdout)
    except (ConfigError, SlurmUnavailableError):
        return []


def cancel(job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel a job.

    Raises:
        ConfigError: where Slurm refuses.
    """
    answer = ask(["scancel", job_id], environ)
    if answer.returncode != 0:
        raise ConfigError(f"Slurm refuses to cancel job {job_id}: {_first_line(answer.stderr)}")
