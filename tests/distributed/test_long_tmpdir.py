"""Processes of a node meet at sockets in the directory for temporary files: one with a long path is reached by a short one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddp_hpc.cluster.rank_probe.folder import make_folder
from ddp_hpc.cluster.rendezvous.worker_env import users_environ
from ddp_hpc.job.node.python_environ import shorten_tmpdir

LOAD = """
import os, torch
from torch.utils.data import DataLoader
torch.set_num_threads(1)
loader = DataLoader(torch.arange(8.0), batch_size=4, num_workers=1)
print("sum", sum(float(batch.sum()) for batch in loader), "in", os.path.realpath(os.environ["TMPDIR"]), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", "torchrun"])
def test_loaders_meet_where_the_path_of_tmpdir_is_too_long_for_a_socket(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text(LOAD)
    users = tmp_path / ("x" * 100) / ("y" * 90)
    users.mkdir(parents=True)
    words = ["submit", "--cluster=local", "name=long", f"launcher={launcher}", "resources.workers_per_node=2", "--wait"]
    argv = [sys.executable, "-m", "ddp_hpc", *words, "restart.hang_timeout_s=20", "--", "python", "load.py"]

    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(users)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/long"
    for rank in range(2):
        assert f"sum 28.0 in {users}\n" in (run / f"logs/attempt-0/rank-{rank}.log").read_text()
    notes = [line for line in (run / "logs/console.log").read_text().splitlines() if "TMPDIR" in line]
    assert len(notes) == 1
    assert f"a link to {users}" in notes[0]
    assert not Path(notes[0].split()[3]).exists()


def test_a_directory_for_temporary_files_is_linked_where_its_path_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / ("x" * 110)
    users.mkdir()
    environ = {"TMPDIR": str(users)}
    monkeypatch.setattr(tempfile, "tempdir", str(users))
    made = make_folder()
    assert made is not None

    shorten_tmpdir(made, environ, says=True)

    said = capsys.readouterr().err
    link = Path(environ["TMPDIR"])
    assert (
        said == f"note: TMPDIR is {link} in the workers, a link to {users}, whose path is too long for Unix sockets\n"
    )
    command = [sys.executable, "-c", "from multiprocessing.connection import Listener; print(Listener().address)"]
    printed = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    assert printed.startswith(f"{link}/pymp-")
    assert tempfile.gettempdir() == str(link)
    assert users_environ(environ)["TMPDIR"] == str(users)
    made.close()
    assert not made.path.exists()
    assert users.exists()


def test_a_short_directory_for_temporary_files_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_folder()
    assert made is not None
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    environ: dict[str, str] = {}

    shorten_tmpdir(made, environ, says=True)

    assert environ == {}
    assert tempfile.gettempdir() == "/tmp"
    made.close()
