"""Render a run's job script from its spec. No other module uses jinja2."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc import __version__
from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.directives import directives
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec

TEMPLATE = "ddp.sbatch.j2"


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """The spec, and what else a job script needs."""

    spec: RunSpec
    """All keys, as users' own templates may show any of them."""
    run: RunDir
    chdir: Path
    """The job's working directory: the one in which the user called `submit`, as for a local run."""
    import_paths: Sequence[Path] = ()
    """Directories from which the workers import the user's code: its snapshot."""
    python: str = sys.executable


def render(script: JobScript) -> str:
    """Return the script's text. Equal input gives equal text, byte for byte."""
    users = script.spec.slurm.template
    # Path.expanduser raises an error for `~nobody`.
    template = _own_template(TEMPLATE) if users is None else Path(os.path.expanduser(users))  # noqa: PTH111
    return _rendered(template, _values(script))


def render_template(name: str, values: Mapping[str, Any]) -> str:
    """Return the text of one of our own templates, by its file's name."""
    return _rendered(_own_template(name), values)


def _rendered(path: Path, values: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError  # late: only a submission to Slurm needs it

    try:
        text: str = _environment().from_string(path.read_text(encoding="utf-8")).render(values)
    except (OSError, TemplateError, TypeError, ValueError) as error:  # unreadable, invalid, wrong types, not UTF-8
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise ConfigError(
            f"The job script's template (`slurm.template`) cannot be rendered: {where}: {str(error).rstrip('.')}. Correct it."
        ) from error
    return text


def _own_template(name: str) -> Path:
    """Return one of our templates: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "sbatch_templates" / name, package.parent / "sbatch_templates" / name
    return installed if installed.exists() else checkout


def _environment() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=False,  # noqa: S701  # a shell script, not HTML: the filters `sh` and `sbatch` quote
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = quote
    environment.filters["sbatch"] = quote_for_sbatch
    return environment


def quote(value: object) -> str:
    """Quote a value for the shell."""
    text = os.fspath(value) if isinstance(value, Path) else str(value)
    if "\0" in text or text.splitlines() not in ([], [text]):
        raise ConfigError(
            f"The configuration has the value {text!r}, which goes into one line of the job script, but it has a line break. "
            "Remove the line break."
        )
    return shlex.quote(text)


def quote_for_sbatch(value: object) -> str:
    """Quote a value for a `#SBATCH` line."""
    # sbatch reads the line as a shell would, with one difference: a backslash escapes the next character within single
    # quotes, too (measured: 22.05, 24.11).
    return quote(value).replace("\\", "\\\\")


def _values(script: JobScript) -> dict[str, Any]:
    return {
        "directives": directives(
            script.spec, script.run, chdir=script.chdir, cpus_per_worker=script.spec.cpus_per_task
        ),
        "name": script.spec.name,
        "version": __version__,
        "modules": script.spec.slurm.modules,
        "setup": script.spec.slurm.setup,
        "config": script.run.config,
        "python": script.python,
        "image": script.spec.container.image,
        "import_paths": script.import_paths,
        "python_path": os.pathsep.join(map(str, script.import_paths)),
        "run": script.run.path,
        "requeue": script.spec.slurm.requeue,
        "gave_up_file": script.run.gave_up,
        "guard_pauses": " ".join(map(str, exit_codes.GUARD_PAUSES_S)),
        "decisions": " | ".join(str(code) for code in exit_codes.DECISIONS if code != exit_codes.GAVE_UP),
        "gave_up": exit_codes.GAVE_UP,
        "failed": exit_codes.FAILED,
        "spec": script.spec,
    }
