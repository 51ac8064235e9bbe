"""What a job would fail of on its nodes is refused where it is typed, by a dry run too."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.launch.submission.preflight import capacity

HOME_RUN = Path("/home/ada/runs/net")


def mounted(monkeypatch: pytest.MonkeyPatch, **mounts: str) -> None:
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)


@pytest.mark.parametrize(
    ("python", "mounts", "told"),
    [
        ("/tmp/venv", {"/": "ext4"}, "/tmp of its own"),
        ("/var/tmp/ada/venv", {"/": "ext4"}, "/var/tmp of its own"),
        ("/dev/shm/venv", {"/": "ext4", "/dev/shm": "tmpfs"}, r"/dev/shm \(tmpfs\) of its own"),
        ("/fast/venv", {"/": "ext4", "/fast": "tmpfs"}, r"/fast \(tmpfs\) of its own"),
        ("/tmp/shared/venv", {"/": "ext4", "/tmp": "tmpfs", "/tmp/shared": "nfs4"}, ""),
        ("/home/ada/venv", {"/": "ext4", "/home": "nfs4"}, ""),
        ("/usr", {"/": "tmpfs", "/home": "nfs4"}, ""),  # a node without a disk
    ],
)
def test_a_python_that_nodes_do_not_share_is_refused(
    python: str, mounts: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, **mounts)
    wanted = pytest.raises(ConfigError, match=rf"This Python uses {python}, but each node has a {told}")

    with wanted if told else nullcontext():
        capacity.refuse_private_python(HOME_RUN, [Path("/usr/lib"), Path(python)])


@pytest.mark.parametrize("cluster", ["slurm", "local"])
@pytest.mark.parametrize("how", [["submit", "--dry-run"], ["submit"], ["render"]], ids=" ".join)
def test_an_image_that_is_not_there_is_refused_by_all_alike(
    how: list[str], cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capacity, "refuse_private_directory", lambda _: None)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scontrol", "squeue"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run.yaml").write_text("container: {image: none.sif}\n")
    where = [] if how == ["render"] else ["--cluster", cluster]

    code = main([*how, "run.yaml", *where])

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert f"`container.image` is {tmp_path}/none.sif, but there is no such file" in said.err
    assert not (tmp_path / "runs").exists()


def test_without_a_snapshot_the_job_imports_the_code_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capacity, "refuse_private_directory", lambda _: None)
    (tmp_path / "net.py").touch()
    (tmp_path / "run.yaml").write_text("recipe: {target: 'net:build'}\n")

    scripts = {}
    for is_enabled in ("true", "false"):
        words = [f"snapshot.enabled={is_enabled}", f"name=net-{is_enabled}"]
        assert main(["render", "run.yaml", *words]) == 0
        scripts[is_enabled] = (tmp_path / f"runs/net-{is_enabled}/job.sbatch").read_text()

    assert f"_DDP_HPC_IMPORT_PATH={tmp_path}/runs/net-true/snapshot " in scripts["true"]
    assert (tmp_path / "runs/net-true/snapshot/net.py").is_file()
    assert f"_DDP_HPC_IMPORT_PATH={tmp_path} " in scripts["false"]
    assert sorted(path.name for path in (tmp_path / "runs/net-false").iterdir()) == [
        "config.yaml",
        "job.sbatch",
        "logs",
    ]
