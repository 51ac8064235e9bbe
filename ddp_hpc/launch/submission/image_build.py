"""Build the image that ddp_hpc ships."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ddp_hpc.base.durable import scratch_path
from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.cluster.containers import candidate_runtimes
from ddp_hpc.run.config.fill_paths import refuse_unknown_home

Engine = Literal["auto", "apptainer", "singularity", "docker"]

BUILD_FILES = (
    "containers/ddp_hpc.def",
    "containers/Dockerfile",
    "containers/install",
    "containers/selftest",
    "envs/requirements.txt",
    "envs/constraints.txt",
)
"""What a build reads, from the project's root."""


def build_files_dir() -> Path:
    """Return the folder with `BUILD_FILES` in it: the checkout's, or in the package once installed."""
    package = Path(__file__).parents[2]
    installed = package / "image_files"
    return installed if installed.exists() else package.parent


def build_image(  # noqa: PLR0913  the flags of one command
    output: str, *, base: str | None, engine: Engine, build_args: Sequence[str], force: bool, environ: Mapping[str, str]
) -> None:
    """Build an image of what workers need, on top of `base`; what the engine says goes to this terminal.

    Raises:
        WorkerError: where the engine failed; nothing is left of it.
    """
    refuse_unknown_home(base or "", f"`--base` is {base!r}")
    program = _choose_engine(engine, environ)
    is_file = program != "docker"
    target = Path(output).absolute()
    if is_file and target.is_dir():
        raise ConfigError(f"{target} is a directory. Name a file for the image.")
    if is_file and target.exists() and not force:
        raise ConfigError(f"{target} exists already. Name another file, or replace it with `--force`.")
    with tempfile.TemporaryDirectory(prefix="ddp_hpc-image-") as folder:
        for name in BUILD_FILES:
            copy = Path(folder, name)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(build_files_dir() / name, copy)
        beside = scratch_path(target)
        options = [*_base_arguments(base, is_file=is_file), *build_args]
        argv = build_argv(program, str(beside) if is_file else output, options)
        try:
            done = subprocess.run(argv, cwd=folder, env=dict(environ), check=False)
            if done.returncode != 0:
                raise WorkerError(
                    f"{program} could not build {output}: it exited with code {done.returncode}. Its output above says why."
                )
            if is_file:
                beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


def build_argv(program: str, output: str, build_args: Sequence[str]) -> list[str]:
    """Return the command that builds, in a folder with `BUILD_FILES`."""
    options = [word for one in build_args for word in ("--build-arg", one)]
    if program == "docker":
        return ["docker", "build", *options, "--file", "containers/Dockerfile", "--tag", output, "."]
    return [program, "build", *options, output, "containers/ddp_hpc.def"]


def _base_arguments(base: str | None, *, is_file: bool) -> list[str]:
    """Return the build arguments of a base: a path is an image here, anything else one of a registry."""
    if base is None:
        return []
    path = Path(base).expanduser()
    if is_file and path.exists():
        return ["BOOTSTRAP=localimage", f"BASE={path.absolute()}"]
    return [f"BASE={base.removeprefix('docker://')}"]


def _choose_engine(engine: Engine, environ: Mapping[str, str]) -> str:
    candidates = candidate_runtimes(engine)
    found = next((name for name in candidates if shutil.which(name, path=environ.get("PATH", ""))), None)
    if found is None:
        raise ConfigError(
            f"PATH has no {' or '.join(candidates)} to build the image with. Load its module, or choose another `--engine`."
        )
    return found
