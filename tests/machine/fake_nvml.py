"""Builds a library that stands for NVIDIA's (`fake_nvml.c`): the real package pynvml loads it, and no GPU is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")


def build(folder: Path, state: str) -> dict[str, str]:
    """Return the variables with which a process finds the library; `state` is what it says of the GPUs."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    (folder / "state").write_text(state)
    return {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(folder / "state")}
