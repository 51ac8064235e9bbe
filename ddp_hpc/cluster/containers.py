"""Build the command line that runs a process inside a container image. Pure, except that it reads paths and image files.

The processes that use PyTorch run inside: agents, tasks, torchrun. The processes that call Slurm stay outside: the job
script, the supervisor, srun. So an image needs neither Slurm's commands nor munge.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import ddp_hpc
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.launch import LaunchSpec

PACKAGE_DIR = Path(ddp_hpc.__file__).parent
DIR_IN_CONTAINER = Path("/opt/ddp_hpc")
"""Where the image's Python finds the copy of ddp_hpc that submitted the run, and no other package of the host."""
_NEVER_MOUNTED_DIRS = tuple(map(Path, ("/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/lib", "/lib64", "/sbin")))
"""Host directories that are never mounted: the image has its own."""

Gpus = Literal["nvidia", "rocm", "none"]
RuntimeName = Literal["apptainer", "singularity", "pyxis", "docker"]


@dataclass(frozen=True)
class Bind:
    """A path of the host that is mounted in the container."""

    source: str
    target: str
    is_read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Bind:
        """Read `SOURCE[:TARGET[:ro|rw]]`."""
        source, *rest = text.split(":")
        target = rest[0] if rest else source
        modes = rest[1:]
        if not (source.startswith("/") and target.startswith("/")) or modes not in ([], ["ro"], ["rw"]):
            raise ConfigError(
                f"`container.binds` has {text!r}, but a bind must be `/SOURCE`, `/SOURCE:/TARGET` or `/SOURCE:/TARGET:ro`."
            )
        return cls(source, target, modes == ["ro"])


@dataclass(frozen=True, kw_only=True)
class ContainerSetup:
    """What a container provides to the command in it: mounts, variables, working directory, GPUs."""

    image: str
    binds: tuple[Bind, ...]
    environ: Mapping[str, str]
    """Variables that are set inside and win over those outside; all others are passed on unchanged."""
    work_dir: str
    gpus: Gpus = "none"
    options: tuple[str, ...] = ()
    """Options of the user for the runtime."""
    passed: tuple[str, ...] = ()
    """Names of the variables outside, for a runtime that passes on only those that are named (Docker)."""
    user: str = ""
    """`UID:GID` of the user, for the same runtime."""
    groups: tuple[int, ...] = ()
    """The user's other groups."""


@dataclass(frozen=True)
class CommandWrapper:
    """How a node starts a Python command: `srun_args` are for srun; `prefix` and `python` come before `-m MODULE`."""

    python: str = sys.executable
    prefix: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for the process that starts it. They carry the values to set inside, since any user can see command lines."""
    image: str = ""
    """Identity of the image, as `identity_of` returns it."""

    @property
    def command(self) -> list[str]:
        return [*self.prefix, self.python]


BARE = CommandWrapper()
"""Start Python directly, without a container."""


@dataclass(frozen=True, kw_only=True)
class HostPaths:
    """Paths of this host that a run's workers use, besides its directory."""

    work_dir: Path
    import_paths: Sequence[Path] = ()
    """Where they import the user's code from."""
    inputs: Sequence[Path] = ()
    """What they may read; those that do not exist are left out."""


# --- what the container provides ---------------------------------------------------------------------------------------


def container_setup(
    spec: LaunchSpec, run: RunDir, paths: HostPaths, environ: Mapping[str, str] | None = None
) -> ContainerSetup | None:
    """Return what a run's container provides to its workers; None for a run without an image."""
    container, resources = spec.container, spec.resources
    if container.image is None:
        return None
    gpus: Gpus = container.gpus if container.gpus != "auto" else "nvidia" if resources.gpus_per_node else "none"
    return ContainerSetup(
        image=container.image if is_name(spec) else str(image_path(container.image)),
        binds=tuple(_binds(spec, run, paths)),
        environ={
            **spec.environ,  # set inside: else the image's PATH and LD_LIBRARY_PATH win, and with pyxis all its variables
            "PYTHONPATH": str(DIR_IN_CONTAINER),  # the workers themselves add the user's code to sys.path
            "PYTHONNOUSERSITE": "1",  # else packages in ~/.local, which is mounted, win over the image's packages
        },
        work_dir=str(paths.work_dir),
        gpus=gpus,
        options=container.options,
        passed=tuple(sorted(environ or ())),
        user=f"{os.getuid()}:{os.getgid()}",
        groups=tuple(sorted({*os.getgroups()} - {os.getgid()})),
    )


def is_name(spec: LaunchSpec) -> bool:
    """Tell whether the image is a name or an address for its runtime, rather than a path."""
    return spec.container.runtime == "docker" or is_address(spec.container.image or "")


def is_address(image: str) -> bool:
    """Tell whether an image is an address such as `docker://...`, rather than a path."""
    return "://" in image or ("#" in image and not image.startswith(("/", ".", "~")))


def image_path(image: str) -> Path:
    """Return the absolute path of an image."""
    return Path(os.path.abspath(Path(image).expanduser()))  # noqa: PTH100  # keep links: the user named them


def _binds(spec: LaunchSpec, run: RunDir, paths: HostPaths) -> Iterator[Bind]:
    """Yield the user's binds, then those that the run needs, without paths that are within another bind."""
    asked = [Bind.parse(text) for text in spec.container.binds]
    yield Bind(str(PACKAGE_DIR), str(DIR_IN_CONTAINER / PACKAGE_DIR.name), is_read_only=True)
    yield from asked
    seen = [Path(bind.target) for bind in asked]
    # Not `Path.exists`, which raises an error for a name that the file system refuses.
    there = [path for path in paths.inputs if os.path.exists(path)]  # noqa: PTH110
    inputs = [path for path in there if not any(path.is_relative_to(other) for other in _NEVER_MOUNTED_DIRS)]
    wanted = [run.path, paths.work_dir, *paths.import_paths, *inputs]
    for path in sorted(dict.fromkeys(wanted), key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in seen) and path != Path("/"):
            seen.append(path)
            yield Bind(str(path), str(path))


def refuse_unusable_runtime(spec: LaunchSpec, *, is_for_slurm: bool) -> None:
    """Refuse a runtime that cannot run here."""
    runtime = spec.container.runtime
    if runtime == "docker" and is_for_slurm:
        raise ConfigError(
            "`container.runtime` is docker, but users cannot run Docker on the nodes of a Slurm cluster. Convert the image to "
            "a file (`apptainer build image.sif docker-daemon:NAME:TAG`), set `container.image=image.sif`, and leave `container.runtime` out."
        )
    if runtime == "pyxis" and not is_for_slurm:
        raise ConfigError(
            "`container.runtime` is pyxis, which is a plugin of Slurm's srun, but this run does not use Slurm. Set `container.runtime` to apptainer or docker."
        )


def missing_sources(inside: ContainerSetup) -> list[str]:
    """Return the sources of binds that do not exist: every runtime refuses to start with one, on every node."""
    return [bind.source for bind in inside.binds if not os.path.exists(bind.source)]  # noqa: PTH110


# --- staging -----------------------------------------------------------------------------------------------------------

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
"""Endings of archives that `tar` unpacks."""


def is_archive(source: str) -> bool:
    """Tell whether a file is an archive rather than an image, by its name."""
    return source.endswith(ARCHIVE_SUFFIXES)


def file_to_stage(spec: LaunchSpec) -> str | None:
    """Return the file that a run copies to its nodes' local disks: an archive, or an image file; None if there is none."""
    if spec.stage.archive is not None:
        path = image_path(spec.stage.archive)
        if not is_archive(path.name):
            raise ConfigError(
                f"`stage.archive` is {spec.stage.archive!r}, but its name must end in one of {', '.join(ARCHIVE_SUFFIXES)}."
            )
        if not path.is_file():
            raise ConfigError(f"`stage.archive` is {path}, but that file does not exist. Correct the path.")
        return str(path)
    if spec.stage.dir is None or spec.container.image is None or is_name(spec):
        return None
    image = image_path(spec.container.image)
    return str(image) if image.is_file() else None


# --- images ------------------------------------------------------------------------------------------------------------

# The global header of the SIF format (apptainer/sif, `pkg/sif`): a `#!` line for the kernel, then these fields.
_SIF_MAGIC, _MAGIC_AT, _ARCHITECTURE_AT, _ID_AT, _HEADER_BYTES = b"SIF_MAGIC", 32, 45, 48, 64
_ARCHITECTURES = {b"02": "x86_64", b"04": "aarch64", b"06": "ppc64le"}
"""SIF's code -> the name of `platform.machine()`."""


def sif_architecture(path: Path) -> str | None:
    """Return the CPU architecture of an image file; None if it does not say."""
    header = _sif_header(path)
    return None if header is None else _ARCHITECTURES.get(header[_ARCHITECTURE_AT : _ARCHITECTURE_AT + 2])


def identity_of(image: str) -> str:
    """Return what identifies an image: its address, or the id that a SIF file got when it was built.

    Empty for directories, whose contents may change.
    """
    if is_address(image):
        return image
    header = _sif_header(Path(image))
    return "" if header is None else f"SIF {header[_ID_AT:_HEADER_BYTES].hex()}"


def _sif_header(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    is_sif = header[_MAGIC_AT : _MAGIC_AT + len(_SIF_MAGIC)] == _SIF_MAGIC
    return header if is_sif and len(header) == _HEADER_BYTES else None


# --- runtimes ----------------------------------------------------------------------------------------------------------


def candidate_runtimes(asked: Literal["auto"] | RuntimeName) -> Sequence[RuntimeName]:
    """Return the programs that may run the image; the first one on PATH is used."""
    return ("apptainer", "singularity") if asked == "auto" else (asked,)


def find_runtime(spec: LaunchSpec, environ: Mapping[str, str]) -> RuntimeName:
    """Return the program that runs the image on this host."""
    asked = spec.container.runtime
    if asked == "pyxis":
        return asked
    candidates = candidate_runtimes(asked)
    found = next((name for name in candidates if shutil.which(name, path=environ.get("PATH", ""))), None)
    if found is None:
        raise ConfigError(
            f"`container.image` needs {' or '.join(candidates)}, but PATH on this host has none. Load its module (in a job, with "
            "`slurm.modules`), or set `container.runtime` to a runtime that is installed."
        )
    return found


def command_wrapper(inside: ContainerSetup, runtime: RuntimeName, python: str) -> CommandWrapper:
    """Return how the runtime starts a Python command in the container."""
    if runtime == "pyxis":
        return _pyxis(inside, python)
    if runtime == "docker":
        return _docker(inside, python)
    return _apptainer(inside, python, program=runtime)


def _apptainer(inside: ContainerSetup, python: str, *, program: RuntimeName) -> CommandWrapper:
    """Return the wrapper for Apptainer (1.0 and newer) and SingularityCE (3.9 and newer)."""
    # Values go through the environment under other names, and a shell inside renames them (`_export_argv`). Not `--env` and
    # `APPTAINERENV_...`: a shell in the container evaluates their values, so that a `$` in one would be replaced
    # (https://apptainer.org/docs/user/latest/environment_and_metadata.html). Neither `--cleanenv` nor `--containall`:
    # workers read their ranks from Slurm's variables, and share memory (/dev/shm) with the other workers of the node.
    cleaning = [word for word in inside.options if word in {"--cleanenv", "-e", "--containall", "-C"}]
    if cleaning:
        raise ConfigError(
            f"`container.options` has {cleaning[0]!r}, which removes environment variables, but workers get their ranks, the "
            "address of rank zero and `env` from these. Remove the option; to hide one variable from the image, set it to the empty string with `env.NAME=`."
        )
    gpus = {"nvidia": ["--nv"], "rocm": ["--rocm"], "none": []}[inside.gpus]
    mounts = [word for bind in inside.binds for word in ("--mount", _csv_mount(bind))]
    where = ["--pwd", inside.work_dir]
    prefix = [program, "exec", *gpus, *mounts, *where, *inside.options, inside.image, *_export_argv(inside)]
    return CommandWrapper(python=python, prefix=tuple(prefix), environ=_prefixed_environ(inside))


def _csv_mount(bind: Bind, read_only: str = "ro") -> str:
    fields = [
        "type=bind",
        f"source={bind.source}",
        f"destination={bind.target}",
        *([read_only] if bind.is_read_only else []),
    ]
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(fields)
    return row.getvalue()


def _pyxis(inside: ContainerSetup, python: str) -> CommandWrapper:
    """Return the wrapper for pyxis, NVIDIA's plugin of srun, which runs images with enroot (https://github.com/NVIDIA/pyxis)."""
    mounts = []
    for bind in inside.binds:
        for path in (bind.source, bind.target):
            if "," in path or ":" in path:
                raise ConfigError(
                    f"pyxis cannot mount {path}: `,` and `:` separate mounts in its options. Rename it, or make a link to it without them."
                )
        mounts.append(f"{bind.source}:{bind.target}{':ro' if bind.is_read_only else ''}")
    options = [
        f"--container-image={inside.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={inside.work_dir}",
        "--no-container-mount-home",
        *inside.options,
    ]
    prefix = tuple(_export_argv(inside))
    return CommandWrapper(python=python, prefix=prefix, srun_args=tuple(options), environ=_prefixed_environ(inside))


_HOST_VARIABLES = frozenset({"PATH", "HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})
"""Variables of the host that are wrong in an image. Docker must not pass them on; Apptainer handles them itself."""


def _docker(inside: ContainerSetup, python: str) -> CommandWrapper:
    """Return the wrapper for `docker run` (24 and newer), for runs without Slurm.

    The container uses the host's network, shared memory and process ids, and writes files as the user. Variables are
    passed by name: docker reads their values from its own environment, so no shell evaluates them.
    """
    gpus = {"nvidia": ["--gpus=all"], "rocm": ["--device=/dev/kfd", "--device=/dev/dri"], "none": []}[inside.gpus]
    shared = ["--network=host", "--ipc=host", "--pid=host", "--ulimit=memlock=-1"]
    groups = [f"--group-add={group}" for group in inside.groups]  # of data that a project shares, and of AMD's devices
    who = [f"--user={inside.user}", *groups, "--env=HOME=/tmp"]  # in the image
    mounts = [word for bind in inside.binds for word in ("--mount", _csv_mount(bind, "readonly"))]
    names = dict.fromkeys([*inside.passed, *_prefixed_environ(inside)])
    passed = [f"--env={name}" for name in names if name not in _HOST_VARIABLES]
    start = ["docker", "run", "--rm", "--interactive", "--init", "--no-healthcheck"]
    prefix = [*start, *gpus, *shared, *who, *mounts, *passed, f"--workdir={inside.work_dir}", *inside.options]
    return CommandWrapper(
        python=python, prefix=(*prefix, inside.image, *_export_argv(inside)), environ=_prefixed_environ(inside)
    )


_VARIABLE_PREFIX = "_DDP_HPC_INSIDE_"
"""Prefix of the names under which values go into an image. No image sets such a variable, so none replaces the value."""
_READONLY_VARIABLES = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
"""Variables that a shell does not let anyone set."""


def _prefixed_environ(inside: ContainerSetup) -> dict[str, str]:
    """Return the values to set inside, under their prefixed names."""
    return {f"{_VARIABLE_PREFIX}{name}": value for name, value in inside.environ.items()}


def _export_argv(inside: ContainerSetup) -> list[str]:
    """Return the shell command that sets each variable from its prefixed name, and then executes the command.

    Every user of a host can read command lines (`ps`), so this one has names only, no values. The shell does not evaluate
    the value of a quoted variable.
    """
    lines = [f'export {name}="${_VARIABLE_PREFIX}{name}"' for name in inside.environ if name not in _READONLY_VARIABLES]
    by_env = [f'{name}="${_VARIABLE_PREFIX}{name}"' for name in inside.environ if name in _READONLY_VARIABLES]
    carriers = _prefixed_environ(inside)
    if by_env:
        by_env = ["env", *(f"-u {name}" for name in carriers), *by_env]
    elif carriers:
        lines.append(f"unset {' '.join(carriers)}")
    return ["sh", "-c", "; ".join([*lines, " ".join(["exec", *by_env, '"$@"'])]), "sh"]
