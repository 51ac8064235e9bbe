"""Putting images and packed environments on nodes' own disks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.containers import CommandWrapper, file_to_stage
from ddp_hpc.cluster.slurm.allocation import Allocation, read_allocation
from ddp_hpc.cluster.slurm.framing import read_answers
from ddp_hpc.job.node import unpack as unpacking
from ddp_hpc.job.node.unpack import link_package, unpack
from ddp_hpc.job.staging import Staged, stage, unstage, with_staged_paths
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ContainerSpec, RunSpec, StageSpec
from tests.unit.made_network import batch

RUN = RunDir(Path("/scratch/ada/runs/net"))


def spec(folder: Path, *, archive: Path | None = None, image: Path | None = None) -> RunSpec:
    return RunSpec(
        name="net",
        stage=StageSpec(dir=str(folder), archive=None if archive is None else str(archive)),
        container=ContainerSpec(image=None if image is None else str(image)),
    )


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return a packed environment whose Python is this one."""
    root = tmp_path / "env"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    path = tmp_path / "env.tar.gz"
    subprocess.run(["tar", "-czf", path, "-C", root, "."], check=True)
    return path


@pytest.fixture
def allocation() -> Allocation:
    found = read_allocation(batch("node[1-2]", "1(x2)"))
    assert found is not None
    return found


@pytest.fixture
def has_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return how to have an srun that does this with the command it is given, as `$@`."""

    def put(text: str) -> None:
        path = tmp_path / "bin" / "srun"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\n{text}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return put


# --- on a node ---------------------------------------------------------------------------------------------------------


def test_an_archive_is_unpacked_and_an_image_copied_once(tmp_path: Path, archive: Path) -> None:
    image = tmp_path / "torch.sif"
    image.write_bytes(b"image")

    read = unpack(archive, tmp_path / "local" / "env"), unpack(image, tmp_path / "local" / "torch.sif")

    assert read == (archive.stat().st_size, 5)
    assert (tmp_path / "local" / "env" / "bin" / "python").exists()
    assert (tmp_path / "local" / "torch.sif").read_bytes() == b"image"
    assert unpack(archive, tmp_path / "local" / "env") == 0
    assert sorted(path.name for path in (tmp_path / "local").iterdir()) == ["env", "torch.sif"]


def test_what_cannot_be_unpacked_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "env.tar.gz"
    broken.write_bytes(b"no archive")

    with pytest.raises(OSError, match="tar could not unpack"):
        unpack(broken, tmp_path / "local" / "env")

    assert list((tmp_path / "local").iterdir()) == []


def test_what_does_not_fit_is_refused_before_it_is_begun(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_MAX_GROWTH", 10**15)

    with pytest.raises(OSError, match="GB free"):
        unpack(archive, tmp_path / "local" / "env")


def packed(tmp_path: Path, name: str, **files: str) -> Path:
    """Return an archive of scripts below `bin/`."""
    root = tmp_path / name
    (root / "bin").mkdir(parents=True)
    for file, text in files.items():
        path = root / "bin" / file.replace("_", "-")
        path.write_text(text)
        path.chmod(0o755)
    archive = tmp_path / f"{name}.tar"
    subprocess.run(["tar", "-cf", archive, "-C", root, "."], check=True)
    return archive


def test_an_environment_is_told_of_its_last_place_not_of_one_on_the_way(tmp_path: Path) -> None:
    """As conda-pack's are: the program asks where it lies itself."""
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    settles = "import pathlib, sys; pathlib.Path(sys.argv[0]).with_name('place').write_text(sys.argv[0])"

    unpack(packed(tmp_path, "env", python=python, conda_unpack=settles), tmp_path / "local" / "env")

    assert (tmp_path / "local/env/bin/place").read_text() == str(tmp_path / "local/env/bin/conda-unpack")


@pytest.mark.parametrize("files", [{}, {"python": "#!/bin/sh\nexit 3\n"}, {"python": "#!/no/such/interpreter\n"}])
def test_an_environment_whose_python_does_not_start_is_none(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"could not start in the environment|No such file"):
        unpack(packed(tmp_path, "env", **files), tmp_path / "local" / "env")

    assert list((tmp_path / "local").iterdir()) == []


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path, archive: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    folder.chmod(0o777)

    with pytest.raises(OSError, match="not a directory that only you can write to"):
        unpack(archive, folder / "env")

    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a directory that only you can write to"):
        unpack(archive, tmp_path / "link" / "env")


def test_a_python_finds_the_linked_package_and_nothing_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "site" / "mine"
    package.mkdir(parents=True)
    (package.parent / "other").mkdir()

    link_package(package, tmp_path / "local")
    link_package(package, tmp_path / "local")

    assert [path.name for path in (tmp_path / "local" / "import").iterdir()] == ["mine"]


def test_each_node_tells_how_it_went(tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [[archive, tmp_path / "local" / "env"], [tmp_path / "none.sif", tmp_path / "local" / "none.sif"]]
    told: list[dict[str, Any]] = []
    codes: list[int] = []
    for paths in [*calls, [tmp_path / "local"]]:
        codes.append(unpacking.main([*map(str, paths), "--mark=m"]))
        told += read_answers(capsys.readouterr().out, "m").values()

    good, bad, removed = told
    assert codes == [0, 1, 0]
    assert (good["error"], removed["error"]) == ("", "")
    assert "none.sif" in bad["error"]
    assert not (tmp_path / "local").exists()


# --- of a job ----------------------------------------------------------------------------------------------------------


def test_a_job_stages_tells_of_it_and_takes_it_away(
    tmp_path: Path,
    archive: Path,
    allocation: Allocation,
    has_srun: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    has_srun('echo Welcome; SLURMD_NODENAME=node1 "$@" && SLURMD_NODENAME=node2 "$@"')  # two nodes that share a disk
    environ = {**os.environ, "LOCAL": str(tmp_path / "local")}

    staged = stage(spec(Path("$LOCAL"), archive=archive), RUN, allocation, environ)

    assert staged is not None
    assert staged.folder.parent == tmp_path / "local"
    assert staged.folder.name.startswith(f"ddp_hpc-{allocation.job_id}-0-")
    assert "on 2 nodes in" in capsys.readouterr().err
    where = [str(staged.target / "bin" / "python"), "-c", "import ddp_hpc; print(ddp_hpc.__file__)"]
    environ_of_worker = {"PYTHONPATH": str(staged.folder / "import")}
    found = subprocess.run(where, env=environ_of_worker, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(staged.folder / "import"))
    unstage(staged, allocation, environ)
    assert not staged.folder.exists()


@pytest.mark.parametrize(
    ("srun", "folder", "told"),
    [
        ('SLURMD_NODENAME=node1 "$@"', "local", "node2 did not answer"),
        ("echo broken >&2; exit 1", "local", "node1, node2 did not answer (broken)"),
        ('SLURMD_NODENAME=node1 "$@"', "/dev/null/local", "node1: [Errno 20] Not a directory"),
        ('"$@"; "$@"', "$NOWHERE", "does not have the variable"),
        ('"$@"; "$@"', "/local$", "has a `$` that no variable's name follows. Write `$$` for a plain `$`"),
        ('"$@"; "$@"', "~/local", "must be an absolute path"),
    ],
)
def test_what_cannot_be_staged_costs_no_run(  # noqa: PLR0917  a row of a table
    srun: str,
    folder: str,
    told: str,
    tmp_path: Path,
    archive: Path,
    allocation: Allocation,
    has_srun: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    has_srun(srun)
    where = folder if folder[0] in "/$~" else str(tmp_path / folder)

    assert stage(spec(Path(where), archive=archive), RUN, allocation, dict(os.environ)) is None

    said = capsys.readouterr().err
    assert said.startswith("warning: ")
    assert told in said
    assert not [*tmp_path.glob("local/*")]


def test_nothing_is_staged_where_nothing_was_asked(tmp_path: Path, archive: Path, allocation: Allocation) -> None:
    image = tmp_path / "sandbox"
    image.mkdir()

    assert stage(RunSpec(name="net"), RUN, allocation, {}) is None
    assert stage(spec(tmp_path, archive=archive), RUN, None, {}) is None  # on this machine
    assert stage(spec(tmp_path, image=image), RUN, allocation, {}) is None  # a directory of many files


def test_commands_name_what_was_staged(tmp_path: Path) -> None:
    staged = Staged(folder=Path("/local/j"), source="/scratch/torch.sif", target=Path("/local/j/torch.sif"))
    packed = Staged(folder=Path("/local/j"), source="/scratch/env.tar.gz", target=Path("/local/j/env"))
    image = CommandWrapper(python="python3", prefix=("apptainer", "exec", "/scratch/torch.sif", "env"), image="SIF 1")
    pyxis = CommandWrapper(srun_args=("--container-image=/scratch/torch.sif",))

    assert with_staged_paths(image, staged, {}).prefix == ("apptainer", "exec", "/local/j/torch.sif", "env")
    assert with_staged_paths(image, staged, {}).image == "SIF 1"
    assert with_staged_paths(pyxis, staged, {}).srun_args == ("--container-image=/local/j/torch.sif",)
    assert with_staged_paths(CommandWrapper(), packed, {"PYTHONPATH": "/code"}).command == [
        "env",
        "PYTHONPATH=/local/j/import:/code",
        "/local/j/env/bin/python",
    ]
    assert with_staged_paths(image, None, {}) == image


def test_what_is_no_archive_is_refused_before_the_queue(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its name must end in one of \.tar"):
        file_to_stage(spec(tmp_path, archive=tmp_path / "env.zip"))
    with pytest.raises(ConfigError, match="that file does not exist"):
        file_to_stage(spec(tmp_path, archive=tmp_path / "env.tar"))
    with pytest.raises(ConfigError, match=r"`stage\.dir` is not"):
        StageSpec(archive="env.tar")
    with pytest.raises(ConfigError, match="can use only one of them"):
        spec(tmp_path, archive=tmp_path / "env.tar", image=tmp_path)
