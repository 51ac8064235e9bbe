"""Which GPUs the job has on this node, how busy and how full they are, by NVIDIA's management library (NVML)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU now. None: not known, which is never zero."""

    name: str
    """As CUDA_VISIBLE_DEVICES names it: an index or a UUID."""
    busy: float | None = None
    """Share of NVML's last sample period in which some kernel ran."""
    memory_gib: float | None = None
    """What all processes use."""
    total_gib: float | None = None


def visible_gpus(visible: str | None, num_gpus: int) -> list[str]:
    """Return the names of the job's GPUs on this node: indices, or UUIDs, which may be abbreviated.

    `visible` is CUDA_VISIBLE_DEVICES; without it, CUDA counts all GPUs that there are from zero. As CUDA does, an invalid name ends the list,
    and of the parts of divided GPUs (MIG), only the first is shown.
    """
    if visible is None:
        return [str(number) for number in range(num_gpus)]
    names: list[str] = []
    for name in (one.strip() for one in visible.split(",")):
        if name.startswith("MIG-"):
            return [*names, name][:num_gpus]
        if not (name.isdecimal() or name.startswith("GPU-")):
            break
        names.append(name)
    return names[:num_gpus]


def gpus_here(visible: str | None) -> list[Gpu] | None:
    """Return the GPUs that a process would see; None where NVML is not here, or does not answer in time."""
    return GpuReader(visible).read(patience_s=10.0)[0]


@dataclass
class GpuReader:
    """Reads GPUs in a thread: a call to a broken driver may never return."""

    visible: str | None
    num_gpus: int | None = None
    """How many of those the job has; None: all."""
    _thread: threading.Thread | None = None
    _found: tuple[list[Gpu] | None, str] = (None, "")

    def read(self, *, patience_s: float) -> tuple[list[Gpu] | None, str]:
        """Return the GPUs of which something is known, None where NVML does not answer; and why of others nothing is."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="gpus", daemon=True)
            self._thread.start()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            return None, "NVIDIA's driver does not answer"
        self._thread = None
        return self._found

    def _read(self) -> None:
        try:
            self._found = _read_gpus(self.visible, self.num_gpus)
        except ImportError:
            self._found = None, "the package nvidia-ml-py is not installed where the workers run: install it there"
        except Exception as error:  # noqa: BLE001  no driver, one that fails, or one of another version
            self._found = None, f"NVIDIA's library (libnvidia-ml.so.1) reports: {error}"


def _read_gpus(visible: str | None, num_gpus: int | None) -> tuple[list[Gpu], str]:
    import pynvml  # late: runs on CPUs do without it

    pynvml.nvmlInit()
    names = visible_gpus(visible, pynvml.nvmlDeviceGetCount() if num_gpus is None else num_gpus)
    found, problems = [], []
    for name in names:
        try:
            gpu, problem = _read_gpu(pynvml, name)
        except pynvml.NVMLError as error:
            gpu, problem = Gpu(name=name), str(error)
        found += [] if gpu.busy is None and gpu.total_gib is None else [gpu]
        problems += [f"GPU {name}: {problem}"] if problem else []
    return found, "; ".join(problems)[:300] if names else "the workers see no GPU"


def _read_gpu(nvml: Any, name: str) -> tuple[Gpu, str]:
    handle, busy, memory, problem = _handle(nvml, name), None, None, ""
    try:
        percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        busy = percent / 100 if percent <= 100 else None
    except nvml.NVMLError as error:  # as of a part of a GPU (MIG)
        problem = f"its utilisation is not known ({error})"
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        problem = problem or f"its memory is not known ({error})"
    used, total = (None, None) if memory is None else (memory.used / GIB, memory.total / GIB)
    return Gpu(name=name, busy=busy, memory_gib=used, total_gib=total), problem


def _handle(nvml: Any, name: str) -> Any:
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        # CUDA takes a UUID's beginning, too, where no other GPU has the same.
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        matching = [one for one in handles if nvml.nvmlDeviceGetUUID(one).startswith(name)]
        if len(matching) != 1:
            raise
        return matching[0]
