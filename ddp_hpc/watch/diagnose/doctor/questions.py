"""What the doctor asks on a login node, of Slurm and of the runs' file system: side by side, within one time for all questions.

A controller that does not answer holds up each command for as long as the command waits. Asked one after another, seven
commands would take minutes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import ConfigError, SlurmBusyError, SlurmUnavailableError
from ddp_hpc.base.patience import ask_in_threads
from ddp_hpc.cluster.node_checks.facts import Disk
from ddp_hpc.cluster.node_checks.gather import probe_disk
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.allocation import claimed_job_id
from ddp_hpc.cluster.slurm.directives import directives, quote_for_sbatch
from ddp_hpc.cluster.slurm.queries import Association, ClusterConfig, Estimate, JobRecord, NodeState, Partition, Qos
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.watch.diagnose.doctor.quota import Quota, quotas_of

ANSWER_S = 20.0
"""How long Slurm may take to answer all questions. Its own commands give up on a controller after 10 s (MessageTimeout), or ask again."""
_NO_THREAD = "this host lets you start no more processes and threads (`ulimit -u`)"
_EXTRA_WAIT_S = 2.0
"""How much longer the threads may take to end the commands that did not answer."""


@dataclass(frozen=True, kw_only=True)
class SlurmAnswers:
    """What Slurm answered; None for what it did not."""

    disk: tuple[Path, Disk] | None = None
    """The directory above the runs that exists, and its file system."""
    quota: Sequence[Quota] | None = None
    """What this user has left on that file system, as far as its tools say."""
    controller: str | None = None
    """`up`, `down`, `none` where this host has no cluster, `unclear`."""
    config: ClusterConfig | None = None
    partitions: Sequence[Partition] | None = None
    nodes: Sequence[NodeState] | None = None
    associations: Sequence[Association] | None = None
    qos: Sequence[Qos] | None = None
    test_only: Estimate | None = None
    job: JobRecord | None = None
    """The job of this shell's variables; None also where Slurm knows no such job."""
    problems: Mapping[str, str]
    """Name of a question -> why it has no answer."""

    def why_not(self, name: str) -> str:
        return self.problems.get(name, "Slurm does not answer")


def ask(spec: RunSpec, environ: Mapping[str, str], *, seconds: float = ANSWER_S) -> SlurmAnswers:
    """Ask everything that concerns a run of this configuration: Slurm where it is, and the file system of the runs."""
    of_slurm = _slurm_questions(spec, environ) if has_commands(environ) else {}
    place = spec.path.parent

    def quota(*, timeout_s: float) -> Sequence[Quota]:
        return quotas_of(_existing(place), environ, timeout_s=timeout_s)

    return ask_side_by_side({"disk": partial(_disk, place), "quota": quota, **of_slurm}, seconds=seconds)


def has_commands(environ: Mapping[str, str]) -> bool:
    """Tell whether this host has Slurm's commands, if not a cluster."""
    return shutil.which("sbatch", path=environ.get("PATH", "")) is not None


def _slurm_questions(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    job_id = claimed_job_id(environ)
    questions: dict[str, Callable[..., Any]] = {
        "controller": client.controller,
        "config": client.config,
        "partitions": client.partitions,
        "nodes": partial(client.nodes, partition=spec.slurm.partition),
        "associations": client.associations,
        "qos": client.qos,
        "test_only": partial(_ask_start, spec),
    }
    if job_id is not None:
        questions["job"] = partial(client.job, job_id)
    return {name: partial(question, environ) for name, question in questions.items()}


def _disk(place: Path, *, timeout_s: float) -> tuple[Path, Disk]:
    del timeout_s  # a file system that does not answer cannot be given up: the thread stays behind
    try:
        existing = _existing(place)
    # A stale mount, or a directory above that may not be searched: nothing can be written there.
    except OSError as error:
        return place, Disk(path=str(place), error=error.strerror or str(error))
    return existing, probe_disk(existing)


def _existing(place: Path) -> Path:
    return next((path for path in (place, *place.parents) if path.is_dir()), Path("/"))


def ask_side_by_side(questions: Mapping[str, Callable[..., Any]], *, seconds: float) -> SlurmAnswers:
    """Ask side by side; each question gets `timeout_s`, and has no answer after that."""

    def one(name: str) -> tuple[Any, str]:
        try:
            return questions[name](timeout_s=seconds), ""
        except (ConfigError, SlurmUnavailableError, SlurmBusyError, OSError) as error:
            return None, str(error).removesuffix(" Try again later.")
        except Exception as error:  # noqa: BLE001  an answer that cannot be read is none, and the others are told all the same
            return None, f"the answer cannot be read: {error}"

    asked = {name: partial(one, name) for name in questions}
    answers = ask_in_threads(seconds + _EXTRA_WAIT_S, asked, unasked=(None, _NO_THREAD))
    why = {name: f"no answer to `{name}` within {seconds:.0f} s." for name in questions.keys() - answers.keys()}
    why |= {name: problem for name, (_, problem) in answers.items() if problem}
    return SlurmAnswers(**{name: answer for name, (answer, _) in answers.items()}, problems=why)


def _ask_start(spec: RunSpec, environ: Mapping[str, str], *, timeout_s: float) -> Estimate:
    """Ask when Slurm would start a job of this spec; nothing is submitted."""
    made = directives(spec, RunDir(spec.path), chdir=Path("/"), cpus_per_worker=spec.cpus_per_task)
    options = [
        f"#SBATCH --{flag}{'' if value is None else f'={quote_for_sbatch(value)}'}\n" for flag, value in made.items()
    ]
    return client.estimate_start(f"#!/bin/sh\n{''.join(options)}exit 0\n", environ, timeout_s=timeout_s)
