"""Owning a run: of all that believe they do, one can commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import FencedError
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import (
    Manifest,
    commit_checkpoint,
    make_uncommitted_dir,
    read_manifest,
    uncommitted_path,
    verify_checkpoint,
    write_shard,
)
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.ownership import claim_run, claiming_attempts, is_fenced, release_claim
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import add_checkpoint, make_run
from tests.unit.made_state import make_checkpointers, make_state, take_step


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a directory; directories are there as empty ones."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def write_half(run: RunDir, attempt: int, step: int) -> Path:
    """Write a shard of a checkpoint that is not committed."""
    uncommitted = uncommitted_path(run, step, attempt)
    uncommitted.mkdir()
    write_shard(uncommitted / "shard", [b"half"], size=4)
    return uncommitted


# --- one after another -----------------------------------------------------------------------------------------------


def test_nobody_is_ousted_from_a_run_that_nobody_claimed(run: RunDir) -> None:
    assert not is_fenced(run, 0)
    assert claiming_attempts(run) == []


def test_who_claims_a_run_owns_it_until_a_newer_attempt_does(run: RunDir) -> None:
    ousted = []
    for attempt in (0, 1, 5):
        claim_run(run, attempt)
        ousted.append([other for other in (0, 1, 5) if is_fenced(run, other)])

    assert ousted == [[], [0], [0, 1]]
    assert claiming_attempts(run) == [5]


def test_a_claim_that_was_swept_away_is_made_again_by_the_next_checkpoint(run: RunDir) -> None:
    claim_run(run, 1)
    shutil.rmtree(run.checkpoints)

    assert not is_fenced(run, 1)
    uncommitted = make_uncommitted_dir(run, 4, 1)

    assert uncommitted.is_dir()
    assert claiming_attempts(run) == [1]


@pytest.mark.parametrize("newer", ["claimed", "finished"])
def test_a_claim_that_a_newer_attempt_took_away_is_not_made_again(newer: str, run: RunDir) -> None:
    claim_run(run, 1)
    claim_run(run, 2)
    if newer == "finished":
        record_start(run, attempt=2, job_id="8")
        release_claim(run, 2)
    before = content(run.checkpoints)

    assert is_fenced(run, 1)
    with pytest.raises(FencedError, match=r"A newer attempt of .* has begun"):
        make_uncommitted_dir(run, 4, 1)

    assert content(run.checkpoints) == before


def test_a_claim_tells_what_it_took_from_a_killed_writer_and_leaves_what_is_committed(run: RunDir) -> None:
    add_checkpoint(run, 2)
    committed = content(run.checkpoints)
    claim_run(run, 1)
    write_half(run, 1, 4)
    write_half(run, 1, 6)

    removed = claim_run(run, 2)

    assert removed == ["step-00000004", "step-00000006"]
    assert content(run.checkpoints) == {**committed, "attempt-2.writing": b""}


@pytest.mark.parametrize(
    ("attempt", "told"), [(3, "Another process has begun attempt 3"), (2, "newer attempt"), (0, "newer attempt")]
)
def test_who_comes_too_late_gives_way_and_changes_nothing(attempt: int, told: str, run: RunDir) -> None:
    claim_run(run, 3)
    write_half(run, 3, 4)
    before = content(run.checkpoints)

    with pytest.raises(FencedError, match=told) as raised:
        claim_run(run, attempt)

    assert raised.value.exit_code == exit_codes.FENCED == 97
    assert content(run.checkpoints) == before
    assert claiming_attempts(run) == [3]


def test_a_released_run_is_owned_by_nobody_and_has_no_leftovers(run: RunDir) -> None:
    add_checkpoint(run, 2)
    claim_run(run, 1)
    write_half(run, 1, 4)

    release_claim(run, 1)

    assert claiming_attempts(run) == []
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]


def test_a_release_of_what_was_taken_over_is_nothing(run: RunDir) -> None:
    claim_run(run, 0)
    claim_run(run, 1)

    release_claim(run, 0)

    assert claiming_attempts(run) == [1]


def test_a_deletion_that_was_killed_half_way_blocks_neither_claim_nor_release(run: RunDir) -> None:
    claim_run(run, 0)
    half_gone = run.checkpoints / "attempt-0.writing.deleted.tmp"
    (half_gone / "step-00000002").mkdir(parents=True)

    claim_run(run, 1)
    release_claim(run, 1)

    assert list(run.checkpoints.iterdir()) == []


# --- a writer that is not dead ---------------------------------------------------------------------------------------


def test_what_a_stale_attempt_has_written_cannot_be_committed_and_the_directory_stays_as_it_was(run: RunDir) -> None:
    claim_run(run, 0)
    uncommitted = write_half(run, 0, 4)
    claim_run(run, 1)
    before = content(run.checkpoints)

    with pytest.raises(FencedError, match=r"does not commit its checkpoint of step 4"):
        commit_checkpoint(run, uncommitted, Manifest(step=4, world_size=1, shards=(), state={}))

    assert content(run.checkpoints) == before


@pytest.mark.parametrize("moment", ["before its rename", "between its two renames"])
def test_a_stale_attempt_that_wakes_up_in_its_commit_leaves_the_newer_attempts_checkpoint_of_that_step(
    moment: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_run(run, 0)
    uncommitted = write_half(run, 0, 4)
    if moment == "between its two renames":
        checkpoint_path(run, 4).mkdir()
        (checkpoint_path(run, 4) / "damaged").touch()
    manifest = Manifest(step=4, world_size=1, shards=(), state={"attempt": 1})

    name = "fsync_path" if moment == "before its rename" else "set_checkpoint_aside"
    real = getattr(checkpoint_store, name)

    def sleeps_in(path: Path) -> object:
        done = real(path)
        monkeypatch.undo()
        claim_run(run, 1)
        commit_checkpoint(run, make_uncommitted_dir(run, 4, 1), manifest)
        return done

    monkeypatch.setattr(checkpoint_store, name, sleeps_in)

    with pytest.raises(FencedError):
        commit_checkpoint(run, uncommitted, Manifest(step=4, world_size=1, shards=(), state={}))

    assert committed_steps(run) == [4]
    assert read_manifest(checkpoint_path(run, 4)).state == {"attempt": 1}


def test_an_uncommitted_directory_that_is_missing_for_another_reason_is_no_fence(run: RunDir) -> None:
    claim_run(run, 0)

    with pytest.raises(FileNotFoundError):
        commit_checkpoint(run, uncommitted_path(run, 4, 0), Manifest(step=4, world_size=1, shards=(), state={}))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_saves_of_a_stale_attempt_fail_and_those_of_the_newer_one_stand(world_size: int, run: RunDir) -> None:
    results: dict[int, list[tuple[int, float, str | None]]] = {0: [], 1: []}
    stale = make_checkpointers(run, world_size=world_size, attempt=0, on_result=lambda *one: results[0].append(one))
    newer = make_checkpointers(run, world_size=world_size, attempt=1, on_result=lambda *one: results[1].append(one))

    for checkpointers in (newer, stale):
        states = [make_state(rank=rank, world_size=world_size) for rank in range(world_size)]
        for checkpointer, state in zip(checkpointers, states, strict=True):
            take_step(state)
            checkpointer.save(state)
        for checkpointer in checkpointers:
            checkpointer.wait()

    assert [error for _, _, error in results[1]] == [None]
    assert [error is None for _, _, error in results[0]] == [False]
    assert verify_checkpoint(checkpoint_path(run, 1)).made["attempt"] == 1
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["attempt-1.writing", "step-00000001"]


# --- at once ---------------------------------------------------------------------------------------------------------

WON, LOST, BROKE = 0, 1, 2


def in_processes(actions: list[Callable[[], object]]) -> list[int]:
    """Do all at once, each in a process of its own; return who won, lost, or broke."""
    begin_read, begin_write = os.pipe()
    pids = []
    for action in actions:
        pid = os.fork()
        if pid == 0:
            os.close(begin_write)
            os.read(begin_read, 1)
            try:
                action()
                os._exit(WON)
            except FencedError:
                os._exit(LOST)
            except BaseException:  # noqa: BLE001  a forked child must never return into pytest
                os._exit(BROKE)
        pids.append(pid)
    os.close(begin_read)
    os.close(begin_write)  # the end of the pipe lets them all go
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.parametrize("trial", [0, *(pytest.param(one, marks=pytest.mark.long) for one in range(1, 5))])
def test_of_many_processes_that_claim_the_same_attempt_at_once_one_wins(trial: int, run: RunDir) -> None:
    claim_run(run, trial)
    write_half(run, trial, 4)

    codes = in_processes([lambda: claim_run(run, trial + 1)] * 12)

    assert sorted(codes) == [WON] + [LOST] * 11
    assert [path.name for path in run.checkpoints.iterdir()] == [f"attempt-{trial + 1}.writing"]


@pytest.mark.parametrize("trial", [0, *(pytest.param(one, marks=pytest.mark.long) for one in range(1, 5))])
def test_of_many_attempts_that_claim_at_once_the_newest_owns_the_run(trial: int, run: RunDir) -> None:
    claim_run(run, 0)
    write_half(run, 0, 4)
    attempts = [1 + (trial + 5 * number) % 12 for number in range(12)]

    codes = in_processes([lambda attempt=attempt: claim_run(run, attempt) for attempt in attempts])  # type: ignore[misc]  # bound now

    assert BROKE not in codes
    assert codes[attempts.index(12)] == WON
    assert claiming_attempts(run) == [12]
    assert committed_steps(run) == []
