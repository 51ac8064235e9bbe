"""A script on Slurm that reads and writes beside its own file, as `Path(__file__).parent` says; and code that is imported from elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.slurm.cluster import USER
from tests.slurm.faulty_runs import await_done
from tests.slurm.runs import LoginNode, world

TRAIN = """
import os, time, lib
from pathlib import Path
out = Path(__file__).resolve().parent / OUT
out.mkdir(exist_ok=True)
saved = out / "epoch"
print("begins at", saved.read_text() if saved.exists() else 0, "data", (Path(__file__).parent / "data").exists(), lib.VALUE)
saved.write_text("3")
"""


def submit(login: LoginNode, name: str, edit: int, *settings: str) -> str:
    """Train the script, with an argument that makes a finished run begin again; return what was said."""
    for path in login.folder.rglob("*"):
        shutil.chown(path, USER, USER)
    keys = [f"name={name}", "resources.cpus_per_worker=1", *world(1, 1), *settings]
    done = login.type("submit", "--cluster", "slurm", *keys, "--", "python", "train.py", str(edit))
    assert done.returncode == 0, done.stdout + done.stderr
    await_done(login, name)
    return done.stdout + done.stderr


@pytest.fixture
def code(login: LoginNode) -> Path:
    """Return a git work tree with a source layout, and data that git ignores."""
    (login.folder / "src").mkdir()
    (login.folder / "data").mkdir(exist_ok=True)
    (login.folder / "src" / "lib.py").write_text("VALUE = 'submitted'\n")
    (login.folder / ".gitignore").write_text("data/\nout/\nruns/\n")
    shutil.chown(login.folder, USER, USER)
    login.cluster.run("git", "init", "--quiet", cwd=login.folder)
    return login.folder


@pytest.mark.long
def test_it_finds_its_data_and_saves_where_script_progress_says_and_goes_on_after_an_edit(
    login: LoginNode, code: Path
) -> None:
    for edit in range(2):
        (code / "train.py").write_text(f"OUT = 'out'  # {edit}\n" + TRAIN)
        submit(
            login,
            "beside",
            edit,
            "script.progress=out/*",
            f"env.PYTHONPATH={code}/src",
            f"script.start={('fork', 'exec')[edit]}",
        )

    assert (code / "out" / "epoch").read_text() == "3"
    text = login.console("beside")
    assert "begins at 0 data True submitted" in text
    assert "begins at 3 data True submitted" in text


@pytest.mark.long
def test_what_it_writes_into_the_copy_is_found_after_an_edit_and_named(login: LoginNode, code: Path) -> None:
    for edit in range(2):
        (code / "train.py").write_text(f"OUT = 'results'  # {edit}\n" + TRAIN)
        said = submit(login, "within", edit, f"env.PYTHONPATH={code}/src")
        assert ("note: earlier jobs wrote results into the copy" in said) == bool(edit)

    text = login.console("within")
    assert "begins at 3 data True submitted" in text
