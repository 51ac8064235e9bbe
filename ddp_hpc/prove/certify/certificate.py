"""The whole of a certification: undisturbed, then under each fault, compared and judged."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_hpc.base.discretion import is_key_shown
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import plural, shorten_names
from ddp_hpc.prove.certify.evidence import Baseline, TrialEvidence
from ddp_hpc.prove.certify.faults import FAULTS, TrialFault, Trigger, trigger_of
from ddp_hpc.prove.certify.output_lines import PrintedLine, losses, parse, scale_from_lines
from ddp_hpc.prove.certify.outside import command_in, is_surely_state, named_paths, refuse_saved_states, texts_in_source
from ddp_hpc.prove.certify.records import RunRecord
from ddp_hpc.prove.certify.sandbox import copy_work_dir, file_stats
from ddp_hpc.prove.certify.saved_files import is_saved_state, masked
from ddp_hpc.prove.certify.trial import Trial
from ddp_hpc.prove.certify.verdicts import FaultResult, judge, needs_second_run
from ddp_hpc.run.spec.script import parse_program

DEFAULT_RANKS = 2
"""How many ranks run, where the settings do not say: what ranks must agree on needs two."""
REDACTED_TEXT = "..."
CERTIFICATE = "certificate.json"
"""In the directory of the runs: the result, as `--json` prints it."""
SILENCE_FACTOR = 3.0
"""A silence of this many times the longest one of the undisturbed run does not count as a hang yet."""


@dataclass(kw_only=True)
class Certificate:
    """The result; the fields are keys of `certify --json`."""

    command: list[str]
    seed: int
    folder: str
    seconds: float = 0.0
    """Of the undisturbed run."""
    unit: str = ""
    """What its output counts: `step` or `epoch`."""
    num_positions: int = 0
    saves: list[str] = field(default_factory=list)
    """The saved states that it writes, each once."""
    final_files: list[str] = field(default_factory=list)
    is_deterministic: bool | None = None
    notes: list[str] = field(default_factory=list)
    findings: list[FaultResult] = field(default_factory=list)

    @property
    def tried_faults(self) -> list[FaultResult]:
        """The faults that came; a script that hangs undisturbed gets none."""
        return [one for one in self.findings if one.was_tried and one.fault in FAULTS]

    @property
    def is_good(self) -> bool:
        """Whether at least one fault was tried, and it came back from every one; a run that finished too early proves nothing."""
        return bool(self.tried_faults) and all(one.is_good for one in self.findings)


@dataclass(kw_only=True)
class Certification:
    """One certification, as the user asks for it."""

    command: Sequence[str]
    settings: Sequence[str]
    faults: Sequence[str]
    work_dir: Path
    folder: Path
    """Where its runs take place."""
    left_out: Sequence[Path] = ()
    """What is not copied: the directory of the runs, and those of earlier certifications."""
    may_change: Sequence[Path] = ()
    """What others change, or the script may: it is not watched."""
    seed: int
    patience_s: float
    is_kept: bool = False
    """Whether the directories of runs without a complaint stay."""
    progress: str | None = None
    """`script.progress`."""
    environ: Mapping[str, str]
    say: Callable[[str], None]
    baseline: Baseline = field(init=False)
    names: set[str] = field(default_factory=set)
    """Of the directories of its runs."""
    notes: list[str] = field(default_factory=list)
    _records: dict[str, RunRecord] = field(default_factory=dict)
    """Of the faults that were tried."""
    _old_states: set[Path] = field(default_factory=set)
    """Of an earlier run; they are not copied."""
    _save_names: frozenset[str] = frozenset()
    _command: Sequence[str] = ()
    _outside: tuple[Path, ...] = ()
    _printing_rank: int = 0

    def certify(self, on_finding: Callable[[FaultResult], None] = lambda _: None) -> Certificate:
        """Run the script undisturbed and under each fault; return the verdicts."""
        certificate = self._begin()
        if certificate.findings:  # it hangs undisturbed
            on_finding(certificate.findings[0])
            return certificate
        self.say(time_estimate_text(certificate.seconds, len(self.faults)))
        rng = random.Random(self.seed)
        for name in self.faults:
            finding = self._try_fault(name, rng)
            certificate.findings.append(finding)
            on_finding(finding)
        # A second undisturbed run, once it was needed, says more of the faults before it, too.
        certificate.findings = [self._judge(one.fault, one.run) if one.run else one for one in certificate.findings]
        certificate.is_deterministic = self.baseline.is_deterministic
        if certificate.is_good and not self.is_kept:  # nothing is left to compare
            for name in self.names:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        return certificate

    def _begin(self) -> Certificate:
        """Run the script undisturbed; return what it does."""
        self._command = command_in(self.work_dir, self.command)
        texts = texts_in_source(parse_program(self._command), self.work_dir)
        variables = [one for one in self.settings if one.startswith("env.")]
        self._outside = self._watched_paths(named_paths((*self._command[1:], *variables), texts))
        refuse_saved_states(self._outside, apart_from=self._other_runs_dirs)
        self.say("running the script undisturbed")
        record = self._run_undisturbed("undisturbed")
        self.baseline = Baseline(record=record)
        self.patience_s = max(self.patience_s, SILENCE_FACTOR * record.longest_silence_s)
        self.notes += _coverage_notes(self.baseline)
        certificate = Certificate(
            command=command_without_secrets(self.command),
            seed=self.seed,
            folder=str(self.folder),
            seconds=round(record.seconds, 1),
            unit=self.baseline.scale.unit,
            num_positions=round(len(self.baseline.positions) * min(1, self.baseline.scale.stride)),
            saves=list(dict.fromkeys(one.path for one in self.baseline.attempt.saves)),
            final_files=sorted(record.final),
            notes=self.notes,
        )
        if record.outcome == "hung":
            evidence = TrialEvidence(TrialFault("no fault", "stop", "stop"), record, self.baseline)
            certificate.findings.append(judge("undisturbed", evidence))
        return certificate

    def _watched_paths(self, paths: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(path for path in paths if not any(path.is_relative_to(one) for one in self.may_change))

    @property
    def _other_runs_dirs(self) -> tuple[Path, ...]:
        """Directories that certify, other runs and, as the user says, others write to, also where a path that the script names contains them."""
        ours = (*self.left_out, self.folder, *self.may_change)
        return tuple(one for one in ours if not self.work_dir.is_relative_to(one))

    def _run_undisturbed(self, name: str) -> RunRecord:
        trial, record = self._run_trial(name)
        if record.outcome == "hung":
            return record
        last = record.attempts[-1]
        if record.outcome != "finished":
            text = next(iter(last.failed_ranks.values()), "") or last.reason or record.outcome
            raise ConfigError(
                f"The script does not finish without a fault, so certify tried no fault: {text.strip()[-600:].rstrip('.')}. "
                f"{hint_on(text, self.work_dir)}Read {trial.runs_dir}."
            )
        # The rank whose lines say most of where the training is: rank zero, if no other says more.
        said = {
            rank: _output_detail([parse(line) for line in log.splitlines()]) for rank, log in sorted(last.logs.items())
        }
        said[0] = _output_detail(last.lines)
        rank = max(sorted(said), key=said.__getitem__)
        if rank and not self._printing_rank:
            self._printing_rank = rank
            found = f"rank {rank} prints the training's {'loss' if said[0] else 'step'}, and rank zero does not"
            self.notes.append(f"{found}, so certify reads that rank's lines")
            self.say(f"{found}; certify runs the script again to read that rank's lines")
            return self._run_undisturbed(f"{name}-of-rank-{rank}")
        known = {masked(Path(path).name) for path in record.final}  # what a save leaves is known by its own name
        self._save_names = frozenset(trial.begun_names - known) if last.saves else frozenset()
        return record

    def _try_fault(self, name: str, rng: random.Random) -> FaultResult:
        """Run the script under one fault; return the verdict."""
        fault = FAULTS[name]
        trigger = trigger_of(fault, self.baseline.record, rng)
        if isinstance(trigger, str):
            words = f"not tried: {trigger}"
            return FaultResult(fault=name, description=fault.description, verdict="not tried", words=words)
        self.say(f"{name}: {fault.description}")
        trial, record = self._run_trial(name, fault, trigger)
        evidence = TrialEvidence(fault, record, self.baseline)
        if self.baseline.second is None and needs_second_run(evidence):
            self.say(
                "its result differs; certify runs the script undisturbed once more, to see whether its result is always the same"
            )
            self.baseline = replace(self.baseline, second=self._run_undisturbed("undisturbed-2"))
        self._records[name] = record
        finding = self._judge(name, str(trial.run_dir.path))
        if finding.is_good and not self.is_kept:
            shutil.rmtree(trial.work_dir.parent, ignore_errors=True)
        return finding

    def _judge(self, name: str, run: str) -> FaultResult:
        """Return the verdict on a fault that was tried, by what the undisturbed runs have shown until now."""
        return replace(judge(name, TrialEvidence(FAULTS[name], self._records[name], self.baseline)), run=run)

    def _run_trial(
        self, name: str, fault: TrialFault | None = None, trigger: Trigger | None = None
    ) -> tuple[Trial, RunRecord]:
        # A directory of its own around the copy: what the script writes to `../out` belongs to this run alone, and is seen.
        work_dir, runs_dir = self.folder / name / "work", self.folder / "runs"
        self.names.add(name)
        linked = copy_work_dir(self.work_dir, work_dir, left_out=(*self.left_out, self.folder, *self._old_states))
        runs_dir.mkdir(parents=True, exist_ok=True)
        before = file_stats(work_dir)
        outside = (*self._outside, *self._watched_paths(linked))
        others = (one for one in self._other_runs_dirs if not any(path.is_relative_to(one) for path in outside))
        trial = Trial(
            name=name,
            work_dir=work_dir,
            runs_dir=runs_dir,
            command=self._command,
            settings=self._settings(fault),
            patience_s=self.patience_s,
            environ=self.environ,
            fault=fault,
            trigger=trigger,
            save_names=self._save_names,
            printing_rank=self._printing_rank,
            progress=self.progress,
            outside=outside,
            apart_from=tuple(others),
        )
        record = trial.run()
        self._refuse_outputs_elsewhere(trial)
        old = [] if fault else earlier_states(before, work_dir, record, trial.progress)
        if old and not self._old_states.issuperset(self.work_dir / path for path in old):
            self._old_states.update(self.work_dir / path for path in old)
            self.notes.append(
                f"{', '.join(old)} of an earlier run is left out of the copies, so that each run starts from scratch"
            )
            self.say(f"{old[0]} exists from an earlier run; certify runs the script again without it")
            return self._run_trial(f"{name}-anew")
        return trial, record

    def _settings(self, fault: TrialFault | None) -> list[str]:
        others = {key: value for key, value in values_of(self.settings).items() if key not in {"name", "runs_dir"}}
        mine = {
            "script.stop_within_s": str(int(3 * self.patience_s) + 1),
            **others,
            "script.stop_signal": fault.stop_signal if fault else "TERM",
        }
        return [*rank_settings(self.settings), *(f"{key}={value}" for key, value in mine.items())]

    def _refuse_outputs_elsewhere(self, trial: Trial) -> None:
        if trial.written_outside:
            written = min(trial.written_outside)
            raise ConfigError(
                f"The script wrote {written}, which is outside of its working directory, so certify has ended the script: its runs would "
                "overwrite each other's results, and yours. Have it write to a relative path below the working directory, through no link "
                "to a directory elsewhere. If that file is a cache, or another program wrote it, add `--may-change "
                f"{Path(written).parent}`."
            )
        own = {trial.work_dir, trial.runs_dir, *(self.folder / name for name in self.names)}
        if strays := sorted({*trial.work_dir.parent.iterdir(), *self.folder.iterdir()} - own):
            raise ConfigError(
                f"The script wrote `{os.path.relpath(strays[0], trial.work_dir)}`, beside its working directory and not below it. Certify the script from the "
                f"directory above: `cd ..`, then `ddp-hpc certify -- python {self.work_dir.name}/...`. Or give it a path below the "
                "working directory for its output."
            )


def _output_detail(lines: Sequence[PrintedLine]) -> int:
    """Return how much lines say: 1 where the training is, 2 its loss there as well."""
    scale = scale_from_lines(lines)
    return bool(scale.unit) + bool(losses(lines, scale))


def _coverage_notes(baseline: Baseline) -> Iterator[str]:
    """Yield notes on what certify does not learn of this script."""
    attempt = baseline.attempt
    if not baseline.scale.unit:
        yield "no line of the script's output names a step or an epoch, so the amount of repeated work is not known"
    if not attempt.saves:
        yield "certify found no saved state among the files that the script writes; if the script saves its state, name the files with `script.progress=PATTERN`"
    if attempt.left_behind:
        named = shorten_names([one[:80] for one in attempt.left_behind], 3, between="; ")
        yield f"the script left processes running when it ended, and certify killed them: {named}"
    if len(attempt.logs) < 2:
        yield "the script ran with one rank, so whether ranks agree was not tested; to test it: `resources.workers_per_node=2`"


def values_of(settings: Sequence[str]) -> dict[str, str]:
    """Return the value of each key in `KEY=VALUE` words."""
    return {key: value for key, _, value in (setting.partition("=") for setting in settings)}


def rank_settings(settings: Sequence[str]) -> list[str]:
    """Return the setting of how many ranks run, where the user's settings do not say it."""
    says = {"resources", "resources.workers_per_node", "resources.gpus_per_node"}
    return [] if says & values_of(settings).keys() else [f"resources.workers_per_node={DEFAULT_RANKS}"]


def time_estimate_text(seconds: float, num_faults: int) -> str:
    """Return how long the faults will take, by the time that the undisturbed run took."""
    minutes = max(1, round(seconds * (num_faults + 2) / 60))  # what a fault has undone is done again
    span = f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes} min"
    advice = ". A shorter training, or fewer faults (`--faults`), shows the same sooner" if minutes >= 30 else ""
    return f"undisturbed, it took {seconds:.0f} s; {plural(num_faults, 'run')} with a fault: about {span}{advice}"


def hint_on(error: str, work_dir: Path) -> str:
    """Return what to do about an error that the script has in a run of certify only; empty for others."""
    if "EOF when reading a line" in error:
        return "The script asks for input, but a job of a cluster has no terminal: give it its input by an option. "
    if "No such file" in error:
        return (
            f"Its runs have a copy of {work_dir} alone, and nothing that lies beside it (`../data`): if a file there is missing, "
            "certify the script from the directory above. "
        )
    return ""


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command as it may stand in a report: without the values of options that are named as secrets are."""
    shown, is_secret = [], False
    for word in command:
        option, sign, value = word.partition("=")
        key = option.lstrip("-")
        if is_secret and not word.startswith("-"):
            shown.append(REDACTED_TEXT)
        else:
            shown.append(f"{option}={REDACTED_TEXT}" if sign and not is_key_shown(key, value) else word)
        is_secret = word.startswith("-") and not sign and not is_key_shown(key, "any text")
    return shown


def earlier_states(
    before: Mapping[str, tuple[int, int]], work_dir: Path, record: RunRecord, pattern: str | None = None
) -> list[str]:
    """Return saved states of an earlier run: this run has changed or deleted them, or saves under names of their kind.

    Where it finished and saved nothing, an earlier run has finished already, and those that it read are such states.
    """
    after = file_stats(work_dir)
    saves = {one.path for attempt in record.attempts for one in attempt.saves}
    if not saves and record.outcome == "finished":
        saves = {one for attempt in record.attempts for one in attempt.reads if is_surely_state(Path(one), pattern)}
    kinds = {masked(path) for path in saves}
    states = [path for path in before if any(is_saved_state(Path(path), one) for one in (None, pattern))]
    return sorted(path for path in states if after.get(path) != before[path] or masked(path) in kinds)
