"""What `make bench` measures of ours still works; how fast it is, tests do not ask."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch

from benchmarks import launch, loader, loop
from benchmarks.run import NAMES


@pytest.mark.long
@pytest.mark.parametrize("way", [launch.agent, launch.submit, launch.submit_script], ids=["agent", "submit", "script"])
def test_two_workers_start_meet_and_leave(
    way: Callable[[], Mapping[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "WORKERS", 2)
    monkeypatch.setattr(launch, "CONFIG", launch.CONFIG.replace("workers_per_node: 8", "workers_per_node: 2"))

    measured = way()

    assert 0 < measured[launch.FIRST] < measured[launch.GONE]


@pytest.mark.long
@pytest.mark.parametrize(
    "walk",
    [
        loop.ours,
        partial(loop.ours, own_loader=True),
        partial(loop.ours, without=[*loop.WITHOUT]),
        loop.by_hand,
        loop.all_by_hand,
    ],
    ids=["batches made beforehand", "its own loader", "without duties", "its duties by hand", "all its duties by hand"],
)
def test_the_loop_trains_to_the_bits_of_the_plain_one(
    walk: Callable[[], Mapping[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which each of them looks at itself."""
    monkeypatch.setattr(loop, "STEPS", 60)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert walk()[loop.US] > 0
    finally:
        torch.set_num_threads(num_threads)
        for made in (loop.dataset, loop.walk, loop.fetched, loop.batches, loop.raw_weights):
            made.cache_clear()


@pytest.mark.parametrize("data", loader.SETS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_both_loaders_are_measured_on_each_data_set(data: str, num_workers: int) -> None:
    measured = loader.side_by_side(loader.Case(data, batch=4, num_workers=num_workers, num_batches=3))

    assert all(measured[name] > 0 for name in ("ours", "pytorch", "ratio", "by_cpu"))


@pytest.mark.long
def test_benchmarks_need_no_library_of_the_tests() -> None:
    code = f"""import importlib, sys
sys.modules.update(pytest=None, hypothesis=None)  # as in .venv-bench
for name in {NAMES}:
    importlib.import_module(f"benchmarks.{{name}}")"""

    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
