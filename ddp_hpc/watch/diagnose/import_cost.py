"""What it costs to import what workers import: counted, and timed on the file system it lies on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ddp_hpc.base.errors import WorkerError

SAMPLE_FILES = 200
SAMPLE_BYTES = 64 << 20
_PROBE = """
import json, sys, time
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and isinstance(args[0], str) else None)
began = time.perf_counter()
for name in sys.argv[1:]:
    __import__(name)
seconds = time.perf_counter() - began
mapped, resident = set(), 0
for line in open("/proc/self/smaps"):
    words = line.split()
    if words[0].count("-") == 1 and not words[0].endswith(":"):
        path = words[5] if len(words) > 5 and words[5].startswith("/") else ""
        mapped.add(path)
    elif words[0] == "Rss:" and path:
        resident += int(words[1]) * 1024
print("\\nfound:" + json.dumps({"seconds": seconds, "opened": opened, "mapped": sorted(mapped - {""}), "resident": resident}))
"""


@dataclass(frozen=True, kw_only=True)
class Storm:
    """What one process reads when it imports, and how fast that is where it lies."""

    num_files: int
    num_bytes: int
    """Of files that are read, and of those parts of libraries that are touched."""
    warm_s: float
    """Measured, with everything in this host's memory."""
    open_ms: float
    """Measured: to open and read one small file that is not in memory; the median of a sample."""
    read_mb_s: float
    """Measured: a large file that is not in memory."""

    @property
    def cold_s(self) -> float:
        """Estimated: a process on a node that has nothing of it in memory."""
        return self.warm_s + self.num_files * self.open_ms / 1000 + self.num_bytes / 1e6 / self.read_mb_s

    def worst_s(self, num_nodes: int) -> float:
        """Estimated: as many nodes at once, on a file system that serves them one after the other."""
        return self.warm_s + num_nodes * (self.cold_s - self.warm_s)


def measure(modules: Sequence[str], environ: Mapping[str, str]) -> Storm:
    """Import in a process of its own, and time the file system on a sample of what was read.

    Raises:
        WorkerError: where a module cannot be imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *modules],
        env=dict(environ),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("found:")), None)
    if line is None:
        said = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise WorkerError(
            f"This Python, {sys.executable}, cannot import {' and '.join(modules)}: {said}. Install what is missing, or call the "
            "`ddp-hpc` of the environment that your runs use."
        )
    found = json.loads(line.removeprefix("found:"))
    small = sorted({path for path in found["opened"] if path.startswith("/") and _is_file_of_ours(path)})
    libraries = [path for path in found["mapped"] if _is_file_of_ours(path)]
    sample = random.Random(0).sample(small, min(SAMPLE_FILES, len(small)))
    times = [_timed_read(path, None) for path in sample]
    largest = max(libraries, key=lambda path: Path(path).stat().st_size, default=sys.executable)
    num_bytes = min(SAMPLE_BYTES, Path(largest).stat().st_size)
    return Storm(
        num_files=len({*small, *libraries}),
        num_bytes=found["resident"] + sum(Path(path).stat().st_size for path in small),
        warm_s=found["seconds"],
        open_ms=1000 * median(times) if times else 0.0,
        read_mb_s=num_bytes / 1e6 / max(_timed_read(largest, num_bytes), 1e-9),
    )


def _is_file_of_ours(path: str) -> bool:
    """Leave out the kernel's own files and all that are not regular files."""
    return not path.startswith(("/proc/", "/sys/", "/dev/")) and Path(path).is_file()


def _timed_read(path: str, num_bytes: int | None) -> float:
    """Return how long it takes to open and read a file that this host does not have in memory."""
    # Ask the kernel to drop what it holds of the file, so that the second read comes from the file system:
    # https://man7.org/linux/man-pages/man2/posix_fadvise.2.html
    with open(path, "rb") as file:  # noqa: PTH123  # the call that is measured
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        file.read(-1 if num_bytes is None else num_bytes)
    return time.perf_counter() - began
