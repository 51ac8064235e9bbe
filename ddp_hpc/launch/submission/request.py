"""What is to be started: one value, which a verb or a program makes once, and which all that submits takes as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.launch.submission.fill_unset import fill_unset
from ddp_hpc.run.config.resolve import Resolved, resolve
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import AwaitedRun
from ddp_hpc.run.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class SubmitRequest:
    """A run as it is to be submitted, or what the points of a sweep have in common."""

    resolved: Resolved
    import_paths: Sequence[Path]
    """Where the user's code is looked for before the packages that are installed."""
    environ: Mapping[str, str]
    """That of the command or program."""
    awaits: Sequence[AwaitedRun] = ()
    """The runs whose jobs the job waits for, for `status`; the scheduler goes by `slurm.dependency`."""

    @property
    def spec(self) -> RunSpec:
        """The configuration without its sources."""
        return self.resolved.spec

    @property
    def run(self) -> RunDir:
        """Where the run is, or will be."""
        return RunDir(self.spec.path)


def request_of_config(  # noqa: PLR0913  the parts of a command line, and what decides which of them count
    path: Path | None,
    settings: Sequence[str],
    environ: Mapping[str, str],
    *,
    site: str | None,
    is_for_slurm: bool,
    command: Sequence[str] = (),
    is_fresh: bool = False,
) -> SubmitRequest:
    """Resolve a configuration, and fill in what the machine decides; `is_fresh`: a run that exists does not count."""
    resolved = resolve(path, settings, environ, site=site, is_for_slurm=is_for_slurm, command=command)
    resolved = fill_unset(resolved, environ, is_for_slurm=is_for_slurm, is_fresh=is_fresh)
    import_paths = [Path.cwd(), *([] if path is None else [path.absolute().parent])]
    return SubmitRequest(resolved=resolved, import_paths=import_paths, environ=environ)
