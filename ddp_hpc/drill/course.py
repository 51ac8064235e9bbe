"""The course of a drill: two runs are submitted, one suffers the fault, both come to their end, and are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from ddp_hpc.checkpoint_store import committed_steps
from ddp_hpc.config import Resolved, changes, load_resolved, render_resolved
from ddp_hpc.drill.faults import FAULTS, Deed, Scene
from ddp_hpc.drill.verdict import Check, Found, check
from ddp_hpc.durable import read_json_lines
from ddp_hpc.errors import ConfigError, DdpHpcError, SlurmUnavailableError, WorkerError
from ddp_hpc.ledger import Attempt, Ledger
from ddp_hpc.records import read_progress
from ddp_hpc.run_dir import RunDir
from ddp_hpc.submission.backend import Backend, load_backend
from ddp_hpc.watch.checkpoints import choose_step, digest
from ddp_hpc.watch.samples import read_taken

T = TypeVar("T")
CONFIG = Path(__file__).with_name("drill.yaml")
"""What is run where the user names nothing."""
LOOK_S = 0.05
ASK_S = 3.0
"""How often Slurm is asked whether the job is still there."""
_FREE = (
    "name",
    "runs_dir",
    "launcher",
    "slurm.",
    "restart.",
    "resources.",
    "recipe.args.sample_s",
    "checkpoint.",
    "log.",
)
"""Keys by which the two runs may differ: none bears on what is learnt."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done."""

    fault: str
    hit: Resolved
    """The run that suffers it."""
    unbroken: Resolved | RunDir
    """The run that does not: to be made, or there already."""
    import_paths: Sequence[Path]
    by_hand: bool = False
    batch_host: bool = False
    """Whether the fault hits the batch host, rather than the last node."""
    signal: str = "TERM"
    patience_s: float = 600.0
    """How long nothing may happen."""


@dataclass(kw_only=True)
class Report:
    """What came of it; the fields are the keys of `drill --json`."""

    fault: str
    verdict: Literal["PASS", "FAIL"] = "FAIL"
    reason: str = ""
    """Why it failed."""
    what: str = ""
    """What was done."""
    step: int | None = None
    """At the fault, about."""
    resumed_at: int | None = None
    lost_steps: int | None = None
    """Steps that had to be taken again."""
    seconds_to_running: float | None = None
    """From the fault to the next attempt's first step."""
    causes: list[str] = field(default_factory=list)
    """Why each attempt ended, and what followed."""
    checks: list[Check] = field(default_factory=list)
    attempts_before: int | None = None
    run: str = ""
    unbroken: str = ""


def drill(plan: Plan, environ: Mapping[str, str], say: Callable[[str], None]) -> Report:
    """Do it; return how it went.

    Raises:
        ConfigError: where it cannot be begun.
    """
    run = RunDir(plan.hit.spec.path)
    unbroken = (
        _fitting(plan.unbroken, plan.hit) if isinstance(plan.unbroken, RunDir) else RunDir(plan.unbroken.spec.path)
    )
    report = Report(fault=plan.fault, run=str(run.path), unbroken=str(unbroken.path))
    course = _Course(plan, run, unbroken, environ, say)
    try:
        course.submit()
        course.suffer(report)
        course.judge(report)
    except WorkerError as error:
        report.reason = str(error)
    finally:
        course.leave_nothing()
    report.causes = [_told(attempt) for attempt in Ledger.read(run).attempts]
    return report


def _fitting(unbroken: RunDir, hit: Resolved) -> RunDir:
    """Return the run to compare with, if it learns the same.

    Raises:
        ConfigError: where it does not, or has not finished.
    """
    differing = [one.key for one in changes(load_resolved(unbroken.config), hit.spec) if not one.key.startswith(_FREE)]
    if differing:
        raise ConfigError(f"{unbroken.name} is no run to compare with: it differs by {', '.join(differing)}.")
    if not unbroken.done.exists():
        raise ConfigError(f"{unbroken.name} is no run to compare with: it has not finished.")
    return unbroken


def _told(attempt: Attempt) -> str:
    return f"{attempt.cause or 'no last word'}{f' -> {attempt.next}' if attempt.next else ''}"


@dataclass
class _Course:
    """Both runs, from their submission to their end."""

    plan: Plan
    run: RunDir
    unbroken: RunDir
    environ: Mapping[str, str]
    say: Callable[[str], None]

    def submit(self) -> None:
        """Put them into the queue.

        Raises:
            ConfigError: where they cannot be, or are there already.
        """
        if isinstance(self.plan.unbroken, Resolved):
            self._send(self.plan.unbroken)
        self._send(self.plan.hit)

    def _send(self, resolved: Resolved) -> None:
        text, spec = render_resolved(resolved), resolved.spec
        sent = _slurm().submit(text, spec, import_paths=self.plan.import_paths, environ=self.environ)
        if not sent.is_new:
            raise ConfigError(f"{sent.run.path} exists already; a drill needs a fresh run. Choose another `name=...`.")
        self.say(f"{sent.run.name}: job {sent.job_id} submitted")

    def suffer(self, report: Report) -> None:
        """Have the fault come when the run is well under way, and see it through to its end."""
        before = self._await("it to be well under way", self._well_under_way)
        self.say(f"{self.run.name}: runs on {', '.join(before.nodes)}")
        deed = self._inflict(before)
        self.say(deed.told)
        report.what, report.attempts_before, report.step = deed.told, before.attempt + 1, _step(self.run)
        if FAULTS[self.plan.fault].restarts:
            after, stepped_at = self._await("it to start again", lambda: self._first_step_after(before))
            report.resumed_at = after.first_step
            report.seconds_to_running = stepped_at - (deed.at or _last_sign(self.run, before))
            self.say(f"runs again after {report.seconds_to_running:.1f} s, from step {report.resumed_at}")
        self._await("it to finish", self.run.done.exists)
        self.say(f"{self.run.name}: finished, attempts: {len(Ledger.read(self.run).attempts)}")

    def _well_under_way(self) -> Attempt | None:
        """Return the attempt at work, once it has checkpoints to lose steps after."""
        if self.run.done.exists():
            raise WorkerError("It was over before the fault came: make it longer (`train.max_steps`).")
        attempts, progress = Ledger.read(self.run).attempts, read_progress(self.run)
        is_stepping = progress is not None and attempts and progress.attempt == attempts[-1].attempt
        return attempts[-1] if is_stepping and len(committed_steps(self.run)) > 1 else None

    def _inflict(self, before: Attempt) -> Deed:
        fault, node = FAULTS[self.plan.fault], before.nodes[0 if self.plan.batch_host else -1]
        if self.plan.by_hand:
            words = {"job_id": before.job_id, "node": node, "nodes": ", ".join(before.nodes), "run": self.run.path}
            return Deed(f"{fault.by_hand.format(**words)}.")
        assert fault.inflict is not None  # noqa: S101  the verb has looked
        scene = Scene(
            run=self.run,
            spec=self.plan.hit.spec,
            job_id=before.job_id,
            nodes=before.nodes,
            node=node,
            signal=self.plan.signal,
            environ=self.environ,
        )
        return fault.inflict(scene)

    def _first_step_after(self, before: Attempt) -> tuple[Attempt, float] | None:
        """Return the next attempt that has taken a step, and when it was seen to."""
        is_over = self.run.done.exists()  # asked first, so that its last steps are not missed
        for attempt in Ledger.read(self.run).attempts:
            with suppress(FileNotFoundError):
                path = self.run.rank_samples(attempt.attempt, 0)
                if attempt.attempt > before.attempt and path.stat().st_size:
                    return attempt, time.time()
        if is_over:
            raise WorkerError("It finished before it had to start again: make it longer (`train.max_steps`).")
        return None

    def judge(self, report: Report) -> None:
        """Compare the two, once both have finished."""
        self._await("the unbroken run to finish", self.unbroken.done.exists, run=self.unbroken)
        fault, taken = FAULTS[self.plan.fault], read_taken(self.run)
        report.lost_steps = taken.num_repeated
        report.checks = check(
            Found(
                is_graceful=fault.is_graceful,
                restarts=fault.restarts,
                every_steps=self.plan.hit.spec.checkpoint.every_steps or 0,
                more_attempts=len(Ledger.read(self.run).attempts) - (report.attempts_before or 0),
                digest=digest(self.run, choose_step(self.run, None)),
                unbroken_digest=digest(self.unbroken, choose_step(self.unbroken, None)),
                taken=taken,
                unbroken_taken=read_taken(self.unbroken),
            )
        )
        bad = [one for one in report.checks if not one.is_good]
        report.reason = "; ".join(f"{one.name}: {one.told}" for one in bad)
        report.verdict = "FAIL" if bad else "PASS"

    def leave_nothing(self) -> None:
        """Take what still runs out of the queue; a run that was there before is not ours."""
        for run in [self.run, *([self.unbroken] if isinstance(self.plan.unbroken, Resolved) else [])]:
            if run.submission.exists() and not run.done.exists():
                with suppress(DdpHpcError):
                    _slurm().cancel(run, self.environ)

    def _await(self, what: str, condition: Callable[[], T | None], *, run: RunDir | None = None) -> T:
        """Return the first true value of `condition`.

        Raises:
            WorkerError: where none comes, though nothing happens any more, or Slurm has no job of the run any more.
        """
        run, asked_at, is_gone = run or self.run, time.monotonic(), False
        happened, deadline = _happened(run), asked_at + self.plan.patience_s
        while True:
            value = condition()
            if value:
                return value
            now = time.monotonic()
            if is_gone:
                raise WorkerError(f"Waited for {what}, but {run.name} has no job any more. {_known(run)}")
            if now > deadline:
                raise WorkerError(
                    f"Waited for {what}, but nothing happened for {self.plan.patience_s:.0f} s. {_known(run)}"
                )
            if now - asked_at > ASK_S:
                asked_at, is_gone = now, self._has_no_job(run)  # the condition has another look before we give up
                if happened != (happened := _happened(run)):
                    deadline = now + self.plan.patience_s
            time.sleep(LOOK_S)

    def _has_no_job(self, run: RunDir) -> bool:
        try:
            return _slurm().find_job(run, self.environ) is None
        except SlurmUnavailableError:
            return False


def _slurm() -> Backend:
    """Return the back end of both runs: a fault is made by a step of a Slurm job."""
    return load_backend("slurm")


def _step(run: RunDir) -> int:
    """Return the newest step that rank zero has taken."""
    paths = (run.rank_samples(attempt.attempt, 0) for attempt in Ledger.read(run).attempts)
    return max((int(line["step"]) for path in paths for line in read_json_lines(path)), default=0)


def _happened(run: RunDir) -> tuple[int, int]:
    """Return what changes while anything happens: its attempts, and its newest step."""
    return len(Ledger.read(run).attempts), _step(run)


def _last_sign(run: RunDir, attempt: Attempt) -> float:
    """Return when an attempt took its last step."""
    return run.rank_samples(attempt.attempt, 0).stat().st_mtime


def _known(run: RunDir) -> str:
    """Return what its directory says: where it stands, and how its newest attempts ended."""
    attempts = Ledger.read(run).attempts
    told = [f"attempt {one.attempt}: {_told(one)} {one.reason}".rstrip() for one in attempts[-3:]]
    return f"It stands at step {_step(run)}; {'; '.join(told) or 'it has begun no attempt'}. Look at {run.console}."
