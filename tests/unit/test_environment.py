"""What a run really used, and what is not as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.software_versions import (
    Environment,
    change_texts,
    environment_here,
    newest_environment,
    read_environment,
    write_environment,
)
from tests.made_run import make_run

USED = Environment(
    python="3.11.7",
    torch="2.15.0",
    driver="570.1",
    gpus=("A100", "A100"),
    modules=("cuda/12.4",),
    variables={"NCCL_NET": "IB"},
    packages={"numpy": "2.4.6", "torch": "2.15.0"},
)


def test_this_python_is_told_as_it_tells_itself() -> None:
    found = environment_here(
        {"LOADEDMODULES": "gcc/13:cuda/12.4", "NCCL_DEBUG": "INFO", "HOME": "/home/ada", "OMP_NUM_THREADS": "3"}
    )

    assert found.torch == torch.__version__
    assert found.cuda == (torch.version.cuda or "")
    assert found.modules == ("gcc/13", "cuda/12.4")
    assert found.variables == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    for name in ("numpy", "msgspec", "ddp-hpc", "pytest-randomly"):
        assert found.packages[name] == metadata.version(name)


def test_every_installed_package_is_found() -> None:
    """Its folders' names are read instead of its files: that they say the same is what this is for."""
    by_the_book = {
        one.metadata["Name"].replace("_", "-").replace(".", "-").lower(): one.version
        for one in metadata.distributions()
    }

    assert environment_here({}).packages == by_the_book


def test_a_folder_that_cannot_be_read_is_passed_over_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/proc/1/root/nowhere")
    monkeypatch.syspath_prepend("/dev/null")

    assert "numpy" in environment_here({}).packages


def test_driver_and_gpus_are_the_kernels_word(tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n"
    )
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0/information").write_text("Model: \t\t NVIDIA H200\nIRQ: 4\n")

    found = environment_here({}, proc=tmp_path)

    assert (found.driver, found.gpus, found.cpu) == ("570.86.15", ("NVIDIA H200",), "")


def test_what_each_worker_has_of_its_own_is_no_difference() -> None:
    assert environment_here({"CUDA_VISIBLE_DEVICES": "3", "NCCL_SOCKET_IFNAME": "=ib0"}).variables == {}


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (USED, []),
        (replace(USED, torch="2.16.0", packages={**USED.packages, "torch": "2.16.0"}), ["torch 2.15.0 -> 2.16.0"]),
        (replace(USED, modules=()), ["modules cuda/12.4 -> none"]),
        (replace(USED, gpus=("H200",)), ["gpus A100, A100 -> H200"]),
        (replace(USED, variables={"NCCL_NET": "Socket"}), ["NCCL_NET IB -> Socket"]),
        (replace(USED, packages={"torch": "2.15.0", "timm": "1.0"}), ["numpy 2.4.6 -> none", "timm none -> 1.0"]),
        (replace(USED, driver=""), ["driver 570.1 -> none"]),
    ],
)
def test_a_difference_is_told_by_its_name(now: Environment, told: list[str]) -> None:
    assert list(change_texts(USED, now)) == told


def test_what_an_attempt_used_is_read_back_the_newest_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt in (0, 9, 10):
        write_environment(run, attempt, replace(USED, python=f"3.{attempt}"))

    assert newest_environment(run) == (10, replace(USED, python="3.10"))
    assert newest_environment(run, before=10) == (9, replace(USED, python="3.9"))
    assert newest_environment(run, before=0) is None


def test_a_damaged_note_is_an_error_with_its_place(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_environment(run, 0, USED)
    run.environment(0).write_text("{")

    assert read_environment(run, 0) is None
    with pytest.raises(ConfigError, match=r"environment\.json"):
        newest_environment(run)


def test_capture_prints_what_a_run_used_and_what_is_not_so_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    write_environment(run, 3, replace(environment_here({}), torch="1.0", variables={}))

    assert main(["env", "capture", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["attempt"] == 3
    assert found["environment"]["torch"] == "1.0"
    assert f"torch 1.0 -> {torch.__version__}" in found["differs_here"]
    assert main(["env", "capture", str(run.path)]) == 0
    assert f"torch 1.0 -> {torch.__version__}" in capsys.readouterr().out


def test_capture_alone_prints_this_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "capture"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["packages:", "numpy", metadata.version("numpy")] in rows


@pytest.mark.parametrize("words", [["--export"], ["nobody"]])
def test_what_cannot_be_captured_is_refused(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["env", "capture", *words]) == 2


def test_a_run_without_a_note_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)

    assert main(["env", "capture", str(run.path)]) == 2
    assert "have not started" in capsys.readouterr().err
