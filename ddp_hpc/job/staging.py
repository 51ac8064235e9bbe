"""How commands run on this job's nodes: in the run's image or without one, and from the nodes' own disks where that is asked for.

What the workers import is copied there before they start: one large read, not many small ones.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.containers import (
    BARE,
    PACKAGE_DIR,
    CommandWrapper,
    HostPaths,
    command_wrapper,
    container_setup,
    file_to_stage,
    find_runtime,
    identity_of,
    is_archive,
    is_name,
    missing_sources,
    refuse_unusable_runtime,
)
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job.wire.subprocesses import ask_nodes
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.launch import LaunchSpec

STAGE_TIMEOUT_S = 1800.0
_REMOVE_TIMEOUT_S = 5.0
"""Short: the time limit may be near, and requeueing the job must not wait for the removal."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What was copied to the nodes' own disks, under the same path on each."""

    folder: Path
    source: str
    target: Path


def stage(spec: LaunchSpec, run: RunDir, allocation: Allocation | None, environ: Mapping[str, str]) -> Staged | None:
    """Put the run's image, or its packed environment, on every node; None where none is wanted, or that failed.

    A failure costs time, but does not end the run: the nodes then use the shared one, and the log says so.
    """
    try:
        source = file_to_stage(spec)
        if spec.stage.dir is None or source is None or allocation is None:
            return None
        folder = _staging_folder(spec.stage.dir, run, allocation, environ)
    except ConfigError as error:
        sys.stderr.write(
            f"warning: nothing can be copied to the nodes' disks: {error} The nodes read from the shared file system instead.\n"
        )
        return None
    staged = Staged(folder=folder, source=source, target=folder / Path(source).name.partition(".tar")[0])
    num_nodes = len(allocation.node_names)
    command = [sys.executable, "-m", "ddp_hpc.job.node.unpack", source, str(staged.target), str(PACKAGE_DIR)]
    answers = ask_nodes(command, allocation.node_names, environ=environ, timeout_s=STAGE_TIMEOUT_S, is_all_or_none=True)
    nodes = answers.by_node
    failed = next((f"{name}: {node['error']}" for name, node in nodes.items() if node["error"]), "")
    if failed or answers.silent:
        why = failed or f"{', '.join(answers.silent)} did not answer{answers.last_error and f' ({answers.last_error})'}"
        sys.stderr.write(
            f"warning: {source} could not be copied to {folder} on the nodes: {why}. The nodes use {source} on the shared file system, which may be slower; the run needs nothing else.\n"
        )
        unstage(staged, allocation, environ)
        return None
    slowest = max(nodes, key=lambda name: nodes[name]["seconds"])
    gigabytes = nodes[slowest]["num_bytes"] / 1e9
    sys.stderr.write(
        f"copied {source} ({gigabytes:.2f} GB) to {folder} on {num_nodes} nodes in {nodes[slowest]['seconds']:.1f} s (the slowest was {slowest})\n"
    )
    return staged


def unstage(staged: Staged | None, allocation: Allocation | None, environ: Mapping[str, str]) -> None:
    """Remove what was copied to the nodes; where that fails, the site has to clean up after the job (Epilog)."""
    if staged is None or allocation is None:
        return
    command = [sys.executable, "-m", "ddp_hpc.job.node.unpack", str(staged.folder)]
    ask_nodes(command, allocation.node_names, environ=environ, timeout_s=_REMOVE_TIMEOUT_S)


def _staging_folder(asked: str, run: RunDir, allocation: Allocation, environ: Mapping[str, str]) -> Path:
    """Return a folder that only this start of this job uses; `$NAME` is a variable of the job's environment."""
    try:
        place = Path(Template(asked).substitute(environ))
    except ValueError as error:
        raise ConfigError(
            f"`stage.dir` is {asked!r}, but it has a `$` that no variable's name follows. Write `$$` for a plain `$`, or `$NAME` for a variable."
        ) from error
    except KeyError as error:
        raise ConfigError(
            f"`stage.dir` is {asked!r}, but the job's environment does not have the variable {error}. Set it in `slurm.setup`, or name another directory."
        ) from error
    if not place.is_absolute():
        raise ConfigError(
            f"`stage.dir` is {asked!r}, but it must be an absolute path: begin it with `/`, or with a variable such as `$TMPDIR`."
        )
    which = hashlib.sha256(os.fsencode(run.path)).hexdigest()[:8]  # under salloc, one job may start several runs
    return place / f"ddp_hpc-{allocation.job_id}-{allocation.restart_count}-{which}"


def job_command_wrapper(
    spec: LaunchSpec, run: RunDir, paths: HostPaths, environ: Mapping[str, str], *, is_for_slurm: bool = True
) -> CommandWrapper:
    """Return how this job's commands are run on its nodes, where nothing is staged."""
    inside = container_setup(spec, run, paths, environ)
    if inside is None:
        return BARE
    refuse_unusable_runtime(spec, is_for_slurm=is_for_slurm)
    if not is_name(spec) and not Path(inside.image).exists():
        raise ConfigError(
            f"`container.image` is {inside.image}, but there is no such file or directory on this node. Put the image on a file system that all nodes share."
        )
    missing = missing_sources(inside)
    if missing:
        raise ConfigError(
            f"The container has to mount {', '.join(missing)}, but this node has no such path. Mount it on the node, or change `container.binds`."
        )
    runtime = find_runtime(spec, environ)
    sys.stderr.write(f"the workers run in the image {inside.image}, started by {runtime}\n")
    image = identity_of(inside.image)
    if warning := Ledger.read(run).image_warning(image):
        sys.stderr.write(f"note: {warning}\n")
    return replace(command_wrapper(inside, runtime, spec.container.python), image=image)


def with_staged_paths(wrapper: CommandWrapper, staged: Staged | None, environ: Mapping[str, str]) -> CommandWrapper:
    """Return the same with the paths of what was staged, instead of those on the shared file system."""
    if staged is None:
        return wrapper
    if is_archive(staged.source):
        # The unpacked environment's Python finds this ddp_hpc where `unpack` has linked it.
        paths = [str(staged.folder / "import"), *filter(None, [environ.get("PYTHONPATH")])]
        python = str(staged.target / "bin" / "python")
        return replace(wrapper, python=python, prefix=("env", f"PYTHONPATH={os.pathsep.join(paths)}"))
    prefix = tuple(str(staged.target) if word == staged.source else word for word in wrapper.prefix)
    options = tuple(word.replace(f"={staged.source}", f"={staged.target}") for word in wrapper.srun_args)
    return replace(wrapper, prefix=prefix, srun_args=options)
