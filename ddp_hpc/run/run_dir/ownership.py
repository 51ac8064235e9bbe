"""Owning a run: only the newest attempt can commit, also while older ones still run.

Each attempt writes its checkpoints in a directory of its own, `attempt-3.writing`, which it makes when it claims the run and
which the next one to claim it deletes. So an attempt that the cluster believes dead, but that still runs, can commit nothing
more: its rename finds no directory. This needs no locks, which not every file system supports.
"""

from __future__ import annotations

import errno
import re
import shutil
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.durable import delete_directory, make_directory, numbers_in_names, replace_text
from ddp_hpc.base.errors import FencedError
from ddp_hpc.base.patience import ask_once
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir

LOCK_PATIENCE_S = 10.0
"""How long the processes of a killed attempt may take to exit, which hold the run's lock."""
_CLAIM_PATTERN = re.compile(r"attempt-(\d+)\.writing")


def busy_message(run: RunDir, by: str = "another process") -> str:
    """Say that a run cannot be acquired."""
    return f"{run.path} is already in use by {by}. Wait until it ends, or end it: `ddp-hpc cancel {run.word}`."


def claim_path(run: RunDir, attempt: int) -> Path:
    """Where an attempt writes its checkpoints, before they are committed, while the run is its own."""
    return run.checkpoints / f"attempt-{attempt}.writing"


def claim_run(run: RunDir, attempt: int) -> list[str]:
    """Make `attempt` the only one that can commit from now on; return what it deleted of older ones.

    Raises:
        FencedError: where another process has claimed the run for the same or a newer attempt.
    """
    # mkdir(2) either makes the directory or fails, also over NFS: of several processes, exactly one makes a claim.
    with suppress(FileExistsError):
        # Not its parents: if the file system is not mounted, they would be made on the local disk, under the mount point.
        make_directory(run.checkpoints)
    with suppress(FileExistsError):
        make_directory(claim_path(run, attempt))
        remove_leftovers(run)
        return _fence_older(run, attempt)
    raise FencedError(
        f"Another process has begun attempt {attempt} of {run.name}, so this one stops. You need do nothing."
    )


def next_attempt(run: RunDir, ledger: Ledger | None = None) -> int:
    """Return the number of the next attempt; one that was killed before it wrote into the ledger has only its claim."""
    return 1 + max([(ledger or Ledger.read(run)).newest_number, *claiming_attempts(run)])


def _fence_older(run: RunDir, attempt: int) -> list[str]:
    """Delete the claims of older attempts; stop where a newer one has claimed the run."""
    removed = []
    for older in claiming_attempts(run):
        if older < attempt:
            with suppress(FileNotFoundError):  # other processes may delete it at the same time
                removed += sorted(path.name for path in claim_path(run, older).iterdir())
            delete_directory(claim_path(run, older))
    # Look again: a newer attempt may have made its claim before ours, and so have deleted none.
    if max(claiming_attempts(run), default=attempt) > attempt:
        delete_directory(claim_path(run, attempt))
        raise FencedError(
            f"A newer attempt of {run.name} has begun, so attempt {attempt} stops and writes nothing more. You need do nothing: "
            f"`ddp-hpc status {run.word}` shows the newer attempt."
        )
    return removed


def is_fenced(run: RunDir, attempt: int) -> bool:
    """Tell whether a newer attempt has claimed the run since `attempt` did; False where the file system does not answer."""
    # A claim that is missing while no newer one is there was deleted by a user who cleaned up, or an NFS client does
    # not show it at the moment: then no other attempt owns the run.
    path = claim_path(run, attempt)
    return ask_once(path, lambda: not path.is_dir() and not _is_newest(run, attempt), unknown=False)


def refuse_fenced(run: RunDir, attempt: int) -> None:
    """Return while the run is this attempt's.

    Raises:
        FencedError: if a newer attempt has claimed the run.
    """
    if is_fenced(run, attempt):
        raise _fenced_error(run, attempt)


def _fenced_error(run: RunDir, attempt: int) -> FencedError:
    return FencedError(f"A newer attempt of {run.name} has begun, so attempt {attempt} stops. You need do nothing.")


def replace_record(run: RunDir, attempt: int, path: Path, text: str | bytes, *, durable: bool = True) -> None:
    """Replace a file of the run with `text`, as long as the run is this attempt's.

    Raises:
        FencedError: if a newer attempt has claimed the run; nothing is changed.
        OSError: if it cannot be written, with a `filename`.
    """
    # A newer attempt deletes our claim, and a rename out of it fails from then on, however long this process was stopped before.
    try:
        replace_text(path, text, durable=durable, by_way_of=claim_path(run, attempt))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EXDEV):
            raise
        refuse_fenced(run, attempt)  # else the claim was deleted by hand, or lies on another file system
        replace_text(path, text, durable=durable)


def has_claim(run: RunDir, attempt: int) -> bool:
    """Tell whether the claim of `attempt` is there; False where the file system does not answer."""
    path = claim_path(run, attempt)
    return ask_once(path, path.is_dir, unknown=False)


def _is_newest(run: RunDir, attempt: int) -> bool:
    return max([Ledger.read(run).newest_number, *claiming_attempts(run)]) <= attempt


def renew_claim(run: RunDir, attempt: int) -> None:
    """Make a claim again that was deleted by hand."""
    # First make it, then look for newer attempts: a newer attempt that begins meanwhile either is seen here, or sees
    # this claim and deletes it. The other way round, both could miss each other.
    for path in (run.checkpoints, claim_path(run, attempt)):  # not their parents: see `claim_run`
        with suppress(FileExistsError):
            make_directory(path)
    if not _is_newest(run, attempt):
        delete_directory(claim_path(run, attempt))
        raise _fenced_error(run, attempt)


def release_claim(run: RunDir, attempt: int) -> None:
    """Give up the claim of an attempt that is the last for now."""
    delete_directory(claim_path(run, attempt))


def claiming_attempts(run: RunDir) -> list[int]:
    """Return the attempts that have claimed the run and were not fenced, oldest first; killed ones too."""
    return numbers_in_names(run.checkpoints, _CLAIM_PATTERN)


def remove_leftovers(run: RunDir) -> list[str]:
    """Delete what killed writers and deleters left half-done; the caller is the run's only writer."""
    leftovers = sorted(path for path in run.checkpoints.glob("*.tmp") if path.is_dir())
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in leftovers]
