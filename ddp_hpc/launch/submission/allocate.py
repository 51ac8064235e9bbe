"""Ask Slurm for a new job from a login node, through submitit; the only module that imports submitit.

submitit allocates: it writes the submission file, runs sbatch, reads the job's number and keeps a handle of it. What the
job does is our script's: its text replaces submitit's own, so that none of submitit's processes and signal handlers run
in the job, and what submitit pickles (the script's path) is never read again. ADR 24 says what else submits, and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc.base.durable import make_directories, new_file_mode
from ddp_hpc.base.errors import ConfigError, SlurmRefusalError, SlurmUnavailableError
from ddp_hpc.cluster.slurm import client, queries
from ddp_hpc.run.run_dir.paths import RunDir

SUBMITIT_METHOD_NAME = "_make_submission_command"
"""The one private method of submitit's executor that this module overrides."""
SENT_SCRIPT_PREFIX = ".submission_file_"
"""How the name of the script begins that submitit sends; once Slurm has accepted it, a link has that name."""


def submit_job_script(run: RunDir, environ: Mapping[str, str]) -> str:
    """Have submitit send the run's job script to sbatch; return the job's number."""
    import submitit  # late: 0.1 s that only a submission waits for
    from submitit.core.utils import CommandFunction, FailedJobError, FailedSubmissionError

    client.require("srun", environ)  # submitit looks for it, and gives no error of its own that a user can read
    method = getattr(submitit.SlurmExecutor, SUBMITIT_METHOD_NAME, None)
    if method is None or getattr(method, "__isabstractmethod__", False):
        raise ConfigError(_unfit_submitit_message(f"submitit has no method `SlurmExecutor.{SUBMITIT_METHOD_NAME}`"))
    is_ours: list[Path] = []

    class Executor(submitit.SlurmExecutor):
        """submitit's executor with our script in place of its own."""

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            submission_file_path.write_bytes(run.job_script.read_bytes())
            is_ours.append(submission_file_path)
            return [*client.without_inherited_argv(environ), "sbatch", str(submission_file_path)]

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            return queries.parse_submitted(string if isinstance(string, str) else string.decode(errors="replace"))

    make_directories(run.submitit)
    try:
        job: Any = Executor(folder=run.submitit).submit(CommandFunction(["bash", str(run.job_script)]))
    except (FailedJobError, FailedSubmissionError) as error:
        if client.is_no_answer(str(error)):
            raise SlurmUnavailableError(
                f"Slurm does not answer: sbatch prints {error}. Submit again later: ddp-hpc asks Slurm first whether it has the job."
            ) from error
        raise SlurmRefusalError(
            f"sbatch refuses the job: {error}. Correct the setting that it names; if it names none, ask your cluster's support.",
            printed=str(error),
        ) from error
    finally:
        with contextlib.suppress(OSError):  # a file system without modes
            for path in run.submitit.iterdir():  # made by the umask
                path.chmod(new_file_mode(path))
    if not is_ours:  # the job is submitit's own: it would train nothing
        client.cancel(str(job.job_id), environ)
        raise ConfigError(
            _unfit_submitit_message(
                f"submitit does not call `SlurmExecutor.{SUBMITIT_METHOD_NAME}`; ddp-hpc cancelled job {job.job_id}, which submitit made"
            )
        )
    return str(job.job_id)


def submit_job_array(
    script: Path, environ: Mapping[str, str], *, tasks: str, options: Sequence[str], arguments: Sequence[str]
) -> str:
    """Send a script to sbatch as a job array; return the array's number.

    submitit has no part in it: its arrays are of pickled callables, two files for each task (ADR 37).
    """
    return client.submit(script, environ, [f"--array={tasks}", *options], arguments)


def _unfit_submitit_message(why: str) -> str:
    from importlib.metadata import version  # late: as slow as all of a back end

    return (
        f"ddp-hpc cannot submit jobs with submitit {version('submitit')}: {why}. Install a version that works: "
        "`pip install 'submitit>=1.5.2,<=1.5.4'`, or make a script for plain sbatch with `ddp-hpc render`."
    )
