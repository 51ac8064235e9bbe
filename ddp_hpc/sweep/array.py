"""A sweep on Slurm: job arrays of one script, of as many points as Slurm accepts."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from ddp_hpc import __version__
from ddp_hpc.base.durable import replace_text
from ddp_hpc.config import Resolved
from ddp_hpc.containers import PACKAGE_DIR
from ddp_hpc.errors import ConfigError, SlurmRefusalError
from ddp_hpc.render import render_template
from ddp_hpc.slurm import client
from ddp_hpc.slurm.directives import directives
from ddp_hpc.spec import RunSpec
from ddp_hpc.submission import slurm
from ddp_hpc.submission.allocate import allocate_array
from ddp_hpc.submission.preflight import capacity
from ddp_hpc.submission.preflight.image import look_at_image
from ddp_hpc.submission.run_dir_setup import note_on_parents
from ddp_hpc.sweep.states import points_in_queue
from ddp_hpc.sweep.sweep_dir import Sweep, SweepDir, as_ranges, make_sweep, record_array, refuse_existing

TEMPLATE = "sweep.sbatch.j2"
DEFAULT_MAX_ARRAY_SIZE = 1001
"""slurm.conf(5), for a controller that does not say."""
_LIMIT = re.compile(r"submit\w* ?limit", re.IGNORECASE)
"""In what sbatch prints where too many jobs are submitted: `QOSMaxSubmitJobPerUserLimit`, or only `job submit limit`."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What became of the points that were to be sent."""

    jobs: Mapping[str, int]
    """The number of each array -> how many points it has."""
    num_left: int = 0
    """Points that Slurm did not accept."""
    refusal: str = ""
    """What Slurm printed then."""


def array_script(base: RunSpec, sweep_dir: SweepDir) -> str:
    """Return the script of the sweep's arrays.

    Raises:
        ConfigError: where the configuration asks for what an array cannot have.
    """
    if base.slurm.template is not None:
        raise ConfigError(
            "`slurm.template` is set, but a sweep's tasks need the script that ddp-hpc has for them. Unset it."
        )
    if any(key.replace("_", "-") == "array" for key in base.slurm.extra):
        raise ConfigError("`slurm.extra.array` is set, but a sweep is a job array of its own. Remove it.")
    # Slurm opens the log before any of our code runs, when the run's own directory may not exist.
    log = f"{str(sweep_dir.logs).replace('%', '%%')}/%A_%a.log"
    made = directives(base, sweep_dir.files, chdir=Path.cwd(), cpus_per_worker=base.cpus_per_task)
    return render_template(
        TEMPLATE,
        {
            "directives": [replace(one, value=log) if one.flag == "output" else one for one in made],
            "name": base.name,
            "version": __version__,
            "modules": base.slurm.modules,
            "setup": base.slurm.setup,
            "python": sys.executable,
            "base": sweep_dir.base,
            "sweep": sweep_dir.path,
        },
    )


def make_for_slurm(base: Resolved, sweep: Sweep, import_paths: Sequence[Path], environ: Mapping[str, str]) -> list[str]:
    """Make the sweep's directory with all that its tasks need; return notes for the user. Nothing is left where it fails.

    Raises:
        ConfigError: where the sweep exists, or Slurm would refuse its tasks.
        SlurmUnavailableError: where Slurm does not answer.
    """
    spec, sweep_dir = base.spec, SweepDir(base.spec.path)
    client.require("sbatch", environ)
    refuse_existing(sweep_dir)
    script = array_script(spec, sweep_dir)
    capacity.refuse_private_directory(sweep_dir.path)
    capacity.refuse_private_python(sweep_dir.path, [Path(sys.prefix), Path(sys.base_prefix), PACKAGE_DIR])
    paths = tuple(slurm.job_import_paths(spec, sweep_dir.files, import_paths))
    notes = [*look_at_image(spec, sweep_dir.files, paths, environ, is_for_slurm=True), *note_on_parents(sweep_dir.path)]
    make_sweep(sweep_dir, base, replace(sweep, import_paths=paths))
    try:
        notes += slurm.freeze_code(spec, sweep_dir.files, import_paths)
        replace_text(sweep_dir.files.job_script, script)
        return [*notes, *capacity.check(spec, sweep_dir.files, environ)]
    except BaseException:
        shutil.rmtree(sweep_dir.path, ignore_errors=True)
        raise


def send(sweep_dir: SweepDir, numbers: Sequence[int], environ: Mapping[str, str], *, at_most: int | None) -> Sent:
    """Send points to Slurm, in as few arrays as it accepts; record each array.

    Raises:
        ConfigError: where Slurm refuses for another reason than a limit of submitted jobs.
        SlurmUnavailableError: where Slurm does not answer; what was sent before is recorded.
    """
    size = client.config(environ).max_array_size or DEFAULT_MAX_ARRAY_SIZE
    groups = list(_groups(numbers, size))
    share = None if at_most is None else max(1, at_most // max(1, len(groups)))
    jobs: dict[str, int] = {}
    for offset, group in groups:
        count, rest = len(group), group
        while rest:
            part = rest[:count]
            try:
                job_id = _send_array(sweep_dir, part, offset, share, environ)
            except SlurmRefusalError as error:
                if _LIMIT.search(str(error)) is None:
                    raise
                if count == 1:
                    return Sent(jobs=jobs, num_left=len(set(numbers)) - sum(jobs.values()), refusal=str(error))
                count //= 2
                continue
            jobs[job_id] = len(part)
            rest = rest[count:]
            count = min(count, len(rest))
    return Sent(jobs=jobs)


def cancel_waiting(sweep: Sweep, environ: Mapping[str, str]) -> None:
    """Cancel the tasks that wait, of those arrays that Slurm still has.

    Raises:
        ConfigError: where Slurm refuses.
        SlurmUnavailableError: where Slurm does not answer.
    """
    queued = client.queue(client.user_name(), environ)
    for one in sweep.arrays:
        if points_in_queue(one, queued):
            client.cancel_pending(one.job_id, environ)


def _groups(numbers: Sequence[int], size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the points that may be tasks of one array, each with the number of the point of task 0."""
    # The numbers of an array's tasks end below MaxArraySize: https://slurm.schedmd.com/slurm.conf.html#OPT_MaxArraySize
    for chunk, group in groupby(sorted(set(numbers)), key=lambda number: number // size):
        yield chunk * size, list(group)


def _send_array(
    sweep_dir: SweepDir, numbers: Sequence[int], offset: int, share: int | None, environ: Mapping[str, str]
) -> str:
    tasks = as_ranges(number - offset for number in numbers)
    throttle = "" if share is None else f"%{share}"
    script, arguments = sweep_dir.files.job_script, [str(offset)]
    job_id = allocate_array(script, environ, tasks=f"{tasks}{throttle}", arguments=arguments)
    record_array(sweep_dir, job_id, numbers, offset)
    return job_id
