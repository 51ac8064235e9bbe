"""The scenario of a drill: submit two runs, inject the fault into one, wait until both finish, compare them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import ConfigError, DdpHpcError, SlurmUnavailableError, WorkerError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.launch.submission.backend import Backend, load_backend
from ddp_hpc.launch.submission.release_hold import require_start
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.prove.drill.checks import Check, DrillOutcome, check
from ddp_hpc.prove.drill.faults import FAULTS, Injection, Target
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.config import changes, load_resolved
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.run_dir.timeline import read_marks
from ddp_hpc.watch.checkpoints import choose_step, digest
from ddp_hpc.watch.samples import read_steps_taken

T = TypeVar("T")
CONFIG = Path(__file__).with_name("drill.yaml")
"""The configuration of both runs, unless the user names another."""
POLL_S = 0.05
"""How often the run directory is read."""
SLURM_POLL_S = 3.0
"""How often Slurm is asked whether the run still has a job."""
_MAY_DIFFER = (
    "name",
    "runs_dir",
    "launcher",
    "slurm.",
    "restart.",
    "resources.",
    "checkpoint.",
    "log.",
    "recipe.args.sample_s",
)
"""Keys by which the two runs may differ: none of them changes the trained weights."""


@dataclass(frozen=True, kw_only=True)
class DrillPlan:
    """One drill, as the user asks for it."""

    fault: str
    faulty: SubmitRequest
    """The run into which the fault is injected."""
    unbroken: SubmitRequest | RunDir
    """The run without the fault: to be submitted, or one that has finished already."""
    by_hand: bool = False
    batch_host: bool = False
    """Whether the fault is injected on the batch host, rather than on the last node."""
    signal: str = "TERM"
    patience_s: float = 600.0
    """How long to wait without any progress of a run before the drill fails."""


@dataclass(kw_only=True)
class DrillReport:
    """The result; the fields are the keys of `drill --json`."""

    fault: str
    verdict: Literal["PASS", "FAIL"] = "FAIL"
    reason: str = ""
    """Why it failed."""
    what: str = ""
    """Which fault was injected, and where."""
    step: int | None = None
    """The newest step at the time of the fault."""
    resumed_at: int | None = None
    lost_steps: int | None = None
    """Steps that were repeated."""
    seconds_to_running: float | None = None
    """From the fault to the next attempt's first step."""
    causes: list[str] = field(default_factory=list)
    """Why each attempt ended, and what followed."""
    checks: list[Check] = field(default_factory=list)
    attempts_before: int | None = None
    run: str = ""
    unbroken: str = ""


def drill(plan: DrillPlan, environ: Mapping[str, str], say: Callable[[str], None]) -> DrillReport:
    """Run the drill; return its result."""
    run = plan.faulty.run
    unbroken = _comparable(plan.unbroken, plan.faulty) if isinstance(plan.unbroken, RunDir) else plan.unbroken.run
    report = DrillReport(fault=plan.fault, run=str(run.path), unbroken=str(unbroken.path))
    scenario = _Scenario(plan, run, unbroken, environ, say)
    try:
        scenario.submit()
        scenario.inject_and_wait(report)
        scenario.compare(report)
    except WorkerError as error:
        report.reason = str(error)
    finally:
        scenario.cancel_unfinished()
    report.causes = [_end_of(attempt) for attempt in Ledger.read(run).attempts]
    return report


def _comparable(unbroken: RunDir, faulty: SubmitRequest) -> RunDir:
    """Return the run to compare with, if it trains the same model on the same data."""
    changed = changes(load_resolved(unbroken.config), faulty.spec)
    differing = [key for key in changed if not key.startswith(_MAY_DIFFER)]
    if differing:
        raise ConfigError(
            f"The drill cannot compare with the run {unbroken.name!r}: the two runs have different values of "
            f"{', '.join(differing)}. Leave out `--unbroken`, or use the settings of that run."
        )
    if not unbroken.done.exists():
        raise ConfigError(
            f"The drill cannot compare with the run {unbroken.name!r}: it has not finished. Wait for it, or leave out `--unbroken`."
        )
    return unbroken


def _end_of(attempt: Attempt) -> str:
    return f"{attempt.cause or 'end not recorded'}{f' -> {attempt.next}' if attempt.next else ''}"


@dataclass
class _Scenario:
    """Both runs of a drill, from submission to the end."""

    plan: DrillPlan
    run: RunDir
    unbroken: RunDir
    environ: Mapping[str, str]
    say: Callable[[str], None]
    submitted: list[RunDir] = field(default_factory=list)
    """The runs that this drill has made."""

    def submit(self) -> None:
        """Submit the runs, or the one that is not there yet."""
        for request in (self.plan.unbroken, self.plan.faulty):
            if isinstance(request, RunDir):
                continue
            sent = _slurm().submit(request)
            if not sent.is_new:
                raise ConfigError(
                    f"{sent.run.path} exists already, but a drill needs a new run. Choose another `name=...`."
                )
            self.submitted.append(sent.run)
            self.say(f"{sent.run.name}: submitted job {sent.job_id}")

    def inject_and_wait(self, report: DrillReport) -> None:
        """Inject the fault once the run is training, then wait until the run finishes."""
        before = self._await("two checkpoints", self._training_attempt)
        self.say(f"{self.run.name}: training on {', '.join(before.nodes)}")
        injection = self._inject(before)
        self.say(injection.description)
        report.what, report.attempts_before = injection.description, before.attempt + 1
        report.step = _step(self.run)
        if FAULTS[self.plan.fault].restarts:
            after, stepped_at = self._await("the next attempt", lambda: self._first_step_after(before))
            report.resumed_at = after.first_step
            # Where nobody knows when the fault came, it was after the last step that was recorded before it.
            fault_at = injection.at or self.run.rank_samples(before.attempt, 0).stat().st_mtime
            report.seconds_to_running = stepped_at - fault_at
            self.say(f"training again {report.seconds_to_running:.1f} s after the fault, from step {report.resumed_at}")
        self._await("the end of the run", self.run.done.exists)
        self.say(f"{self.run.name}: finished after {len(Ledger.read(self.run).attempts)} attempts")

    def _training_attempt(self) -> Attempt | None:
        """Return the current attempt, once it trains and the run has two checkpoints."""
        if self.run.done.exists():
            raise WorkerError(
                "The run finished before the fault was injected. Give it more steps with `train.max_steps`."
            )
        attempts, progress = Ledger.read(self.run).attempts, read_progress(self.run)
        is_stepping = progress is not None and attempts and progress.attempt == attempts[-1].attempt
        return attempts[-1] if is_stepping and len(committed_steps(self.run)) > 1 else None

    def _inject(self, before: Attempt) -> Injection:
        fault, node = FAULTS[self.plan.fault], before.nodes[0 if self.plan.batch_host else -1]
        if self.plan.by_hand:
            names = {"job_id": before.job_id, "node": node, "nodes": ", ".join(before.nodes), "run": self.run.path}
            return Injection(f"{fault.by_hand.format(**names)}.")
        assert fault.inject is not None  # noqa: S101  `ddp-hpc drill` refuses it before
        target = Target(
            run=self.run,
            spec=self.plan.faulty.spec,
            job_id=before.job_id,
            nodes=before.nodes,
            node=node,
            signal=self.plan.signal,
            environ=self.environ,
        )
        return fault.inject(target)

    def _first_step_after(self, before: Attempt) -> tuple[Attempt, float] | None:
        """Return the next attempt that has taken a step, and the time."""
        is_over = self.run.done.exists()  # read first, so that the loop below sees the last steps of a run that is done
        for attempt in Ledger.read(self.run).attempts:
            with suppress(FileNotFoundError):
                path = self.run.rank_samples(attempt.attempt, 0)
                if attempt.attempt > before.attempt and path.stat().st_size:
                    return attempt, time.time()
        if is_over:
            raise WorkerError(
                "The run finished, and no attempt began after the fault. Give it more steps with `train.max_steps`."
            )
        return None

    def compare(self, report: DrillReport) -> None:
        """Compare the two runs, once both have finished."""
        self._await("the end of the run without a fault", self.unbroken.done.exists, run=self.unbroken)
        fault, taken, num_before = FAULTS[self.plan.fault], read_steps_taken(self.run), report.attempts_before or 0
        report.lost_steps = taken.num_repeated
        report.checks = check(
            DrillOutcome(
                is_graceful=fault.is_graceful,
                restarts=fault.restarts,
                every_steps=_every_steps(self.run, self.plan.faulty.spec.checkpoint.every_steps, num_before),
                more_attempts=len(Ledger.read(self.run).attempts) - num_before,
                digest=digest(self.run, choose_step(self.run, None)),
                unbroken_digest=digest(self.unbroken, choose_step(self.unbroken, None)),
                taken=taken,
                unbroken_taken=read_steps_taken(self.unbroken),
            )
        )
        bad = [one for one in report.checks if not one.is_good]
        report.reason = "; ".join(f"{one.name}: {one.told}" for one in bad)
        report.verdict = "FAIL" if bad else "PASS"

    def cancel_unfinished(self) -> None:
        """Cancel the jobs of this drill that have not finished; a run that existed before is left alone."""
        for run in self.submitted:
            if not run.done.exists():
                with suppress(DdpHpcError):
                    _slurm().cancel(run, self.environ)

    def _await(self, what: str, condition: Callable[[], T | None], *, run: RunDir | None = None) -> T:
        """Return the first true value of `condition`; WorkerError ends the drill where the run gets no further."""
        run, asked_at, is_gone = run or self.run, time.monotonic(), False

        def progress() -> tuple[int, int]:
            return len(Ledger.read(run).attempts), _step(run)

        newest, deadline = progress(), asked_at + self.plan.patience_s
        while True:
            if value := condition():
                return value
            now = time.monotonic()
            if is_gone or now > deadline:
                idle = f"{run.name!r} made no progress for {self.plan.patience_s:.0f} s (`--patience`)"
                found = f"Slurm has no job of {run.name!r} any more" if is_gone else idle
                raise WorkerError(f"The drill waits for {what}, but {found}. {_situation(run)}")
            if now - asked_at > SLURM_POLL_S:
                asked_at, is_gone = now, self._has_no_job(run)  # and check the condition once more before giving up
                if newest != (newest := progress()):
                    deadline = now + self.plan.patience_s
            time.sleep(POLL_S)

    def _has_no_job(self, run: RunDir) -> bool:
        with suppress(SlurmUnavailableError):
            found = _slurm().find_job(run, self.environ)
            waits = found is not None and found.state == "waiting" and found.job_id
            job = client.job(waits, self.environ) if waits else None
            if job is not None:
                require_start(run, job.job_id, job.reason)
            return found is None
        return False


def _slurm() -> Backend:
    """Return the back end of both runs: a fault is injected by a step of a Slurm job."""
    return load_backend("slurm")


def _step(run: RunDir) -> int:
    """Return the newest step that rank zero has taken."""
    paths = (run.rank_samples(attempt.attempt, 0) for attempt in Ledger.read(run).attempts)
    return max((int(line["step"]) for path in paths for line in read_json_lines(path)), default=0)


def _situation(run: RunDir) -> str:
    """Return the newest step of a run and how its newest attempts ended."""
    attempts = Ledger.read(run).attempts
    ends = [f"attempt {one.attempt}: {_end_of(one)} {one.reason}".rstrip() for one in attempts[-3:]]
    return f"Its newest step is {_step(run)}; {'; '.join(ends) or 'no attempt has started'}. Read {run.console}."


def _every_steps(run: RunDir, asked: int | Literal["auto"] | None, num_before: int) -> int:
    """Return the interval between checkpoints; 0 without one. Where the run chooses: the newest in the attempts before the fault."""
    if asked != "auto":
        return asked or 0
    chosen = [mark.interval for mark in read_marks(run) if mark.kind == "interval" and mark.attempt < num_before]
    return int(chosen[-1].get("every_steps", 0.0)) if chosen else 0
