"""What is read of GPUs through the real pynvml, with a library that stands for the driver's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.machine.gpus import Gpu, GpuReader, gpus_here, visible_gpus
from tests.machine.fake_nvml import build

STATE = """
gpu GPU-aaaa1111 35 61440 81920
gpu GPU-bbbb2222 90 1024 81920
gpu GPU-cccc3333 0 0 81920 mig MIG-dddd 512 9984
gpu GPU-cccc4444 0 0 100 lost
gpu GPU-dddd5555 4294967295 1024 81920
"""
READS = """
import json, sys
from dataclasses import asdict
from ddp_hpc.cluster.machine.gpus import GpuReader
answers = []
for visible in json.loads(sys.argv[1]):
    gpus, problem = GpuReader(visible, 4).read(patience_s=60.0)
    answers.append([[asdict(one) for one in gpus], problem])
print(json.dumps(answers))
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1"]),
        ("2,3", ["2", "3"]),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
        ("MIG-a,MIG-b", ["MIG-a"]),
        ("MIG-GPU-8932f937/1/0", ["MIG-GPU-8932f937/1/0"]),
        ("1,-1,2", ["1"]),
        ("5,6,7", ["5", "6"]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_only_the_gpus_that_cuda_shows_the_workers_count(visible: str | None, names: list[str]) -> None:
    assert visible_gpus(visible, 2) == names


def read_all(folder: Path, *visible: str | None) -> list[list[Any]]:
    """Return what is read for each value of CUDA_VISIBLE_DEVICES, in a process of its own that loads the library."""
    environ = {**os.environ, **build(folder, STATE)}
    argv = [sys.executable, "-c", READS, json.dumps(visible)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def test_gpus_are_found_by_index_by_uuid_and_by_the_beginning_of_a_uuid_and_what_is_not_known_is_none(
    tmp_path: Path,
) -> None:
    by_index, by_uuid, abbreviated, ambiguous, absent, mig, lost = read_all(
        tmp_path, "1,0", "GPU-bbbb2222", "GPU-bb", "GPU-cccc", "7", "MIG-dddd", "3"
    )

    assert [one["busy"] for one in by_index[0]] == [0.9, 0.35]
    assert by_uuid[0] == [asdict(Gpu(name="GPU-bbbb2222", busy=0.9, memory_gib=1.0, total_gib=80.0))]
    assert abbreviated[0][0]["busy"] == 0.9
    assert ambiguous == [[], "GPU GPU-cccc: Not Found"]
    assert absent == [[], "GPU 7: Invalid Argument"]
    assert mig[0] == [asdict(Gpu(name="MIG-dddd", busy=None, memory_gib=0.5, total_gib=9.75))]
    assert "utilisation is not known (Not Supported)" in mig[1]
    assert lost == [[], "GPU 3: its utilisation is not known (GPU is lost)"]


def test_a_utilisation_that_a_driver_cannot_mean_is_not_known(tmp_path: Path) -> None:
    [[[gpu], _]] = read_all(tmp_path, "4")

    assert (gpu["busy"], gpu["memory_gib"]) == (None, 1.0)


class Driverless:
    """Stands for pynvml on a node without a driver."""

    @staticmethod
    def nvmlInit() -> None:  # noqa: N802  its name
        raise OSError("Driver Not Loaded")


def test_without_a_driver_nothing_is_known_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driverless)

    found = GpuReader("0", 1).read(patience_s=60.0)

    assert found == (None, "NVIDIA's library (libnvidia-ml.so.1) reports: Driver Not Loaded")
    assert gpus_here("0") is None


def test_without_the_package_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert "nvidia-ml-py is not installed" in GpuReader("0", 1).read(patience_s=60.0)[1]


def test_a_driver_that_does_not_answer_delays_nobody_and_what_it_says_later_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    class Hanging:
        nvmlInit = staticmethod(released.wait)  # noqa: N815  its name

    monkeypatch.setitem(sys.modules, "pynvml", Hanging)
    reader = GpuReader("", 1)
    try:
        assert [reader.read(patience_s=0.01) for _ in range(2)] == [(None, "NVIDIA's driver does not answer")] * 2
    finally:
        released.set()
    assert reader.read(patience_s=60.0) == ([], "the workers see no GPU")
