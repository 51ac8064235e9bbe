"""Check the image once before submission, rather than on every node of the job."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.containers import (
    HostPaths,
    candidate_runtimes,
    container_setup,
    file_to_stage,
    identity_of,
    is_address,
    missing_sources,
    refuse_unusable_runtime,
    sif_architecture,
)
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of


def image_notes(
    spec: RunSpec, run: RunDir, import_paths: Sequence[Path], environ: Mapping[str, str], *, is_for_slurm: bool
) -> Iterator[str]:
    """Yield what the user should know of the run's image."""
    file_to_stage(spec)
    here = Path.cwd()
    inputs = [*workload_of(spec).input_paths(here)]
    inside = container_setup(spec, run, HostPaths(work_dir=here, import_paths=import_paths, inputs=inputs))
    if inside is None:
        return
    refuse_unusable_runtime(spec, is_for_slurm=is_for_slurm)
    if spec.container.runtime == "docker":
        pass  # Docker's daemon knows its images, and fetches those that it does not have
    elif is_address(inside.image):
        if spec.container.runtime != "pyxis":
            raise ConfigError(
                f"`container.image` is {inside.image}, an address, which every node would download and convert anew. Download "
                f"it once with `apptainer pull image.sif {inside.image}`, and set `container.image=image.sif`."
            )
    elif not Path(inside.image).exists():
        raise ConfigError(
            f"`container.image` is {inside.image}, but there is no such file or directory. Correct the path."
        )
    made_with_the_run = [str(run.path), *(str(path) for path in import_paths)]
    missing = [path for path in missing_sources(inside) if path not in made_with_the_run]
    if missing:
        raise ConfigError(
            f"`container.binds` has {', '.join(missing)}, but there is no such file or directory. Correct or remove it."
        )
    runtime = spec.container.runtime
    names = candidate_runtimes(runtime)
    if runtime != "pyxis" and not any(shutil.which(name, path=environ.get("PATH", "")) for name in names):
        yield f"this host has no {' or '.join(names)} on its PATH; if the nodes do not have it either, load it with `slurm.modules`"
    architecture = sif_architecture(Path(inside.image))
    if architecture is not None and architecture != platform.machine():
        yield f"the image is for {architecture}, but this host is {platform.machine()}; it runs only if the nodes are {architecture}; else choose or build another image"
    if told := Ledger.read(run).image_warning(identity_of(inside.image)):
        yield told
