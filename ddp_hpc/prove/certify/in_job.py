"""A certification in a job of Slurm: send it to a compute node, show what it prints, and say what the job's end means."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_hpc import __version__
from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.base.errors import ConfigError, DdpHpcError, SlurmUnavailableError
from ddp_hpc.cluster.containers import PACKAGE_DIR, refuse_misplaced
from ddp_hpc.cluster.slurm import client, states
from ddp_hpc.cluster.slurm.directives import directives
from ddp_hpc.cluster.slurm.queries import JobRecord
from ddp_hpc.launch.render import render_template
from ddp_hpc.launch.submission.allocate import allocate
from ddp_hpc.launch.submission.preflight import capacity
from ddp_hpc.prove.certify.certificate import CERTIFICATE, JOB, CertifyPlan
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.rereading import LOOK_INTERVAL_S
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.watch.logs import LogSelection, follow_lines

TEMPLATE = "certify.sbatch.j2"
PLAN, EXIT_CODE = "plan.json", "exit-code"
"""Files beside the job script: what the job is to do, and how it ended."""
_ASK_S = (2.0, 30.0)
"""How long to wait between questions to Slurm, at first and at most."""
SHOWN_S = 60.0
"""After how long this host sees a file that another node has written: NFS caches a directory for that long."""
_HAS_EXIT_CODE = frozenset({"completed", "failed"})
"""States in which Slurm knows the exit code of the job script."""


def certify_in_job(
    plan: CertifyPlan,
    spec: RunSpec,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    show: Callable[[str], None],
) -> int:
    """Submit the certification, show what the job prints, and return its exit code; cancel the job where the user interrupts.

    Raises:
        ConfigError: where the job is refused, or ended before the certification did: then nothing is proven.
        SlurmUnavailableError: where Slurm does not answer while the job is submitted.
    """
    place = RunDir(plan.folder / JOB)
    spec = _for_job(spec)
    job_id: str | None = None
    is_sent = False
    try:
        for note in _prepare(plan, spec, place, environ):
            say(note)
        is_sent = True
        job_id = allocate(place, environ)
        say(f"job {job_id} is submitted; Ctrl-C cancels it")
        watch = _Watch(place, job_id, environ, say)
        lines = follow_lines(place, LogSelection(), is_over=watch.is_over, pause=lambda: time.sleep(LOOK_INTERVAL_S))
        for line in lines:
            show(line)
        return watch.exit_code(spec)
    except BaseException as error:
        if job_id is not None:
            if not isinstance(error, ConfigError):  # which says that the job has ended
                _cancel(job_id, environ, say)
        elif is_sent and not isinstance(
            error, ConfigError
        ):  # sbatch may have succeeded, and the job needs its directory
            say(
                f"the job's number is not known, and the job may wait or run: find it with `squeue --me --name={spec.name}`, cancel "
                f"it with `scancel JOBID`, and then delete {plan.folder}"
            )
        else:
            shutil.rmtree(plan.folder, ignore_errors=True)
        raise


def _for_job(spec: RunSpec) -> RunSpec:
    """Return the spec of the job: a certification that Slurm started again would begin anew in the same directories."""
    return replace(spec, name=f"certify-{spec.name}"[:128], slurm=replace(spec.slurm, requeue=False))


def _prepare(plan: CertifyPlan, spec: RunSpec, place: RunDir, environ: Mapping[str, str]) -> list[str]:
    """Write the plan and the job script; return what the user should know.

    Raises:
        ConfigError: where Slurm would refuse the job, or its node could not read what it needs.
    """
    client.require("sbatch", environ)
    refuse_misplaced(spec, is_for_slurm=False)  # the runs in the job are those of one machine
    capacity.refuse_private_directory(plan.folder)
    capacity.refuse_private_python(plan.folder, [Path(sys.prefix), Path(sys.base_prefix), PACKAGE_DIR])
    script = job_script(plan, spec, place)
    make_directories(place.console.parent)
    replace_text(place.path / PLAN, plan_text(plan), is_secret=True)
    replace_text(place.job_script, script)
    own = (
        []
        if spec.slurm.template is None
        else ["`slurm.template` applies to runs only; certify uses a job script of its own"]
    )
    return [*own, *capacity.check(spec, place, environ)]


def job_script(plan: CertifyPlan, spec: RunSpec, place: RunDir) -> str:
    """Return the text that sbatch gets.

    Raises:
        ConfigError: where the script cannot be made of this spec.
    """
    made = directives(spec, place, chdir=plan.work_dir, cpus_per_worker=spec.cpus_per_task)
    values = {
        # Without `--signal`: a certification has nothing to save before the time limit.
        "directives": [one for one in made if one.flag != "signal"],
        "name": plan.folder.name,
        "version": __version__,
        "modules": spec.slurm.modules,
        "setup": spec.slurm.setup,
        "plan": place.path / PLAN,
        "work_dir": plan.work_dir,
        "python": sys.executable,
        "exit_code": place.path / EXIT_CODE,
    }
    return render_template(TEMPLATE, values)


def plan_text(plan: CertifyPlan) -> str:
    """Return a plan as text, for the job to read."""
    return json.dumps(asdict(plan), default=str)


def read_plan(path: Path) -> CertifyPlan:
    """Return the plan that was written for this job.

    Raises:
        ConfigError: where it cannot be read.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        paths = {key: Path(values[key]) for key in ("work_dir", "folder")}
        several = {key: tuple(map(Path, values[key])) for key in ("left_out", "may_change")}
        return CertifyPlan(**{**values, **paths, **several})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"The plan of the certification, {path}, cannot be read: {error}. Call certify again."
        ) from error


@dataclass
class _Watch:
    """What is known of the job, by the file with its exit code, and by Slurm."""

    place: RunDir
    job_id: str
    environ: Mapping[str, str]
    say: Callable[[str], None]
    job: JobRecord | None = None
    _said: str = ""
    _asked_at: float = field(default_factory=time.monotonic)
    _pause_s: float = _ASK_S[0]
    _unknown_since: float | None = None

    def is_over(self) -> bool:
        """Tell whether the job has ended; a controller that does not answer says nothing.

        Raises:
            ConfigError: where Slurm says that it will not start.
        """
        if self._written_code() is not None:
            return True
        now = time.monotonic()
        if now - self._asked_at < self._pause_s:
            return False
        self._asked_at, self._pause_s = now, min(self._pause_s * 1.5, _ASK_S[1])
        try:
            self.job = client.job(self.job_id, self.environ)
        except SlurmUnavailableError as error:
            self._tell(f"{error} Job {self.job_id} is not affected, and certify goes on waiting")
            return False
        if self.job is None:
            self._unknown_since = self._unknown_since or now
            return now - self._unknown_since > SHOWN_S
        self._unknown_since = None
        if why := states.why_never(self.job.reason):
            _cancel(self.job_id, self.environ, self.say)
            raise ConfigError(f"Job {self.job_id} never starts: {why}.")
        self._tell(_now(self.job))
        return states.has_ended(self.job.state)

    def exit_code(self, spec: RunSpec) -> int:
        """Return the exit code of the certification, once the job is over.

        Raises:
            ConfigError: where the job ended before the certification did.
        """
        code = self._written_code()
        if code is None and self.job is not None and states.parse_state(self.job.state) in _HAS_EXIT_CODE:
            number, _, signal = self.job.exit_code.partition(":")
            code = int(number) if number.isdecimal() and signal in {"", "0"} else None
        if code == 2:
            return code  # the job has printed why
        if code in {0, 1} and self._has_certificate():
            return code
        raise ConfigError(unproven(self.job_id, self.job, spec, self.place.console))

    def _written_code(self) -> int | None:
        try:
            return int((self.place.path / EXIT_CODE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _has_certificate(self) -> bool:
        path, deadline = self.place.path.parent / CERTIFICATE, time.monotonic() + SHOWN_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_S)
        return path.exists()

    def _tell(self, text: str) -> None:
        if text and text != self._said:
            self._said, self._pause_s = text, _ASK_S[0]
            self.say(text)


def _now(job: JobRecord) -> str:
    """Return what a job does that has not ended."""
    state = states.parse_state(job.state)
    if state == "pending":
        reason = states.explain_reason(job.reason)
        return f"job {job.job_id} waits{f': {reason}' if reason else ''}"
    return f"job {job.job_id} runs on {job.nodes}" if state == "running" and job.nodes else ""


def unproven(job_id: str, job: JobRecord | None, spec: RunSpec, console: Path) -> str:
    """Return the message on a job that ended before the certification did."""
    if job is None:
        return f"Slurm no longer knows job {job_id}, and the job has written no exit code, so nothing is proven. Read {console}."
    nothing = f"Job {job_id} {states.phrase(job.state)} before the certification was done, so nothing is proven."
    state = states.parse_state(job.state)
    if state == "timeout":
        limit_min = spec.resources.time_limit_min or job.time_limit_min
        had = f" (the job had {limit_min:g} min)" if limit_min else ""
        return (
            f"{nothing} Ask for more time: `resources.time_limit_min={round(4 * limit_min) if limit_min else 60}`{had}. Or have the "
            "script train for a shorter time, or name fewer faults with `--faults`."
        )
    if state == "preempted":
        return f"{nothing} Call certify again, if you can with a partition or QOS whose jobs are not preempted (`slurm.partition`, `slurm.qos`)."
    if state == "out_of_memory":
        return f"{nothing} Ask for more memory (`resources.mem_gb`)."
    if state in {"cancelled", "node_fail"}:
        return f"{nothing} Call certify again."
    return f"{nothing} Read {console}."


def _cancel(job_id: str, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    try:
        client.cancel(job_id, environ)
    except DdpHpcError as error:
        say(f"job {job_id} may still wait or run: {error} Cancel it with `scancel {job_id}`")
    else:
        say(f"job {job_id} was cancelled, so nothing is proven")
