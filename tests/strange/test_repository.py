"""Code that comes with a repository's own ideas, or from within another's: it is copied, and nothing of it is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_hpc.launch.submission.snapshot import take_snapshot
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import add_attempt, make_run
from tests.unit.made_repository import git


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a work tree with a recipe."""
    code = tmp_path / "code"
    code.mkdir()
    git(code, "init", "--quiet")
    (code / "net.py").write_text("build = None\n")
    (code / ".gitattributes").write_text("*.py filter=theirs\n")
    git(code, "add", ".")
    git(code, "commit", "--quiet", "-m", "first")
    return code


def copied(run: RunDir) -> set[str]:
    return {
        path.name for path in run.snapshot.iterdir() if not path.name.startswith(".ddp_hpc") and path.name != ".git"
    }


def test_no_command_of_a_repositorys_configuration_is_run(code: Path, tmp_path: Path) -> None:
    did_run = tmp_path / "did_run"
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\necho $0 $* >> {did_run}\ncat\n")
    command.chmod(0o755)
    included = tmp_path / "more.config"
    included.write_text(f'[filter "theirs"]\n\tclean = {command} clean\n\trequired = true\n')
    git(code, "config", "core.fsmonitor", f"{command}")
    git(code, "config", "core.hooksPath", str(tmp_path))
    git(code, "config", "filter.theirs.process", f"{command} process")
    git(code, "config", "filter.a=b.clean", f"{command} other")
    (code / ".gitattributes").write_text("*.py filter=theirs\nlib.py filter=a=b\n")
    (code / "lib.py").touch()
    git(code, "submodule", "--quiet", "add", str(code), "vendor")
    git(code / "vendor", "config", "filter.theirs.clean", f"{command} vendor")
    did_run.unlink(missing_ok=True)
    (code / "lib.py").write_text("b = 1\n")
    (code / "vendor" / "net.py").write_text("build = str\n")
    git(code, "config", "include.path", str(included))
    (code / "net.py").write_text("build = int\n")  # changed, so git would look whether it is by the filter

    take_snapshot(code, make_run(tmp_path), max_bytes=10**6)

    assert not did_run.exists()
    assert copied(RunDir(tmp_path / "digits")) == {"net.py", "lib.py", "vendor", ".gitmodules", ".gitattributes"}


@pytest.mark.parametrize("name", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"])
def test_what_a_hook_of_another_repository_has_in_its_environment_leads_nowhere(
    name: str, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    (other / "theirs.py").touch()
    git(other, "add", ".")
    places = {
        "GIT_WORK_TREE": other,
        "GIT_INDEX_FILE": other / ".git/index",
        "GIT_OBJECT_DIRECTORY": other / ".git/objects",
    }
    monkeypatch.setenv(name, str(places.get(name, other / ".git")))

    snapshot = take_snapshot(code, make_run(tmp_path), max_bytes=10**6)

    assert snapshot.commit is not None
    assert snapshot.source == code
    assert copied(RunDir(tmp_path / "digits")) == {"net.py", ".gitattributes"}


def test_a_work_tree_elsewhere_is_not_copied_in_the_codes_place(code: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/diary.txt").touch()
    git(code, "config", "core.worktree", str(tmp_path / "private"))

    snapshot = take_snapshot(code, make_run(tmp_path), max_bytes=10**6)

    assert snapshot.source == code
    assert copied(RunDir(tmp_path / "digits")) == {"net.py", ".gitattributes"}


def test_older_runs_and_their_checkpoints_are_no_code_wherever_they_lie(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "lib").mkdir(parents=True)
    for name in ("net.py", "lib/more.py"):
        (code / name).touch()
    for runs_dir in ("runs", "results/old", "."):
        old = make_run(code / runs_dir, "older")
        add_attempt(old)
        old.checkpoints.mkdir()
        (old.checkpoints / "weights.safetensors").touch()
    (code / "config.yaml").write_text("name: mine\n")  # of the user's own, beside the code

    take_snapshot(code, make_run(code / "runs"), max_bytes=10**6)

    found = sorted(str(path.relative_to(path.parents[0])) for path in (code / "runs/digits/snapshot/").rglob("*.*"))
    names = {name for name in found if not name.startswith(".ddp_hpc")}
    assert names == {"net.py", "more.py", "config.yaml"}
    assert os.path.lexists(code / "runs/digits/snapshot")
