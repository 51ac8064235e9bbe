"""Record what a run ran on: versions, driver, modules, packages. PyTorch is not imported for it."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from ddp_hpc.base.discretion import is_env_shown
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.processes import kernel_text
from ddp_hpc.base.record import try_read_record, write_record
from ddp_hpc.run.run_dir.paths import RunDir

_RECORDED_VARIABLE_PATTERN = re.compile(r"(?:NCCL|FI|UCX|GLOO|TORCH|CUDA|CUBLAS|HSA|OMP|MKL|RDMAV|OFI)_|PYTHONHASHSEED")
"""How variables begin that change results or speed."""
_IGNORED_VARIABLES = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
"""Variables that differ between workers or jobs without any meaning for the run."""
_PACKAGE_DIR_PATTERN = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a run ran on; the fields are the keys of `ddp-hpc env capture --json`."""

    python: str = ""
    machine: str = ""
    """Operating system, libc and architecture."""
    cpu: str = ""
    torch: str = ""
    cuda: str = ""
    """The CUDA version that PyTorch was built with; empty without CUDA."""
    hip: str = ""
    nccl: str = ""
    driver: str = ""
    """Version of the GPU driver."""
    gpus: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    """Loaded environment modules."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that NCCL, PyTorch, OpenMP and similar libraries read."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed package -> its version."""


def environment_here(environ: Mapping[str, str], *, proc: Path = Path("/proc")) -> Environment:
    """Return the environment of this process."""
    packages = _packages()
    built = _torch_build()
    return Environment(
        python=platform.python_version(),
        machine=f"{platform.system()} {'-'.join(filter(None, platform.libc_ver()))} {platform.machine()}",
        cpu=cpu_name(proc),
        torch=built.get("__version__", ""),
        cuda=built.get("cuda", ""),
        hip=built.get("hip", ""),
        nccl=next((version for name, version in packages.items() if name.startswith("nvidia-nccl")), ""),
        driver=_find(proc / "driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),
        gpus=tuple(
            sorted(_find(path, r"^Model:\s*(.+)$") for path in (proc / "driver/nvidia/gpus").glob("*/information"))
        ),
        modules=tuple(filter(None, environ.get("LOADEDMODULES", "").split(":"))),
        variables={
            name: value.encode(errors="replace").decode()  # what is no UTF-8 could not be read again
            for name, value in sorted(environ.items())
            if _RECORDED_VARIABLE_PATTERN.match(name) and name not in _IGNORED_VARIABLES and is_env_shown(name)
        },
        packages=packages,
    )


def cpu_name(proc: Path = Path("/proc")) -> str:
    """Return the name of this machine's kind of CPU; empty where the kernel does not say it."""
    return _find(proc / "cpuinfo", r"^model name\s*:\s*(.+)$")


def _packages() -> dict[str, str]:
    """Return the installed packages, by the names of their directories (PEP 376, PEP 427), without reading each metadata file."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = [path.name for path in Path(folder or ".").iterdir()]
        except OSError:  # Python's import ignores such a directory, too
            continue
        for name in names:
            if match := _PACKAGE_DIR_PATTERN.fullmatch(name):
                found.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return dict(sorted(found.items()))


def _torch_build() -> dict[str, str]:
    """Return the assignments in `torch/version.py`; importing torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    return dict(re.findall(r"^(\w+)\s*(?::[^=\n]+)?=\s*['\"]([^'\"]*)['\"]", text, flags=re.MULTILINE))


def _find(path: Path, pattern: str) -> str:
    found = re.search(pattern, kernel_text(path), flags=re.MULTILINE)
    return found[1].strip() if found else ""


# --- records of a run --------------------------------------------------------------------------------------------------


def write_environment(run: RunDir, attempt: int, environment: Environment) -> None:
    """Write the environment of an attempt into the run directory."""
    write_record(run.environment(attempt), environment, indent=1)


def newest_environment(run: RunDir, *, before: int | None = None) -> tuple[int, Environment] | None:
    """Return the newest attempt (`before` another one) with a recorded environment, and that environment."""
    numbers = (int(path.parent.name.rpartition("-")[2]) for path in run.environment_paths())
    newest = max((number for number in numbers if before is None or number < before), default=None)
    if newest is None:
        return None
    if (found := read_environment(run, newest)) is None:
        raise ConfigError(
            f"The file {run.environment(newest)}, which records an attempt's environment, cannot be read. Check its permissions, or delete it if it is damaged."
        )
    return newest, found


def read_environment(run: RunDir, attempt: int) -> Environment | None:
    """Return the environment of an attempt; None where it was not recorded, or its record cannot be read."""
    return try_read_record(run.environment(attempt), Environment)


def change_texts(old: Environment, new: Environment) -> Iterator[str]:
    """Yield the changes, one for each item: `torch 2.9.0 -> 2.9.1`."""
    for field_ in fields(Environment):
        before, after = getattr(old, field_.name), getattr(new, field_.name)
        if isinstance(before, Mapping):
            for name in sorted({*before, *after}):
                if before.get(name) != after.get(name) and name not in {"torch", "ddp-hpc"}:
                    yield f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}"
        elif before != after:
            yield f"{field_.name} {_as_text(before)} -> {_as_text(after)}"


def _as_text(value: str | tuple[str, ...]) -> str:
    return (value if isinstance(value, str) else ", ".join(value)) or "none"
