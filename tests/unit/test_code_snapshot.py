"""The code of a queued job is what it was at submit, whole, and stays it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.launch.submission import snapshot
from ddp_hpc.launch.submission.snapshot import Snapshot, differences, path_in_snapshot, take_snapshot
from ddp_hpc.run.run_dir.paths import RunDir
from tests.unit.made_repository import git

MB = 10**6


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a work tree with one commit."""
    folder = tmp_path / "code"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "net.py").write_text("WIDTH = 1\n")
    (folder / "gone.py").write_text("")
    (folder / ".gitignore").write_text("*.bin\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=one")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    return RunDir(path)


def take(code: Path, run: RunDir, max_bytes: int = MB) -> Snapshot:
    return take_snapshot(code, run, max_bytes=max_bytes)


def names(taken: Snapshot) -> set[str]:
    files = (path for path in taken.path.rglob("*") if not path.is_dir() or path.is_symlink())
    return {str(path.relative_to(taken.path)) for path in files} - {snapshot.MANIFEST}


def test_a_work_tree_is_copied_as_it_is_without_what_git_ignores(code: Path, run: RunDir) -> None:
    (code / "package" / "net.py").write_text("WIDTH = 2\n")
    (code / "gone.py").unlink()
    (code / "new file\n.py").write_text("")
    (code / "naïve.py").write_text("")
    (code / "weights.bin").write_bytes(b"0" * 100)

    taken = take(code / "package", run)

    assert names(taken) == {".gitignore", "package/net.py", "new file\n.py", "naïve.py"}
    assert (taken.path / "package" / "net.py").read_text() == "WIDTH = 2\n"
    assert (taken.is_dirty, taken.num_files, len(taken.commit or "")) == (True, 4, 40)


def test_the_job_imports_from_the_copy_of_the_codes_own_directory(code: Path, run: RunDir) -> None:
    promised = path_in_snapshot(run, code / "package")

    take(code / "package", run)

    assert promised == path_in_snapshot(run, code / "package")
    assert (promised / "net.py").read_text() == "WIDTH = 1\n"


def test_submodules_links_and_modes_come_along(tmp_path: Path, code: Path, run: RunDir) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tool.py").write_text("")
    git(other, "init", "--quiet")
    git(other, "add", ".")
    git(other, "commit", "--quiet", "--message=one")
    git(code, "submodule", "--quiet", "add", str(other), "vendor")
    (code / "run.sh").write_text("")
    (code / "run.sh").chmod(0o755)
    (code / "link.py").symlink_to("package/net.py")

    taken = take(code, run)

    assert {"vendor/tool.py", "run.sh", "link.py"} <= names(taken)
    assert os.access(taken.path / "run.sh", os.X_OK)
    assert (taken.path / "link.py").readlink() == Path("package/net.py")


def test_outside_of_a_work_tree_git_is_not_started(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its processes takes 4 ms, and a submission asked it fifteen times."""
    plain, program = tmp_path / "plain", tmp_path / "bin" / "git"
    plain.mkdir()
    (plain / "train.py").touch()
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    snapshot = take_snapshot(plain, run, max_bytes=10**6)

    assert snapshot.num_files == 1
    assert not (tmp_path / "started").exists()


def test_without_git_hidden_files_caches_and_environments_stay_out(tmp_path: Path, run: RunDir) -> None:
    plain = tmp_path / "plain"
    for name in ("net.py", ".secret", "__pycache__/net.pyc", "venv/pyvenv.cfg", "venv/lib/torch.py", "lib/util.py"):
        (plain / name).parent.mkdir(parents=True, exist_ok=True)
        (plain / name).write_text("")

    assert names(take(plain, run)) == {"net.py", "lib/util.py"}


def test_runs_in_the_work_tree_are_no_code(code: Path) -> None:
    inside = RunDir(code / "runs" / "run")
    inside.path.mkdir(parents=True)
    inside.config.write_text("")

    assert not any(name.startswith("runs/") for name in names(take(code, inside)))


def test_later_edits_do_not_reach_it_and_the_same_code_is_not_copied_twice(code: Path, run: RunDir) -> None:
    first = take(code, run)
    again = take(code, run)
    (code / "package" / "net.py").write_text("WIDTH = 3\n")

    assert again.path == first.path
    assert (run.snapshot / "package" / "net.py").read_text() == "WIDTH = 1\n"
    assert differences(first.path) == []
    edited = take(code, run)
    assert edited.path != first.path
    assert (run.snapshot / "package" / "net.py").read_text() == "WIDTH = 3\n"
    assert (first.path / "package" / "net.py").read_text() == "WIDTH = 1\n"


def test_what_is_too_large_is_refused_with_the_biggest_and_nothing_is_left(code: Path, run: RunDir) -> None:
    (code / "big.dat").write_bytes(b"0" * 3 * MB)

    with pytest.raises(ConfigError, match=r"big\.dat \(3\.0 MB\)") as error:
        take(code, run, max_bytes=2 * MB)

    assert "`snapshot.max_mb` is 2" in str(error.value)
    assert list(run.path.iterdir()) == []


def test_a_copy_that_fails_publishes_nothing(code: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_copy", full)
        with pytest.raises(ConfigError, match="No space left"):
            take(code, run)

    assert list(run.snapshots.iterdir()) == []
    assert not run.snapshot.exists()
    assert differences(take(code, run).path) == []


def test_the_leftover_of_a_killed_writer_is_swept(code: Path, run: RunDir) -> None:
    left = run.snapshots / ".abc.1.tmp"
    left.mkdir(parents=True)

    take(code, run)

    assert not left.exists()


def test_every_difference_from_the_manifest_is_found(code: Path, run: RunDir) -> None:
    taken = take(code, run).path
    (taken / "gone.py").unlink()
    (taken / "package" / "net.py").chmod(0o644)
    (taken / "package" / "net.py").write_text("WIDTH = 9\n")
    (taken / "more.py").write_text("")
    (taken / "__pycache__").mkdir()
    (taken / "__pycache__" / "more.pyc").write_text("")  # Python's own

    assert differences(taken) == ["missing gone.py", "changed package/net.py", "added more.py"]
    manifest = json.loads((taken / snapshot.MANIFEST).read_text())
    assert manifest["source"] == str(code)
