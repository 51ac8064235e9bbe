"""Render a run's job script from its spec. No other module uses jinja2."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc import __version__
from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.directives import directives, quote, quote_for_sbatch
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec

TEMPLATE_NAME = "ddp.sbatch.j2"


def render(
    spec: RunSpec, run: RunDir, import_paths: Sequence[Path] = (), *, chdir: Path, python: str = sys.executable
) -> str:
    """Return the text of a run's job script. Equal input gives equal text, byte for byte.

    Args:
        spec: All keys, as users' own templates may show any of them.
        run: The run's directory.
        import_paths: Directories from which the workers import the user's code: its snapshot.
        chdir: The job's working directory: the one in which the user called `submit`, as for a local run.
        python: The interpreter of the job's processes.
    """
    users = spec.slurm.template
    options = directives(spec, run, chdir=chdir, cpus_per_worker=spec.cpus_per_task)
    values = {
        "config": run.config,
        "python": python,
        "image": spec.container.image,
        "import_paths": import_paths,
        "python_path": os.pathsep.join(map(str, import_paths)),
        "run": run.path,
        "requeue": spec.slurm.requeue,
        "gave_up_file": run.gave_up,
        "guard_pauses": " ".join(map(str, exit_codes.GUARD_RESTART_PAUSES_S)),
        "decisions": " | ".join(str(code) for code in exit_codes.DECISIONS if code != exit_codes.GAVE_UP),
        "gave_up": exit_codes.GAVE_UP,
        "failed": exit_codes.FAILED,
        "spec": spec,
    }
    # Path.expanduser raises an error for `~nobody`.
    template = packaged_template_path(TEMPLATE_NAME) if users is None else Path(os.path.expanduser(users))  # noqa: PTH111
    return render_template(template, spec, options, values)


def render_template(path: Path, spec: RunSpec, options: Mapping[str, str | None], more: Mapping[str, Any]) -> str:
    """Return the text of a template, which reads sbatch's options as `directive.flag` and `directive.value`, a user's own, too."""
    from jinja2 import TemplateError  # late: only a submission to Slurm needs it

    values = {
        "directives": [{"flag": flag, "value": value} for flag, value in options.items()],
        "name": spec.name,
        "version": __version__,
        "modules": spec.slurm.modules,
        "setup": spec.slurm.setup,
        **more,
    }
    try:
        text: str = _jinja_environment().from_string(path.read_text(encoding="utf-8")).render(values)
    except (OSError, TemplateError, TypeError, ValueError) as error:  # unreadable, invalid, wrong types, not UTF-8
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise ConfigError(
            f"The job script's template (`slurm.template`) cannot be rendered: {where}: {str(error).rstrip('.')}. Correct it."
        ) from error
    return text


def packaged_template_path(name: str) -> Path:
    """Return one of our templates: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).parents[1]
    installed, checkout = package / "sbatch_templates" / name, package.parent / "sbatch_templates" / name
    return installed if installed.exists() else checkout


def _jinja_environment() -> Any:
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
