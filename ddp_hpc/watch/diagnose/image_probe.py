"""What a Python has that workers need: in an image, or here. Asked of that very Python, as a run would start it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.containers import HostPaths, command_wrapper, container_setup, find_runtime
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.table import workload_of

NEEDED = ("torch", "numpy", "msgspec", "psutil", "xxhash", "yaml")
USEFUL = {"torchvision": "the built-in recipe `image_classification`", "tensorboard": "`log.recorders`"}
"""Needed by some recipes and options alone."""
LEAST_PYTHON = (3, 10)
PATIENCE_S = 300.0
"""An image is unpacked first where it cannot be mounted, and a file system that is cold takes long to import from."""
_PROBE = """
import importlib, json, platform, sys
found = {"python": list(sys.version_info[:3]), "machine": platform.machine(), "modules": {}, "problems": {}, "torch": {}}
for name in sys.argv[1].split(","):
    try:
        found["modules"][name] = str(getattr(importlib.import_module(name), "__version__", "yes"))
    except BaseException as error:
        found["problems"][name] = f"{type(error).__name__}: {error}"
if "torch" in found["modules"]:
    import torch
    import torch.distributed as dist
    found["torch"] = {"cuda": torch.version.cuda, "hip": torch.version.hip, "nccl": dist.is_nccl_available(),
                      "gloo": dist.is_gloo_available(), "gpus": torch.cuda.device_count()}
print("\\nfound:" + json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class ImageFindings:
    """What was found; the fields are the keys of `container check --json`."""

    image: str
    runtime: str
    python: str = ""
    machine: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Those that can be imported -> their versions."""
    torch: Mapping[str, Any] = field(default_factory=dict)
    """What PyTorch was built with, and how many GPUs it sees here."""
    problems: Sequence[str] = ()
    """Why a run would fail."""
    notes: Sequence[str] = ()
    """Why some runs would."""


def check_image(spec: RunSpec, *, work_dir: Path, environ: Mapping[str, str]) -> ImageFindings:
    """Start the image's Python as a run of this spec would, and have it import what workers do."""
    with tempfile.TemporaryDirectory() as run_dir:
        paths = HostPaths(work_dir=work_dir, inputs=[*workload_of(spec).input_paths(work_dir)])
        inside = container_setup(spec, RunDir(Path(run_dir)), paths, environ)
        if inside is None:
            raise ConfigError(
                "There is no image to check, because `container.image` is not set. Set it to an image file."
            )
        runtime = find_runtime(spec, environ)
        if runtime == "pyxis":
            raise ConfigError(
                "`container.runtime` is pyxis, which starts images only in Slurm jobs, so this host cannot check the image. "
                "Test it with a short run instead: `train.max_steps=1`."
            )
        housing = command_wrapper(inside, runtime, spec.container.python)
        argv = [*housing.command, "-c", _PROBE, ",".join((*NEEDED, *USEFUL, "ddp_hpc"))]
        try:
            done = subprocess.run(
                argv,
                env={**environ, **housing.environ},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=PATIENCE_S,
            )
        except subprocess.TimeoutExpired:
            problem = f"{spec.container.python} did not answer within {PATIENCE_S:.0f} s; try again, or put the image on a faster file system"
            return ImageFindings(image=inside.image, runtime=runtime, problems=[problem])
    answer = next((line for line in done.stdout.splitlines() if line.startswith("found:")), None)
    if answer is None:
        said = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        problem = f"{spec.container.python} did not start: {said}"
        return ImageFindings(image=inside.image, runtime=runtime, problems=[problem])
    return judge(inside.image, runtime, json.loads(answer.removeprefix("found:")))


def judge(image: str, runtime: str, found: Mapping[str, Any]) -> ImageFindings:
    """Return what an answer of the probe means."""
    version, python = tuple(found["python"]), ".".join(map(str, found["python"]))
    problems = [f"{name} cannot be imported: {why}" for name, why in found["problems"].items() if name not in USEFUL]
    if version < LEAST_PYTHON:
        problems.append(f"Python is {python}, but must be {'.'.join(map(str, LEAST_PYTHON))} or newer")
    notes = [f"{name} is missing; only {USEFUL[name]} needs it" for name in USEFUL if name in found["problems"]]
    as_found = {key: found[key] for key in ("machine", "modules", "torch")}
    return ImageFindings(image=image, runtime=runtime, python=python, problems=problems, notes=notes, **as_found)
