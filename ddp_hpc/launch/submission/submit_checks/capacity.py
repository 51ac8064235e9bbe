"""Checks before submission: whether Slurm accepts the job, when it would start, what it costs, and whether the plan fits."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from ddp_hpc.base.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.cluster.containers import PACKAGE_DIR
from ddp_hpc.cluster.slurm import client, states
from ddp_hpc.cluster.slurm.preemption import findings_on_preemption
from ddp_hpc.cluster.slurm.queries import (
    NEVER_S,
    ClusterConfig,
    Estimate,
    JobRecord,
    NodeShape,
    Partition,
    chosen_partition,
)
from ddp_hpc.launch.submission.submit_checks.sbatch_errors import KnownCluster, explain_refusal, may_wait, request_text
from ddp_hpc.run import requeue
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.missing_files import NODE_LOCAL_DIRS

T = TypeVar("T")
_PRIVATE_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_PYTHON_PLACES = (Path(sys.prefix), Path(sys.base_prefix), PACKAGE_DIR)
_SOURCE_LINE_PATTERN = re.compile(r"\s*(?:source|\.)\s+(~?/?[\w.+-]+(?:/[\w.+-]+)+)\s*$")
"""A line of shell that reads one file, and fails without it."""
_SOON_S = 60.0


def refuse_node_local_path(path: Path, pythons: Sequence[Path] = _PYTHON_PLACES) -> None:
    """Refuse a run directory, or a Python and its packages, that each node has for itself."""
    if (place := _node_local_dir(path)) is not None:
        raise ConfigError(
            f"The run's directory would be {path}, but each node has a {place} of its own, so the job could not find it. "
            "Choose a directory on a file system that all nodes share with `runs_dir=...`."
        )
    for each in pythons:
        place = _node_local_dir(each)
        if place is not None and not place.startswith("/ "):  # a node without a disk has all of its system in memory
            raise ConfigError(
                f"This Python uses {each}, but each node has a {place} of its own, so the job could not start. Make the "
                "environment on a file system that all nodes share, and submit with the `ddp-hpc` that is there."
            )


def _node_local_dir(path: Path) -> str | None:
    """Return the node-local directory that a path lies in; None where there is none."""
    resolved = path.resolve()
    place = next((place for place in NODE_LOCAL_DIRS if resolved.is_relative_to(place)), None)
    mounts = [one for one in psutil.disk_partitions(all=True) if resolved.is_relative_to(one.mountpoint)]
    mount = max(mounts, key=lambda one: len(one.mountpoint), default=None)
    if mount is not None and mount.fstype in _PRIVATE_FILE_SYSTEMS:
        return f"{mount.mountpoint} ({mount.fstype})"
    is_private = place is not None and (mount is None or Path(place) not in Path(mount.mountpoint).parents)
    return place if is_private else None


def _ask_in_thread(ask: Callable[[], T]) -> Callable[[], T]:
    """Ask Slurm in a thread, as each of its commands takes several milliseconds; return what waits for the answer, or raises the error."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001  `answer` raises it
            errors.append(error)

    def answer() -> T:
        thread.join()
        for error in errors:
            raise error
        return answers[0]

    thread = threading.Thread(target=run, daemon=True)  # where this process is interrupted, it does not wait
    thread.start()
    return answer


class SlurmQuestions:
    """What Slurm is asked before a submission. The questions are asked at once, and while the caller prepares the submission."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._partitions = _ask_in_thread(lambda: client.partitions(environ))
        self.config = _ask_in_thread(lambda: client.config(environ))
        """Waits for the cluster's configuration."""
        self._test: Callable[[], Estimate] | None = None

    def ask_about_script(self, script: Path) -> None:
        """Begin to ask whether Slurm would accept this script."""
        self._test = _ask_in_thread(lambda: client.estimate_start(script, self.environ))

    def refusal(self, said: str, spec: RunSpec) -> ConfigError:
        """Return what sbatch's refusal means, by what the cluster has."""
        return ConfigError(explain_refusal(said, spec, self._known_cluster()))

    def _known_cluster(self) -> KnownCluster:
        partitions = self._partitions()
        associations = client.accounts(self.environ) if partitions else ()
        shapes: Sequence[NodeShape] = ()
        with suppress(ConfigError, SlurmUnavailableError):
            shapes = client.node_shapes(self.environ)
        return KnownCluster(partitions, associations, shapes)

    def wait_for_notes(self, spec: RunSpec, run: RunDir) -> list[str]:
        """Wait for the answers, and return what the user should know. The caller has asked about the script."""
        assert self._test is not None  # noqa: S101
        for each in (self._test, self._partitions, self.config):
            with suppress(Exception):
                each()  # so that none is still being asked where another has failed
        answer, partitions = self._test(), self._partitions()
        client.refuse_other_cluster(self.config().name, self.environ)
        notes = [*_cost_notes(spec, answer.starts_at)]
        if answer.refusal is not None:
            cluster = self._known_cluster()
            if not may_wait(answer.refusal, spec, cluster):
                raise ConfigError(explain_refusal(answer.refusal, spec, cluster))
            notes.append(
                "note: Slurm cannot start the job on the nodes that take jobs now. If it could with nodes that are down or drained, "
                "the job waits for them; else sbatch refuses the job."
            )
        progress = read_progress(run)
        return [*notes, *_misfit_notes(spec, self.config(), partitions, progress.save_s if progress else None)]


def notes_on_setup_files(spec: RunSpec) -> Iterator[str]:
    """Yield a note for each file that `slurm.setup` reads and this host does not have."""
    for named in (match[1] for line in spec.slurm.setup if (match := _SOURCE_LINE_PATTERN.match(line))):
        if not Path(os.path.expanduser(named)).exists():  # noqa: PTH111  a Path raises an error for `~nobody`
            yield (
                f"note: only the job can check this: `slurm.setup` reads {named}, which this host does not have; where a node does not have it "
                "either, the job ends at once. Correct the path, or make the file."
            )


def _cost_notes(spec: RunSpec, starts_at: float | None) -> Iterator[str]:
    """Yield notes on what the job asks for, when it would start, and how much of the account it may use."""
    when = ""
    if starts_at is not None:
        wait_s = starts_at - time.time()
        is_held = spec.slurm.extra.get("hold")
        when = "; it is held until you release it (`slurm.extra.hold`)" if is_held else f"; {_start_text(wait_s)}"
    yield f"the job asks for {request_text(spec)}{when}"
    hours = (spec.resources.time_limit_min or 0) / 60
    num_gpus = spec.resources.nodes * spec.resources.num_gpus
    if hours and num_gpus:
        yield f"it uses up to {round(num_gpus * hours, 2):g} GPU-hours ({num_gpus} GPUs for {hours:.4g} h)"


def _start_text(wait_s: float) -> str:
    if wait_s < _SOON_S:
        return "it could start now"
    if wait_s > NEVER_S:
        return "Slurm cannot estimate when it could start, because jobs without a time limit are ahead of it"
    span = f"{wait_s / 60:.0f} min" if wait_s < 2 * 3600 else f"{wait_s / 3600:.0f} h"
    return f"it could start in about {span}"


def _refuse_short_time_limit(spec: RunSpec, limit_min: float | None) -> None:
    """Refuse a time limit, the partition's if the run sets none, that is over when the run is asked to stop."""
    lead_s = spec.slurm.signal_lead_s
    if limit_min is not None and limit_min * 60 <= lead_s:
        whose = "" if spec.resources.time_limit_min else " (the partition's default)"
        raise ConfigError(
            f"`resources.time_limit_min` is {limit_min:g}{whose} and `slurm.signal_lead_s` {lead_s}, so the run would be asked to stop "
            "before it begins. Ask for more time, or lower `slurm.signal_lead_s`."
        )


def _misfit_notes(
    spec: RunSpec, config: ClusterConfig, partitions: Sequence[Partition], save_s: float | None
) -> Iterator[str]:
    """Yield notes where the plan does not fit the cluster, though Slurm accepts the job."""
    limit_min, partition = spec.resources.time_limit_min, chosen_partition(spec.slurm.partition, partitions)
    if partition is None:
        return
    if partition.num_gpus and spec.resources.gpus_per_node is None:
        yield (
            f"note: partition {partition.name} has GPUs, and the run asks for none, so it runs on CPUs. Set `resources.gpus_per_node` to the "
            "number for each node, or to 0 if CPUs are meant."
        )
    if limit_min is None and partition.default_time_min is not None:
        yield (
            f"note: `resources.time_limit_min` is not set, so partition {partition.name} ends the job after "
            f"{partition.default_time_min:.0f} min. The run writes a checkpoint before that, and its next job "
            "continues from there. Set the key if the run needs more time in one job."
        )
    effective_min = limit_min or partition.default_time_min
    _refuse_short_time_limit(spec, effective_min)
    problem = requeue.lead_problem(lead_s=spec.slurm.signal_lead_s, time_limit_min=effective_min, save_s=save_s)
    if problem is not None:
        yield f"warning: {problem}"
    if spec.script.is_set and effective_min is not None:
        problem = requeue.stop_within_problem(stop_within_s=spec.script.stop_within_s, lead_s=spec.slurm.signal_lead_s)
        if problem is not None:
            yield f"note: {problem}"
    for found in findings_on_preemption(config, partition, partitions, (), None) or ():
        if found.level == "warn":
            yield f"note: {found.found}. {found.to_do[:1].upper()}{found.to_do[1:]}."
    if spec.slurm.requeue and not config.job_requeue:
        yield "note: jobs of this cluster are not requeued by default (JobRequeue=0), but this job asks for it (`slurm.requeue`). You need do nothing."


def vanished_job_message(run: RunDir, job_id: str, job: JobRecord | None, since: float) -> str:
    """Return the message on a job that Slurm no longer has and that wrote no record; `since`: when it was submitted."""
    how = (
        "is no longer known to Slurm"
        if job is None
        else f"{states.state_as_verb(job.state)}{job.reason and f' ({job.reason})'}"
    )
    from ddp_hpc.watch.failed_worker_log import last_words  # late: most jobs begin

    if words := last_words(run, since):
        return f"Job {job_id} of {run.name} {how}, before ddp-hpc began in it. {words}\nCorrect that, and submit the run again."
    return (
        f"Job {job_id} of {run.name} {how}, and wrote nothing to the run's directory. Most often a node cannot read "
        f"{run.path} or the job's Python. Read {run.console}, then run: sacct -j {job_id} -o state,exitcode,nodelist"
    )
