"""The scenario of a drill: submit two runs, inject the fault into one, wait until both finish, compare them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import ConfigError, DdpHpcError, SlurmUnavailableError, WorkerError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.cluster.slurm import client
from ddp_hpc.launch.submission.backend import Backend, load_backend
from ddp_hpc.launch.submission.release_hold import require_startable
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.prove.drill.faults import FAULTS, Fault, Injection
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.run_dir.timeline import read_marks
from ddp_hpc.watch.checkpoints import choose_step, digest
from ddp_hpc.watch.samples import StepsTaken, read_steps_taken, used_twice

T = TypeVar("T")
CONFIG = Path(__file__).with_name("drill.yaml")
"""The configuration of both runs, unless the user names another."""
POLL_S = 0.05
"""How often the run directory is read."""
SLURM_POLL_S = 3.0
"""How often Slurm is asked whether the run still has a job."""


@dataclass(frozen=True)
class Check:
    """One condition that must hold."""

    name: str
    is_good: bool
    told: str
    """What was measured. The name is a key of `drill --json`."""


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


@dataclass(kw_only=True)
class Drill:
    """Both runs of a drill, from submission to the end."""

    fault: str
    faulty: SubmitRequest
    """The run into which the fault is injected."""
    unbroken: SubmitRequest
    by_hand: bool = False
    batch_host: bool = False
    """Whether the fault is injected on the batch host, rather than on the last node."""
    signal: str = "TERM"
    patience_s: float = 600.0
    """How long to wait without any progress of a run before the drill fails."""
    say: Callable[[str], None]
    submitted: list[RunDir] = field(default_factory=list)
    """The runs that this drill has made."""

    @property
    def run(self) -> RunDir:
        return self.faulty.run

    def run_drill(self) -> DrillReport:
        """Run the drill; return its result."""
        report = DrillReport(fault=self.fault, run=str(self.run.path), unbroken=str(self.unbroken.run.path))
        try:
            self.submit_both()
            self.inject_and_wait(report)
            self.compare(report)
        except WorkerError as error:
            report.reason = str(error)
        finally:
            self.cancel_unfinished()
        report.causes = [_attempt_end_text(attempt) for attempt in Ledger.read(self.run).attempts]
        return report

    def submit_both(self) -> None:
        for request in (self.unbroken, self.faulty):
            sent = _slurm().submit(request)
            if not sent.is_new:
                raise ConfigError(
                    f"{sent.run.path} exists already, but a drill needs a new run. Choose another `name=...`."
                )
            self.submitted.append(sent.run)
            self.say(f"{sent.run.name}: submitted job {sent.job_id}")
            if self.by_hand and request is self.unbroken:  # such a fault hits whatever runs on the node
                self._await("the end of the run without a fault", sent.run.done.exists, run=sent.run)

    def inject_and_wait(self, report: DrillReport) -> None:
        """Inject the fault once the run is training, then wait until the run finishes."""
        before = self._await("two checkpoints", self._training_attempt)
        self.say(f"{self.run.name}: training on {', '.join(before.nodes)}")
        report.what, injected_at = self._inject(before)
        self.say(report.what)
        report.attempts_before = before.attempt + 1
        report.step = _newest_step(self.run)
        if FAULTS[self.fault].restarts:
            after, stepped_at = self._await("the next attempt", lambda: self._next_attempt(before))
            report.resumed_at = after.first_step
            # Where nobody knows when the fault came, it was after the last step that was recorded before it.
            fault_at = injected_at or self.run.rank_samples(before.attempt, 0).stat().st_mtime
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
        fault, node = FAULTS[self.fault], before.nodes[0 if self.batch_host else -1]
        if self.by_hand:
            names = {"job_id": before.job_id, "node": node, "nodes": ", ".join(before.nodes), "run": self.run.path}
            return f"{fault.by_hand.format(**names)}.", None
        assert fault.inject is not None  # noqa: S101  `ddp-hpc drill` refuses it before
        return fault.inject(self.faulty, before, node, self.signal)

    def _next_attempt(self, before: Attempt) -> tuple[Attempt, float] | None:
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
        runs = (self.run, self.unbroken.run)
        self._await("the end of the run without a fault", runs[1].done.exists, run=runs[1])
        taken, num_before = (read_steps_taken(runs[0]), read_steps_taken(runs[1])), report.attempts_before or 0
        report.lost_steps = taken[0].num_repeated
        report.checks = check(
            FAULTS[self.fault],
            every_steps=_save_interval_steps(self.run, self.faulty.spec.checkpoint.every_steps, num_before),
            more_attempts=len(Ledger.read(self.run).attempts) - num_before,
            digests=(digest(runs[0], choose_step(runs[0], None)), digest(runs[1], choose_step(runs[1], None))),
            taken=taken,
        )
        bad = [one for one in report.checks if not one.is_good]
        report.reason = "; ".join(f"{one.name}: {one.told}" for one in bad)
        report.verdict = "FAIL" if bad else "PASS"

    def cancel_unfinished(self) -> None:
        for run in self.submitted:
            if not run.done.exists():
                with suppress(DdpHpcError):
                    _slurm().cancel(run, self.faulty.environ)

    def _await(self, what: str, condition: Callable[[], T | None], *, run: RunDir | None = None) -> T:
        """Return the first true value of `condition`; WorkerError ends the drill where the run gets no further."""
        run, asked_at, is_gone = run or self.run, time.monotonic(), False

        def progress() -> tuple[int, int]:
            return len(Ledger.read(run).attempts), _newest_step(run)

        newest, deadline = progress(), asked_at + self.patience_s
        while True:
            if value := condition():
                return value
            now = time.monotonic()
            if is_gone or now > deadline:
                idle = f"{run.name!r} made no progress for {self.patience_s:.0f} s (`--patience`)"
                found = f"Slurm has no job of {run.name!r} any more" if is_gone else idle
                raise WorkerError(f"The drill waits for {what}, but {found}. {_situation(run)}")
            if now - asked_at > SLURM_POLL_S:
                asked_at, is_gone = now, self._has_no_job(run)  # and check the condition once more before giving up
                if newest != (newest := progress()):
                    deadline = now + self.patience_s
            time.sleep(POLL_S)

    def _has_no_job(self, run: RunDir) -> bool:
        with suppress(SlurmUnavailableError):
            found = _slurm().find_job(run, self.faulty.environ)
            waits = found is not None and found.state == "waiting" and found.job_id
            job = client.job(waits, self.faulty.environ) if waits else None
            if job is not None:
                require_startable(run, job.job_id, job.reason)
            return found is None
        return False


def _attempt_end_text(attempt: Attempt) -> str:
    return f"{attempt.cause or 'end not recorded'}{f' -> {attempt.next}' if attempt.next else ''}"


def _slurm() -> Backend:
    """Return the back end of both runs: a fault is injected by a step of a Slurm job."""
    return load_backend("slurm")


def _newest_step(run: RunDir) -> int:
    """Return the newest step that rank zero has taken."""
    paths = (run.rank_samples(attempt.attempt, 0) for attempt in Ledger.read(run).attempts)
    return max((int(line["step"]) for path in paths for line in read_json_lines(path)), default=0)


def _situation(run: RunDir) -> str:
    """Return the newest step of a run and how its newest attempts ended."""
    attempts = Ledger.read(run).attempts
    ends = [f"attempt {one.attempt}: {_attempt_end_text(one)} {one.reason}".rstrip() for one in attempts[-3:]]
    return f"Its newest step is {_newest_step(run)}; {'; '.join(ends) or 'no attempt has started'}. Read {run.console}."


def _save_interval_steps(run: RunDir, asked: int | Literal["auto"] | None, num_before: int) -> int:
    """Return the interval between checkpoints; 0 without one. Where the run chooses: the newest in the attempts before the fault."""
    if asked != "auto":
        return asked or 0
    chosen = [mark.interval for mark in read_marks(run) if mark.kind == "interval" and mark.attempt < num_before]
    return int(chosen[-1].get("every_steps", 0.0)) if chosen else 0


def check(
    fault: Fault,
    *,
    every_steps: int,
    more_attempts: int,
    digests: tuple[str, str],
    taken: tuple[StepsTaken, StepsTaken],
) -> list[Check]:
    """Return all checks, those that hold and those that do not.

    `every_steps` is `checkpoint.every_steps`, and `more_attempts` is how many began after the fault. `digests` and `taken` are of
    the run with the fault, and of the one without.
    """
    lost, (mine, other) = taken[0].num_repeated, digests
    # Twice the interval: the newest save may not have been committed yet when the fault came.
    may_lose = 0 if fault.is_graceful or not fault.restarts else 2 * every_steps
    told = f"the last checkpoint has the hash {mine} in the run with the fault, {other} in the one without"
    return [
        Check(
            "starts again" if fault.restarts else "goes on",
            bool(more_attempts) == fault.restarts,
            f"{more_attempts} attempts began after the fault, where {'some' if fault.restarts else 'none'} should",
        ),
        Check("lost steps", lost <= may_lose, f"{lost} steps had to be trained again, at most {may_lose} may be"),
        Check("same bits", mine == other, mine if mine == other else told),
        _check_samples(*taken),
    ]


def _check_samples(taken: StepsTaken, unbroken: StepsTaken) -> Check:
    mine, others, twice = taken.steps, unbroken.steps, used_twice(taken)
    other = [step for step in sorted({*mine, *others}) if mine.get(step) != others.get(step)]
    if not others:
        told = "the run without a fault did not record its samples; set `train.record_samples=true` in it"
    elif twice or other:
        first_twice, first_other = (shorten_names([*map(str, found)], 3) or "none" for found in (twice, other))
        told = f"samples used twice (epoch, sample): {first_twice}; steps with other samples than the run without a fault: {first_other}"
    else:
        told = f"checked in {len(mine)} steps"
    return Check("each sample once", bool(others) and not twice and not other, told)
