"""The checks of `benchmarks/gpu_check.py` run, on CPUs in the smallest sizes: what they find there must be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.table import CHECKS

SAMPLES = [check.name for check in CHECKS if check.is_sample]
QUICK = ["fp32"]
"""Of these, what a newcomer's `make test` runs."""


def wrong_of(tmp_path: Path, names: list[str]) -> dict[str, str]:
    """Run checks; return why each that is not ok is not, by name."""
    output = tmp_path / "results.json"
    gpu_check.main(["--device=cpu", "--tiny", "--jobs=2", "--whole-s=500", f"--output={output}", "--only", *names])
    records = json.loads(output.read_text())["checks"]
    assert {record["check"] for record in records} == {*names}
    wrong = {
        record["check"]: f"{record['outcome']}: {record['reason']}" for record in records if record["outcome"] != "ok"
    }
    return {name: why for name, why in wrong.items() if "needs PyTorch that" not in why}


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([one for one in SAMPLES if one not in QUICK], id="others", marks=pytest.mark.long),
    ],
)
def test_one_check_of_each_family_holds_on_cpus(names: list[str], tmp_path: Path) -> None:
    assert wrong_of(tmp_path, names) == {}


@pytest.mark.long
def test_all_other_checks_hold_on_cpus_or_say_what_they_need(tmp_path: Path) -> None:
    wrong = wrong_of(tmp_path, [check.name for check in CHECKS if check.name not in SAMPLES])

    needs_gpu = {check.name: "skipped: needs a GPU" for check in CHECKS if check.on == "cuda"}
    assert {name: why for name, why in wrong.items() if "needs the package" not in why} == needs_gpu
