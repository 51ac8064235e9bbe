"""What is read of GPUs through the real pynvml, with a library that stands for the driver's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.machine.gpus import RETRY_S, GpuReader, visible_gpus
from ddp_hpc.run.run_dir.machine_use import GpuUse
from tests.machine.fake_nvml import build

STATE = """
gpu GPU-aaaa1111 35 61440 81920
gpu GPU-bbbb2222 90 1024 81920
gpu GPU-cccc3333 0 0 81920 mig MIG-dddd 512 9984
gpu GPU-cccc4444 0 0 100 lost
gpu GPU-dddd5555 4294967295 1024 81920
gpu GPU-eeee6666 20 92160 81920
"""
READS = """
import json, sys
from dataclasses import asdict
from ddp_hpc.cluster.machine.gpus import GpuReader, visible_gpus
answers = []
for visible in json.loads(sys.argv[1]):
    uses, problem = GpuReader(visible_gpus(visible, 4)).read()
    answers.append([[asdict(one) for one in uses], problem])
print(json.dumps(answers))
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1"]),
        ("2,3", ["2", "3"]),
        ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]),
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
    assert by_uuid[0] == [asdict(GpuUse(name="GPU-bbbb2222", busy=0.9, memory_gib=1.0, total_gib=80.0))]
    assert abbreviated[0][0]["busy"] == 0.9
    assert ambiguous == [[], "GPU GPU-cccc: Not Found"]
    assert absent == [[], "GPU 7: Invalid Argument"]
    assert mig[0] == [asdict(GpuUse(name="MIG-dddd", busy=None, memory_gib=0.5, total_gib=9.75))]
    assert "utilisation is not known (Not Supported)" in mig[1]
    assert lost == [[], "GPU 3: its utilisation is not known (GPU is lost)"]


def test_what_a_driver_cannot_mean_is_not_known(tmp_path: Path) -> None:
    [[[no_share], why_not], [[no_memory], nor]] = read_all(tmp_path, "4", "5")

    assert (no_share["busy"], no_share["memory_gib"]) == (None, 1.0)
    assert why_not == "GPU 4: its utilisation is not known (the driver says 4294967295 %)"
    assert (no_memory["busy"], no_memory["memory_gib"], no_memory["total_gib"]) == (0.2, None, None)
    assert nor.startswith(
        "GPU 5: its memory is not known (the driver says that 96636764160 of 85899345920 bytes are used)"
    )


def test_of_a_gpu_that_is_divided_the_part_that_cuda_shows_counts(tmp_path: Path) -> None:
    [[uses, _]] = read_all(tmp_path, "2")

    assert [(one["busy"], one["total_gib"]) for one in uses] == [(None, 9.75)]


def test_without_a_driver_nothing_is_known_and_the_reason_is_said() -> None:
    """This machine has no driver, or the reader would find its GPUs."""
    uses, problem = GpuReader(["0"], import_nvml=lambda: Driverless).read()

    assert (uses, problem) == ([], "NVIDIA's library (libnvidia-ml.so.1) reports: Driver Not Loaded")


class Driverless:
    """Stands for pynvml on a node without a driver."""

    @staticmethod
    def nvmlInit() -> None:  # noqa: N802  its name
        raise OSError("Driver Not Loaded")


def test_without_the_package_the_reason_is_said() -> None:
    def absent() -> Any:
        raise ImportError("pynvml")

    assert "nvidia-ml-py is not installed" in GpuReader(["0"], import_nvml=absent).read()[1]


def test_a_driver_that_could_not_be_started_is_tried_again_later() -> None:
    now, tried = [0.0], list[float]()

    def import_nvml() -> Any:
        tried.append(now[0])
        return Driverless

    reader = GpuReader(["0"], import_nvml=import_nvml, clock=lambda: now[0])

    for now[0] in (0.0, 5.0, RETRY_S, RETRY_S + 5.0):
        reader.read()

    assert tried == [0.0, RETRY_S]


def test_a_driver_that_does_not_answer_delays_nobody_and_is_not_taken_for_an_idle_gpu() -> None:
    released, now = threading.Event(), [100.0]

    class Hanging:
        nvmlInit = staticmethod(released.wait)  # noqa: N815  its name

    reader = GpuReader(["0"], import_nvml=lambda: Hanging, clock=lambda: now[0])
    reader.take()
    now[0] += 40.0

    try:
        assert reader.take() == ([], "NVIDIA's driver has not answered for 40 s")
    finally:
        released.set()


def test_a_look_returns_what_was_read_since_the_last_one() -> None:
    reader = GpuReader(["0"], import_nvml=lambda: Driverless)
    assert reader.take() == ([], "")

    deadline = time.monotonic() + 10
    while not (found := reader.take())[1].startswith("NVIDIA's library"):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_workers_that_see_no_gpu_have_none_to_be_read() -> None:
    assert GpuReader([]).take() == ([], "the workers see no GPU")
