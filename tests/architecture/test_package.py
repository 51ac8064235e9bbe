"""What a user installs is whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.launch.submission import allocate
from ddp_hpc.launch.submission.image_build import BUILD_FILES

ROOT = Path(ddp_hpc.__file__).parents[1]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "ddp_hpc").rglob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel with the environment's own hatchling: no network."""
    directory = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    (path,) = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> str:
    return wheel.read(f"ddp_hpc-{ddp_hpc.__version__}.dist-info/METADATA").decode()


def test_the_wheel_holds_every_module_the_digits_and_the_job_script(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())

    data = {
        "train/recipes/digits.npz",
        "sbatch_templates/ddp.sbatch.j2",
        "sbatch_templates/sweep.sbatch.j2",
        "sites/slingshot.yaml",
    }
    data |= {f"image_files/{name}" for name in BUILD_FILES}
    assert {*MODULES, *(f"ddp_hpc/{name}" for name in data)} <= names


def test_what_was_installed_finds_its_own_template(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = (
        "from ddp_hpc.launch import render; sys.stdout.write(str(render.packaged_template_path(render.TEMPLATE_NAME)))"
    )
    argv = [sys.executable, "-c", f"import sys; {program}"]

    done = subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, text=True)

    assert done.stdout == str(tmp_path / "ddp_hpc" / "sbatch_templates" / "ddp.sbatch.j2")


def test_what_was_installed_finds_its_own_sites_and_recipes_of_images(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = (
        "from ddp_hpc.run.config.site import examples_dir; from ddp_hpc.launch.submission.image_build import BUILD_FILES, build_files_dir; "
        "print(len(list(examples_dir().glob('*.yaml'))), all((build_files_dir() / name).exists() for name in BUILD_FILES))"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)

    assert done.stdout.split() == ["4", "True"]


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}

    assert tops == {"ddp_hpc", f"ddp_hpc-{ddp_hpc.__version__}.dist-info"}


@pytest.mark.parametrize(("file", "words"), [("LICENSE", "Apache License"), ("NOTICE", "CC BY 4.0")])
def test_the_wheel_carries_the_licence_and_the_credits(wheel: zipfile.ZipFile, file: str, words: str) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(f".dist-info/licenses/{file}"))

    assert words in wheel.read(name).decode()


def test_the_wheel_says_its_version_and_licence(wheel: zipfile.ZipFile) -> None:
    lines = metadata(wheel).splitlines()

    assert f"Version: {ddp_hpc.__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines


def test_the_citation_has_the_version() -> None:
    assert f"version: {ddp_hpc.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_metadata_name_no_address_but_those_of_the_readme(wheel: zipfile.ZipFile) -> None:
    head, _, _ = metadata(wheel).partition("\n\n")

    assert "://" not in head


@pytest.mark.long
def test_wheel_and_sdist_are_the_same_to_the_byte_from_another_directory(tmp_path: Path) -> None:
    subprocess.run([ROOT / "envs" / "make-dist", sys.executable, tmp_path], cwd=ROOT, check=True)

    (sdist,) = tmp_path.glob("*.tar.gz")
    listed = subprocess.run(["tar", "-tf", sdist], check=True, capture_output=True, text=True).stdout
    names = {name.partition("/")[2] for name in listed.splitlines()}
    assert {"pyproject.toml", "LICENSE", "NOTICE", "envs/constraints.txt", "tests/conftest.py"} <= names
    assert not [name for name in names if name.startswith((".ci", ".git/", ".venv", "runs", "dist"))]


def test_the_wheel_brings_the_command(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))

    assert "ddp-hpc = ddp_hpc.__main__:main" in wheel.read(name).decode().splitlines()


def test_pip_keeps_the_pytorch_that_is_there(wheel: zipfile.ZipFile) -> None:
    """Each torchvision asks for one PyTorch, and pip takes the newest of them: only who wants it gets it."""
    needs = re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", metadata(wheel), flags=re.MULTILINE)
    plain = {name: rest for name, rest in needs if "extra ==" not in rest}

    oldest = plain["torch"].removeprefix(">=")
    assert f"+torch{oldest} " in (ROOT / "Makefile").read_text(), (
        "`make test-all` does not try the oldest PyTorch that is promised"
    )
    assert "torchvision" not in plain
    assert ("torchvision", ">=0.21; extra == 'vision'") in needs


def test_pip_takes_a_submitit_that_works(wheel: zipfile.ZipFile) -> None:
    (bounds,) = re.findall(r"^Requires-Dist: submitit(.*)$", metadata(wheel), flags=re.MULTILINE)
    (advised,) = re.findall(r"'submitit([^']*)'", allocate._unfit_submitit_message("it is another one"))

    assert set(bounds.split(",")) == set(advised.split(",")) != {""}


def test_every_module_says_what_it_is_for() -> None:
    mute = [one for one in MODULES if not ast.get_docstring(ast.parse((ROOT / one).read_text(encoding="utf-8")))]

    assert mute == []


@pytest.mark.long
def test_the_wheel_trains_in_an_environment_of_ones_own(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """What it needs lies below, as with `--system-site-packages`; pip takes nothing from a network."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "own"], check=True)
    python = tmp_path / "own" / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([python, *install, str(wheel.filename)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "own")}))
    (own / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")

    command = [tmp_path / "own" / "bin" / "ddp-hpc"]
    version = subprocess.run([*command, "--version"], cwd=tmp_path, check=True, capture_output=True, text=True)
    checked = subprocess.run([python, "-m", "pip", "check"], check=False, capture_output=True, text=True)
    assert version.stdout == f"ddp-hpc {ddp_hpc.__version__}\n"
    assert [line for line in checked.stdout.splitlines() if line.startswith("ddp")] == []
    subprocess.run([*command, "init", "first"], cwd=tmp_path, check=True)
    subprocess.run(
        [*command, "submit", "my_run.yaml", "--wait", "--cluster", "local"], cwd=tmp_path / "first", check=True
    )

    where = [str(python), "-c", "import ddp_hpc; print(ddp_hpc.__file__)"]
    done = subprocess.run(where, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(str(own))
    assert (tmp_path / "first/runs/my_run/DONE").exists()
