"""The image that comes with us: two recipes of the same, and the command that builds them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.cli import main
from ddp_hpc.launch.submission.image_build import BUILD_FILES, build_argv, build_files_dir
from ddp_hpc.watch.diagnose.image_probe import NEEDED, USEFUL

ROOT = Path(ddp_hpc.__file__).parents[1]
DEFINITION = (ROOT / "containers/ddp_hpc.def").read_text()
DOCKERFILE = (ROOT / "containers/Dockerfile").read_text()


def section(name: str) -> list[str]:
    """Return the lines of a section of the definition file."""
    found = re.search(rf"^%{name}\n((?:    .+\n|\n)*)", DEFINITION, flags=re.MULTILINE)
    assert found is not None, f"no %{name}"
    return [line.strip() for line in found[1].splitlines() if line.strip()]


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, flags=re.MULTILINE)


# --- two recipes, one list ---------------------------------------------------------------------------------------------


def test_both_copy_the_same_files_which_are_there() -> None:
    assert section("files") == instructions("COPY")
    assert {line.split()[0] for line in section("files")} == set(BUILD_FILES) - {
        "containers/ddp_hpc.def",
        "containers/Dockerfile",
    }
    assert all((ROOT / name).is_file() for name in BUILD_FILES)


def test_both_run_the_same_commands_and_the_same_test() -> None:
    assert section("post") + section("test") == instructions("RUN")
    assert instructions("HEALTHCHECK CMD") == [json.dumps(section("test"))]


def test_both_have_the_same_base_variables_and_labels() -> None:
    assert [line for line in section("arguments") if line.startswith("BASE=")] == instructions("ARG")
    assert [line.removeprefix("export ") for line in section("environment")] == instructions("ENV")
    labels = [re.fullmatch(r'(\S+) "?(.*?)"?', line) for line in section("labels")]
    assert [f'{found[1]}="{found[2]}"' for found in labels if found] == instructions("LABEL")


def test_the_dockerfile_passes_its_linter_which_can_fail(tmp_path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN cd /tmp\n")

    good = subprocess.run([hadolint, ROOT / "containers/Dockerfile"], capture_output=True, text=True, check=False)

    assert (good.returncode, good.stdout) == (0, "")
    assert subprocess.run([hadolint, bad], capture_output=True, check=False).returncode != 0


@pytest.mark.long
def test_the_self_test_imports_all_that_a_run_would_and_passes_here() -> None:
    text = (ROOT / "containers/selftest").read_text()
    imported = set(re.findall(r"^import ([a-z0-9_]+)", text, flags=re.MULTILINE))
    requirements = re.findall(r"^([a-z0-9]+)", (ROOT / "envs/requirements.txt").read_text(), flags=re.MULTILINE)

    done = subprocess.run(
        [sys.executable, ROOT / "containers/selftest"], capture_output=True, text=True, check=False, timeout=120
    )

    assert {{"pyyaml": "yaml", "nvidia": "pynvml"}.get(name, name) for name in requirements} <= imported
    assert {*NEEDED, "torchvision"} <= imported
    assert "torchvision" in USEFUL
    assert "\ngood: torch " in f"\n{done.stdout}", done.stderr  # gloo of PyTorch 2.9 prints a line before it


# --- pins --------------------------------------------------------------------------------------------------------------


def test_requirements_pins_and_the_conda_environment_follow_from_one_source(tmp_path: Path) -> None:
    pytest.importorskip("tomllib", reason="not tested that derived files are fresh: envs/derive.py needs Python 3.11")
    subprocess.run([sys.executable, ROOT / "envs/derive.py", tmp_path], check=True)

    made = {path.name: path.read_text() for path in tmp_path.iterdir()}

    assert sorted(made) == ["constraints-cpu.txt", "environment.yml", "requirements.txt"]
    for name, text in made.items():
        assert (ROOT / "envs" / name).read_text() == text, f"envs/{name} is stale: python envs/derive.py"


def test_the_pins_for_cpus_are_the_others_without_what_only_gpus_need() -> None:
    with_gpus = set((ROOT / "envs/constraints.txt").read_text().splitlines())
    without = {
        line for line in (ROOT / "envs/constraints-cpu.txt").read_text().splitlines() if not line.startswith("#")
    }

    dropped = {line.split("==")[0] for line in with_gpus - without if not line.startswith("#")}

    assert without <= with_gpus
    assert all(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in dropped)
    assert {"torch", "torchvision", "numpy"} <= {line.split("==")[0] for line in without}


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def has_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return how to put an engine on PATH that is a shell script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def put(name: str, text: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return put


WRITE_WHAT_IS_ASKED = 'for word; do previous=$last; last=$word; done; { echo "$@"; ls containers envs; } >"$previous"'


def test_a_build_has_its_files_at_hand_and_its_base_as_argument(
    has_engine: Callable[[str, str], Path], tmp_path: Path
) -> None:
    has_engine("apptainer", WRITE_WHAT_IS_ASKED)

    assert (
        main(["container", "build", "torch.sif", "--base", "docker://pytorch/pytorch:2.9", "--build-arg", "A=b c"]) == 0
    )

    said = (tmp_path / "torch.sif").read_text()
    assert "--build-arg BASE=pytorch/pytorch:2.9 --build-arg A=b c" in said
    assert {"ddp_hpc.def", "install", "selftest", "requirements.txt", "constraints.txt"} <= set(said.split())


def test_a_base_that_is_a_file_is_taken_from_here(has_engine: Callable[[str, str], Path], tmp_path: Path) -> None:
    has_engine("singularity", WRITE_WHAT_IS_ASKED)
    (tmp_path / "base.sqsh").touch()

    assert main(["container", "build", "torch.sif", "--base", "base.sqsh"]) == 0

    said = (tmp_path / "torch.sif").read_text()
    assert f"--build-arg BOOTSTRAP=localimage --build-arg BASE={tmp_path}/base.sqsh" in said


def test_a_build_that_fails_leaves_what_was_there_and_nothing_else(
    has_engine: Callable[[str, str], Path], tmp_path: Path
) -> None:
    has_engine("apptainer", "touch containers/half; exit 255")
    (tmp_path / "torch.sif").write_text("the old one")

    assert main(["container", "build", "torch.sif"]) == 2
    assert main(["container", "build", "torch.sif", "--force"]) == 1

    assert (tmp_path / "torch.sif").read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "torch.sif"]


def test_a_directory_is_not_replaced_by_an_image(has_engine: Callable[[str, str], Path], tmp_path: Path) -> None:
    has_engine("apptainer", WRITE_WHAT_IS_ASKED)
    (tmp_path / "torch.sif").mkdir()

    assert main(["container", "build", "torch.sif", "--force"]) == 2


def test_a_missing_engine_is_an_error_that_names_it(
    has_engine: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_engine("nothing", "")
    monkeypatch.setenv("PATH", "/nowhere")

    assert main(["container", "build", "torch.sif"]) == 2
    assert "PATH has no apptainer or singularity" in capsys.readouterr().err


def test_docker_builds_from_the_dockerfile_under_a_tag() -> None:
    asked = build_argv("docker", "torch:1", ["BASE=debian:12"])

    assert asked == [
        *("docker", "build", "--build-arg", "BASE=debian:12"),
        *("--file", "containers/Dockerfile", "--tag", "torch:1", "."),
    ]


def test_the_files_of_a_build_are_found_in_the_checkout() -> None:
    assert build_files_dir() == ROOT
