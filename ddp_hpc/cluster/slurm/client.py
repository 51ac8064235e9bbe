"""Run Slurm's commands, without the variables of a surrounding job. No other module runs them."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ddp_hpc.base.errors import ConfigError, SlurmBusyError, SlurmRefusalError, SlurmUnavailableError
from ddp_hpc.cluster.slurm import queries
from ddp_hpc.cluster.slurm.allocation import CLUSTER_VARIABLES

TIMEOUT_S = 30.0
_SALLOC_END_S = 20.0
"""How long salloc may take to give its job back."""
_SLURM_PREFIXES = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_"),
    *("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_"),
    *("PMI_", "PMI2_", "PMIX_"),
)
"""Variables that a job sets, and defaults of a user: sbatch would read them as options, and squeue would print other columns."""
_NO_CLUSTER = re.compile(
    r"Could not establish a configuration source|Unable to process configuration file|unable to (stat|open) slurm.*conf",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(
    r"Unable to contact slurm controller|Unable to connect to database|Problem talking to the database"
    r"|Socket timed out|Connection refused|Zero Bytes were transmitted|backup controller"
    r"|Protocol authentication error|Munge encode failed"  # munged restarts on this host
    r"|Unexpected message received"  # `scontrol requeue` prints this while the controller is down
    r"|slurm_load_\w+ error: (Unable|Socket)",
    re.IGNORECASE,
)
LIMIT_PATTERN = re.compile(
    r"submit\w* ?limit|Resource temporarily unavailable|Invalid job array specification", re.IGNORECASE
)
"""What sbatch prints where too many jobs are submitted: `QOSMaxSubmitJobPerUserLimit`, or only `job submit limit`; and where the
controller has all the jobs that it may have (MaxJobCount), or takes fewer tasks in one array (max_array_tasks)."""
_BUSY = re.compile(r"sleeping and retrying", re.IGNORECASE)
"""What sbatch prints where the controller accepts no job now; then it asks again, for up to two minutes."""
_NO_JOB = re.compile(r"Invalid job id|^Job \S+ not found", re.IGNORECASE | re.MULTILINE)
"""The second, before Slurm 25 on the standard output: a task that ended MinJobAge ago, of an array of which other tasks live."""

Answer = subprocess.CompletedProcess[str]


def inherited_names(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that would change what Slurm's commands do."""
    return sorted(name for name in environ if name.startswith(_SLURM_PREFIXES) and name not in CLUSTER_VARIABLES)


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands: without a job's variables, with times as `times` reads them, and with whole lists of tasks."""
    dropped = set(inherited_names(environ))
    clean = {name: value for name, value in environ.items() if name not in dropped}
    return {**clean, "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}


def without_inherited_argv(environ: Mapping[str, str]) -> list[str]:
    """Return `env --unset=...`, to put before a command that another library (submitit) starts in our environment."""
    return ["env", *(f"--unset={name}" for name in inherited_names(environ))]


def refuse_other_cluster(own: str, environ: Mapping[str, str]) -> None:
    """Refuse a cluster that a site's module has set: jobs, and each question on them, go to this host's own one."""
    for variable in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
        if own and environ.get(variable, own).lower() not in {"", own.lower()}:  # Slurm keeps names in lower case
            raise ConfigError(
                f"{variable} is {environ[variable]!r}, but this host's Slurm cluster is {own}, and ddp-hpc submits to that one alone. Submit on a login "
                f"node of {environ[variable]}; or unset {variable} to submit to {own}."
            )


def require(command: str, environ: Mapping[str, str]) -> None:
    """Check that a command of Slurm is on PATH."""
    if shutil.which(command, path=environ.get("PATH", "")) is None:
        raise ConfigError(
            f"ddp-hpc needs Slurm's `{command}`, but PATH on this host has none. Go to a login node of the cluster, load its "
            "Slurm module, or run on this machine with `--cluster local`."
        )


def is_here(environ: Mapping[str, str]) -> bool:
    """Tell whether this host belongs to a Slurm cluster, even if the controller does not answer now."""
    path = environ.get("PATH", "")
    if shutil.which("sbatch", path=path) is None:
        return False
    if shutil.which("scontrol", path=path) is None:
        return True  # an incomplete installation: the next command that needs it says what is missing
    try:
        return controller(environ) != "none"
    except SlurmUnavailableError:
        return True


def _finds_no_cluster(answer: Answer) -> bool:
    # A command that has no slurm.conf on this host asks the controller for it (https://slurm.schedmd.com/configless_slurm.html).
    return _NO_CLUSTER.search(answer.stderr) is not None and not is_no_answer(answer.stderr)


def is_no_answer(text: str) -> bool:
    """Tell whether a command failed because Slurm does not answer."""
    return _NO_ANSWER.search(text) is not None


def ask(argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S, stdin: str = "") -> Answer:
    """Run a command of Slurm and return its answer, which the caller checks; a nonzero exit code does not raise."""
    require(argv[0], environ)
    answer = _run(argv, clean_environ(environ), timeout_s=timeout_s, stdin=stdin)
    if answer.returncode != 0 and is_no_answer(answer.stderr):
        raise SlurmUnavailableError(
            f"Slurm does not answer: `{argv[0]}` prints {_line(answer, _NO_ANSWER)!r}. Try again later."
        )
    if answer.returncode != 0 and _finds_no_cluster(answer):
        raise ConfigError(
            f"ddp-hpc needs Slurm, but `{argv[0]}` finds no cluster on this host: {_line(answer, _NO_CLUSTER)}. Go to a login "
            "node, set SLURM_CONF, or run on this machine with `--cluster local`."
        )
    return answer


def _stdout(argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> str:
    answer = ask(argv, environ, timeout_s=timeout_s)
    if answer.returncode != 0:
        raise SlurmUnavailableError(
            f"Slurm's `{argv[0]}` failed: {_line(answer)}. Try again; if it fails again, show this line to your cluster's support."
        )
    return answer.stdout


def _run(
    argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float, stdin: str = "", late: str = ""
) -> Answer:
    """Run a command; `late` is the message of the error where it does not end in time."""
    try:
        return subprocess.run(
            argv,
            env=environ,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        # Python gives what it has read as bytes, `text` or not: https://docs.python.org/3/library/subprocess.html#subprocess.TimeoutExpired
        printed = Answer(argv, 1, "", error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else "")
        if _BUSY.search(printed.stderr):
            raise SlurmBusyError(
                f"Slurm accepts no job at the moment: `{argv[0]}` prints {_line(printed, _BUSY)!r}, and did not end within {timeout_s:.0f} s. Try again later."
            ) from error
        late = late or f"Slurm does not answer: `{argv[0]}` did not end within {timeout_s:.0f} s. Try again later."
        raise SlurmUnavailableError(late) from error


_ERROR, _ANYTHING = re.compile(r"\berror:", re.IGNORECASE), re.compile(r"\S")


def _line(answer: Answer, *patterns: re.Pattern[str]) -> str:
    """Return the first line of the standard error that fits the first pattern, or else the next one; a site may print lines before."""
    lines = answer.stderr.splitlines()
    found = (line.strip() for pattern in patterns or (_ERROR, _ANYTHING) for line in lines if pattern.search(line))
    return next(found, "it printed no error")


def user_name() -> str:
    """Return this user's name, or the number if there is no name; Slurm takes both."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def queue(environ: Mapping[str, str]) -> list[queries.QueuedEntry]:
    """Return this user's jobs that are pending or running."""
    return queries.parse_queue(_stdout(queries.queue_argv(user_name()), environ))


def newest_job_of_script(folder: Path, name: str, environ: Mapping[str, str], *, after: Iterable[str]) -> str | None:
    """Return the newest job in the queue whose script lies in a directory and has a name that begins so (`/job.sbatch`), `after` all these jobs."""
    oldest = max((int(one.partition("_")[0]) for one in after), default=0)  # which may take minutes to end
    scripts = queries.parse_job_scripts(_stdout(queries.job_scripts_argv(user_name()), environ))
    folders = {job: text.rpartition(name)[0] for job, text in scripts.items() if int(job) > oldest}
    found = (job for job, where in folders.items() if where and Path(where).resolve() == folder.resolve())
    return max(found, key=int, default=None)


def job(job_id: str, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> queries.JobRecord | None:
    """Return a job as the controller knows it, or else the accounting database; None if neither knows it."""
    answer = ask(queries.job_argv(job_id), environ, timeout_s=timeout_s)
    if answer.returncode != 0 and not _NO_JOB.search(f"{answer.stderr}\n{answer.stdout}"):
        raise SlurmUnavailableError(
            f"Slurm does not say whether it knows job {job_id}: `scontrol show job` failed: {_line(answer)}. Try again later."
        )
    found = queries.parse_job(answer.stdout) or next(reversed(accounting([job_id], environ, timeout_s=timeout_s)), None)
    if found is None and answer.returncode == 0:
        raise SlurmUnavailableError(
            f"Slurm does not say whether it knows job {job_id}: `scontrol show job` printed {answer.stdout[:200]!r}. Try again later."
        )
    return found


def accounting(
    job_ids: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S
) -> list[queries.JobRecord]:
    """Return every start of some jobs from the accounting database; empty if accounting is off or does not answer."""
    with suppress(ConfigError, SlurmUnavailableError):
        return queries.parse_accounting(_stdout(queries.accounting_argv(job_ids), environ, timeout_s=timeout_s))
    return []


def estimate_start(
    script: Path | str, environ: Mapping[str, str], options: Sequence[str] = (), *, timeout_s: float = TIMEOUT_S
) -> queries.Estimate:
    """Ask Slurm when it would start a job script (its path or its text), or why it would refuse it; options win over its lines."""
    text, path = ("", script) if isinstance(script, Path) else (script, None)
    argv = ["sbatch", "--test-only", *options, *([str(path)] if path else [])]
    answer = ask(argv, environ, timeout_s=timeout_s, stdin=text)
    return queries.parse_test_only(answer.returncode, answer.stderr)


def config(environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> queries.ClusterConfig:
    """Return the parts of the cluster's configuration that matter to a run."""
    return queries.parse_config(_stdout(queries.CONFIG_ARGV, environ, timeout_s=timeout_s))


def partitions(environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> list[queries.Partition]:
    """Return the partitions of the cluster."""
    return queries.parse_partitions(_stdout(queries.PARTITIONS_ARGV, environ, timeout_s=timeout_s))


def node_shapes(environ: Mapping[str, str]) -> list[queries.NodeShape]:
    """Return what the nodes of each partition have."""
    return queries.parse_node_shapes(_stdout(queries.NODE_SHAPES_ARGV, environ))


def accounts(environ: Mapping[str, str]) -> list[str]:
    """Return the accounts as texts, `lab (QOS high, low)`; empty if accounting is off or does not answer."""
    with suppress(ConfigError, SlurmUnavailableError):
        return [one.words for one in associations(environ)]
    return []


def cancel(job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel a pending or running job. scancel does not fail for a job that has ended."""
    _run_change(["scancel", job_id], environ, f"to cancel job {job_id}")


def cancel_pending(job_id: str, environ: Mapping[str, str]) -> None:
    """Cancel the tasks of a job array that still wait; those that run go on."""
    _run_change(["scancel", "--state=PENDING", job_id], environ, f"to cancel the waiting tasks of job {job_id}")


def release(job_id: str, environ: Mapping[str, str]) -> None:
    """Release a held job; the code of Slurm's refusal is ESLURM_ACCESS_DENIED if an administrator holds the job."""
    _run_change(["scontrol", "release", job_id], environ, f"to release job {job_id}")


def steps(job_id: str, environ: Mapping[str, str]) -> list[str]:
    """Return the running steps of a job, without the batch script."""
    return queries.parse_steps(_stdout(queries.steps_argv(job_id), environ))


def requeue(job_id: str, environ: Mapping[str, str]) -> None:
    """Put a job back into the queue, under the same job id; Slurm ends its processes."""
    # A race: Slurm also requeues a job that was cancelled while its processes are still ending (measured: 22.05), and so
    # undoes the user's scancel. Callers ask for the job's state first.
    _run_change(["scontrol", "requeue", job_id], environ, f"to requeue job {job_id}")


def update(job_id: str, environ: Mapping[str, str], **values: str) -> None:
    """Change fields of a job, by scontrol's names (`StartTime="now"`). Slurm never changes the nodes of a running job."""
    changes = [f"{key}={value}" for key, value in values.items()]
    _run_change(["scontrol", "update", f"JobId={job_id}", *changes], environ, f"to change job {job_id}")


def signal(job_id: str, signal_name: str, environ: Mapping[str, str], *, batch_only: bool = False) -> None:
    """Send a signal to all steps of a job, or to its batch shell alone."""
    argv = ["scancel", f"--signal={signal_name}", *(["--batch"] if batch_only else []), job_id]
    _run_change(argv, environ, f"to signal job {job_id}")


def run_in_job(job_id: str, node: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a command on a node of a running job, in a step that shares the resources of its other steps; return what it printed."""
    # Without --overlap, the step would wait until the training's step ends, which has all CPUs of the job:
    # https://slurm.schedmd.com/srun.html#OPT_overlap
    where = [f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1"]
    argv = ["srun", *where, "--overlap", "--quiet", "--input=none", *command]
    return _run_change(argv, environ, f"to run `{command[0]}` in job {job_id} on {node}")


def submit(script: Path, environ: Mapping[str, str], options: Sequence[str] = (), arguments: Sequence[str] = ()) -> str:
    """Submit a script with its arguments, as a job does for its successor, and a sweep for its arrays; return the job id.

    Options win over the script's `#SBATCH` lines.
    """
    argv = ["sbatch", "--parsable", *options, str(script), *arguments]
    return queries.parse_submitted(_run_change(argv, environ, "the job"))


def nodes(
    environ: Mapping[str, str], names: Sequence[str] = (), *, partition: str | None = None, timeout_s: float = TIMEOUT_S
) -> list[queries.NodeState]:
    """Return the states of some nodes, of a partition's, or of all, with the reasons why they are out of service."""
    return queries.parse_nodes(_stdout(queries.nodes_argv(names, partition=partition), environ, timeout_s=timeout_s))


def node_states(
    environ: Mapping[str, str], names: Sequence[str] = (), *, partition: str | None = None
) -> dict[str, str]:
    """Return Slurm's states of nodes, as `nodes` does; empty if Slurm does not answer."""
    with suppress(ConfigError, SlurmUnavailableError):
        return {one.node: one.state for one in nodes(environ, names, partition=partition)}
    return {}


def associations(environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> list[queries.Association]:
    """Return which accounts this user may use, where, and with which QOS."""
    argv = queries.associations_argv(user_name())
    return queries.parse_associations(_stdout(argv, environ, timeout_s=timeout_s))


def qos(environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> list[queries.Qos]:
    """Return how jobs of each QOS are preempted."""
    return queries.parse_qos(_stdout(queries.QOS_ARGV, environ, timeout_s=timeout_s))


def controller(environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> Literal["up", "down", "none", "unclear"]:
    """Tell whether a controller answers; `none` where this host belongs to no cluster, `unclear` where Slurm's words do not say."""
    require("scontrol", environ)
    answer = _run(["scontrol", "ping"], clean_environ(environ), timeout_s=timeout_s)
    if _finds_no_cluster(answer):
        return "none"
    is_up = queries.parse_ping(answer.stdout)
    return "unclear" if is_up is None else "up" if is_up else "down"


def run_in_allocation(
    options: Sequence[str], command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float
) -> Answer:
    """Run a command on this host inside of a new job, which ends with it; return what it printed.

    A job that has not started and ended in time is cancelled. salloc prints its own messages on standard error.
    """
    require("salloc", environ)
    process = subprocess.Popen(
        ["salloc", "--quiet", *options, *command],
        env=clean_environ(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise SlurmBusyError(
            f"The job did not start and end within {timeout_s:.0f} s, so it is cancelled. Try again later, or wait longer."
        ) from error
    finally:
        # By SIGTERM, salloc gives its job back, or takes it out of the queue; killed, it would leave it there.
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_SALLOC_END_S)
            process.kill()
            process.communicate()
    return Answer(process.args, process.returncode, stdout, stderr)


def run_with_job_environ(command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float) -> Answer:
    """Run a command on this host that asks Slurm about the job which this process is in: it keeps the job's variables."""
    late = f"The check of the nodes did not end within {timeout_s:.0f} s. Try again."
    return _run(command, environ, timeout_s=timeout_s, late=late)


def _run_change(argv: Sequence[str], environ: Mapping[str, str], what: str) -> str:
    """Run a command that changes something; its failure is Slurm's refusal."""
    answer = ask(argv, environ, timeout_s=TIMEOUT_S)
    if answer.returncode != 0:
        line = _line(answer, LIMIT_PATTERN, _ERROR, _ANYTHING)
        raise SlurmRefusalError(
            f"Slurm refuses {what}, and nothing has changed: {line} (if you cannot correct this, ask your cluster's support)",
            queries.ESLURM_ACCESS_DENIED if "access/permission denied" in answer.stderr.lower() else "",
            answer.stderr,
        )
    return answer.stdout
