"""`ddp-hpc init`: the first files run at once, and nothing of the user's is overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.cli.verbs.init import FILES


@pytest.mark.long
def test_the_first_files_train_at_once(tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "ddp_hpc"]

    written = subprocess.run([*ours, "init", "first"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert written.stdout.endswith("start   cd first && ddp-hpc submit my_run.yaml --follow\n")
    submitted = [*ours, "submit", "my_run.yaml", "--wait", "--cluster", "local"]
    done = subprocess.run(submitted, cwd=tmp_path / "first", check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "first/runs/my_run/DONE").exists()
    accuracy = float(done.stdout.partition("accuracy ")[2].split()[0])
    assert accuracy > 0.8, "the example learns something"


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten_and_nothing_is_written_beside_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).symlink_to("nowhere")

    assert main(["init", str(tmp_path)]) == 2

    assert f"{tmp_path / name} exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_directory_that_cannot_be_made_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    assert main(["init", str(tmp_path / "file")]) == 2
    assert "cannot be written: " in capsys.readouterr().err
