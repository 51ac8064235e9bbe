"""From a spec to the words that run a command inside an image. Pure, but for a look at paths and images.

What runs inside are the processes that hold PyTorch: agents, tasks, torchrun. Whatever talks to Slurm stays outside:
the job script, the supervisor, srun. So an image needs neither Slurm's commands nor munge.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import ddp_hpc
from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir import RunDir
from ddp_hpc.spec import RunSpec

PACKAGE_DIR = Path(ddp_hpc.__file__).parent
INSIDE = Path("/opt/ddp_hpc")
"""Where the image's Python finds the very code that submitted the run, and nothing else of the host's."""
_THE_MACHINES = tuple(map(Path, ("/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/lib", "/lib64", "/sbin")))
"""The image has its own of these."""

Gpus = Literal["nvidia", "rocm", "none"]
RuntimeName = Literal["apptainer", "singularity", "pyxis", "docker"]


@dataclass(frozen=True)
class Bind:
    """A path of the host's that is seen inside."""

    source: str
    target: str
    is_read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Bind:
        """Read `SOURCE[:TARGET[:ro|rw]]`.

        Raises:
            ConfigError: where it is something else.
        """
        source, *rest = text.split(":")
        target = rest[0] if rest else source
        modes = rest[1:]
        if not (source.startswith("/") and target.startswith("/")) or modes not in ([], ["ro"], ["rw"]):
            raise ConfigError(
                f"`container.binds` has {text!r}, but a bind is `/SOURCE`, `/SOURCE:/TARGET` or `...:ro`."
            )
        return cls(source, target, modes == ["ro"])


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What a command is to find inside an image."""

    image: str
    binds: tuple[Bind, ...]
    environ: Mapping[str, str]
    """Variables that are set inside, whatever they are outside; all others come through as they are."""
    work_dir: str
    gpus: Gpus = "none"
    options: tuple[str, ...] = ()
    """The user's own, of the runtime."""
    passed: tuple[str, ...] = ()
    """Names of the variables outside, for a runtime that has to be told of each."""
    user: str = ""
    """`UID:GID` of whoever runs it, likewise."""


@dataclass(frozen=True)
class Housing:
    """How a command of Python's is run on a node: `srun_args` go to srun, `prefix` and `python` before `-m`."""

    python: str = sys.executable
    prefix: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    """What its starter must have in the environment: values that are set inside, which no command line may show."""
    image: str = ""
    """What tells the image from others."""

    @property
    def command(self) -> list[str]:
        return [*self.prefix, self.python]


BARE = Housing()
"""Without an image."""


# --- what is to be found inside ----------------------------------------------------------------------------------------


def inside_of(
    spec: RunSpec, run: RunDir, *, import_paths: Sequence[str], work_dir: Path, environ: Mapping[str, str] | None = None
) -> Inside | None:
    """Return what a run's workers are to find in their image; None for a run without one.

    Raises:
        ConfigError: where a bind cannot be read.
    """
    container, resources = spec.container, spec.resources
    if container.image is None:
        return None
    gpus: Gpus = container.gpus if container.gpus != "auto" else "nvidia" if resources.gpus_per_node else "none"
    return Inside(
        image=container.image if is_name(spec) else str(image_path(container.image)),
        binds=tuple(_binds(spec, run, import_paths, work_dir)),
        environ={
            **spec.environ,  # else the image's own PATH and LD_LIBRARY_PATH win, and with pyxis all of its variables
            "PYTHONPATH": str(INSIDE),  # the user's code is the workers' own to find
            "PYTHONNOUSERSITE": "1",  # else ~/.local, which is mounted, comes before the image's packages
        },
        work_dir=str(work_dir),
        gpus=gpus,
        options=container.options,
        passed=tuple(sorted(environ or ())),
        user=f"{os.getuid()}:{os.getgid()}",
    )


def is_name(spec: RunSpec) -> bool:
    """Tell whether the image is something that its runtime knows, rather than a path."""
    return spec.container.runtime == "docker" or is_address(spec.container.image or "")


def is_address(image: str) -> bool:
    """Tell `docker://...` and its like from a path."""
    return "://" in image or ("#" in image and not image.startswith(("/", ".", "~")))


def image_path(image: str) -> Path:
    """Return where an image lies."""
    return Path(os.path.abspath(Path(image).expanduser()))  # noqa: PTH100  links stay, as the user named them


def _binds(spec: RunSpec, run: RunDir, import_paths: Sequence[str], work_dir: Path) -> Iterator[Bind]:
    """Return the user's own binds, and those that follow from the run; what lies within another needs none of its own."""
    asked = [Bind.parse(text) for text in spec.container.binds]
    yield Bind(str(PACKAGE_DIR), str(INSIDE / PACKAGE_DIR.name), is_read_only=True)
    yield from asked
    seen = [Path(one.target) for one in asked]
    inputs = [*_paths_in(spec.recipe.args), *_initial_weights(spec, work_dir)]
    wanted = [str(run.path), str(work_dir), *import_paths, *inputs]
    for path in sorted(dict.fromkeys(Path(text) for text in wanted), key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in seen) and path != Path("/"):
            seen.append(path)
            yield Bind(str(path), str(path))


def _paths_in(args: Mapping[str, object]) -> Iterator[str]:
    """Return the arguments of the recipe that name something on this host: data, weights."""
    for value in args.values():
        is_path = isinstance(value, str) and value.startswith("/") and os.path.exists(value)  # noqa: PTH110
        if is_path and not any(Path(str(value)).is_relative_to(place) for place in _THE_MACHINES):
            yield str(value)


def _initial_weights(spec: RunSpec, work_dir: Path) -> Iterator[str]:
    """Return what `train.init_from` names: a path from the working directory, or a run beside this one."""
    if spec.train.init_from is None:
        return
    candidates = (work_dir / Path(spec.train.init_from).expanduser(), spec.path.parent / spec.train.init_from)
    # Each that exists: which of them holds weights is for the worker to find out.
    yield from _paths_in({str(path): os.path.normpath(path) for path in candidates})


def refuse_misplaced(spec: RunSpec, *, is_for_slurm: bool) -> None:
    """Refuse a runtime that is for elsewhere.

    Raises:
        ConfigError: for Docker in a job of Slurm's, and pyxis outside of one.
    """
    runtime = spec.container.runtime
    if runtime == "docker" and is_for_slurm:
        raise ConfigError(
            "`container.runtime` is docker, but a job's nodes have none that a user may use. Make a file of the image "
            "(`apptainer build image.sif docker-daemon:NAME:TAG`), and name that: `container.image=image.sif`."
        )
    if runtime == "pyxis" and not is_for_slurm:
        raise ConfigError(
            "`container.runtime` is pyxis, a plugin of Slurm's srun. On this machine, use apptainer or docker."
        )


def missing_sources(inside: Inside) -> list[str]:
    """Return what would be bound, but is not there: every runtime refuses that, on every node."""
    return [bind.source for bind in inside.binds if not os.path.exists(bind.source)]  # noqa: PTH110


# --- staging -----------------------------------------------------------------------------------------------------------

PACKED = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
"""What `tar` unpacks."""


def is_packed(source: str) -> bool:
    """Tell an archive from an image, by its name."""
    return source.endswith(PACKED)


def staged_source(spec: RunSpec) -> str | None:
    """Return what a run wants on its nodes' own disks: a packed environment, or an image that is a file.

    Raises:
        ConfigError: where the archive is none, or not there.
    """
    if spec.stage.archive is not None:
        path = image_path(spec.stage.archive)
        if not is_packed(path.name):
            raise ConfigError(f"`stage.archive` is {spec.stage.archive!r}, but `tar` unpacks {', '.join(PACKED)}.")
        if not path.is_file():
            raise ConfigError(f"`stage.archive` is {path}, but there is no such file.")
        return str(path)
    if spec.stage.dir is None or spec.container.image is None or is_name(spec):
        return None
    image = image_path(spec.container.image)
    return str(image) if image.is_file() else None


# --- images ------------------------------------------------------------------------------------------------------------

# The SIF format's global header (apptainer/sif, `pkg/sif`): a line for the kernel, then these.
_SIF_MAGIC, _MAGIC_AT, _ARCHITECTURE_AT, _ID_AT, _HEADER_BYTES = b"SIF_MAGIC", 32, 45, 48, 64
_ARCHITECTURES = {b"02": "x86_64", b"04": "aarch64", b"06": "ppc64le"}
"""By `platform.machine()`'s names."""


def sif_architecture(path: Path) -> str | None:
    """Return the machine that an image file is for; None where it does not say."""
    header = _sif_header(path)
    return None if header is None else _ARCHITECTURES.get(header[_ARCHITECTURE_AT : _ARCHITECTURE_AT + 2])


def identity_of(image: str) -> str:
    """Return what tells this image from others: the number that a SIF was given when it was built; else an address.

    Empty for directories, which can change unseen.
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
    """Return the programs of which one is to run the image, the first that is there."""
    return ("apptainer", "singularity") if asked == "auto" else (asked,)


def find_runtime(spec: RunSpec, environ: Mapping[str, str]) -> RuntimeName:
    """Return what runs the image here.

    Raises:
        ConfigError: where it is not on PATH.
    """
    asked = spec.container.runtime
    if asked == "pyxis":
        return asked
    candidates = candidate_runtimes(asked)
    found = next((name for name in candidates if shutil.which(name, path=environ.get("PATH", ""))), None)
    if found is None:
        raise ConfigError(
            f"`container.image` needs {' or '.join(candidates)}, but the PATH here has none. Load its module, in a job by "
            "`slurm.setup`, or choose `container.runtime`."
        )
    return found


def house(inside: Inside, runtime: RuntimeName, python: str) -> Housing:
    """Return how a command is run inside.

    Raises:
        ConfigError: where the runtime cannot be told of a path.
    """
    return _RUNTIMES[runtime](inside, python)


def _apptainer(inside: Inside, python: str, *, program: RuntimeName) -> Housing:
    """Return the words of Apptainer (1.0 and newer) and SingularityCE (3.9 and newer).

    Variables go through the environment, and a shell inside names them again (`_setting`): what `--env` and
    `APPTAINERENV_...` carry is evaluated by a shell there. Neither `--cleanenv` nor `--containall`: the ranks come from
    Slurm's variables, and share memory with those beside them.
    """
    cleaning = [word for word in inside.options if word in {"--cleanenv", "-e", "--containall", "-C"}]
    if cleaning:
        raise ConfigError(
            f"`container.options` has {cleaning[0]!r}, but ranks, addresses and the run's own `env` reach the workers by the "
            "environment. Leave it out; `env.NAME=` sets a variable that the image must not see to nothing."
        )
    gpus = {"nvidia": ["--nv"], "rocm": ["--rocm"], "none": []}[inside.gpus]
    mounts = [word for bind in inside.binds for word in ("--mount", _csv_mount(bind))]
    where = ["--pwd", inside.work_dir]
    prefix = [program, "exec", *gpus, *mounts, *where, *inside.options, inside.image, *_setting(inside)]
    return Housing(python=python, prefix=tuple(prefix), environ=_carried(inside))


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


def _pyxis(inside: Inside, python: str) -> Housing:
    """Return srun's options of NVIDIA's pyxis plugin (its README); `enroot` runs the image."""
    mounts = []
    for bind in inside.binds:
        for path in (bind.source, bind.target):
            if "," in path or ":" in path:
                raise ConfigError(
                    f"pyxis cannot mount {path}: it takes `,` and `:` for its own. Rename it, or link to it."
                )
        mounts.append(f"{bind.source}:{bind.target}{':ro' if bind.is_read_only else ''}")
    options = [
        f"--container-image={inside.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={inside.work_dir}",
        "--no-container-mount-home",
        *inside.options,
    ]
    prefix = tuple(_setting(inside))
    return Housing(python=python, prefix=prefix, srun_args=tuple(options), environ=_carried(inside))


_IMAGES_OWN = frozenset({"PATH", "HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})
"""Variables that mean nothing inside; Apptainer leaves these out by itself, or has others come first."""


def _docker(inside: Inside, python: str) -> Housing:
    """Return the words of `docker run` (24 and newer), on this machine: Docker belongs to root, and no cluster lends it.

    Networks, shared memory and process numbers are the host's, and files belong to whoever runs it. Variables are passed by
    name: docker reads their values from its own environment, so no value is seen by a shell.
    """
    gpus = {"nvidia": ["--gpus=all"], "rocm": ["--device=/dev/kfd", "--device=/dev/dri"], "none": []}[inside.gpus]
    shared = ["--network=host", "--ipc=host", "--pid=host", "--ulimit=memlock=-1"]
    who = [f"--user={inside.user}", "--env=HOME=/tmp"]  # in the image
    mounts = [word for bind in inside.binds for word in ("--mount", _csv_mount(bind, "readonly"))]
    names = dict.fromkeys([*inside.passed, *_carried(inside)])
    passed = [f"--env={name}" for name in names if name not in _IMAGES_OWN]
    start = ["docker", "run", "--rm", "--interactive", "--init", "--no-healthcheck"]
    prefix = [*start, *gpus, *shared, *who, *mounts, *passed, f"--workdir={inside.work_dir}", *inside.options]
    return Housing(python=python, prefix=(*prefix, inside.image, *_setting(inside)), environ=_carried(inside))


_CARRIER = "_DDP_HPC_INSIDE_"
"""Begins the name under which a value goes into an image: no image has such a variable, so none overrides it."""
_SHELLS_OWN = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
"""Names that a shell does not set again."""


def _carried(inside: Inside) -> dict[str, str]:
    """Return the values that are set inside, under the names that carry them there."""
    return {f"{_CARRIER}{name}": value for name, value in inside.environ.items()}


def _setting(inside: Inside) -> list[str]:
    """Return a shell's words that give each carried value its own name, and then become the command.

    Every user of a host sees command lines (`ps`), so they hold names only. A shell does not evaluate what a quoted
    variable holds, and no image may change it on the way.
    """
    lines = [f'export {name}="${_CARRIER}{name}"' for name in inside.environ if name not in _SHELLS_OWN]
    by_env = [f'{name}="${_CARRIER}{name}"' for name in inside.environ if name in _SHELLS_OWN]
    carriers = _carried(inside)
    if by_env:
        by_env = ["env", *(f"-u {name}" for name in carriers), *by_env]
    elif carriers:
        lines.append(f"unset {' '.join(carriers)}")
    return ["sh", "-c", "; ".join([*lines, " ".join(["exec", *by_env, '"$@"'])]), "sh"]


_RUNTIMES: Mapping[RuntimeName, Callable[[Inside, str], Housing]] = {
    "apptainer": lambda inside, python: _apptainer(inside, python, program="apptainer"),
    "singularity": lambda inside, python: _apptainer(inside, python, program="singularity"),
    "pyxis": _pyxis,
    "docker": _docker,
}
