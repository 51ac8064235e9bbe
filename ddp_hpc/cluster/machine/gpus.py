"""How busy the job's GPUs are, by NVIDIA's management library (NVML), in a thread: a call to a broken driver may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ddp_hpc.run.run_dir.machine_use import GpuUse

GIB = 2**30
RETRY_S = 60.0
"""How long after NVML could not be started it is tried again."""
_NONE_VISIBLE = frozenset({"", "-1", "NoDevFiles", "void"})


def visible_gpus(visible: str | None, num_gpus: int) -> list[str]:
    """Return the names of the job's GPUs on this node: indices, or UUIDs, which may be abbreviated and may be of MIG devices.

    `visible` is CUDA_VISIBLE_DEVICES; without it, CUDA counts all GPUs that there are from zero. As CUDA does, an invalid name ends the list.
    """
    if visible is None:
        return [str(number) for number in range(num_gpus)]
    names: list[str] = []
    for name in (one.strip() for one in visible.split(",")):
        if name in _NONE_VISIBLE or not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        names.append(name)
    return names[:num_gpus]


def gpus_here(visible: str | None, *, patience_s: float = 10.0) -> list[GpuUse] | None:
    """Return the GPUs that a process would see; None where NVML is not here, or does not answer in time.

    Of MIG devices, CUDA shows a process only one.
    """
    found: list[list[GpuUse]] = []

    def read() -> None:
        with suppress(Exception):  # no package, no driver, or one of another version
            import pynvml

            pynvml.nvmlInit()
            names = visible_gpus(visible, pynvml.nvmlDeviceGetCount())
            has_mig = any(name.startswith("MIG-") for name in names)
            found.append(GpuReader(names[:1] if has_mig else names).read()[0])

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(patience_s)
    return found[0] if found else None


@dataclass
class GpuReader:
    """Reads the GPUs whenever it is asked to, and never makes its caller wait."""

    names: Sequence[str]
    import_nvml: Callable[[], Any] = lambda: __import__("pynvml")
    clock: Callable[[], float] = time.monotonic
    _asked: threading.Event = field(default_factory=threading.Event)
    _is_reading: bool = False
    _asked_at: float = 0.0
    _found: tuple[list[GpuUse], str] = ((), "")  # type: ignore[assignment]  # nothing has been read yet
    _nvml: Any = None
    _handles: dict[str, Any] = field(default_factory=dict)
    _tried_at: float | None = None
    _problem: str = ""
    _thread: threading.Thread | None = None

    def take(self) -> tuple[list[GpuUse], str]:
        """Return what was read since the last call and why nothing, or not all, was; then have it read again."""
        if not self.names:
            return [], "the workers see no GPU"
        if self._is_reading:
            return [], f"NVIDIA's driver has not answered for {self.clock() - self._asked_at:.0f} s"
        found, self._found = self._found, ([], "")
        self._is_reading, self._asked_at = True, self.clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="gpus", daemon=True)
            self._thread.start()
        self._asked.set()
        return [*found[0]], found[1]

    def _serve(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            try:
                self._found = self.read()
            except Exception as error:  # noqa: BLE001  a library of another version: nothing is known, and this thread stays
                self._found = [], f"the package nvidia-ml-py cannot be used: {error!r}; a newer version may help"
            self._is_reading = False

    def read(self) -> tuple[list[GpuUse], str]:
        """Read all GPUs once, in this thread; return those of which something is known, and why others are not."""
        if self._nvml is None and not self._start():
            return [], self._problem
        found, problems = [], []
        for name in self.names:
            use, problem = self._read_one(name)
            found += [use] if use is not None else []
            problems += [f"GPU {name}: {problem}"] if problem else []
        return found, "; ".join(dict.fromkeys(problems))[:300]

    def _start(self) -> bool:
        """Start NVML; tell whether it answers."""
        if self._tried_at is not None and self.clock() - self._tried_at < RETRY_S:
            return False
        self._tried_at = self.clock()
        try:
            nvml = self.import_nvml()
            nvml.nvmlInit()
        except ImportError:
            self._problem = "the package nvidia-ml-py is not installed where the workers run: install it there"
        except Exception as error:  # noqa: BLE001  NVML's errors have classes of the module that may be absent
            self._problem = f"NVIDIA's library (libnvidia-ml.so.1) reports: {error}"
        else:
            self._nvml, self._problem = nvml, ""
        return self._nvml is not None

    def _read_one(self, name: str) -> tuple[GpuUse | None, str]:
        nvml = self._nvml
        try:
            handle = self._handles.get(name) or self._handle(name)
        except nvml.NVMLError as error:
            return None, str(error)
        self._handles[name] = handle
        busy = memory = None
        problem = ""
        try:
            percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            busy = percent / 100 if 0 <= percent <= 100 else None
            problem = "" if busy is not None else f"its utilisation is not known (the driver says {percent} %)"
        except nvml.NVMLError as error:  # of a MIG device, NVML says nothing
            problem = f"its utilisation is not known ({error})"
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            if not 0 <= memory.used <= memory.total:
                problem = (
                    problem
                    or f"its memory is not known (the driver says that {memory.used} of {memory.total} bytes are used)"
                )
                memory = None
        except nvml.NVMLError as error:
            problem = problem or f"its memory is not known ({error})"
        if busy is None and memory is None:
            del self._handles[name]  # the GPU has been reset or has left the bus
            return None, problem
        used, total = (None, None) if memory is None else (memory.used / GIB, memory.total / GIB)
        return GpuUse(name=name, busy=busy, memory_gib=used, total_gib=total), problem

    def _handle(self, name: str) -> Any:
        nvml = self._nvml
        if name.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            with suppress(nvml.NVMLError):  # a GPU without MIG
                if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                    # CUDA shows a process one part of a divided GPU, the first.
                    return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
            return handle
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError as error:
            # CUDA takes a UUID's beginning, too, where no other GPU has the same.
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            matching = [one for one in handles if nvml.nvmlDeviceGetUUID(one).startswith(name)]
            if len(matching) != 1:
                raise error from None
            return matching[0]
