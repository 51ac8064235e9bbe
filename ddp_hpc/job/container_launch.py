"""How commands run on this job's nodes: in the run's image, by a container runtime that is there, or without one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.containers import (
    BARE,
    CommandWrapper,
    HostPaths,
    command_wrapper,
    container_setup,
    find_runtime,
    identity_of,
    is_name,
    missing_sources,
    refuse_misplaced,
)
from ddp_hpc.job.staging import Staged
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.launch import LaunchSpec


def wrapper_of(
    spec: LaunchSpec, run: RunDir, paths: HostPaths, environ: Mapping[str, str], *, is_for_slurm: bool = True
) -> CommandWrapper:
    """Return how this job's commands are run on its nodes, where nothing is staged."""
    inside = container_setup(spec, run, paths, environ)
    if inside is None:
        return BARE
    refuse_misplaced(spec, is_for_slurm=is_for_slurm)
    if not is_name(spec) and not Path(inside.image).exists():
        raise ConfigError(
            f"`container.image` is {inside.image}, but there is no such file or directory on this node. Put the image on a "
            "file system that all nodes share."
        )
    missing = missing_sources(inside)
    if missing:
        raise ConfigError(
            f"The container has to mount {', '.join(missing)}, but this node has no such path. Mount it on the node, or "
            "change `container.binds`."
        )
    runtime = find_runtime(spec, environ)
    sys.stderr.write(f"the workers run in the image {inside.image}, started by {runtime}\n")
    image = identity_of(inside.image)
    if warning := Ledger.read(run).other_image(image):
        sys.stderr.write(f"note: {warning}\n")
    return replace(command_wrapper(inside, runtime, spec.container.python), image=image)


def moved(wrapper: CommandWrapper, staged: Staged | None, environ: Mapping[str, str]) -> CommandWrapper:
    """Return the same with the paths of what was staged, instead of those on the shared file system."""
    if staged is None:
        return wrapper
    if staged.is_environment:
        paths = [staged.import_path, *filter(None, [environ.get("PYTHONPATH")])]
        return replace(wrapper, python=staged.python, prefix=("env", f"PYTHONPATH={os.pathsep.join(paths)}"))
    prefix = tuple(str(staged.target) if word == staged.source else word for word in wrapper.prefix)
    options = tuple(word.replace(f"={staged.source}", f"={staged.target}") for word in wrapper.srun_args)
    return replace(wrapper, prefix=prefix, srun_args=options)
