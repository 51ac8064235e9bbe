"""Owning a run: of all the attempts that believe they do, the newest alone can commit.

Each attempt writes its checkpoints in a directory of its own, `attempt-3.writing`, which it makes when it claims the run and
which the next to claim it takes away. So an attempt that a cluster believes dead, but that breathes still, can publish
nothing any more: the rename finds nothing to rename. No lock is needed, which not every file system would keep.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from ddp_hpc.durable import delete_directory, make_directory
from ddp_hpc.errors import FencedError
from ddp_hpc.ledger import Ledger
from ddp_hpc.patience import known
from ddp_hpc.run_dir import RunDir

_CLAIM = re.compile(r"attempt-(\d+)\.writing")


def claim_path(run: RunDir, attempt: int) -> Path:
    """Where an attempt writes its checkpoints, before they are committed, while the run is its own."""
    return run.checkpoints / f"attempt-{attempt}.writing"


def claim(run: RunDir, attempt: int) -> list[str]:
    """Make `attempt` the only one that can commit from now on; return what was taken away from older ones.

    Raises:
        FencedError: where another process has claimed the run for the same or a newer attempt.
    """
    with suppress(FileExistsError):
        make_directory(run.checkpoints)  # without its parents, which a mount that is away would take
    with suppress(FileExistsError):
        make_directory(claim_path(run, attempt))
        remove_leftovers(run)
        return _oust_older(run, attempt)
    raise FencedError(f"Attempt {attempt} of {run.name} has been begun by another job, so this one gives way.")


def next_attempt(run: RunDir, ledger: Ledger | None = None) -> int:
    """Return one more than any before; one that was killed before it wrote into the ledger has only its claim."""
    return 1 + max([(ledger or Ledger.read(run)).newest_number, *claims(run)])


def _oust_older(run: RunDir, attempt: int) -> list[str]:
    """Take away what older attempts have made; give way where a newer one is there."""
    removed = []
    for older in claims(run):
        if older < attempt:
            with suppress(FileNotFoundError):  # others may be at it as well
                removed += sorted(path.name for path in claim_path(run, older).iterdir())
            delete_directory(claim_path(run, older))
    if max(claims(run), default=attempt) > attempt:
        delete_directory(claim_path(run, attempt))
        raise FencedError(f"A newer attempt of {run.name} than {attempt} has begun, so this one gives way.")
    return removed


def is_ousted(run: RunDir, attempt: int) -> bool:
    """Tell whether a newer attempt has claimed the run since `attempt` did.

    A claim that is gone while nothing newer is there was swept away by somebody who cleared up, or cannot be seen at the
    moment: then the run is nobody else's. The same where the file system does not say.
    """
    path = claim_path(run, attempt)
    return known(path, lambda: not path.is_dir() and not _is_newest(run, attempt), unknown=False)


def has_claim(run: RunDir, attempt: int) -> bool:
    """Tell whether the claim of `attempt` is surely there."""
    path = claim_path(run, attempt)
    return known(path, path.is_dir, unknown=False)


def _is_newest(run: RunDir, attempt: int) -> bool:
    return max([Ledger.read(run).newest_number, *claims(run)]) <= attempt


def claim_again(run: RunDir, attempt: int) -> None:
    """Make a claim again that was swept away. A newer attempt sees it and takes it away, or is seen, whoever is first."""
    for path in (
        run.checkpoints,
        claim_path(run, attempt),
    ):  # without its parents, which a mount that is away would take
        with suppress(FileExistsError):
            make_directory(path)
    if not _is_newest(run, attempt):
        delete_directory(claim_path(run, attempt))
        raise FencedError(f"{run.name} was taken over by another attempt.")


def release(run: RunDir, attempt: int) -> None:
    """Give up the claim of an attempt that is the last for now."""
    delete_directory(claim_path(run, attempt))


def claims(run: RunDir) -> list[int]:
    """Return the attempts that have claimed the run and were not ousted, oldest first; killed ones too."""
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except FileNotFoundError:
        return []
    matches = (_CLAIM.fullmatch(name) for name in names)
    return sorted(int(match.group(1)) for match in matches if match)


def remove_leftovers(run: RunDir) -> list[str]:
    """Delete what killed writers and deleters left half-done; the caller is the run's only writer."""
    leftovers = sorted(path for path in run.checkpoints.glob("*.tmp") if path.is_dir())
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in leftovers]
