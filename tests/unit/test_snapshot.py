"""Snapshots of code in odd places: half-made repositories, names of all kinds, runs beside and above the code.

What every snapshot promises is in `test_code_snapshot`.
"""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.launch.submission.snapshot import LIST_FILE_NAME, path_in_snapshot, take_snapshot
from ddp_hpc.run.run_dir.paths import RunDir
from tests.unit.made_repository import changed, git, names

MB = 10**6


def commit(folder: Path, *names: str) -> Path:
    """Make a repository of empty files, or add them to it."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=one")
    return folder


def make_run(path: Path) -> RunDir:
    path.mkdir(parents=True)
    return RunDir(path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "run")


def test_a_submodule_that_was_not_fetched_is_left_out(tmp_path: Path, run: RunDir) -> None:
    """Git lists the work tree around for an empty directory: asked for its files, it names the directory again."""
    tool, code = commit(tmp_path / "tool", "tool.py"), commit(tmp_path / "code", "net.py")
    git(code, "submodule", "--quiet", "add", str(tool), "vendor")
    git(code, "commit", "--quiet", "--message=two")
    git(tmp_path, "clone", "--quiet", str(code), "clone")

    taken = take_snapshot(tmp_path / "clone", run, max_bytes=MB)

    assert names(taken) == {"net.py", ".gitmodules"}


def test_a_repository_within_that_git_does_not_know_comes_along(tmp_path: Path, run: RunDir) -> None:
    code = commit(tmp_path / "code", "net.py")
    commit(code / "nested", "tool.py")

    assert names(take_snapshot(code, run, max_bytes=MB)) == {"net.py", "nested/tool.py"}


def test_a_link_takes_the_place_of_a_tracked_directory(tmp_path: Path, run: RunDir) -> None:
    """Git lists both, the directory's files and the link, while that is not committed."""
    code = commit(tmp_path / "code", "net.py", "package/layers.py", "package/deep/more.py")
    (code / "package").rename(tmp_path / "elsewhere")
    (code / "package").symlink_to(tmp_path / "elsewhere")

    taken = take_snapshot(code, run, max_bytes=MB)

    assert names(taken) == {"net.py", "package"}
    assert (taken.path / "package" / "layers.py").exists()


def test_a_directory_takes_the_place_of_a_tracked_file_and_a_pipe_does_not(tmp_path: Path, run: RunDir) -> None:
    code = commit(tmp_path / "code", "net.py", "layers", "pipe")
    for name in ("layers", "pipe"):
        (code / name).unlink()
    (code / "layers").mkdir()
    (code / "layers" / "more.py").touch()
    os.mkfifo(code / "pipe")

    assert names(take_snapshot(code, run, max_bytes=MB)) == {"net.py", "layers/more.py"}


def test_code_in_a_submodule_is_that_submodule(tmp_path: Path, run: RunDir) -> None:
    code = commit(tmp_path / "code", "net.py")
    git(code, "submodule", "--quiet", "add", str(commit(tmp_path / "tool", "deep/tool.py")), "vendor")

    taken = take_snapshot(code / "vendor" / "deep", run, max_bytes=MB)

    assert (taken.source, names(taken)) == (code / "vendor", {"deep/tool.py"})
    assert path_in_snapshot(run, code / "vendor", code / "vendor" / "deep") == run.snapshot / "deep"


def test_a_repository_without_a_commit_has_none(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").touch()
    git(code, "init", "--quiet")

    taken = take_snapshot(code, run, max_bytes=MB)

    assert (taken.commit, names(taken)) == (None, {"net.py"})


def test_a_repositorys_commit_is_in_the_snapshot(tmp_path: Path, run: RunDir) -> None:
    taken = take_snapshot(commit(tmp_path / "code", "net.py"), run, max_bytes=MB)

    assert taken.commit is not None
    assert taken.commit in (taken.path / LIST_FILE_NAME).read_text()


def test_without_git_a_work_tree_is_copied_like_any_directory(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = commit(tmp_path / "code", "net.py", "package/layers.py")
    monkeypatch.setenv("PATH", str(tmp_path))

    taken = take_snapshot(code / "package", run, max_bytes=MB)

    assert (taken.source, taken.commit, names(taken)) == (code / "package", None, {"layers.py"})


@pytest.mark.parametrize(
    "name",
    ["two words.py", "line\nbreak.py", "tab\t.py", "naïve.py", '"quoted".py', "-dash.py", "[a]*.py", b"byte\xff.py"],
    ids=repr,
)
@pytest.mark.parametrize("has_git", [True, False], ids=["git", "plain"])
def test_a_file_may_have_any_name(name: str | bytes, has_git: bool, tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / os.fsdecode(name)).touch()
    if has_git:
        commit(code, "net.py")

    taken = take_snapshot(code, run, max_bytes=MB)

    assert os.fsdecode(name) in names(taken)
    assert changed(taken.path) == []


def test_the_empty_directory_is_an_empty_snapshot(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()

    taken = take_snapshot(code, run, max_bytes=MB)

    assert (taken.num_files, taken.num_bytes, names(taken)) == (0, 0, set())


@pytest.mark.parametrize("target", ["nowhere.py", "/etc/hostname", "package"])
def test_links_stay_links_wherever_they_lead(target: str, tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    (code / "package").mkdir(parents=True)
    (code / "link").symlink_to(target)

    taken = take_snapshot(code, run, max_bytes=MB)

    assert (taken.path / "link").readlink() == Path(target)
    assert names(taken) == {"link"}


def test_pipes_and_sockets_are_no_code(tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read a pipe that nobody writes to would wait for ever."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").touch()
    os.mkfifo(code / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(code)  # the path of a socket must be short
        listener.bind("socket")

        taken = take_snapshot(code, run, max_bytes=MB)

    assert names(taken) == {"net.py"}


def test_nobody_writes_into_a_copy_by_accident(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").touch(0o666)
    (code / "run.sh").touch(0o777)

    taken = take_snapshot(code, run, max_bytes=MB)

    modes = {name: (taken.path / name).stat().st_mode & 0o777 for name in names(taken)}
    assert all(mode & 0o222 == 0 for mode in modes.values())
    assert modes["run.sh"] & 0o100
    assert not modes["net.py"] & 0o100


def test_a_mode_is_part_of_what_a_file_is(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "run.sh").touch(0o644)
    plain = take_snapshot(code, run, max_bytes=MB)

    (code / "run.sh").chmod(0o755)

    assert take_snapshot(code, run, max_bytes=MB).path != plain.path
    (plain.path / "run.sh").chmod(0o755)
    assert changed(plain.path) == ["run.sh"]


@pytest.mark.parametrize("has_git", [True, False], ids=["git", "plain"])
@pytest.mark.parametrize("runs_dir", ["code/runs", "code", ".", "elsewhere"])
def test_code_is_found_wherever_runs_lie_and_runs_are_no_code(runs_dir: str, has_git: bool, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").touch()
    if has_git:
        git(code, "init", "--quiet")
    run = make_run(tmp_path / runs_dir / "run")
    run.config.touch()

    taken = take_snapshot(code, run, max_bytes=MB)

    assert names(taken) == {"net.py"}


@pytest.mark.parametrize("has_git", [True, False], ids=["git", "plain"])
def test_other_runs_are_no_code_where_runs_lie_among_it(has_git: bool, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for name in ("net.py", "conf/config.yaml", "logs/util.py", "run-1/config.yaml", "run-1/logs/console.log"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).touch()
    if has_git:
        git(code, "init", "--quiet")

    taken = take_snapshot(code, make_run(code / "run-2"), max_bytes=MB)

    assert names(taken) == {"net.py", "conf/config.yaml", "logs/util.py"}


@pytest.mark.parametrize(
    ("ignored", "needed"),
    [("*.py", "net.py"), ("package/", "package/__init__.py"), ("elsewhere", "link/net.py"), ("link", "link/net.py")],
    ids=["file", "package", "behind a link", "link"],
)
def test_code_without_what_is_needed_is_refused_and_the_last_copy_stays(
    ignored: str, needed: str, tmp_path: Path, run: RunDir
) -> None:
    code = commit(tmp_path / "code", "README")
    for name in ("net.py", "package/__init__.py", "elsewhere/net.py"):
        (code / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (code / "src" / name).touch()
    (code / "src" / "link").symlink_to("elsewhere")
    first = take_snapshot(code / "src", run, max_bytes=MB, needed=Path(needed))
    (code / ".gitignore").write_text(f"{ignored}\n")

    with pytest.raises(ConfigError, match="would not contain the recipe's module") as error:
        take_snapshot(code / "src", run, max_bytes=MB, needed=Path(needed))

    assert f"`git check-ignore -v {code}/src/{needed}`" in str(error.value)
    assert "`snapshot.enabled=false`" in str(error.value)
    assert run.snapshot.resolve() == first.path


def test_what_the_job_writes_is_no_code(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    for name in ("net.py", "data/one", "database.py"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).touch()

    taken = take_snapshot(code, run, max_bytes=MB, outputs=[code / "data"])

    assert names(taken) == {"net.py", "database.py"}


def test_as_much_as_the_limit_is_allowed_and_a_byte_more_is_not(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").write_bytes(b"0" * MB)

    assert take_snapshot(code, run, max_bytes=MB).num_bytes == MB
    with pytest.raises(ConfigError, match=r"is 1\.0 MB"):
        take_snapshot(code, run, max_bytes=MB - 1)


def test_the_biggest_are_named_first_and_only_a_few(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for number in range(1, 8):
        (code / f"{number}.dat").write_bytes(b"0" * number * 100_000)

    with pytest.raises(ConfigError) as error:
        take_snapshot(code, run, max_bytes=MB)

    assert "7.dat (0.7 MB), 6.dat (0.6 MB), 5.dat (0.5 MB), 4.dat (0.4 MB), 3.dat (0.3 MB)." in str(error.value)
    assert "2.dat" not in str(error.value)


def test_a_file_that_cannot_be_put_there_leaves_nothing_published(tmp_path: Path, run: RunDir) -> None:
    """A file where the directory of snapshots should be stops root too."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").touch()
    run.snapshots.touch()

    with pytest.raises(ConfigError, match=r"cannot be copied .* `snapshot\.enabled=false`"):
        take_snapshot(code, run, max_bytes=MB)

    assert [path.name for path in run.path.iterdir()] == ["snapshots"]


def test_the_link_to_the_newest_is_never_missing_while_it_is_replaced(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").write_text("0")
    take_snapshot(code, run, max_bytes=MB)
    is_over, seen = threading.Event(), list[str]()

    def look() -> None:
        while not is_over.is_set():
            seen.append((run.snapshot / "net.py").read_text())

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(1, 20):
        (code / "net.py").write_text(str(number))
        take_snapshot(code, run, max_bytes=MB)
    is_over.set()
    reader.join()

    assert seen == sorted(seen, key=int)
    assert len(set(seen)) > 1
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []


def test_the_link_survives_a_move_of_the_run(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "net.py").touch()
    take_snapshot(code, run, max_bytes=MB)

    moved = run.path.rename(tmp_path / "moved")

    assert (moved / "snapshot" / "net.py").exists()


def test_going_back_to_earlier_code_leads_to_its_first_copy(tmp_path: Path, run: RunDir) -> None:
    code = tmp_path / "code"
    code.mkdir()
    taken = []
    for text in ("one", "two", "one"):
        (code / "net.py").write_text(text)
        taken.append(take_snapshot(code, run, max_bytes=MB).path)

    assert taken[0] == taken[2] == run.snapshot.resolve()
    assert (run.snapshot / "net.py").read_text() == "one"
    assert len(list(run.snapshots.iterdir())) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda repo: os.chown(repo, 12345, 12345), "dubious ownership"),
        (lambda repo: (repo / ".git/index").write_bytes(b"DIRC, but no more"), "index"),
        (lambda repo: (repo / ".git/config").write_text("[core\n"), "bad config"),
        (lambda repo: (repo / ".git/config").write_text("[core]\nrepositoryformatversion = 99\n"), "version"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives the repository to another user")
def test_a_repository_that_git_refuses_is_refused_with_gits_words(
    damage: Callable[[Path], object], said: str, tmp_path: Path, run: RunDir
) -> None:
    repo = commit(tmp_path / "repo", "train.py", ".conf/a.yaml")
    damage(repo)

    with pytest.raises(ConfigError, match=r"git refuses this repository:\n.*") as refused:
        take_snapshot(repo, run, max_bytes=MB)

    assert said in str(refused.value)
    assert "snapshot.enabled=false" in str(refused.value)


def test_a_large_file_is_copied_with_little_memory(tmp_path: Path, run: RunDir) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/large.py").write_bytes(bytes(64 * MB))
    tracemalloc.start()
    try:
        taken = take_snapshot(tmp_path / "code", run, max_bytes=100 * MB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 16 * MB
    assert (taken.path / "large.py").stat().st_size == 64 * MB


@pytest.mark.skipif(os.geteuid() != 0, reason="gives the repository to another user")
def test_an_own_directory_below_a_repository_of_another_user_is_copied_without_git(tmp_path: Path, run: RunDir) -> None:
    repo = commit(tmp_path / "repo", "theirs.py")
    (repo / "mine").mkdir()
    (repo / "mine/train.py").touch()
    os.chown(repo, 12345, 12345)

    assert names(take_snapshot(repo / "mine", run, max_bytes=MB)) == {"train.py"}
