"""The configuration of each step of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_hpc.config import Resolved
from ddp_hpc.config.braces import fill_braces, names_in_braces
from ddp_hpc.config.keys import key_of
from ddp_hpc.config.paths import is_path, literal
from ddp_hpc.config.resolve import name_from, resolve_settings
from ddp_hpc.config.site import find_profile
from ddp_hpc.config.sources import Origin, Setting, from_environment, from_overrides, settings_in
from ddp_hpc.config.values import convert
from ddp_hpc.errors import ConfigError
from ddp_hpc.pipeline.steps import STEPS, Pipeline, Step
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.submission.unset import fill_unset


@dataclass(frozen=True)
class ResolvedStep:
    """A step, and the configuration of its run."""

    step: Step
    resolved: Resolved

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def run(self) -> RunDir:
        return RunDir(self.resolved.spec.path)


def resolve_steps(
    pipeline: Pipeline, environ: Mapping[str, str], *, site: str | None, is_for_slurm: bool
) -> list[ResolvedStep]:
    """Read the configuration of each step: defaults < site profile < what the steps share < what the step sets.

    In both of the last two, the command line wins over the file; for what the steps share, the environment stands between.

    Raises:
        ConfigError: for the first invalid value, and where steps cannot wait for each other; it names the step.
    """
    profile, path = find_profile(environ, site), pipeline.path
    shared = [
        *settings_in(pipeline.shared, Origin(f"file {path.name}", str(path))),
        *from_environment(environ),
        *from_overrides(pipeline.words),
    ]
    name = _name(shared) or name_from(path.stem)

    def resolved(step: Step, settings: Sequence[Setting]) -> Resolved:
        own = Setting("name", f"{name}-{step.name}", Origin(f"step {step.name}", f"{path}, step {step.name}"))
        try:
            return resolve_settings([*settings, own], environ, name=name, profile=profile, is_for_slurm=is_for_slurm)
        except ConfigError as error:
            raise type(error)(f"The step {step.name!r} has no valid configuration: {error}") from error

    asked = {step.name: [*shared, *_own(step, pipeline)] for step in pipeline.steps}
    for step in pipeline.steps:
        for setting in asked[step.name]:
            _refuse_bare(setting.value, step, list(asked))
    found = {step.name: resolved(step, asked[step.name]) for step in pipeline.steps}
    words = {name: _words(name, RunDir(of.spec.path)) for name, of in found.items()}
    for step in pipeline.steps:
        in_braces = [name for setting in asked[step.name] for name in _names(setting.value)]
        if any(name.partition(".")[0] in found for name in in_braces):
            _check_words(step, in_braces, words, pipeline)
            values = {word: text for of in words.values() for word, text in of.items()}
            found[step.name] = resolved(step, [_filled(setting, values) for setting in asked[step.name]])
    _refuse_changing_jobs(pipeline, found, is_for_slurm=is_for_slurm)
    return [
        ResolvedStep(step, fill_unset(found[step.name], environ, is_for_slurm=is_for_slurm)) for step in pipeline.steps
    ]


def _name(shared: Sequence[Setting]) -> str:
    """Return the pipeline's name where a setting has it; the last one counts."""
    key = key_of("name")
    named = [setting for setting in shared if setting.key == "name"]
    return str(convert(key, named[-1].value, str(named[-1].origin))) if key is not None and named else ""


def _own(step: Step, pipeline: Pipeline) -> list[Setting]:
    """Return what a step sets for itself."""
    origin = Origin(f"file {pipeline.path.name}, step {step.name}", f"{pipeline.path}, step {step.name}")
    return [*settings_in(step.settings, origin), *from_overrides(step.words)]


def _words(name: str, run: RunDir) -> dict[str, str]:
    """Return the words that stand for a step's run, and their texts."""
    return {f"{name}.run_dir": str(run.path), f"{name}.checkpoints": str(run.checkpoints), f"{name}.run": run.name}


def _names(value: Any) -> Iterator[str]:
    """Yield the words in braces in a value's texts."""
    if isinstance(value, str):
        yield from names_in_braces(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _names(item)
    elif isinstance(value, dict):
        yield from _names(list(value.values()))


def _refuse_bare(value: Any, step: Step, names: Sequence[str]) -> None:
    """Refuse a word in braces without quotes around it, which YAML reads as a mapping."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, inner),) = value.items()
        if inner is None and isinstance(key, str) and "." in key and key.partition(".")[0] in names:
            raise ConfigError(
                f'The step {step.name!r} has {{{key}}} without quotes, which YAML reads as a mapping. Write "{{{key}}}", with the quotes.'
            )
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        _refuse_bare(item, step, names)


def _check_words(
    step: Step, in_braces: Sequence[str], words: Mapping[str, Mapping[str, str]], pipeline: Pipeline
) -> None:
    """Refuse words in braces that begin with a step's name, and stand for nothing that this step can use."""
    for name in in_braces:
        of, dot, _ = name.partition(".")
        if not dot or of not in words:
            continue
        if name not in words[of]:
            raise ConfigError(
                f"The step {step.name!r} has {{{name}}}, but of a step there are only {', '.join(f'{{{word}}}' for word in words[of])}."
            )
        if of != step.name and of not in pipeline.before(step.name):
            raise ConfigError(
                f"The step {step.name!r} has {{{name}}}, but it does not wait for {of!r}, so it may start before that run has written "
                f"anything. Add `after: {of}` to `{STEPS}.{step.name}`."
            )


def _filled(setting: Setting, values: Mapping[str, str]) -> Setting:
    """Return a setting with the words in braces replaced in its texts."""
    if is_path(setting.key):  # where `$` is the beginning of a variable
        values = {word: literal(text) for word, text in values.items()}
    return replace(setting, value=_filled_value(setting.value, values))


def _filled_value(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return fill_braces(value, values)
    if isinstance(value, (list, tuple)):
        return [_filled_value(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _filled_value(item, values) for key, item in value.items()}
    return value


def _refuse_changing_jobs(pipeline: Pipeline, found: Mapping[str, Resolved], *, is_for_slurm: bool) -> None:
    """Refuse a step that others wait for, where a new job may follow its first one: Slurm waits for jobs, not for runs."""
    for step in pipeline.steps if is_for_slurm else ():
        for one in step.after:
            by = found[one.step].spec.restart.by
            if by != "requeue":
                raise ConfigError(
                    f"The step {step.name!r} waits for {one.step!r}, whose run may go on in a new job (`restart.by` is {by!r}), but Slurm "
                    f"can wait only for a job whose number stays. Set `{STEPS}.{one.step}.restart.by` to `requeue`."
                )
