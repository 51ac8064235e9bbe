"""A script's own files, committed: a copy that later saves do not change, and a `manifest.json` that is the script's."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc import attach
from ddp_hpc.base.errors import ConfigError, FencedError
from ddp_hpc.base.processes import STOP_SIGNALS
from ddp_hpc.run.checkpoints import checkpoint_store, foreign_files
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import CHUNK_BYTES
from ddp_hpc.run.checkpoints.foreign_files import commit_files
from ddp_hpc.run.checkpoints.shards import FORMAT_VERSION
from ddp_hpc.run.run_dir.ownership import claim_run
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.attached import run as attached_run
from ddp_hpc.train.attached.run import AttachedRun


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attached_run, "_pid_and_run", None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "last"
    made.mkdir()
    (made / "model.pt").write_text("weights")
    return made


@pytest.fixture
def claimed(tmp_path: Path) -> RunDir:
    """Return a run whose attempt 0 has its claim."""
    run = RunDir(tmp_path / "train")
    run.path.mkdir()
    claim_run(run, 0)
    return run


def keep(run: AttachedRun, folder: Path, step: int) -> Path:
    return run.commit(folder, step=step, keeps_folder=True)


# --- copies ------------------------------------------------------------------------------------------------------------


def test_a_script_that_saves_into_the_same_file_again_changes_no_committed_checkpoint(folder: Path) -> None:
    run = attach()
    for step in (1, 2, 3):
        (folder / "model.pt").write_text(f"weights {step}")
        keep(run, folder, step)

    (folder / "model.pt").write_bytes(b"")  # a save that was killed after it had opened the file

    latest = run.latest()
    assert latest is not None
    assert checkpoint_store.verify_checkpoint(latest).step == 3
    kept = {path.name: (path / "model.pt").read_text() for path in run.checkpoint_dir.iterdir()}
    assert kept == {f"step-0000000{step}": f"weights {step}" for step in (1, 2, 3)}


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 12_345])
def test_a_copy_has_every_byte_at_any_depth(folder: Path, size: int) -> None:
    content = os.urandom(size)
    (folder / "a" / "b" / "none").mkdir(parents=True)
    (folder / "a" / "b" / "optimizer.bin").write_bytes(content)

    committed = keep(attach(), folder, 1)

    assert (committed / "a" / "b" / "optimizer.bin").read_bytes() == content
    assert (committed / "a" / "b" / "none").is_dir()
    assert [shard.file for shard in checkpoint_store.verify_checkpoint(committed).shards] == [
        "a/b/optimizer.bin",
        "model.pt",
    ]


def test_a_sparse_file_is_copied_with_its_holes_as_zeros(folder: Path) -> None:
    with (folder / "model.pt").open("wb") as file:
        file.seek(20 << 20)
        file.write(b"end")
        file.truncate(30 << 20)

    committed = keep(attach(), folder, 1)

    assert (committed / "model.pt").read_bytes() == bytes(20 << 20) + b"end" + bytes((10 << 20) - 3)


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o640, 0o755])
def test_a_copy_has_the_files_permissions(folder: Path, mode: int) -> None:
    (folder / "model.pt").chmod(mode)

    keep(attach(), folder, 1)
    committed = keep(attach(), folder, 1)

    assert (committed / "model.pt").stat().st_mode & 0o777 == mode
    assert (committed / "model.pt").stat().st_ino != (folder / "model.pt").stat().st_ino


def test_a_symbolic_link_stays_one_and_what_is_no_file_is_left_out(folder: Path) -> None:
    (folder / "best.pt").symlink_to("model.pt")
    os.mkfifo(folder / "pipe")

    committed = keep(attach(), folder, 1)

    assert (committed / "best.pt").readlink() == Path("model.pt")
    assert (committed / "best.pt").read_text() == "weights"
    assert sorted(path.name for path in committed.iterdir()) == ["best.pt", "manifest.json", "model.pt"]


def test_a_file_system_that_shares_blocks_is_asked_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(into: int, request: int, source: int) -> None:
        assert request == 0x40049409
        os.write(into, os.read(source, 1 << 20))

    monkeypatch.setattr(fcntl, "ioctl", shares)
    monkeypatch.setattr(shutil, "copyfile", lambda *_: pytest.fail("copied what was shared"))

    committed = keep(attach(), folder, 1)

    assert (committed / "model.pt").read_text() == "weights"


def test_every_copy_and_directory_is_on_the_disk_before_the_rename(
    folder: Path, claimed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "optimizer.pt").write_text("moments")
    flushed: list[int] = []
    real, rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        flushed.append(os.fstat(fd).st_ino)
        real(fd)

    def renamed(path: Path, target: Path) -> Path:
        lacking = [one for one in (path, *path.rglob("*")) if one.stat().st_ino not in flushed]
        assert not lacking
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)

    commit_files(claimed, folder, 1, attempt=0, world_size=1, keeps_folder=True)

    assert committed_steps(claimed) == [1]


def test_a_copy_that_the_disk_does_not_take_leaves_nothing_behind(
    folder: Path, claimed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(foreign_files, "_try_reflink", lambda *_: False)

    with pytest.raises(OSError, match="No space left"):
        commit_files(claimed, folder, 1, attempt=0, world_size=1, keeps_folder=True)

    assert [path.name for path in claimed.checkpoints.rglob("*")] == ["attempt-0.writing"]
    assert (folder / "model.pt").read_text() == "weights"


def test_an_attempt_that_is_replaced_while_it_copies_commits_nothing(
    folder: Path, claimed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(path: Path, target: Path) -> bool:
        claim_run(claimed, 1)
        return clone(path, target)

    clone = foreign_files._try_reflink
    monkeypatch.setattr(foreign_files, "_try_reflink", replaced)

    with pytest.raises(FencedError, match="newer attempt"):
        commit_files(claimed, folder, 1, attempt=0, world_size=1, keeps_folder=True)

    assert committed_steps(claimed) == []


# --- the name of the manifest ------------------------------------------------------------------------------------------


def list_of_shards(path: Path) -> None:
    path.write_text(json.dumps({"shards": ["a", "b"]}))


def sealed_by_another_program(path: Path) -> None:
    path.write_text(json.dumps({"content": {"step": 1}, "xxh3_128": "0" * 32}))


def too_deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\x00")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("keeps_folder", [False, True])
@pytest.mark.parametrize(
    "make", [list_of_shards, sealed_by_another_program, too_deep, binary, dangling, Path.mkdir, os.mkfifo]
)
def test_a_manifest_of_the_scripts_own_is_refused_and_stays(
    folder: Path, claimed: RunDir, make: Callable[[Path], object], keeps_folder: bool
) -> None:
    make(folder / "manifest.json")
    before = {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()}

    with pytest.raises(ConfigError, match=r"name manifest\.json at the top .* subfolder"):
        commit_files(claimed, folder, 1, attempt=0, world_size=1, keeps_folder=keeps_folder)

    assert {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in claimed.checkpoints.rglob("*")] == ["attempt-0.writing"]


def test_the_script_hears_of_it_and_goes_on_once_the_file_has_another_name(folder: Path) -> None:
    run = attach()
    list_of_shards(folder / "manifest.json")
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        run.commit(folder, step=1)
    assert run.latest() is None

    (folder / "inner").mkdir()
    (folder / "manifest.json").rename(folder / "inner" / "manifest.json")
    committed = run.commit(folder, step=1)

    assert committed == run.latest()
    assert json.loads((committed / "inner" / "manifest.json").read_text()) == {"shards": ["a", "b"]}


@pytest.mark.parametrize("keeps_folder", [False, True])
def test_a_folder_that_was_committed_before_is_committed_again(folder: Path, keeps_folder: bool) -> None:
    run = attach()
    committed = run.commit(folder, step=1)
    shutil.copytree(committed, folder)

    again = run.commit(folder, step=2, keeps_folder=keeps_folder)

    assert checkpoint_store.verify_checkpoint(again).step == 2
    assert run.commit(again, keeps_folder=keeps_folder) == again == run.latest()


def test_a_step_that_is_saved_again_is_replaced_once_the_new_one_is_whole(
    claimed: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(text: str) -> Path:
        (folder / "model.pt").write_text(text)
        return commit_files(claimed, folder, 2, attempt=0, world_size=1, keeps_folder=True)

    def full(_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    save("first")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_store, "manifest_bytes", full)
        with pytest.raises(OSError, match="No space"):
            save("second")
    assert committed_steps(claimed) == [2]
    assert (claimed.checkpoints / "step-00000002" / "model.pt").read_text() == "first"

    newest = save("third")

    assert (newest / "model.pt").read_text() == "third"
    assert [path.name for path in claimed.checkpoints.iterdir() if path.name.startswith("step-")] == [newest.name]


def test_an_ousted_attempt_leaves_the_newer_ones_checkpoint_of_its_step(
    claimed: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = foreign_files._flush_and_record

    def flush_slowly(path: Path, below: Path) -> object:
        recorded = flush(path, below)
        monkeypatch.setattr(foreign_files, "_flush_and_record", flush)
        claim_run(claimed, 1)
        commit_files(claimed, folder, 2, attempt=1, world_size=1, keeps_folder=True)
        return recorded

    monkeypatch.setattr(foreign_files, "_flush_and_record", flush_slowly)
    with pytest.raises(FencedError):
        commit_files(claimed, folder, 2, attempt=0, world_size=1, keeps_folder=True)

    assert committed_steps(claimed) == [2]


def test_a_manifest_of_a_newer_ddp_hpc_is_one_of_ours(folder: Path) -> None:
    run = attach()
    committed = run.commit(folder, step=1)
    newer = replace(checkpoint_store.verify_checkpoint(committed), format=FORMAT_VERSION + 1)
    (committed / "manifest.json").write_bytes(checkpoint_store.manifest_bytes(newer))

    assert run.commit(committed, step=1) == run.latest()
