"""Certify changes no file of the user's: the copies share nothing with the working directory, and what lies outside is guarded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.prove.certify.certificate import command_without_secrets, earlier_states
from ddp_hpc.prove.certify.file_events import FileEvents
from ddp_hpc.prove.certify.outside import command_in, named_paths, refuse_saved_states
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord, Save
from ddp_hpc.prove.certify.sandbox import MOST_BYTES, MOST_FILES, copy_work_dir, file_stats


def a_large_file(path: Path, size: int = MOST_BYTES + 1) -> Path:
    """Make a file of a size that takes no space on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def everything_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- copies ------------------------------------------------------------------------------------------------------------


def test_what_a_run_writes_and_deletes_in_its_copy_changes_nothing_of_the_users(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "target"
    a_large_file(work / "big" / "last.pt", 11 << 20)
    (work / "epoch_3.pt").write_bytes(b"three")
    (work / "latest.pt").symlink_to("epoch_3.pt")
    (work / "pkg").mkdir()
    (work / "data").symlink_to("pkg")
    (tmp_path / "store" / "old").mkdir(parents=True)
    (tmp_path / "store" / "old" / "epoch_1.pt").write_bytes(b"one")
    (tmp_path / "store" / "epoch_2.pt").write_bytes(b"two")
    (tmp_path / "store" / "best.pt").symlink_to("epoch_2.pt")
    (work / "checkpoints").symlink_to("../store")
    (tmp_path / "weights.pt").write_bytes(b"weights")
    (work / "init.pt").symlink_to("../weights.pt")
    before = everything_below(work) | everything_below(tmp_path / "store") | everything_below(tmp_path / "weights.pt")

    linked = copy_work_dir(work, target)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    for path in sorted(target.rglob("*")):
        if path.is_file():
            path.write_bytes(b"changed")
    for folder in (target / "checkpoints", target / "checkpoints" / "old", target / "big", target / "data"):
        (folder / "new.pt").write_bytes(b"new")
    for name in ("checkpoints/old/epoch_1.pt", "checkpoints/epoch_2.pt", "epoch_3.pt"):
        (target / name).unlink()

    assert linked == []
    assert found == {
        *("big/last.pt", "epoch_3.pt", "latest.pt", "init.pt"),
        *("checkpoints/old/epoch_1.pt", "checkpoints/epoch_2.pt", "checkpoints/best.pt"),
    }
    after = everything_below(work) | everything_below(tmp_path / "store") | everything_below(tmp_path / "weights.pt")
    assert after == before


def test_the_states_of_a_linked_directory_are_seen_and_can_be_left_out(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "target"
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "epoch_1.pt").touch()
    work.mkdir()
    (work / "checkpoints").symlink_to("../store")
    (work / "latest.pt").symlink_to("checkpoints/epoch_1.pt")

    copy_work_dir(work, target)
    copy_work_dir(
        work, tmp_path / "anew", left_out=[work / path for path in file_stats(target) if path.endswith("epoch_1.pt")]
    )

    assert "checkpoints/epoch_1.pt" in file_stats(target)
    assert [path.name for path in (tmp_path / "anew").rglob("*")] == ["checkpoints"]


def test_repositories_and_virtual_environments_are_only_linked(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "target"
    for name in (".git", "env", "conda/conda-meta", "runs", "runs/certify-1"):
        (work / name).mkdir(parents=True)
    (work / "env" / "pyvenv.cfg").touch()

    linked = copy_work_dir(work, target, left_out=[work / "runs", work])

    assert sorted(path.name for path in target.iterdir()) == [".git", "conda", "env"]
    assert all(path.is_symlink() for path in target.iterdir())
    assert linked == []


def test_links_in_circles_and_to_directories_above_come_to_an_end(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "target"
    for name in ("work/pkg", "one", "two"):
        (tmp_path / name).mkdir(parents=True)
    (work / "self").symlink_to(".")
    (work / "pkg" / "up").symlink_to("..")
    (work / "above").symlink_to("..")
    (work / "gone").symlink_to("missing")
    (work / "loop").symlink_to("loop")

    linked = copy_work_dir(work, target)

    assert sorted(path.name for path in target.iterdir()) == ["above", "pkg", "self"]
    assert (target / "pkg" / "up").resolve() == target
    assert linked == [tmp_path]


@pytest.mark.long
@pytest.mark.parametrize("is_many", [False, True], ids=["large", "many"])
def test_a_directory_that_is_too_large_is_refused_by_its_largest_parts(tmp_path: Path, is_many: bool) -> None:
    work, target = tmp_path / "work", tmp_path / "target"
    (work / "src").mkdir(parents=True)
    (work / "src" / "train.py").touch()
    (work / "images").mkdir()
    if is_many:
        for number in range(MOST_FILES + 1):
            os.mknod(work / "images" / str(number))
    else:
        a_large_file(work / "images" / "all.bin")

    with pytest.raises(ConfigError, match=r"The largest: images \((1|20001) files.*leave a link to it in its place"):
        copy_work_dir(work, target)

    assert not target.exists()


def test_a_link_to_a_large_directory_is_kept_unless_saved_states_are_there_that_could_be_overwritten(
    tmp_path: Path,
) -> None:
    work, store = tmp_path / "work", tmp_path / "store"
    a_large_file(store / "images" / "all.bin")
    work.mkdir()
    (work / "data").symlink_to("../store")

    linked = copy_work_dir(work, tmp_path / "one")
    (store / "epoch_1.pt").touch()
    with pytest.raises(ConfigError, match=r"data in the working directory is a link to .*epoch_1.pt is there: a saved"):
        copy_work_dir(work, tmp_path / "two")
    (store / "epoch_1.pt").chmod(0o444)
    store.chmod(0o555)
    read_only = copy_work_dir(work, tmp_path / "three")
    store.chmod(0o755)

    assert linked == read_only == [store]
    assert (tmp_path / "one" / "data").resolve() == store
    assert not (tmp_path / "two").exists()


def test_links_that_lead_to_one_another_do_not_fill_the_disk(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("work", "one", "two"):
        (tmp_path / name).mkdir()
    (work / "data").symlink_to("../one")
    (tmp_path / "one" / "other").symlink_to("../two")
    (tmp_path / "two" / "other").symlink_to("../one")

    copy_work_dir(work, tmp_path / "target")

    assert len([*(tmp_path / "target").rglob("*")]) < 10


def test_saved_states_of_an_earlier_run_are_known_by_what_the_undisturbed_run_does_with_them(tmp_path: Path) -> None:
    for name in ("epoch_1.pt", "epoch_2.pt", "last.pt", "pretrained.pt", "data.npy"):
        (tmp_path / name).touch()
    before = file_stats(tmp_path)
    (tmp_path / "epoch_1.pt").unlink()
    (tmp_path / "last.pt").write_text("changed")

    saved = AttemptRecord(saves=(Save(path="epoch_3.pt", num_lines=1, at=0.0),), reads=("pretrained.pt", "data.npy"))
    only_read = AttemptRecord(reads=("pretrained.pt", "data.npy"))

    ending = replace(RunRecord(outcome="finished"), attempts=(saved,))
    assert earlier_states(before, tmp_path, ending) == ["epoch_1.pt", "epoch_2.pt", "last.pt"]
    ending = replace(ending, attempts=(only_read,))
    assert earlier_states(before, tmp_path, ending) == ["epoch_1.pt", "last.pt", "pretrained.pt"]
    assert earlier_states(before, tmp_path, replace(ending, outcome="failed")) == ["epoch_1.pt", "last.pt"]


@pytest.mark.parametrize(
    ("name", "pattern", "is_state"),
    [
        ("checkpoint.pth.tar", None, True),
        ("checkpoint.pth.tar", "checkpoint.pth.tar", True),
        ("last.pt.pkl", None, True),
        ("model.state", "model.*", True),
        ("saves/newest", "saves", True),
        ("shard-0.tar", None, False),
        ("shard-0.tar", "saves", False),
        ("last.pt.json", None, False),
    ],
)
def test_a_state_that_a_finished_run_has_left_is_known_by_any_of_its_endings_or_by_the_users_pattern(
    tmp_path: Path, name: str, pattern: str | None, is_state: bool
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    before = file_stats(tmp_path)
    record = RunRecord(outcome="finished", attempts=(AttemptRecord(reads=(name,)),))

    assert earlier_states(before, tmp_path, record, pattern) == [name] * is_state


def test_a_state_that_a_run_overwrites_is_known_by_the_users_pattern(tmp_path: Path) -> None:
    (tmp_path / "newest").touch()
    before = file_stats(tmp_path)
    (tmp_path / "newest").write_text("changed")

    assert earlier_states(before, tmp_path, RunRecord(outcome="failed"), "new*") == ["newest"]


# --- named paths -------------------------------------------------------------------------------------------------------


def test_the_named_paths_are_those_of_words_settings_and_the_source_but_not_directories_of_everybodys() -> None:
    words = ["train.py", "--out=/abs/out", "hydra.run.dir=/abs/hydra/", "-o", "/abs/o", "/", "/tmp", "~", "a/b"]

    found = named_paths(words, {"/abs/source", str(Path.home()), "/dev/shm", "/proc/self", "~/mine"})

    names = ("/abs/out", "/abs/hydra", "/abs/o", "/abs/source")
    assert {*found} == {*map(Path, names), Path.home() / "mine"}


def test_a_named_path_with_saved_states_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "out" / "deep").mkdir(parents=True)
    refuse_saved_states([tmp_path / "out", tmp_path / "missing"])
    (tmp_path / "out" / "deep" / "shard-0.tar").touch()
    refuse_saved_states([tmp_path / "out"])
    (tmp_path / "out" / "deep" / "last.pth.tar").touch()
    with pytest.raises(ConfigError, match=r"last.pth.tar is there: a saved state"):
        refuse_saved_states([tmp_path / "out"])
    (tmp_path / "out" / "deep" / "last.pth.tar").rename(tmp_path / "out" / "deep" / "last.pt")

    with pytest.raises(ConfigError, match=r"names .*out, and .*last.pt is there: a saved state.*a relative path"):
        refuse_saved_states([tmp_path / "out"])
    with pytest.raises(ConfigError, match=r"chmod -R a-w .*deep`"):
        refuse_saved_states([tmp_path / "out" / "deep" / "last.pt"])
    refuse_saved_states([tmp_path / "out"], apart_from=[tmp_path / "out" / "deep"])


def test_a_change_below_a_named_path_is_seen_at_any_depth_and_nothing_beside_it(tmp_path: Path) -> None:
    named, late = tmp_path / "out", tmp_path / "late" / "out"
    (named / "ckpt").mkdir(parents=True)
    (named / "runs").mkdir()
    (named / "ckpt" / "old.pt").touch()
    events = FileEvents(tmp_path, only=[named, late], apart_from=[named / "runs"])

    (tmp_path / "out2").mkdir()
    (tmp_path / "out2" / "a.pt").touch()
    (tmp_path / "out.txt").touch()
    (named / "runs" / "log").touch()
    (named / "ckpt" / "old.pt").read_bytes()
    nothing = events.wait(0.2)
    (named / "ckpt" / "last.pt").touch()
    (named / "ckpt" / "old.pt").rename(tmp_path / "old.pt")
    late.mkdir(parents=True)
    seen = events.wait(5.0)
    (late / "b.pt").touch()
    seen += events.wait(5.0)
    events.close()

    assert nothing == []
    assert {path for _, path in seen} == {named / "ckpt" / "last.pt", named / "ckpt" / "old.pt", late / "b.pt"}


def test_the_command_runs_the_copy_of_its_script_in_the_users_python(tmp_path: Path) -> None:
    work = tmp_path / "work"

    here = command_in(work, [".venv/bin/python", "-u", f"{work}/src/train.py", "--data=/abs"])

    assert here == [f"{work}/.venv/bin/python", "-u", "src/train.py", "--data=/abs"]
    assert command_in(work, ["python", "-m", "pkg.train"]) == ["python", "-m", "pkg.train"]
    assert command_in(work, ["./train.sh", "x"]) == ["./train.sh", "x"]
    work.mkdir()
    (tmp_path / "home").symlink_to("work")
    assert command_in(work, ["python", f"{tmp_path}/home/train.py"]) == ["python", "train.py"]
    with pytest.raises(ConfigError, match=f"is not below the working directory.*Go to {tmp_path} first"):
        command_in(work, ["python", "../train.py"])


def test_a_report_hides_the_values_of_secrets() -> None:
    command = ["python", "train.py", "--api-key=abc", "--token", "def", "--lr=0.1", "--num-tokens-seen", "5"]

    assert command_without_secrets(command) == [
        "python",
        "train.py",
        "--api-key=...",
        "--token",
        "...",
        "--lr=0.1",
        "--num-tokens-seen",
        "5",
    ]
