"""The code of a queued job is what it was at submit, whole, and stays it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.launch.submission import snapshot
from ddp_hpc.launch.submission.snapshot import (
    LIST_FILE_NAME,
    Snapshot,
    notes_on_copy,
    outputs_in_copy,
    path_in_snapshot,
    take_snapshot,
)
from ddp_hpc.run.run_dir.paths import RunDir
from tests.unit.made_repository import changed, git, names

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


def test_a_work_tree_is_copied_as_it_is_without_what_git_ignores(code: Path, run: RunDir) -> None:
    (code / "package" / "net.py").write_text("WIDTH = 2\n")
    (code / "gone.py").unlink()
    (code / "new file\n.py").write_text("")
    (code / "naïve.py").write_text("")
    (code / "weights.bin").write_bytes(b"0" * 100)

    taken = take(code / "package", run)

    assert names(taken) == {".gitignore", "package/net.py", "new file\n.py", "naïve.py"}
    assert (taken.path / "package" / "net.py").read_text() == "WIDTH = 2\n"
    assert (taken.num_files, len(taken.commit or "")) == (4, 40)


def test_the_job_imports_from_the_copy_of_the_codes_own_directory(code: Path, run: RunDir) -> None:
    promised = path_in_snapshot(run, code, code / "package")

    take(code / "package", run)

    assert promised == path_in_snapshot(run, code, code / "package")
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


def test_a_git_of_2020_lists_the_files_and_one_that_it_lists_twice_is_one(
    code: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file is listed during a merge; `--deduplicate` came with git 2.31."""
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/bash\n[[ "$*" = *--deduplicate* ]] && { echo "error: unknown option" >&2; exit 129; }\n'
        '[[ "$*" = *ls-files* ]] && /usr/bin/git "$@"\nexec /usr/bin/git "$@"\n'
    )
    program.chmod(0o755)
    plain = take(code, run)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    assert take(code, run) == plain


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
    assert changed(first.path) == []
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


def test_a_copy_is_as_new_as_the_submission_and_what_a_purge_has_taken_of_it_comes_back(
    code: Path, run: RunDir
) -> None:
    old = code.rglob("*.py")
    for path in old:
        os.utime(path, (1.0, 1.0))
    taken = take(code, run)
    files = [path for path in taken.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert min(path.stat().st_mtime for path in files) > 1.0
    before = {path: path.read_bytes() for path in files if path.name != LIST_FILE_NAME}
    (taken.path / "written").touch()
    for path in [*before, taken.path / LIST_FILE_NAME]:
        path.unlink()

    assert take(code, run).path == taken.path

    assert {path: path.read_bytes() for path in before} == before
    assert (changed(taken.path), list(outputs_in_copy(taken.path))) == ([], ["written"])


def test_a_copy_that_fails_publishes_nothing(code: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_copy", full)
        with pytest.raises(ConfigError, match="No space left"):
            take(code, run)

    assert list(run.snapshots.iterdir()) == []
    assert not run.snapshot.exists()
    assert changed(take(code, run).path) == []


def test_the_leftover_of_a_killed_writer_is_swept(code: Path, run: RunDir) -> None:
    left = run.snapshots / ".abc.1.tmp"
    left.mkdir(parents=True)

    take(code, run)

    assert not left.exists()


# --- what is no code, and is found all the same --------------------------------------------------------------------


def test_a_script_finds_what_git_ignores_beside_it_and_writes_there(code: Path, run: RunDir) -> None:
    for name in ("data", "package/out", "__pycache__"):
        (code / name).mkdir()
    (code / "data" / "digits.bin").write_bytes(b"1")
    (code / "package" / "local.bin").write_bytes(b"2")

    copy = take(code, run).path
    (copy / "package" / "out" / "checkpoint").touch()

    assert (copy / "data" / "digits.bin").read_bytes() == b"1"
    assert (copy / "package" / "local.bin").read_bytes() == b"2"
    assert (code / "package" / "out" / "checkpoint").exists()
    assert (copy / ".git").resolve() == code / ".git"  # by which `rootutils` and loggers know the project
    assert not (copy / "__pycache__").exists()
    assert list(outputs_in_copy(copy)) == []


def test_what_came_or_went_since_is_shown_so_in_the_same_copy(code: Path, run: RunDir) -> None:
    (code / "old").mkdir()
    copy = take(code, run).path
    (code / "old").rmdir()
    (code / "new").mkdir()

    assert take(code, run).path == copy
    assert not os.path.lexists(copy / "old")
    assert (copy / "new").is_dir()


def test_what_a_job_wrote_into_its_copy_is_in_the_copy_of_edited_code_and_is_named(code: Path, run: RunDir) -> None:
    first = take(code, run)
    (first.path / "package" / "out").mkdir()
    (first.path / "package" / "out" / "ck.pt").write_text("epoch 1")
    assert list(outputs_in_copy(first.path)) == ["package/out"]
    assert first.written == []
    for edit in range(2):
        (code / "gone.py").write_text(f"# {edit}")
        again = take(code, run)
        assert (again.path / "package" / "out" / "ck.pt").read_text() == "epoch 1"
        assert again.written == list(outputs_in_copy(again.path)) == ["package/out"]
        [note] = notes_on_copy(again, run, [])
        assert "earlier jobs wrote package/out into the copy" in note
        assert "`snapshot.enabled=false`" in note


def test_what_the_run_saves_is_no_code(code: Path, run: RunDir) -> None:
    """A copy of it would be read-only, and would make each submission's code another."""
    (code / "out").mkdir()
    (code / "out" / "ck.pt").write_text("epoch 1")

    taken = take_snapshot(code, run, max_bytes=MB, outputs=[code / "out" / "ck.pt"])

    assert "out/ck.pt" not in names(taken)
    assert (taken.path / "out").resolve() == code / "out"


def test_the_same_code_in_another_place_has_the_data_that_lie_there(code: Path, run: RunDir, tmp_path: Path) -> None:
    """A project is copied with its runs to another disk, or submitted from a second clone."""
    (code / "weights.bin").write_text("old")
    other, step, cache = tmp_path / "other", tmp_path / "step-5", tmp_path / "cache"
    shutil.copytree(code, other, symlinks=True)
    (other / "weights.bin").write_text("new")
    step.mkdir()
    cache.mkdir()
    package = take(code, run).path / "package"
    (package / "latest").symlink_to(step)  # by a job, as the next
    (package / "cache").symlink_to(cache)

    copy = take(other, run).path

    assert (copy / "weights.bin").read_text() == "new"
    assert (copy / "package" / "latest").resolve() == step
    assert (copy / "package" / "cache").resolve() == cache


def test_the_directory_of_the_runs_is_not_shown_as_a_copy_within_would_have_no_end(code: Path) -> None:
    inside = RunDir(code / "runs" / "run")
    inside.path.mkdir(parents=True)

    assert not os.path.lexists(take(code, inside).path / "runs")


def test_a_directory_of_a_thousand_ignored_files_is_named_instead(code: Path, run: RunDir) -> None:
    for number in range(1001):
        (code / "package" / f"{number}.bin").touch()

    taken = take(code, run)

    assert taken.not_shown == ["package"]
    assert len(list((taken.path / "package").iterdir())) == 1
    [note] = notes_on_copy(taken, run, [])
    assert f"{code}/package holds more than 1,000 entries" in note


@pytest.mark.parametrize(
    ("submitted_from", "has_git", "num_notes"), [(".", False, 0), ("..", False, 1), ("/", False, 1), ("..", True, 0)]
)
def test_without_git_it_is_said_that_a_scripts_own_directory_is_all_that_is_copied(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch, *, submitted_from: str, has_git: bool, num_notes: int
) -> None:
    """The shape of lightning-hydra-template: `python src/train.py` reads `../configs`. A work tree may have no commit yet."""
    source = tmp_path / "src"
    source.mkdir()
    (source / "train.py").touch()
    if has_git:
        git(source, "init", "--quiet")
        git(source, "add", ".")
    monkeypatch.chdir(source / submitted_from)

    notes = [*notes_on_copy(take(source, run), run, [])]

    assert len(notes) == num_notes
    assert all(f"holds {source} alone" in note for note in notes)


@pytest.mark.parametrize(
    ("target", "expected"),
    [("../shared", "{code}/../shared"), ("{code}/package", "package"), ("package", "package"), ("/etc", "/etc")],
)
def test_a_link_leads_to_the_copy_of_the_code_or_to_where_it_led(
    target: str, expected: str, code: Path, run: RunDir
) -> None:
    (code.parent / "shared").mkdir()
    (code / "link").symlink_to(target.format(code=code))

    copy = take(code, run).path

    assert str((copy / "link").readlink()) == os.path.normpath(expected.format(code=code))
    assert (copy / "link").is_dir()
